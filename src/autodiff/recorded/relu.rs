//! A ReLU that keeps its result.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_relu(tensor: TapeTensor<B>) -> TapeTensor<B> {
        Self::record(
            [tensor],
            |[tensor]| Amp::<B>::relu(tensor),
            |[tensor]| {
                let out = Amp::<B>::relu(tensor);
                (out.clone(), out)
            },
            // The operand is positive where the result is.
            Some(|[operand]: [_; 1]| operand),
            |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    Amp::<B>::relu_backward(ops.state, grad)
                });
            },
        )
    }
}
