//! Arithmetic of tensors, where composed norms live: what is computed in FP32 of half tensors and
//! small statistics keeps half copies for the backward pass.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::{Call, Op, recording};
use crate::AmpTensor;
use crate::autodiff::tape::Arithmetic;
use crate::tensor::{Marks, is_half};

/// An operand that autodiff tracks, this many times smaller than the other, is a statistic or a
/// parameter of its channels: its broadcast does not make the result any more FP32 than the other
/// is. One that it does not track may be anything, as a mask of -1e9 or a factor of 1e-8.
const SMALL: usize = 16;

/// A sum or difference.
#[inline(never)]
pub(super) fn sum<B: Backend>(
    named: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
    op: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&lhs, &rhs]);
    let range = in_half_range(&lhs, &rhs, true);
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    marked(call.result(call.run(|| op(lhs, rhs))), range)
}

/// A product or quotient.
#[inline(never)]
pub(super) fn product<B: Backend>(
    op: Arithmetic,
    named: Op,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&lhs, &rhs]);
    let range = in_half_range(&lhs, &rhs, false);
    if let Some((tape, half)) = recording(&[&lhs, &rhs]) {
        let dropped = match (op, is_noise(&lhs), is_noise(&rhs)) {
            (Arithmetic::Mul, false, true) => Some((&lhs, &rhs)),
            (Arithmetic::Mul, true, false) => Some((&rhs, &lhs)),
            _ => None,
        };
        if let Some((tensor, noise)) = dropped
            && let Some(out) = call.run(|| tape.dropout(&tensor.primitive, &noise.primitive))
        {
            // Zeros and ones leave a tensor in its range.
            let out = AmpTensor::new(out, call.marks());
            return marked(out, tensor.fits_half());
        }
        let wide = match call.compute_dtype() {
            Some(dtype) => dtype == DType::F32,
            None => lhs.dtype() == DType::F32,
        };
        let kept = [&lhs, &rhs].map(|t| kept(t, half));
        if wide && kept.iter().any(|dtype| is_half(*dtype)) {
            let operands = [lhs.primitive.clone(), rhs.primitive.clone()];
            if let Some(out) = call.run(|| tape.arithmetic(op, operands, kept)) {
                return marked(AmpTensor::new(out, call.marks()), range);
            }
        }
    }
    let (lhs, rhs) = (call.operand(lhs), call.operand(rhs));
    let out = call.run(|| match op {
        Arithmetic::Mul => B::float_mul(lhs, rhs),
        Arithmetic::Div => B::float_div(lhs, rhs),
    });
    marked(call.result(out), range)
}

/// An integer power, in FP32.
#[inline(never)]
pub(super) fn power<B: Backend>(named: Op, tensor: AmpTensor<B>, exponent: Scalar) -> AmpTensor<B> {
    let call = Call::new(named, &[&tensor]);
    if exponent.elem::<f64>() == 2.0
        && let Some((tape, half)) = recording(&[&tensor])
    {
        let kept = kept(&tensor, half);
        let operand = tensor.primitive.clone();
        if is_half(kept)
            && let Some(out) = call.run(|| tape.square(operand, kept))
        {
            return AmpTensor::new(out, call.marks());
        }
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::float_powi_scalar(tensor, exponent)))
}

/// The dtype in which the backward pass is to find an operand.
pub(super) fn kept<B: Backend>(tensor: &AmpTensor<B>, half: DType) -> DType {
    let fits = Marks::WIDENED | Marks::EXACT;
    match tensor.dtype() == DType::F32 && tensor.marks().intersects(fits) {
        true => half,
        false => tensor.dtype(),
    }
}

fn is_noise<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.marks().contains(Marks::BINARY)
}

/// Whether half holds the result as well: each operand is half, or FP32 that half holds, or a
/// statistic beside the other. Of the operands of a product one must be that: a product of two
/// large ones may be of any size.
fn in_half_range<B: Backend>(lhs: &AmpTensor<B>, rhs: &AmpTensor<B>, is_sum: bool) -> bool {
    let is_statistic = |t: &AmpTensor<B>, of: &AmpTensor<B>| {
        t.shape().num_elements() * SMALL <= of.shape().num_elements()
            && recording(&[t]).is_some_and(|(tape, _)| tape.is_tracked(&t.primitive))
    };
    match [lhs.fits_half(), rhs.fits_half()] {
        [false, false] => false,
        [true, _] if is_statistic(rhs, lhs) => true,
        [_, true] if is_statistic(lhs, rhs) => true,
        fit => is_sum && fit == [true, true],
    }
}

/// The result, marked where it is FP32 that half holds as well.
fn marked<B: Backend>(out: AmpTensor<B>, in_range: bool) -> AmpTensor<B> {
    let mut marks = out.marks();
    marks.set(Marks::WIDENED, in_range && out.dtype() == DType::F32);
    out.with_marks(marks)
}
