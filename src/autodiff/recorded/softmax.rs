//! The variants of softmax, in FP32.

use burn_backend::FloatDType;

use super::*;
use crate::tensor::converted;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    /// With p the probabilities and s their sum, the gradient is p (s g - sum(p g)), or
    /// s g - p sum(g) for the logarithm. Rounded probabilities do not sum to exactly 1. Using s
    /// cancels the rounding error of the p nearest to 1, so a confident prediction keeps its small
    /// gradient. A logarithm that is kept in FP32 is the result itself, with s = 1. One that is kept in f16
    /// has p times 2^15: a tail of many probabilities below f16's smallest number would be lost.
    pub(super) fn record_softmax(
        kind: Softmax,
        tensor: TapeTensor<B>,
        dim: usize,
        kept: DType,
    ) -> TapeTensor<B> {
        type A<B> = Amp<B>;
        let dtype = tensor.dtype();
        let is_result = kind == Softmax::Log && kept == DType::F32;
        let factor = (kind == Softmax::Log && kept == DType::F16).then_some(32768f32);
        let state = move |out: AmpTensor<B>| {
            if is_result {
                return out;
            }
            let p = probabilities(kind, out);
            match factor {
                Some(factor) => A::<B>::float_mul_scalar(p, factor.into()),
                None => p,
            }
        };
        Self::record(
            [tensor],
            move |[tensor]| softmax(kind, tensor, dim),
            |[tensor]| {
                let out = softmax(kind, tensor, dim);
                (cast(state(out.clone()), kept), out)
            },
            Some(move |[tensor]: [_; 1]| state(softmax(kind, tensor, dim))),
            move |ops, grads| {
                let p = if is_result {
                    A::<B>::float_exp(ops.state)
                } else {
                    widened(ops.state)
                };
                let unscaled = |sum| match factor {
                    Some(factor) => A::<B>::float_div_scalar(sum, factor.into()),
                    None => sum,
                };
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    operand_grad(grad, dtype, |grad| {
                        let grad = widened(grad);
                        let whole = if is_result {
                            grad.clone()
                        } else {
                            let total = unscaled(A::<B>::float_sum_dim(p.clone(), dim));
                            A::<B>::float_mul(grad.clone(), total)
                        };
                        match kind {
                            Softmax::Log => {
                                let sum = unscaled(A::<B>::float_sum_dim(grad, dim));
                                A::<B>::float_sub(whole, A::<B>::float_mul(p, sum))
                            }
                            Softmax::Plain | Softmax::Masked => {
                                let product = A::<B>::float_mul(grad, p.clone());
                                let sum = A::<B>::float_sum_dim(product, dim);
                                A::<B>::float_mul(A::<B>::float_sub(whole, sum), p)
                            }
                        }
                    })
                });
            },
        )
    }
}

fn softmax<B: Backend>(kind: Softmax, tensor: AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    match kind {
        Softmax::Plain if is_half(tensor.dtype()) && reduces_fused(&tensor) => {
            fused_softmax(tensor, dim)
        }
        Softmax::Plain => Amp::<B>::softmax(tensor, dim),
        Softmax::Log => Amp::<B>::log_softmax(tensor, dim),
        Softmax::Masked => masked_softmax::<Amp<B>>(tensor, dim),
    }
}

/// The softmax of half scores, in FP32. Each kernel reads the half scores: no FP32 scores are written.
fn fused_softmax<B: Backend>(scores: AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    type A<B> = Amp<B>;
    let largest = fused_max_dim(&scores, dim);
    let exps = A::<B>::float_exp(A::<B>::float_sub(widened(scores), largest));
    let sums = A::<B>::float_sum_dim(exps.clone(), dim);
    A::<B>::float_div(exps, sums)
}

/// The softmax over a dimension, in FP32. A row of minus infinities gives zeros.
pub(crate) fn masked_softmax<B: Backend>(scores: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    let scores = if is_half(scores.dtype()) {
        converted::<B>(scores, FloatDType::F32)
    } else {
        scores
    };
    let info = scores.dtype().finfo().expect("a float dtype");
    let largest = B::float_max_dim(B::float_detach(scores.clone()), dim);
    let largest = B::float_clamp_min(largest, info.min.into());
    let exps = B::float_exp(B::float_sub(scores, largest));
    let sums = B::float_sum_dim(exps.clone(), dim);
    // A row sums to at least 1, because its largest score contributes 1. A masked row sums to 0. A
    // bound of 0.5 leaves room for rounding and, unlike the smallest positive number, can be
    // squared in the backward pass.
    B::float_div(exps, B::float_clamp_min(sums, 0.5.into()))
}

/// The probabilities from which the gradient of a softmax is computed.
fn probabilities<B: Backend>(kind: Softmax, out: AmpTensor<B>) -> AmpTensor<B> {
    match kind {
        Softmax::Plain | Softmax::Masked => out,
        Softmax::Log => Amp::<B>::float_exp(out),
    }
}
