//! A small GPT over characters, with its steps of training and validation.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn::train::{InferenceStep, SequenceOutput, TrainOutput, TrainStep};
use burn_amp_device::GradScaler;

use crate::data::{Batch, CONTEXT};

const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;

/// Learned positions, pre-norm, no dropout: training has only a few epochs.
#[derive(Module, Debug)]
pub struct Model {
    tokens: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    pub fn new(vocabulary: usize, device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(vocabulary, WIDTH).init(device),
            positions: EmbeddingConfig::new(CONTEXT, WIDTH).init(device),
            layers: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, HEADS, LAYERS)
                .with_norm_first(true)
                .with_dropout(0.0)
                .init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, vocabulary).init(device),
        }
    }

    /// Tokens `[batch, length]` to logits `[batch, length, vocabulary]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let device = tokens.device();
        let [batch, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self
            .layers
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        self.head.forward(self.norm.forward(x))
    }

    /// The loss is the mean cross entropy of a character, in nats.
    fn output(&self, batch: Batch) -> SequenceOutput {
        let logits = self.forward(batch.tokens);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(
                logits.clone().flatten(0, 1),
                batch.targets.clone().flatten(0, 1),
            );
        SequenceOutput::new(loss, logits, None, batch.targets)
    }

    /// The mean cross entropy of a character, in nats.
    pub fn mean_loss(&self, batches: impl Iterator<Item = Batch>) -> f64 {
        let (mut sum, mut windows) = (0.0, 0);
        for batch in batches {
            let [size, _] = batch.tokens.dims();
            let loss: f64 = self.output(batch).loss.into_scalar();
            sum += loss * size as f64;
            windows += size;
        }
        sum / windows as f64
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = SequenceOutput;

    /// Only f16 needs the two lines with `scaler`. In bf16 and FP32 the scaler is disabled.
    fn step(&self, batch: Batch) -> TrainOutput<SequenceOutput> {
        let output = self.output(batch);
        let scaler = GradScaler::of(&output.loss.device());
        let grads = scaler.scale(output.loss.clone()).backward();
        TrainOutput::new(self, grads, output)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> SequenceOutput {
        self.output(batch)
    }
}
