//! Float operations.

use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::backend::ExecutionError;
use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, DeviceOps, Distribution, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};

use super::activation::tanh;
use super::arithmetic::{power, product, reduction, sum};
use super::leaving::Leaving;
use super::unrounded::{assigned, moved_ops, negative, sigmoid_in_fp32, with_scalar, with_scalars};
use crate::autodiff::recorded::{Product, Reduced, Sum};
use crate::autodiff::{seed, trained};
use crate::call::{
    Call, below, by_policy, casted, constant, create, ends_pass, float_ops, in_use, mask_fill,
    matmul, moved, of_program, op, own_ops, permuted, transpose, zeros,
};
use crate::device::DeviceContext;
use crate::policy::{
    self, HalfSupport, Mode, follows_half, holds, holds_exactly, is_half, largest_within,
};
use crate::precision::{half_wanted, in_kernel, keeps_dtypes};
use crate::tensor::{Function, Side, TensorFlags, converted, learned};
use crate::{Amp, AmpTensor};

impl<B: Backend, S: Side<B>> FloatTensorOps<Self> for Amp<B, S> {
    // Creation in the requested dtype.

    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        in_use::<B, S>(device);
        AmpTensor::created(in_kernel(|| B::float_from_data(data, device.inner())))
    }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let device = device.inner();
        let asked = DType::from(dtype);
        let support = in_use::<B, S>(device).of(asked);
        let is_binary = matches!(distribution, Distribution::Bernoulli(_));
        let flags = if is_binary {
            TensorFlags::BINARY
        } else {
            TensorFlags::empty()
        };
        // Burn's backends draw zero or one before they convert, so every dtype gets the same values.
        let (dtype, by_policy) = of_program::<B>(device, dtype);
        let flags = flags | by_policy;
        if !is_half(DType::from(dtype)) || is_binary && support == HalfSupport::Arithmetic {
            let draw = || B::float_random(shape, distribution, device, dtype);
            return AmpTensor::created(below::<B, S, _>(draw)).and(flags);
        }
        let largest = match distribution {
            Distribution::Default => largest_within(asked, 0.0, 1.0),
            Distribution::Uniform(low, high) => largest_within(asked, low, high),
            Distribution::Normal(..) | Distribution::Bernoulli(_) => None,
        };
        let drawn =
            below::<B, S, _>(|| B::float_random(shape, distribution, device, FloatDType::F32));
        // A logarithm of a number near 0 or 1 needs the digits that half rounds away.
        let within = match largest {
            Some(largest) => below::<B, S, _>(|| B::float_clamp_max(drawn.clone(), largest.into())),
            None => drawn.clone(),
        };
        let half = AmpTensor::created(converted::<B, S>(within, asked)).and(flags);
        match by_policy.is_empty() {
            true => half,
            false => half.and(TensorFlags::DRAWN).with_wide(Some(drawn)),
        }
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |device: &_, dtype| B::float_zeros(shape, device, dtype);
        zeros(create(device, dtype, make))
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        // The initial gradient of a backward pass.
        if !S::RECORDS
            && let Some(scale) = seed::take()
        {
            let make = |device: &_, dtype| match scale {
                1.0 => B::float_ones(shape, device, dtype),
                _ => B::float_full(shape, scale.into(), device, dtype),
            };
            return create(device, dtype, make).with_flags(TensorFlags::BACKWARD);
        }
        let make = |device: &_, dtype| B::float_ones(shape, device, dtype);
        constant(create(device, dtype, make).and(TensorFlags::ONES))
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
        let is_filled = is_half(made.dtype()) && !holds_exactly(made.dtype(), fill_value.elem());
        let filled = if is_filled {
            TensorFlags::FILLED
        } else {
            TensorFlags::empty()
        };
        let made = made.and(filled);
        match fill_value.elem::<f64>() {
            1.0 => constant(made.and(TensorFlags::ONES)),
            value if value == 0.0 || value.is_infinite() => zeros(made),
            value if follows_half::<DType>(value) => constant(made),
            _ => made,
        }
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |device: &_, dtype| B::float_empty(shape, device, dtype);
        // The values do not matter: they will be overwritten.
        constant(create(device, dtype, make))
    }

    // Devices and read-back.

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        ends_pass::<B, S>(|| tensor.device());
        let tensor = tensor.computed_in_fp32();
        let leaving = Leaving::of(&tensor);
        let data = B::float_into_data(tensor.into_primitive()).await?;
        Ok(leaving.read(data))
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        let device = device.inner();
        if tensor.device() == *device && !S::RECORDS {
            return tensor;
        }
        in_use::<B, S>(device);
        let scaled = tensor.scaled().cloned();
        let moved = |tensor| B::float_to_device(tensor, device);
        let unrounded = tensor
            .unrounded()
            .map(|of| of.elsewhere(moved, |mask| B::bool_to_device(mask, device)));
        tensor
            .map(moved)
            .with_scaled(scaled)
            .with_unrounded(unrounded)
    }

    /// The user's own cast: the result counts as the user's choice, half or not. But what the policy computed stays the
    /// policy's if it is cast to the policy's half dtype: programs ask for `x.dtype()`.
    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let mut flags = tensor.flags() & TensorFlags::CAST;
        let half = tensor.dtype();
        let is_unrounded = tensor.unrounded().is_some() && !is_half(DType::from(dtype));
        // An optimizer may keep its state in half.
        let computed = match tensor.flags().contains(TensorFlags::GRADIENT) {
            true => TensorFlags::empty(),
            false => tensor.flags() & TensorFlags::DEMOTED,
        };
        let (dtype, by_policy) = match computed.is_empty() {
            true => (dtype, computed),
            false => of_program::<B>(&tensor.device(), dtype),
        };
        let is_half = is_half(DType::from(dtype));
        flags |= if is_half { by_policy } else { computed };
        let statistic = (is_half && !by_policy.is_empty() && may_be_statistic(&tensor))
            .then(|| tensor.unshared());
        let mut source = None;
        if dtype == FloatDType::F32
            && policy::is_half(half)
            && !is_unrounded
            && !tensor.flags().contains(TensorFlags::DRAWN)
            && !keeps_dtypes()
            && DeviceContext::of::<B>(&tensor.device()).mode == Mode::On(half)
        {
            flags |= TensorFlags::exact(half);
            source = S::is_tracked(&tensor.primitive).then(|| tensor.primitive.clone());
        }
        // The half copy of a leaf is a leaf, and a user's copy is not.
        let is_leaf = B::float_is_require_grad(&tensor.primitive);
        let cast = casted(tensor, dtype.into(), flags, |tensor, dtype| {
            match is_leaf && tensor.dtype() != dtype {
                true => S::cast(tensor.into_primitive(), dtype),
                false => S::into_dtype(tensor, dtype),
            }
        });
        match statistic {
            Some(wide) => cast.with_statistic(wide),
            None => cast.with_source(source),
        }
    }

    // Gradients.

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let wanted = B::float_is_require_grad(&tensor.primitive);
        let unrounded = tensor.unrounded().map(|of| of.map(detached::<B>));
        let detached = tensor.map(B::float_detach).with_unrounded(unrounded);
        if wanted {
            S::remember(&detached);
        }
        detached
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        let tensor = if require_grad {
            trained::trained(tensor)
        } else {
            tensor
        };
        if require_grad && B::float_is_require_grad(&tensor.primitive) {
            return tensor.and(TensorFlags::LEARNED);
        }
        let is_used_in_half = tensor.flags().contains(TensorFlags::USED_IN_HALF);
        // The result is not on the tape: no value that FP32 computes for it is, either.
        let unrounded = tensor.unrounded().map(|of| of.map(detached::<B>));
        // A parameter in FP32 is data.
        let kept = match is_half(tensor.dtype()) {
            true => TensorFlags::DEMOTED | TensorFlags::WEIGHT,
            false => TensorFlags::WEIGHT,
        };
        let flags = tensor.flags() & kept | TensorFlags::LEARNED;
        let primitive = B::float_set_require_grad(tensor.into_primitive(), require_grad);
        let wanted = B::float_is_require_grad(&primitive);
        if wanted && is_used_in_half {
            S::cast_ahead(&primitive);
        }
        let tensor = AmpTensor::new(primitive, flags);
        if wanted {
            S::remember(&tensor);
        }
        tensor.with_unrounded(unrounded.filter(|_| !wanted))
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        B::float_is_require_grad(&tensor.primitive)
    }

    own_ops! {
        float_add([lhs], [rhs]) -> FloatTensor => sum(Sum::Plus, op!(float_add), lhs, rhs);
        float_sub([lhs], [rhs]) -> FloatTensor => sum(Sum::Minus, op!(float_sub), lhs, rhs);
        float_mul([lhs], [rhs]) -> FloatTensor => product(Product::Mul, op!(float_mul), lhs, rhs);
        float_div([lhs], [rhs]) -> FloatTensor => product(Product::Div, op!(float_div), lhs, rhs);
        float_matmul([lhs], [rhs]) -> FloatTensor => matmul(lhs, rhs);
        float_neg([tensor]) -> FloatTensor => negative(tensor);
        float_reshape([tensor], shape: Shape) -> FloatTensor => moved(op!(float_reshape), tensor, move |t| B::float_reshape(t, shape.clone()));
        float_add_scalar([lhs], {rhs}) -> FloatTensor => with_scalar(op!(float_add_scalar), lhs, rhs, Function::Plus(rhs.elem()), B::float_add_scalar);
        float_sub_scalar([lhs], {rhs}) -> FloatTensor => with_scalar(op!(float_sub_scalar), lhs, rhs, Function::Plus(-rhs.elem::<f64>()), B::float_sub_scalar);
        float_mul_scalar([lhs], {rhs}) -> FloatTensor => with_scalar(op!(float_mul_scalar), lhs, rhs, Function::Times(rhs.elem()), B::float_mul_scalar);
        float_div_scalar([lhs], {rhs}) -> FloatTensor => with_scalar(op!(float_div_scalar), lhs, rhs, Function::Over(rhs.elem()), B::float_div_scalar);
        float_powi_scalar([lhs], {rhs}) -> FloatTensor => power(op!(float_powi_scalar), lhs, rhs.elem::<i64>().into(), B::float_powi_scalar);
        float_powf_scalar([tensor], {value}) -> FloatTensor => power(op!(float_powf_scalar), tensor, value, B::float_powf_scalar);
        float_sum([tensor]) -> FloatTensor => reduction(Reduced::Sum, op!(float_sum), tensor, None, B::float_sum);
        float_sum_dim([tensor], dim: usize) -> FloatTensor => reduction(Reduced::Sum, op!(float_sum_dim), tensor, Some(dim), |t| B::float_sum_dim(t, dim));
        float_mean([tensor]) -> FloatTensor => reduction(Reduced::Mean, op!(float_mean), tensor, None, B::float_mean);
        float_mean_dim([tensor], dim: usize) -> FloatTensor => reduction(Reduced::Mean, op!(float_mean_dim), tensor, Some(dim), |t| B::float_mean_dim(t, dim));
        float_clamp_min([tensor], {min}) -> FloatTensor => clamp_min(tensor, min);
        float_clamp_max([tensor], {max}) -> FloatTensor => with_scalar(op!(float_clamp_max), tensor, max, Function::AtMost(max.elem()), B::float_clamp_max);
        float_clamp([tensor], {min}, {max}) -> FloatTensor => clamp(tensor, min, max);
        float_mask_fill([tensor], mask: BoolTensor<Self>, {value}) -> FloatTensor => mask_fill(tensor, mask, value);
        float_mask_where([tensor], mask: BoolTensor<Self>, [value]) -> FloatTensor => mask_where(tensor.computed_in_fp32(), mask, value.computed_in_fp32());
        float_slice_assign([tensor], slices: &[Slice], [value]) -> FloatTensor => assigned(tensor, slices, value);
        float_flip([tensor], axes: &[usize]) -> FloatTensor => { let axes = axes.to_vec(); moved(op!(float_flip), tensor, move |t| B::float_flip(t, &axes)) };
        float_tanh([tensor]) -> FloatTensor => tanh(tensor);
        float_slice([tensor], slices: &[Slice]) -> FloatTensor => slice(tensor, slices);
        float_transpose([tensor]) -> FloatTensor => transpose(tensor);
        float_swap_dims([tensor], dim1: usize, dim2: usize) -> FloatTensor => permuted(op!(float_swap_dims), tensor, move |axes| axes.swap(dim1, dim2), move |t| B::float_swap_dims(t, dim1, dim2));
        float_permute([tensor], axes: &[usize]) -> FloatTensor => { let [axes, to] = [axes, axes].map(<[_]>::to_vec); permuted(op!(float_permute), tensor, move |order| order.copy_from_slice(&to), move |t| B::float_permute(t, &axes)) };
        float_scatter_nd([data], indices: IntTensor<Self>, [values], reduction: IndexingUpdateOp) -> FloatTensor => scatter(data, indices, values, reduction);
    }

    float_ops! {
        float_scatter_add(dim: usize, [tensor], indices: IntTensor<Self>, [value]) -> FloatTensor;
        float_select_add([tensor], dim: usize, indices: IntTensor<Self>, [value]) -> FloatTensor;
        float_greater_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
        float_lower_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
    }

    burn_amp_core::moving_operations! { moved_ops }

    #[inline(never)]
    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        if !half_wanted() {
            let learned = learned(&tensors);
            let tensors = tensors.into_iter().map(AmpTensor::into_primitive);
            return AmpTensor::new(B::float_cat(tensors.collect(), dim), learned);
        }
        by_policy(|| {
            // Half would keep nothing of what a confident sigmoid leaves.
            let tensors: Vec<_> = tensors.into_iter().map(sigmoid_in_fp32).collect();
            let operands: Vec<_> = tensors.iter().map(AmpTensor::operand).collect();
            let all: Vec<_> = tensors.iter().collect();
            let call = Call::of(op!(float_cat), &all, &operands, &[]);
            let tensors = tensors.into_iter().map(|t| call.operand(t)).collect();
            call.result(call.run(|| B::float_cat(tensors, dim)))
        })
    }

    burn_amp_core::float_operations! { float_ops }
}

/// A tensor apart from the tape. Burn's detached leaf is a leaf.
fn detached<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_set_require_grad(B::float_detach(tensor), false)
}

/// A lower bound. Warns of the bound that Burn's cross entropy of probabilities takes from the dtype of the
/// probabilities: the root of the smallest normal number is 1e-19 in FP32, and 1/128 in f16.
fn clamp_min<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>, min: Scalar) -> AmpTensor<B, S> {
    let bound: f64 = min.elem();
    let f16s_own = DType::F16.finfo().map(|f16| f16.min_positive.sqrt());
    if tensor.is_demoted() && tensor.dtype() == DType::F16 && f16s_own == Some(bound) {
        static LOGGED: AtomicBool = AtomicBool::new(false);
        if !LOGGED.swap(true, Ordering::Relaxed) {
            log::warn!(
                "burn-amp: clamp_min({bound}) of a tensor that burn-amp computed in f16. Burn's CrossEntropyLoss with \
                 with_logits(false) bounds f16 probabilities so: a target of a smaller probability has a wrong loss \
                 and no gradient. Pass the logits, or the probabilities as probabilities.cast(DType::F32)"
            );
        }
    }
    let function = Function::AtLeast(bound);
    with_scalar(
        op!(float_clamp_min),
        tensor,
        min,
        function,
        B::float_clamp_min,
    )
}

/// A lower and an upper bound.
fn clamp<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    min: Scalar,
    max: Scalar,
) -> AmpTensor<B, S> {
    let bounds = [min.elem(), max.elem()];
    let functions = [Function::AtMost(bounds[1]), Function::AtLeast(bounds[0])];
    let run = |tensor| B::float_clamp(tensor, min, max);
    with_scalars(op!(float_clamp), tensor, &bounds, &functions, run)
}

fn mask_where<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    mask: BoolTensor<B>,
    value: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let call = Call::new(op!(float_mask_where), [&tensor, &value]);
    let (tensor, value) = (call.operand(tensor), call.operand(value));
    call.result(call.run(|| B::float_mask_where(tensor, mask, value)))
}

/// A slice. The gradient of a concatenation has many.
fn slice<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>, slices: &[Slice]) -> AmpTensor<B, S> {
    if tensor.is_cast_later() {
        return tensor.moved(|half| B::float_slice(half, slices));
    }
    let slices = slices.to_vec();
    moved(op!(float_slice), tensor, move |t| {
        B::float_slice(t, &slices)
    })
}

/// The values and their indices.
type WithIndices<B> = (FloatTensor<B>, IntTensor<B>);

fn scatter<B: Backend, S: Side<B>>(
    data: AmpTensor<B, S>,
    indices: IntTensor<B>,
    values: AmpTensor<B, S>,
    reduction: IndexingUpdateOp,
) -> AmpTensor<B, S> {
    let op = match reduction {
        IndexingUpdateOp::Add | IndexingUpdateOp::Mul => op!(float_scatter_nd).that_accumulates(),
        _ => op!(float_scatter_nd),
    };
    let [data, values] = [data, values].map(sigmoid_in_fp32);
    let call = Call::new(op, [&data, &values]);
    let (data, values) = (call.operand(data), call.operand(values));
    call.result(call.run(|| B::float_scatter_nd(data, indices, values, reduction)))
}

/// Whether a tensor may be a statistic of the rows or the channels of another one, to which it is broadcast. The FP32
/// values are kept while the half tensor lives, so they have to be few.
fn may_be_statistic<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> bool {
    const FEW: usize = 1 << 20;
    let shape = tensor.shape();
    // The first dimension may be a batch of one.
    let is_broadcast = shape.num_dims() == 1 || shape.iter().skip(1).any(|length| *length == 1);
    tensor.dtype() == DType::F32 && is_broadcast && shape.num_elements() <= FEW
}
