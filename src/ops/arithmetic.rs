//! Tensor arithmetic, as in composed norms: an FP32 result of half tensors and small statistics
//! keeps half copies for the backward pass.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Scalar, TensorMetadata};

use super::{Call, Op, fitting};
use crate::autodiff::tape::{Arithmetic, Reduction, Sign};
use crate::policy::is_half;
use crate::tensor::{TERMS, TensorFlags};
use crate::{Amp, AmpTensor};

/// A tracked operand that is this many times smaller than the other is a statistic or a parameter
/// of its channels: beside an operand that fits in half, its result fits in half too. An untracked
/// operand may be anything, such as a mask of -1e9 or a factor of 1e-8.
const SMALL: usize = 16;

/// A sum or difference.
pub(super) fn sum<B: Backend>(
    sign: Sign,
    named: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let terms = terms(&lhs, &rhs);
    let lhs = match terms {
        Some(terms) if terms > TERMS => Amp::<B>::float_cast(lhs, FloatDType::F32),
        _ => lhs,
    };
    let call = Call::new(named, &[&lhs, &rhs]);
    let widened = widened(&call, &lhs, &rhs, true);
    let tape = match lhs.shape() != rhs.shape() {
        true => call.recording(&[&lhs, &rhs]),
        false => None,
    };
    // FP32 that was never half adds up in Burn's order.
    let tape = tape.filter(|(_, half)| lhs.fits(*half) || rhs.fits(*half));
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    let out = call.run(|| match (tape, sign) {
        (Some((tape, _)), _) => tape.sum(sign, [lhs, rhs]),
        (None, Sign::Plus) => B::float_add(lhs, rhs),
        (None, Sign::Minus) => B::float_sub(lhs, rhs),
    });
    let out = marked(call.result(out), widened);
    match terms {
        Some(terms) if is_half(out.dtype()) => {
            let flags = out.flags().with_terms(terms);
            out.with_flags(flags)
        }
        _ => out,
    }
}

/// How many gradients this sum of two half gradients has in all. Autodiff adds up the gradients of a
/// tensor in its dtype, and a sum of many half numbers stops growing: it goes on in FP32.
fn terms<B: Backend>(lhs: &AmpTensor<B>, rhs: &AmpTensor<B>) -> Option<u8> {
    let are_gradients = (lhs.flags() & rhs.flags()).contains(TensorFlags::BACKWARD);
    let are_half = is_half(lhs.dtype()) && lhs.dtype() == rhs.dtype();
    (are_gradients && are_half).then(|| lhs.flags().terms() + rhs.flags().terms())
}

/// A product or quotient.
pub(super) fn product<B: Backend>(
    op: Arithmetic,
    named: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&lhs, &rhs]);
    let widened = widened(&call, &lhs, &rhs, false);
    let tape = call.recording(&[&lhs, &rhs]);
    if let Some((tape, half)) = tape {
        let dropped = match (op, is_noise(&lhs), is_noise(&rhs)) {
            (Arithmetic::Mul, false, true) => Some((&lhs, &rhs)),
            (Arithmetic::Mul, true, false) => Some((&rhs, &lhs)),
            _ => None,
        };
        if let Some((tensor, noise)) = dropped
            && let Some(out) = call.run(|| tape.dropout(&tensor.primitive, &noise.primitive))
        {
            call.watch(tensor);
            // A product with zeros and ones stays in the tensor's range.
            return marked(call.recorded(out), fitting(&[tensor]));
        }
        let wide = match call.plan.operands {
            Some(dtype) => dtype == DType::F32,
            None => lhs.dtype() == DType::F32,
        };
        let kept = [&lhs, &rhs].map(|t| kept(t, half));
        if wide && kept.iter().any(|dtype| is_half(*dtype)) {
            let operands = [lhs.primitive.clone(), rhs.primitive.clone()];
            // Of two rounded copies, the one that the next operation keeps as well.
            let is_rounded = lhs.dtype() == DType::F32 && kept[0] == half;
            let is_quotient = op == Arithmetic::Div && widened.contains(TensorFlags::widened(half));
            let quotient = (is_quotient && is_rounded).then_some(half);
            if let Some(out) = call.run(|| tape.arithmetic(op, operands, kept, quotient)) {
                [&lhs, &rhs].into_iter().for_each(|t| call.watch(t));
                return marked(call.recorded(out), widened);
            }
        }
    }
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    let out = call.run(|| match (op, tape) {
        (Arithmetic::Mul, _) => B::float_mul(lhs, rhs),
        (Arithmetic::Div, Some((tape, _))) if is_half(lhs.dtype()) => {
            tape.half_quotient([lhs, rhs])
        }
        (Arithmetic::Div, _) => B::float_div(lhs, rhs),
    });
    marked(call.result(out), widened)
}

/// An integer power, in FP32.
pub(super) fn power<B: Backend>(named: Op, tensor: AmpTensor<B>, exponent: Scalar) -> AmpTensor<B> {
    let call = Call::new(named, &[&tensor]);
    if exponent.elem::<f64>() == 2.0
        && let Some((tape, half)) = call.recording(&[&tensor])
    {
        let kept = kept(&tensor, half);
        let operand = tensor.primitive.clone();
        if is_half(kept)
            && let Some(out) = call.run(|| tape.square(operand, kept))
        {
            call.watch(&tensor);
            return call.recorded(out);
        }
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_powi_scalar(tensor, exponent)))
}

/// A sum or mean, in FP32.
pub(super) fn reduction<B: Backend>(
    kind: Reduction,
    named: Op,
    tensor: AmpTensor<B>,
    dim: Option<usize>,
    op: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&tensor]);
    let tape = call.recording(&[&tensor]).map(|(tape, _)| tape);
    // Clones of a half tensor share its FP32 copy. Of one that has none, the gradient is rounded
    // before it is expanded.
    if let Some(tape) = tape
        && tensor.shared_copy(DType::F32).is_none()
        && let Some(out) = call.run(|| tape.reduction(kind, tensor.primitive.clone(), dim))
    {
        call.watch(&tensor);
        return call.recorded(out);
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| {
        tape.and_then(|tape| tape.reduction(kind, tensor.clone(), dim))
            .unwrap_or_else(|| op(tensor))
    }))
}

/// The dtype in which an operand is kept for the backward pass.
pub(super) fn kept<B: Backend>(tensor: &AmpTensor<B>, half: DType) -> DType {
    let fits = TensorFlags::widened(half) | TensorFlags::exact(half);
    match tensor.dtype() == DType::F32 && tensor.flags().intersects(fits) {
        true => half,
        false => tensor.dtype(),
    }
}

fn is_noise<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.flags().contains(TensorFlags::BINARY)
}

/// The widened flags of a result. Half can hold the result if each operand is half, FP32 that fits
/// in half, or a statistic beside the other operand. In a product, one operand must be a statistic:
/// a product of two large operands may be of any size.
fn widened<B: Backend>(
    call: &Call,
    lhs: &AmpTensor<B>,
    rhs: &AmpTensor<B>,
    is_sum: bool,
) -> TensorFlags {
    let is_statistic = |t: &AmpTensor<B>, of: &AmpTensor<B>| {
        t.shape().num_elements() * SMALL <= of.shape().num_elements()
            && call
                .tape(&[t])
                .is_some_and(|(tape, _)| tape.is_tracked(&t.primitive))
    };
    TensorFlags::widened_where(|half| match [lhs.fits(half), rhs.fits(half)] {
        [false, false] => false,
        [true, _] if is_statistic(rhs, lhs) => true,
        [_, true] if is_statistic(lhs, rhs) => true,
        fit => is_sum && fit == [true, true],
    })
}

/// The result, with the flags `widened` if it is FP32.
fn marked<B: Backend>(out: AmpTensor<B>, widened: TensorFlags) -> AmpTensor<B> {
    let flags = out.flags() - TensorFlags::WIDENED;
    match out.dtype() {
        DType::F32 => out.with_flags(flags | widened),
        _ => out.with_flags(flags),
    }
}
