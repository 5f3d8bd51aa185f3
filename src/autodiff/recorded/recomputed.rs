//! Functions that FP32 computes of a tensor that is kept in half.

use super::cast::operand_grad;
use super::sigmoidal::tanh_gradient;
use super::*;
use crate::call::{div_scalar, is_greater, is_lower, mask_fill, sigmoid_backward};
use crate::tensor::{Function, computed};

/// Functions of each element, in FP32. The operand is kept in the dtype `kept`, and the functions are computed again for the
/// backward pass: near 1, half would round a sigmoid to 1, which has no gradient.
#[derive(Debug, Clone)]
pub(crate) struct Recomputed {
    pub functions: Vec<Function>,
    pub kept: DType,
}

impl Recomputed {
    /// The functions up to the last one whose gradient follows from its operand or its result.
    fn needed(&self) -> &[Function] {
        let needs = |function: &Function| match function {
            Function::Sigmoid | Function::Tanh | Function::AtLeast(_) | Function::AtMost(_) => true,
            Function::Plus(_) | Function::Times(_) | Function::Over(_) | Function::Neg => false,
        };
        let needed = self.functions.iter().rposition(needs);
        &self.functions[..needed.map_or(0, |last| last + 1)]
    }

    /// The operand, and the results of these functions.
    fn values<B: Backend>(&self, tensor: AmpTensor<B>) -> Vec<AmpTensor<B>> {
        let mut values = vec![widened(tensor)];
        for (i, function) in self.needed().iter().enumerate() {
            values.push(computed::<Amp<B>>(values[i].clone(), function));
        }
        values
    }
}

impl<B: Backend> Step<B, 1> for Recomputed {
    /// The dtype of the operand, and the operand if it is needed.
    type Kept = (DType, Option<AmpTensor<B>>);

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        let functions = self.functions.iter();
        functions.fold(widened(tensor), computed::<Amp<B>>)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward([tensor.clone()]);
        let dtype = tensor.dtype();
        let kept = (!self.needed().is_empty()).then(|| cast(tensor, self.kept));
        ((dtype, kept), out)
    }

    fn retrieve(&self, [tensor]: Operands<B, 1>) -> Self::Kept {
        (tensor.dtype(), Some(tensor))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                let values: Vec<_> = kept
                    .into_iter()
                    .flat_map(|kept| self.values(kept))
                    .collect();
                let mut grad = widened(grad);
                for (i, function) in self.functions.iter().enumerate().rev() {
                    grad = match function {
                        Function::Sigmoid => sigmoid_backward(values[i + 1].clone(), grad),
                        Function::Tanh => tanh_gradient(values[i + 1].clone(), grad),
                        Function::AtLeast(bound) => {
                            let below = is_lower(values[i].clone(), *bound);
                            mask_fill(grad, below, 0.into())
                        }
                        Function::AtMost(bound) => {
                            let above = is_greater(values[i].clone(), *bound);
                            mask_fill(grad, above, 0.into())
                        }
                        Function::Plus(_) => grad,
                        Function::Times(scalar) => mul_scalar(grad, *scalar),
                        Function::Over(scalar) => div_scalar(grad, *scalar),
                        Function::Neg => neg(grad),
                    };
                }
                grad
            })
        });
    }
}
