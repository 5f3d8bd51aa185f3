//! Trains a small convolutional network on 1,797 handwritten digits in FP32, f16 and bf16: the same
//! generic function each time, with only the backend type or the precision changed.
//!
//! ```sh
//! cargo run --release --example digits
//! cargo run --release --example digits -- --precision bf16 --epochs 3 --seed 7 --out target/mine
//! cargo run --release --example digits --features cuda,fusion,autotune -- --backend cuda
//! ```

#[path = "../backends/mod.rs"]
mod backends;
mod data;
mod model;
mod plot;
mod train;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_amp::{Amp, AmpAutodiff, AmpConfig, AmpError, GradScaler, Precision, half_weights};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use backends::{Choice, ended, on_backend};
use data::Digits;
use model::Model;
use train::{Trained, accuracy, step, steps, train};

#[derive(Parser)]
#[command(about = "Trains on handwritten digits in FP32, f16 and bf16 and compares the results")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precisions to train in: auto, f32, f16, bf16 or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    /// How often each digit is seen.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Seed of the weights, of dropout and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The folder for curves.svg and report.json.
    #[arg(long, default_value = "target/digits")]
    out: PathBuf,
}

/// One precision's run.
pub struct Run {
    precision: Precision,
    trained: Trained,
    /// The loss scale after each step, where there is one.
    scales: Option<Vec<f32>>,
    skipped_steps: u64,
    /// Only of a run in half precision.
    half_weights: Option<HalfWeights>,
}

/// The model for inference with its weights in half.
struct HalfWeights {
    test_accuracy: f64,
    bytes: usize,
    /// The bytes of the trained model.
    bytes_before: usize,
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(args.backend, "--example digits", digits(&args)))
}

fn digits<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(&args.out)
        .map_err(|error| format!("cannot make the folder {}: {error}", args.out.display()))?;
    let digits = Digits::load();
    let runs = args
        .precision
        .iter()
        .map(|precision| run::<B>(*precision, &digits, args))
        .collect::<Result<Vec<_>, _>>()?;

    table(&runs);
    let curves = args.out.join("curves.svg");
    plot::curves(&runs, &curves)
        .map_err(|error| format!("cannot write {}: {error}", curves.display()))?;
    let report = args.out.join("report.json");
    fs::write(&report, format!("{:#}\n", report_of(&runs)))
        .map_err(|error| format!("cannot write {}: {error}", report.display()))?;
    println!("\n{}\n{}", curves.display(), report.display());
    Ok(())
}

fn run<B: Backend>(precision: Precision, digits: &Digits, args: &Args) -> Result<Run, AmpError> {
    let device = Default::default();
    let epochs = usize::from(args.epochs);
    let bar = ProgressBar::new(steps(digits, epochs) as u64)
        .with_prefix(precision.to_string())
        .with_style(
            ProgressStyle::with_template("{prefix:>5} {wide_bar} {pos}/{len} loss {msg} {eta}")
                .expect("a valid template"),
        );
    let shown = |loss: f64| {
        bar.set_message(format!("{loss:.4}"));
        bar.inc(1);
    };
    let run = if precision == Precision::F32 {
        Run {
            precision,
            trained: train::<Autodiff<B>>(&device, digits, epochs, args.seed, step, shown).1,
            scales: None,
            skipped_steps: 0,
            half_weights: None,
        }
    } else {
        let precision = AmpConfig::new()
            .with_precision(precision)
            .apply::<AmpAutodiff<B>>(&device)?;
        let scaler = GradScaler::of::<AmpAutodiff<B>>(&device);
        let mut scales = Vec::new();
        let seed = args.seed;
        let (model, trained) =
            train::<AmpAutodiff<B>>(&device, digits, epochs, seed, step, |loss| {
                scales.push(scaler.loss_scale());
                shown(loss);
            });
        let halved = match precision.is_half() {
            true => Some(HalfWeights::of(model, precision, digits)?),
            false => None,
        };
        Run {
            precision,
            trained,
            scales: precision.scales_loss().then_some(scales),
            skipped_steps: scaler.skipped_steps(),
            half_weights: halved,
        }
    };
    bar.finish();
    Ok(run)
}

impl HalfWeights {
    fn of<B: Backend>(
        model: Model<Amp<B>>,
        precision: Precision,
        digits: &Digits,
    ) -> Result<Self, AmpError> {
        let bytes_before = bytes(&model);
        let model = half_weights(model, precision)?;
        Ok(Self {
            test_accuracy: accuracy(&model, digits, &Default::default()),
            bytes: bytes(&model),
            bytes_before,
        })
    }
}

/// The bytes of a model's parameters.
fn bytes<B: Backend>(model: &Model<B>) -> usize {
    struct Bytes(usize);
    impl<B: Backend> ModuleVisitor<B> for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            self.0 += value.shape().num_elements() * value.dtype().size();
        }
    }
    let mut bytes = Bytes(0);
    model.visit(&mut bytes);
    bytes.0
}

impl Run {
    /// The loss scale at the end; 1 where the loss is not scaled.
    fn loss_scale(&self) -> f32 {
        self.scales
            .as_ref()
            .and_then(|scales| scales.last().copied())
            .unwrap_or(1.0)
    }
}

fn table(runs: &[Run]) {
    println!(
        "\n{:<9} {:>13} {:>10} {:>10} {:>13} {:>7}",
        "precision", "test accuracy", "final loss", "loss scale", "skipped steps", "seconds"
    );
    for run in runs {
        println!(
            "{:<9} {:>11.2} % {:>10.4} {:>10} {:>13} {:>7.1}",
            run.precision,
            100.0 * run.trained.test_accuracy,
            run.trained.final_loss,
            run.loss_scale(),
            run.skipped_steps,
            run.trained.seconds
        );
    }
    for run in runs {
        if let Some(half) = &run.half_weights {
            println!(
                "with weights in {}: test accuracy {:.2} %, {} bytes in place of {}",
                run.precision,
                100.0 * half.test_accuracy,
                half.bytes,
                half.bytes_before
            );
        }
    }
}

fn report_of(runs: &[Run]) -> serde_json::Value {
    let runs: Vec<_> = runs
        .iter()
        .map(|run| {
            json!({
                "precision": run.precision.to_string(),
                "test_accuracy": run.trained.test_accuracy,
                "final_loss": run.trained.final_loss,
                "loss_scale": run.loss_scale(),
                "skipped_steps": run.skipped_steps,
                "half_weights": run.half_weights.as_ref().map(|half| json!({
                    "test_accuracy": half.test_accuracy,
                    "bytes": half.bytes,
                    "bytes_before": half.bytes_before,
                })),
                "steps": run.trained.losses.len(),
                "seconds": run.trained.seconds,
            })
        })
        .collect();
    json!({ "runs": runs })
}
