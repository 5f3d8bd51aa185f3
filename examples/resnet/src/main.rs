//! Trains a small residual network on handwritten digits with Burn's `Learner`: gradient
//! accumulation, a learning-rate schedule, checkpoints to resume from, and the dashboard. Where
//! there is no terminal, each epoch prints a line.
//!
//! ```sh
//! cargo run --release -p resnet
//! cargo run --release -p resnet -- --resume
//! cargo run --release -p resnet -- --precision bf16 --epochs 4 --accumulation 1 --output target/mine
//! cargo run --release -p resnet --features cuda,fusion,autotune -- --backend cuda
//! ```
//!
//! However a run ends, `--resume` continues it after the last completed epoch, with the same result.

#[path = "../../backends/mod.rs"]
mod backends;
mod data;
#[path = "../../digits/data.rs"]
mod digits;
#[path = "../../epoch_lines/mod.rs"]
mod epoch_lines;
mod model;
#[path = "../../resume/mod.rs"]
mod resume;

use std::error::Error;
use std::fmt;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use burn::backend::Flex;
use burn::lr_scheduler::composed::{ComposedLrScheduler, ComposedLrSchedulerConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{Sgd, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric};
use burn::train::{InferenceStep, Learner, SupervisedTraining};
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpReport, AmpTrainingExt, GradScaler, LrSchedulerWithScaler,
    Precision,
};
use clap::Parser;
use serde::{Deserialize, Serialize};

use backends::{Choice, ended, on_backend};
use digits::Digits;
use epoch_lines::EpochLines;
use model::Model;
use resume::{Checkpoints, Epochs, FileRecorder, MetricFiles};

type Optim<B> = OptimizerAdaptor<Sgd<<B as AutodiffBackend>::InnerBackend>, Model<B>, B>;
type Schedule = LrSchedulerWithScaler<ComposedLrScheduler>;
type Saved<B> = Checkpoints<B, Model<B>, Optim<B>, Schedule>;

const LEARNING_RATE: f64 = 0.1;
/// The learning rate rises in the first of so many parts of the training.
const WARM_UP: usize = 8;

/// Trains a residual network on handwritten digits with Burn's Learner.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    settings: Settings,
    /// The folder for checkpoints and metrics. Without --resume, those of an earlier run are removed.
    #[arg(long, default_value = "target/resnet")]
    output: PathBuf,
    /// Continue a run that was stopped or killed, after the last epoch that has a checkpoint.
    #[arg(long)]
    resume: bool,
}

/// The settings that must stay the same until a run is done.
#[derive(clap::Args, Clone, PartialEq, Serialize, Deserialize)]
struct Settings {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precision to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// How often each digit is seen.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Digits in a micro-batch.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(2..=1024))]
    batch_size: u16,
    /// Micro-batches in a step.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    accumulation: u16,
    /// Seed of the weights, of the order of the digits and of their shifts.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// As they are given on the command line.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (batch, accumulation) = (self.batch_size, self.accumulation);
        write!(
            f,
            "--backend {} --precision {} --epochs {} --batch-size {batch} --accumulation \
             {accumulation} --seed {}",
            self.backend, self.precision, self.epochs, self.seed
        )
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(
        args.settings.backend,
        "-p resnet",
        learn(&args)
    ))
}

fn learn<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let (settings, output) = (&args.settings, &args.output);
    let epochs = usize::from(settings.epochs);
    let batch_size = usize::from(settings.batch_size);
    let accumulation = usize::from(settings.accumulation);
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
    let digits = Arc::new(Digits::load());
    let train = Epochs::new((done..epochs).map(|epoch| {
        let seed = settings.seed.wrapping_add(epoch as u64);
        data::training::<AmpAutodiff<B>>(&digits, batch_size, seed)
    }));
    let valid = data::validation::<Amp<B>>(&digits, batch_size);

    let model = Model::<AmpAutodiff<B>>::new(&device);
    let optimizer: Optim<AmpAutodiff<B>> = SgdConfig::new()
        .with_momentum(Some(
            MomentumConfig::new().with_momentum(0.9).with_dampening(0.0),
        ))
        .with_weight_decay(Some(WeightDecayConfig::new(5e-4)))
        .init();
    // Burn requests a learning rate before each micro-batch.
    let rates = epochs * digits.train.len().div_ceil(batch_size);
    let warm_up = rates.div_ceil(WARM_UP);
    let schedule = ComposedLrSchedulerConfig::new()
        .linear(LinearLrSchedulerConfig::new(
            1.0 / warm_up as f64,
            1.0,
            warm_up,
        ))
        .cosine(CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, rates))
        .init()?;
    // Burn's checkpoints hold the loss scale.
    let schedule = GradScaler::of::<AmpAutodiff<B>>(&device).checkpoint_with(schedule);

    let mut training = SupervisedTraining::new(output, Arc::new(train), valid.clone())
        .metrics((AccuracyMetric::<Flex>::new(), LossMetric::<Flex>::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .with_metric_logger(MetricFiles::new(output, done))
        .num_epochs(epochs)
        .grads_accumulation(accumulation)
        .with_file_checkpointer(FileRecorder::new())
        .summary();
    if done > 0 {
        training = training.checkpoint(done);
    }
    if !stdout().is_terminal() {
        training = training.renderer(EpochLines::new());
    }
    // The result also holds the dashboard, which leaves the terminal when it is dropped.
    let model = training
        .with_amp(AmpConfig::new().with_precision(settings.precision))
        .launch(Learner::new(model, optimizer, schedule))?
        .model;

    println!("\n{}", AmpReport::of::<AmpAutodiff<B>>(&device)?);
    let mut right = 0;
    for batch in valid.iter() {
        let output = model.step(batch);
        let answers = output.output.argmax(1).squeeze_dim::<1>(1);
        let equal = answers.equal(output.targets).int().sum();
        right += equal.into_scalar().elem::<i64>();
    }
    let accuracy = 100.0 * right as f64 / digits.test.len() as f64;
    println!("validation accuracy: {accuracy:.2} %");
    Ok(())
}
