//! Trains a small language model on the Book of Genesis, character by character, with Burn's
//! `Learner` on Burn 0.22 or 0.23: in f16, bf16 or FP32, with checkpoints to resume from.
//!
//! ```sh
//! cargo run --release --features train --example learner
//! cargo run --release --features train --example learner -- --precision bf16
//! cargo run --release --features train --example learner -- --resume 2
//! cargo run --release --no-default-features --features burn-0-23,flex,train --example learner
//! cargo run --release --features train,vulkan,autotune --example learner -- --backend vulkan
//! # On a burn-amp-server, whose precision decides:
//! cargo run --release --features train --example learner -- --server ws://gpu:3000 --token-file token
//! ```

include!("../../src/burn.rs");

#[path = "../backends/mod.rs"]
mod backends;
mod data;
mod lines;
mod model;

use std::error::Error;
use std::f64::consts::LN_2;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::remote::RemoteHost;
use burn::tensor::Device;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining};
use burn_amp_device::{AmpReport, AmpTrainingExt, GradScaler, Precision, connect, mixed_precision};
use clap::Parser;

use backends::Backend;
use data::{Corpus, Epochs, loader};
use lines::Lines;
use model::Model;

const LEARNING_RATE: f64 = 4e-3;

#[derive(Parser)]
#[command(about = "Trains a small language model with Burn's learner in mixed precision")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// The precision to train in: f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// Trains on a burn-amp-server instead, in the server's precision.
    #[arg(long, value_name = "URL", requires = "token_file", conflicts_with_all = ["backend", "precision"])]
    server: Option<String>,
    /// The file with the server's token.
    #[arg(long, value_name = "FILE", requires = "server")]
    token_file: Option<PathBuf>,
    /// The number of epochs.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Windows of the text in a micro-batch.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch_size: u16,
    /// Micro-batches in a step.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    accumulation: u16,
    /// Seed of the weights and of the order of the windows.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The folder for checkpoints and metrics.
    #[arg(long, default_value = "target/learner")]
    output: PathBuf,
    /// Continue an earlier run after this epoch, with all settings of that run: other epochs would
    /// change the schedule.
    #[arg(long, value_name = "EPOCH")]
    resume: Option<u16>,
}

fn main() -> ExitCode {
    match learn(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn device(args: &Args) -> Result<Device, Box<dyn Error>> {
    let (Some(server), Some(token)) = (&args.server, &args.token_file) else {
        return Ok(mixed_precision(args.backend.device(), args.precision)?);
    };
    let token = fs::read_to_string(token)?;
    let host = RemoteHost::websocket(server).with_credential(token.trim_end());
    Ok(connect(&host, Duration::from_secs(60))?)
}

fn learn(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = device(args)?.autodiff();
    device.seed(args.seed);
    let (epochs, done) = (usize::from(args.epochs), args.resume.map(usize::from));
    let batch_size = usize::from(args.batch_size);
    if done.is_some_and(|done| done >= epochs) {
        return Err(format!("all {epochs} epochs are done: expected more --epochs").into());
    }

    let corpus = Corpus::load();
    let step = batch_size * usize::from(args.accumulation);
    let steps = epochs * corpus.train.len().div_ceil(step);
    let train = Epochs::new(
        corpus.train,
        batch_size,
        args.seed,
        done.unwrap_or(0)..epochs,
    );
    let valid = loader(corpus.valid, batch_size);

    let model = Model::new(corpus.characters.len(), &device);
    let cosine = CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, steps).init()?;
    let scaler = GradScaler::of(&device);
    let schedule = scaler.checkpoint_with(cosine);
    let mut training = SupervisedTraining::new(&args.output, Arc::new(train), valid.clone())
        .metrics((LossMetric::new(),))
        .renderer(Box::new(Lines::new()))
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .with_default_checkpointers()
        .grads_accumulation(args.accumulation.into())
        .num_epochs(epochs);
    if let Some(done) = done {
        training = training.checkpoint(done);
    }
    let learner = Learner::new(model, AdamWConfig::new().init(), schedule);
    let result = training.with_amp().launch(learner)?;
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }

    if let Some(report) = AmpReport::of_device(&device) {
        println!("\n{report}");
    }
    let valid = valid.to_device(&device.inner());
    let batches: Result<Vec<_>, _> = valid.iter().collect();
    let loss = result.model.mean_loss(batches?.into_iter());
    println!(
        "validation loss: {loss:.4} nats, {:.4} bits per character; loss scale {}, {} steps skipped",
        loss / LN_2,
        scaler.loss_scale(),
        scaler.skipped_steps()
    );
    Ok(())
}
