//! Verses and pieces of the text in batches.

use burn::nn::attention::{SeqLengthOption, generate_padding_mask};
use burn::prelude::*;
use rand::Rng;
use rand::rngs::StdRng;

use crate::corpus::{LENGTH, MASK, PADDING, Verse};

/// One word in so many is masked.
const MASKED: usize = 6;

/// Verses of one batch, padded to the same length.
pub struct Labelled<B: Backend> {
    /// `[batch, length]`
    pub tokens: Tensor<B, 2, Int>,
    /// Where a token is padding, `[batch, length]`.
    pub padding: Tensor<B, 2, Bool>,
    /// `[batch]`
    pub halves: Tensor<B, 1, Int>,
}

impl<B: Backend> Labelled<B> {
    pub fn new(verses: &[Verse], device: &B::Device) -> Self {
        let tokens = verses.iter().map(|verse| verse.tokens.clone()).collect();
        let padded = generate_padding_mask(PADDING, tokens, SeqLengthOption::Max(LENGTH), device);
        let halves: Vec<_> = verses.iter().map(|verse| verse.half).collect();
        Self {
            tokens: padded.tensor,
            padding: padded.mask,
            halves: Tensor::from_data(halves.as_slice(), device),
        }
    }
}

/// Pieces of the text, with words to guess.
pub struct Masked<B: Backend> {
    /// `[batch, length]`
    pub tokens: Tensor<B, 2, Int>,
    /// Where the masked words are, among all of the batch, `[masked]`.
    pub places: Tensor<B, 1, Int>,
    /// The masked words, `[masked]`.
    pub words: Tensor<B, 1, Int>,
}

impl<B: Backend> Masked<B> {
    pub fn random(text: &[usize], batch: usize, rng: &mut StdRng, device: &B::Device) -> Self {
        let mut tokens: Vec<i64> = Vec::new();
        for _ in 0..batch {
            let start = rng.random_range(0..=text.len() - LENGTH);
            let piece = &text[start..start + LENGTH];
            tokens.extend(piece.iter().map(|token| *token as i64));
        }
        // The same number in each batch: a GPU's kernels are compiled for a shape.
        let places = rand::seq::index::sample(rng, tokens.len(), tokens.len() / MASKED);
        let places: Vec<i64> = places.into_iter().map(|place| place as i64).collect();
        let hide = |place: &i64| std::mem::replace(&mut tokens[*place as usize], MASK as i64);
        let words: Vec<i64> = places.iter().map(hide).collect();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens, [batch, LENGTH]), device),
            places: Tensor::from_data(places.as_slice(), device),
            words: Tensor::from_data(words.as_slice(), device),
        }
    }
}
