//! Operations with kernels and gradients of your own, in mixed precision: a network that takes the
//! noise out of handwritten digits.
//!
//! Burn's way to a kernel is a trait over backends. `ops.rs` has one with two operations: a gated layer
//! with two matrix products, which runs in half precision, and a loss with an exponential, which does
//! not. The implementation for `Amp<B, S>` names the class of each operation, and calls the backend's. The
//! other implementations are the same as without mixed precision.
//!
//! The same generic function then trains with them on `Autodiff<B>`, and on `AmpAutodiff<B>` in f16
//! and bf16.
//!
//! ```sh
//! cargo run --release --example custom_op
//! cargo run --release --example custom_op -- --seed 7
//! ```

// This example needs no labels.
#[allow(dead_code)]
#[path = "../digits/data.rs"]
mod data;
mod ops;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Param};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, AmpConfig, AmpError, Precision};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use data::{Digit, Digits, SIDE, batch};
use ops::{MyOps, gated_linear, log_cosh};

const EPOCHS: usize = 15;
const BATCH: usize = 32;
const PIXELS: usize = SIDE * SIDE;
const WIDTH: usize = 128;
/// Standard deviation, in shades of 0 to 16.
const NOISE: f64 = 4.0;
const LEARNING_RATE: f64 = 2e-3;

#[derive(Parser)]
#[command(about = "A layer and a loss of one's own, in FP32, f16 and bf16")]
struct Args {
    /// Seed of the weights, of the noise and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// Takes the noise out of digits.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    /// The values and the gates of each layer.
    layers: [[Param<Tensor<B, 2>>; 2]; 2],
    output: Linear<B>,
}

impl<B: MyOps> Model<B> {
    fn new(device: &B::Device) -> Self {
        let weight = |from| {
            let uniform = Initializer::KaimingUniform {
                gain: 1.0,
                fan_out_only: false,
            };
            uniform.init_with([from, WIDTH], Some(from), Some(WIDTH), device)
        };
        Self {
            layers: [PIXELS, WIDTH].map(|from| [weight(from), weight(from)]),
            output: LinearConfig::new(WIDTH, PIXELS).init(device),
        }
    }

    /// Takes and returns shades `[batch, 64]` from 0 to 16.
    fn forward(&self, noisy: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self.layers.iter().fold(noisy / 16.0, |x, [value, gate]| {
            gated_linear(x, value.val(), gate.val())
        });
        self.output.forward(hidden) * 16.0
    }
}

/// The mean error of a shade in the digits for testing, with the noise and without it.
fn train<B: MyOps + AutodiffBackend<InnerBackend: MyOps>>(digits: &Digits, seed: u64) -> [f64; 2] {
    let device = B::Device::default();
    B::seed(&device, seed);
    let mut order = StdRng::seed_from_u64(seed);
    let mut model = Model::<B>::new(&device);
    let mut optimizer = AdamConfig::new().init();
    let mut train: Vec<&Digit> = digits.train.iter().collect();
    for _ in 0..EPOCHS {
        train.shuffle(&mut order);
        for digits in train.chunks(BATCH) {
            let (clean, noisy) = shades::<B>(digits, &device);
            let loss = log_cosh(model.forward(noisy) - clean).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(LEARNING_RATE, model, grads);
        }
    }

    let test: Vec<&Digit> = digits.test.iter().collect();
    let (clean, noisy) = shades::<B::InnerBackend>(&test, &device);
    let cleaned = model.valid().forward(noisy.clone());
    [noisy, cleaned].map(|shades| (shades - clean.clone()).abs().mean().into_scalar().elem())
}

/// Digits `[batch, 64]` in shades from 0 to 16, and the same with noise.
fn shades<B: Backend>(digits: &[&Digit], device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (images, _) = batch(digits, device);
    let clean = images.flatten::<2>(1, 3) * 16.0;
    let noise = clean.random_like(Distribution::Normal(0.0, NOISE));
    (clean.clone(), clean + noise)
}

fn main() -> Result<(), AmpError> {
    type B = AmpAutodiff<Flex>;

    let Args { seed } = Args::parse();
    let digits = Digits::load();
    println!("precision  error with noise  error without");
    let row = |precision: Precision, [with, without]: [f64; 2]| {
        println!("{precision:<9} {with:>17.4} {without:>14.4}");
    };
    row(Precision::F32, train::<Autodiff<Flex>>(&digits, seed));
    for precision in [Precision::F16, Precision::Bf16] {
        AmpConfig::new()
            .with_precision(precision)
            .apply::<B>(&Default::default())?;
        row(precision, train::<B>(&digits, seed));
    }
    Ok(())
}
