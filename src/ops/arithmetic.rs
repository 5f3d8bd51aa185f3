//! Tensor arithmetic, as in composed norms. Where half tensors and small statistics give an FP32
//! result, half copies are kept for the backward pass.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::Call;
use crate::AmpTensor;
use crate::autodiff::tape::{Arithmetic, Reduction, Sign};
use crate::policy::{Op, is_half};
use crate::tensor::TensorFlags;

/// A sum or difference.
pub(super) fn sum<B: Backend>(
    sign: Sign,
    op: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let (lhs, rhs) = with_statistics(lhs, rhs);
    let call = Call::new(op, [&lhs, &rhs]);
    let tape = call
        .recording::<B>()
        // FP32 tensors that were never half are summed in Burn's order.
        .filter(|(_, half)| lhs.fits(*half) || rhs.fits(*half))
        .filter(|_| lhs.shape() != rhs.shape());
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    call.result(call.run(|| match (tape, sign) {
        (Some((tape, _)), _) => tape.sum(sign, [lhs, rhs]),
        (None, Sign::Plus) => B::float_add(lhs, rhs),
        (None, Sign::Minus) => B::float_sub(lhs, rhs),
    }))
}

/// A product or quotient.
pub(super) fn product<B: Backend>(
    kind: Arithmetic,
    op: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let (lhs, rhs) = with_statistics(lhs, rhs);
    let call = Call::new(op, [&lhs, &rhs]);
    let tape = call.recording::<B>();
    if let Some((tape, half)) = tape {
        let dropped = match (kind, is_noise(&lhs), is_noise(&rhs)) {
            (Arithmetic::Mul, false, true) => Some((&lhs, &rhs)),
            (Arithmetic::Mul, true, false) => Some((&rhs, &lhs)),
            _ => None,
        };
        if let Some((tensor, noise)) = dropped
            && let Some(out) = call.run(|| tape.dropout(&tensor.primitive, &noise.primitive))
        {
            call.watch(tensor);
            // A product with zeros and ones stays in the tensor's range.
            let out = call.recorded(out);
            let flags = out.flags() - TensorFlags::FITS;
            return out.with_flags(flags | tensor.flags() & TensorFlags::FITS);
        }
        let wide = call.decision.operands.unwrap_or(lhs.dtype()) == DType::F32;
        let kept = [&lhs, &rhs].map(|t| kept(t, half));
        if wide && kept.iter().any(|dtype| is_half(*dtype)) {
            let operands = [lhs.primitive.clone(), rhs.primitive.clone()];
            // If the dividend and the quotient both need a rounded copy, keep the quotient: the next
            // operation may keep it too.
            let is_rounded = lhs.dtype() == DType::F32 && kept[0] == half;
            let fits = call.decision.flags.contains(TensorFlags::fits(half));
            let quotient = (kind == Arithmetic::Div && fits && is_rounded).then_some(half);
            if let Some(out) = call.run(|| tape.arithmetic(kind, operands, kept, quotient)) {
                [&lhs, &rhs].into_iter().for_each(|t| call.watch(t));
                return call.recorded(out);
            }
        }
    }
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    call.result(call.run(|| match (kind, tape) {
        (Arithmetic::Mul, _) => B::float_mul(lhs, rhs),
        (Arithmetic::Div, Some((tape, _))) if is_half(lhs.dtype()) => {
            tape.half_quotient([lhs, rhs])
        }
        (Arithmetic::Div, _) => B::float_div(lhs, rhs),
    }))
}

/// An integer power, in FP32.
pub(super) fn power<B: Backend>(op: Op, tensor: AmpTensor<B>, exponent: Scalar) -> AmpTensor<B> {
    let call = Call::new(op, [&tensor]);
    if exponent.elem::<f64>() == 2.0
        && let Some((tape, half)) = call.recording::<B>()
    {
        let operand = call.recorded_operand(tensor.unshared());
        let kept = kept(&operand, half);
        if is_half(kept)
            && let Some(out) = call.run(|| tape.square(operand.into_primitive(), kept))
        {
            call.watch(&tensor);
            return call.result(out);
        }
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_powi_scalar(tensor, exponent)))
}

/// A sum or mean, in FP32.
pub(super) fn reduction<B: Backend>(
    kind: Reduction,
    op: Op,
    tensor: AmpTensor<B>,
    dim: Option<usize>,
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&tensor]);
    let tape = call.recording::<B>().map(|(tape, _)| tape);
    // Clones of a half tensor share its FP32 copy. If a tensor has none, record the sum on the half
    // tensor: its gradient is rounded before it is expanded.
    if let Some(tape) = tape
        && tensor.shared_copy(DType::F32).is_none()
        && let Some(out) = call.run(|| {
            let operand = call.recorded_operand(tensor.unshared());
            tape.reduction(kind, operand.into_primitive(), dim)
        })
    {
        call.watch(&tensor);
        return call.result(out);
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| {
        tape.and_then(|tape| tape.reduction(kind, tensor.clone(), dim))
            .unwrap_or_else(|| run(tensor))
    }))
}

/// Operands, with the FP32 statistic in place of one that a program cast to half.
fn with_statistics<B: Backend>(
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> (AmpTensor<B>, AmpTensor<B>) {
    let rhs = rhs.or_statistic_of(&lhs);
    (lhs.or_statistic_of(&rhs), rhs)
}

/// The dtype in which an operand is kept for the backward pass.
pub(super) fn kept<B: Backend>(tensor: &AmpTensor<B>, half: DType) -> DType {
    let fits = TensorFlags::fits(half) | TensorFlags::exact(half);
    if tensor.dtype() == DType::F32 && tensor.flags().intersects(fits) {
        half
    } else {
        tensor.dtype()
    }
}

fn is_noise<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.flags().contains(TensorFlags::BINARY)
}
