//! The variants of softmax, in FP32.

use super::cast::operand_grad;
use super::*;
use crate::call::{div_scalar, log_softmax, masked_softmax, softmax, softmax_backward};

/// The variants of softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SoftmaxKind {
    /// exp(x) / sum(exp(x)).
    Plain,
    /// The logarithm of `Plain`.
    Log,
    /// For attention: a row of minus infinities gives zeros instead of NaN.
    Masked,
}

/// A softmax over `dim` in FP32. Keeps the probabilities in the dtype `kept`.
///
/// The gradient is [`softmax_backward`]'s. For the logarithm it is s g - p sum(g), with p the probabilities and s their
/// sum, which cancels the same rounding error. A logarithm that is kept in FP32 is the result itself, with s = 1. One
/// that is kept in f16 has p times 2^15: a tail of many probabilities below f16's smallest number would be lost.
#[derive(Debug, Clone)]
pub(crate) struct Softmax {
    pub kind: SoftmaxKind,
    pub dim: usize,
    pub kept: DType,
}

impl Softmax {
    fn keeps_result(&self) -> bool {
        self.kind == SoftmaxKind::Log && self.kept == DType::F32
    }

    fn factor(&self) -> Option<f32> {
        (self.kind == SoftmaxKind::Log && self.kept == DType::F16).then_some(32768.0)
    }

    /// The probabilities, or the result, of which the gradient is computed.
    fn of_result<B: Backend>(&self, out: AmpTensor<B>) -> AmpTensor<B> {
        if self.kind != SoftmaxKind::Log || self.keeps_result() {
            return out;
        }
        match self.factor() {
            Some(factor) => mul_scalar(exp(out), factor),
            None => exp(out),
        }
    }
}

impl<B: Backend> Step<B, 1> for Softmax {
    /// The dtype of the operand, and what the gradient is computed of.
    type Kept = (DType, AmpTensor<B>);

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        match self.kind {
            SoftmaxKind::Plain if is_half(tensor.dtype()) && reduces_fused(&tensor) => {
                fused_softmax(tensor, self.dim)
            }
            SoftmaxKind::Plain => softmax(tensor, self.dim),
            SoftmaxKind::Log => log_softmax(tensor, self.dim),
            SoftmaxKind::Masked => masked_softmax(tensor, self.dim),
        }
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let dtype = tensor.dtype();
        let out = self.forward([tensor]);
        ((dtype, cast(self.of_result(out.clone()), self.kept)), out)
    }

    fn retrieve(&self, [tensor]: Operands<B, 1>) -> Self::Kept {
        (tensor.dtype(), self.of_result(self.forward([tensor])))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        let (keeps_result, dim) = (self.keeps_result(), self.dim);
        let p = match keeps_result {
            true => exp(kept),
            false => widened(kept),
        };
        let unscaled = |sum| match self.factor() {
            Some(factor) => div_scalar(sum, factor),
            None => sum,
        };
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                let grad = widened(grad);
                if self.kind != SoftmaxKind::Log {
                    return softmax_backward(p, grad, dim);
                }
                let whole = match keeps_result {
                    true => grad.clone(),
                    false => mul(grad.clone(), unscaled(sum_dim(p.clone(), dim))),
                };
                sub(whole, mul(p, unscaled(sum_dim(grad, dim))))
            })
        });
    }
}

/// The softmax of half scores, in FP32. Each kernel reads the half scores: no FP32 scores are written.
fn fused_softmax<B: Backend>(scores: AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    let largest = fused_max_dim(&scores, dim);
    let exps = exp(sub(widened(scores), largest));
    let sums = sum_dim(exps.clone(), dim);
    div(exps, sums)
}
