//! The explicit protocol in a training loop of one's own: scale, backward, unscale, clip, step,
//! update, as with PyTorch's `torch.amp.GradScaler`.
//!
//! It trains the network of the example `digits`. The scale grows every 50 steps, so that it soon
//! overflows and steps are skipped.
//!
//! ```sh
//! cargo run --release --example custom_loop
//! cargo run --release --example custom_loop -- --precision bf16 --seed 7
//! cargo run --release --example custom_loop --features cuda,fusion,autotune -- --backend cuda
//! ```

mod backends;
#[path = "digits/data.rs"]
mod data;
#[path = "digits/model.rs"]
mod model;

use std::error::Error;
use std::process::ExitCode;

use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_amp::{
    AmpAutodiff, AmpConfig, DynamicLossScale, GradScaler, LossScaleConfig, Precision,
    clip_grad_norm,
};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use backends::{Choice, ended, on_backend};
use data::{Digit, Digits, batch};
use model::Model;

const BATCH: usize = 32;
const LEARNING_RATE: f64 = 2e-3;

#[derive(Parser)]
#[command(about = "Loss scaling by hand, in a training loop of one's own")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precision to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// How often each digit is seen.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Seed of the weights, of dropout and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(
        args.backend,
        "--example custom_loop",
        train(&args)
    ))
}

fn train<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = Default::default();
    let precision = AmpConfig::new()
        .with_precision(args.precision)
        .apply::<AmpAutodiff<B>>(&device)?;
    AmpAutodiff::<B>::seed(&device, args.seed);
    let mut order = StdRng::seed_from_u64(args.seed);
    let digits = Digits::load();
    let mut train: Vec<&Digit> = digits.train.iter().collect();

    let mut model = Model::<AmpAutodiff<B>>::new(&device);
    let mut optimizer = AdamConfig::new().init();
    let loss_fn = CrossEntropyLossConfig::new().init(&device);
    // As PyTorch's `GradScaler(enabled=...)`: a disabled scaler lets the loop stay as it is.
    let scaler = GradScaler::new(match precision.scales_loss() {
        true => DynamicLossScale::new().with_growth_interval(50).into(),
        false => LossScaleConfig::Disabled,
    })?;

    println!("training in {precision}");
    println!("epoch    loss     scale  skipped");
    for epoch in 1..=args.epochs {
        train.shuffle(&mut order);
        let mut sum = 0.0;
        for digits in train.chunks(BATCH) {
            let (images, labels) = batch(digits, &device);
            let loss = loss_fn.forward(model.forward(images), labels);
            sum += loss.clone().into_scalar().elem::<f64>() * digits.len() as f64;

            let grads = scaler.scale(loss).backward();
            let mut grads = GradientsParams::from_grads(grads, &model);
            // Clip the unscaled gradients. A loop that does not clip leaves unscaling to `step`.
            scaler.unscale(&model, &mut grads)?;
            clip_grad_norm(&model, &mut grads, 1.0)?;
            // After an overflow, `step` returns the model unchanged, and `false`.
            let stepped;
            (model, stepped) = scaler.step(&mut optimizer, LEARNING_RATE, model, grads);
            stepped?;
            scaler.update()?;
        }
        println!(
            "{epoch:>5} {:>7.4} {:>9} {:>8}",
            sum / train.len() as f64,
            scaler.loss_scale(),
            scaler.skipped_steps()
        );
    }

    let (images, labels) = batch(&digits.test.iter().collect::<Vec<_>>(), &device);
    let answers = model.valid().forward(images).argmax(1).squeeze_dim::<1>(1);
    let right: i64 = answers.equal(labels).int().sum().into_scalar().elem();
    let accuracy = 100.0 * right as f64 / digits.test.len() as f64;
    println!("test accuracy: {accuracy:.2} %");
    Ok(())
}
