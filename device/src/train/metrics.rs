//! Metrics for a `Learner`'s dashboard and logs.

use std::sync::Arc;

use burn::tensor::{Device, TensorReadError};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use burn_amp_core::{StepQueue, scaler_metrics};

use crate::{GradScaler, local};

/// The precision of a device, as text. Where losses are scaled, also the scale and the number of
/// skipped steps: `f16, scale 65536, 0 skipped`.
#[derive(Debug, Clone)]
pub struct PrecisionMetric {
    precision: String,
    steps: Arc<StepQueue>,
}

/// The metrics of a training that queues the step of each item.
pub(super) struct ItemMetrics {
    pub scale: LossScaleMetric,
    pub skipped: SkippedStepsMetric,
    pub precision: PrecisionMetric,
}

impl ItemMetrics {
    pub fn new(device: &Device) -> Self {
        Self {
            scale: LossScaleMetric(StepQueue::of_items()),
            skipped: SkippedStepsMetric(StepQueue::of_items()),
            precision: PrecisionMetric::of(device, StepQueue::of_items()),
        }
    }

    /// One queue for each metric, since each metric consumes its own steps.
    pub fn queues(&self) -> [Arc<StepQueue>; 3] {
        let Self {
            scale,
            skipped,
            precision,
        } = self;
        [&scale.0, &skipped.0, &precision.steps].map(Arc::clone)
    }
}

impl PrecisionMetric {
    /// Shows the precision of a device, and follows these scalers: those of the training devices. The
    /// precision of a device on another machine is not available here.
    pub fn new(device: &Device, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        let scalers = scalers.into_iter().map(|scaler| scaler.shared);
        Self::of(device, StepQueue::follow(scalers))
    }

    fn of(device: &Device, steps: Arc<StepQueue>) -> Self {
        let here = local::below(&device.clone().without_autodiff());
        let precision = match here {
            Some((_, in_force)) => in_force.precision.to_string(),
            None => "of the device".to_string(),
        };
        Self { precision, steps }
    }

    fn entry(&self) -> SerializedEntry {
        entry(self.steps.text(&self.precision))
    }
}

fn entry(text: String) -> SerializedEntry {
    SerializedEntry::new(text.clone(), text)
}

type Entry = Result<SerializedEntry, TensorReadError>;

scaler_metrics! {
    {
        fn update(&mut self, _: &(), _: &MetricMetadata) -> Entry {
            self.0.advance();
            Ok(entry(NumericEntry::Value(self.shown()).serialize()))
        }

        fn compute(&mut self) -> Entry {
            let formatted = self.shown().to_string();
            Ok(SerializedEntry::new(formatted, self.final_value().serialize()))
        }
    }
    {
        fn value(&self) -> Option<NumericEntry> {
            Some(NumericEntry::Value(self.shown()))
        }

        fn running_value(&self) -> Option<NumericEntry> {
            self.value()
        }

        fn final_value(&self) -> NumericEntry {
            NumericEntry::Final(self.shown())
        }
    }
}

impl Metric for PrecisionMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Precision".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> Entry {
        self.steps.advance();
        self.compute()
    }

    fn compute(&mut self) -> Entry {
        Ok(self.entry())
    }

    fn clear(&mut self) {}
}
