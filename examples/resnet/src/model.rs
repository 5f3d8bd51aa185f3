//! A small residual network, with the traits that Burn's learner needs. Written as for any backend.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use crate::data::Batch;
use crate::digits::CLASSES;

/// From stage to stage an image has half the side and twice the channels.
const CHANNELS: [usize; 3] = [16, 32, 64];

/// A convolution without bias, and its batch norm.
#[derive(Module, Debug)]
struct ConvNorm<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> ConvNorm<B> {
    fn new(channels: [usize; 2], size: usize, stride: usize, device: &B::Device) -> Self {
        let pad = size / 2;
        Self {
            conv: Conv2dConfig::new(channels, [size, size])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(channels[1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// Two convolutions, and a way around them.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    first: ConvNorm<B>,
    second: ConvNorm<B>,
    /// Only if the block changes the shape.
    shortcut: Option<ConvNorm<B>>,
}

impl<B: Backend> Block<B> {
    fn new(from: usize, to: usize, device: &B::Device) -> Self {
        let stride = if from == to { 1 } else { 2 };
        Self {
            first: ConvNorm::new([from, to], 3, stride, device),
            second: ConvNorm::new([to, to], 3, 1, device),
            shortcut: (from != to).then(|| ConvNorm::new([from, to], 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let around = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x.clone()),
            None => x.clone(),
        };
        let x = relu(self.first.forward(x));
        relu(self.second.forward(x) + around)
    }
}

#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    stem: ConvNorm<B>,
    blocks: Vec<Block<B>>,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    pub fn new(device: &B::Device) -> Self {
        let [first, .., last] = CHANNELS;
        // A stage's first block comes from the stage before.
        let from = [first].into_iter().chain(CHANNELS);
        let blocks = from.zip(CHANNELS);
        Self {
            stem: ConvNorm::new([1, first], 3, 1, device),
            blocks: blocks
                .map(|(from, to)| Block::new(from, to, device))
                .collect(),
            head: LinearConfig::new(last, CLASSES).init(device),
        }
    }

    /// Images `[batch, 1, 8, 8]` to logits `[batch, 10]`.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = relu(self.stem.forward(images));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let mean = x.flatten::<3>(2, 3).mean_dim(2);
        self.head.forward(mean.squeeze_dim(2))
    }

    fn output(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let logits = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.output(batch)
    }
}
