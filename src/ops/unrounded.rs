//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use crate::AmpTensor;
use crate::call::Call;
use crate::policy::Op;
use crate::tensor::{Function, Side, TensorFlags, Unrounded};

/// How FP32 computes the result of a call, if half computes these functions of a half tensor, and rounds it or has rounded
/// before.
pub(super) fn unrounded<B: Backend, S: Side<B>>(
    call: &Call<B, S>,
    tensor: &AmpTensor<B, S>,
    functions: &[Function],
) -> Option<Unrounded<FloatTensor<B>>> {
    let rounds = || functions.iter().any(|function| function.rounds());
    let is_rounded = call.decision.is_in_half && (tensor.unrounded().is_some() || rounds());
    is_rounded.then(|| tensor.unrounded_functions(functions))
}

/// An operation with a scalar, which is this function.
pub(super) fn with_scalar<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalar: Scalar,
    function: Function,
    run: impl FnOnce(FloatTensor<B>, Scalar) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    with_scalars(op, tensor, &[scalar.elem()], &[function], |tensor| {
        run(tensor, scalar)
    })
}

/// An operation with scalars, which is these functions.
pub(super) fn with_scalars<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalars: &[f64],
    functions: &[Function],
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::of(op, &[&tensor], &[tensor.operand()], scalars);
    let unrounded = unrounded(&call, &tensor, functions);
    let tensor = call.operand(tensor);
    call.result(call.run(|| run(tensor)))
        .with_unrounded(unrounded)
}

/// Two half sigmoids, or what was computed of them, in FP32: half would keep nothing of a small difference or product. As a
/// factor of a half tensor, a sum follows half.
pub(super) fn two_sigmoids<B: Backend, S: Side<B>>(
    tensors: [AmpTensor<B, S>; 2],
) -> [AmpTensor<B, S>; 2] {
    let is_half = |tensor: &AmpTensor<B, S>| {
        let unrounded = tensor.unrounded();
        unrounded.is_some_and(|unrounded| unrounded.functions().is_sigmoid())
    };
    let is_gate = |tensor: &AmpTensor<B, S>| {
        tensor.dtype() == DType::F32 && tensor.flags().contains(TensorFlags::GATE)
    };
    let are_sigmoids = tensors
        .iter()
        .all(|tensor| is_half(tensor) || is_gate(tensor));
    if !are_sigmoids || !tensors.iter().any(is_half) {
        return tensors;
    }
    tensors.map(|tensor| {
        let unrounded = tensor.unrounded();
        let flags = unrounded.map(|of| of.functions().flags(tensor.dtype()));
        let flags = flags.unwrap_or_default();
        tensor.computed_in_fp32().and(flags)
    })
}

/// Operations that bring values to another place.
macro_rules! moved_ops {
    ($($op:ident($($([$t:ident])? $($a:ident: $ty:ty)?),+);)*) => {
        $crate::call::own_ops! {$(
            $op($($([$t])? $($a: $ty)?),+) -> FloatTensor => moved(
                op!($op),
                $($($t)?)+,
                |$($($t)?)+| B::$op($($($t)? $($a.clone())?),+),
            );
        )*}
    };
}

pub(super) use moved_ops;
