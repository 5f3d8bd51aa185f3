//! Float operations.

use burn_backend::backend::ExecutionError;
use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, DeviceOps, Distribution, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};

use super::arithmetic::{power, product, sum};
use super::{Call, Op, float_ops, measuring_ops, op, scalar_ops};
use crate::autodiff::tape::{self, Arithmetic};
use crate::autodiff::{leaves, seed};
use crate::device::{DeviceContext, registered};
use crate::policy::{Class, HalfSupport, Mode, holds, is_half};
use crate::precision::{half_wanted, keeps_dtypes};
use crate::tensor::{TensorFlags, converted, to_user_data};
use crate::{Amp, AmpTensor};

impl<B: Backend> FloatTensorOps<Self> for Amp<B> {
    // Creation in the requested dtype.

    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        registered::<B>(device);
        AmpTensor::plain(B::float_from_data(data, device.inner()))
    }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let device = device.inner();
        registered::<B>(device);
        let flags = match distribution {
            Distribution::Bernoulli(_) => TensorFlags::BINARY,
            _ => TensorFlags::empty(),
        };
        if !is_half(dtype.into()) {
            return AmpTensor::new(B::float_random(shape, distribution, device, dtype), flags);
        }
        let drawn = B::float_random(shape, distribution, device, FloatDType::F32);
        AmpTensor::new(converted::<B>(drawn, dtype), flags)
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = device.inner();
        let made = create(device, dtype, |dtype| B::float_zeros(shape, device, dtype));
        constant(made)
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = device.inner();
        // The initial gradient of a scaled backward pass.
        if !B::ad_enabled(device)
            && let Some(scale) = seed::take()
        {
            return create(device, dtype, |dtype| {
                B::float_full(shape, scale.into(), device, dtype)
            });
        }
        let made = create(device, dtype, |dtype| B::float_ones(shape, device, dtype));
        constant(made)
    }

    fn float_full(
        shape: Shape,
        fill_value: Scalar,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let device = device.inner();
        let made = create(device, dtype, |dtype| {
            B::float_full(shape, fill_value, device, dtype)
        });
        match held_by_half(fill_value) {
            true => constant(made),
            false => made,
        }
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = device.inner();
        let made = create(device, dtype, |dtype| B::float_empty(shape, device, dtype));
        // Its values do not matter: others are written over them.
        constant(made)
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
        let mut flags = tensor.flags() & (TensorFlags::GRADIENT | TensorFlags::FROM_F16);
        let half = tensor.dtype();
        let exact = dtype == FloatDType::F32
            && is_half(half)
            && !keeps_dtypes()
            && DeviceContext::of::<B>(&tensor.device()).mode == Mode::On(half);
        if exact {
            flags |= TensorFlags::exact(half);
        }
        let scaled = tensor.scaled().cloned();
        AmpTensor::new(tape::into_dtype(tensor, dtype.into()), flags).with_scaled(scaled)
    }

    // Gradients.

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let flags = tensor.flags();
        let wanted = B::float_is_require_grad(&tensor.primitive);
        let detached = AmpTensor::new(B::float_detach(tensor.into_primitive()), flags);
        match wanted {
            true => remembered(detached),
            false => detached,
        }
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        if require_grad && B::float_is_require_grad(&tensor.primitive) {
            return tensor;
        }
        let flags = tensor.flags() & TensorFlags::DEMOTED;
        let primitive = B::float_set_require_grad(tensor.into_primitive(), require_grad);
        let wanted = B::float_is_require_grad(&primitive);
        let tensor = AmpTensor::new(primitive, flags);
        match wanted {
            true => remembered(tensor),
            false => tensor,
        }
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        B::float_is_require_grad(&tensor.primitive)
    }

    // Arithmetic.

    #[inline(never)]
    fn float_add(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        match half_wanted() {
            true => sum(op!(float_add), lhs, rhs, B::float_add),
            false => AmpTensor::plain(B::float_add(lhs.into_primitive(), rhs.into_primitive())),
        }
    }

    #[inline(never)]
    fn float_sub(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        match half_wanted() {
            true => sum(op!(float_sub), lhs, rhs, B::float_sub),
            false => AmpTensor::plain(B::float_sub(lhs.into_primitive(), rhs.into_primitive())),
        }
    }

    #[inline(never)]
    fn float_mul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        match half_wanted() {
            true => product(Arithmetic::Mul, op!(float_mul), lhs, rhs),
            false => AmpTensor::plain(B::float_mul(lhs.into_primitive(), rhs.into_primitive())),
        }
    }

    #[inline(never)]
    fn float_div(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        match half_wanted() {
            true => product(Arithmetic::Div, op!(float_div), lhs, rhs),
            false => AmpTensor::plain(B::float_div(lhs.into_primitive(), rhs.into_primitive())),
        }
    }

    #[inline(never)]
    fn float_powi_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> {
        match half_wanted() {
            true => power(op!(float_powi_scalar), lhs, rhs),
            false => AmpTensor::plain(B::float_powi_scalar(lhs.into_primitive(), rhs)),
        }
    }

    // From float tensors to a float tensor.

    float_ops! {
        float_matmul [lhs, rhs] ();
        float_cross [lhs, rhs] (dim: usize);

        float_remainder [lhs, rhs] ();
        float_atan2 [lhs, rhs] ();
        float_powf [lhs, rhs] ();
        float_powi [lhs] (rhs: IntTensor<Self>);
        float_powi_scalar_impl [lhs] (rhs: Scalar);
        float_powf_scalar [tensor] (value: Scalar);
        float_powf_scalar_impl [tensor] (value: Scalar);

        float_neg [tensor] ();
        float_recip [tensor] ();
        float_exp [tensor] ();
        float_log [tensor] ();
        float_log1p [tensor] ();
        float_sqrt [tensor] ();
        float_abs [tensor] ();
        float_sign [tensor] ();
        float_cos [tensor] ();
        float_sin [tensor] ();
        float_tan [tensor] ();
        float_cosh [tensor] ();
        float_sinh [tensor] ();
        float_tanh [tensor] ();
        float_acos [tensor] ();
        float_acosh [tensor] ();
        float_asin [tensor] ();
        float_asinh [tensor] ();
        float_atan [tensor] ();
        float_atanh [tensor] ();
        float_erf [tensor] ();
        float_round [tensor] ();
        float_floor [tensor] ();
        float_ceil [tensor] ();
        float_trunc [tensor] ();

        float_sum [tensor] ();
        float_sum_dim [tensor] (dim: usize);
        float_prod [tensor] ();
        float_prod_dim [tensor] (dim: usize);
        float_mean [tensor] ();
        float_mean_dim [tensor] (dim: usize);
        float_cumsum [tensor] (dim: usize);
        float_cumprod [tensor] (dim: usize);
        float_cummin [tensor] (dim: usize);
        float_cummax [tensor] (dim: usize);
        float_max [tensor] ();
        float_max_dim [tensor] (dim: usize);
        float_max_abs [tensor] ();
        float_max_abs_dim [tensor] (dim: usize);
        float_min [tensor] ();
        float_min_dim [tensor] (dim: usize);
        float_topk [tensor] (dim: usize, k: usize);
        float_sort [tensor] (dim: usize, descending: bool);

        float_repeat_dim [tensor] (dim: usize, times: usize);
        float_transpose [tensor] ();
        float_swap_dims [tensor] (dim1: usize, dim2: usize);
        float_permute [tensor] (axes: &[usize]);
        float_flip [tensor] (axes: &[usize]);
        float_reshape [tensor] (shape: Shape);
        float_expand [tensor] (shape: Shape);
        float_slice [tensor] (slices: &[Slice]);
        float_select [tensor] (dim: usize, indices: IntTensor<Self>);
        float_gather_nd [data] (indices: IntTensor<Self>);
    }

    scalar_ops! {
        float_add_scalar [lhs] (rhs) -> FloatTensor;
        float_sub_scalar [lhs] (rhs) -> FloatTensor;
        float_mul_scalar [lhs] (rhs) -> FloatTensor;
        float_div_scalar [lhs] (rhs) -> FloatTensor;
        float_remainder_scalar [lhs] (rhs) -> FloatTensor;
        float_clamp_min [tensor] (min) -> FloatTensor;
        float_clamp_max [tensor] (max) -> FloatTensor;
        float_clamp [tensor] (min, max) -> FloatTensor;
        float_equal_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
        float_not_equal_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
        float_greater_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
        float_greater_equal_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
        float_lower_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
        float_lower_equal_elem [lhs] (rhs) -> BoolTensor, out_dtype: BoolDType;
    }

    measuring_ops! {
        float_equal [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_not_equal [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_greater [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_greater_equal [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_lower [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_lower_equal [lhs, rhs] (out_dtype: BoolDType) -> BoolTensor;
        float_any [tensor] (out_dtype: BoolDType) -> BoolTensor;
        float_any_dim [tensor] (dim: usize, out_dtype: BoolDType) -> BoolTensor;
        float_all [tensor] (out_dtype: BoolDType) -> BoolTensor;
        float_all_dim [tensor] (dim: usize, out_dtype: BoolDType) -> BoolTensor;
        float_is_nan [tensor] (out_dtype: BoolDType) -> BoolTensor;
        float_is_inf [tensor] (out_dtype: BoolDType) -> BoolTensor;
        float_into_int [tensor] (out_dtype: IntDType) -> IntTensor;
        float_argmax [tensor] (dim: usize, out_dtype: IntDType) -> IntTensor;
        float_argmin [tensor] (dim: usize, out_dtype: IntDType) -> IntTensor;
        float_argtopk [tensor] (dim: usize, k: usize, out_dtype: IntDType) -> IntTensor;
        float_argsort [tensor] (dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor;
    }

    // Operations with signatures of their own.

    fn float_mask_fill(
        tensor: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        value: Scalar,
    ) -> FloatTensor<Self> {
        let call = Call::with_scalars(op!(float_mask_fill), &tensor, &[value]);
        let tensor = call.operand(tensor);
        call.result(call.run(|| B::float_mask_fill(tensor, mask, value)))
    }

    fn float_mask_where(
        tensor: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(float_mask_where), &[&tensor, &value]);
        let (tensor, value) = (call.operand(tensor), call.operand(value));
        call.result(call.run(|| B::float_mask_where(tensor, mask, value)))
    }

    fn float_gather(
        dim: usize,
        tensor: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(float_gather), &[&tensor]);
        let tensor = call.operand(tensor);
        call.result(call.run(|| B::float_gather(dim, tensor, indices)))
    }

    fn float_scatter_add(
        dim: usize,
        tensor: FloatTensor<Self>,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(float_scatter_add), &[&tensor, &value]);
        let (tensor, value) = (call.operand(tensor), call.operand(value));
        call.result(call.run(|| B::float_scatter_add(dim, tensor, indices, value)))
    }

    fn float_select_add(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(float_select_add), &[&tensor, &value]);
        let (tensor, value) = (call.operand(tensor), call.operand(value));
        call.result(call.run(|| B::float_select_add(tensor, dim, indices, value)))
    }

    fn float_scatter_nd(
        data: FloatTensor<Self>,
        indices: IntTensor<Self>,
        values: FloatTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> FloatTensor<Self> {
        let named = match reduction {
            IndexingUpdateOp::Add | IndexingUpdateOp::Mul => {
                Op::new("float_scatter_nd", Class::Fp32)
            }
            _ => op!(float_scatter_nd),
        };
        let call = Call::new(named, &[&data, &values]);
        let (data, values) = (call.operand(data), call.operand(values));
        call.result(call.run(|| B::float_scatter_nd(data, indices, values, reduction)))
    }

    fn float_slice_assign(
        tensor: FloatTensor<Self>,
        slices: &[Slice],
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(float_slice_assign), &[&tensor, &value]);
        let (tensor, value) = (call.operand(tensor), call.operand(value));
        call.result(call.run(|| B::float_slice_assign(tensor, slices, value)))
    }

    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        let call = Call::new(op!(float_cat), &tensors.iter().collect::<Vec<_>>());
        let tensors = tensors.into_iter().map(|t| call.operand(t)).collect();
        call.result(call.run(|| B::float_cat(tensors, dim)))
    }

    fn float_max_dim_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let call = Call::new(op!(float_max_dim_with_indices), &[&tensor]);
        let tensor = call.operand(tensor);
        let (values, indices) =
            call.run(|| B::float_max_dim_with_indices(tensor, dim, indices_dtype));
        (call.result(values), indices)
    }

    fn float_min_dim_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let call = Call::new(op!(float_min_dim_with_indices), &[&tensor]);
        let tensor = call.operand(tensor);
        let (values, indices) =
            call.run(|| B::float_min_dim_with_indices(tensor, dim, indices_dtype));
        (call.result(values), indices)
    }

    fn float_sort_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        descending: bool,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let call = Call::new(op!(float_sort_with_indices), &[&tensor]);
        let tensor = call.operand(tensor);
        let (values, indices) =
            call.run(|| B::float_sort_with_indices(tensor, dim, descending, indices_dtype));
        (call.result(values), indices)
    }

    fn float_unfold(
        tensor: FloatTensor<Self>,
        dim: usize,
        size: usize,
        step: usize,
    ) -> FloatTensor<Self> {
        let call = Call::summed_backward(op!(float_unfold), &tensor);
        let tensor = call.operand(tensor);
        call.result(call.run(|| B::float_unfold(tensor, dim, size, step)))
    }

    fn float_grid_sample_2d(
        tensor: FloatTensor<Self>,
        grid: FloatTensor<Self>,
        options: GridSampleOptions,
    ) -> FloatTensor<Self> {
        let call = Call::composed(op!(float_grid_sample_2d), &[&tensor, &grid]);
        let (tensor, grid) = (call.operand(tensor), call.operand(grid));
        call.result(call.run(|| B::float_grid_sample_2d(tensor, grid, options)))
    }
}

/// Creates a tensor in the requested dtype. If the device only stores that dtype and multiplies
/// matrices in it, the tensor is created in FP32 and cast.
pub(super) fn create<B: Backend>(
    device: &B::Device,
    dtype: FloatDType,
    make: impl FnOnce(FloatDType) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let support = registered::<B>(device);
    let only_stored =
        is_half(dtype.into()) && support.of(dtype.into()) == HalfSupport::Contractions;
    AmpTensor::plain(match only_stored {
        true => converted::<B>(make(FloatDType::F32), dtype),
        false => make(dtype),
    })
}

/// Flags a tensor of one value that fits in both half dtypes: in FP32 it follows half tensors.
pub(super) fn constant<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor.with_flags(TensorFlags::CONSTANT),
        _ => tensor,
    }
}

fn held_by_half(value: Scalar) -> bool {
    let value = value.elem::<f64>();
    holds(DType::F16, value) && holds(DType::BF16, value)
}

/// Remembers a leaf, so that the backward pass finds its gradient.
fn remembered<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    leaves::remember(&tensor);
    tensor
}
