//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorMetadata};

use crate::AmpTensor;
use crate::call::{Call, op};
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

/// A negative, which half computes exactly. FP32 negates the values that were rounded before.
pub(super) fn neg<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let call = Call::new(op!(float_neg), [&tensor]);
    let was_rounded = tensor.unrounded().is_some();
    let unrounded = unrounded(&call, &tensor, Function::Neg).filter(|_| was_rounded);
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_neg(tensor)))
        .with_unrounded(unrounded)
}

/// The same values in another place. FP32 computes those that were rounded from an operand in the same place.
pub(super) fn along<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    run: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&tensor]);
    let moved = |tensor| call.run(|| run(tensor));
    let unrounded = tensor.unrounded().map(|unrounded| unrounded.map(moved));
    let out = moved(call.operand(tensor));
    let is_half = is_half(out.dtype());
    call.result(out)
        .with_unrounded(unrounded.filter(|_| is_half))
}
