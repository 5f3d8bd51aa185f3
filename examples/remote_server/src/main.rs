//! Trains on another machine in half precision: a server that computes on `Amp`, and a client that
//! sends it every operation through Burn's `RemoteBackend`.
//!
//! In bf16 the client is plain Burn. In f16 it scales its loss by `GradScaler`'s explicit protocol,
//! on a plain `Autodiff<RemoteBackend>`.
//!
//! ```sh
//! # A server in a process of its own for each precision, trained on beside local training.
//! cargo run --release -p remote_server
//!
//! # On two machines.
//! cargo run --release -p remote_server -- serve --precision f16 --port 3000
//! cargo run --release -p remote_server -- train --address ws://host:3000 --scale-loss
//! ```
//!
//! Burn's server listens on all interfaces, authenticates no client, and serves one client at a time:
//! another client's tensors would get the same names. Keep it behind a firewall.

use std::error::Error;
use std::process::{Command, ExitCode};

use burn::backend::Flex;
use burn_amp::{AmpAutodiff, AmpConfig, GradScaler, Precision};
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use remote_server::client::Remote;
use remote_server::data::Digits;
use remote_server::server::{self, Server, free_port};
use remote_server::train::{self, Trained, step, steps};

#[derive(Parser)]
#[command(about = "Trains on a server that computes in half precision")]
struct Args {
    #[command(subcommand)]
    command: Option<Task>,
    /// The precisions of the servers: f16, bf16 or both.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    #[command(flatten)]
    training: Training,
}

#[derive(Subcommand)]
enum Task {
    /// Computes for a client.
    Serve {
        /// The precision to compute in: auto, f16, bf16 or f32.
        #[arg(long, default_value_t)]
        precision: Precision,
        #[arg(long, default_value_t = 3000)]
        port: u16,
    },
    /// Trains on a server.
    Train {
        #[arg(long, default_value = "ws://127.0.0.1:3000")]
        address: String,
        /// Scale the loss, for a server that computes in f16.
        #[arg(long)]
        scale_loss: bool,
        #[command(flatten)]
        training: Training,
    },
}

#[derive(clap::Args, Clone, Copy)]
struct Training {
    /// How often each digit is seen.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Seed of the weights, of dropout and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match args.command {
        None => compare(&args.precision, args.training),
        Some(Task::Serve { precision, port }) => server::serve(precision, port),
        Some(Task::Train {
            address,
            scale_loss,
            training,
        }) => {
            on_server(&address, scale_loss, &Digits::load(), training).map(|(trained, skipped)| {
                header();
                row("remote", "server's", &trained, skipped);
            })
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Trains in each precision, here and on a server in another process.
fn compare(precisions: &[Precision], training: Training) -> Result<(), Box<dyn Error>> {
    let digits = Digits::load();
    let mut rows = Vec::new();
    for precision in precisions {
        rows.push(("local", precision, locally(*precision, &digits, training)?));
        let port = free_port()?;
        let mut command = Command::new(std::env::current_exe()?);
        let precision_name = precision.to_string();
        command.args(["serve", "--precision", &precision_name, "--port"]);
        command.arg(port.to_string());
        let server = Server::start(&mut command, port)?;
        let trained = on_server(
            &server.address(),
            precision.scales_loss(),
            &digits,
            training,
        )?;
        rows.push(("remote", precision, trained));
    }
    header();
    for (place, precision, (trained, skipped)) in &rows {
        row(place, &precision.to_string(), trained, *skipped);
    }
    Ok(())
}

fn locally(
    precision: Precision,
    digits: &Digits,
    training: Training,
) -> Result<(Trained, u64), Box<dyn Error>> {
    type B = AmpAutodiff<Flex>;
    let device = Default::default();
    AmpConfig::new()
        .with_precision(precision)
        .apply::<B>(&device)?;
    let epochs = training.epochs.into();
    let shown = progress(format!("local {precision}"), steps(digits, epochs));
    let (_, trained) = train::train::<B>(&device, digits, epochs, training.seed, step, shown);
    let skipped = GradScaler::of::<B>(&device).skipped_steps();
    Ok((trained, skipped))
}

fn on_server(
    address: &str,
    scale_loss: bool,
    digits: &Digits,
    training: Training,
) -> Result<(Trained, u64), Box<dyn Error>> {
    let remote = Remote::connect(address)?;
    let epochs = training.epochs.into();
    let shown = progress("remote".into(), steps(digits, epochs));
    Ok(match scale_loss {
        true => remote.train_scaled(digits, epochs, training.seed, shown)?,
        false => (remote.train(digits, epochs, training.seed, shown), 0),
    })
}

/// Shows a bar. The returned closure takes the loss of each step.
fn progress(name: String, steps: usize) -> impl FnMut(f64) {
    let style = ProgressStyle::with_template("{prefix:>10} {wide_bar} {pos}/{len} loss {msg}")
        .expect("a valid template");
    let bar = ProgressBar::new(steps as u64)
        .with_prefix(name)
        .with_style(style);
    move |loss| {
        bar.set_message(format!("{loss:.4}"));
        bar.inc(1);
    }
}

fn header() {
    println!(
        "\n{:<7} {:<9} {:>13} {:>10} {:>5} {:>7} {:>7}",
        "place", "precision", "test accuracy", "final loss", "steps", "skipped", "seconds"
    );
}

fn row(place: &str, precision: &str, trained: &Trained, skipped: u64) {
    println!(
        "{place:<7} {precision:<9} {:>11.2} % {:>10.4} {:>5} {skipped:>7} {:>7.1}",
        100.0 * trained.test_accuracy,
        trained.final_loss,
        trained.losses.len(),
        trained.seconds
    );
}
