//! An activation that keeps its result instead of its operand.

use super::cast::operand_grad;
use super::*;
use crate::call::{relu, relu_backward, sigmoid, sigmoid_backward, tanh};

/// The activations whose gradient follows from their result y: g where y is positive for a ReLU, whose result the next layer
/// keeps, too; y (1 - y) g for the sigmoid; and g - y² g for the hyperbolic tangent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Relu,
    Sigmoid,
    Tanh,
}

impl<B: Backend> Step<B, 1> for Activation {
    type Kept = AmpTensor<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        match self {
            Self::Relu => relu(tensor),
            Self::Sigmoid => sigmoid(tensor),
            Self::Tanh => tanh(tensor),
        }
    }

    fn keep(&self, operands: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward(operands);
        (out.clone(), out)
    }

    fn retrieve(&self, [operand]: Operands<B, 1>) -> Self::Kept {
        match self {
            // It is positive where the result is.
            Self::Relu => operand,
            Self::Sigmoid | Self::Tanh => self.forward([operand]),
        }
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| match self {
            Self::Relu => relu_backward(ops.state, grad),
            Self::Sigmoid => sigmoid_backward(ops.state, grad),
            Self::Tanh => tanh_backward(ops.state, grad),
        });
    }
}

fn tanh_backward<B: Backend>(out: AmpTensor<B>, grad: AmpTensor<B>) -> AmpTensor<B> {
    operand_grad(grad, out.dtype(), |grad| {
        tanh_gradient(widened(out), widened(grad))
    })
}

/// The gradient of a hyperbolic tangent, from its result, in FP32.
pub(super) fn tanh_gradient<B: Backend>(out: AmpTensor<B>, grad: AmpTensor<B>) -> AmpTensor<B> {
    let square = mul(out.clone(), out);
    let lost = mul(square, grad.clone());
    sub(grad, lost)
}
