//! Float operations.

use burn_amp_core::policy::{
    Function, HalfSupport, Mode, Op, TensorFlags, follows_half, is_half, largest_within,
};
use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape,
    Slice, TensorData, TensorMetadata,
};
use burn_std::ops::PadMode;

use super::unrounded::{
    assigned, compared, filled, functions, masked, moved, moved_ops, sigmoid_in_fp32, two_sigmoids,
};
use super::{Call, float_ops, op, own_ops};
use crate::device::{DeviceState, Session, enter};
use crate::tensor::{Mark, Origin, converted, to_client};
use crate::{Amp, AmpTensor};

/// The operation for a write of values into a tensor, by its kind of update.
macro_rules! update_op {
    ($op:ident, $update:ident) => {
        match $update {
            IndexingUpdateOp::Add | IndexingUpdateOp::Mul => op!($op).that_accumulates(),
            IndexingUpdateOp::Assign | IndexingUpdateOp::Min | IndexingUpdateOp::Max => op!($op),
        }
    };
}

impl<B: Backend, P: Session> FloatTensorOps<Self> for Amp<B, P> {
    // Creation in the requested dtype.

    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        AmpTensor::plain(B::float_from_data(data, device))
    }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let _session = enter::<P>();
        let draw = |dtype| B::float_random(shape, distribution, device, dtype);
        // Burn's backends draw zero or one before they convert, so every dtype gets the same noise. The noise
        // of a dropout is kept for the backward pass: half represents it exactly.
        if matches!(distribution, Distribution::Bernoulli(_)) {
            return match half_in_force::<B>(device) {
                Some(half) if dtype == FloatDType::F32 => {
                    AmpTensor::new(draw(half), dtype, TensorFlags::empty())
                        .with_origin(Origin::Noise)
                }
                _ => constant(create::<B>("float_random", device, dtype, draw)),
            };
        }
        if is_half(DType::from(dtype)) {
            let drawn = draw(FloatDType::F32);
            let largest = match distribution {
                Distribution::Default => largest_within(DType::from(dtype), 0.0, 1.0),
                Distribution::Uniform(low, high) => largest_within(DType::from(dtype), low, high),
                Distribution::Normal(..) | Distribution::Bernoulli(_) => None,
            };
            let drawn = match largest {
                Some(largest) => B::float_clamp_max(drawn, largest.into()),
                None => drawn,
            };
            AmpTensor::plain(converted::<B>(drawn, dtype.into(), "float_random"))
        } else {
            AmpTensor::plain(draw(dtype))
        }
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |dtype| B::float_zeros(shape, device, dtype);
        zeros(create::<B>("float_zeros", device, dtype, make))
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |dtype| B::float_ones(shape, device, dtype);
        ones(create::<B>("float_ones", device, dtype, make))
    }

    fn float_full(
        shape: Shape,
        fill_value: Scalar,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let make = |dtype| B::float_full(shape, fill_value, device, dtype);
        let made = create::<B>("float_full", device, dtype, make);
        match fill_value.elem::<f64>() {
            1.0 => ones(made),
            value if value == 0.0 || value.is_infinite() => zeros(made),
            value if follows_half::<DType>(value) => constant(made),
            _ => made,
        }
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let make = |dtype| B::float_empty(shape, device, dtype);
        // The values do not matter: the caller overwrites them.
        constant(create::<B>("float_empty", device, dtype, make))
    }

    // Devices and read-back.

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        let tensor = {
            let _session = enter::<P>();
            tensor.computed_in_fp32("float_into_data")
        };
        let declared = tensor.declared();
        let data = B::float_into_data(tensor.into_primitive()).await?;
        Ok(to_client(data, declared))
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        let support = DeviceState::of::<B>(device).support::<B>(device);
        let tensor = match support.of(tensor.dtype()) {
            // The policy of the source device may have made the tensor half.
            HalfSupport::None => tensor.into_declared("float_to_device"),
            _ => tensor,
        };
        if tensor.device() == *device {
            return tensor;
        }
        tensor.moved(|tensor| B::float_to_device(tensor, device))
    }

    /// The client's own cast: the tensor then has the client's dtype.
    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let marks = tensor.marks();
        // FP64 gets the digits that FP32 has.
        let tensor = match dtype {
            FloatDType::F64 => tensor.into_declared("float_cast"),
            _ => tensor,
        };
        let cast = AmpTensor::plain(if tensor.dtype() == dtype.into() {
            tensor.into_primitive()
        } else {
            B::float_cast(tensor.into_primitive(), dtype)
        });
        cast.with_marks(marks)
    }

    // Gradients, for a backend below that has its own autodiff.

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor.moved(B::float_detach)
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        tensor.moved(|tensor| B::float_set_require_grad(tensor, require_grad))
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        B::float_is_require_grad(&tensor.primitive)
    }

    own_ops! {
        float_neg([tensor]) -> FloatTensor => functions(op!(float_neg), tensor, &[Function::Neg], &[], B::float_neg);
        float_tanh([tensor]) -> FloatTensor => functions(op!(float_tanh), tensor, &[Function::Tanh], &[], B::float_tanh);
        float_add_scalar([lhs], {rhs}) -> FloatTensor => functions(op!(float_add_scalar), lhs, &[Function::Plus(rhs.elem())], &[rhs.elem()], |lhs| B::float_add_scalar(lhs, rhs));
        float_sub_scalar([lhs], {rhs}) -> FloatTensor => functions(op!(float_sub_scalar), lhs, &[Function::Plus(-rhs.elem::<f64>())], &[rhs.elem()], |lhs| B::float_sub_scalar(lhs, rhs));
        float_mul_scalar([lhs], {rhs}) -> FloatTensor => functions(op!(float_mul_scalar), lhs, &[Function::Times(rhs.elem())], &[rhs.elem()], |lhs| B::float_mul_scalar(lhs, rhs));
        float_div_scalar([lhs], {rhs}) -> FloatTensor => functions(op!(float_div_scalar), lhs, &[Function::Over(rhs.elem())], &[rhs.elem()], |lhs| B::float_div_scalar(lhs, rhs));
        float_reshape([tensor], shape: Shape) -> FloatTensor => moved(op!(float_reshape), tensor, move |tensor| B::float_reshape(tensor, shape.clone()));
        float_slice([tensor], slices: &[Slice]) -> FloatTensor => { let slices = slices.to_vec(); moved(op!(float_slice), tensor, move |tensor| B::float_slice(tensor, &slices)) };
        float_transpose([tensor]) -> FloatTensor => moved(op!(float_transpose), tensor, B::float_transpose);
        float_swap_dims([tensor], dim1: usize, dim2: usize) -> FloatTensor => moved(op!(float_swap_dims), tensor, move |tensor| B::float_swap_dims(tensor, dim1, dim2));
        float_permute([tensor], axes: &[usize]) -> FloatTensor => { let axes = axes.to_vec(); moved(op!(float_permute), tensor, move |tensor| B::float_permute(tensor, &axes)) };
        float_flip([tensor], axes: &[usize]) -> FloatTensor => { let axes = axes.to_vec(); moved(op!(float_flip), tensor, move |tensor| B::float_flip(tensor, &axes)) };
        float_clamp_min([tensor], {min}) -> FloatTensor => functions(op!(float_clamp_min), tensor, &[Function::AtLeast(min.elem())], &[min.elem()], |tensor| B::float_clamp_min(tensor, min));
        float_clamp_max([tensor], {max}) -> FloatTensor => functions(op!(float_clamp_max), tensor, &[Function::AtMost(max.elem())], &[max.elem()], |tensor| B::float_clamp_max(tensor, max));
        float_greater_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor => compared(op!(float_greater_elem), lhs, rhs, Function::AtMost(rhs.elem()), |lhs| B::float_greater_elem(lhs, rhs, out_dtype));
        float_lower_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor => compared(op!(float_lower_elem), lhs, rhs, Function::AtLeast(rhs.elem()), |lhs| B::float_lower_elem(lhs, rhs, out_dtype));
        float_mask_fill([tensor], mask: BoolTensor<Self>, {value}) -> FloatTensor => filled(tensor, mask, value);
        float_mask_where([tensor], mask: BoolTensor<Self>, [value]) -> FloatTensor => mask_where(tensor, mask, value);
        float_slice_assign([tensor], slices: &[Slice], [value]) -> FloatTensor => assigned(tensor, slices, value);
        float_mul([lhs], [rhs]) -> FloatTensor => product(lhs, rhs);
        float_div([lhs], [rhs]) -> FloatTensor => quotient(lhs, rhs);
        float_add([lhs], [rhs]) -> FloatTensor => sum(lhs, rhs);
        float_sub([lhs], [rhs]) -> FloatTensor => difference(lhs, rhs);
        float_matmul([lhs], [rhs]) -> FloatTensor => matmul(lhs, rhs);
        float_clamp([tensor], {min}, {max}) -> FloatTensor => clamped(tensor, min, max);
        float_scatter_nd([data], indices: IntTensor<Self>, [values], reduction: IndexingUpdateOp) -> FloatTensor => update(update_op!(float_scatter_nd, reduction), data, values, |data, values| B::float_scatter_nd(data, indices, values, reduction));
        float_scatter(dim: usize, [tensor], indices: IntTensor<Self>, [value], update: IndexingUpdateOp) -> FloatTensor => self::update(update_op!(float_scatter, update), tensor, value, |tensor, value| B::float_scatter(dim, tensor, indices, value, update));
        float_select_assign([tensor], dim: usize, indices: IntTensor<Self>, [value], update: IndexingUpdateOp) -> FloatTensor => self::update(update_op!(float_select_assign, update), tensor, value, |tensor, value| B::float_select_assign(tensor, dim, indices, value, update));
    }

    float_ops! {
        float_hypot([lhs], [rhs]) -> FloatTensor;
        float_powi_scalar([lhs], rhs: Scalar) -> FloatTensor;
        float_powf_scalar([tensor], value: Scalar) -> FloatTensor;
        float_topk_with_indices([tensor], dim: usize, k: usize, out_dtype: IntDType) -> WithIndices;
        float_sum([tensor]) -> FloatTensor;
        float_sum_dim([tensor], dim: usize) -> FloatTensor;
        float_sum_dims([tensor], dims: &[usize]) -> FloatTensor;
        float_mean([tensor]) -> FloatTensor;
        float_mean_dim([tensor], dim: usize) -> FloatTensor;
    }

    fn float_mask_select(
        tensor: FloatTensor<Self>,
        mask: BoolTensor<Self>,
    ) -> impl Future<Output = FloatTensor<Self>> + 'static + Send {
        let _session = enter::<P>();
        let call = Call::new(op!(float_mask_select), [&tensor]);
        let selected = B::float_mask_select(call.operand(tensor), mask);
        async move { call.result(selected.await) }
    }

    /// Half cannot always represent the padding constant.
    fn float_pad(
        tensor: FloatTensor<Self>,
        padding: &[(usize, usize)],
        mode: PadMode,
    ) -> FloatTensor<Self> {
        let constant = match mode {
            PadMode::Constant(value) => value,
            PadMode::Reflect | PadMode::Edge => 0.0,
        };
        let _session = enter::<P>();
        let tensor = sigmoid_in_fp32(op!(float_pad), tensor);
        let (tensors, operands) = ([&tensor], [tensor.operand()]);
        let call = Call::of(op!(float_pad), &tensors, &operands, &[constant.into()]);
        call.result(B::float_pad(call.operand(tensor), padding, mode))
    }

    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        let _session = enter::<P>();
        let op = op!(float_cat);
        // Half would keep nothing of what a confident sigmoid leaves.
        let tensors = tensors.into_iter().map(|t| sigmoid_in_fp32(op, t));
        let tensors: Vec<_> = tensors.collect();
        let operands: Vec<_> = tensors.iter().map(AmpTensor::operand).collect();
        let all: Vec<_> = tensors.iter().collect();
        let call = Call::of(op, &all, &operands, &[]);
        let tensors = tensors.into_iter().map(|t| call.operand(t)).collect();
        call.result(B::float_cat(tensors, dim))
    }

    #[cfg(feature = "burn-0-23")]
    super::this_burn::float_operations! { float_ops }

    burn_amp_core::float_operations! { float_ops }

    burn_amp_core::moving_operations! { moved_ops }
}

/// A product. Burn's clients send the square of a tensor as its product with itself.
fn product<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    if lhs.is_same_as(&rhs) {
        let call = Call::new(op!(float_powi_scalar), [&lhs]);
        drop(rhs);
        let operand = call.operand(lhs);
        return call.result(B::float_mul(operand.clone(), operand));
    }
    let op = op!(float_mul);
    let [lhs, rhs] = two_sigmoids(op, [lhs, rhs]);
    let ([lhs, rhs], unrounded) = masked(op, lhs, rhs);
    let call = Call::new(op, [&lhs, &rhs]);
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    let out = call.result(B::float_mul(lhs, rhs));
    let unrounded = unrounded.filter(|_| is_half(out.dtype()));
    out.with_unrounded(unrounded, op.name)
}

fn quotient<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    let op = op!(float_div);
    let [lhs, rhs] = two_sigmoids(op, [lhs, rhs]);
    let mut call = Call::new(op, [&lhs, &rhs]);
    if rhs.unrounded().is_some() {
        call.decision = call.decision.dividing(lhs.dtype());
    }
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    call.result(B::float_div(lhs, rhs))
}

/// A sum. Burn's clients send a linear layer as a product, and as the sum of this product and the bias. This
/// sum is in half if the product is, like `linear`.
fn sum<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    let (is_linear, half) = (is_linear(&lhs, &rhs), lhs.dtype());
    let op = if is_linear {
        op!(linear)
    } else {
        op!(float_add)
    };
    let [lhs, rhs] = two_sigmoids(op, [lhs, rhs]);
    let call = Call::new(op, [&lhs, &rhs]);
    let (lhs, mut rhs) = (call.operand(lhs), call.operand(rhs));
    if is_linear {
        // FP32 where the product is half and the sum is not.
        let dtype = call.decision.rounded.or(call.decision.operands);
        rhs = without_minus_infinity::<B>(rhs, dtype.unwrap_or(half));
    }
    call.result(B::float_add(lhs, rhs))
}

/// A difference. Burn's clients send a softmax in training as the difference from the maximum, and further
/// operations. In f16 a masked score of -65504 less the maximum would be minus infinity.
fn difference<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    let op = if rhs.origin() == Origin::Largest {
        op!(softmax)
    } else {
        op!(float_sub)
    };
    let [lhs, rhs] = two_sigmoids(op, [lhs, rhs]);
    let call = Call::new(op, [&lhs, &rhs]);
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    call.result(B::float_sub(lhs, rhs))
}

/// A bias that was rounded to `dtype`. A tensor that looks like a bias may be a mask for the columns, of -1e9,
/// which is beyond f16, or of the lowest FP32 value, which is beyond bf16. The clamp keeps the sum finite, beside
/// a product above -5,000. NaN stays NaN.
fn without_minus_infinity<B: Backend>(bias: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let lowest: f64 = match dtype {
        DType::F16 => -6e4,
        DType::BF16 => -3e38,
        _ => return bias,
    };
    B::float_clamp_min(bias, lowest.into())
}

/// A product of matrices. One product with a transposed matrix on the left may be the gradient of a linear
/// layer's weight, which optimizers sum up and multiply with small factors, in the gradient's dtype. Several
/// products are the gradients of each sequence of a batch, which autodiff sums up in FP32, or the gradient of a
/// stack of matrices.
fn matmul<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    let op = op!(float_matmul);
    let is_transposed = lhs.origin() == Origin::Transposed;
    let call = Call::new(op, [&lhs, &rhs]);
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    let product = call.result(B::float_matmul(lhs, rhs));
    if is_transposed && is_one_matrix(&product.shape()) {
        product.into_declared(op.name)
    } else {
        product
    }
}

/// Whether all dimensions but the last two are 1.
fn is_one_matrix(shape: &Shape) -> bool {
    let batches = shape.num_dims().saturating_sub(2);
    (0..batches).all(|dim| shape[dim] == 1)
}

/// Whether these are the product and the bias of a linear layer, the product in half.
fn is_linear<B: Backend>(product: &AmpTensor<B>, bias: &AmpTensor<B>) -> bool {
    let (rows, row) = (product.shape(), bias.shape());
    product.origin() == Origin::Product
        && is_half(product.dtype())
        && bias.origin() == Origin::Row
        && rows.num_dims() == row.num_dims()
        && row.num_elements() == rows[rows.num_dims() - 1]
        && row.num_elements() == row[row.num_dims() - 1]
}

/// A tensor clamped between two bounds, or marked by the client.
fn clamped<B: Backend>(tensor: AmpTensor<B>, min: Scalar, max: Scalar) -> AmpTensor<B> {
    if let Some(mark) = Mark::of(min, max) {
        return tensor.marked(mark);
    }
    let bounds = [min.elem(), max.elem()];
    let clamp = [Function::AtMost(bounds[1]), Function::AtLeast(bounds[0])];
    functions(op!(float_clamp), tensor, &clamp, &bounds, |tensor| {
        B::float_clamp(tensor, min, max)
    })
}

fn mask_where<B: Backend>(
    tensor: AmpTensor<B>,
    mask: BoolTensor<B>,
    value: AmpTensor<B>,
) -> AmpTensor<B> {
    let op = op!(float_mask_where);
    let [tensor, value] = [tensor, value].map(|tensor| tensor.computed_in_fp32(op.name));
    let call = Call::new(op, [&tensor, &value]);
    let (tensor, value) = (call.operand(tensor), call.operand(value));
    call.result(B::float_mask_where(tensor, mask, value))
}

/// The values and their indices.
type WithIndices<B> = (FloatTensor<B>, IntTensor<B>);

/// An operation that writes values into a tensor. An operation that accumulates is a sum.
fn update<B: Backend>(
    op: Op,
    tensor: AmpTensor<B>,
    values: AmpTensor<B>,
    run: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let [tensor, values] = [tensor, values].map(|tensor| sigmoid_in_fp32(op, tensor));
    let call = Call::new(op, [&tensor, &values]);
    let (tensor, values) = (call.operand(tensor), call.operand(values));
    call.result(run(tensor, values))
}

/// Creates a tensor in the requested dtype, for the operation `op`. If the device only stores that
/// dtype and multiplies matrices in it, the tensor is created in FP32 and cast.
pub(super) fn create<B: Backend>(
    op: &'static str,
    device: &B::Device,
    dtype: FloatDType,
    make: impl FnOnce(FloatDType) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let support = DeviceState::of::<B>(device).support::<B>(device);
    AmpTensor::plain(match support.of(DType::from(dtype)) {
        HalfSupport::Contractions => converted::<B>(make(FloatDType::F32), dtype.into(), op),
        HalfSupport::None | HalfSupport::Arithmetic => make(dtype),
    })
}

/// The half dtype that the policy gives FP32 tensors on this device, if the device computes in it.
fn half_in_force<B: Backend>(device: &B::Device) -> Option<FloatDType> {
    let state = DeviceState::of::<B>(device);
    match state.mode::<B>(device, None) {
        Mode::On(half) if state.support::<B>(device).of(half) == HalfSupport::Arithmetic => {
            Some(half.into())
        }
        _ => None,
    }
}

/// Flags a tensor whose values fit in both half dtypes: an FP32 constant follows half tensors.
pub(super) fn constant<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor.with_flags(TensorFlags::CONSTANT),
        _ => tensor,
    }
}

/// Flags ones, with which a product of unknown length may begin.
fn ones<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    let tensor = constant(tensor);
    let flags = tensor.flags() | TensorFlags::ONES;
    tensor.with_flags(flags)
}

/// Flags FP32 zeros, with which the state of a recurrence may begin; or infinities, which are the zeros of a recurrence of
/// logarithms.
fn zeros<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor.with_flags(TensorFlags::CONSTANT | TensorFlags::STATE),
        _ => tensor,
    }
}
