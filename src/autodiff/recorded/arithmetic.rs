//! A product or quotient in FP32.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_arithmetic(
        op: Arithmetic,
        operands: [TapeTensor<B>; 2],
        [keep_lhs, keep_rhs]: [DType; 2],
        keep_quotient: Option<DType>,
    ) -> TapeTensor<B> {
        type A<B> = Amp<B>;
        let [lhs_tracked, rhs_tracked] = operands.each_ref().map(|operand| operand.is_tracked());
        let [left, right] = operands.each_ref().map(|operand| operand.shape());
        let [lhs_dtype, rhs_dtype] = operands.each_ref().map(|operand| operand.dtype());
        Self::record(
            operands,
            move |[lhs, rhs]| arithmetic(op, lhs, rhs),
            |[lhs, rhs]| {
                let out = arithmetic(op, lhs.clone(), rhs.clone());
                // Each gradient needs the other operand. A quotient needs `rhs` for both gradients. The
                // gradient of `rhs` also needs `lhs` or the quotient.
                let lhs = rhs_tracked.then(|| match keep_quotient {
                    Some(dtype) => cast(out.clone(), dtype),
                    None => cast(lhs, keep_lhs),
                });
                let rhs = (lhs_tracked || op == Arithmetic::Div).then(|| cast(rhs, keep_rhs));
                ((lhs, rhs), out)
            },
            None::<fn(_) -> _>,
            move |ops, grads| {
                let (lhs, rhs) = ops.state;
                let divisor = rhs.clone();
                let kept = "kept where the other gradient is wanted";
                binary::<Amp<B>, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| {
                        operand_grad(grad, lhs_dtype, |grad| {
                            let grad = arithmetic(op, grad, rhs.expect(kept));
                            reduced(grad, &left)
                        })
                    },
                    |grad| {
                        operand_grad(grad, rhs_dtype, |grad| {
                            let lhs = lhs.expect(kept);
                            if op == Arithmetic::Mul {
                                let grad = A::<B>::float_mul(grad, lhs);
                                return reduced(grad, &right);
                            }
                            let divisor = divisor.expect(kept);
                            let grad = match keep_quotient {
                                // The quotient fits in half, so the product does not overflow: sum
                                // first, and divide the smaller tensor.
                                Some(_) => {
                                    let grad = A::<B>::float_mul(grad, widened(lhs));
                                    A::<B>::float_div(reduced(grad, &right), divisor)
                                }
                                None => return divisor_grad(grad, lhs, divisor, &right),
                            };
                            A::<B>::float_neg(grad)
                        })
                    },
                );
            },
        )
    }
}

/// The gradient of a divisor: -lhs / rhs², ordered so that no square or product overflows.
pub(super) fn divisor_grad<B: Backend>(
    grad: AmpTensor<B>,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
    shape: &Shape,
) -> AmpTensor<B> {
    let quotient = arithmetic(Arithmetic::Div, lhs, rhs.clone());
    let grad = arithmetic(Arithmetic::Div, grad, rhs);
    Amp::<B>::float_neg(reduced(Amp::<B>::float_mul(grad, quotient), shape))
}

pub(super) fn arithmetic<B: Backend>(
    op: Arithmetic,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
) -> AmpTensor<B> {
    let lhs = widened(lhs);
    match op {
        Arithmetic::Mul => Amp::<B>::float_mul(lhs, rhs),
        Arithmetic::Div => Amp::<B>::float_div(lhs, rhs),
    }
}
