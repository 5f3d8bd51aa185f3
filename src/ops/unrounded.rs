//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, Slice, TensorMetadata};

use super::activation::sigmoid;
use crate::AmpTensor;
use crate::autodiff::recorded::Gated;
use crate::call::{Call, neg, op};
use crate::policy::{Op, are_sigmoids, is_half, nearest};
use crate::tensor::{Function, Side, TensorFlags, Unrounded};

/// How FP32 computes the result of a call, if half computes these functions of a half tensor, and rounds it or has rounded
/// before.
pub(super) fn unrounded<B: Backend, S: Side<B>>(
    call: &Call<B, S>,
    tensor: &AmpTensor<B, S>,
    functions: &[Function],
) -> Option<Unrounded<B>> {
    if !call.decision.is_in_half {
        return None;
    }
    let operand = || tensor.primitive.clone();
    Unrounded::<B>::after(tensor.unrounded(), functions, operand)
}

/// An operation with a scalar, which is this function.
pub(super) fn with_scalar<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalar: Scalar,
    function: Function,
    run: impl FnOnce(FloatTensor<B>, Scalar) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    // A dropout's factor. FP32 would compute with it at the price of four casts, two of them in the backward pass. PyTorch
    // rounds it on a CPU (`aten/src/ATen/native/Dropout.cpp`). A decay is below 1.
    let is_dropped = tensor.flags().contains(TensorFlags::DROPPED);
    let factor = matches!(function, Function::Times(1.0..)).then(|| scalar.elem());
    with_scalars(op, tensor, &[scalar.elem()], &[function], |tensor| {
        let dtype = tensor.dtype();
        match factor.filter(|_| is_dropped && is_half(dtype)) {
            Some(factor) => run(tensor, nearest(dtype, factor).into()),
            None => run(tensor, scalar),
        }
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
    let tensor = tensor.with_room(functions.len());
    let call = Call::of(op, &[&tensor], &[tensor.operand()], scalars);
    let unrounded = unrounded(&call, &tensor, functions);
    let known = tensor.unrounded().filter(|_| call.decision.is_in_half);
    let out = match known.and_then(|known| known.one_less_sigmoid(functions)) {
        Some(operand) => {
            let negative = neg(AmpTensor::<B, S>::new(operand, tensor.flags()));
            sigmoid(negative).into_primitive()
        }
        None => {
            let tensor = call.operand(tensor);
            call.run(|| run(tensor))
        }
    };
    call.result(out).with_unrounded(unrounded)
}

/// Whether a difference is one less a half tensor that FP32 computes, as `x.ones_like() - x`.
pub(super) fn is_one_less<B: Backend, S: Side<B>>(
    ones: &AmpTensor<B, S>,
    tensor: &AmpTensor<B, S>,
) -> bool {
    tensor.unrounded().is_some()
        && ones.is_demoted()
        && ones.flags().contains(TensorFlags::ONES)
        && ones.shape() == tensor.shape()
}

/// One less a tensor, as Burn computes it with the number 1.
pub(super) fn one_less<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let (op, plus) = (op!(float_add_scalar), Function::Plus(1.0));
    with_scalar(op, negative(tensor), 1.into(), plus, B::float_add_scalar)
}

/// The negative.
pub(super) fn negative<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    with_scalars(op!(float_neg), tensor, &[], &[Function::Neg], B::float_neg)
}

/// The factors of a product, and how FP32 computes it, if one is a half tensor that it computes and the other is a mask, or
/// another constant.
pub(super) fn masked<B: Backend, S: Side<B>>(
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> ([AmpTensor<B, S>; 2], Option<Unrounded<B>>) {
    let beside = |tensor: AmpTensor<B, S>, mask: &AmpTensor<B, S>| {
        if mask.dtype() != DType::F32 || !mask.flags().contains(TensorFlags::CONSTANT) {
            return (tensor, None);
        }
        let tensor = tensor.with_room(1);
        let known = tensor.unrounded();
        let masked = known.map(|known| known.masked(mask.primitive.clone()));
        (tensor, masked)
    };
    let (lhs, of_lhs) = beside(lhs, &rhs);
    let (rhs, of_rhs) = beside(rhs, &lhs);
    ([lhs, rhs], of_lhs.or(of_rhs))
}

/// Two half sigmoids, or what was computed of them, in FP32. As a factor of a half tensor, a sum follows half.
pub(super) fn two_sigmoids<B: Backend, S: Side<B>>(
    tensors: [AmpTensor<B, S>; 2],
) -> [AmpTensor<B, S>; 2] {
    let known = tensors
        .each_ref()
        .map(|tensor| (is_sigmoid(tensor), tensor.operand()));
    match are_sigmoids(known) {
        true => tensors.map(AmpTensor::gate_in_fp32),
        false => tensors,
    }
}

/// A half factor or a gate times the state of a recurrence, in FP32: what half rounds at each step would add up. `None` if this
/// is another product, or nothing is recorded.
pub(super) fn gated<B: Backend, S: Side<B>>(
    op: Op,
    lhs: &AmpTensor<B, S>,
    rhs: &AmpTensor<B, S>,
) -> Option<AmpTensor<B, S>> {
    let (gate, state) = match [lhs, rhs].map(|tensor| tensor.operand().is_state()) {
        [false, true] => (lhs, rhs),
        [true, false] => (rhs, lhs),
        _ => return None,
    };
    let is_constant = gate.flags().contains(TensorFlags::CONSTANT);
    let is_gate = is_constant || gate.flags().contains(TensorFlags::GATE) || gate.is_demoted();
    if !(S::RECORDS && is_gate) {
        return None;
    }
    let call = Call::new(op, [gate, state]);
    let half = call.decision.records_in?;
    // A configuration may ask for half.
    if call.decision.operands.unwrap_or(gate.dtype()) != DType::F32 {
        return None;
    }
    let (operand, functions) = match gate.unrounded() {
        // Behind a mask, the gate is kept in FP32.
        Some(known) => known
            .of_operand()
            .unwrap_or_else(|| (S::into_dtype(gate.clone(), DType::F32), Vec::new())),
        // Both half dtypes hold a constant.
        None if is_constant => (S::into_dtype(gate.clone(), half), Vec::new()),
        None => (gate.primitive.clone(), Vec::new()),
    };
    let step = Gated {
        functions,
        kept: half,
    };
    let operands = [operand, state.primitive.clone()];
    let out = call.run(|| S::record(step, operands)).ok()?;
    [lhs, rhs].into_iter().for_each(|tensor| call.watch(tensor));
    Some(call.result(out))
}

/// Whether FP32 computes a half tensor, and a sigmoid for it.
fn is_sigmoid<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> bool {
    let unrounded = tensor.unrounded();
    unrounded.is_some_and(|of| of.functions().is_sigmoid())
}

/// A half sigmoid, or what was computed of it, in FP32. Any other tensor is unchanged.
pub(super) fn sigmoid_in_fp32<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    match is_sigmoid(&tensor) {
        true => tensor.computed_in_fp32(),
        false => tensor,
    }
}

/// A tensor with values in places. Half would keep nothing of what a confident sigmoid leaves.
pub(super) fn assigned<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    slices: &[Slice],
    value: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let [tensor, value] = [tensor, value].map(sigmoid_in_fp32);
    let call = Call::new(op!(float_slice_assign), [&tensor, &value]);
    let (tensor, value) = (call.operand(tensor), call.operand(value));
    call.result(call.run(|| B::float_slice_assign(tensor, slices, value)))
}

/// Operations that bring values to another place.
macro_rules! moved_ops {
    ($($op:ident($($([$t:ident])? $($a:ident: $ty:ty)?),+);)*) => {
        $crate::call::own_ops! {$(
            $op($($([$t])? $($a: $ty)?),+) -> FloatTensor => moved(
                op!($op),
                $($($t)?)+,
                move |$($($t)?)+| B::$op($($($t)? $($a.clone())?),+),
            );
        )*}
    };
}

pub(super) use moved_ops;
