//! A generator and a discriminator, trained against each other on handwritten digits in f16: two
//! models, two optimizers, and a loss scaler for each.
//!
//! ```sh
//! cargo run --release -p gan
//! cargo run --release -p gan -- --precision bf16 --epochs 40 --seed 7 --out target/mine
//! cargo run --release -p gan --features cuda,fusion,autotune -- --backend cuda
//! ```
//!
//! `samples.png` shows real digits on the left and generated ones on the right, a class a row.

#[path = "../../backends/mod.rs"]
mod backends;
#[path = "../../digits/data.rs"]
mod data;
mod model;
mod picture;
mod train;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::prelude::*;
use burn_amp::{AmpAutodiff, AmpConfig, Precision};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use backends::{Choice, ended, on_backend};
use data::Digits;
use train::{Trained, steps, train};

#[derive(Parser)]
#[command(about = "Learns to draw handwritten digits, with a loss scaler for each of two models")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precision to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
    /// How often each digit is seen.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    epochs: u16,
    /// Seed of the weights, the noise, dropout and the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The folder for samples.png.
    #[arg(long, default_value = "target/gan")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(args.backend, "-p gan", gan(&args)))
}

fn gan<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(&args.out)
        .map_err(|error| format!("cannot make the folder {}: {error}", args.out.display()))?;
    let device = Default::default();
    let precision = AmpConfig::new()
        .with_precision(args.precision)
        .apply::<AmpAutodiff<B>>(&device)?;
    let digits = Digits::load();
    let epochs = usize::from(args.epochs);
    let bar = ProgressBar::new(steps(&digits, epochs) as u64)
        .with_prefix(precision.to_string())
        .with_style(
            ProgressStyle::with_template("{prefix:>5} {wide_bar} {pos}/{len} {msg} {eta}")
                .expect("a valid template"),
        );

    let start = Instant::now();
    let shown = |generator: f64, discriminator: f64| {
        bar.set_message(format!("G {generator:.3} D {discriminator:.3}"));
        bar.inc(1);
    };
    let scales = precision.scales_loss();
    let trained = train::<AmpAutodiff<B>>(&digits, epochs, args.seed, scales, shown)?;
    bar.finish();

    table(&trained);
    println!(
        "\n{:.1} seconds in {precision}",
        start.elapsed().as_secs_f64()
    );
    let samples = args.out.join("samples.png");
    picture::samples(&digits, &trained.samples)
        .save(&samples)
        .map_err(|error| format!("cannot write {}: {error}", samples.display()))?;
    println!("{}", samples.display());
    Ok(())
}

fn table(trained: &Trained) {
    println!(
        "\n{:<13} {:>10} {:>10} {:>13}",
        "model", "final loss", "loss scale", "skipped steps"
    );
    for (name, player) in [
        ("generator", &trained.generator),
        ("discriminator", &trained.discriminator),
    ] {
        println!(
            "{name:<13} {:>10.4} {:>10} {:>13}",
            player.final_loss, player.loss_scale, player.skipped_steps
        );
    }
}
