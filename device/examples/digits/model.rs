//! The convolutional network of burn-amp's digits example, for Burn 0.22 and 0.23.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
};
use burn::tensor::{Device, Tensor};

use crate::data::{CLASSES, SIDE};

const CHANNELS: [usize; 2] = [16, 32];

#[derive(Module, Debug)]
pub struct Model {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: MaxPool2d,
    dropout: Dropout,
    linear: Linear,
    activation: Relu,
}

impl Model {
    pub fn new(device: &Device) -> Self {
        let [first, second] = CHANNELS;
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        let pooled = SIDE / 4;
        Self {
            conv1: conv(1, first),
            norm1: BatchNormConfig::new(first).init(device),
            conv2: conv(first, second),
            norm2: BatchNormConfig::new(second).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            linear: LinearConfig::new(second * pooled * pooled, CLASSES).init(device),
            activation: Relu::new(),
        }
    }

    /// Images `[batch, 1, 8, 8]` to logits `[batch, 10]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.norm1.forward(self.conv1.forward(images));
        let x = self.pool.forward(self.activation.forward(x));
        let x = self.norm2.forward(self.conv2.forward(x));
        let x = self.pool.forward(self.activation.forward(x));
        self.linear.forward(self.dropout.forward(x.flatten(1, 3)))
    }
}
