//! A renderer for a `Learner` without a dashboard: a line for each epoch, and in a terminal a bar.
//! Burn's own renderer prints a line for each batch.

use std::collections::HashMap;

use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use indicatif::{ProgressBar, ProgressStyle};

/// Give it to `SupervisedTraining::renderer`.
pub struct EpochLines {
    bar: ProgressBar,
    names: HashMap<MetricId, String>,
    train: Vec<Mean>,
    valid: Vec<Mean>,
}

/// A numeric metric over the batches of an epoch.
struct Mean {
    metric: MetricId,
    sum: f64,
    count: usize,
}

impl EpochLines {
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {eta}");
        Self {
            bar: ProgressBar::new(0).with_style(style.expect("a valid template")),
            names: HashMap::new(),
            train: Vec::new(),
            valid: Vec::new(),
        }
    }

    /// Each metric of an epoch that is over.
    fn text(&self, means: &[Mean]) -> String {
        let texts = means.iter().map(|mean| {
            let name = self.names.get(&mean.metric).map_or("?", String::as_str);
            format!("{} {}", name.to_lowercase(), number(mean.value()))
        });
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl Mean {
    fn value(&self) -> f64 {
        self.sum / self.count as f64
    }
}

/// Adds a batch. A value that is no mean over the batch, such as a loss scale, replaces the last value.
fn update(means: &mut Vec<Mean>, state: MetricState) {
    let MetricState::Numeric(entry, number) = state else {
        return;
    };
    let known = means.iter().position(|m| m.metric == entry.metric_id);
    let i = known.unwrap_or_else(|| {
        means.push(Mean {
            metric: entry.metric_id,
            sum: 0.0,
            count: 0,
        });
        means.len() - 1
    });
    match number {
        NumericEntry::Value(value) => (means[i].sum, means[i].count) = (value, 1),
        NumericEntry::Aggregated {
            aggregated_value,
            count,
        } => {
            means[i].sum += aggregated_value * count as f64;
            means[i].count += count;
        }
    }
}

fn number(value: f64) -> String {
    match value {
        _ if value.fract() == 0.0 => format!("{value}"),
        _ if value.abs() < 0.01 => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

impl MetricsRendererTraining for EpochLines {
    fn update_train(&mut self, state: MetricState) {
        update(&mut self.train, state);
    }

    fn update_valid(&mut self, state: MetricState) {
        update(&mut self.valid, state);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        if let Some(progress) = item.progress {
            self.bar.set_length(progress.items_total as u64);
            self.bar.set_position(progress.items_processed as u64);
        }
        let epochs = item.global_progress;
        let prefix = format!("epoch {}/{}", epochs.items_processed, epochs.items_total);
        self.bar.set_prefix(prefix);
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let epochs = item.global_progress;
        if item
            .progress
            .is_some_and(|p| p.items_processed < p.items_total)
        {
            return;
        }
        let (train, valid) = (self.text(&self.train), self.text(&self.valid));
        let (epoch, of) = (epochs.items_processed, epochs.items_total);
        self.bar
            .suspend(|| println!("epoch {epoch}/{of}: train {train}; valid {valid}"));
        self.train.clear();
        self.valid.clear();
    }
}

impl MetricsRendererEvaluation for EpochLines {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for EpochLines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}
