//! The measurements: the figures of `cargo xtask bench`, each with the machine, the day and the
//! versions, in a file that the tables of the documentation are made from. Independent of the benches
//! and the pages.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sysinfo::{CpuRefreshKind, RefreshKind, System};
use time::OffsetDateTime;

use crate::bench::backend::Choice;
use crate::bench::models::{Model, Size};

/// The file that the documentation shows.
pub const FILE: &str = "xtask/measurements.json";

/// The figures of one kind, on one backend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The kind: `memory`, `speed`, ...
    pub bench: String,
    pub backend: Choice,
    pub size: Size,
    /// Whether the program was built without Burn's feature `autotune`, so that each operation takes the
    /// kernel that comes first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untuned: bool,
    #[serde(flatten)]
    pub head: Head,
    pub rows: Vec<Value>,
}

/// The conditions that figures hold for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    pub machine: Machine,
    /// In UTC.
    pub date: String,
    pub versions: Versions,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub os: String,
    /// The GPU of the backend, if its name can be queried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Versions {
    pub rustc: String,
    pub burn: String,
    pub burn_amp: String,
    /// If the rows have figures of PyTorch's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pytorch: Option<String>,
}

impl Run {
    /// A figure of a model in a precision, if it was measured.
    pub fn figure(&self, model: Model, precision: &str, name: &str) -> Option<f64> {
        let of = |row: &&Value| row["model"] == model.name() && row["precision"] == precision;
        self.rows.iter().find(of)?[name].as_f64()
    }

    /// Replaces this run. If all else is the same, keeps the models that only this run has: a campaign
    /// measures one model after the other.
    fn renew(&mut self, new: Self) {
        let mut old = std::mem::replace(self, new);
        if old.head == self.head {
            let measured = |row: &Value| self.rows.iter().any(|new| new["model"] == row["model"]);
            old.rows.retain(|row| !measured(row));
            self.rows.splice(..0, old.rows);
        }
    }

    /// Whether it measured the same thing.
    fn is_of(&self, other: &Self) -> bool {
        let of = |run: &Self| (run.backend, run.size, run.untuned);
        self.bench == other.bench && of(self) == of(other)
    }
}

impl Head {
    /// This machine, today, with the versions in use.
    pub fn here(backend: Choice) -> anyhow::Result<Self> {
        Ok(Self {
            machine: Machine::here(backend)?,
            date: OffsetDateTime::now_utc().date().to_string(),
            versions: Versions {
                rustc: env!("RUSTC_VERSION").into(),
                burn: env!("BURN_VERSION").into(),
                burn_amp: env!("CARGO_PKG_VERSION").into(),
                pytorch: None,
            },
        })
    }
}

impl Machine {
    fn here(backend: Choice) -> anyhow::Result<Self> {
        let cpus = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
        let system = System::new_with_specifics(cpus);
        let cpu = system.cpus().first().context("a machine without a CPU")?;
        Ok(Self {
            cpu: cpu.brand().trim().into(),
            cores: System::physical_core_count().unwrap_or(system.cpus().len()),
            os: System::long_os_version().context("a system without a name")?,
            gpu: (backend == Choice::Cuda).then(nvidia).transpose()?,
        })
    }
}

/// The name of the first GPU.
fn nvidia() -> anyhow::Result<String> {
    let output = Command::new("nvidia-smi")
        .args(["--query-gpu=name", "--format=csv,noheader"])
        .output()
        .context("cannot start nvidia-smi")?;
    ensure!(output.status.success(), "nvidia-smi: {}", output.status);
    let names = String::from_utf8(output.stdout)?;
    Ok(names.lines().next().context("no GPU")?.trim().into())
}

pub fn read(path: &Path) -> anyhow::Result<Vec<Run>> {
    let shown = || path.display().to_string();
    let text = fs::read_to_string(path).with_context(shown)?;
    serde_json::from_str(&text).with_context(shown)
}

/// Writes a run to a file, in place of the file's run of the same kind. The file is replaced as a whole, since
/// the program may be stopped at any time.
pub fn renew(path: &Path, run: Run) -> anyhow::Result<()> {
    let mut runs = if path.exists() {
        read(path)?
    } else {
        Vec::new()
    };
    match runs.iter_mut().find(|old| old.is_of(&run)) {
        Some(old) => old.renew(run),
        None => runs.push(run),
    }
    let text = serde_json::to_string_pretty(&runs)?;
    let beside = path.with_extension("new");
    fs::write(&beside, text + "\n").with_context(|| beside.display().to_string())?;
    fs::rename(&beside, path).with_context(|| path.display().to_string())
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    pub fn run(bench: &str, backend: Choice, rows: Value) -> Run {
        let run = json!({
            "bench": bench,
            "backend": backend,
            "size": "small",
            "machine": {"cpu": "Abacus", "cores": 2, "os": "Linux (Debian 12)"},
            "date": "2026-01-02",
            "versions": {"rustc": "1.92.0", "burn": "0.21.0", "burn-amp": "0.1.0"},
            "rows": rows,
        });
        serde_json::from_value(run).unwrap()
    }

    #[test]
    fn a_run_takes_the_place_of_its_own_kind_alone() {
        let path = std::env::temp_dir().join(format!("renewed-{}.json", std::process::id()));
        let _ = fs::remove_file(&path);
        let at = |bench, backend, ms| {
            let row = json!({"model": "mlp", "precision": "f32", "ms": ms});
            run(bench, backend, json!([row]))
        };
        let [memory, flex] = ["memory", "speed"].map(|bench| at(bench, Choice::Flex, 1.5));
        let (slow, fast) = (at("speed", Choice::Tch, 2.5), at("speed", Choice::Tch, 0.5));
        let mut untuned = slow.clone();
        untuned.untuned = true;
        for run in [&memory, &slow, &flex, &untuned, &fast] {
            renew(&path, run.clone()).unwrap();
        }
        assert_eq!(read(&path).unwrap(), [memory, fast.clone(), flex, untuned]);
        assert_eq!(fast.figure(Model::Mlp, "f32", "ms"), Some(0.5));
        assert_eq!(fast.figure(Model::Mlp, "bf16", "ms"), None);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_run_of_one_model_leaves_the_others_of_the_same_day() {
        let of = |model, ms| json!({"model": model, "precision": "f32", "ms": ms});
        let [mlp, lstm] = ["mlp", "lstm"].map(|model| of(model, 1.5));
        let mut both = run("speed", Choice::Flex, json!([mlp, lstm]));
        let again = run("speed", Choice::Flex, json!([of("mlp", 0.5)]));
        both.renew(again.clone());
        assert_eq!(both.rows, [lstm, of("mlp", 0.5)]);
        let mut later = again.clone();
        later.head.date = "2026-01-03".into();
        both.renew(later.clone());
        assert_eq!(both, later);
    }

    #[test]
    fn this_machine_has_a_name_and_today_a_date() {
        let head = Head::here(Choice::Flex).unwrap();
        assert!(!head.machine.cpu.is_empty() && head.machine.cores > 0);
        assert_eq!(head.date.len(), "2026-01-02".len());
        assert!(head.versions.burn.starts_with("0.21."));
    }
}
