//! The models that are measured, written with `burn-nn` as a user would, for any backend.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Lstm, LstmConfig, PaddingConfig2d,
};
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};

/// A model with a batch for it.
pub trait Bench<B: AutodiffBackend>: burn::module::AutodiffModule<B> {
    /// What is fed to the model.
    type Batch: Clone;

    /// The model with fresh parameters.
    fn new(device: &B::Device) -> Self;

    /// A batch of random data.
    fn batch(device: &B::Device) -> Self::Batch;

    /// The loss of the batch.
    fn loss(&self, batch: Self::Batch) -> Tensor<B, 1>;
}

const CLASSES: usize = 10;

fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let device = logits.device();
    CrossEntropyLossConfig::new()
        .init(&device)
        .forward(logits, targets)
}

fn labels<B: Backend>(count: usize, classes: usize, device: &B::Device) -> Tensor<B, 1, Int> {
    let most = classes as f64 - 1.0;
    Tensor::<B, 1>::random([count], Distribution::Uniform(0.0, most), device).int()
}

fn noise<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A GPT: learned positions, pre-norm, GELU, dropout 0.1.
#[derive(Module, Debug)]
pub struct Transformer<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Transformer<B> {
    const VOCABULARY: usize = 256;
    const WIDTH: usize = 256;
    const HEADS: usize = 4;
    const LAYERS: usize = 4;
    const LENGTH: usize = 256;
    const BATCH: usize = 8;
}

impl<B: AutodiffBackend> Bench<B> for Transformer<B> {
    type Batch = (Tensor<B, 2, Int>, Tensor<B, 1, Int>);

    fn new(device: &B::Device) -> Self {
        let (width, vocabulary) = (Self::WIDTH, Self::VOCABULARY);
        Self {
            tokens: EmbeddingConfig::new(vocabulary, width).init(device),
            positions: EmbeddingConfig::new(Self::LENGTH, width).init(device),
            layers: TransformerEncoderConfig::new(width, 4 * width, Self::HEADS, Self::LAYERS)
                .with_norm_first(true)
                .with_dropout(0.1)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, vocabulary).init(device),
        }
    }

    fn batch(device: &B::Device) -> Self::Batch {
        let tokens = Self::BATCH * Self::LENGTH;
        let draw = || labels(tokens, Self::VOCABULARY, device);
        (draw().reshape([Self::BATCH, Self::LENGTH]), draw())
    }

    fn loss(&self, (tokens, targets): Self::Batch) -> Tensor<B, 1> {
        let device = tokens.device();
        let [batch, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self
            .layers
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        cross_entropy(logits.flatten(0, 1), targets)
    }
}

/// Three stages of two 3x3 convolutions with batch norm, the second and third at stride 2.
#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    convolutions: Vec<Conv2d<B>>,
    norms: Vec<BatchNorm<B>>,
    pool: AdaptiveAvgPool2d,
    head: Linear<B>,
}

impl<B: AutodiffBackend> Bench<B> for Cnn<B> {
    type Batch = (Tensor<B, 4>, Tensor<B, 1, Int>);

    fn new(device: &B::Device) -> Self {
        let blocks = [
            (3, 32, 1),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
        ];
        Self {
            convolutions: blocks
                .iter()
                .map(|(from, to, stride)| {
                    Conv2dConfig::new([*from, *to], [3, 3])
                        .with_stride([*stride, *stride])
                        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                        .with_bias(false)
                        .init(device)
                })
                .collect(),
            norms: blocks
                .iter()
                .map(|(_, to, _)| BatchNormConfig::new(*to).init(device))
                .collect(),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(128, CLASSES).init(device),
        }
    }

    fn batch(device: &B::Device) -> Self::Batch {
        (noise([32, 3, 32, 32], device), labels(32, CLASSES, device))
    }

    fn loss(&self, (images, targets): Self::Batch) -> Tensor<B, 1> {
        let blocks = self.convolutions.iter().zip(&self.norms);
        let x = blocks.fold(images, |x, (convolution, norm)| {
            relu(norm.forward(convolution.forward(x)))
        });
        cross_entropy(
            self.head.forward(self.pool.forward(x).flatten(1, 3)),
            targets,
        )
    }
}

/// Six layers of 512 with ReLU.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
    head: Linear<B>,
}

impl<B: AutodiffBackend> Bench<B> for Mlp<B> {
    type Batch = (Tensor<B, 2>, Tensor<B, 1, Int>);

    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(512, 512).init(device);
        Self {
            layers: (0..6).map(layer).collect(),
            head: LinearConfig::new(512, CLASSES).init(device),
        }
    }

    fn batch(device: &B::Device) -> Self::Batch {
        (noise([4096, 512], device), labels(4096, CLASSES, device))
    }

    fn loss(&self, (x, targets): Self::Batch) -> Tensor<B, 1> {
        let x = self
            .layers
            .iter()
            .fold(x, |x, layer| relu(layer.forward(x)));
        cross_entropy(self.head.forward(x), targets)
    }
}

/// An LSTM of 128 over 64 steps.
#[derive(Module, Debug)]
pub struct Recurrent<B: Backend> {
    lstm: Lstm<B>,
    head: Linear<B>,
}

impl<B: AutodiffBackend> Bench<B> for Recurrent<B> {
    type Batch = (Tensor<B, 3>, Tensor<B, 1, Int>);

    fn new(device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(128, 128, true).init(device),
            head: LinearConfig::new(128, CLASSES).init(device),
        }
    }

    fn batch(device: &B::Device) -> Self::Batch {
        (noise([64, 64, 128], device), labels(64, CLASSES, device))
    }

    fn loss(&self, (x, targets): Self::Batch) -> Tensor<B, 1> {
        let (_, state) = self.lstm.forward(x, None);
        cross_entropy(self.head.forward(state.hidden), targets)
    }
}

/// A step of many operations on small tensors, where the cost of deciding them shows most.
#[derive(Module, Debug)]
pub struct SmallOps<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: AutodiffBackend> Bench<B> for SmallOps<B> {
    type Batch = Tensor<B, 2>;

    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(16, 16).init(device);
        Self {
            layers: (0..8).map(layer).collect(),
        }
    }

    fn batch(device: &B::Device) -> Self::Batch {
        noise([8, 16], device)
    }

    fn loss(&self, x: Self::Batch) -> Tensor<B, 1> {
        let x = self.layers.iter().fold(x, |x, layer| {
            let y = layer.forward(x.clone()).tanh();
            let scale = y.clone().powi_scalar(2).mean_dim(1).sqrt() + 1.0;
            (y / scale + x) * 0.5
        });
        x.powi_scalar(2).mean()
    }
}
