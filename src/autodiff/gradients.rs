//! The result of a backward pass: unscaled FP32 gradients, or none.

use std::collections::HashMap;

use burn_autodiff::grads::Gradients;
use burn_backend::Backend;

use crate::AmpTensor;

/// The gradients of a backward pass on [`AmpAutodiff`](crate::AmpAutodiff).
///
/// Each gradient is unscaled and has its parameter's shape, dtype and device. After an overflow
/// there are no gradients: `grad` returns `None`, and Burn's optimizers leave the parameters and
/// their own state untouched.
pub struct AmpGradients<B: Backend> {
    /// Autodiff's own gradients if nothing was scaled, else `None`.
    pub(super) tape: Option<Gradients>,
    /// Gradients that were unscaled, summed up with those of half copies, or replaced by the user, by
    /// the node id of their tensor.
    pub(super) ready: HashMap<u64, AmpTensor<B>>,
}

impl<B: Backend> AmpGradients<B> {
    /// Unscaled gradients, and no others.
    pub(super) fn of_leaves(ready: HashMap<u64, AmpTensor<B>>) -> Self {
        Self { tape: None, ready }
    }
}
