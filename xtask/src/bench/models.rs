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
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A model by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Model {
    Transformer,
    Cnn,
    Mlp,
    Lstm,
}

/// How large the models are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    /// Measured on a CPU within minutes.
    #[default]
    Small,
    /// Fills a GPU.
    Large,
    /// About as many operations as in `small`, on nearly no values: to time what the CPU does for a GPU.
    Tiny,
}

/// The dimensions of a model and of its batch.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    pub batch: usize,
    /// The length of a sequence, or the side of an image.
    pub length: usize,
    /// The width of a layer, or the channels of a CNN's first stage.
    pub width: usize,
    /// The layers, or the stages of a CNN. An LSTM has one.
    pub layers: usize,
}

impl Model {
    pub const ALL: [Self; 4] = [Self::Transformer, Self::Cnn, Self::Mlp, Self::Lstm];

    /// Its name on the command line and in reports.
    pub fn name(self) -> String {
        self.title().to_lowercase()
    }

    /// Its name in prose.
    pub fn title(self) -> &'static str {
        match self {
            Self::Transformer => "transformer",
            Self::Cnn => "CNN",
            Self::Mlp => "MLP",
            Self::Lstm => "LSTM",
        }
    }

    /// A description in one line.
    pub fn description(self, size: Size) -> String {
        let Dims {
            batch,
            length,
            width,
            layers,
        } = self.dims(size);
        let twice = 2 * layers;
        match self {
            Self::Transformer => {
                format!("transformer, {layers} layers of {width}, length {length}, batch {batch}")
            }
            Self::Cnn => {
                let convolutions = format!("CNN, {twice} convolutions with batch norm");
                format!("{convolutions}, batch {batch} of 3x{length}x{length}")
            }
            Self::Mlp => format!("MLP, {layers} layers of {width}, batch {batch}"),
            Self::Lstm => format!("LSTM, {width} wide, {length} steps, batch {batch}"),
        }
    }

    /// The same as in `xtask/pytorch/bench.py`.
    pub fn dims(self, size: Size) -> Dims {
        let (batch, length, width, layers) = match (self, size) {
            (Self::Transformer, Size::Small) => (8, 256, 256, 4),
            // Half a GPU of 80 GB in FP32: PyTorch's is there beside it.
            (Self::Transformer, Size::Large) => (8, 1024, 768, 12),
            (Self::Transformer, Size::Tiny) => (2, 8, 64, 4),
            (Self::Cnn, Size::Small) => (32, 32, 32, 3),
            (Self::Cnn, Size::Large) => (256, 64, 128, 3),
            (Self::Cnn, Size::Tiny) => (2, 8, 4, 3),
            (Self::Mlp, Size::Small) => (4096, 1, 512, 6),
            (Self::Mlp, Size::Large) => (16384, 1, 4096, 8),
            (Self::Mlp, Size::Tiny) => (16, 1, 16, 6),
            (Self::Lstm, Size::Small) => (64, 64, 128, 1),
            (Self::Lstm, Size::Large) => (256, 128, 1024, 1),
            (Self::Lstm, Size::Tiny) => (2, 64, 16, 1),
        };
        Dims {
            batch,
            length,
            width,
            layers,
        }
    }

    /// The name of the items in a step, and their number.
    pub fn items(self, dims: Dims) -> (&'static str, usize) {
        match self {
            Self::Transformer | Self::Lstm => ("tokens", dims.batch * dims.length),
            Self::Cnn => ("images", dims.batch),
            Self::Mlp => ("rows", dims.batch),
        }
    }
}

/// Any of the models.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // Not many are alive at once.
pub enum Net<B: Backend> {
    Transformer(Transformer<B>),
    Cnn(Cnn<B>),
    Mlp(Mlp<B>),
    Lstm(Recurrent<B>),
}

/// The input of a model, and its targets.
#[derive(Debug, Clone)]
pub struct Batch<B: Backend> {
    input: Input<B>,
    targets: Tensor<B, 1, Int>,
}

#[derive(Debug, Clone)]
enum Input<B: Backend> {
    Tokens(Tensor<B, 2, Int>),
    Rows(Tensor<B, 2>),
    Sequences(Tensor<B, 3>),
    Images(Tensor<B, 4>),
}

impl<B: Backend> Net<B> {
    /// The model with fresh parameters.
    pub fn new(model: Model, dims: Dims, device: &B::Device) -> Self {
        match model {
            Model::Transformer => Self::Transformer(Transformer::new(dims, device)),
            Model::Cnn => Self::Cnn(Cnn::new(dims, device)),
            Model::Mlp => Self::Mlp(Mlp::new(dims, device)),
            Model::Lstm => Self::Lstm(Recurrent::new(dims, device)),
        }
    }

    /// The loss of the batch.
    pub fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let logits = match (self, batch.input) {
            (Self::Transformer(model), Input::Tokens(tokens)) => model.forward(tokens),
            (Self::Cnn(model), Input::Images(images)) => model.forward(images),
            (Self::Mlp(model), Input::Rows(rows)) => model.forward(rows),
            (Self::Lstm(model), Input::Sequences(sequences)) => model.forward(sequences),
            _ => unreachable!("a batch of another model"),
        };
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, batch.targets)
    }
}

impl<B: Backend> Batch<B> {
    /// A batch of random data.
    pub fn new(model: Model, dims: Dims, device: &B::Device) -> Self {
        let (batch, length, width) = (dims.batch, dims.length, dims.width);
        let labels = |count, classes| {
            let up_to = Distribution::Uniform(0.0, classes as f64 - 1.0);
            Tensor::<B, 1>::random([count], up_to, device).int()
        };
        let (input, targets) = match model {
            Model::Transformer => {
                let draw = || labels(batch * length, VOCABULARY);
                (Input::Tokens(draw().reshape([batch, length])), draw())
            }
            Model::Cnn => {
                let images = noise([batch, 3, length, length], device);
                (Input::Images(images), labels(batch, CLASSES))
            }
            Model::Mlp => {
                let rows = noise([batch, width], device);
                (Input::Rows(rows), labels(batch, CLASSES))
            }
            Model::Lstm => {
                let sequences = noise([batch, length, width], device);
                (Input::Sequences(sequences), labels(batch, CLASSES))
            }
        };
        Self { input, targets }
    }
}

const VOCABULARY: usize = 256;
const CLASSES: usize = 10;
/// The width of an attention head.
const HEAD: usize = 64;

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
    fn new(dims: Dims, device: &B::Device) -> Self {
        let width = dims.width;
        let heads = width / HEAD;
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, width).init(device),
            positions: EmbeddingConfig::new(dims.length, width).init(device),
            layers: TransformerEncoderConfig::new(width, 4 * width, heads, dims.layers)
                .with_norm_first(true)
                .with_dropout(0.1)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, VOCABULARY).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let device = tokens.device();
        let [batch, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = TransformerEncoderInput::new(x).mask_attn(mask);
        let x = self.layers.forward(x);
        self.head.forward(self.norm.forward(x)).flatten(0, 1)
    }
}

/// Stages of two 3x3 convolutions with batch norm, from the second on at stride 2 and twice as
/// wide.
#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    convolutions: Vec<Conv2d<B>>,
    norms: Vec<BatchNorm<B>>,
    pool: AdaptiveAvgPool2d,
    head: Linear<B>,
}

impl<B: Backend> Cnn<B> {
    fn new(dims: Dims, device: &B::Device) -> Self {
        let of_stage = |stage| match stage {
            0 => [(3, dims.width, 1), (dims.width, dims.width, 1)],
            _ => {
                let width = dims.width << stage;
                [(width / 2, width, 2), (width, width, 1)]
            }
        };
        let blocks: Vec<_> = (0..dims.layers).flat_map(of_stage).collect();
        let convolution = |(from, to, stride): &(usize, usize, usize)| {
            Conv2dConfig::new([*from, *to], [3, 3])
                .with_stride([*stride, *stride])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_bias(false)
                .init(device)
        };
        let norm = |(_, to, _): &(usize, usize, usize)| BatchNormConfig::new(*to).init(device);
        Self {
            convolutions: blocks.iter().map(convolution).collect(),
            norms: blocks.iter().map(norm).collect(),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(dims.width << (dims.layers - 1), CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let blocks = self.convolutions.iter().zip(&self.norms);
        let x = blocks.fold(images, |x, (convolution, norm)| {
            relu(norm.forward(convolution.forward(x)))
        });
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// Layers of one width with ReLU.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
    head: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn new(dims: Dims, device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(dims.width, dims.width).init(device);
        Self {
            layers: (0..dims.layers).map(layer).collect(),
            head: LinearConfig::new(dims.width, CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let layers = self.layers.iter();
        self.head
            .forward(layers.fold(x, |x, layer| relu(layer.forward(x))))
    }
}

/// An LSTM, of which the last state is classified.
#[derive(Module, Debug)]
pub struct Recurrent<B: Backend> {
    lstm: Lstm<B>,
    head: Linear<B>,
}

impl<B: Backend> Recurrent<B> {
    fn new(dims: Dims, device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(dims.width, dims.width, true).init(device),
            head: LinearConfig::new(dims.width, CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let (_, state) = self.lstm.forward(x, None);
        self.head.forward(state.hidden)
    }
}
