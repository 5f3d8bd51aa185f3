//! What a backward pass gives: FP32 gradients without the scale, or none.

use std::collections::HashMap;

use burn_autodiff::grads::Gradients;
use burn_backend::Backend;

use crate::AmpTensor;

/// The gradients of a backward pass on [`AmpAutodiff`](crate::AmpAutodiff).
///
/// Each has its parameter's shape, dtype and device, and is without the loss scale. After an
/// overflow there are none: `grad` gives `None`, and Burn's optimizers leave parameters and their
/// own state untouched.
pub struct AmpGradients<B: Backend> {
    /// As autodiff gave them, where nothing was scaled; none after an overflow.
    pub(super) tape: Option<Gradients>,
    /// Unscaled, or replaced by the user, by the id of their tensor's node.
    pub(super) ready: HashMap<u64, AmpTensor<B>>,
}

impl<B: Backend> AmpGradients<B> {
    /// Nothing was scaled: the gradients are as autodiff gave them.
    pub(super) fn of_tape(tape: Gradients) -> Self {
        Self {
            tape: Some(tape),
            ready: HashMap::new(),
        }
    }

    /// Unscaled gradients; no others exist.
    pub(super) fn unscaled(ready: HashMap<u64, AmpTensor<B>>) -> Self {
        Self { tape: None, ready }
    }

    /// The step overflowed.
    pub(super) fn absent() -> Self {
        Self::unscaled(HashMap::new())
    }
}
