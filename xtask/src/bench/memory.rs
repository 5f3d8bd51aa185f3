//! The memory of a step for its backward pass and at its peak, without parameters and batch. It is
//! counted, so that one run of each is enough.

use std::collections::BTreeMap;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, Precision, with_precision};
use serde_json::{Value, json};

use super::Options;
use super::alloc::Mark;
use super::backend::{Measured, Usage};
use super::models::{Batch, Dims, Model, Net, Size};

/// The bytes that a training step holds.
struct Held {
    /// After the loss is computed, before the backward pass begins.
    kept: usize,
    /// The same by size of block, in the memory of the process.
    blocks: BTreeMap<usize, usize>,
    /// The peak. A device's own memory cannot be asked for it: there, what the device has reserved.
    peak: usize,
}

/// Without checkpointing.
pub fn plain<B: Measured>(options: &Options) -> Vec<Value> {
    strategy::<B, NoCheckpointing>(options, "no checkpointing")
}

/// With checkpointing.
pub fn balanced<B: Measured>(options: &Options) -> Vec<Value> {
    strategy::<B, BalancedCheckpointing>(options, "balanced checkpointing")
}

fn strategy<B: Measured, C: CheckpointStrategy>(options: &Options, name: &str) -> Vec<Value> {
    header(name);
    let all = options.precisions::<B>();
    let rows = options.models().flat_map(|model| {
        let dims = model.dims(options.size);
        one::<B, C>(options, &model.name(), (model, dims), &all)
    });
    rows.collect()
}

/// Prints how the memory of a transformer grows, in FP32 and in half.
pub fn growth<B: Measured>(options: &Options) {
    header("the transformer by depth and by length");
    let (model, all) = (Model::Transformer, options.precisions::<B>());
    let dims = model.dims(Size::Small);
    let depths = [1, 2, 4, 6].map(|layers| (format!("{layers} layers"), Dims { layers, ..dims }));
    let lengths = [64, 128, 256, 512];
    let lengths = lengths.map(|length| (format!("{length} tokens"), Dims { length, ..dims }));
    for (name, dims) in depths.into_iter().chain(lengths) {
        // bf16 where the device has it.
        let half = &all[all.len() - 1..];
        one::<B, NoCheckpointing>(options, &name, (model, dims), half);
    }
}

fn header(name: &str) {
    println!(
        "\n{name}\n{:<12} {:<10} {:>12} {:>7} {:>12} {:>7}",
        "model", "precision", "kept MiB", "ratio", "peak MiB", "ratio"
    );
}

fn one<B: Measured, C: CheckpointStrategy>(
    options: &Options,
    name: &str,
    (model, dims): (Model, Dims),
    precisions: &[Precision],
) -> Vec<Value> {
    let plain = held::<B, Autodiff<B, C>>(model, dims);
    let row = |precision: &str, held: &Held| {
        let ratio = held.kept as f64 / plain.kept as f64;
        let peak_ratio = held.peak as f64 / plain.peak as f64;
        println!(
            "{name:<12} {precision:<10} {:>12.1} {ratio:>7.3} {:>12.1} {peak_ratio:>7.3}",
            mib(held.kept),
            mib(held.peak),
        );
        if options.detail {
            detail(&held.blocks);
        }
        json!({
            "model": name,
            "precision": precision,
            "kept_bytes": held.kept,
            "peak_bytes": held.peak,
            "ratio": ratio,
            "peak_ratio": peak_ratio,
        })
    };
    let mut rows = vec![row("burn", &plain)];
    for &precision in precisions {
        let held = with_precision(precision, || held::<B, AmpAutodiff<B, C>>(model, dims));
        rows.push(row(&precision.to_string(), &held));
    }
    rows
}

/// Parameters as an optimizer leaves them: new ones, without half copies.
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

/// Measures the second of two steps: memory that the first step sets up for good is not counted.
fn held<B: Measured, A: AutodiffBackend<Device = B::Device>>(model: Model, dims: Dims) -> Held {
    let device = A::Device::default();
    <A as Backend>::seed(&device, 1);
    let net = Net::<A>::new(model, dims, &device);
    let batch = Batch::new(model, dims, &device);
    drop(net.loss(batch.clone()).backward());

    let net = net.map(&mut Stepped);
    let usage = || B::usage(&device);
    if usage().is_some() {
        <A as Backend>::memory_cleanup(&device);
    }
    let before = usage().map(|Usage { in_use, .. }| in_use);
    let above = |bytes: Option<usize>| Some(bytes?.saturating_sub(before?));
    let mark = Mark::set();
    let loss = net.loss(batch);
    let kept = above(usage().map(|usage| usage.in_use));
    let kept = kept.unwrap_or_else(|| mark.live());
    let blocks = mark.blocks();
    let grads = loss.backward();
    let peak = above(usage().map(|usage| usage.reserved));
    let peak = peak.unwrap_or_else(|| mark.peak());
    drop(grads);
    Held { kept, blocks, peak }
}

/// Prints the kept memory by size of block, the most bytes first.
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

/// A figure where there is one.
pub fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}
