//! Metrics for a `Learner`'s dashboard and logs.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use burn_amp_core::{Listener, RecordedStep};
use burn_backend::Backend;
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use parking_lot::Mutex;

use crate::autodiff::replicas;
use crate::{GradScaler, precision_of};

/// The precision in force on a device, as text. Where losses are scaled, also the scale and the
/// number of skipped steps: `f16, scale 65536, 0 skipped`.
#[derive(Clone)]
pub struct PrecisionMetric {
    precision: Arc<dyn Fn() -> String + Send + Sync>,
    steps: Arc<Steps>,
}

impl PrecisionMetric {
    /// Shows the precision of a device, and follows these scalers: those of the training devices.
    pub fn new<B: Backend>(
        device: &B::Device,
        scalers: impl IntoIterator<Item = GradScaler>,
    ) -> Self {
        let device = device.clone();
        let precision = move || match precision_of::<B>(&device) {
            Ok(precision) => precision.to_string(),
            Err(error) => error.to_string(),
        };
        Self {
            precision: Arc::new(precision),
            steps: Steps::of(scalers),
        }
    }

    fn text(&self) -> String {
        let precision = (self.precision)();
        match *self.steps.latest.lock() {
            Some(Step { scale, skipped }) => {
                format!("{precision}, scale {scale}, {skipped} skipped")
            }
            None => precision,
        }
    }
}

impl fmt::Debug for PrecisionMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PrecisionMetric")
            .field(&self.text())
            .finish()
    }
}

/// The steps of these scalers that the metrics have not processed yet.
#[derive(Debug)]
struct Steps {
    scalers: Vec<GradScaler>,
    waiting: Mutex<VecDeque<Step>>,
    latest: Mutex<Option<Step>>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    scale: f32,
    skipped: u64,
}

/// Metrics are at most a few items behind. If more steps wait, there are more steps than items, and
/// the newest step counts.
const WAITING: usize = 64;

impl Listener for Steps {
    fn recorded(&self, recorded: &RecordedStep) {
        let scale = recorded.step.scale;
        let skipped = replicas::skipped_steps(&self.scalers);
        let mut waiting = self.waiting.lock();
        if waiting.len() == WAITING {
            waiting.clear();
        }
        waiting.push_back(Step { scale, skipped });
    }
}

impl Steps {
    fn of(scalers: impl IntoIterator<Item = GradScaler>) -> Arc<Self> {
        let steps = Arc::new(Self {
            scalers: scalers.into_iter().collect(),
            waiting: Mutex::default(),
            latest: Mutex::default(),
        });
        steps.scalers.iter().for_each(|s| s.shared.listen(&steps));
        steps
    }

    /// Moves to the current item's step. Stays at the last step if the item scaled nothing.
    fn next(&self) {
        if let Some(step) = self.waiting.lock().pop_front() {
            *self.latest.lock() = Some(step);
        }
    }
}

fn entry(text: String) -> SerializedEntry {
    SerializedEntry::new(text.clone(), text)
}

macro_rules! numeric_metric {
    (
        $(#[$doc:meta])*
        $metric:ident, $name:literal, $description:literal, $before:literal, $value:expr
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $metric(Arc<Steps>);

        impl $metric {
            /// Follows these scalers: those of the training devices.
            pub fn new(scalers: impl IntoIterator<Item = GradScaler>) -> Self {
                Self(Steps::of(scalers))
            }
        }

        impl Metric for $metric {
            type Input = ();

            fn name(&self) -> MetricName {
                Arc::new($name.into())
            }

            fn description(&self) -> Option<String> {
                Some($description.into())
            }

            fn attributes(&self) -> MetricAttributes {
                MetricAttributes::Numeric(NumericAttributes {
                    unit: None,
                    higher_is_better: false,
                })
            }

            fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
                self.0.next();
                entry(self.value().serialize())
            }

            /// The counts continue across epochs.
            fn clear(&mut self) {}
        }

        impl Numeric for $metric {
            fn value(&self) -> NumericEntry {
                NumericEntry::Value(self.0.latest.lock().map_or($before, $value))
            }

            fn running_value(&self) -> NumericEntry {
                self.value()
            }
        }
    };
}

numeric_metric!(
    /// What the step's loss was multiplied by: the scaler's scale in f16, else 1. A unitless
    /// factor.
    ///
    /// A `Learner` computes its metrics on another thread, some steps later. Each value here still
    /// belongs to its own step: the scaler queues one value per training item at the backward pass.
    /// Several devices queue their values in the order in which they finish.
    LossScaleMetric,
    "Loss Scale",
    "What the loss is multiplied by",
    1.0,
    |step| f64::from(step.scale)
);
numeric_metric!(
    /// How many steps were skipped on all devices up to this step; see [`LossScaleMetric`].
    /// Replicas in distributed training skip together, which counts once.
    SkippedStepsMetric,
    "Skipped Steps",
    "Steps skipped so far because gradients overflowed",
    0.0,
    |step| step.skipped as f64
);

impl Metric for PrecisionMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Precision".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
        self.steps.next();
        entry(self.text())
    }

    fn clear(&mut self) {}
}
