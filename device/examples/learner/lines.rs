//! The output of the training: a bar, and a line for each epoch. Burn's own renderer without a dashboard
//! prints a line for each batch.

use std::collections::{BTreeMap, HashMap};

#[cfg(feature = "burn-0-23")]
use burn::data::dataloader::Progress;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use indicatif::{ProgressBar, ProgressStyle};

/// A renderer for `SupervisedTraining::renderer`.
pub struct Lines {
    bar: ProgressBar,
    names: HashMap<MetricId, String>,
    /// The last text of each metric, by split and name.
    shown: BTreeMap<(&'static str, String), String>,
    /// Whether there are lines. Otherwise the bar is for all epochs.
    prints: bool,
}

// An example calls one of the two constructors.
#[allow(dead_code)]
impl Lines {
    pub fn new() -> Self {
        Self::of(true)
    }

    /// A bar for the whole training, without lines.
    pub fn bar() -> Self {
        Self::of(false)
    }
}

impl Lines {
    fn of(prints: bool) -> Self {
        let style = ProgressStyle::with_template("{prefix:>5} {wide_bar} {pos}/{len} {eta}");
        Self {
            bar: ProgressBar::new(0).with_style(style.expect("a valid template")),
            names: HashMap::new(),
            shown: BTreeMap::new(),
            prints,
        }
    }

    fn update(&mut self, split: &'static str, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        if let Some(name) = self.names.get(&entry.metric_id) {
            let text = entry.serialized_entry.formatted;
            self.shown.insert((split, name.clone()), text);
        }
    }

    fn start(&self, split: &str, total: Option<usize>) {
        if self.prints {
            self.bar.set_prefix(split.to_string());
            self.bar.set_length(total.unwrap_or(0) as u64);
            self.bar.set_position(0);
        }
    }

    fn at(&self, items: usize) {
        if self.prints {
            self.bar.set_position(items as u64);
        }
    }
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        self.update("train", state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.update("valid", state);
    }
}

impl TrainingProgressLogger for Lines {
    fn start(&mut self, epochs: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        if !self.prints {
            self.bar.set_prefix("epoch");
            self.bar.set_length(epochs as u64);
        }
    }

    fn update_epoch(&mut self, epoch: usize) {
        if !self.prints {
            return self.bar.set_position(epoch as u64);
        }
        let shown = std::mem::take(&mut self.shown);
        let texts = shown.iter();
        let texts = texts.map(|((split, name), text)| format!("  {split} {name}: {text}\n"));
        let texts: String = texts.collect();
        self.bar.suspend(|| print!("epoch {epoch}\n{texts}"));
    }

    #[cfg(feature = "burn-0-22")]
    fn start_split(&mut self, split: &str, total_items: usize) {
        Lines::start(self, split, Some(total_items));
    }

    #[cfg(feature = "burn-0-23")]
    fn start_split(&mut self, split: &str, progress: &Progress) {
        Lines::start(self, split, progress.total);
    }

    #[cfg(feature = "burn-0-22")]
    fn update_split(&mut self, items_processed: usize) {
        self.at(items_processed);
    }

    #[cfg(feature = "burn-0-23")]
    fn update_split(&mut self, progress: &Progress) {
        self.at(progress.items_processed);
    }

    #[cfg(feature = "burn-0-22")]
    fn end_split(&mut self) {}

    #[cfg(feature = "burn-0-23")]
    fn end_split(&mut self, _: &Progress) {}

    fn end(&mut self) {
        self.bar.finish_and_clear();
    }

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Lines {
    fn start_global_progress(&mut self, _: usize) {}

    #[cfg(feature = "burn-0-22")]
    fn start_test(&mut self, _: &str, _: usize) {}

    #[cfg(feature = "burn-0-23")]
    fn start_test(&mut self, _: &str, _: &Progress) {}

    #[cfg(feature = "burn-0-22")]
    fn update_test_progress(&mut self, _: usize) {}

    #[cfg(feature = "burn-0-23")]
    fn update_test_progress(&mut self, _: &Progress) {}

    #[cfg(feature = "burn-0-22")]
    fn end_test(&mut self) {}

    #[cfg(feature = "burn-0-23")]
    fn end_test(&mut self, _: &Progress) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        let name = definition.name.to_string();
        self.names.insert(definition.metric_id, name);
    }
}
