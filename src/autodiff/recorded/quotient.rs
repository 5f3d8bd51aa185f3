//! A quotient of half tensors. Its gradients are computed in FP32 and rounded once.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_half_quotient(operands: [TapeTensor<B>; 2]) -> TapeTensor<B> {
        type A<B> = Amp<B>;
        let [left, right] = operands.each_ref().map(|operand| operand.shape());
        let dtype = operands[0].dtype();
        Self::record(
            operands,
            |[lhs, rhs]| A::<B>::float_div(lhs, rhs),
            |[lhs, rhs]| ((lhs.clone(), rhs.clone()), A::<B>::float_div(lhs, rhs)),
            Some(|[lhs, rhs]: [_; 2]| (lhs, rhs)),
            move |ops, grads| {
                let (lhs, rhs) = ops.state;
                let rhs = widened(rhs);
                let divisor = rhs.clone();
                binary::<Amp<B>, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| {
                        operand_grad(grad, dtype, |grad| {
                            reduced(A::<B>::float_div(widened(grad), divisor), &left)
                        })
                    },
                    |grad| {
                        operand_grad(grad, dtype, |grad| {
                            let quotient = A::<B>::float_div(widened(lhs), rhs.clone());
                            let grad = A::<B>::float_div(widened(grad), rhs);
                            A::<B>::float_neg(reduced(A::<B>::float_mul(grad, quotient), &right))
                        })
                    },
                );
            },
        )
    }
}
