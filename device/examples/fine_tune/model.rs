//! The transformer encoder of burn-amp's example with the output of a classifier, in the words of
//! Burn 0.22 and 0.23, and its steps of training and validation.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_amp_device::GradScaler;

use crate::corpus::LENGTH;
use crate::data::Labelled;

const WIDTH: usize = 64;

/// What was pretrained. The names are those of the file.
#[derive(Module, Debug)]
struct Encoder {
    words: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
}

impl Encoder {
    fn new(vocabulary: usize, device: &Device) -> Self {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        let embedding = |count| {
            EmbeddingConfig::new(count, WIDTH)
                .with_initializer(normal.clone())
                .init(device)
        };
        Self {
            words: embedding(vocabulary),
            positions: embedding(LENGTH),
            layers: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2)
                .with_norm_first(true)
                .with_dropout(0.1)
                .init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    /// Tokens `[batch, length]` to `[batch, length, width]`.
    fn forward(&self, tokens: Tensor<2, Int>, padding: Tensor<2, Bool>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &tokens.device()).unsqueeze::<2>();
        let x = self.words.forward(tokens) + self.positions.forward(positions);
        let input = TransformerEncoderInput::new(x).mask_pad(padding);
        self.norm.forward(self.layers.forward(input))
    }
}

/// Is a verse from the first or the second half?
#[derive(Module, Debug)]
pub struct Classifier {
    encoder: Encoder,
    output: Linear,
}

impl Classifier {
    pub fn new(vocabulary: usize, device: &Device) -> Self {
        Self {
            encoder: Encoder::new(vocabulary, device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    /// The logits of the two halves, `[batch, 2]`.
    pub fn forward(&self, tokens: Tensor<2, Int>, padding: Tensor<2, Bool>) -> Tensor<2> {
        let x = self.encoder.forward(tokens, padding.clone());
        // The mean over the words, without the padding.
        let is_word = padding.bool_not().float();
        let count = is_word.clone().sum_dim(1);
        let sum = (x * is_word.unsqueeze_dim(2)).sum_dim(1);
        self.output.forward(sum.squeeze_dim(1) / count)
    }

    fn output(&self, batch: Labelled) -> ClassificationOutput {
        let logits = self.forward(batch.tokens, batch.padding);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), batch.halves.clone());
        ClassificationOutput::new(loss, logits, batch.halves)
    }
}

impl TrainStep for Classifier {
    type Input = Labelled;
    type Output = ClassificationOutput;

    /// The two lines with `scaler` are what f16 needs. In bf16 and FP32 the scaler is disabled.
    fn step(&self, batch: Labelled) -> TrainOutput<ClassificationOutput> {
        let output = self.output(batch);
        let scaler = GradScaler::of(&output.loss.device());
        let grads = scaler.scale(output.loss.clone()).backward();
        TrainOutput::new(self, grads, output)
    }
}

impl InferenceStep for Classifier {
    type Input = Labelled;
    type Output = ClassificationOutput;

    fn step(&self, batch: Labelled) -> ClassificationOutput {
        self.output(batch)
    }
}
