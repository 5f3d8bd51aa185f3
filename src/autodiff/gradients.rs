//! The result of a backward pass: unscaled FP32 gradients, or none.

use std::collections::HashMap;

use burn_autodiff::grads::Gradients;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The gradients of a backward pass on an [`AmpAutodiff`](crate::AmpAutodiff) whose inner backend is `I`.
///
/// Each gradient is unscaled and has its parameter's shape, dtype and device. After an overflow
/// there are no gradients: `grad` returns `None`, and Burn's optimizers leave the parameters and
/// their own state untouched.
pub struct AmpGradients<I: Backend> {
    /// Autodiff's own gradients if nothing was scaled, else `None`.
    pub(super) tape: Option<Gradients>,
    /// Gradients that were unscaled, summed up with those of half copies, or replaced by the user, by
    /// the node id of their tensor.
    pub(super) ready: HashMap<u64, FloatTensor<I>>,
}

impl<I: Backend> AmpGradients<I> {
    /// Unscaled gradients, and no others.
    pub(super) fn of_leaves(ready: HashMap<u64, FloatTensor<I>>) -> Self {
        Self { tape: None, ready }
    }
}
