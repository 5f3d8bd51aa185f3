//! Functions of one tensor that FP32 computes again, where it reads a half result.

use burn_amp_core::policy::{Function, Op, SMALL, TensorFlags, are_sigmoids, is_half};

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, Scalar, Slice, TensorMetadata};

use super::{Call, op};
use crate::AmpTensor;
use crate::tensor::Unrounded;

/// An operation that is these functions, with its scalars.
pub(super) fn functions<B: Backend>(
    op: Op,
    tensor: AmpTensor<B>,
    functions: &[Function],
    scalars: &[f64],
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let tensor = with_room(op, tensor, functions.len());
    let call = Call::of(op, &[&tensor], &[tensor.operand()], scalars);
    // FP32 that half rounds for the function, as the state of a recurrence, is the client's to keep.
    let is_rounded = tensor.dtype() == DType::F32 && call.decision.operands.is_some_and(is_half);
    let is_in_half = call.decision.is_in_half || is_rounded;
    let operand = || tensor.primitive.clone();
    let after = || Unrounded::<B>::after(tensor.unrounded(), functions, operand);
    let unrounded = is_in_half.then(after).flatten();
    let known = tensor.unrounded().filter(|_| is_in_half);
    let out = match known.and_then(|known| known.one_less_sigmoid(functions)) {
        Some(operand) => {
            let operand = AmpTensor::<B>::new(operand, tensor.declared(), tensor.flags())
                .with_marks(tensor.marks());
            let negative =
                self::functions(op!(float_neg), operand, &[Function::Neg], &[], B::float_neg);
            self::functions(
                op!(sigmoid),
                negative,
                &[Function::Sigmoid],
                &[],
                B::sigmoid,
            )
            .into_primitive()
        }
        None => run(call.operand(tensor)),
    };
    call.result(out).with_unrounded(unrounded, op.name)
}

/// The tensor in FP32, if so many more steps are not remembered.
fn with_room<B: Backend>(op: Op, tensor: AmpTensor<B>, steps: usize) -> AmpTensor<B> {
    match tensor.unrounded().is_some_and(|of| !of.has_room(steps)) {
        true => tensor.computed_in_fp32(op.name),
        false => tensor,
    }
}

/// A tensor with a value in places. In training, Burn's clients send a clamp as a comparison with the bound, and the bound as this
/// value: it follows the row of a clamp.
pub(super) fn filled<B: Backend>(
    tensor: AmpTensor<B>,
    mask: BoolTensor<B>,
    value: Scalar,
) -> AmpTensor<B> {
    let tensor = with_room(op!(float_mask_fill), tensor, 1);
    let scalar = value.elem::<f64>();
    let op = match tensor.bound() {
        Some(Function::AtMost(bound)) if bound == scalar => op!(float_clamp_max),
        Some(Function::AtLeast(bound)) if bound == scalar => op!(float_clamp_min),
        _ => op!(float_mask_fill),
    };
    let call = Call::of(op, &[&tensor], &[tensor.operand()], &[scalar]);
    let known = tensor.unrounded().filter(|_| call.decision.is_in_half);
    let unrounded = known.map(|known| known.filled(mask.clone(), scalar));
    let tensor = call.operand(tensor);
    call.result(B::float_mask_fill(tensor, mask, value))
        .with_unrounded(unrounded, op.name)
}

/// A comparison with a scalar, by which the client may look for the values beyond this bound.
pub(super) fn compared<B: Backend>(
    op: Op,
    tensor: AmpTensor<B>,
    scalar: Scalar,
    bound: Function,
    run: impl FnOnce(FloatTensor<B>) -> BoolTensor<B>,
) -> BoolTensor<B> {
    tensor.set_bound(bound);
    let call = Call::of(op, &[&tensor], &[tensor.operand()], &[scalar.elem()]);
    run(call.operand(tensor))
}

/// The same values in another place. What FP32 computes and was filled goes there in FP32.
pub(super) fn moved<B: Backend>(
    op: Op,
    tensor: AmpTensor<B>,
    to: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Clone + Send + Sync + 'static,
) -> AmpTensor<B> {
    let has_tensors = tensor.unrounded().is_some_and(|of| of.has_tensors());
    let tensor = match has_tensors {
        true => gate_in_fp32(op, tensor),
        false => tensor,
    };
    let call = Call::new(op, [&tensor]);
    let unrounded = tensor.unrounded.clone();
    let out = call.result(to(call.operand(tensor)));
    let elements = out.shape().num_elements();
    let is_small = |operand: &FloatTensor<B>| elements * SMALL <= operand.shape().num_elements();
    let unrounded = unrounded.map(|unrounded| unrounded.moved(to, is_small));
    out.with_unrounded(unrounded, op.name)
}

/// The factors of a product, and how FP32 computes it, if one is a half tensor that it computes and the other is a mask, or
/// another constant.
pub(super) fn masked<B: Backend>(
    op: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> ([AmpTensor<B>; 2], Option<Unrounded<B>>) {
    let beside = |tensor: AmpTensor<B>, mask: &AmpTensor<B>| {
        if mask.dtype() != DType::F32 || !mask.flags().contains(TensorFlags::CONSTANT) {
            return (tensor, None);
        }
        let tensor = with_room(op, tensor, 1);
        let known = tensor.unrounded();
        let masked = known.map(|known| known.masked(mask.primitive.clone()));
        (tensor, masked)
    };
    let (lhs, of_lhs) = beside(lhs, &rhs);
    let (rhs, of_rhs) = beside(rhs, &lhs);
    ([lhs, rhs], of_lhs.or(of_rhs))
}

/// Two half sigmoids, or what was computed of them, in FP32. As a factor of a half tensor, a sum follows half.
pub(super) fn two_sigmoids<B: Backend>(op: Op, tensors: [AmpTensor<B>; 2]) -> [AmpTensor<B>; 2] {
    let known = tensors
        .each_ref()
        .map(|tensor| (is_sigmoid(tensor), tensor.operand()));
    match are_sigmoids(known) {
        true => tensors.map(|tensor| gate_in_fp32(op, tensor)),
        false => tensors,
    }
}

/// Whether FP32 computes a half tensor, and a sigmoid for it.
fn is_sigmoid<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    let unrounded = tensor.unrounded();
    unrounded.is_some_and(|of| of.functions().is_sigmoid())
}

/// The tensor in FP32, if FP32 computes it. A sigmoid follows half as a factor.
fn gate_in_fp32<B: Backend>(op: Op, tensor: AmpTensor<B>) -> AmpTensor<B> {
    let Some(unrounded) = tensor.unrounded() else {
        return tensor;
    };
    let gate = unrounded.functions().flags(tensor.dtype());
    let tensor = tensor.computed_in_fp32(op.name);
    let flags = tensor.flags() | gate;
    tensor.with_flags(flags)
}

/// A half sigmoid, or what was computed of it, in FP32. Any other tensor is unchanged.
pub(super) fn sigmoid_in_fp32<B: Backend>(op: Op, tensor: AmpTensor<B>) -> AmpTensor<B> {
    match is_sigmoid(&tensor) {
        true => tensor.computed_in_fp32(op.name),
        false => tensor,
    }
}

/// A tensor with values in places. Half would keep nothing of what a confident sigmoid leaves.
pub(super) fn assigned<B: Backend>(
    tensor: AmpTensor<B>,
    slices: &[Slice],
    value: AmpTensor<B>,
) -> AmpTensor<B> {
    let op = op!(float_slice_assign);
    let [tensor, value] = [tensor, value].map(|tensor| sigmoid_in_fp32(op, tensor));
    let call = Call::new(op, [&tensor, &value]);
    let (tensor, value) = (call.operand(tensor), call.operand(value));
    call.result(B::float_slice_assign(tensor, slices, value))
}

/// Operations that bring values to another place.
macro_rules! moved_ops {
    ($($op:ident($($([$t:ident])? $($a:ident: $ty:ty)?),+);)*) => {
        $crate::ops::own_ops! {$(
            $op($($([$t])? $($a: $ty)?),+) -> FloatTensor => moved(
                op!($op),
                $($($t)?)+,
                move |$($($t)?)+| B::$op($($($t)? $($a.clone())?),+),
            );
        )*}
    };
}

pub(super) use moved_ops;
