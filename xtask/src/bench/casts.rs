//! The casts, read-backs and launches of a training step, counted by a backend.

use std::collections::BTreeMap;

use burn::backend::Autodiff;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, AmpConfig, LossScaleConfig, Precision};
use serde_json::{Value, json};

use super::backend::Measured;
use super::checked::{Checked, CheckedDevice, Counts};
use super::models::{Dims, Model, Size};
use super::speed::Step;
use super::{Options, pytorch};

/// Operations that launch no kernel: they change the layout of data, or copy it to and from the device.
const NO_LAUNCH: &str = "float_reshape float_transpose float_swap_dims float_permute float_expand \
                         float_from_data float_into_data";

pub fn casts<B: Measured>(options: &Options) -> Vec<Value> {
    let backend = B::name(&B::Device::default());
    println!(
        "\na training step of the small models on {backend}: casts, MiB they read and write, host reads,\n\
         kernels of operations on floats\n{:<12} {:<10} {:>7} {:>9} {:>10} {:>8} {:>14}",
        "model", "precision", "casts", "cast MiB", "read-backs", "kernels", "PyTorch casts"
    );
    let mut rows = Vec::new();
    for model in options.models() {
        let dims = model.dims(Size::Small);
        let plain = counted::<Autodiff<Checked<B>>>(model, dims, CheckedDevice::new());
        let mut row = |precision: &str, counts: &Counts, pytorch: usize| {
            let (model, bytes) = (model.name(), cast_bytes(counts));
            let (casts, reads, launches) = (counts.casts(), counts.reads.total(), launches(counts));
            println!(
                "{model:<12} {precision:<10} {casts:>7} {:>9.1} {reads:>10} {launches:>8} {pytorch:>14}",
                bytes as f64 / f64::from(1 << 20),
            );
            if options.detail {
                detail(counts);
            }
            rows.push(json!({
                "backend": backend,
                "model": model,
                "precision": precision,
                "casts": casts,
                "cast_bytes": bytes,
                "read_backs": reads,
                "launches": launches,
                "launch_ratio": launches as f64 / self::launches(&plain) as f64,
                "pytorch_casts": pytorch,
            }));
        };
        row("burn", &plain, 0);
        for precision in options.precisions::<B>() {
            let pytorch = pytorch::autocast_casts(model, precision);
            let device = device_in::<B>(precision);
            let counts = counted::<AmpAutodiff<Checked<B>>>(model, dims, device);
            row(&precision.to_string(), &counts, pytorch);
        }
    }
    rows
}

/// A device of its own that computes in `precision`.
pub fn device_in<B: Measured>(precision: Precision) -> CheckedDevice {
    let device = CheckedDevice::new();
    config_in(precision)
        .with_trials(B::TRIED)
        .apply::<Checked<B>>(&device)
        .expect("a device that does all");
    device
}

/// Uses, in f16, a loss scale that no step overflows at.
pub fn config_in(precision: Precision) -> AmpConfig {
    let config = AmpConfig::new().with_precision(precision);
    match precision {
        Precision::F16 => config.with_loss_scale(LossScaleConfig::Fixed(256.0)),
        _ => config,
    }
}

/// The counts of the second of two steps.
pub fn counted<A: AutodiffBackend<Device = CheckedDevice>>(
    model: Model,
    dims: Dims,
    device: CheckedDevice,
) -> Counts {
    let mut step = Step::<A>::new(model, dims, &device);
    step.run();
    device.reset();
    step.run();
    device.counts()
}

/// Prints each operation that launches a kernel, by how often it ran in each dtype.
fn detail(counts: &Counts) {
    let mut ops: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (op, dtype, times) in launching(counts) {
        ops.entry(op).or_default().push((dtype.name(), times));
    }
    for (op, mut dtypes) in ops {
        dtypes.sort();
        let dtypes = dtypes
            .iter()
            .map(|(dtype, times)| format!("{times} {dtype}"));
        println!("{:>12} {op}: {}", "", dtypes.collect::<Vec<_>>().join(", "));
    }
}

fn cast_bytes(counts: &Counts) -> usize {
    let dtypes = [DType::F64, DType::F32, DType::F16, DType::BF16];
    let pairs = dtypes.iter().flat_map(|a| dtypes.map(|b| (*a, b)));
    pairs
        .map(|(a, b)| counts.casts_between(a, b).elements * (a.size() + b.size()))
        .sum()
}

fn launches(counts: &Counts) -> usize {
    launching(counts).map(|(_, _, times)| times).sum()
}

fn launching(counts: &Counts) -> impl Iterator<Item = (&'static str, DType, usize)> {
    let launches = |op: &str| NO_LAUNCH.split(' ').all(|none| none != op);
    counts.ops().filter(move |(op, ..)| launches(op))
}
