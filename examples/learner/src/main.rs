//! Trains a small language model on the Book of Genesis, character by character, with Burn's
//! `Learner`: its dashboard, its metrics, and checkpoints to resume from. Where there is no
//! terminal, each epoch prints a line.
//!
//! ```sh
//! cargo run --release -p learner
//! cargo run --release -p learner -- --resume
//! cargo run --release -p learner -- --precision bf16 --epochs 4 --output target/mine
//! ```
//!
//! LibTorch trains faster in bf16 than in FP32 on a CPU with bf16 instructions. `LIBTORCH_USE_PYTORCH`
//! makes the build use PyTorch's LibTorch. `LD_LIBRARY_PATH` is the folder of its libraries:
//!
//! ```sh
//! pip install torch==2.9.0
//! export LIBTORCH_USE_PYTORCH=1
//! export LD_LIBRARY_PATH=$(python3 -c "import torch; print(torch.__path__[0])")/lib
//! cargo run --release -p learner --features tch -- --backend tch --precision bf16
//! ```
//!
//! On a GPU of NVIDIA's (`vulkan`, `metal`, `rocm` and `wgpu` are for others):
//!
//! ```sh
//! cargo run --release -p learner --features cuda,fusion,autotune -- --backend cuda
//! ```
//!
//! In the dashboard `q` and then `s` stop the training. Without the dashboard, Ctrl+C stops it. However
//! a run ends, `--resume` continues it after the last completed epoch, with the same result.

#[path = "../../backends/mod.rs"]
mod backends;
mod data;
#[path = "../../epoch_lines/mod.rs"]
mod epoch_lines;
mod model;
#[path = "../../resume/mod.rs"]
mod resume;

use std::error::Error;
use std::f64::consts::LN_2;
use std::fmt;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use burn::backend::Flex;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig};
use burn::prelude::*;
use burn::train::metric::LossMetric;
use burn::train::{InferenceStep, Learner, SupervisedTraining};
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpReport, AmpTrainingExt, GradScaler, LrSchedulerWithScaler,
    Precision,
};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;

use backends::{Choice, ended, on_backend};
use data::{Batch, Corpus, WindowBatcher};
use epoch_lines::EpochLines;
use model::Model;
use resume::{Checkpoints, Epochs, FileRecorder, MetricFiles};
use serde::{Deserialize, Serialize};

type Optim<B> = OptimizerAdaptor<AdamW, Model<B>, B>;
type Schedule = LrSchedulerWithScaler<CosineAnnealingLrScheduler>;
type Saved<B> = Checkpoints<B, Model<B>, Optim<B>, Schedule>;

const LEARNING_RATE: f64 = 4e-3;
const PROMPT: &str = "And God said";
const SAMPLE: usize = 400;
/// The reason that Burn's dashboard gives for `q` and `s`.
const BY_USER: &str = "Stopping training from user input.";

/// Trains a small language model with Burn's learner and its dashboard.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    settings: Settings,
    /// The folder for checkpoints and metrics. Without --resume, those of an earlier run are removed.
    #[arg(long, default_value = "target/learner")]
    output: PathBuf,
    /// Continue a run that was stopped or killed, after the last epoch that has a checkpoint.
    #[arg(long)]
    resume: bool,
}

/// The settings that must stay the same until a run is done: with other epochs the learning rate would
/// jump, with another seed windows would be seen twice, and another backend rounds differently.
#[derive(clap::Args, Clone, PartialEq, Serialize, Deserialize)]
struct Settings {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precision to train in: auto, f32, f16 or bf16, also as 16-mixed and bf16-mixed.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// How often the text is seen.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Windows of the text in a step.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch_size: u16,
    /// Seed of the weights, of the order of the windows and of the sample.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// As they are given on the command line.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "--backend {} --precision {} --epochs {} --batch-size {} --seed {}",
            self.backend, self.precision, self.epochs, self.batch_size, self.seed
        )
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(
        args.settings.backend,
        "-p learner",
        learn(&args)
    ))
}

fn learn<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let (settings, output) = (&args.settings, &args.output);
    let epochs = usize::from(settings.epochs);
    let batch_size = usize::from(settings.batch_size);
    let done = match args.resume {
        true => Saved::<AmpAutodiff<B>>::resume(output, settings)?,
        false => resume::begin(output, settings)?,
    };
    if done >= epochs {
        println!("All {epochs} epochs are done: there is nothing to resume.");
        return Ok(());
    }

    let device = Default::default();
    AmpAutodiff::<B>::seed(&device, settings.seed);
    let corpus = Corpus::load();
    let windows = corpus.train.clone();
    let steps = epochs * windows.len().div_ceil(batch_size);
    let windows = Arc::new(InMemDataset::new(windows));
    let train = Epochs::new((done..epochs).map(|epoch| {
        DataLoaderBuilder::<AmpAutodiff<B>, _, _>::new(WindowBatcher)
            .batch_size(batch_size)
            .shuffle(settings.seed.wrapping_add(epoch as u64))
            .build(windows.clone())
    }));
    let valid = DataLoaderBuilder::<Amp<B>, _, _>::new(WindowBatcher)
        .batch_size(batch_size)
        .build(InMemDataset::new(corpus.valid.clone()));

    let model = Model::<AmpAutodiff<B>>::new(corpus.characters.len(), &device);
    let optimizer: Optim<AmpAutodiff<B>> = AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    let cosine = CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, steps).init()?;
    // Burn's checkpoints hold the loss scale.
    let schedule = GradScaler::of::<AmpAutodiff<B>>(&device).checkpoint_with(cosine);

    let mut training = SupervisedTraining::new(output, Arc::new(train), valid.clone())
        .metrics((LossMetric::<Flex>::new(),))
        .with_metric_logger(MetricFiles::new(output, done))
        .num_epochs(epochs)
        .with_file_checkpointer(FileRecorder::new())
        .summary();
    if done > 0 {
        training = training.checkpoint(done);
    }
    if !stdout().is_terminal() {
        training = training.renderer(EpochLines::new());
    }
    let training = training.with_amp(AmpConfig::new().with_precision(settings.precision));
    let interrupter = training.interrupter();
    let on_signal = interrupter.clone();
    ctrlc::set_handler(move || on_signal.stop(Some(BY_USER)))?;
    // The result also holds the dashboard, which leaves the terminal when it is dropped.
    let model = training
        .launch(Learner::new(model, optimizer, schedule))?
        .model;
    match interrupter.get_message() {
        Some(reason) if reason == BY_USER => {
            stopped(Saved::<AmpAutodiff<B>>::last_epoch(output), epochs)
        }
        Some(reason) => return Err(reason.into()),
        None => {
            let report = AmpReport::of::<AmpAutodiff<B>>(&device)?;
            println!("\n{report}");
            // bf16 and FP32 need no loss scale, and count no steps.
            if report.taken_steps + report.skipped_steps > 0 {
                let picture = output.join(resume::LOSS_SCALE);
                report.save_svg(&picture)?;
                println!("loss scale over the steps: {}", picture.display());
            }
            let loss = mean_loss(&model, &*valid);
            let bits = loss / LN_2;
            println!("validation loss: {loss:.4} nats, {bits:.4} bits per character");
            println!("\n{}", sample(&model, &corpus, settings.seed)?);
        }
    }
    Ok(())
}

fn stopped(done: Option<usize>, epochs: usize) {
    match done {
        Some(done) => println!(
            "Stopped, {done} of {epochs} epochs are done. The same command with --resume continues."
        ),
        None => println!("Stopped before an epoch was done. There is nothing to resume."),
    }
}

/// The mean cross entropy of a character in the validation set, in nats.
fn mean_loss<B: Backend>(model: &Model<B>, valid: &dyn DataLoader<B, Batch<B>>) -> f64 {
    let (mut sum, mut windows) = (0.0, 0);
    for batch in valid.iter() {
        let [size, _] = batch.tokens.dims();
        let loss: f64 = model.step(batch).loss.into_scalar().elem();
        sum += loss * size as f64;
        windows += size;
    }
    sum / windows as f64
}

/// A text of the model's own.
fn sample<B: Backend>(
    model: &Model<B>,
    corpus: &Corpus,
    seed: u64,
) -> Result<String, Box<dyn Error>> {
    let prompt = corpus
        .encode(PROMPT)
        .ok_or("a character of the prompt is not in the text")?;
    let mut rng = StdRng::seed_from_u64(seed);
    let tokens = model.generate(prompt, SAMPLE, &Default::default(), &mut rng)?;
    Ok(corpus.decode(&tokens))
}
