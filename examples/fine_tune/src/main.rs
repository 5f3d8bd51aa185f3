//! Fine-tunes a pretrained transformer from a file of half-precision weights: is a verse from the
//! first or from the second half of the Book of Genesis? The second begins in chapter 27, and tells
//! of Jacob and Joseph.
//!
//! The encoder has learned to guess masked words of the book, without the verses of the test. Its
//! weights are in `genesis-f16.safetensors`, which burn-store reads into FP32 parameters. Few verses
//! have a label: the example trains on them from the file and, to compare, from random weights, in
//! FP32, f16 and bf16. Chance is 50 %.
//!
//! ```sh
//! cargo run --release -p fine_tune
//! cargo run --release -p fine_tune -- --precision bf16 --labels 200 --seed 7
//! cargo run --release -p fine_tune -- --pretrain --precision bf16 --weights target/mine.safetensors
//! cargo run --release -p fine_tune --features cuda,fusion,autotune -- --backend cuda
//! ```

#[path = "../../backends/mod.rs"]
mod backends;
mod corpus;
mod data;
mod model;
mod train;
mod weights;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, AmpConfig, AmpError, GradScaler, Precision};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use backends::{Choice, ended, on_backend};
use corpus::Corpus;
use model::{Classifier, WordGuesser};
use train::{Plan, accuracy, classify, pretrain};

#[derive(Parser)]
#[command(about = "Fine-tunes a pretrained transformer in FP32, f16 and bf16")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precisions to train in: auto, f32, f16, bf16 or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    /// Verses that have a label.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(32..=1200))]
    labels: u16,
    /// Seed of the weights, of dropout, of the order and of which verses have a label.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The file of pretrained weights.
    #[arg(long, default_value_os_t = weights::shipped())]
    weights: PathBuf,
    /// Pretrain, in the first precision, and write the file of weights.
    #[arg(long)]
    pretrain: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(args.backend, "-p fine_tune", run(&args)))
}

fn run<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let corpus = Corpus::load(args.labels.into(), args.seed);
    if args.pretrain {
        return match args.precision[0] {
            Precision::F32 => write_pretrained::<Autodiff<B>>(&corpus, args),
            precision => {
                set::<B>(precision)?;
                write_pretrained::<AmpAutodiff<B>>(&corpus, args)
            }
        };
    }

    let (labelled, test) = (corpus.labelled.len(), corpus.test.len());
    println!("{labelled} verses with a label, {test} for the test");
    println!("precision  weights     test accuracy  skipped steps");
    for precision in &args.precision {
        for pretrained in [false, true] {
            let (accuracy, skipped) = match precision {
                Precision::F32 => (tune::<Autodiff<B>>(&corpus, args, pretrained)?, 0),
                _ => {
                    let scaler = set::<B>(*precision)?;
                    let accuracy = tune::<AmpAutodiff<B>>(&corpus, args, pretrained)?;
                    (accuracy, scaler.skipped_steps())
                }
            };
            let weights = if pretrained { "pretrained" } else { "random" };
            let percent = 100.0 * accuracy;
            println!("{precision:<9}  {weights:<10}  {percent:>11.2} % {skipped:>14}");
        }
    }
    Ok(())
}

/// Sets the precision of the device, whose scaler begins anew.
fn set<B: Backend>(precision: Precision) -> Result<GradScaler, AmpError> {
    let device = Default::default();
    AmpConfig::new()
        .with_precision(precision)
        .apply::<AmpAutodiff<B>>(&device)?;
    Ok(GradScaler::of::<AmpAutodiff<B>>(&device))
}

fn write_pretrained<B: AutodiffBackend>(
    corpus: &Corpus,
    args: &Args,
) -> Result<(), Box<dyn Error>> {
    let device = Default::default();
    B::seed(&device, args.seed);
    let plan = Plan {
        steps: 1500,
        batch: 32,
        learning_rate: 3e-3,
        seed: args.seed,
    };
    let bar = bar(&plan);
    let model = WordGuesser::<B>::new(corpus.vocabulary.len(), &device);
    let (model, loss) = pretrain(model, corpus, &plan, &device, |loss| shown(&bar, loss));
    bar.finish();
    let bytes = weights::save(&model, &args.weights)?;
    println!(
        "loss {loss:.4}; {}: {} parameters in {bytes} bytes",
        args.weights.display(),
        model.num_params()
    );
    Ok(())
}

/// The accuracy of a classifier whose encoder begins with the pretrained weights, or with random
/// ones.
fn tune<B: AutodiffBackend>(
    corpus: &Corpus,
    args: &Args,
    pretrained: bool,
) -> Result<f64, Box<dyn Error>> {
    let device = Default::default();
    B::seed(&device, args.seed);
    let mut model = Classifier::<B>::new(corpus.vocabulary.len(), &device);
    if pretrained {
        weights::load(&mut model, &args.weights, Some("output."))?;
    }
    let plan = Plan {
        steps: 100,
        batch: 32,
        learning_rate: 1e-3,
        seed: args.seed,
    };
    let bar = bar(&plan);
    let after_step = |loss| shown(&bar, loss);
    let model = classify::<B, _>(model, corpus, &plan, &device, Classifier::loss, after_step);
    bar.finish_and_clear();
    let model = model.valid();
    let forward = |tokens, padding| model.forward(tokens, padding);
    Ok(accuracy::<B::InnerBackend>(&corpus.test, &device, forward))
}

fn bar(plan: &Plan) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} loss {msg} {eta}");
    ProgressBar::new(plan.steps as u64).with_style(style.expect("a valid template"))
}

fn shown(bar: &ProgressBar, loss: f64) {
    bar.set_message(format!("{loss:.4}"));
    bar.inc(1);
}
