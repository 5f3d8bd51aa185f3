//! A small transformer encoder, which first learns to guess masked words, and then to classify verses.
//! Written as for any backend.

use burn::module::Param;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::prelude::*;

use crate::corpus::LENGTH;
use crate::data::{Labelled, Masked};

const WIDTH: usize = 64;

/// The part that both models share.
#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    words: Embedding<B>,
    positions: Embedding<B>,
    pub layers: TransformerEncoder<B>,
    pub norm: LayerNorm<B>,
}

impl<B: Backend> Encoder<B> {
    fn new(vocabulary: usize, device: &B::Device) -> Self {
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
    fn forward(
        &self,
        tokens: Tensor<B, 2, Int>,
        padding: Option<Tensor<B, 2, Bool>>,
    ) -> Tensor<B, 3> {
        let input = TransformerEncoderInput::new(self.embed(tokens));
        let input = match padding {
            Some(padding) => input.mask_pad(padding),
            None => input,
        };
        self.norm.forward(self.layers.forward(input))
    }

    /// Tokens `[batch, length]` to what the first layer gets, `[batch, length, width]`.
    pub fn embed(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [_, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &tokens.device()).unsqueeze::<2>();
        self.words.forward(tokens) + self.positions.forward(positions)
    }
}

/// The mean over the words, without the padding: `[batch, width]`.
pub fn mean<B: Backend>(x: Tensor<B, 3>, padding: Tensor<B, 2, Bool>) -> Tensor<B, 2> {
    let is_word = padding.bool_not().float();
    let count = is_word.clone().sum_dim(1);
    let sum = (x * is_word.unsqueeze_dim(2)).sum_dim(1);
    sum.squeeze_dim::<2>(1) / count
}

/// Guesses masked words. The weights of the output are those of the embedding.
#[derive(Module, Debug)]
pub struct WordGuesser<B: Backend> {
    pub encoder: Encoder<B>,
    bias: Param<Tensor<B, 1>>,
}

impl<B: Backend> WordGuesser<B> {
    pub fn new(vocabulary: usize, device: &B::Device) -> Self {
        Self {
            encoder: Encoder::new(vocabulary, device),
            bias: Initializer::Zeros.init([vocabulary], device),
        }
    }

    /// The logits of the words at some places of the batch, `[places, vocabulary]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>, places: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        let x = self.encoder.forward(tokens, None);
        let masked = x.flatten::<2>(0, 1).select(0, places);
        let words = self.encoder.words.weight.val().transpose();
        masked.matmul(words) + self.bias.val().unsqueeze()
    }

    /// The mean cross entropy of a masked word, in nats.
    pub fn loss(&self, batch: Masked<B>) -> Tensor<B, 1> {
        let logits = self.forward(batch.tokens, batch.places);
        let device = logits.device();
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits, batch.words)
    }
}

/// Classifies a verse as from the first or from the second half.
#[derive(Module, Debug)]
pub struct Classifier<B: Backend> {
    pub encoder: Encoder<B>,
    pub output: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    pub fn new(vocabulary: usize, device: &B::Device) -> Self {
        Self {
            encoder: Encoder::new(vocabulary, device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    /// The logits of the two halves, `[batch, 2]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>, padding: Tensor<B, 2, Bool>) -> Tensor<B, 2> {
        let x = self.encoder.forward(tokens, Some(padding.clone()));
        self.output.forward(mean(x, padding))
    }

    pub fn loss(&self, batch: Labelled<B>) -> Tensor<B, 1> {
        let logits = self.forward(batch.tokens, batch.padding);
        let device = logits.device();
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits, batch.halves)
    }
}
