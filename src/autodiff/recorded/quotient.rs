//! A quotient of half tensors. Its gradients are computed in FP32 and rounded once.

use super::arithmetic::{Product, divisor_grad};
use super::cast::operand_grad;
use super::sum::reduced;
use super::*;

/// A quotient of half tensors.
#[derive(Debug, Clone)]
pub(crate) struct HalfQuotient;

impl<B: Backend> Step<B, 2> for HalfQuotient {
    type Kept = Operands<B, 2>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [lhs, rhs]: Operands<B, 2>) -> AmpTensor<B> {
        div(lhs, rhs)
    }

    fn keep(&self, operands: Operands<B, 2>, _: [bool; 2]) -> (Self::Kept, AmpTensor<B>) {
        (operands.clone(), self.forward(operands))
    }

    fn retrieve(&self, operands: Operands<B, 2>) -> Self::Kept {
        operands
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let [lhs, rhs] = ops.state;
        let [left, right] = [lhs.shape(), rhs.shape()];
        let dtype = lhs.dtype();
        let rhs = widened(rhs);
        let divisor = rhs.clone();
        binary::<Amp<B>, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                operand_grad(grad, dtype, |grad| {
                    reduced(Product::Div.of(grad, divisor), &left)
                })
            },
            |grad| operand_grad(grad, dtype, |grad| divisor_grad(grad, lhs, rhs, &right)),
        );
    }
}
