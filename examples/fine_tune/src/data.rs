//! The text as words: verses to classify, and the running text to pretrain on.

use std::collections::{BTreeMap, HashMap};

use burn::nn::attention::{SeqLengthOption, generate_padding_mask};
use burn::prelude::*;
use rand::Rng;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Words that the model sees at once; the longest verse has no more.
pub const LENGTH: usize = 64;
/// The tokens that are no words.
const PADDING: usize = 0;
const UNKNOWN: usize = 1;
pub const MASK: usize = 2;
/// One word in so many is masked.
const MASKED: usize = 6;

#[derive(Clone)]
pub struct Verse {
    pub tokens: Vec<usize>,
    /// 0 or 1.
    half: i64,
}

pub struct Corpus {
    /// The verses that are not for the test, one after the other.
    pub text: Vec<usize>,
    /// The few verses that the classifier is trained on.
    pub labelled: Vec<Verse>,
    pub test: Vec<Verse>,
    /// The word of each token.
    pub vocabulary: Vec<String>,
}

impl Corpus {
    /// The Book of Genesis. `seed` draws the verses that have a label.
    pub fn load(labels: usize, seed: u64) -> Self {
        let text = include_str!("../genesis.txt");
        let count = text.lines().count();
        let (test, train): (Vec<_>, Vec<_>) =
            text.lines().enumerate().partition(|(i, _)| i % 5 == 4);

        // A word that occurs only once identifies its verse rather than the half.
        let mut occurrences = BTreeMap::new();
        for word in train.iter().flat_map(|(_, line)| words(line)) {
            *occurrences.entry(word).or_insert(0) += 1;
        }
        let known = occurrences.into_iter().filter(|(_, n)| *n > 1);
        let mut vocabulary = ["padding", "unknown", "mask"]
            .map(|name| format!("[{name}]"))
            .to_vec();
        vocabulary.extend(known.map(|(word, _)| word));
        let tokens: HashMap<_, _> = vocabulary.iter().cloned().zip(0..).collect();

        let verse = |(i, line)| Verse {
            tokens: words(line)
                .map(|word| tokens.get(&word).copied().unwrap_or(UNKNOWN))
                .collect(),
            half: i64::from(i >= count / 2),
        };
        let mut labelled: Vec<_> = train.into_iter().map(verse).collect();
        let text = labelled.iter().flat_map(|verse| verse.tokens.clone());
        let text = text.collect();
        labelled.shuffle(&mut StdRng::seed_from_u64(seed));
        labelled.truncate(labels);
        Self {
            text,
            labelled,
            test: test.into_iter().map(verse).collect(),
            vocabulary,
        }
    }
}

fn words(line: &str) -> impl Iterator<Item = String> {
    line.split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

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
