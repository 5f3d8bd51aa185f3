//! The costs of a fresh process: its first steps, in which kernels are compiled and tuned, and the
//! memory that it reserves on the device. Each precision runs in a process of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, ensure};
use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, Precision, with_precision};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::Options;
use super::backend::{Kept, Measured};
use super::memory::or_dash;
use super::models::{Dims, Model};
use super::pytorch::text;
use super::speed::Step;

/// Steps of a process. The last one has nothing to compile.
const STEPS: usize = 5;

/// The data that an earlier process has left to this one, in this order.
const BEFORE: [(&str, Kept); 3] = [
    ("nothing", Kept::All),
    // CubeCL keeps this by default.
    ("tuning", Kept::Tuning),
    ("tuning, kernels", Kept::All),
];

/// The request to the other process.
#[derive(Debug, Clone, Args)]
pub struct Alone {
    #[arg(long, hide = true, requires = "folder")]
    pub alone: Option<Precision>,
    #[arg(long, hide = true, value_enum, default_value_t = Kept::All)]
    kept: Kept,
    /// The folder of the compiled and tuned kernels.
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

pub fn first<B: Measured>(options: &Options) -> anyhow::Result<Vec<Value>> {
    println!(
        "\nthe first steps of a process on {}, by what an earlier one has kept on disk\n\
         {:<12} {:<10} {:<16} {:>8} {:>8} {:>8} {:>13}",
        B::name(&B::Device::default()),
        "model",
        "precision",
        "kept before",
        "first s",
        "second s",
        "last ms",
        "reserved MiB"
    );
    let folder = env::temp_dir().join(format!("burn-amp-first-{}", std::process::id()));
    let precisions = options.precisions::<B>();
    let mut rows = Vec::new();
    for model in options.models() {
        for precision in &precisions {
            for (before, kept) in BEFORE {
                let mut row = in_another(options, model, *precision, kept, &folder)?;
                row["kept_before"] = before.into();
                println!(
                    "{:<12} {:<10} {before:<16} {:>8.2} {:>8.3} {:>8.1} {:>13}",
                    model.name(),
                    text(&row["precision"]),
                    row["first_s"].as_f64().context("a time")?,
                    row["second_s"].as_f64().context("a time")?,
                    row["last_ms"].as_f64().context("a time")?,
                    or_dash(row["reserved_mib"].as_f64(), 0),
                );
                rows.push(row);
            }
            let _ = fs::remove_dir_all(&folder);
        }
    }
    Ok(rows)
}

/// The row of a process that measures one precision.
fn in_another(
    options: &Options,
    model: Model,
    precision: Precision,
    kept: Kept,
    folder: &Path,
) -> anyhow::Result<Value> {
    let name = |value: Option<PossibleValue>| {
        let value = value.expect("none is hidden");
        value.get_name().to_string()
    };
    let mut program = Command::new(env::current_exe()?);
    program.args(["bench", "first", "--model", &model.name()]);
    program.args(["--backend", &name(options.backend.to_possible_value())]);
    program.args(["--size", &name(options.size.to_possible_value())]);
    program.args(["--alone", &precision.to_string()]);
    program.args(["--kept", &name(kept.to_possible_value())]);
    program.arg("--folder").arg(folder).stderr(Stdio::inherit());
    let output = program
        .output()
        .context("cannot start this program again")?;
    ensure!(output.status.success(), "{program:?}: {}", output.status);
    let mut lines = output.stdout.split(|byte| *byte == b'\n');
    let row = lines.rfind(|line| !line.is_empty());
    serde_json::from_slice(row.unwrap_or_default()).context("no row was printed")
}

/// The first steps of this process, in which nothing has run before, as a row.
pub fn of_this_process<B: Measured>(
    options: &Options,
    precision: Precision,
) -> anyhow::Result<Value> {
    let Alone { kept, folder, .. } = &options.alone;
    B::keep(*kept, folder.as_deref().context("--alone takes --folder")?);
    let model = options.models().next().context("a model")?;
    let dims = model.dims(options.size);
    let (name, seconds) = match precision {
        Precision::F32 => ("burn".to_string(), steps::<Autodiff<B>>(model, dims)),
        half => {
            let seconds = with_precision(half, || steps::<AmpAutodiff<B>>(model, dims));
            (half.to_string(), seconds)
        }
    };
    let reserved = B::usage(&B::Device::default()).map(|usage| usage.reserved);
    Ok(json!({
        "model": model.name(),
        "precision": name,
        "first_s": seconds[0],
        "second_s": seconds[1],
        "last_ms": seconds[STEPS - 1] * 1e3,
        "reserved_mib": reserved.map(|bytes| bytes as f64 / f64::from(1 << 20)),
    }))
}

fn steps<A: AutodiffBackend>(model: Model, dims: Dims) -> [f64; STEPS] {
    let device = A::Device::default();
    <A as Backend>::seed(&device, 1);
    let start = Instant::now();
    let mut step = Step::<A>::new(model, dims, &device);
    let mut before = 0.0;
    [(); STEPS].map(|()| {
        step.run();
        <A as Backend>::sync(&device).expect("a device that answers");
        let now = start.elapsed().as_secs_f64();
        now - std::mem::replace(&mut before, now)
    })
}
