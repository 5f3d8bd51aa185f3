//! Measures the cost of a device behind a server (Burn 0.22) or in a group (Burn 0.23): the time of a small
//! operation, the time of a training step of a transformer, and on Flex the step's peak memory. Compares a
//! Burn device with the same device in FP32 and in the half precisions, in turn, round by round.
//!
//! ```sh
//! cargo run --release --example loopback
//! cargo run --release --example loopback --no-default-features --features burn-0-23,flex
//! cargo run --release --features fusion --example loopback    # with Burn's fusion in the client
//! cargo run --release --features vulkan --example loopback -- --backend vulkan
//! cargo run --release --features wgpu --example loopback -- --backend wgpu
//! ```

include!("../src/burn.rs");

#[allow(dead_code)] // It also counts blocks by size.
#[path = "../../xtask/src/bench/alloc.rs"]
mod alloc;
#[path = "backends/mod.rs"]
mod backends;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_amp_device::{Precision, mixed_precision};
use clap::Parser;

use backends::Backend;

/// How this version of Burn reaches a device that computes in mixed precision.
const HOW: &str = if cfg!(feature = "burn-0-22") {
    "served"
} else {
    "in process"
};

/// Small operations in a chain, read back once.
const OPERATIONS: usize = 2_000;

#[derive(Parser)]
#[command(about = "Measures what it costs that a device is behind a server or in a group")]
struct Args {
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// How often each device is measured.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// The width of the transformer.
    #[arg(long, default_value_t = 128)]
    width: usize,
    #[arg(long, default_value_t = 4)]
    batch: usize,
    #[arg(long, default_value_t = 64)]
    length: usize,
    /// Also measures this precision; by default all precisions that the device computes in.
    #[arg(long, value_delimiter = ',')]
    precision: Option<Vec<Precision>>,
}

fn main() -> ExitCode {
    match loopback(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn loopback(args: &Args) -> Result<(), Box<dyn Error>> {
    let plain = args.backend.device();
    let halves = || {
        let all = [Precision::F32, Precision::F16, Precision::Bf16].into_iter();
        all.filter(|p| mixed_precision(plain.clone(), *p).is_ok())
            .collect()
    };
    let precisions = args.precision.clone().unwrap_or_else(halves);
    let mut contenders = vec![Contender::new("Burn".into(), plain.clone(), args)];
    for precision in precisions {
        let device = mixed_precision(plain.clone(), precision)?;
        contenders.push(Contender::new(format!("{HOW}, {precision}"), device, args));
    }
    for _ in 0..args.rounds {
        for contender in &mut contenders {
            contender.measure();
        }
    }
    println!(
        "{:?}, fusion {}: median of {} rounds",
        plain,
        if cfg!(feature = "fusion") {
            "on"
        } else {
            "off"
        },
        args.rounds
    );
    println!(
        "{:<16} {:>16} {:>10} {:>10}",
        "device", "us an operation", "step ms", "peak MiB"
    );
    for contender in contenders {
        let [operation, step, peak] =
            [contender.operation, contender.step, contender.peak].map(median);
        println!(
            "{:<16} {operation:>16.2} {step:>10.2} {peak:>10.2}",
            contender.name
        );
    }
    Ok(())
}

/// A device with its model, and what was measured on it.
struct Contender {
    name: String,
    device: Device,
    net: Option<TransformerEncoder>,
    input: Tensor<3>,
    /// Microseconds.
    operation: Vec<f64>,
    /// Milliseconds.
    step: Vec<f64>,
    /// MiB of this process, without those before the step. A GPU has its own memory.
    peak: Vec<f64>,
}

impl Contender {
    fn new(name: String, device: Device, args: &Args) -> Self {
        let training = device.clone().autodiff();
        training.seed(1);
        let config = TransformerEncoderConfig::new(args.width, 4 * args.width, 4, 4);
        let shape = [args.batch, args.length, args.width];
        let mut contender = Self {
            name,
            net: Some(config.with_dropout(0.0).init(&training)),
            input: Tensor::random(shape, Distribution::Normal(0.0, 1.0), &training),
            device,
            operation: Vec::new(),
            step: Vec::new(),
            peak: Vec::new(),
        };
        // The first measurement also compiles and tries kernels, so it is discarded.
        contender.measure();
        contender.operation.clear();
        contender.step.clear();
        contender.peak.clear();
        contender
    }

    fn measure(&mut self) {
        let mut x = Tensor::<1>::zeros([8], &self.device);
        self.sync();
        let start = Instant::now();
        for _ in 0..OPERATIONS {
            x = x + 1.0;
        }
        let sum = x.sum().into_scalar::<f64>();
        let seconds = start.elapsed().as_secs_f64();
        assert!(sum > 0.0);
        self.operation.push(seconds * 1e6 / OPERATIONS as f64);

        let (start, mark) = (Instant::now(), alloc::Mark::set());
        self.train();
        self.sync();
        self.step.push(start.elapsed().as_secs_f64() * 1e3);
        self.peak.push(mark.peak() as f64 / f64::from(1 << 20));
    }

    /// A step of SGD.
    fn train(&mut self) {
        let net = self.net.take().expect("the model of the last step");
        let output = net.forward(TransformerEncoderInput::new(self.input.clone()));
        let grads = output.powi_scalar(2).mean().backward();
        let grads = GradientsParams::from_grads(grads, &net);
        let mut sgd = SgdConfig::new().init();
        self.net = Some(sgd.step(1e-3, net, grads));
    }

    fn sync(&self) {
        self.device.sync().expect("a device that answers");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
