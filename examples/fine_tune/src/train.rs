//! The two trainings: plain Burn, without any mixed-precision code.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::corpus::{Corpus, Verse};
use crate::data::{Labelled, Masked};
use crate::model::WordGuesser;

/// The plan of a training.
pub struct Plan {
    pub steps: usize,
    pub batch: usize,
    /// The learning rate at the beginning; it falls to 0.
    pub learning_rate: f64,
    pub seed: u64,
}

/// Trains a model to guess masked words of the text. Returns the model, and the mean loss of the last
/// tenth of the steps. `after_step` gets each step's loss.
pub fn pretrain<B: AutodiffBackend>(
    model: WordGuesser<B>,
    corpus: &Corpus,
    plan: &Plan,
    device: &B::Device,
    mut after_step: impl FnMut(f64),
) -> (WordGuesser<B>, f64) {
    let mut rng = StdRng::seed_from_u64(plan.seed);
    let loss = |model: &WordGuesser<B>| {
        model.loss(Masked::random(&corpus.text, plan.batch, &mut rng, device))
    };
    let mut losses = Vec::new();
    let model = train(model, plan, loss, |loss| {
        losses.push(loss);
        after_step(loss);
    });
    let last = &losses[plan.steps - plan.steps / 10..];
    (model, last.iter().sum::<f64>() / last.len() as f64)
}

/// Trains a classifier on the verses with a label. `loss` gives the loss of a batch.
pub fn classify<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    corpus: &Corpus,
    plan: &Plan,
    device: &B::Device,
    loss: impl Fn(&M, Labelled<B>) -> Tensor<B, 1>,
    after_step: impl FnMut(f64),
) -> M {
    let mut rng = StdRng::seed_from_u64(plan.seed);
    let mut verses = Vec::new();
    let of_batch = |model: &M| {
        if verses.len() < plan.batch {
            verses = corpus.labelled.clone();
            verses.shuffle(&mut rng);
        }
        let batch = verses.split_off(verses.len().saturating_sub(plan.batch));
        loss(model, Labelled::new(&batch, device))
    };
    train(model, plan, of_batch, after_step)
}

fn train<B: AutodiffBackend, M: AutodiffModule<B>>(
    mut model: M,
    plan: &Plan,
    mut loss: impl FnMut(&M) -> Tensor<B, 1>,
    mut after_step: impl FnMut(f64),
) -> M {
    let mut optimizer = AdamWConfig::new()
        .with_weight_decay(0.01)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    for step in 0..plan.steps {
        let loss = loss(&model);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let left = 1.0 - step as f64 / plan.steps as f64;
        model = optimizer.step(plan.learning_rate * left, model, grads);
        after_step(loss.into_scalar().elem());
    }
    model
}

/// The share of the verses that a classifier gets right. `forward` gives its logits of tokens and
/// padding.
pub fn accuracy<B: Backend>(
    verses: &[Verse],
    device: &B::Device,
    forward: impl Fn(Tensor<B, 2, Int>, Tensor<B, 2, Bool>) -> Tensor<B, 2>,
) -> f64 {
    let mut right = 0;
    for verses in verses.chunks(32) {
        let batch = Labelled::<B>::new(verses, device);
        let logits = forward(batch.tokens, batch.padding);
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
