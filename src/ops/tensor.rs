//! Float operations.

use burn_backend::backend::ExecutionError;
use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, DeviceOps, Distribution, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};

use super::activation::sigmoidal;
use super::arithmetic::{power, product, reduction, sum};
use super::module::row_or_column_apart;
use super::{Call, by_policy, checked, float_ops, is_watched, libtorch, op, own_ops};
use crate::autodiff::tape::{self, Arithmetic, Reduction, Sigmoidal, Sign, registered};
use crate::autodiff::{leaves, master, reuse, seed};
use crate::device::DeviceContext;
use crate::diagnostics::anomaly;
use crate::policy::{Class, HalfSupport, Mode, Op, follows_half, holds, is_half, largest_within};
use crate::precision::{half_wanted, in_kernel, keeps_dtypes};
use crate::tensor::{TensorFlags, converted, to_user_data};
use crate::{Amp, AmpTensor};

impl<B: Backend> FloatTensorOps<Self> for Amp<B> {
    // Creation in the requested dtype.

    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        registered::<B>(device);
        AmpTensor::plain(in_kernel(|| B::float_from_data(data, device.inner())))
    }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let device = device.inner();
        let asked = DType::from(dtype);
        let support = registered::<B>(device).of(asked);
        let is_binary = matches!(distribution, Distribution::Bernoulli(_));
        let flags = if is_binary {
            TensorFlags::BINARY
        } else {
            TensorFlags::empty()
        };
        // Burn's backends draw zero or one before they convert, so every dtype gets the same values.
        if !is_half(asked) || is_binary && support == HalfSupport::Arithmetic {
            let draw = || B::float_random(shape, distribution, device, dtype);
            return AmpTensor::new(in_kernel(draw), flags);
        }
        let largest = match distribution {
            Distribution::Default => largest_within(asked, 0.0, 1.0),
            Distribution::Uniform(low, high) => largest_within(asked, low, high),
            Distribution::Normal(..) | Distribution::Bernoulli(_) => None,
        };
        let draw = || {
            let drawn = B::float_random(shape, distribution, device, FloatDType::F32);
            match largest {
                Some(largest) => B::float_clamp_max(drawn, largest.into()),
                None => drawn,
            }
        };
        let drawn = in_kernel(draw);
        AmpTensor::new(converted::<B>(drawn, dtype), flags)
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |device: &_, dtype| B::float_zeros(shape, device, dtype);
        constant(create(device, dtype, make))
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        // The initial gradient of a backward pass.
        if !B::ad_enabled(device.inner())
            && let Some(scale) = seed::take()
        {
            let make = |device: &_, dtype| match scale {
                1.0 => B::float_ones(shape, device, dtype),
                _ => B::float_full(shape, scale.into(), device, dtype),
            };
            return create(device, dtype, make).with_flags(TensorFlags::BACKWARD);
        }
        let make = |device: &_, dtype| B::float_ones(shape, device, dtype);
        constant(create(device, dtype, make))
    }

    fn float_full(
        shape: Shape,
        fill_value: Scalar,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        // The dtype asked for may be that of a tensor that the policy made half, as in `x.full_like(-1e9)`.
        let is_held = || holds(DType::from(dtype), fill_value.elem());
        let dtype = match !half_wanted() || is_held() {
            true => dtype,
            false => FloatDType::F32,
        };
        let make = |device: &_, dtype| B::float_full(shape, fill_value, device, dtype);
        let made = create(device, dtype, make);
        if follows_half::<DType>(fill_value.elem()) {
            constant(made)
        } else {
            made
        }
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |device: &_, dtype| B::float_empty(shape, device, dtype);
        // The values do not matter: they will be overwritten.
        constant(create(device, dtype, make))
    }

    // Devices and read-back.

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        let demoted = tensor.is_demoted();
        let data = B::float_into_data(tensor.into_primitive()).await?;
        Ok(to_user_data(data, demoted))
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        let device = device.inner();
        if tensor.device() == *device && !B::ad_enabled(device) {
            return tensor;
        }
        registered::<B>(device);
        let (flags, scaled) = (tensor.flags(), tensor.scaled().cloned());
        AmpTensor::new(B::float_to_device(tensor.into_primitive(), device), flags)
            .with_scaled(scaled)
    }

    /// The user's own cast: the result counts as the user's choice, half or not.
    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let mut flags = tensor.flags() & TensorFlags::CAST;
        let half = tensor.dtype();
        if dtype == FloatDType::F32
            && is_half(half)
            && !keeps_dtypes()
            && DeviceContext::of::<B>(&tensor.device()).mode == Mode::On(half)
        {
            flags |= TensorFlags::exact(half);
        }
        let scaled = tensor.scaled().cloned();
        let watched = is_half(DType::from(dtype)) && half_wanted() && watches_cast(&tensor);
        // The half copy of a leaf is a leaf, and a user's copy is not.
        let cast = if B::float_is_require_grad(&tensor.primitive) && tensor.dtype() != dtype.into()
        {
            tape::cast::<B>(tensor.into_primitive(), dtype.into())
        } else {
            reuse::into_dtype(tensor, dtype.into())
        };
        if watched {
            anomaly::result::<B>("float_cast", Class::Keep, &cast);
        }
        AmpTensor::new(cast, flags).with_scaled(scaled)
    }

    // Gradients.

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let flags = tensor.flags();
        let wanted = B::float_is_require_grad(&tensor.primitive);
        let detached = AmpTensor::new(B::float_detach(tensor.into_primitive()), flags);
        remembered(detached, wanted)
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        let tensor = if require_grad {
            master::trained(tensor)
        } else {
            tensor
        };
        if require_grad && B::float_is_require_grad(&tensor.primitive) {
            return tensor;
        }
        let is_used_in_half = tensor.flags().contains(TensorFlags::USED_IN_HALF);
        let flags = tensor.flags() & (TensorFlags::DEMOTED | TensorFlags::WEIGHT);
        let primitive = B::float_set_require_grad(tensor.into_primitive(), require_grad);
        let wanted = B::float_is_require_grad(&primitive);
        if wanted && is_used_in_half {
            tape::cast_ahead::<B>(&primitive);
        }
        remembered(AmpTensor::new(primitive, flags), wanted)
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        B::float_is_require_grad(&tensor.primitive)
    }

    own_ops! {
        float_add([lhs], [rhs]) -> FloatTensor => sum(Sign::Plus, op!(float_add), lhs, rhs);
        float_sub([lhs], [rhs]) -> FloatTensor => sum(Sign::Minus, op!(float_sub), lhs, rhs);
        float_mul([lhs], [rhs]) -> FloatTensor => product(Arithmetic::Mul, op!(float_mul), lhs, rhs);
        float_div([lhs], [rhs]) -> FloatTensor => product(Arithmetic::Div, op!(float_div), lhs, rhs);
        float_powi_scalar([lhs], {rhs}) -> FloatTensor => power(op!(float_powi_scalar), lhs, rhs);
        float_sum([tensor]) -> FloatTensor => reduction(Reduction::Sum, op!(float_sum), tensor, None, B::float_sum);
        float_sum_dim([tensor], dim: usize) -> FloatTensor => reduction(Reduction::Sum, op!(float_sum_dim), tensor, Some(dim), |t| B::float_sum_dim(t, dim));
        float_mean([tensor]) -> FloatTensor => reduction(Reduction::Mean, op!(float_mean), tensor, None, B::float_mean);
        float_mean_dim([tensor], dim: usize) -> FloatTensor => reduction(Reduction::Mean, op!(float_mean_dim), tensor, Some(dim), |t| B::float_mean_dim(t, dim));
        float_tanh([tensor]) -> FloatTensor => sigmoidal(Sigmoidal::Tanh, op!(float_tanh), tensor);
        float_slice([tensor], slices: &[Slice]) -> FloatTensor => slice(tensor, slices);
        float_transpose([tensor]) -> FloatTensor => permuted(op!(float_transpose), tensor, |axes| { let last = axes.len() - 1; axes.swap(last - 1, last) }, B::float_transpose);
        float_swap_dims([tensor], dim1: usize, dim2: usize) -> FloatTensor => permuted(op!(float_swap_dims), tensor, |axes| axes.swap(dim1, dim2), |t| B::float_swap_dims(t, dim1, dim2));
        float_permute([tensor], axes: &[usize]) -> FloatTensor => permuted(op!(float_permute), tensor, |order| order.copy_from_slice(axes), |t| B::float_permute(t, axes));
        float_scatter_nd([data], indices: IntTensor<Self>, [values], reduction: IndexingUpdateOp) -> FloatTensor => scatter(data, indices, values, reduction);
    }

    float_ops! {
        float_scatter_add(dim: usize, [tensor], indices: IntTensor<Self>, [value]) -> FloatTensor;
        float_select_add([tensor], dim: usize, indices: IntTensor<Self>, [value]) -> FloatTensor;
        float_clamp([tensor], {min}, {max}) -> FloatTensor;
    }

    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let [product] = checked(op!(float_matmul), [lhs, rhs], |[lhs, rhs]| {
            [row_or_column_apart::<B>(B::float_matmul(lhs, rhs))]
        });
        product
    }

    #[inline(never)]
    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        if !half_wanted() {
            let tensors = tensors.into_iter().map(AmpTensor::into_primitive);
            return AmpTensor::plain(B::float_cat(tensors.collect(), dim));
        }
        by_policy(|| {
            let operands: Vec<_> = tensors.iter().map(AmpTensor::operand).collect();
            let all: Vec<_> = tensors.iter().collect();
            let call = Call::of(op!(float_cat), &all, &operands, &[]);
            let tensors = tensors.into_iter().map(|t| call.operand(t)).collect();
            call.result(call.run(|| B::float_cat(tensors, dim)))
        })
    }

    burn_amp_core::float_operations! { float_ops }
}

/// A slice. The gradient of a concatenation has many.
fn slice<B: Backend>(tensor: AmpTensor<B>, slices: &[Slice]) -> AmpTensor<B> {
    if tensor.is_cast_later() {
        return tensor.moved(|half| B::float_slice(half, slices));
    }
    let [slice] = checked(op!(float_slice), [tensor], |[t]| {
        [B::float_slice(t, slices)]
    });
    slice
}

/// A view with its dimensions in another order: `reorder` gets 0, 1, 2 ..
fn permuted<B: Backend>(
    op: Op,
    tensor: AmpTensor<B>,
    reorder: impl FnOnce(&mut [usize]),
    permute: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&tensor]);
    let tensor = call.operand(tensor);
    call.result(call.run(|| {
        if !libtorch::computes::<B>() {
            return permute(tensor);
        }
        let mut axes: Vec<_> = (0..tensor.rank()).collect();
        reorder(&mut axes);
        libtorch::permuted::<B>(tensor, &axes)
    }))
}

/// Whether anomaly detection checks a cast to half, of a gradient or by the user.
fn watches_cast<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    let device = tensor.device();
    let watched = is_watched(&DeviceContext::of::<B>(&device), &[tensor], &device);
    if watched {
        anomaly::operand(tensor);
    }
    watched
}

/// The values and their indices.
type WithIndices<B> = (FloatTensor<B>, IntTensor<B>);

fn scatter<B: Backend>(
    data: AmpTensor<B>,
    indices: IntTensor<B>,
    values: AmpTensor<B>,
    reduction: IndexingUpdateOp,
) -> AmpTensor<B> {
    let op = match reduction {
        IndexingUpdateOp::Add | IndexingUpdateOp::Mul => op!(float_scatter_nd).that_accumulates(),
        _ => op!(float_scatter_nd),
    };
    let call = Call::new(op, [&data, &values]);
    let (data, values) = (call.operand(data), call.operand(values));
    call.result(call.run(|| B::float_scatter_nd(data, indices, values, reduction)))
}

/// Creates a tensor in the requested dtype, on the device without its own autodiff. If the device
/// only stores that dtype and multiplies matrices in it, the tensor is created in FP32 and cast.
pub(super) fn create<B: Backend>(
    device: &B::Device,
    dtype: FloatDType,
    make: impl FnOnce(&B::Device, FloatDType) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let device = device.inner();
    let support = registered::<B>(device);
    let asked = DType::from(dtype);
    let only_stored = is_half(asked) && support.of(asked) == HalfSupport::Contractions;
    AmpTensor::plain(if only_stored {
        converted::<B>(in_kernel(|| make(device, FloatDType::F32)), dtype)
    } else {
        in_kernel(|| make(device, dtype))
    })
}

/// Flags an FP32 tensor of one value that fits in both half dtypes: it follows half operands.
pub(super) fn constant<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor.with_flags(TensorFlags::CONSTANT),
        _ => tensor,
    }
}

/// Remembers a tensor whose gradient is wanted, so that the backward pass finds it.
fn remembered<B: Backend>(tensor: AmpTensor<B>, wanted: bool) -> AmpTensor<B> {
    if wanted {
        leaves::remember(&tensor);
    }
    tensor
}
