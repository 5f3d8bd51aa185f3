//! The training loop: each of the two models takes its steps by a scaler of its own, so that an
//! overflow of one skips no step of the other.

use burn::module::AutodiffModule;
use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::optim::{AdamConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpError, DynamicLossScale, GradScaler, LossScaleConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::data::{CLASSES, Digit, Digits, batch};
use crate::model::{Discriminator, Generator, NOISE};

const BATCH: usize = 64;
/// The learning rate of the first epoch. It falls to zero, which makes the strokes cleaner.
const LEARNING_RATE: f64 = 1.5e-3;
/// Generated digits of each class in the picture.
pub const SAMPLES: usize = 8;

/// The results of training.
pub struct Trained {
    pub generator: StepOutcome,
    pub discriminator: StepOutcome,
    /// Pixels from 0 to 1 of `SAMPLES` digits for each class, class by class.
    pub samples: Vec<f32>,
}

/// The results of one of the models.
pub struct StepOutcome {
    /// The mean loss of the last epoch.
    pub final_loss: f64,
    pub loss_scale: f32,
    pub skipped_steps: u64,
}

/// A model with its optimizer and its scaler.
struct Player<M, O> {
    model: M,
    optimizer: O,
    scaler: GradScaler,
    /// The losses of this epoch.
    losses: Vec<f64>,
}

impl<M, O> Player<M, O> {
    fn new(model: M, optimizer: O, scales: bool) -> Result<Self, AmpError> {
        let config = match scales {
            // Grows sooner than by default: training is short.
            true => DynamicLossScale::new().with_growth_interval(200).into(),
            false => LossScaleConfig::Disabled,
        };
        Ok(Self {
            model,
            optimizer,
            scaler: GradScaler::new(config)?,
            losses: Vec::new(),
        })
    }

    /// One step against a loss. The loss depends on the other model too, whose parameters get no part
    /// of the step.
    fn step<B>(&mut self, loss: Tensor<B, 1>, lr: f64) -> Result<f64, AmpError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let value = loss.clone().into_scalar().elem();
        let grads = self.scaler.backward(loss, &self.model);
        let model = self.model.clone();
        let stepped;
        (self.model, stepped) = self.scaler.step(&mut self.optimizer, lr, model, grads);
        stepped?;
        self.scaler.update()?;
        self.losses.push(value);
        Ok(value)
    }

    fn outcome(&self) -> StepOutcome {
        StepOutcome {
            final_loss: self.losses.iter().sum::<f64>() / self.losses.len() as f64,
            loss_scale: self.scaler.loss_scale(),
            skipped_steps: self.scaler.skipped_steps(),
        }
    }
}

pub fn steps(digits: &Digits, epochs: usize) -> usize {
    epochs * all(digits).len().div_ceil(BATCH)
}

/// There is nothing to test here, so every digit is trained on.
fn all(digits: &Digits) -> Vec<&Digit> {
    digits.train.iter().chain(&digits.test).collect()
}

/// Trains both models from `seed`. `after_step` gets the generator's and the discriminator's loss.
pub fn train<B: AutodiffBackend>(
    digits: &Digits,
    epochs: usize,
    seed: u64,
    scales: bool,
    mut after_step: impl FnMut(f64, f64),
) -> Result<Trained, AmpError> {
    let device = B::Device::default();
    B::seed(&device, seed);
    let mut order = StdRng::seed_from_u64(seed);
    let adam = AdamConfig::new().with_beta_1(0.5);
    let mut generator = Player::new(Generator::<B>::new(&device), adam.init(), scales)?;
    let mut discriminator = Player::new(Discriminator::<B>::new(&device), adam.init(), scales)?;

    let bce = BinaryCrossEntropyLossConfig::new().with_logits(true);
    let hard = bce.init(&device);
    // Smooth labels: a discriminator that is certain leaves the generator nothing to learn from.
    let smooth = bce.with_smoothing(Some(0.2)).init(&device);

    let mut digits = all(digits);
    for epoch in 0..epochs {
        let lr = LEARNING_RATE * (1.0 - epoch as f64 / epochs as f64);
        digits.shuffle(&mut order);
        generator.losses.clear();
        discriminator.losses.clear();
        for digits in digits.chunks(BATCH) {
            let (images, labels) = batch::<B>(digits, &device);
            let images = images.flatten::<2>(1, 3);
            let size = digits.len();
            let [real, generated] = [1, 0].map(|answer| Tensor::full([size], answer, &device));

            let made = generator
                .model
                .forward(noise(size, &device), labels.clone());
            let judge = &discriminator.model;
            let loss = smooth.forward(judge.forward(images, labels.clone()), real.clone())
                + hard.forward(
                    judge.forward(made.clone().detach(), labels.clone()),
                    generated,
                );
            let of_discriminator = discriminator.step(loss, lr)?;

            let loss = hard.forward(discriminator.model.forward(made, labels), real);
            let of_generator = generator.step(loss, lr)?;
            after_step(of_generator, of_discriminator);
        }
    }

    let labels: Vec<i64> = (0..CLASSES as i64)
        .flat_map(|class| [class; SAMPLES])
        .collect();
    let labels = Tensor::from_ints(labels.as_slice(), &device);
    let samples = generator
        .model
        .valid()
        .forward(noise(SAMPLES * CLASSES, &device), labels);
    Ok(Trained {
        generator: generator.outcome(),
        discriminator: discriminator.outcome(),
        samples: samples.into_data().into_vec().expect("data in FP32"),
    })
}

fn noise<B: Backend>(size: usize, device: &B::Device) -> Tensor<B, 2> {
    Tensor::random([size, NOISE], Distribution::Normal(0.0, 1.0), device)
}
