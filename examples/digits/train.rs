//! The training loop: plain Burn, without any mixed-precision code.

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::data::{Digit, Digits, batch};
use crate::model::Model;

const BATCH: usize = 32;
pub const LEARNING_RATE: f64 = 2e-3;

/// The optimizer of a model.
pub type ModelOptimizer<B> = OptimizerAdaptor<Adam, Model<B>, B>;

/// The results of a run.
pub struct Trained {
    pub test_accuracy: f64,
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// The mean loss of the last epoch.
    pub final_loss: f64,
    pub seconds: f64,
}

pub fn steps(digits: &Digits, epochs: usize) -> usize {
    epochs * digits.train.len().div_ceil(BATCH)
}

/// A step as in any training loop of Burn's: backward pass, then the optimizer.
pub fn step<B: AutodiffBackend>(
    optimizer: &mut ModelOptimizer<B>,
    model: Model<B>,
    loss: Tensor<B, 1>,
) -> Model<B> {
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(LEARNING_RATE, model, grads)
}

/// Trains a model from `seed`, stepping it by `step`, and tests it. `after_step` gets each step's loss.
/// The returned model is the one for inference.
pub fn train<B: AutodiffBackend>(
    device: &B::Device,
    digits: &Digits,
    epochs: usize,
    seed: u64,
    mut step: impl FnMut(&mut ModelOptimizer<B>, Model<B>, Tensor<B, 1>) -> Model<B>,
    mut after_step: impl FnMut(f64),
) -> (Model<B::InnerBackend>, Trained) {
    B::seed(device, seed);
    let mut order = StdRng::seed_from_u64(seed);
    let mut model = Model::<B>::new(device);
    let mut optimizer = AdamConfig::new().init();
    let loss_fn = CrossEntropyLossConfig::new().init(device);

    let start = Instant::now();
    let mut train: Vec<&Digit> = digits.train.iter().collect();
    let mut losses = Vec::new();
    let mut final_loss = f64::NAN;
    for _ in 0..epochs {
        train.shuffle(&mut order);
        let epoch = losses.len();
        for digits in train.chunks(BATCH) {
            let (images, labels) = batch::<B>(digits, device);
            let loss = loss_fn.forward(model.forward(images), labels);
            model = step(&mut optimizer, model, loss.clone());
            let loss = loss.into_scalar().elem::<f64>();
            losses.push(loss);
            after_step(loss);
        }
        let epoch = &losses[epoch..];
        final_loss = epoch.iter().sum::<f64>() / epoch.len() as f64;
    }
    let seconds = start.elapsed().as_secs_f64();

    let model = model.valid();
    let trained = Trained {
        test_accuracy: accuracy(&model, digits, device),
        losses,
        final_loss,
        seconds,
    };
    (model, trained)
}

/// The share of the digits for testing that a model recognizes.
pub fn accuracy<B: Backend>(model: &Model<B>, digits: &Digits, device: &B::Device) -> f64 {
    let test: Vec<&Digit> = digits.test.iter().collect();
    let (images, labels) = batch::<B>(&test, device);
    let predicted = model.forward(images).argmax(1).squeeze_dim::<1>(1);
    let right = predicted.equal(labels).int().sum();
    right.into_scalar().elem::<i64>() as f64 / test.len() as f64
}
