//! Trains a small convolutional network on 1,797 handwritten digits in FP32, f16 and bf16 on Burn
//! 0.22 or 0.23: the same function each time, with only the device changed.
//!
//! ```sh
//! cargo run --release --example digits
//! cargo run --release --example digits --no-default-features --features burn-0-23,flex
//!
//! # The half precisions on a server in its own process.
//! cargo build --release --features server
//! cargo run --release --features server --example digits -- --server
//! ```

include!("../../src/burn.rs");

mod data;
mod model;
mod train;

use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use burn::remote::RemoteHost;
use burn::tensor::Device;
use burn_amp_device::{LossScaleConfig, Precision};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use data::Digits;
use train::{Trained, steps, train};

#[derive(Parser)]
#[command(about = "Trains on handwritten digits in FP32, f16 and bf16 and compares the results")]
struct Args {
    /// The precision to train in: f32, f16, bf16 or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    /// The number of epochs.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    epochs: u16,
    /// Seed of the weights, of dropout and of the order of the digits.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Train the half precisions on burn-amp-server, in its own process.
    #[arg(long)]
    server: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match digits(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn digits(args: &Args) -> Result<(), Box<dyn Error>> {
    let digits = Digits::load();
    let mut rows = Vec::new();
    for precision in &args.precision {
        let server = (args.server && precision.is_half())
            .then(|| Server::start(*precision))
            .transpose()?;
        let device = match &server {
            Some(server) => server.connect()?,
            None if precision.is_half() => burn_amp_device::flex(*precision)?,
            None => Device::flex(),
        };
        let trained = run(&device, *precision, &digits, args)?;
        rows.push((precision, trained));
    }
    table(&rows);
    Ok(())
}

fn run(
    device: &Device,
    precision: Precision,
    digits: &Digits,
    args: &Args,
) -> Result<Trained, burn_amp_device::Error> {
    let epochs = usize::from(args.epochs);
    let bar = ProgressBar::new(steps(digits, epochs) as u64)
        .with_prefix(precision.to_string())
        .with_style(
            ProgressStyle::with_template("{prefix:>5} {wide_bar} {pos}/{len} loss {msg} {eta}")
                .expect("a valid template"),
        );
    let loss_scale = match precision.scales_loss() {
        true => LossScaleConfig::default(),
        false => LossScaleConfig::Disabled,
    };
    let trained = train(device, loss_scale, digits, epochs, args.seed, |loss| {
        bar.set_message(format!("{loss:.4}"));
        bar.inc(1);
    })?;
    bar.finish();
    Ok(trained)
}

/// `burn-amp-server` in another process, which ends when this value is dropped.
struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    address: String,
    token: String,
}

impl Server {
    fn start(precision: Precision) -> Result<Self, Box<dyn Error>> {
        // The program is beside the folder of the examples.
        let example = env::current_exe()?;
        let folder = example.parent().and_then(|examples| examples.parent());
        let program = folder
            .ok_or("the example has no folder")?
            .join(format!("burn-amp-server{}", env::consts::EXE_SUFFIX));
        let token: String = (0..4)
            .map(|_| format!("{:016x}", rand::random::<u64>()))
            .collect();
        let mut process = Command::new(&program)
            .args(["--backend", "flex", "--listen", "127.0.0.1:0"])
            .args(["--precision", &precision.to_string(), "--token-file", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                let program = program.display();
                format!("cannot start {program}: {error}. Build it with the feature server")
            })?;
        let mut input = process.stdin.take().ok_or("no input")?;
        input.write_all(token.as_bytes())?;
        drop(input);
        let output = BufReader::new(process.stdout.take().ok_or("no output")?);
        let mut server = Self {
            process,
            output,
            address: String::new(),
            token,
        };
        let mut line = String::new();
        while server.output.read_line(&mut line)? > 0 {
            if let Some((_, address)) = line.trim_end().split_once(" at ws://") {
                server.address = format!("ws://{address}");
                return Ok(server);
            }
            line.clear();
        }
        Err("the server did not start".into())
    }

    fn connect(&self) -> Result<Device, burn_amp_device::Error> {
        let host = RemoteHost::websocket(&self.address).with_credential(&self.token);
        burn_amp_device::connect(&host, Duration::from_secs(60))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn table(rows: &[(&Precision, Trained)]) {
    println!(
        "\n{:<9} {:>13} {:>10} {:>10} {:>13} {:>7}",
        "precision", "test accuracy", "final loss", "loss scale", "skipped steps", "seconds"
    );
    for (precision, trained) in rows {
        println!(
            "{precision:<9} {:>11.2} % {:>10.4} {:>10} {:>13} {:>7.1}",
            100.0 * trained.test_accuracy,
            trained.final_loss,
            trained.loss_scale,
            trained.skipped_steps,
            trained.seconds
        );
    }
}
