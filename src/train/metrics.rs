//! Metrics for a `Learner`'s dashboard and logs.

use std::fmt;
use std::sync::Arc;

use burn_amp_core::{StepQueue, scaler_metrics};
use burn_backend::Backend;
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::{GradScaler, precision_of};

/// The precision in force on a device, as text. Where losses are scaled, also the scale and the
/// number of skipped steps: `f16, scale 65536, 0 skipped`.
#[derive(Clone)]
pub struct PrecisionMetric {
    precision: Arc<dyn Fn() -> String + Send + Sync>,
    steps: Arc<StepQueue>,
}

impl PrecisionMetric {
    /// Shows the precision of a device, and follows these scalers: those of the training devices.
    pub fn new<B: Backend>(
        device: &B::Device,
        scalers: impl IntoIterator<Item = GradScaler>,
    ) -> Self {
        let scalers = scalers.into_iter().map(|scaler| scaler.shared);
        Self::of::<B>(device, StepQueue::follow(scalers))
    }

    pub(super) fn of<B: Backend>(device: &B::Device, steps: Arc<StepQueue>) -> Self {
        let device = device.clone();
        let precision = move || match precision_of::<B>(&device) {
            Ok(precision) => precision.to_string(),
            Err(error) => error.to_string(),
        };
        Self {
            precision: Arc::new(precision),
            steps,
        }
    }

    fn text(&self) -> String {
        self.steps.text(&(self.precision)())
    }
}

impl fmt::Debug for PrecisionMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PrecisionMetric")
            .field(&self.text())
            .finish()
    }
}

fn entry(text: String) -> SerializedEntry {
    SerializedEntry::new(text.clone(), text)
}

scaler_metrics! {
    {
        fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
            self.0.advance();
            entry(self.value().serialize())
        }
    }
    {
        fn value(&self) -> NumericEntry {
            NumericEntry::Value(self.shown())
        }

        fn running_value(&self) -> NumericEntry {
            self.value()
        }
    }
}

impl Metric for PrecisionMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Precision".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
        self.steps.advance();
        entry(self.text())
    }

    fn clear(&mut self) {}
}
