//! A quotient of half tensors. Its gradients are computed in FP32 and rounded once.

use super::arithmetic::{arithmetic, divisor_grad};
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
                            reduced(arithmetic(Arithmetic::Div, grad, divisor), &left)
                        })
                    },
                    |grad| operand_grad(grad, dtype, |grad| divisor_grad(grad, lhs, rhs, &right)),
                );
            },
        )
    }
}
