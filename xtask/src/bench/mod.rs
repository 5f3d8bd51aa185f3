//! What mixed precision costs and saves, against Burn without it in the same run.

mod memory;
mod models;
mod time;

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, Precision, with_precision};
use clap::ValueEnum;
use serde_json::{Value, json};

use memory::{Held, held};
use models::{Bench, Cnn, Mlp, Recurrent, SmallOps, Transformer};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A step of small operations in FP32, with AMP and without.
    Overhead,
    /// What a step holds for its backward pass, and at its peak.
    Memory,
    /// All of these.
    All,
}

type Plain = Autodiff<Flex>;
type Amp = AmpAutodiff<Flex>;

pub fn bench(kind: Kind, json: Option<PathBuf>) -> anyhow::Result<()> {
    let mut report = serde_json::Map::new();
    // First, while nothing in the process has asked for half precision.
    if matches!(kind, Kind::Overhead | Kind::All) {
        report.insert("overhead".into(), overheads());
    }
    if matches!(kind, Kind::Memory | Kind::All) {
        report.insert("memory".into(), memories());
    }
    if let Some(path) = json {
        fs::write(&path, format!("{:#}\n", Value::from(report)))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn memories() -> Value {
    println!(
        "\n{:<12} {:<10} {:>12} {:>7} {:>12} {:>7}",
        "model", "precision", "kept MiB", "ratio", "peak MiB", "ratio"
    );
    let rows = [
        memory::<Transformer<Plain>, Transformer<Amp>>("transformer"),
        memory::<Cnn<Plain>, Cnn<Amp>>("cnn"),
        memory::<Mlp<Plain>, Mlp<Amp>>("mlp"),
        memory::<Recurrent<Plain>, Recurrent<Amp>>("lstm"),
    ];
    rows.concat().into()
}

fn memory<M: Bench<Plain>, A: Bench<Amp>>(model: &str) -> Vec<Value> {
    let plain = held::<Plain, M>();
    let amp = [Precision::F32, Precision::F16, Precision::Bf16].map(|precision| {
        let held = with_precision(precision, held::<Amp, A>);
        (precision.to_string(), held)
    });
    let runs = [("burn".to_string(), plain)].into_iter().chain(amp);
    runs.map(|(precision, held): (String, Held)| {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let ratio = held.kept_bytes as f64 / plain.kept_bytes as f64;
        let peak_ratio = held.peak_bytes as f64 / plain.peak_bytes as f64;
        println!(
            "{model:<12} {precision:<10} {:>12.1} {ratio:>7.3} {:>12.1} {peak_ratio:>7.3}",
            mib(held.kept_bytes),
            mib(held.peak_bytes)
        );
        json!({
            "model": model,
            "precision": precision,
            "kept_bytes": held.kept_bytes,
            "peak_bytes": held.peak_bytes,
            "ratio": ratio,
            "peak_ratio": peak_ratio,
        })
    })
    .collect()
}

fn overheads() -> Value {
    let (plain, amp, ratio) = time::pairs(
        step::<Plain, SmallOps<Plain>>(),
        step::<Amp, SmallOps<Amp>>(),
    );
    println!(
        "\nsmall_ops    a step in FP32: {plain:.1} us on Burn, {amp:.1} us on AMP, ratio {:.3} \
         ({:.3} to {:.3})",
        ratio.median, ratio.low, ratio.high
    );
    json!([{
        "model": "small_ops",
        "step_ratio": ratio.median,
        "step_ratio_low": ratio.low,
        "step_ratio_high": ratio.high,
    }])
}

/// A training step without the optimizer, which runs below both.
fn step<B: AutodiffBackend, M: Bench<B>>() -> impl FnMut() {
    let device = B::Device::default();
    let model = M::new(&device);
    let batch = M::batch(&device);
    move || drop(model.loss(batch.clone()).backward())
}
