//! A power in FP32.

use super::cast::operand_grad;
use super::*;
use crate::call::powf_scalar;

/// A power of at least 2 in FP32, which keeps its operand in the dtype `kept`.
#[derive(Debug, Clone)]
pub(crate) struct Power {
    pub exponent: f64,
    pub kept: DType,
}

impl Power {
    /// A square is one product.
    const SQUARE: f64 = 2.0;
}

impl<B: Backend> Step<B, 1> for Power {
    /// The dtype of the operand, and the operand.
    type Kept = (DType, AmpTensor<B>);

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        match self.exponent {
            Self::SQUARE => mul(widened(tensor.clone()), tensor),
            exponent => powf_scalar(widened(tensor), exponent),
        }
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward([tensor.clone()]);
        ((tensor.dtype(), cast(tensor, self.kept)), out)
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                let operand = cast(kept, DType::F32);
                let slope = match self.exponent {
                    Self::SQUARE => operand,
                    exponent => powf_scalar(operand, exponent - 1.0),
                };
                mul(grad, mul_scalar(slope, self.exponent))
            })
        });
    }
}
