//! Fine-tunes a pretrained transformer from a file of half-precision weights with Burn's `Learner`, on
//! Burn 0.22 or 0.23: is a verse from the first or from the second half of the Book of Genesis? The
//! second begins in chapter 27, and tells of Jacob and Joseph.
//!
//! The encoder has learned to guess masked words of the book, without the verses of the test. The
//! example `fine_tune` of burn-amp, for Burn 0.21, has pretrained it and written its weights:
//! `genesis-f16.safetensors`. Burn's store reads them into FP32 parameters. Few verses have a label: the
//! example trains on them from the file and, to compare, from random weights, in FP32, f16 and bf16.
//! Chance is 50 %. The models that were fine-tuned in half precision are then loaded for inference: with
//! FP32 weights, and with weights in half.
//!
//! ```sh
//! cargo run --release --features store,train --example fine_tune
//! cargo run --release --features store,train --example fine_tune -- --precision bf16 --labels 200
//! cargo run --release --no-default-features --features burn-0-23,flex,store,train --example fine_tune
//! cargo run --release --features store,train,vulkan --example fine_tune -- --backend vulkan
//! ```

include!("../../src/burn.rs");

#[allow(dead_code)] // It also counts blocks and the peak.
#[path = "../../../xtask/src/bench/alloc.rs"]
mod alloc;
#[path = "../backends/mod.rs"]
mod backends;
#[allow(dead_code)] // It is also for pretraining.
#[path = "../../../examples/fine_tune/src/corpus.rs"]
mod corpus;
mod data;
#[path = "../learner/lines.rs"]
mod lines;
mod model;
#[cfg(test)]
mod tests;
mod train;
mod weights;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::Device;
use burn_amp_device::{GradScaler, Precision, half_weights, mixed_precision};
use clap::Parser;

use alloc::Mark;
use backends::Backend;
use corpus::Corpus;
use model::Classifier;
use train::{Plan, accuracy, fine_tune};

/// Verses with a label that the model is validated on, and not trained.
const VALID: usize = 64;

#[derive(Parser)]
#[command(about = "Fine-tunes a pretrained transformer in FP32, f16 and bf16")]
struct Args {
    /// What to train on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// What to train in: f32, f16, bf16 or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    /// Verses that have a label, beside 64 for validation.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(32..=1100))]
    labels: u16,
    /// Seed of the weights, of dropout, of the order and of which verses have a label.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The file of pretrained weights.
    #[arg(long, default_value_os_t = weights::shipped())]
    weights: PathBuf,
    /// Where metrics and fine-tuned weights go.
    #[arg(long, default_value = "target/fine_tune")]
    output: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let labels = usize::from(args.labels);
    let corpus = Corpus::load(labels + VALID, args.seed);
    let test = corpus.test.len();
    println!("{labels} verses with a label, {VALID} for validation, {test} for the test");
    println!("precision  weights     test accuracy  skipped steps");
    let mut halves = Vec::new();
    for precision in &args.precision {
        let device = mixed_precision(args.backend.device(), *precision)?;
        for pretrained in [false, true] {
            let weights = if pretrained { "pretrained" } else { "random" };
            let output = args.output.join(format!("{precision}-{weights}"));
            let model = tune(&corpus, args, &device, pretrained, &output)?;
            let percent = 100.0 * accuracy(&model, &corpus.test, &device);
            let skipped = GradScaler::of(&device).skipped_steps();
            println!("{precision:<9}  {weights:<10}  {percent:>11.2} % {skipped:>14}");
            if pretrained && precision.is_half() {
                let file = output.join("model.safetensors");
                weights::save(&model, &file)?;
                halves.push((*precision, device.clone(), file));
            }
        }
    }

    println!("\ninference  weights in  model KiB  test accuracy");
    // Flex computes in the memory of this process, which is counted.
    let counted = matches!(args.backend, Backend::Flex);
    for (precision, device, file) in &halves {
        for weights in [Precision::F32, *precision] {
            let (bytes, accuracy) = infer(&corpus, device, file, weights)?;
            let kib = counted.then(|| bytes.div_ceil(1024).to_string());
            let (kib, percent) = (kib.unwrap_or("-".into()), 100.0 * accuracy);
            println!("{precision:<9}  {weights:<10}  {kib:>9}  {percent:>11.2} %");
        }
    }
    Ok(())
}

/// Trains a classifier whose encoder begins with the pretrained weights, or with random ones.
fn tune(
    corpus: &Corpus,
    args: &Args,
    device: &Device,
    pretrained: bool,
    output: &Path,
) -> Result<Classifier, Box<dyn Error>> {
    let device = device.clone().autodiff();
    device.seed(args.seed);
    GradScaler::of(&device).reset();
    let mut model = Classifier::new(corpus.vocabulary.len(), &device);
    if pretrained {
        weights::load(&mut model, &args.weights, Some("output."))?;
    }
    let plan = Plan {
        steps: 100,
        learning_rate: 1e-3,
        seed: args.seed,
        output: output.into(),
    };
    let (train, valid) = corpus.labelled.split_at(args.labels.into());
    fine_tune(model, train, valid, &plan)
}

/// Loads fine-tuned weights for inference, as another program would, and has them in this precision.
/// Gives the bytes that they take, and the accuracy.
fn infer(
    corpus: &Corpus,
    device: &Device,
    file: &Path,
    weights: Precision,
) -> Result<(usize, f64), Box<dyn Error>> {
    device.sync()?;
    let before = Mark::set();
    let mut model = Classifier::new(corpus.vocabulary.len(), device);
    weights::load(&mut model, file, None)?;
    if weights.is_half() {
        model = half_weights(model, weights)?;
    }
    device.sync()?;
    let bytes = before.live();
    Ok((bytes, accuracy(&model, &corpus.test, device)))
}
