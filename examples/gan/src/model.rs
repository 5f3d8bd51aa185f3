//! The two models, small and written as for any backend. Both get the class of the digit.

use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear,
    LinearConfig,
};
use burn::prelude::*;
use burn::tensor::activation::sigmoid;

use crate::data::{CLASSES, SIDE};

/// Numbers of noise that a digit is made of.
pub const NOISE: usize = 16;
const PIXELS: usize = SIDE * SIDE;

/// Draws a digit of a class from noise.
#[derive(Module, Debug)]
pub struct Generator<B: Backend> {
    linear1: Linear<B>,
    norm1: BatchNorm<B>,
    linear2: Linear<B>,
    norm2: BatchNorm<B>,
    linear3: Linear<B>,
    activation: LeakyRelu,
}

impl<B: Backend> Generator<B> {
    pub fn new(device: &B::Device) -> Self {
        let hidden = 128;
        Self {
            linear1: LinearConfig::new(NOISE + CLASSES, hidden).init(device),
            norm1: BatchNormConfig::new(hidden).init(device),
            linear2: LinearConfig::new(hidden, hidden).init(device),
            norm2: BatchNormConfig::new(hidden).init(device),
            linear3: LinearConfig::new(hidden, PIXELS).init(device),
            activation: LeakyReluConfig::new().with_negative_slope(0.2).init(),
        }
    }

    /// Noise `[batch, NOISE]` and labels `[batch]` to images `[batch, 64]` from 0 to 1.
    pub fn forward(&self, noise: Tensor<B, 2>, labels: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        let x = Tensor::cat(vec![noise, one_hot(labels)], 1);
        let x = self.norm1.forward(self.linear1.forward(x));
        let x = self.linear2.forward(self.activation.forward(x));
        let x = self.activation.forward(self.norm2.forward(x));
        sigmoid(self.linear3.forward(x))
    }
}

/// Tells real digits of a class from generated ones.
#[derive(Module, Debug)]
pub struct Discriminator<B: Backend> {
    linear1: Linear<B>,
    linear2: Linear<B>,
    linear3: Linear<B>,
    dropout: Dropout,
    activation: LeakyRelu,
}

impl<B: Backend> Discriminator<B> {
    pub fn new(device: &B::Device) -> Self {
        // Wide: the generator learns ten classes only if the discriminator distinguishes them.
        let hidden = 256;
        Self {
            linear1: LinearConfig::new(PIXELS + CLASSES, hidden).init(device),
            linear2: LinearConfig::new(hidden, hidden).init(device),
            linear3: LinearConfig::new(hidden, 1).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            activation: LeakyReluConfig::new().with_negative_slope(0.2).init(),
        }
    }

    /// Images `[batch, 64]` and labels `[batch]` to logits `[batch]`, positive for real digits.
    pub fn forward(&self, images: Tensor<B, 2>, labels: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        let x = Tensor::cat(vec![images, one_hot(labels)], 1);
        let x = self.activation.forward(self.linear1.forward(x));
        let x = self.linear2.forward(self.dropout.forward(x));
        let x = self.dropout.forward(self.activation.forward(x));
        self.linear3.forward(x).squeeze_dim(1)
    }
}

fn one_hot<B: Backend>(labels: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    labels.one_hot::<2>(CLASSES).float()
}
