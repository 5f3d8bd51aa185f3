//! The training loop: Burn's own, with a loss that is scaled in f16.

use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn_amp_device::{Error, GradScaler, LossScaleConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::data::{Digit, Digits, batch};
use crate::model::Model;

const BATCH: usize = 32;
const LEARNING_RATE: f64 = 2e-3;

/// The results of a run.
pub struct Trained {
    pub test_accuracy: f64,
    /// The mean loss of the last epoch.
    pub final_loss: f64,
    pub loss_scale: f32,
    pub skipped_steps: u64,
    pub seconds: f64,
}

pub fn steps(digits: &Digits, epochs: usize) -> usize {
    epochs * digits.train.len().div_ceil(BATCH)
}

/// Trains a model from `seed` and tests it. Calls `after_step` with each step's loss.
pub fn train(
    device: &Device,
    loss_scale: LossScaleConfig,
    digits: &Digits,
    epochs: usize,
    seed: u64,
    mut after_step: impl FnMut(f64),
) -> Result<Trained, Error> {
    let plain = device;
    let device = &device.clone().autodiff();
    device.seed(seed);
    let mut order = StdRng::seed_from_u64(seed);
    let mut model = Model::new(device);
    let mut optimizer = AdamConfig::new().init();
    let scaler = GradScaler::new(loss_scale)?;
    let loss_fn = CrossEntropyLossConfig::new().init(device);

    let start = Instant::now();
    let mut train: Vec<&Digit> = digits.train.iter().collect();
    let mut final_loss = f64::NAN;
    for _ in 0..epochs {
        train.shuffle(&mut order);
        let mut losses = Vec::new();
        for digits in train.chunks(BATCH) {
            let (images, labels) = batch(digits, device);
            let loss = loss_fn.forward(model.forward(images), labels);
            let grads = scaler.backward(loss.clone(), &model);
            let stepped;
            (model, stepped) = scaler.step(&mut optimizer, LEARNING_RATE, model, grads);
            stepped?;
            scaler.update()?;
            let loss = loss.into_scalar::<f64>();
            losses.push(loss);
            after_step(loss);
        }
        final_loss = losses.iter().sum::<f64>() / losses.len() as f64;
    }
    let seconds = start.elapsed().as_secs_f64();

    let test: Vec<&Digit> = digits.test.iter().collect();
    let (images, labels) = batch(&test, plain);
    let predicted = model.valid().forward(images).argmax(1).squeeze_dim::<1>(1);
    let right = predicted.equal(labels).int().sum().into_scalar::<i64>();
    Ok(Trained {
        test_accuracy: right as f64 / test.len() as f64,
        final_loss,
        loss_scale: scaler.loss_scale(),
        skipped_steps: scaler.skipped_steps(),
        seconds,
    })
}
