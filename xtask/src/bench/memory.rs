//! What a step holds for its backward pass and at its peak, above parameters and batch. Counted, so
//! that one run of each is enough.

use std::collections::BTreeMap;
use std::path::Path;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, with_precision};
use serde_json::{Value, json};

use super::Options;
use super::alloc::Mark;
use super::backend::{Measured, precisions};
use super::models::{Batch, Dims, Model, Net, Size};
use crate::plot;

/// What a training step holds, in bytes.
struct Held {
    /// When the loss is there and the backward pass has not begun.
    kept: usize,
    /// The same by size of block, in the memory of the process.
    blocks: BTreeMap<usize, usize>,
    /// At the most, where that can be known.
    peak: Option<usize>,
}

pub fn memory<B: Measured>(options: &Options) -> Vec<Value> {
    strategy::<B, NoCheckpointing>(options, "no checkpointing")
}

pub fn balanced<B: Measured>(options: &Options) -> Vec<Value> {
    strategy::<B, BalancedCheckpointing>(options, "balanced checkpointing")
}

fn strategy<B: Measured, C: CheckpointStrategy>(options: &Options, name: &str) -> Vec<Value> {
    println!(
        "\n{name}\n{:<12} {:<10} {:>12} {:>7} {:>12} {:>7}",
        "model", "precision", "kept MiB", "ratio", "peak MiB", "ratio"
    );
    let models = options.models();
    let rows = models.flat_map(|model| one::<B, C>(options, model));
    rows.collect()
}

fn one<B: Measured, C: CheckpointStrategy>(options: &Options, model: Model) -> Vec<Value> {
    let dims = model.dims(options.size);
    let plain = held::<B, Autodiff<B, C>>(model, dims);
    let row = |precision: &str, held: &Held| {
        let ratio = held.kept as f64 / plain.kept as f64;
        let peak_ratio = Option::zip(held.peak, plain.peak).map(|(a, b)| a as f64 / b as f64);
        println!(
            "{:<12} {precision:<10} {:>12.1} {ratio:>7.3} {:>12} {:>7}",
            model.name(),
            mib(held.kept),
            or_dash(held.peak.map(mib), 1),
            or_dash(peak_ratio, 3),
        );
        if options.detail {
            detail(&held.blocks);
        }
        json!({
            "model": model.name(),
            "precision": precision,
            "kept_bytes": held.kept,
            "peak_bytes": held.peak,
            "ratio": ratio,
            "peak_ratio": peak_ratio,
        })
    };
    let mut rows = vec![row("burn", &plain)];
    for precision in precisions::<B>() {
        let held = with_precision(precision, || held::<B, AmpAutodiff<B, C>>(model, dims));
        rows.push(row(&precision.to_string(), &held));
    }
    rows
}

/// Parameters as an optimizer would leave them: new ones, of which no half copy is there yet.
struct Stepped;

impl<B: AutodiffBackend> ModuleMapper<B> for Stepped {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let wanted = tensor.is_require_grad();
            let stepped = Tensor::from_inner(tensor.inner() * 1.0);
            stepped.set_require_grad(wanted)
        })
    }
}

/// Measures the second of two steps: what a first one sets up for good is not counted.
fn held<B: Measured, A: AutodiffBackend<Device = B::Device>>(model: Model, dims: Dims) -> Held {
    let device = A::Device::default();
    <A as Backend>::seed(&device, 1);
    let net = Net::<A>::new(model, dims, &device);
    let batch = Batch::new(model, dims, &device);
    drop(net.loss(batch.clone()).backward());

    let net = net.map(&mut Stepped);
    let before = B::device_bytes(&device);
    let mark = Mark::set();
    let loss = net.loss(batch);
    let on_device = B::device_bytes(&device).zip(before);
    let kept = on_device.map_or_else(|| mark.live(), |(after, before)| after - before);
    let blocks = mark.blocks();
    let grads = loss.backward();
    let peak = on_device.is_none().then(|| mark.peak());
    drop(grads);
    Held { kept, blocks, peak }
}

/// How what is kept by a transformer grows, as plots in `folder`.
pub fn growth<B: Measured>(folder: &Path) -> anyhow::Result<()> {
    let dims = Model::Transformer.dims(Size::Small);
    // bf16 where the device has it.
    let half = *precisions::<B>().last().expect("at least FP32");
    let name = format!("burn-amp in {half}");
    let depths = [1, 2, 4, 6].map(|layers| (layers, Dims { layers, ..dims }));
    let lengths = [64, 128, 256, 512].map(|length| (length, Dims { length, ..dims }));
    for (file, axis, points) in [
        ("memory_depth.svg", "layers", depths),
        ("memory_length.svg", "sequence length in tokens", lengths),
    ] {
        let kept = |held: Held| mib(held.kept);
        let plain = points.map(|(x, dims)| {
            let held = held::<B, Autodiff<B>>(Model::Transformer, dims);
            (x as f64, kept(held))
        });
        let amp = points.map(|(x, dims)| {
            let run = || held::<B, AmpAutodiff<B>>(Model::Transformer, dims);
            (x as f64, kept(with_precision(half, run)))
        });
        let title = "Kept for the backward pass of the transformer";
        let lines = [("Burn in FP32", &plain[..]), (&name, &amp)];
        plot::lines(&folder.join(file), title, axis, "kept in MiB", &lines)?;
        println!("wrote target/bench/{file}");
    }
    Ok(())
}

/// Prints what is kept by size of block, the most bytes first.
fn detail(blocks: &BTreeMap<usize, usize>) {
    let mut blocks: Vec<_> = blocks.iter().map(|(b, n)| (b * n, *b, *n)).collect();
    blocks.sort_by(|a, b| b.cmp(a));
    println!("{:>16} {:>7} {:>12}", "block bytes", "count", "total MiB");
    for (total, bytes, count) in blocks {
        println!("{bytes:>16} {count:>7} {:>12.2}", mib(total));
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}
