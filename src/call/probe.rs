//! A node of the tape that checks a gradient.

use burn_amp_core::Overflow;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Ops, unary};
use burn_backend::Backend;

use crate::diagnostics::anomaly;
use crate::tensor::{Checkpoint, Operands, Step};
use crate::{Amp, AmpTensor};

/// Checks the gradient of the result of a call, or of an operand that it casts to f16, and changes nothing.
/// Only in a pass that is watched.
#[derive(Debug, Clone)]
pub(super) struct Probe(pub Overflow);

impl<B: Backend> Step<B, 1> for Probe {
    type Kept = ();

    const CHECKPOINT: Checkpoint = Checkpoint::Kept;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        tensor
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> ((), AmpTensor<B>) {
        ((), tensor)
    }

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients) {
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            anomaly::gradient(self.0, &grad);
            grad
        });
    }
}
