//! Resumes a run of Burn's `Learner` exactly. The run's folder has its settings, its checkpoints and
//! its metrics. Each epoch has an order of its own.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder, Record, Recorder, RecorderError};
use burn::tensor::backend::AutodiffBackend;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, NumericEntry};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A recorder in half precision would round the FP32 parameters.
pub type FileRecorder = NamedMpkFileRecorder<FullPrecisionSettings>;

/// The file of the settings. A folder with this file belongs to a run.
const SETTINGS: &str = "run.json";
/// The folders that Burn writes.
const WRITTEN: [&str; 3] = ["checkpoint", "train", "valid"];
/// The loss scale over the steps of an f16 run.
pub const LOSS_SCALE: &str = "loss_scale.svg";

/// Prepares a folder for a new run, of which no epoch is done. The files of an earlier run are removed,
/// so that the new run is not resumed from them. A folder with other contents is left alone.
pub fn begin(folder: &Path, settings: &impl Serialize) -> Result<usize, String> {
    let error = |error| format!("cannot write to {}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(error)?;
    let is_empty = fs::read_dir(folder).map_err(error)?.next().is_none();
    if !is_empty && !folder.join(SETTINGS).is_file() {
        let folder = folder.display();
        return Err(format!(
            "{folder} is not empty and has no run, choose another --output"
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

/// The checkpoints of a model, an optimizer and a learning-rate scheduler.
pub struct Checkpoints<B, M, O, L>(PhantomData<(B, M, O, L)>);

impl<B, M, O, L> Checkpoints<B, M, O, L>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    L: LrScheduler,
{
    /// The epoch after which to resume a run. The settings must be those that the run was begun with.
    pub fn resume<S>(folder: &Path, settings: &S) -> Result<usize, String>
    where
        S: PartialEq + Display + DeserializeOwned,
    {
        let path = folder.join(SETTINGS);
        let error = |error: &dyn Error| format!("no run to resume: {}: {error}", path.display());
        let begun = fs::read_to_string(&path).map_err(|e| error(&e))?;
        let begun: S = serde_json::from_str(&begun).map_err(|e| error(&e))?;
        if begun != *settings {
            return Err(format!(
                "the run in {} was begun with other settings, resume it with {begun}",
                folder.display()
            ));
        }
        Self::last_epoch(folder)
            .ok_or_else(|| format!("no checkpoint to resume from in {}", folder.display()))
    }

    /// The last epoch of which every file can be read. A run that was killed during a write has left a
    /// part of a file.
    pub fn last_epoch(folder: &Path) -> Option<usize> {
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
            Self::check(&folder, *epoch)
                .inspect_err(|error| eprintln!("epoch {epoch} is skipped: {error}"))
                .is_ok()
        })
    }

    /// Whether Burn's learner can read a checkpoint. Burn panics where this is an error.
    fn check(folder: &Path, epoch: usize) -> Result<(), String> {
        check_file::<B, M::Record>(folder, "model", epoch)?;
        check_file::<B, O::Record>(folder, "optim", epoch)?;
        check_file::<B, L::Record<B>>(folder, "scheduler", epoch)
    }
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

/// Metrics in files, as Burn's learner writes them. Burn counts the first epoch of a resumed run as
/// epoch 1, and would overwrite its files.
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

/// A data loader with a loader of its own for each epoch, made only from the seed and the epoch: a
/// resumed run gets the batches that it would have got. Burn's own goes from order to order by a random
/// state that starts anew with the process.
pub struct Epochs<B: Backend, T> {
    loaders: Vec<Arc<dyn DataLoader<B, T>>>,
    next: AtomicUsize,
}

impl<B: Backend, T> Epochs<B, T> {
    pub fn new(loaders: impl Iterator<Item = Arc<dyn DataLoader<B, T>>>) -> Self {
        Self {
            loaders: loaders.collect(),
            next: AtomicUsize::new(0),
        }
    }
}

impl<B: Backend, T: Send + 'static> DataLoader<B, T> for Epochs<B, T> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<T> + 'a> {
        let epoch = self.next.fetch_add(1, Ordering::Relaxed);
        self.loaders[epoch].iter()
    }

    fn num_items(&self) -> usize {
        self.loaders.first().map_or(0, |loader| loader.num_items())
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, T>> {
        let loaders = self.loaders.iter();
        Arc::new(Self::new(loaders.map(|loader| loader.to_device(device))))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, T>> {
        let loaders = self.loaders.iter();
        Arc::new(Self::new(loaders.map(|loader| loader.slice(start, end))))
    }
}
