//! A square in FP32.

use super::cast::operand_grad;
use super::*;

/// A square in FP32 that keeps its operand in this dtype.
#[derive(Debug, Clone)]
pub(crate) struct Square(pub DType);

impl<B: Backend> Step<B, 1> for Square {
    /// The dtype of the operand, and the operand.
    type Kept = (DType, AmpTensor<B>);

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        mul(widened(tensor.clone()), tensor)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward([tensor.clone()]);
        ((tensor.dtype(), cast(tensor, self.0)), out)
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                mul(grad, mul_scalar(cast(kept, DType::F32), 2))
            })
        });
    }
}
