//! Activations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::float_ops;
use crate::Amp;

impl<B: Backend> ActivationOps<Self> for Amp<B> {
    float_ops! {
        prelu([tensor], [alpha]) -> FloatTensor;
        relu([tensor]) -> FloatTensor;
        leaky_relu([tensor], {negative_slope}) -> FloatTensor;
        gelu([tensor]) -> FloatTensor;
        sigmoid([tensor]) -> FloatTensor;
        hard_sigmoid([tensor], {alpha}, {beta}) -> FloatTensor;
        log_sigmoid([tensor]) -> FloatTensor;
        softmax([tensor], dim: usize) -> FloatTensor;
        log_softmax([tensor], dim: usize) -> FloatTensor;
        softmin([tensor], dim: usize) -> FloatTensor;
        relu_backward([output], [grad]) -> FloatTensor;
        gelu_backward([x], [grad]) -> FloatTensor;
        sigmoid_backward([output], [grad]) -> FloatTensor;
        log_sigmoid_backward([x], [grad]) -> FloatTensor;
    }
}
