//! Text classification with Burn's `TransformerEncoder`: is a verse from the first or from the
//! second half of the Book of Genesis? The second begins in chapter 27, and tells of Jacob and
//! Joseph.
//!
//! Names give many verses away; "And he went up from thence to Beersheba" can only be guessed.
//! Every fifth verse is for the test. Its neighbours are in the training set, so the accuracy is
//! that of filling gaps in a known text. Chance is 50 %.
//!
//! The model and `train` are plain Burn, generic over the backend. `main` calls `train` on
//! `Autodiff<Flex>`, and then, unchanged, on `AmpAutodiff<Flex>` in f16 and bf16. Half precision is
//! emulated on a CPU: this shows the results, not the speed.
//!
//! ```sh
//! cargo run --release --example text_classification
//! ```

use std::collections::{BTreeMap, HashMap};

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::attention::{SeqLengthOption, generate_padding_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, AmpConfig, AmpError, GradScaler, Precision};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

const SEED: u64 = 42;
const EPOCHS: usize = 6;
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 5e-3;
const WIDTH: usize = 32;
/// Words of the longest verse.
const LENGTH: usize = 64;

/// The tokens that are no words.
const PADDING: usize = 0;
const UNKNOWN: usize = 1;

#[derive(Clone)]
struct Verse {
    tokens: Vec<usize>,
    /// 0 or 1.
    half: i64,
}

struct Corpus {
    train: Vec<Verse>,
    test: Vec<Verse>,
    /// How many tokens there are.
    vocabulary: usize,
}

impl Corpus {
    fn load() -> Self {
        let text = include_str!("genesis.txt");
        let count = text.lines().count();
        let (test, train): (Vec<_>, Vec<_>) =
            text.lines().enumerate().partition(|(i, _)| i % 5 == 4);

        // A word that occurs only once says more of its verse than of the half.
        let mut occurrences = BTreeMap::new();
        for word in train.iter().flat_map(|(_, line)| words(line)) {
            *occurrences.entry(word).or_insert(0) += 1;
        }
        let known = occurrences.into_iter().filter(|(_, n)| *n > 1);
        let vocabulary: HashMap<_, _> = known.map(|(word, _)| word).zip(UNKNOWN + 1..).collect();

        let verse = |(i, line)| Verse {
            tokens: words(line)
                .map(|word| vocabulary.get(&word).copied().unwrap_or(UNKNOWN))
                .collect(),
            half: i64::from(i >= count / 2),
        };
        Self {
            train: train.into_iter().map(verse).collect(),
            test: test.into_iter().map(verse).collect(),
            vocabulary: vocabulary.len() + 2,
        }
    }
}

fn words(line: &str) -> impl Iterator<Item = String> {
    line.split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

struct Batch<B: Backend> {
    /// `[batch, length]`
    tokens: Tensor<B, 2, Int>,
    /// Where a token is padding, `[batch, length]`.
    padding: Tensor<B, 2, Bool>,
    /// `[batch]`
    halves: Tensor<B, 1, Int>,
}

impl<B: Backend> Batch<B> {
    fn new(verses: &[Verse], device: &B::Device) -> Self {
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

#[derive(Module, Debug)]
struct Model<B: Backend> {
    words: Embedding<B>,
    positions: Embedding<B>,
    encoder: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(vocabulary: usize, device: &B::Device) -> Self {
        Self {
            words: EmbeddingConfig::new(vocabulary, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 1)
                .with_dropout(0.2)
                .init(device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    /// The logits of the two halves, `[batch, 2]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>, padding: Tensor<B, 2, Bool>) -> Tensor<B, 2> {
        let [_, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &tokens.device()).unsqueeze::<2>();
        let x = self.words.forward(tokens) + self.positions.forward(positions);
        let input = TransformerEncoderInput::new(x).mask_pad(padding.clone());
        let x = self.encoder.forward(input);

        // The mean over the words, without the padding.
        let is_word = padding.bool_not().float();
        let count = is_word.clone().sum_dim(1);
        let sum = (x * is_word.unsqueeze_dim(2)).sum_dim(1);
        self.output.forward(sum.squeeze_dim(1) / count)
    }
}

/// Trains a model and gives its accuracy on the test verses.
fn train<B: AutodiffBackend>(corpus: &Corpus) -> f64 {
    let device = B::Device::default();
    B::seed(&device, SEED);
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut model = Model::<B>::new(corpus.vocabulary, &device);
    let mut optimizer = AdamWConfig::new().init();
    let loss_fn = CrossEntropyLossConfig::new().init(&device);

    let mut verses = corpus.train.clone();
    for _ in 0..EPOCHS {
        verses.shuffle(&mut rng);
        for verses in verses.chunks(BATCH) {
            let batch = Batch::<B>::new(verses, &device);
            let logits = model.forward(batch.tokens, batch.padding);
            let loss = loss_fn.forward(logits, batch.halves);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(LEARNING_RATE, model, grads);
        }
    }
    accuracy(&model.valid(), &corpus.test, &device)
}

fn accuracy<B: Backend>(model: &Model<B>, verses: &[Verse], device: &B::Device) -> f64 {
    let mut right = 0;
    for verses in verses.chunks(BATCH) {
        let batch = Batch::<B>::new(verses, device);
        let logits = model.forward(batch.tokens, batch.padding);
        let answers = logits.argmax(1).squeeze_dim(1);
        right += answers
            .equal(batch.halves)
            .int()
            .sum()
            .into_scalar()
            .elem::<i64>();
    }
    right as f64 / verses.len() as f64
}

fn main() -> Result<(), AmpError> {
    let corpus = Corpus::load();
    println!("precision  test accuracy  skipped steps");
    row(Precision::F32, train::<Autodiff<Flex>>(&corpus), 0);

    // All that is new: the other type, and a precision that is asked for, as a CPU gains nothing
    // from half precision and would be left at FP32.
    type B = AmpAutodiff<Flex>;
    let device = Default::default();
    for precision in [Precision::F16, Precision::Bf16] {
        AmpConfig::new()
            .with_precision(precision)
            .apply::<B>(&device)?;
        let accuracy = train::<B>(&corpus);
        let skipped_steps = GradScaler::of::<B>(&device).skipped_steps();
        row(precision, accuracy, skipped_steps);
    }
    Ok(())
}

fn row(precision: Precision, accuracy: f64, skipped_steps: u64) {
    let percent = 100.0 * accuracy;
    println!("{precision:<9} {percent:>12.2} % {skipped_steps:>14}");
}
