//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorMetadata};

use crate::AmpTensor;
use crate::call::Call;
use crate::policy::{Op, is_half};
use crate::tensor::{Function, Side, Unrounded};

/// How FP32 computes the result of a call, if half computes this function of a half tensor.
pub(super) fn unrounded<B: Backend, S: Side<B>>(
    call: &Call<B, S>,
    tensor: &AmpTensor<B, S>,
    function: Function,
) -> Option<Unrounded<FloatTensor<B>>> {
    let is_in_half = call.decision.is_in_half;
    is_in_half.then(|| tensor.unrounded_function(function))
}

/// A tensor plus a scalar times this sign, which half rounds.
pub(super) fn shift<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalar: Scalar,
    sign: f64,
    run: impl FnOnce(FloatTensor<B>, Scalar) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let added = scalar.elem::<f64>();
    let call = Call::of(op, &[&tensor], &[tensor.operand()], &[added]);
    let unrounded = unrounded(&call, &tensor, Function::Plus(sign * added));
    let tensor = call.operand(tensor);
    call.result(call.run(|| run(tensor, scalar)))
        .with_unrounded(unrounded)
}

/// What half computes exactly. FP32 does the same to the values that were rounded before.
pub(super) fn along<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    function: impl FnOnce() -> Function,
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&tensor]);
    let was_rounded = tensor.unrounded().is_some();
    let unrounded = was_rounded.then(|| tensor.unrounded_function(function()));
    let tensor = call.operand(tensor);
    let out = call.result(call.run(|| run(tensor)));
    let is_half = is_half(out.dtype());
    out.with_unrounded(unrounded.filter(|_| is_half))
}
