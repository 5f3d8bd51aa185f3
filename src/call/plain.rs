//! Operations as their rows say: the steps of formulas, and what an operation does where the policy does not
//! record it.

use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, IntDType, Scalar, Shape, TensorMetadata, get_device_settings,
};

use super::{Call, checked, contracted, create, is_watched, op};
use crate::AmpTensor;
use crate::device::DeviceContext;
use crate::diagnostics::anomaly;
use crate::policy::{Class, Op, SMALL, is_half};
use crate::precision::{half_wanted, in_kernel};
use crate::tensor::{Side, TensorFlags, in_its_dtype};
use crate::workarounds::fusion::{linear_of_rows, row_or_column_unfused};
use crate::workarounds::libtorch;
#[cfg(feature = "tch")]
use crate::workarounds::libtorch::kernels;
use burn_amp_core::policy::Role;

/// Functions for operations of which nothing but the row has to be known: the tensors come first, then a scalar,
/// then the rest.
macro_rules! plain_ops {
    ($($name:ident = $op:ident($([$t:ident]),+ $(, {$s:ident})? $(, $a:ident: $ty:ty)?);)*) => {$(
        pub(crate) fn $name<B: Backend, S: Side<B>>(
            $($t: AmpTensor<B, S>,)+
            $($s: impl Into<Scalar>,)?
            $($a: $ty,)?
        ) -> AmpTensor<B, S> {
            $(let $s: Scalar = $s.into();)?
            let scalars = [$($s.elem::<f64>())?];
            let operands = [$($t.operand()),+];
            let call = Call::of(op!($op), &[$(&$t),+], &operands, &scalars);
            $(let $t = call.operand($t);)+
            call.result(call.run(|| B::$op($($t,)+ $($s,)? $($a)?)))
        }
    )*};
}

plain_ops! {
    neg = float_neg([tensor]);
    exp = float_exp([tensor]);
    sqrt = float_sqrt([tensor]);
    tanh = float_tanh([tensor]);
    relu = relu([tensor]);
    sigmoid = sigmoid([tensor]);
    sigmoid_backward = sigmoid_backward([output], [grad]);
    softmax = softmax([tensor], dim: usize);
    log_softmax = log_softmax([tensor], dim: usize);
    add_scalar = float_add_scalar([tensor], {scalar});
    mul_scalar = float_mul_scalar([tensor], {scalar});
    div_scalar = float_div_scalar([tensor], {scalar});
    powf_scalar = float_powf_scalar([tensor], {exponent});
    clamp_min = float_clamp_min([tensor], {min});
    sum = float_sum([tensor]);
    sum_dim = float_sum_dim([tensor], dim: usize);
    mean = float_mean([tensor]);
    mean_dim = float_mean_dim([tensor], dim: usize);
    max_dim = float_max_dim([tensor], dim: usize);
    reshape = float_reshape([tensor], shape: Shape);
    expand = float_expand([tensor], shape: Shape);
}

/// Arithmetic on two tensors.
macro_rules! arithmetic {
    ($($name:ident = $op:ident;)*) => {$(
        pub(crate) fn $name<B: Backend, S: Side<B>>(
            lhs: AmpTensor<B, S>,
            rhs: AmpTensor<B, S>,
        ) -> AmpTensor<B, S> {
            let (lhs, rhs) = with_statistics(lhs, rhs);
            let call = Call::new(op!($op), [&lhs, &rhs]);
            let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
            call.result(call.run(|| B::$op(lhs, rhs)))
        }
    )*};
}

arithmetic! {
    add = float_add;
    sub = float_sub;
    mul = float_mul;
    div = float_div;
}

/// Operands, with the FP32 statistic in place of one that a program cast to half.
pub(crate) fn with_statistics<B: Backend, S: Side<B>>(
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> (AmpTensor<B, S>, AmpTensor<B, S>) {
    let rhs = rhs.or_statistic_of(&lhs);
    (lhs.or_statistic_of(&rhs), rhs)
}

/// A product of matrices.
pub(crate) fn matmul<B: Backend, S: Side<B>>(
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    contracted(op!(float_matmul), [lhs, rhs], |[lhs, rhs]| {
        row_or_column_unfused::<B, S>(B::float_matmul(lhs, rhs))
    })
}

/// The last two dimensions swapped.
pub(crate) fn transpose<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let swap = |axes: &mut [usize]| {
        let last = axes.len() - 1;
        axes.swap(last - 1, last);
    };
    permuted(op!(float_transpose), tensor, swap, B::float_transpose)
}

/// A view with its dimensions in another order: `reorder` gets 0, 1, 2 ..
pub(crate) fn permuted<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    reorder: impl Fn(&mut [usize]) + Send + Sync + 'static,
    permute: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> AmpTensor<B, S> {
    moved(op, tensor, move |tensor| {
        libtorch::permuted::<B>(tensor, &reorder, &permute)
    })
}

/// The same values in another place. What FP32 computes and was filled goes there in FP32.
pub(crate) fn moved<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    to: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> AmpTensor<B, S> {
    let has_tensors = tensor.unrounded().is_some_and(|of| of.has_tensors());
    let tensor = match has_tensors {
        true => tensor.gate_in_fp32(),
        false => tensor,
    };
    let call = Call::new(op, [&tensor]);
    let known = tensor.unrounded().cloned();
    let operand = call.operand(tensor);
    let out = call.run(|| to(operand));
    let unrounded = known.filter(|_| is_half(out.dtype())).map(|known| {
        let elements = out.shape().num_elements();
        known.moved(
            move |tensor| in_its_dtype::<B, S, _>(|| to(tensor)),
            |operand| {
                let is_small = elements * SMALL <= operand.shape().num_elements();
                is_small || libtorch::changes_in_place::<B>()
            },
        )
    });
    call.result(out).with_unrounded(unrounded)
}

/// A tensor with a value where the mask is true.
pub(crate) fn mask_fill<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    mask: BoolTensor<B>,
    value: Scalar,
) -> AmpTensor<B, S> {
    let tensor = tensor.with_room(1);
    let (op, operands) = (op!(float_mask_fill), [tensor.operand()]);
    let call = Call::of(op, &[&tensor], &operands, &[value.elem()]);
    let known = tensor.unrounded().filter(|_| call.decision.is_in_half);
    let unrounded = known.map(|known| known.filled(libtorch::kept::<B>(&mask), value.elem()));
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_mask_fill(tensor, mask, value)))
        .with_unrounded(unrounded)
}

/// Functions that compare a tensor with a scalar.
macro_rules! compared {
    ($($name:ident = $op:ident;)*) => {$(
        pub(crate) fn $name<B: Backend, S: Side<B>>(
            tensor: AmpTensor<B, S>,
            scalar: f64,
        ) -> BoolTensor<B> {
            let call = Call::of(op!($op), &[&tensor], &[tensor.operand()], &[scalar]);
            let dtype = get_device_settings::<B>(&tensor.device()).bool_dtype;
            let tensor = call.operand(tensor);
            call.run(|| B::$op(tensor, scalar.into(), dtype))
        }
    )*};
}

compared! {
    is_lower = float_lower_elem;
    is_greater = float_greater_elem;
}

/// Where the tensor is zero.
pub(crate) fn is_zero<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    dtype: BoolDType,
) -> BoolTensor<B> {
    let (op, operands) = (op!(float_equal_elem), [tensor.operand()]);
    let call = Call::of(op, &[&tensor], &operands, &[0.0]);
    let tensor = call.operand(tensor);
    call.run(|| B::float_equal_elem(tensor, 0.into(), dtype))
}

/// Zeros and ones as bytes.
pub(crate) fn into_bytes<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> IntTensor<B> {
    let call = Call::new(op!(float_into_int), [&tensor]);
    let tensor = call.operand(tensor);
    call.run(|| {
        #[cfg(feature = "tch")]
        if let Some(bytes) = kernels::into_bytes::<B>(&tensor) {
            return bytes;
        }
        B::int_cast(B::float_into_int(tensor, IntDType::U8), IntDType::U8)
    })
}

/// Integers in a float dtype.
pub(crate) fn from_int<B: Backend, S: Side<B>>(
    tensor: IntTensor<B>,
    dtype: DType,
) -> AmpTensor<B, S> {
    let device = B::int_device(&tensor);
    let make = |_: &_, dtype| B::int_into_float(tensor, dtype);
    create(&device, dtype.into(), make)
}

/// A formula's own cast, and not the user's.
pub(crate) fn cast<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    dtype: DType,
) -> AmpTensor<B, S> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    let flags = tensor.flags() & TensorFlags::CAST;
    // What the policy computed stays the policy's.
    let computed = match is_half(dtype) || tensor.flags().contains(TensorFlags::GRADIENT) {
        true => TensorFlags::empty(),
        false => tensor.flags() & TensorFlags::DEMOTED,
    };
    casted(tensor, dtype, flags | computed, S::into_dtype)
}

/// A half tensor in FP32; any other tensor unchanged.
pub(crate) fn widened<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    if is_half(tensor.dtype()) {
        cast(tensor, DType::F32)
    } else {
        tensor
    }
}

/// A tensor after a cast, with these flags and with its scaler.
pub(crate) fn casted<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    dtype: DType,
    flags: TensorFlags,
    cast: impl FnOnce(AmpTensor<B, S>, DType) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let scaled = tensor.scaled().cloned();
    // A cast to FP32 is named as well, if the cast of its gradient is the first anomaly.
    let watched = half_wanted() && {
        let context = DeviceContext::of::<B>(&tensor.device());
        is_watched("float_cast", &context, &[&tensor]) && is_half(dtype)
    };
    if watched {
        anomaly::operand(&tensor);
    }
    let cast = cast(tensor, dtype);
    if watched {
        // The program's own cast, and no operation that the policy could change.
        let cast_op = Op::custom("float_cast", Class::Keep, Role::Forward);
        anomaly::result::<B, S>(&cast_op, None, &cast);
    }
    AmpTensor::new(cast, flags).with_scaled(scaled)
}

/// The softmax over a dimension, in FP32. A row of minus infinities gives zeros.
pub(crate) fn masked_softmax<B: Backend, S: Side<B>>(
    scores: AmpTensor<B, S>,
    dim: usize,
) -> AmpTensor<B, S> {
    let scores = widened(scores);
    let info = scores.dtype().finfo().expect("a float dtype");
    let detached = B::float_detach(scores.clone().into_primitive());
    let detached = AmpTensor::new(detached, scores.flags());
    let largest = clamp_min(max_dim(detached, dim), info.min);
    let exps = exp(sub(scores, largest));
    let sums = sum_dim(exps.clone(), dim);
    // A row sums to at least 1, because its largest score contributes 1. A masked row sums to 0. A
    // bound of 0.5 leaves room for rounding and, unlike the smallest positive number, can be
    // squared in the backward pass.
    div(exps, clamp_min(sums, 0.5))
}

/// A contraction of `x` with a weight, and a bias along dimension `channels` of the result.
///
/// A device that only multiplies matrices in half cannot add a half bias: `add` adds the bias in FP32.
pub(crate) fn contraction<B: Backend, S: Side<B>>(
    op: Op,
    channels: usize,
    x: AmpTensor<B, S>,
    weight: AmpTensor<B, S>,
    bias: Option<AmpTensor<B, S>>,
    add: impl FnOnce(AmpTensor<B, S>, AmpTensor<B, S>) -> AmpTensor<B, S>,
    run: impl Fn(&Call<B, S>, FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&x, &weight, bias.as_ref().unwrap_or(&weight)]);
    let (x, weight) = (call.operand(x), call.operand(weight));
    let bare = |[x, weight]: [_; 2]| run(&call, x, weight, None);
    match bias {
        Some(bias) if call.decision.only_contracts => {
            let out = call.contract([x, weight], bare);
            let bias = along(channels, out.rank(), bias);
            add(out, bias)
        }
        Some(bias) => {
            let operands = [x, weight, call.operand(bias)];
            call.contract(operands, |[x, weight, bias]| {
                run(&call, x, weight, Some(bias))
            })
        }
        None => call.contract([x, weight], bare),
    }
}

/// A tensor of one dimension as dimension `dim` of `rank`.
pub(crate) fn along<B: Backend, S: Side<B>>(
    dim: usize,
    rank: usize,
    tensor: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let mut shape = vec![1; rank];
    shape[dim] = tensor.shape().num_elements();
    reshape(tensor, shape.into())
}

/// A linear layer: a tensor `[.., features]`, a weight `[features, channels]`, a bias `[channels]`.
pub(crate) fn linear<B: Backend, S: Side<B>>(
    x: AmpTensor<B, S>,
    weight: AmpTensor<B, S>,
    bias: Option<AmpTensor<B, S>>,
) -> AmpTensor<B, S> {
    let channels = x.rank() - 1;
    contraction(
        op!(linear),
        channels,
        x,
        weight,
        bias,
        add,
        |_, x, weight, bias| linear_kernel::<B, S>(x, weight, bias),
    )
}

/// The backend's linear layer.
pub(crate) fn linear_kernel<B: Backend, S: Side<B>>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    by_rows::<B, S>(x, |x| {
        #[cfg(feature = "tch")]
        if let Some(bias) = &bias
            && let Some(out) = kernels::linear::<B>(&x, &weight, bias)
        {
            return out;
        }
        linear_of_rows::<B, S>(x, weight, bias)
    })
}

/// The gradient of a linear layer's operand.
pub(crate) fn linear_x_backward<B: Backend, S: Side<B>>(
    weight: AmpTensor<B, S>,
    output_grad: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let (op, operands) = (op!(linear_x_backward), [weight, output_grad]);
    contracted(op, operands, |[weight, output_grad]| {
        by_rows::<B, S>(output_grad, |grad| {
            row_or_column_unfused::<B, S>(B::linear_x_backward(weight, grad))
        })
    })
}

/// The gradient of a linear layer's weight. In half, one contraction: a separate sum over the batch would run
/// in half.
pub(crate) fn linear_weight_backward<B: Backend, S: Side<B>>(
    x: AmpTensor<B, S>,
    output_grad: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let (op, operands) = (op!(linear_weight_backward), [x, output_grad]);
    contracted(op, operands, |operands| {
        let [x, output_grad] = operands.map(half_rows::<B, S>);
        row_or_column_unfused::<B, S>(B::linear_weight_backward(x, output_grad))
    })
}

/// The gradient of a linear layer's bias. In half, one sum: every further sum would round again.
pub(crate) fn linear_bias_backward<B: Backend, S: Side<B>>(
    output_grad: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let (op, operands) = (op!(linear_bias_backward), [output_grad]);
    let [bias_grad] = checked(op, operands, |[output_grad]| {
        [B::linear_bias_backward(half_rows::<B, S>(output_grad))]
    });
    bias_grad
}

/// A half tensor with its leading dimensions folded into one, unless autodiff records them.
fn half_rows<B: Backend, S: Side<B>>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    match shape.num_dims() > 2 && is_half(tensor.dtype()) && !S::RECORDS {
        true => B::float_reshape(tensor, rows_of(&shape)),
        false => tensor,
    }
}

/// The shape with its leading dimensions folded into one.
fn rows_of(shape: &Shape) -> Shape {
    let (leading, features) = shape.split_at(shape.num_dims() - 1);
    Shape::new([leading.iter().product(), features[0]])
}

/// Multiplies the rows of a tensor with a matrix: in half with one contraction instead of one for each
/// batch. On LibTorch this takes half the time.
fn by_rows<B: Backend, S: Side<B>>(
    tensor: FloatTensor<B>,
    product: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let mut shape = tensor.shape();
    let out = product(half_rows::<B, S>(tensor));
    let last = shape.num_dims() - 1;
    if out.rank() == shape.num_dims() {
        return out;
    }
    shape[last] = out.shape()[out.rank() - 1];
    B::float_reshape(out, shape)
}

/// A tensor as the rows of a matrix: its leading dimensions folded into one. Keeps the FP32 values that
/// a half gradient was rounded from.
pub(crate) fn rows<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    if tensor.rank() == 2 {
        return tensor;
    }
    let rows = rows_of(&tensor.shape());
    let wide = tensor
        .wide()
        .map(|wide| in_kernel(|| B::float_reshape(wide, rows.clone())));
    reshape(tensor, rows).with_wide(wide)
}

/// The gradient of a softmax over `dim`, from its probabilities p, both in FP32: p (s g - sum(p g)), with s the sum of p.
/// Rounded probabilities do not sum to exactly 1. Using s cancels the rounding error of the p nearest to 1, so a
/// confident prediction keeps its small gradient. LibTorch's kernel gets p / s, whose gradient is this one by s squared.
pub(crate) fn softmax_backward<B: Backend, S: Side<B>>(
    p: AmpTensor<B, S>,
    grad: AmpTensor<B, S>,
    dim: usize,
) -> AmpTensor<B, S> {
    #[cfg(feature = "tch")]
    if kernels::has_kernels::<B>() && [&p, &grad].map(|t| t.dtype()) == [DType::F32; 2] {
        let p = p.into_primitive();
        // For `operand_grad`, whose result has the gradient's flags.
        return grad.map(|grad| in_kernel(|| kernels::softmax_backward::<B>(p, grad, dim)));
    }
    let whole = mul(grad.clone(), sum_dim(p.clone(), dim));
    let sum = sum_dim(mul(grad, p.clone()), dim);
    mul(sub(whole, sum), p)
}

/// The gradient of a ReLU, from its result.
pub(crate) fn relu_backward<B: Backend, S: Side<B>>(
    output: AmpTensor<B, S>,
    grad: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let call = Call::new(op!(relu_backward), [&output, &grad]);
    let (output, grad) = (call.operand(output), call.operand(grad));
    call.result(call.run(|| {
        // In FP32 the result may have another layout than Burn's, which changes the order of later sums:
        // FP32 is Burn's own to the last bit.
        #[cfg(feature = "tch")]
        if is_half(output.dtype())
            && let Some(grad) = kernels::relu_backward::<B>(&output, &grad)
        {
            return grad;
        }
        B::relu_backward(output, grad)
    }))
}
