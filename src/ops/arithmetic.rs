//! Tensor arithmetic, as in composed norms. Where half tensors and small statistics give an FP32
//! result, half copies are kept for the backward pass.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::unrounded::{gated, is_one_less, masked, one_less, two_sigmoids};
use crate::AmpTensor;
use crate::autodiff::recorded::{
    Arithmetic, HalfQuotient, Power, Product, Reduced, Reduction, Sum,
};
use crate::call::{Call, op, with_statistics};
use crate::policy::{Op, is_half};
use crate::tensor::{Side, TensorFlags};

/// A sum or difference.
pub(super) fn sum<B: Backend, S: Side<B>>(
    step: Sum,
    op: Op,
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let (lhs, rhs) = with_statistics(lhs, rhs);
    if step == Sum::Minus && is_one_less(&lhs, &rhs) {
        return one_less(rhs);
    }
    let [lhs, rhs] = two_sigmoids([lhs, rhs]);
    let call = Call::new(op, [&lhs, &rhs]);
    if step == Sum::Plus
        && !call.watched
        && let Some(sum) = lhs.divided_sum(&rhs)
    {
        return sum;
    }
    // FP32 tensors that were never half are summed in Burn's order.
    let was_half = |half| lhs.fits(half) || rhs.fits(half);
    let records = call.decision.records_in.is_some_and(was_half) && lhs.shape() != rhs.shape();
    let operands = [call.operand(lhs), call.operand(rhs)];
    call.result(call.run(|| {
        let recorded = call.record_if(records, step, operands);
        recorded.unwrap_or_else(|[lhs, rhs]| match step {
            Sum::Plus => B::float_add(lhs, rhs),
            Sum::Minus => B::float_sub(lhs, rhs),
        })
    }))
}

/// A sum that is recorded as one of the program's own.
pub(super) fn added<B: Backend, S: Side<B>>(
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    sum(Sum::Plus, op!(float_add), lhs, rhs)
}

/// A product or quotient.
pub(super) fn product<B: Backend, S: Side<B>>(
    kind: Product,
    op: Op,
    lhs: AmpTensor<B, S>,
    rhs: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let (lhs, rhs) = with_statistics(lhs, rhs);
    if kind == Product::Mul
        && let Some(state) = gated(op, &lhs, &rhs)
    {
        return state;
    }
    let [lhs, rhs] = two_sigmoids([lhs, rhs]);
    let ([lhs, rhs], unrounded) = match kind {
        Product::Mul => masked(lhs, rhs),
        Product::Div => ([lhs, rhs], None),
    };
    let mut call = Call::new(op, [&lhs, &rhs]);
    if kind == Product::Div && rhs.unrounded().is_some() {
        call.decision = call.decision.dividing(lhs.dtype());
    }
    if let Some(half) = call.decision.records_in {
        let dropped = match (kind, is_noise(&lhs), is_noise(&rhs)) {
            (Product::Mul, false, true) => Some((&lhs, &rhs)),
            (Product::Mul, true, false) => Some((&rhs, &lhs)),
            _ => None,
        };
        if let Some((tensor, noise)) = dropped
            && let Some(out) = call.run(|| S::record_dropout(&tensor.primitive, &noise.primitive))
        {
            call.watch(tensor);
            // A product with zeros and ones stays in the tensor's range.
            let out = call.in_own_dtype(out);
            let fits = tensor.flags() & TensorFlags::FITS;
            let mut flags = (out.flags() - TensorFlags::FITS) | fits;
            flags.set(TensorFlags::DROPPED, is_half(out.dtype()));
            return out.with_flags(flags);
        }
        let wide = call.decision.operands.unwrap_or(lhs.dtype()) == DType::F32;
        let mut kept = [&lhs, &rhs].map(|t| kept(t, half));
        // A sigmoid that is 0 in f16 may divide.
        if [&lhs, &rhs]
            .iter()
            .all(|t| t.flags().contains(TensorFlags::GATE))
        {
            kept = [DType::F32; 2];
        } else if kind == Product::Div
            && (rhs.unrounded().is_some() || rhs.flags().contains(TensorFlags::GATE))
        {
            kept[1] = DType::F32;
        }
        if wide && kept.iter().any(|dtype| is_half(*dtype)) {
            let operands = [&lhs, &rhs].map(|t| match t.unrounded() {
                Some(_) => S::into_dtype(t.clone(), DType::F32),
                None => t.primitive.clone(),
            });
            // If the dividend and the quotient both need a rounded copy, keep the quotient: the next
            // operation may keep it too.
            let is_rounded = lhs.dtype() == DType::F32 && kept[0] == half;
            let fits = call.decision.flags.contains(TensorFlags::fits(half));
            let step = Arithmetic {
                op: kind,
                kept,
                kept_quotient: (kind == Product::Div && fits && is_rounded).then_some(half),
            };
            if let Ok(out) = call.run(|| S::record(step, operands)) {
                [&lhs, &rhs].into_iter().for_each(|t| call.watch(t));
                return call.in_own_dtype(call.in_result_dtype(out));
            }
        }
    }
    let operands = [call.operand(lhs), call.operand(rhs)];
    let is_half_quotient =
        kind == Product::Div && call.decision.records_in.is_some() && is_half(operands[0].dtype());
    let out = call.result(call.run(|| {
        let recorded = call.record_if(is_half_quotient, HalfQuotient, operands);
        recorded.unwrap_or_else(|[lhs, rhs]| match kind {
            Product::Mul => B::float_mul(lhs, rhs),
            Product::Div => B::float_div(lhs, rhs),
        })
    }));
    let unrounded = unrounded.filter(|_| is_half(out.dtype()));
    out.with_unrounded(unrounded)
}

/// A power by a scalar, in FP32.
pub(super) fn power<B: Backend, S: Side<B>>(
    op: Op,
    tensor: AmpTensor<B, S>,
    scalar: Scalar,
    run: impl FnOnce(FloatTensor<B>, Scalar) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&tensor]);
    let exponent = scalar.elem();
    // The slope of a lower power is not that of a rounded number near 0.
    if exponent >= 2.0
        && let Some(half) = call.decision.records_in
    {
        let operand = match tensor.unrounded() {
            Some(_) => tensor.clone().computed_in_fp32(),
            None => call.recorded_operand(tensor.unshared()),
        };
        let kept = kept(&operand, half);
        // What is kept is the half tensor that there is.
        if let Some(source) = tensor.source().filter(|half| half.dtype() == kept) {
            S::set_copy(&operand.primitive, source);
        }
        let operand = [operand.into_primitive()];
        let step = Power { exponent, kept };
        if let Ok(out) = call.run(|| call.record_if(is_half(kept), step, operand)) {
            call.watch(&tensor);
            return call.result(out);
        }
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| run(tensor, scalar)))
}

/// A sum or mean, in FP32.
pub(super) fn reduction<B: Backend, S: Side<B>>(
    kind: Reduced,
    op: Op,
    tensor: AmpTensor<B, S>,
    dim: Option<usize>,
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&tensor]);
    let records = call.decision.records_in.is_some();
    let step = Reduction { kind, dim };
    // Clones of a half tensor share its FP32 copy. If a tensor has none, record the sum on the half
    // tensor: its gradient is rounded before it is expanded.
    if records
        && tensor.unrounded().is_none()
        && tensor.shared_copy(DType::F32).is_none()
        && let Ok(out) = call.run(|| {
            let operand = call.recorded_operand(tensor.unshared());
            S::record(step.clone(), [operand.into_primitive()])
        })
    {
        call.watch(&tensor);
        return call.result(out);
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| {
        let recorded = call.record_if(records, step, [tensor]);
        recorded.unwrap_or_else(|[tensor]| run(tensor))
    }))
}

/// The dtype in which an operand is kept for the backward pass.
pub(super) fn kept<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>, half: DType) -> DType {
    let fits = TensorFlags::fits(half) | TensorFlags::exact(half);
    if tensor.dtype() == DType::F32 && tensor.flags().intersects(fits) {
        half
    } else {
        tensor.dtype()
    }
}

fn is_noise<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> bool {
    tensor.flags().contains(TensorFlags::BINARY)
}
