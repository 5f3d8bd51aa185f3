//! Functions that FP32 computes of a tensor that is kept in half.

use super::cast::operand_grad;
use super::sigmoidal::tanh_gradient;
use super::*;
use crate::call::sigmoid_backward;
use crate::tensor::Function;

/// Functions of each element, in FP32. The operand is kept in the dtype `kept`, and the functions are computed again for the
/// backward pass: near 1, half would round a sigmoid to 1, which has no gradient.
#[derive(Debug, Clone)]
pub(crate) struct Recomputed {
    pub functions: Vec<Function>,
    pub kept: DType,
}

impl<B: Backend> Step<B, 1> for Recomputed {
    /// The dtype of the operand, and the operand.
    type Kept = (DType, AmpTensor<B>);

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        let functions = self.functions.iter();
        functions.fold(widened(tensor), Function::of::<Amp<B>>)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward([tensor.clone()]);
        ((tensor.dtype(), cast(tensor, self.kept)), out)
    }

    fn retrieve(&self, [tensor]: Operands<B, 1>) -> Self::Kept {
        (tensor.dtype(), tensor)
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                let mut tensor = widened(kept);
                let mut results = Vec::with_capacity(self.functions.len());
                for function in &self.functions {
                    tensor = Function::of::<Amp<B>>(tensor, function);
                    results.push(tensor.clone());
                }
                let results = self.functions.iter().zip(results).rev();
                results.fold(widened(grad), |grad, (function, out)| match function {
                    Function::Sigmoid => sigmoid_backward(out, grad),
                    Function::Tanh => tanh_gradient(out, grad),
                    Function::Plus(_) => grad,
                    Function::Times(scalar) => mul_scalar(grad, *scalar),
                    Function::Neg => neg(grad),
                })
            })
        });
    }
}
