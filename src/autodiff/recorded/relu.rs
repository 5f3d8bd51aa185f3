//! A ReLU that keeps its result.

use super::*;
use crate::call::{relu, relu_backward};

/// A ReLU that keeps its result instead of its operand; the next layer keeps the result too.
#[derive(Debug, Clone)]
pub(crate) struct Relu;

impl<B: Backend> Step<B, 1> for Relu {
    type Kept = AmpTensor<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        relu(tensor)
    }

    fn keep(&self, operands: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward(operands);
        (out.clone(), out)
    }

    /// The operand is positive where the result is.
    fn retrieve(&self, [operand]: Operands<B, 1>) -> Self::Kept {
        operand
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            relu_backward(ops.state, grad)
        });
    }
}
