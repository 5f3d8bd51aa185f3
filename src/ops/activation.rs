//! Activations.

use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::arithmetic::kept;
use super::{Call, Op, backward_ops, float_ops, op, recording, scalar_ops};
use crate::autodiff::tape::Softmax;
use crate::policy::Class;
use crate::{Amp, AmpTensor};

impl<B: Backend> ActivationOps<Self> for Amp<B> {
    float_ops! {
        gelu [tensor] ();
        sigmoid [tensor] ();
        log_sigmoid [tensor] ();
    }

    backward_ops! {
        relu_backward [output, grad] ();
        gelu_backward [x, grad] ();
        sigmoid_backward [output, grad] ();
        log_sigmoid_backward [x, grad] ();
    }

    scalar_ops! {
        leaky_relu [tensor] (negative_slope) -> FloatTensor;
        hard_sigmoid [tensor] (alpha, beta) -> FloatTensor;
    }

    fn relu(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let call = Call::new(op!(relu), &[&tensor]);
        let tape = recording(&[&tensor]);
        let tensor = call.operand(tensor);
        call.result(call.run(|| match tape {
            Some((tape, _)) => tape.relu(tensor),
            None => B::relu(tensor),
        }))
    }

    fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        probabilities(Softmax::Plain, op!(softmax), tensor, dim, B::softmax)
    }

    fn log_softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        probabilities(Softmax::Log, op!(log_softmax), tensor, dim, B::log_softmax)
    }

    fn softmin(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        if recording(&[&tensor]).is_some() {
            return Self::softmax(Self::float_neg(tensor), dim);
        }
        let call = Call::new(op!(softmin), &[&tensor]);
        let tensor = call.operand(tensor);
        call.result(call.run(|| B::softmin(tensor, dim)))
    }

    /// Not a contraction: a device that only multiplies matrices in half runs `prelu` in FP32.
    fn prelu(tensor: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let call = Call::new(op!(prelu), &[&tensor, &alpha]);
        let call = match call.is_bare_contraction(&tensor) {
            true => Call::new(Op::new("prelu", Class::Fp32), &[&tensor, &alpha]),
            false => call,
        };
        let (tensor, alpha) = (call.operand(tensor), call.operand(alpha));
        call.result(call.run(|| B::prelu(tensor, alpha)))
    }
}

/// A softmax in FP32. If the scores are half, half probabilities are kept for the backward pass.
fn probabilities<B: Backend>(
    kind: Softmax,
    named: Op,
    tensor: AmpTensor<B>,
    dim: usize,
    op: impl FnOnce(FloatTensor<B>, usize) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&tensor]);
    if let Some((tape, half)) = recording(&[&tensor]) {
        call.watch(&tensor);
        let kept = kept(&tensor, half);
        let tensor = tensor.into_primitive();
        return call.recorded(call.run(|| tape.softmax(kind, tensor, dim, kept)));
    }
    let tensor = call.operand(tensor);
    call.result(call.run(|| op(tensor, dim)))
}
