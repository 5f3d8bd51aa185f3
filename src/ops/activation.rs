//! Activations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::arithmetic::kept;
use super::unrounded::{negative, unrounded};
use crate::autodiff::recorded::{Activation, Recomputed, Softmax, SoftmaxKind};
use crate::call::{self, Call, float_ops, op, own_ops};
use crate::policy::{Op, is_half};
use crate::tensor::{Function, Side, TensorFlags};
use crate::{Amp, AmpTensor};

impl<B: Backend, S: Side<B>> ActivationOps<Self> for Amp<B, S> {
    own_ops! {
        relu([tensor]) -> FloatTensor => activated(Call::new(op!(relu), [&tensor]), Activation::Relu, tensor);
        sigmoid([tensor]) -> FloatTensor => sigmoid(tensor);
        softmax([tensor], dim: usize) -> FloatTensor => probabilities(SoftmaxKind::Plain, op!(softmax), tensor, dim, B::softmax);
        log_softmax([tensor], dim: usize) -> FloatTensor => probabilities(SoftmaxKind::Log, op!(log_softmax), tensor, dim, B::log_softmax);
        softmin([tensor], dim: usize) -> FloatTensor => softmin(tensor, dim);
        relu_backward([output], [grad]) -> FloatTensor => call::relu_backward(output, grad);
    }

    burn_amp_core::activation_operations! { float_ops }
}

/// A sigmoid. What reads a half one in FP32 computes it again: near 1 it is rounded to 1.
pub(super) fn sigmoid<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let tensor = tensor.with_room(1);
    let call = Call::new(op!(sigmoid), [&tensor]);
    let unrounded = unrounded(&call, &tensor, &[Function::Sigmoid]);
    let computed = call.decision.operands.unwrap_or(tensor.dtype());
    let half = call.decision.records_in.filter(|_| computed == DType::F32);
    let Some(half) = half.filter(|half| kept(&tensor, *half) == *half) else {
        return activated(call, Activation::Sigmoid, tensor).with_unrounded(unrounded);
    };
    let tensor = [call.operand(tensor)];
    call.result(call.run(|| {
        let step = Recomputed {
            functions: vec![Function::Sigmoid],
            kept: half,
        };
        let recorded = S::record(step, tensor);
        recorded.unwrap_or_else(|[tensor]| B::sigmoid(tensor))
    }))
}

/// A hyperbolic tangent, as [`sigmoid`].
pub(super) fn tanh<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let tensor = tensor.with_room(1);
    let call = Call::new(op!(float_tanh), [&tensor]);
    if call.decision.operands.is_some_and(is_half) && tensor.dtype() == DType::F32 {
        let flags = tensor.flags() | TensorFlags::DEMOTED;
        return tanh(AmpTensor::new(call.operand(tensor), flags));
    }
    let unrounded = unrounded(&call, &tensor, &[Function::Tanh]);
    activated(call, Activation::Tanh, tensor).with_unrounded(unrounded)
}

/// An activation. The result of a ReLU, and of another activation of a half operand, is kept for the backward pass.
pub(super) fn activated<B: Backend, S: Side<B>>(
    call: Call<B, S>,
    step: Activation,
    tensor: AmpTensor<B, S>,
) -> AmpTensor<B, S> {
    let tensor = [call.operand(tensor)];
    let keeps = step == Activation::Relu || is_half(tensor[0].dtype());
    let records = call.decision.records_in.is_some() && keeps;
    call.result(call.run(|| {
        let recorded = call.record_if(records, step, tensor);
        recorded.unwrap_or_else(|[tensor]| match step {
            Activation::Relu => B::relu(tensor),
            Activation::Sigmoid => B::sigmoid(tensor),
            Activation::Tanh => B::float_tanh(tensor),
        })
    }))
}

fn softmin<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>, dim: usize) -> AmpTensor<B, S> {
    let call = Call::new(op!(softmin), [&tensor]);
    if call.decision.records_in.is_some() {
        let (kind, negative) = (SoftmaxKind::Plain, negative(tensor));
        return probabilities(kind, op!(softmin), negative, dim, B::softmax);
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::softmin(tensor, dim)))
}

/// The most classes whose logarithms are kept in FP32: for so few, half probabilities save less than
/// their kernels cost.
const FEW_CLASSES: usize = 64;

/// A softmax in FP32. If the scores are half, half probabilities are kept for the backward pass. The
/// logarithm over a few classes keeps its result instead.
fn probabilities<B: Backend, S: Side<B>>(
    kind: SoftmaxKind,
    op: Op,
    tensor: AmpTensor<B, S>,
    dim: usize,
    run: impl FnOnce(FloatTensor<B>, usize) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let call = Call::new(op, [&tensor]);
    let Some(half) = call.decision.records_in else {
        let tensor = call.operand(tensor);
        return call.result(call.run(|| run(tensor, dim)));
    };
    call.watch(&tensor);
    let tensor = call.recorded_operand(tensor);
    let kept = if kind == SoftmaxKind::Log && tensor.shape()[dim] <= FEW_CLASSES {
        DType::F32
    } else {
        kept(&tensor, half)
    };
    let step = Softmax { kind, dim, kept };
    let tensor = [tensor.into_primitive()];
    call.result(call.run(|| {
        let recorded = S::record(step, tensor);
        recorded.unwrap_or_else(|[tensor]| run(tensor, dim))
    }))
}
