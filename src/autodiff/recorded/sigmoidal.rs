//! A sigmoid or a hyperbolic tangent that keeps its result.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    /// With y the result, the gradient is y (1 - y) g for the sigmoid, and g - y² g for the
    /// hyperbolic tangent.
    pub(super) fn record_sigmoidal(kind: Sigmoidal, tensor: TapeTensor<B>) -> TapeTensor<B> {
        Self::record(
            [tensor],
            move |[tensor]| sigmoidal(kind, tensor),
            |[tensor]| {
                let out = sigmoidal(kind, tensor);
                (out.clone(), out)
            },
            Some(move |[tensor]: [_; 1]| sigmoidal(kind, tensor)),
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| match kind {
                    Sigmoidal::Sigmoid => Amp::<B>::sigmoid_backward(ops.state, grad),
                    Sigmoidal::Tanh => tanh_backward(ops.state, grad),
                });
            },
        )
    }
}

fn sigmoidal<B: Backend>(kind: Sigmoidal, tensor: AmpTensor<B>) -> AmpTensor<B> {
    match kind {
        Sigmoidal::Sigmoid => Amp::<B>::sigmoid(tensor),
        Sigmoidal::Tanh => Amp::<B>::float_tanh(tensor),
    }
}

fn tanh_backward<B: Backend>(out: AmpTensor<B>, grad: AmpTensor<B>) -> AmpTensor<B> {
    operand_grad(grad, out.dtype(), |grad| {
        let (out, grad) = (widened(out), widened(grad));
        let square = Amp::<B>::float_mul(out.clone(), out);
        let lost = Amp::<B>::float_mul(square, grad.clone());
        Amp::<B>::float_sub(grad, lost)
    })
}
