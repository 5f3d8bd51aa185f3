//! Activations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::float_ops;
use crate::Amp;
use crate::device::Session;

impl<B: Backend, P: Session> ActivationOps<Self> for Amp<B, P> {
    float_ops! {
        relu([tensor]) -> FloatTensor;
        sigmoid([tensor]) -> FloatTensor;
        softmax([tensor], dim: usize) -> FloatTensor;
        log_softmax([tensor], dim: usize) -> FloatTensor;
        softmin([tensor], dim: usize) -> FloatTensor;
        relu_backward([output], [grad]) -> FloatTensor;
    }

    burn_amp_core::activation_operations! { float_ops }
}
