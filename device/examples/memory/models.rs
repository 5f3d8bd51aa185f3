//! The models of `cargo xtask bench` at their small size, for versions of Burn whose tensor types have no
//! backend.

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
use burn::tensor::{Device, Distribution, Int, Tensor};
use clap::ValueEnum;

/// A model by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Model {
    Transformer,
    Cnn,
    Mlp,
    Lstm,
}

/// The dimensions of a model and of its batch.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    batch: usize,
    /// The length of a sequence, or the side of an image.
    length: usize,
    /// The width of a layer, or the channels of a CNN's first stage.
    width: usize,
    /// The number of layers, or of a CNN's stages. An LSTM has one layer.
    layers: usize,
}

impl Model {
    pub const ALL: [Self; 4] = [Self::Transformer, Self::Cnn, Self::Mlp, Self::Lstm];

    pub fn dims(self) -> Dims {
        let (batch, length, width, layers) = match self {
            Self::Transformer => (8, 256, 256, 4),
            Self::Cnn => (32, 32, 32, 3),
            Self::Mlp => (4096, 1, 512, 6),
            Self::Lstm => (64, 64, 128, 1),
        };
        Dims {
            batch,
            length,
            width,
            layers,
        }
    }
}

/// Any of the models.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // Few models exist at once.
pub enum Net {
    Transformer(Transformer),
    Cnn(Cnn),
    Mlp(Mlp),
    Lstm(Recurrent),
}

/// A model's input and target.
#[derive(Debug, Clone)]
pub struct Batch {
    input: Input,
    targets: Tensor<1, Int>,
}

#[derive(Debug, Clone)]
enum Input {
    Tokens(Tensor<2, Int>),
    Rows(Tensor<2>),
    Sequences(Tensor<3>),
    Images(Tensor<4>),
}

impl Net {
    /// The model with fresh parameters.
    pub fn new(model: Model, dims: Dims, device: &Device) -> Self {
        match model {
            Model::Transformer => Self::Transformer(Transformer::new(dims, device)),
            Model::Cnn => Self::Cnn(Cnn::new(dims, device)),
            Model::Mlp => Self::Mlp(Mlp::new(dims, device)),
            Model::Lstm => Self::Lstm(Recurrent::new(dims, device)),
        }
    }

    /// The loss of the batch.
    pub fn loss(&self, batch: Batch) -> Tensor<1> {
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

impl Batch {
    /// A batch of random data.
    pub fn new(model: Model, dims: Dims, device: &Device) -> Self {
        let (batch, length, width) = (dims.batch, dims.length, dims.width);
        let labels = |count, classes| {
            let up_to = Distribution::Uniform(0.0, classes as f64 - 1.0);
            Tensor::<1>::random([count], up_to, device).int()
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

fn noise<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A GPT: learned positions, pre-norm, GELU, dropout 0.1.
#[derive(Module, Debug)]
pub struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Transformer {
    fn new(dims: Dims, device: &Device) -> Self {
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

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
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
pub struct Cnn {
    convolutions: Vec<Conv2d>,
    norms: Vec<BatchNorm>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl Cnn {
    fn new(dims: Dims, device: &Device) -> Self {
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

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let blocks = self.convolutions.iter().zip(&self.norms);
        let x = blocks.fold(images, |x, (convolution, norm)| {
            relu(norm.forward(convolution.forward(x)))
        });
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// Layers of one width with ReLU.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    head: Linear,
}

impl Mlp {
    fn new(dims: Dims, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(dims.width, dims.width).init(device);
        Self {
            layers: (0..dims.layers).map(layer).collect(),
            head: LinearConfig::new(dims.width, CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let layers = self.layers.iter();
        self.head
            .forward(layers.fold(x, |x, layer| relu(layer.forward(x))))
    }
}

/// An LSTM whose last state is classified.
#[derive(Module, Debug)]
pub struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

impl Recurrent {
    fn new(dims: Dims, device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(dims.width, dims.width, true).init(device),
            head: LinearConfig::new(dims.width, CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let (_, state) = self.lstm.forward(x, None);
        self.head.forward(state.hidden)
    }
}
