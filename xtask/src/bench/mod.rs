//! The costs and savings of mixed precision, against Burn without it in the same run.

mod alloc;
pub mod backend;
mod bounds;
mod casts;
#[allow(dead_code, unused_imports)]
#[path = "../../../tests/shared/src/checked/mod.rs"]
mod checked;
mod convergence;
mod first;
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "wgpu"))]
mod launches;
mod memory;
pub mod models;
mod overhead;
pub mod pytorch;
mod speed;
mod time;
mod trials;
mod verification;

use std::path::{Path, PathBuf};
use std::process::{Command, exit};

use anyhow::{Context, ensure};
use burn::backend::Flex;
use burn_amp::{AmpConfig, Precision};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use backend::{Choice, Measured};
use models::{Model, Size};
use pytorch::PyTorch;

use crate::libtorch;
use crate::measurements::{self, Head, Run};

/// The kinds of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Small operations in FP32, with AMP and without.
    Overhead,
    /// The casts, read-backs and launches of a step, and PyTorch's casts.
    Casts,
    /// The memory of a step for its backward pass, and at its peak.
    Memory,
    /// The time of a training step in each precision.
    Speed,
    /// How far training in bf16 is from FP32: the losses, from the same weights on the same batches.
    Convergence,
    /// The trial of each tried operation, in each half precision.
    Trials,
    /// The cost and the findings of a comparison of contractions with a reference.
    Verification,
    /// The costs of a fresh process: its first steps and the memory that it reserves.
    First,
    /// All of these except `convergence`, `trials`, `verification` and `first`.
    All,
}

/// The measurements to make, and how.
#[derive(Debug, Clone, Args)]
pub struct Options {
    kind: Kind,
    /// The backend to measure on. `casts` counts casts with the small models, and launches with models of any size.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// How large the models are.
    #[arg(long, value_enum, default_value_t)]
    size: Size,
    /// Only one model.
    #[arg(long, value_enum)]
    model: Option<Model>,
    /// Only these half precisions, beside FP32.
    #[arg(long, value_delimiter = ',')]
    precision: Option<Vec<Precision>>,
    /// `speed` without the time that would be saved if only products ran in half.
    #[arg(long)]
    without_floor: bool,
    /// `speed` also prints how long the first two steps take, in which kernels are compiled.
    #[arg(long)]
    first_steps: bool,
    /// No operation is tried on the device: each runs in half where the policy says so.
    #[arg(long)]
    without_trials: bool,
    /// How often each precision is timed by `speed`, in turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// How many steps `convergence` trains.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u16).range(3..))]
    steps: u16,
    /// Seeds of the weights and the batches of `convergence`, one run each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4])]
    seed: Vec<u64>,
    /// Also prints the figures of `memory` by size of block, and of `casts` by operation.
    #[arg(long)]
    detail: bool,
    /// Also measures `memory`, `speed` and `convergence` with PyTorch, where it is installed.
    #[arg(long)]
    pytorch: bool,
    /// Also writes the figures to a file, in place of the file's figures from the same backend, each as soon
    /// as it is known. With xtask/measurements.json, `cargo xtask docs` then shows them.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Fails when a figure is beyond its bound.
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    alone: first::Alone,
}

impl Options {
    fn models(&self) -> impl Iterator<Item = Model> {
        let only = self.model;
        let chosen = move |model: &Model| only.is_none_or(|only| only == *model);
        Model::ALL.into_iter().filter(chosen)
    }

    /// The precisions to measure on the backend, FP32 first.
    fn precisions<B: Measured>(&self) -> Vec<Precision> {
        let only = self.precision.as_deref();
        let chosen =
            |p: &Precision| *p == Precision::F32 || only.is_none_or(|only| only.contains(p));
        backend::precisions::<B>()
            .into_iter()
            .filter(chosen)
            .collect()
    }

    fn measures(&self, kind: Kind) -> bool {
        match self.kind {
            // `First` starts a process for each figure; the others are not about the cost of a run.
            Kind::All => {
                use Kind::{Convergence, First, Trials, Verification};
                ![Convergence, Trials, Verification, First].contains(&kind)
            }
            only => only == kind,
        }
    }
}

pub fn bench(options: &Options) -> anyhow::Result<()> {
    let feature = options.backend.missing_feature();
    if cfg!(debug_assertions) || feature.is_some() {
        return again(options.backend, feature);
    }
    match options.backend {
        Choice::Flex => run::<Flex>(options),
        #[cfg(feature = "cuda")]
        Choice::Cuda => run::<burn::backend::Cuda>(options),
        #[cfg(feature = "vulkan")]
        Choice::Vulkan => run::<burn::backend::Vulkan>(options),
        #[cfg(feature = "wgpu")]
        Choice::Wgpu => run::<burn::backend::Wgpu>(options),
        #[cfg(feature = "tch")]
        Choice::Tch => run::<burn::backend::LibTorch>(options),
        #[allow(unreachable_patterns)]
        _ => unreachable!("a backend without its feature"),
    }
}

/// Runs this command again, optimized and with a backend's feature.
fn again(backend: Choice, feature: Option<&str>) -> anyhow::Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--profile", "bench", "--package", "xtask"]);
    match feature {
        // Compiling may take minutes: show Cargo's progress.
        Some(feature) => cargo.args(["--features", feature]),
        None => cargo.arg("--quiet"),
    };
    if backend == Choice::Tch {
        let missing = libtorch::missing();
        ensure!(missing.is_empty(), "{}", missing.join("\n"));
        libtorch::add_to_path(&mut cargo)?;
    }
    let status = cargo.arg("--").args(std::env::args().skip(1)).status();
    let status = status.context("cannot start cargo")?;
    exit(status.code().unwrap_or(1))
}

fn run<B: Measured>(options: &Options) -> anyhow::Result<()> {
    if let Some(precision) = options.alone.alone {
        println!("{}", first::of_this_process::<B>(options, precision)?);
        return Ok(());
    }
    // The device's launches are more informative than the operations of a step. But the log would slow
    // the other measurements down.
    let launches = options.kind == Kind::Casts && B::watch_launches();
    // `Auto` is not compared: each precision is requested by name.
    let config = AmpConfig::new().with_precision(Precision::F32);
    let config = config.with_trials(!options.without_trials);
    config.apply::<B>(&B::Device::default())?;

    let mut pytorch = None;
    if options.pytorch && (options.measures(Kind::Memory) || options.measures(Kind::Speed)) {
        pytorch = PyTorch::start(options)?;
    }
    let mut report = Map::new();
    let version = pytorch.as_ref().map(|pytorch| pytorch.version.as_str());
    // Once: naming a GPU starts a program.
    let json = options.json.as_ref();
    let json = json.map(|path| anyhow::Ok((path, Head::here(options.backend)?)));
    let json = json.transpose()?;
    let kept = |name: &str, rows: &[Value]| match &json {
        Some((path, head)) => {
            measurements::renew(path, of(options, head.clone(), name, rows, version))
        }
        None => Ok(()),
    };
    let mut add = |name: &str, rows: Vec<Value>| {
        kept(name, &rows)?;
        report.insert(name.into(), rows.into());
        anyhow::Ok(())
    };
    // First, before the process uses half precision.
    if options.measures(Kind::Overhead) {
        add("overhead", overhead::overhead::<B>())?;
    }
    if launches {
        add("launches", B::launches(options))?;
    } else if options.measures(Kind::Casts) {
        add("casts", casts::casts::<B>(options))?;
    }
    if options.measures(Kind::Trials) {
        add("trials", trials::trials::<B>(options))?;
    }
    if options.measures(Kind::Verification) {
        add("verification", verification::verification::<B>(options))?;
    }
    if options.measures(Kind::Memory) && !B::COUNTED {
        println!("\nmemory is not measured: tensors of this backend are not counted");
    } else if options.measures(Kind::Memory) {
        add("memory", memory::plain::<B>(options))?;
        if let Some(pytorch) = &pytorch {
            add("pytorch_memory", pytorch.memory(options)?)?;
        }
        add("memory_balanced", memory::balanced::<B>(options))?;
        if options.model.is_none() {
            memory::growth::<B>(options);
        }
    }
    if options.measures(Kind::Speed) {
        // What a figure costs to write again is nothing beside what a lost one costs.
        let so_far = |rows: &[Value]| {
            if let Err(error) = kept("speed", rows) {
                println!("not written: {error:#}");
            }
        };
        add(
            "speed",
            speed::speed::<B>(options, pytorch.as_ref(), so_far),
        )?;
    }
    if options.measures(Kind::First) {
        add("first", first::first::<B>(options)?)?;
    }
    if options.measures(Kind::Convergence) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench/convergence");
        add(
            "convergence",
            convergence::convergence::<B>(options, &folder)?,
        )?;
    }
    let report = Value::from(report);
    if options.check {
        let (measured, missed) = bounds::check(&report);
        let list = missed.join("\n");
        ensure!(missed.is_empty(), "beyond its bound:\n{list}");
        println!("\n{measured} figures within their bounds");
    }
    Ok(())
}

/// The figures of a kind, with the conditions that they hold for.
fn of(
    options: &Options,
    mut head: Head,
    bench: &str,
    rows: &[Value],
    pytorch: Option<&str>,
) -> Run {
    let has_pytorchs = ["speed", "pytorch_memory"].contains(&bench);
    head.versions.pytorch = pytorch.filter(|_| has_pytorchs).map(String::from);
    Run {
        bench: bench.into(),
        backend: options.backend,
        size: options.size,
        untuned: options.backend.is_untuned(),
        head,
        rows: rows.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn parsed(args: &str) -> Result<Options, clap::Error> {
        let args = ["bench"].into_iter().chain(args.split_whitespace());
        Cli::try_parse_from(args).map(|cli| cli.options)
    }

    #[test]
    fn a_kind_is_enough() {
        let options = parsed("memory").unwrap();
        assert_eq!((options.backend, options.size), (Choice::Flex, Size::Small));
        assert!(options.measures(Kind::Memory) && !options.measures(Kind::Speed));
        assert!(options.models().eq(Model::ALL));
        assert!(!options.check && !options.pytorch && !options.detail);
        assert_eq!((options.steps, options.seed), (300, vec![1, 2, 3, 4]));
        assert_eq!(Choice::Flex.missing_feature(), None);
    }

    #[test]
    fn everything_can_be_chosen() {
        let options = parsed("all --backend vulkan --size large --model lstm --json a.json");
        let options = options.unwrap();
        assert!(options.measures(Kind::Casts) && !options.measures(Kind::Convergence));
        assert!(options.backend == Choice::Vulkan && options.size == Size::Large);
        assert!(options.models().eq([Model::Lstm]));
        assert_eq!(options.json.as_deref(), Some(Path::new("a.json")));
        for model in Model::ALL {
            assert_eq!(model.to_possible_value().unwrap().get_name(), model.name());
        }
    }

    #[test]
    fn what_is_unknown_is_refused() {
        let unknown = "|nothing|memory --backend tpu|memory --model gpt|speed --rounds 0";
        for args in unknown.split('|').chain(["convergence --steps 2"]) {
            assert!(parsed(args).is_err(), "{args}");
        }
    }
}
