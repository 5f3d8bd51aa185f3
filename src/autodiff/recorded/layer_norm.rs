//! Layer norm over the last dimension in FP32, with or without a shift.

use burn_autodiff::NodeId;

use super::cast::operand_grad;
use super::*;
use crate::call::{add_scalar, along, mean_dim, sqrt};

/// Layer norm over the last dimension in FP32, with or without a shift. Keeps the normalized tensor in the dtype
/// `kept`.
///
/// With u the normalized tensor, d the deviation and h = gamma g, the gradients are
/// (h - mean(h) - u mean(h u)) / d for the tensor, the sum of g u for gamma, and the sum of g for beta.
#[derive(Debug, Clone)]
pub(crate) struct LayerNorm {
    pub epsilon: f64,
    pub kept: DType,
}

/// What the gradients need, each where one of them needs it: the normalized tensor, the deviation, gamma along the
/// last dimension, and the dtypes of the operands.
#[derive(Debug, Clone)]
pub(crate) struct Normalized<B: Backend, const N: usize> {
    unit: Option<AmpTensor<B>>,
    deviation: Option<AmpTensor<B>>,
    gamma: AmpTensor<B>,
    dtypes: [DType; N],
}

const KEPT: &str = "kept where a gradient needs it";

impl LayerNorm {
    /// A tensor normalized to mean 0 and variance 1 over its last dimension, in FP32 or wider, and beta along that
    /// dimension.
    fn normalized<B: Backend, const N: usize>(
        &self,
        operands: Operands<B, N>,
    ) -> (Normalized<B, N>, Option<AmpTensor<B>>) {
        let dtypes = operands.each_ref().map(|operand| operand.dtype());
        let rank = operands[0].rank();
        let mut operands = operands.into_iter();
        let tensor = widened(operands.next().expect("a tensor"));
        let mut parameters = operands.map(|parameter| along(rank - 1, rank, parameter));
        let mean = mean_dim(tensor.clone(), rank - 1);
        let centered = sub(tensor, mean);
        let squares = mul(centered.clone(), centered.clone());
        let variance = mean_dim(squares, rank - 1);
        let deviation = sqrt(add_scalar(variance, self.epsilon));
        let whole = Normalized {
            unit: Some(div(centered, deviation.clone())),
            deviation: Some(deviation),
            gamma: parameters.next().expect("gamma"),
            dtypes,
        };
        (whole, parameters.next())
    }
}

/// The operands are the tensor, gamma and, if there is one, beta.
impl<B: Backend, const N: usize> Step<B, N> for LayerNorm {
    type Kept = Normalized<B, N>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, operands: Operands<B, N>) -> AmpTensor<B> {
        let (whole, beta) = self.normalized(operands);
        whole.result(beta)
    }

    fn keep(&self, operands: Operands<B, N>, tracked: [bool; N]) -> (Self::Kept, AmpTensor<B>) {
        let (whole, beta) = self.normalized(operands);
        let out = whole.result(beta);
        let unit = whole.unit.filter(|_| tracked[0] || tracked[1]);
        let kept = Normalized {
            unit: unit.map(|unit| cast(unit, self.kept)),
            deviation: whole.deviation.filter(|_| tracked[0]),
            ..whole
        };
        (kept, out)
    }

    fn retrieve(&self, operands: Operands<B, N>) -> Self::Kept {
        self.normalized(operands).0
    }

    fn backward(self, ops: Ops<Self::Kept, N>, grads: &mut Gradients) {
        let grad = grads.consume::<Amp<B>>(&ops.node);
        let to = ops.parents.map(|node| node.map(|node| node.id));
        ops.state.gradients(to, grad, grads);
    }
}

impl<B: Backend, const N: usize> Normalized<B, N> {
    fn result(&self, beta: Option<AmpTensor<B>>) -> AmpTensor<B> {
        let unit = self.unit.clone().expect(KEPT);
        let scaled = mul(unit, self.gamma.clone());
        match beta {
            Some(beta) => add(scaled, beta),
            None => scaled,
        }
    }

    fn gradients(self, to: [Option<NodeId>; N], grad: AmpTensor<B>, grads: &mut Gradients) {
        let Self {
            unit,
            deviation,
            gamma,
            dtypes,
        } = self;
        let last = gamma.rank() - 1;
        let features = || Shape::new([gamma.shape()[last]]);
        // The sums first: fusion then joins the operations before each to one kernel.
        if let Some(node) = to.get(2).copied().flatten() {
            let grad = operand_grad(grad.clone(), dtypes[2], |grad| {
                if grad.is_cast_later() && reduces_fused(&grad) {
                    return fused_row_sum([&grad], |[grad]| grad, features());
                }
                reshape(sum_dim(rows(widened(grad)), 0), features())
            });
            grads.register::<Amp<B>>(node, grad);
        }
        if let Some(node) = to[1] {
            let unit = unit.clone().expect(KEPT);
            let product = |[grad, unit]: [_; 2]| mul(grad, unit);
            let grad = operand_grad(grad.clone(), dtypes[1], |grad| {
                if reduces_fused(&grad) {
                    return fused_row_sum([&grad, &unit], product, features());
                }
                let grad = sum_dim(product([grad, unit].map(rows)), 0);
                reshape(grad, features())
            });
            grads.register::<Amp<B>>(node, grad);
        }
        if let Some(node) = to[0] {
            let (unit, deviation) = (unit.expect(KEPT), deviation.expect(KEPT));
            let grad = operand_grad(grad, dtypes[0], |grad| {
                let grad = mul(grad, gamma);
                let mean = mean_dim(grad.clone(), last);
                let product = mul(grad.clone(), unit.clone());
                let slope = mean_dim(product, last);
                let grad = sub(grad, mean);
                let grad = sub(grad, mul(unit, slope));
                div(grad, deviation)
            });
            grads.register::<Amp<B>>(node, grad);
        }
    }
}
