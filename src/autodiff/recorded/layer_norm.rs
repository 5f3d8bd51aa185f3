//! Layer norm over the last dimension in FP32, without the shift.

use super::cast::operand_grad;
use super::*;
use crate::call::{add_scalar, along, mean_dim, sqrt};

/// Layer norm over the last dimension in FP32, without the shift. Keeps the normalized tensor in the dtype
/// `kept`.
///
/// With u the normalized tensor, d the deviation and h = gamma g, the gradients are
/// (h - mean(h) - u mean(h u)) / d for the tensor, and the sum of g u for gamma.
#[derive(Debug, Clone)]
pub(crate) struct LayerNorm {
    pub epsilon: f64,
    pub kept: DType,
}

/// What the gradients need: the normalized tensor, the deviation, gamma, and the dtype of the operand.
#[derive(Debug, Clone)]
pub(crate) struct Normalized<B: Backend> {
    unit: AmpTensor<B>,
    deviation: AmpTensor<B>,
    gamma: AmpTensor<B>,
    dtype: DType,
}

impl LayerNorm {
    /// A tensor normalized to mean 0 and variance 1 over its last dimension, in FP32 or wider.
    fn normalized<B: Backend>(&self, [tensor, gamma]: Operands<B, 2>) -> Normalized<B> {
        let dtype = tensor.dtype();
        let last = tensor.rank() - 1;
        let tensor = widened(tensor);
        let mean = mean_dim(tensor.clone(), last);
        let centered = sub(tensor, mean);
        let squares = mul(centered.clone(), centered.clone());
        let variance = mean_dim(squares, last);
        let deviation = sqrt(add_scalar(variance, self.epsilon));
        Normalized {
            unit: div(centered, deviation.clone()),
            deviation,
            gamma,
            dtype,
        }
    }
}

impl<B: Backend> Step<B, 2> for LayerNorm {
    type Kept = Normalized<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, operands: Operands<B, 2>) -> AmpTensor<B> {
        let Normalized { unit, gamma, .. } = self.normalized(operands);
        scaled(unit, gamma)
    }

    fn keep(&self, operands: Operands<B, 2>, _: [bool; 2]) -> (Self::Kept, AmpTensor<B>) {
        let whole = self.normalized(operands);
        let kept = Normalized {
            unit: cast(whole.unit.clone(), self.kept),
            gamma: whole.gamma.clone(),
            ..whole
        };
        (kept, scaled(whole.unit, whole.gamma))
    }

    fn retrieve(&self, operands: Operands<B, 2>) -> Self::Kept {
        self.normalized(operands)
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let Normalized {
            unit,
            deviation,
            gamma,
            dtype,
        } = ops.state;
        let [to_tensor, to_gamma] = ops.parents;
        let last = unit.rank() - 1;
        let grad = grads.consume::<Amp<B>>(&ops.node);
        // Gamma's gradient first: fusion then joins its operations to one sum.
        if let Some(node) = to_gamma {
            let product = |[grad, unit]: [_; 2]| mul(grad, unit);
            let shape = gamma.shape();
            let grad = operand_grad(grad.clone(), gamma.dtype(), |grad| {
                if reduces_fused(&grad) {
                    return fused_row_sum([&grad, &unit], product, shape);
                }
                let grad = sum_dim(product([grad, unit.clone()].map(rows)), 0);
                reshape(grad, shape)
            });
            grads.register::<Amp<B>>(node.id, grad);
        }
        if let Some(node) = to_tensor {
            let grad = operand_grad(grad, dtype, |grad| {
                let grad = scaled(grad, gamma);
                let mean = mean_dim(grad.clone(), last);
                let product = mul(grad.clone(), unit.clone());
                let slope = mean_dim(product, last);
                let grad = sub(grad, mean);
                let grad = sub(grad, mul(unit, slope));
                div(grad, deviation)
            });
            grads.register::<Amp<B>>(node.id, grad);
        }
    }
}

/// A normalized tensor times gamma, which has the length of the last dimension.
fn scaled<B: Backend>(unit: AmpTensor<B>, gamma: AmpTensor<B>) -> AmpTensor<B> {
    let rank = unit.rank();
    mul(unit, along(rank - 1, rank, gamma))
}
