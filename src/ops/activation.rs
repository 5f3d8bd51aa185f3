//! Activations.

use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::arithmetic::kept;
use super::{Call, float_ops, op, own_ops};
use crate::autodiff::tape::{Sigmoidal, Softmax};
use crate::policy::{Op, is_half};
use crate::{Amp, AmpTensor};

impl<B: Backend> ActivationOps<Self> for Amp<B> {
    own_ops! {
        relu([tensor]) -> FloatTensor => relu(tensor);
        sigmoid([tensor]) -> FloatTensor => sigmoidal(Sigmoidal::Sigmoid, op!(sigmoid), tensor);
        softmax([tensor], dim: usize) -> FloatTensor => probabilities(Softmax::Plain, op!(softmax), tensor, dim, B::softmax);
        log_softmax([tensor], dim: usize) -> FloatTensor => probabilities(Softmax::Log, op!(log_softmax), tensor, dim, B::log_softmax);
        softmin([tensor], dim: usize) -> FloatTensor => softmin(tensor, dim);
        relu_backward([output], [grad]) -> FloatTensor => relu_backward(output, grad);
    }

    burn_amp_core::activation_operations! { float_ops }
}

fn relu<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    let call = Call::new(op!(relu), [&tensor]);
    let tape = call.recording::<B>();
    let tensor = call.operand(tensor);
    call.result(call.run(|| match tape {
        Some((tape, _)) => tape.relu(tensor),
        None => B::relu(tensor),
    }))
}

fn relu_backward<B: Backend>(output: AmpTensor<B>, grad: AmpTensor<B>) -> AmpTensor<B> {
    let call = Call::new(op!(relu_backward), [&output, &grad]);
    let (output, grad) = (call.operand(output), call.operand(grad));
    call.result(call.run(|| {
        // In FP32 the result may have another layout than Burn's, which changes the order of later sums:
        // FP32 is Burn's own to the last bit.
        #[cfg(feature = "tch")]
        if is_half(output.dtype())
            && let Some(grad) = crate::workarounds::libtorch::relu_backward::<B>(&output, &grad)
        {
            return grad;
        }
        B::relu_backward(output, grad)
    }))
}

/// A sigmoid or a hyperbolic tangent. If the operand is half, the result is kept for the backward pass.
pub(super) fn sigmoidal<B: Backend>(kind: Sigmoidal, op: Op, tensor: AmpTensor<B>) -> AmpTensor<B> {
    let call = Call::new(op, [&tensor]);
    let tape = call.recording::<B>();
    let tensor = call.operand(tensor);
    call.result(call.run(|| match (tape, kind) {
        (Some((tape, _)), _) if is_half(tensor.dtype()) => tape.sigmoidal(kind, tensor),
        (_, Sigmoidal::Sigmoid) => B::sigmoid(tensor),
        (_, Sigmoidal::Tanh) => B::float_tanh(tensor),
    }))
}

fn softmin<B: Backend>(tensor: AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    let call = Call::new(op!(softmin), [&tensor]);
    if call.recording::<B>().is_some() {
        let negative = Amp::<B>::float_neg(tensor);
        return probabilities(Softmax::Plain, op!(softmin), negative, dim, B::softmax);
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| B::softmin(tensor, dim)))
}

/// The most classes whose logarithms are kept in FP32: for so few, half probabilities save less than
/// their kernels cost.
const FEW_CLASSES: usize = 64;

/// A softmax in FP32. If the scores are half, half probabilities are kept for the backward pass. The
/// logarithm over a few classes keeps its result instead.
fn probabilities<B: Backend>(
    kind: Softmax,
    op: Op,
    tensor: AmpTensor<B>,
    dim: usize,
    run: impl FnOnce(FloatTensor<B>, usize) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&tensor]);
    if let Some((tape, half)) = call.recording::<B>() {
        call.watch(&tensor);
        let tensor = call.recorded_operand(tensor);
        let kept = if kind == Softmax::Log && tensor.shape()[dim] <= FEW_CLASSES {
            DType::F32
        } else {
            kept(&tensor, half)
        };
        let tensor = tensor.into_primitive();
        return call.result(call.run(|| tape.softmax(kind, tensor, dim, kept)));
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| run(tensor, dim)))
}
