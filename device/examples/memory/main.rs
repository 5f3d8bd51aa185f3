//! Measures the memory that a training step keeps for its backward pass, and its peak, without parameters and
//! batch: in plain Burn, and on a device of this crate in each precision. Flex computes in the memory of the
//! process, which is counted; a GPU has its own memory. One step of each is enough.
//!
//! ```sh
//! cargo run --release --example memory
//! cargo run --release --example memory --no-default-features --features burn-0-23,flex
//! cargo run --release --example memory -- --checkpointing --models transformer --detail
//! ```

include!("../../src/burn.rs");

#[path = "../../../xtask/src/bench/alloc.rs"]
mod alloc;
mod models;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{Error, Precision, flex};
use clap::Parser;

use alloc::Mark;
use models::{Batch, Model, Net};

#[derive(Parser)]
#[command(about = "Measures what a training step holds")]
struct Args {
    #[arg(long, value_enum, value_delimiter = ',')]
    models: Vec<Model>,
    /// With Burn's balanced gradient checkpointing.
    #[arg(long)]
    checkpointing: bool,
    /// Also prints what is kept by size of block.
    #[arg(long)]
    detail: bool,
}

/// The memory of a training step, in bytes.
struct Held {
    /// After the loss is computed and before the backward pass.
    kept: usize,
    /// The peak of the step.
    peak: usize,
}

fn main() -> Result<(), Error> {
    let mut args = Args::parse();
    if args.models.is_empty() {
        args.models = Model::ALL.to_vec();
    }
    println!(
        "{:<12} {:<10} {:>12} {:>7} {:>12} {:>7}",
        "model", "precision", "kept MiB", "ratio", "peak MiB", "ratio"
    );
    for model in args.models.iter().copied() {
        let plain = held(model, Device::flex(), &args);
        row(model, "burn", &plain, &plain);
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let held = held(model, flex(precision)?, &args);
            row(model, &precision.to_string(), &held, &plain);
        }
    }
    Ok(())
}

fn row(model: Model, precision: &str, held: &Held, plain: &Held) {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "{:<12} {precision:<10} {:>12.1} {:>7.3} {:>12.1} {:>7.3}",
        format!("{model:?}").to_lowercase(),
        mib(held.kept),
        held.kept as f64 / plain.kept as f64,
        mib(held.peak),
        held.peak as f64 / plain.peak as f64,
    );
}

/// Parameters as after an optimizer's step: new tensors without half copies.
struct Stepped;

impl ModuleMapper for Stepped {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let wanted = tensor.is_require_grad();
            let stepped = Tensor::from_inner(tensor.inner() * 1.0);
            stepped.set_require_grad(wanted)
        })
    }
}

/// Measures the second of two steps: permanent allocations of the first step are not counted.
fn held(model: Model, device: Device, args: &Args) -> Held {
    let device = if args.checkpointing {
        device.autodiff().gradient_checkpointing()
    } else {
        device.autodiff()
    };
    // A server computes asynchronously.
    let computed = || device.sync().expect("a device that answers");
    device.seed(1);
    let net = Net::new(model, model.dims(), &device);
    let batch = Batch::new(model, model.dims(), &device);
    drop(net.loss(batch.clone()).backward());

    let net = net.map(&mut Stepped);
    computed();
    let mark = Mark::set();
    let loss = net.loss(batch);
    computed();
    let kept = mark.live();
    if args.detail {
        for (bytes, count) in mark.blocks().into_iter().rev() {
            println!("{count:>8} blocks of {bytes} bytes");
        }
    }
    let grads = loss.backward();
    computed();
    let peak = mark.peak();
    drop(grads);
    Held { kept, peak }
}
