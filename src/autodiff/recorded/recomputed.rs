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

impl Recomputed {
    /// The functions up to the last one whose gradient follows from its result.
    fn needed(&self) -> &[Function] {
        let needs = |function: &Function| matches!(function, Function::Sigmoid | Function::Tanh);
        let needed = self.functions.iter().rposition(needs);
        &self.functions[..needed.map_or(0, |last| last + 1)]
    }

    /// The results of these functions.
    fn results<B: Backend>(&self, tensor: AmpTensor<B>) -> Vec<AmpTensor<B>> {
        let mut tensor = widened(tensor);
        let results = self.needed().iter().map(|function| {
            tensor = Function::of::<Amp<B>>(tensor.clone(), function);
            tensor.clone()
        });
        results.collect()
    }
}

impl<B: Backend> Step<B, 1> for Recomputed {
    /// The dtype of the operand, and the operand if it is needed.
    type Kept = (DType, Option<AmpTensor<B>>);

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        let functions = self.functions.iter();
        functions.fold(widened(tensor), Function::of::<Amp<B>>)
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
                let results: Vec<_> = kept
                    .into_iter()
                    .flat_map(|kept| self.results(kept))
                    .collect();
                let mut grad = widened(grad);
                for (i, function) in self.functions.iter().enumerate().rev() {
                    grad = match function {
                        Function::Sigmoid => sigmoid_backward(results[i].clone(), grad),
                        Function::Tanh => tanh_gradient(results[i].clone(), grad),
                        Function::Plus(_) => grad,
                        Function::Times(scalar) => mul_scalar(grad, *scalar),
                        Function::Neg => neg(grad),
                    };
                }
                grad
            })
        });
    }
}
