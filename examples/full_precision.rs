//! A layer that overflows f16, and `full_precision`, which prevents the overflow.
//!
//! The network measures how far a picture is from each of 64 pictures that it learns (radial basis
//! functions). The squared distance is |x|² - 2 x·c + |c|², and the product x·c of two pictures, with
//! pixels from 0 to 255 as in an image file, is about a million: f16 ends at 65504. It overflows in
//! the forward pass, at any loss scale. burn-amp skips the first steps, finds the product and computes it
//! in FP32 from then on. With `full_precision` around the distances, nothing overflows and no step is lost.
//!
//! ```sh
//! cargo run --release --example full_precision
//! cargo run --release --example full_precision -- --seed 7
//! cargo run --release --example full_precision --features cuda,fusion,autotune -- --backend cuda
//! ```

mod backends;
#[path = "digits/data.rs"]
mod data;

use std::error::Error;
use std::process::ExitCode;

use burn::module::{AutodiffModule, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_amp::{
    AmpAutodiff, AmpError, MixedPrecisionTrainerConfig, Precision, WhenStuck, full_precision,
    with_precision,
};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use backends::{Choice, ended, on_backend};
use data::{CLASSES, Digit, Digits, SIDE, batch};

const EPOCHS: usize = 12;
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 1e-2;
const CENTRES: usize = 64;
/// How far a picture may be from a centre to be like it: the root of the mean squared difference of
/// their pixels.
const RADIUS: f32 = 60.0;

#[derive(Parser)]
#[command(about = "A layer that overflows f16, without and with full_precision")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// Seed of the weights and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    /// `[centres, pixels]`, in units of 255 as the optimizer's step is for all parameters.
    centres: Param<Tensor<B, 2>>,
    output: Linear<B>,
    /// Whether the distances are computed in FP32.
    in_full: bool,
}

impl<B: Backend> Model<B> {
    /// The centres are pictures of the training set.
    fn new(digits: &[&Digit], in_full: bool, device: &B::Device) -> Self {
        let (pictures, _) = batch(&digits[..CENTRES], device);
        Self {
            centres: Param::from_tensor(pictures.flatten(1, 3)),
            output: LinearConfig::new(CENTRES, CLASSES).init(device),
            in_full,
        }
    }

    /// Pictures `[batch, 64]` from 0 to 255 to logits `[batch, 10]`.
    fn forward(&self, pictures: Tensor<B, 2>) -> Tensor<B, 2> {
        let centres = self.centres.val() * 255.0;
        let squares = match self.in_full {
            true => full_precision(|| squared_distances(pictures, centres)),
            false => squared_distances(pictures, centres),
        };
        let width = 2.0 * RADIUS.powi(2) * (SIDE * SIDE) as f32;
        self.output.forward((-squares / width).exp())
    }
}

/// The squared distances of each of `[n, k]` from each of `[m, k]`: `[n, m]`.
fn squared_distances<B: Backend>(x: Tensor<B, 2>, c: Tensor<B, 2>) -> Tensor<B, 2> {
    let square = |x: Tensor<B, 2>| x.powi_scalar(2).sum_dim(1);
    square(x.clone()) - x.matmul(c.clone().transpose()) * 2.0 + square(c).transpose()
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(
        args.backend,
        "--example full_precision",
        compare(&args)
    ))
}

fn compare<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let digits = Digits::load();
    println!("precision  distances  final loss  test accuracy  skipped steps");
    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        for in_full in [false, true] {
            let distances = if in_full { Precision::F32 } else { precision };
            if in_full && precision == Precision::F32 {
                continue;
            }
            print!("{precision:<9}  {distances:<9}  ");
            let trained = train::<B>(&digits, precision, in_full, args.seed)?;
            println!(
                "{:>10.4} {:>12.2} % {:>14}",
                trained.final_loss,
                100.0 * trained.test_accuracy,
                trained.skipped_steps
            );
        }
    }
    Ok(())
}

struct Trained {
    /// The mean of the last epoch.
    final_loss: f64,
    test_accuracy: f64,
    skipped_steps: u64,
}

fn train<B: Backend>(
    digits: &Digits,
    precision: Precision,
    in_full: bool,
    seed: u64,
) -> Result<Trained, AmpError> {
    let device = Default::default();
    AmpAutodiff::<B>::seed(&device, seed);
    let mut order = StdRng::seed_from_u64(seed);
    let mut train: Vec<&Digit> = digits.train.iter().collect();
    train.shuffle(&mut order);
    let model = Model::<AmpAutodiff<B>>::new(&train, in_full, &device);
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .with_precision(precision)
        .with_when_stuck(WhenStuck::Stop)
        .init(model, AdamConfig::new().init(), LEARNING_RATE)?;

    let mut final_loss = f64::NAN;
    for _ in 0..EPOCHS {
        train.shuffle(&mut order);
        let mut sum = 0.0;
        for digits in train.chunks(BATCH) {
            let (pictures, labels) = pictures(digits, &device);
            let metrics = trainer.train_step(pictures, labels, |model, pictures, labels| {
                CrossEntropyLossConfig::new()
                    .init(&device)
                    .forward(model.forward(pictures), labels)
            })?;
            sum += metrics.loss * digits.len() as f64;
        }
        final_loss = sum / train.len() as f64;
    }

    let model = trainer.model().valid();
    let (pictures, labels) = pictures(&digits.test.iter().collect::<Vec<_>>(), &device);
    let logits = with_precision(precision, || model.forward(pictures));
    let right = logits
        .argmax(1)
        .squeeze_dim::<1>(1)
        .equal(labels)
        .int()
        .sum();
    Ok(Trained {
        final_loss,
        test_accuracy: right.into_scalar().elem::<f64>() / digits.test.len() as f64,
        skipped_steps: trainer.skipped_steps(),
    })
}

/// Pictures as in an image file: `[batch, 64]` from 0 to 255, and labels `[batch]`.
fn pictures<B: Backend>(
    digits: &[&Digit],
    device: &B::Device,
) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let (images, labels) = batch(digits, device);
    (images.flatten(1, 3) * 255.0, labels)
}
