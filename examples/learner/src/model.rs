//! A small GPT over characters, with the traits that Burn's learner needs. Written as for any backend.

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, SequenceOutput, TrainOutput, TrainStep};
use rand::distr::Distribution;
use rand::distr::weighted::{Error as WeightError, WeightedIndex};
use rand::rngs::StdRng;

use super::data::{Batch, CONTEXT};

const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;
/// Below 1, likely characters are drawn more often than the model has them.
const TEMPERATURE: f64 = 0.7;

/// Learned positions, pre-norm, no dropout: the text is seen only a few times.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    pub fn new(vocabulary: usize, device: &B::Device) -> Self {
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
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
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
    fn output(&self, batch: Batch<B>) -> SequenceOutput<B> {
        let logits = self.forward(batch.tokens);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(
                logits.clone().flatten(0, 1),
                batch.targets.clone().flatten(0, 1),
            );
        SequenceOutput::new(loss, logits, None, batch.targets)
    }

    /// Continues `tokens` by `count` more, each drawn by the chance the model gives it.
    pub fn generate(
        &self,
        mut tokens: Vec<u8>,
        count: usize,
        device: &B::Device,
        rng: &mut StdRng,
    ) -> Result<Vec<u8>, WeightError> {
        for _ in 0..count {
            let seen = &tokens[tokens.len().saturating_sub(CONTEXT)..];
            let seen: Vec<i64> = seen.iter().map(|token| (*token).into()).collect();
            let last = seen.len() - 1;
            let seen = Tensor::<B, 1, Int>::from_data(seen.as_slice(), device).unsqueeze();
            let logits = self.forward(seen).narrow(1, last, 1);
            let chances = softmax(logits / TEMPERATURE, 2).into_data();
            let drawn = WeightedIndex::new(chances.iter::<f32>())?.sample(rng);
            tokens.push(drawn as u8);
        }
        Ok(tokens)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = SequenceOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<SequenceOutput<B>> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = SequenceOutput<B>;

    fn step(&self, batch: Batch<B>) -> SequenceOutput<B> {
        self.output(batch)
    }
}
