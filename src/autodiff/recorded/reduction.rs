//! A sum or a mean in FP32.

use super::cast::operand_grad;
use super::*;
use crate::call::{expand, mean, mean_dim, sum};

/// The reductions whose gradient is the same for each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduced {
    Sum,
    Mean,
}

/// A sum or mean in FP32, over one dimension or over all. All values have the same gradient: it is computed once
/// and expanded. Autodiff multiplies a tensor of ones instead.
#[derive(Debug, Clone)]
pub(crate) struct Reduction {
    pub kind: Reduced,
    pub dim: Option<usize>,
}

impl<B: Backend> Step<B, 1> for Reduction {
    /// Shape and dtype of the operand.
    type Kept = (Shape, DType);

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        match (self.kind, self.dim) {
            (Reduced::Sum, Some(dim)) => sum_dim(tensor, dim),
            (Reduced::Sum, None) => sum(tensor),
            (Reduced::Mean, Some(dim)) => mean_dim(tensor, dim),
            (Reduced::Mean, None) => mean(tensor),
        }
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        ((tensor.shape(), tensor.dtype()), self.forward([tensor]))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (shape, dtype) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            let count = self.dim.map_or(shape.num_elements(), |dim| shape[dim]);
            let grad = operand_grad(grad, dtype, |grad| match self.kind {
                Reduced::Sum => grad,
                Reduced::Mean => mul_scalar(grad, 1.0 / count as f64),
            });
            let grad = match self.dim {
                Some(_) => grad,
                None => reshape(grad, vec![1; shape.num_dims()].into()),
            };
            expand(grad, shape)
        });
    }
}
