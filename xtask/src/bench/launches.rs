//! The operations and the launches of a training step on a device of CubeCL's, where fusion makes one
//! kernel of several operations. Counted from the logs of Burn and CubeCL.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex};

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, AmpConfig, LossScaleConfig, Precision};
use burn_std::config::BurnConfig;
use burn_std::config::fusion::FusionLogLevel;
use cubecl::config::autotune::AutotuneLevel;
use cubecl::config::memory::MemoryLogLevel;
use cubecl::config::profiling::ProfilingLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::{Value, json};

use super::Options;
use super::backend::Measured;
use super::casts::config_in;
use super::models::{Dims, Model};
use super::speed::Step;

/// Steps before the one that is counted: the first tune kernels, and fusion learns what to fuse.
const WARM_UP: usize = 2;

/// The batch is smaller than elsewhere by this factor: a device in software takes minutes for it.
const SMALLER: usize = 8;

/// The counts of the logs.
#[derive(Debug, Clone)]
struct Launches {
    /// How often fusion got each operation, by name.
    operations: BTreeMap<String, usize>,
    /// How often each kernel was launched, by name.
    kernels: BTreeMap<String, usize>,
    /// The bytes of the buffers that kernels write, except for those that they write in place.
    bytes: f64,
    /// Cleanups of memory: everything before a cleanup is in the log.
    cleanups: usize,
}

static LAUNCHES: Mutex<Launches> = Mutex::new(Launches::NONE);
static LOGGED: Condvar = Condvar::new();

/// Makes CubeCL log its launches and Burn what it fuses. Call it before either runs in the process.
pub fn watch() {
    let mut burn = BurnConfig::from_current_dir();
    burn.fusion.logger.log = Some(Default::default());
    burn.fusion.logger.level = FusionLogLevel::Full;
    BurnConfig::set(burn);
    let mut config = CubeClRuntimeConfig::from_current_dir();
    config.profiling.logger.log = Some(Default::default());
    config.profiling.logger.level = ProfilingLogLevel::Minimal;
    config.memory.logger.log = Some(Default::default());
    config.memory.logger.level = MemoryLogLevel::Full;
    // The count is the same, and a device in software tunes for minutes.
    config.autotune.level = AutotuneLevel::Minimal;
    CubeClRuntimeConfig::set(config);
    log::set_logger(&Reader).expect("the only logger");
    log::set_max_level(LevelFilter::Info);
}

/// Counts the lines of the logs.
struct Reader;

impl Log for Reader {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("cubecl")
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            let line = record.args().to_string();
            LAUNCHES.lock().expect("counts").read(&line);
            LOGGED.notify_all();
        }
    }

    fn flush(&self) {}
}

impl Launches {
    const NONE: Self = Self {
        operations: BTreeMap::new(),
        kernels: BTreeMap::new(),
        bytes: 0.0,
        cleanups: 0,
    };

    fn operations(&self) -> usize {
        self.operations.values().sum()
    }

    fn kernels(&self) -> usize {
        self.kernels.values().sum()
    }

    fn read(&mut self, line: &str) {
        if let Some((_, name)) = line.split_once("Executing ") {
            *self.kernels.entry(name.trim().into()).or_default() += 1;
        } else if line.contains("\nidx ") {
            for operation in line.lines().filter_map(operation) {
                *self.operations.entry(operation.into()).or_default() += 1;
            }
        } else if line.contains("Manual memory cleanup") {
            self.cleanups += 1;
        } else if line.contains("[Main GPU Memory] Reserved memory")
            && let Some(bytes) = reserved(line)
        {
            self.bytes += bytes;
        }
    }
}

/// The operation of a row of a table such as `7    ▸ fused ..  BaseFloat::Cast  t1:f16[4]  t2:f32[4]`, in which
/// only the first row of a block names the block. A tensor that is dropped has a row too.
fn operation(row: &str) -> Option<&str> {
    if !row.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let mut columns = row.split("  ").map(str::trim).skip(1);
    let operation = columns.find(|column| !column.is_empty() && !column.starts_with('▸'))?;
    (operation != "Drop").then_some(operation)
}

/// The bytes of a line such as `[Main GPU Memory] Reserved memory 4.10 KB using dynamic pool`.
fn reserved(line: &str) -> Option<f64> {
    let mut words = line.split_once("Reserved memory ")?.1.split(' ');
    let number: f64 = words.next()?.parse().ok()?;
    let unit = match words.next()? {
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        // Bytes, with their unit or without.
        _ => 1.0,
    };
    Some(number * unit)
}

/// The counts since the last call.
fn take<B: Backend>(device: &B::Device) -> Launches {
    let sync = || B::sync(device).expect("a device that answers");
    sync();
    B::memory_cleanup(device);
    // Otherwise the cleanup waits in the queue for later operations.
    sync();
    let mut launches = LAUNCHES.lock().expect("counts");
    while launches.cleanups == 0 {
        launches = LOGGED.wait(launches).expect("counts");
    }
    std::mem::replace(&mut launches, Launches::NONE)
}

pub fn launches<B: Measured>(options: &Options) -> Vec<Value> {
    let device = B::Device::default();
    let backend = B::name(&device);
    println!(
        "\na training step of the {} models, with an eighth of the batch, on {backend}, after fusion:\n\
         operations, kernels launched, MB of buffers that they write\n\
         {:<12} {:<12} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8}",
        format!("{:?}", options.size).to_lowercase(),
        "model",
        "precision",
        "operations",
        "of FP32",
        "kernels",
        "of FP32",
        "MB",
        "of FP32"
    );
    let mut rows = Vec::new();
    for model in options.models() {
        let mut dims = model.dims(options.size);
        dims.batch = (dims.batch / SMALLER).max(1);
        let plain = step::<B, Autodiff<B>>(model, dims);
        let mut row = |precision: &str, counted: &Launches| {
            let (model, bytes) = (model.name(), counted.bytes);
            let (operations, kernels) = (counted.operations(), counted.kernels());
            let operations_ratio = operations as f64 / plain.operations() as f64;
            let ratio = kernels as f64 / plain.kernels() as f64;
            let bytes_ratio = bytes / plain.bytes;
            println!(
                "{model:<12} {precision:<12} {operations:>10} {operations_ratio:>8.2} {kernels:>8} \
                 {ratio:>8.2} {:>8.1} {bytes_ratio:>8.2}",
                bytes / 1e6
            );
            if options.detail {
                detail(counted, &plain);
            }
            rows.push(json!({
                "backend": backend,
                "model": model,
                "precision": precision,
                "operations": operations,
                "operations_ratio": operations_ratio,
                "kernels": kernels,
                "kernels_ratio": ratio,
                "bytes": bytes,
                "bytes_ratio": bytes_ratio,
            }));
        };
        row("burn", &plain);
        let mut row_in = |name: &str, config: AmpConfig| {
            // As on an accelerator, whose kernels add up in FP32.
            let config = config.with_trials(false).with_verification(false);
            config.apply::<B>(&device).expect("a possible precision");
            row(name, &step::<B, AmpAutodiff<B>>(model, dims));
        };
        for precision in options.precisions::<B>() {
            row_in(&precision.to_string(), config_in(precision));
            if precision == Precision::F16 {
                // Stands for bf16 on a device that has none.
                let config = config_in(precision).with_loss_scale(LossScaleConfig::Disabled);
                row_in("f16 unscaled", config);
            }
        }
    }
    rows
}

fn step<B: Backend, A: AutodiffBackend<Device = B::Device>>(model: Model, dims: Dims) -> Launches {
    let device = B::Device::default();
    <A as Backend>::seed(&device, 1);
    let mut step = Step::<A>::new(model, dims, &device);
    for _ in 0..WARM_UP {
        step.run();
        take::<B>(&device);
    }
    step.run();
    take::<B>(&device)
}

/// Prints each kernel, by how often it was launched, and each operation whose number is not Burn's.
fn detail(launches: &Launches, plain: &Launches) {
    let mut kernels: Vec<_> = launches.kernels.iter().collect();
    kernels.sort_by_key(|(_, times)| Reverse(**times));
    for (name, times) in kernels {
        println!("{:>12} {times:>5} {name}", "");
    }
    let of = |counts: &Launches, name| counts.operations.get(name).copied().unwrap_or(0);
    let names = [launches, plain]
        .into_iter()
        .flat_map(|of| of.operations.keys());
    for name in names.collect::<BTreeSet<_>>() {
        let (here, in_burn) = (of(launches, name), of(plain, name));
        if here != in_burn {
            let more = here as i64 - in_burn as i64;
            println!("{:>12} {here:>5} {name} ({more:+})", "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_counted() {
        let mut launches = Launches::NONE;
        for line in [
            "Executing matmul::Kernel<f32>",
            "[Main GPU Memory] Reserved memory 4.10 KB using dynamic pool",
            "[Main GPU Memory] Reserved memory 512 B using dynamic pool",
            "[Main GPU Memory] Reserved memory 2048 using persistent memory",
            "[Staging CPU Memory] Reserved memory 9.00 MB using dynamic pool",
            "Manual memory cleanup ...",
            "fusion trace (2 ops, 1 block)\n\
             idx  block              op               inputs  outputs\n\
             ---  -----------------  ---------------  ------  -------\n\
             0    ▸ un-fused (2 ops)  BaseFloat::Cast  t0:f32  t1:f16\n\
             1                        Drop             t0:f32",
        ] {
            launches.read(line);
        }
        assert_eq!(launches.kernels["matmul::Kernel<f32>"], 1);
        assert_eq!(launches.operations, [("BaseFloat::Cast".into(), 1)].into());
        assert_eq!(launches.cleanups, 1);
        assert_eq!(launches.bytes, 4_100.0 + 512.0 + 2_048.0);
    }
}
