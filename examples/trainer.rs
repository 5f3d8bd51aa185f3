//! `MixedPrecisionTrainer`: one call for each batch has forward and backward pass, loss scaling,
//! accumulation, clipping and learning rate, and one file has the whole state to resume from.
//!
//! An LSTM learns the Book of Genesis, character by character. Each step is of four micro-batches, and
//! its gradients are clipped, as recurrent networks need it. After each epoch the trainer is saved;
//! `--resume` continues after the last saved epoch, with the same result.
//!
//! ```sh
//! cargo run --release --example trainer
//! cargo run --release --example trainer -- --resume
//! cargo run --release --example trainer -- --precision bf16 --seed 7 --out target/mine
//! cargo run --release --example trainer --features cuda,fusion,autotune -- --backend cuda
//! ```

mod backends;
// The text of the example `learner`, which also draws a text.
#[allow(dead_code)]
#[path = "learner/src/data.rs"]
mod data;

use std::error::Error;
use std::f64::consts::LN_2;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::{FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder};
use burn_amp::{AmpAutodiff, MixedPrecisionTrainerConfig, Precision, WhenStuck, with_precision};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use backends::{Choice, ended, on_backend};
use data::{Batch, Corpus, WindowBatcher};

const MICRO_BATCH: usize = 16;
const ACCUMULATION: usize = 4;
const MAX_NORM: f32 = 1.0;
const LEARNING_RATE: f64 = 1e-2;
const WIDTH: usize = 64;

/// A recorder in half precision would round the FP32 parameters.
type Recorder = NamedMpkFileRecorder<FullPrecisionSettings>;

#[derive(Parser)]
#[command(about = "Trains an LSTM on text with MixedPrecisionTrainer")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precision to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// How often the text is seen.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Seed of the weights and of the order of the text.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The folder in which the trainer is saved.
    #[arg(long, default_value = "target/trainer")]
    out: PathBuf,
    /// Continue after the last epoch that was saved.
    #[arg(long)]
    resume: bool,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    characters: Embedding<B>,
    lstm: Lstm<B>,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(vocabulary: usize, device: &B::Device) -> Self {
        Self {
            characters: EmbeddingConfig::new(vocabulary, WIDTH / 2).init(device),
            lstm: LstmConfig::new(WIDTH / 2, WIDTH, true).init(device),
            head: LinearConfig::new(WIDTH, vocabulary).init(device),
        }
    }

    /// The mean cross entropy of a character, in nats.
    fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let (hidden, _) = self
            .lstm
            .forward(self.characters.forward(batch.tokens), None);
        let logits = self.head.forward(hidden).flatten(0, 1);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, batch.targets.flatten(0, 1))
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(args.backend, "--example trainer", train(&args)))
}

fn train<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = Default::default();
    AmpAutodiff::<B>::seed(&device, args.seed);
    let Corpus {
        characters,
        train,
        valid,
    } = Corpus::load();
    // An incomplete step at the end of an epoch becomes the beginning of the next epoch's first step.
    let batches = usize::from(args.epochs) * train.len().div_ceil(MICRO_BATCH);
    let cosine = CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, batches / ACCUMULATION);

    let model = Model::<AmpAutodiff<B>>::new(characters.len(), &device);
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .with_precision(args.precision)
        .with_grads_accumulation(ACCUMULATION)
        .with_grad_clipping_norm(Some(MAX_NORM))
        .with_when_stuck(WhenStuck::Stop)
        .init(model, AdamConfig::new().init(), cosine.init()?)?;

    let recorder = Recorder::new();
    let file = |epoch| args.out.join(format!("{}-epoch-{epoch}", args.precision));
    let saved = |epoch: &u16| {
        let extension = <Recorder as FileRecorder<AmpAutodiff<B>>>::file_extension();
        file(*epoch).with_extension(extension).is_file()
    };
    let mut done = 0;
    if args.resume {
        let last = (1..=args.epochs).rev().find(saved);
        done = last.ok_or_else(|| format!("nothing to resume in {}", args.out.display()))?;
        trainer.load_file(file(done), &recorder, &device)?;
        println!("resumed after epoch {done}");
    }

    println!("epoch  train loss  bits per character  loss scale  skipped steps");
    for epoch in done + 1..=args.epochs {
        // The order depends only on the epoch, whether the run was resumed or not.
        let mut windows = train.clone();
        windows.shuffle(&mut StdRng::seed_from_u64(args.seed + u64::from(epoch)));
        let mut sum = 0.0;
        for windows in windows.chunks(MICRO_BATCH) {
            let batch = WindowBatcher.batch(windows.to_vec(), &device);
            let metrics = trainer.train_step(batch, (), |model, batch, ()| model.loss(batch))?;
            sum += metrics.loss * windows.len() as f64;
        }

        let model = trainer.model().valid();
        let bits = with_precision(args.precision, || {
            let losses = valid.chunks(MICRO_BATCH).map(|windows| {
                let batch = WindowBatcher.batch(windows.to_vec(), &device);
                model.loss(batch).into_scalar().elem::<f64>() * windows.len() as f64
            });
            losses.sum::<f64>() / valid.len() as f64 / LN_2
        });
        println!(
            "{epoch:>5} {:>11.4} {bits:>19.4} {:>11} {:>14}",
            sum / train.len() as f64,
            trainer.loss_scale(),
            trainer.skipped_steps()
        );
        trainer.save_file(file(epoch), &recorder)?;
    }
    Ok(())
}
