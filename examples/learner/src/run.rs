//! A run's folder: with what settings it was begun, the checkpoints to resume it from, and its
//! metrics.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use burn::lr_scheduler::LrScheduler;
use burn::optim::Optimizer;
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder, Record, Recorder, RecorderError};
use burn::tensor::backend::AutodiffBackend;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, NumericEntry};
use burn_amp::Precision;
use serde::{Deserialize, Serialize};

use crate::backends::Choice;
use crate::model::Model;
use crate::{Optim, Schedule};

/// One of half precision would cut the FP32 parameters short.
pub type FileRecorder = NamedMpkFileRecorder<FullPrecisionSettings>;

/// Where the settings are. By this file a folder is known as one of ours.
const SETTINGS: &str = "run.json";
/// What Burn writes, each in a folder of its own.
const WRITTEN: [&str; 3] = ["checkpoint", "train", "valid"];
/// The loss scale over the steps of an f16 run.
pub const LOSS_SCALE: &str = "loss_scale.svg";

/// What stays the same until a run is done: with other epochs the learning rate would jump, with
/// another seed windows would be seen twice, and another backend rounds otherwise.
#[derive(clap::Args, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What to train on.
    #[arg(long, value_enum, default_value_t)]
    pub backend: Choice,
    /// What to train in: auto, f32, f16 or bf16, also as 16-mixed and bf16-mixed.
    #[arg(long, default_value_t = Precision::F16)]
    pub precision: Precision,
    /// How often the text is seen.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub epochs: u16,
    /// Windows of the text in a step.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub batch_size: u16,
    /// Seed of the weights, of the order of the windows and of the sample.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
}

/// As they are given on the command line.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "--backend {} --precision {} --epochs {} --batch-size {} --seed {}",
            self.backend, self.precision, self.epochs, self.batch_size, self.seed
        )
    }
}

/// Makes a folder ready for a new run, of which no epoch is done. What an earlier run left is
/// removed, lest the new one be resumed from it; a folder of anything else is left alone.
pub fn begin(folder: &Path, settings: &Settings) -> Result<usize, String> {
    let error = |error| format!("cannot write to {}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(error)?;
    let is_empty = fs::read_dir(folder).map_err(error)?.next().is_none();
    if !is_empty && !folder.join(SETTINGS).is_file() {
        let folder = folder.display();
        return Err(format!(
            "{folder} holds something else, choose another --output"
        ));
    }
    let folders = WRITTEN.map(|name| fs::remove_dir_all(folder.join(name)));
    let picture = fs::remove_file(folder.join(LOSS_SCALE));
    for removed in folders.into_iter().chain([picture]) {
        match removed {
            Err(gone) if gone.kind() == ErrorKind::NotFound => {}
            removed => removed.map_err(error)?,
        }
    }
    let settings = serde_json::to_string(settings).map_err(|error| error.to_string())?;
    fs::write(folder.join(SETTINGS), settings).map_err(error)?;
    Ok(0)
}

/// The epoch to resume a run after. It has to be resumed with the settings that it was begun with.
pub fn resume<B: AutodiffBackend>(folder: &Path, settings: &Settings) -> Result<usize, String> {
    let path = folder.join(SETTINGS);
    let error = |error: &dyn Error| format!("no run to resume: {}: {error}", path.display());
    let begun = fs::read_to_string(&path).map_err(|e| error(&e))?;
    let begun: Settings = serde_json::from_str(&begun).map_err(|e| error(&e))?;
    if begun != *settings {
        return Err(format!(
            "the run in {} was begun with other settings, resume it with {begun}",
            folder.display()
        ));
    }
    last_epoch::<B>(folder)
        .ok_or_else(|| format!("no checkpoint to resume from in {}", folder.display()))
}

/// The last epoch of which every file can be read. One that was killed while it wrote has left a
/// part of a file.
pub fn last_epoch<B: AutodiffBackend>(folder: &Path) -> Option<usize> {
    let folder = folder.join("checkpoint");
    let epochs: BTreeSet<usize> = fs::read_dir(&folder)
        .ok()?
        .filter_map(|file| {
            let name = file.ok()?.file_name();
            let (_, epoch) = name.to_str()?.strip_suffix(".mpk")?.rsplit_once('-')?;
            epoch.parse().ok()
        })
        .collect();
    epochs.into_iter().rev().find(|epoch| {
        check::<B>(&folder, *epoch)
            .inspect_err(|error| eprintln!("epoch {epoch} is passed over: {error}"))
            .is_ok()
    })
}

/// Whether Burn's learner can read a checkpoint; it would panic where this is an error.
fn check<B: AutodiffBackend>(folder: &Path, epoch: usize) -> Result<(), String> {
    check_file::<B, <Model<B> as Module<B>>::Record>(folder, "model", epoch)?;
    check_file::<B, <Optim<B> as Optimizer<Model<B>, B>>::Record>(folder, "optim", epoch)?;
    check_file::<B, <Schedule as LrScheduler>::Record<B>>(folder, "scheduler", epoch)
}

fn check_file<B: Backend, R: Record<B>>(
    folder: &Path,
    name: &str,
    epoch: usize,
) -> Result<(), String> {
    let file = format!("{name}-{epoch}");
    let record: Result<R, _> = Recorder::<B>::load(
        &FileRecorder::new(),
        folder.join(&file),
        &Default::default(),
    );
    match record {
        Ok(_) => Ok(()),
        Err(RecorderError::FileNotFound(_)) => Err(format!("{file}.mpk is missing")),
        Err(_) => Err(format!("{file}.mpk is damaged")),
    }
}

/// Metrics in files, as Burn's learner writes them. It takes the first epoch of a resumed run for
/// epoch 1, whose files it would write over.
pub struct MetricFiles {
    files: FileMetricLogger,
    first: usize,
}

impl MetricFiles {
    pub fn new(folder: &Path, done: usize) -> Self {
        Self {
            files: FileMetricLogger::new(folder),
            first: done + 1,
        }
    }
}

impl MetricLogger for MetricFiles {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        self.files.log(update, epoch.max(self.first), split);
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        self.files.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.files.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.files.log_epoch_summary(summary);
    }
}
