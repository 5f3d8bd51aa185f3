//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorMetadata};

use crate::AmpTensor;
use crate::call::{Call, op};
use crate::policy::{Op, is_half};
use crate::tensor::{Function, Side, Unrounded};

/// How FP32 computes the result of a call, if half computes this function of a half tensor, and rounds it or has rounded
/// before.
pub(super) fn unrounded<B: Backend, S: Side<B>>(
    call: &Call<B, S>,
    tensor: &AmpTensor<B, S>,
    function: Function,
) -> Option<Unrounded<FloatTensor<B>>> {
    let is_rounded =
        call.decision.is_in_half && (function.rounds() || tensor.unrounded().is_some());
    is_rounded.then(|| tensor.unrounded_function(function))
}

/// An operation with a scalar, which is this function.
pub(super) fn with_scalar<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalar: Scalar,
    function: Function,
    run: impl FnOnce(FloatTensor<B>, Scalar) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::of(op, &[&tensor], &[tensor.operand()], &[scalar.elem()]);
    let unrounded = unrounded(&call, &tensor, function);
    let tensor = call.operand(tensor);
    call.result(call.run(|| run(tensor, scalar)))
        .with_unrounded(unrounded)
}

/// A negative.
pub(super) fn neg<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let call = Call::new(op!(float_neg), [&tensor]);
    let unrounded = unrounded(&call, &tensor, Function::Neg);
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_neg(tensor)))
        .with_unrounded(unrounded)
}

/// Two half sigmoids, or what was computed of them, in FP32: half would keep nothing of a small difference.
pub(super) fn two_sigmoids<B: Backend, S: Side<B>>(
    tensors: [AmpTensor<B, S>; 2],
) -> [AmpTensor<B, S>; 2] {
    let is_sigmoid =
        |tensor: &AmpTensor<B, S>| tensor.unrounded().is_some_and(Unrounded::is_sigmoid);
    if !tensors.iter().all(is_sigmoid) {
        return tensors;
    }
    tensors.map(AmpTensor::computed_in_fp32)
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
