//! Activations.

use burn_amp_core::policy::Function;
use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::unrounded::functions;
use super::{float_ops, op, own_ops};
use crate::Amp;
use crate::device::Session;

impl<B: Backend, P: Session> ActivationOps<Self> for Amp<B, P> {
    own_ops! {
        sigmoid([tensor]) -> FloatTensor => functions(op!(sigmoid), tensor, &[Function::Sigmoid], &[], B::sigmoid);
    }

    float_ops! {
        relu([tensor]) -> FloatTensor;
        softmax([tensor], dim: usize) -> FloatTensor;
        log_softmax([tensor], dim: usize) -> FloatTensor;
        softmin([tensor], dim: usize) -> FloatTensor;
        relu_backward([output], [grad]) -> FloatTensor;
    }

    burn_amp_core::activation_operations! { float_ops }
}
