//! The values of a scaler that a `Learner`'s metrics show. Independent of Burn's versions.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Listener, RecordedStep, SharedScaler};

/// Queues the steps of scalers for the metrics, which a `Learner` computes on another thread, some steps
/// later.
pub struct StepQueue {
    /// The steps skipped so far.
    skipped: Box<dyn Fn() -> u64 + Send + Sync>,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    waiting: VecDeque<ShownStep>,
    shown: Option<ShownStep>,
}

/// The values that the metrics show for a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShownStep {
    /// The scale that the loss was multiplied by.
    pub scale: f32,
    /// The steps skipped up to this one.
    pub skipped: u64,
}

/// Metrics are at most a few items behind. If more steps wait, there are more steps than items, and only the
/// newest step is kept.
const WAITING: usize = 64;

impl StepQueue {
    /// Follows `scalers`. Devices that train together skip a step together: it counts once.
    pub fn follow<L: Default + Send + 'static>(
        scalers: impl IntoIterator<Item = SharedScaler<L>>,
    ) -> Arc<Self> {
        let scalers: Vec<_> = scalers.into_iter().collect();
        let followed = scalers.clone();
        let skipped = move || {
            let each = followed.iter().map(|of| of.lock().scaler.skipped_steps());
            each.max().unwrap_or_default()
        };
        let queue = Arc::new(Self {
            skipped: Box::new(skipped),
            steps: Mutex::default(),
        });
        scalers.iter().for_each(|scaler| scaler.listen(&queue));
        queue
    }

    /// A queue without scalers: the caller pushes the step of each item.
    pub fn of_items() -> Arc<Self> {
        Arc::new(Self {
            skipped: Box::new(|| 0),
            steps: Mutex::default(),
        })
    }

    /// Queues the step of an item.
    pub fn push(&self, step: ShownStep) {
        let waiting = &mut self.steps().waiting;
        if waiting.len() == WAITING {
            waiting.clear();
        }
        waiting.push_back(step);
    }

    /// Moves to the current item's step. Stays at the last step if the item scaled nothing.
    pub fn advance(&self) {
        let steps = &mut *self.steps();
        if let Some(step) = steps.waiting.pop_front() {
            steps.shown = Some(step);
        }
    }

    /// The current item's step.
    pub fn shown(&self) -> Option<ShownStep> {
        self.steps().shown
    }

    /// The precision, and if losses are scaled, the current item's step.
    pub fn text(&self, precision: &str) -> String {
        match self.shown() {
            Some(ShownStep { scale, skipped }) => {
                format!("{precision}, scale {scale}, {skipped} skipped")
            }
            None => precision.to_string(),
        }
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        // A panic of another thread leaves the steps as they were.
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for StepQueue {
    fn ended(&self, step: &RecordedStep) {
        self.push(ShownStep {
            scale: step.step.scale,
            skipped: (self.skipped)(),
        });
    }
}

impl std::fmt::Debug for StepQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.steps().fmt(f)
    }
}

/// The numeric metrics of loss scaling. They need `GradScaler`, `Metric`, `Numeric` and the types of their
/// signatures in scope. The two blocks contain the methods of these traits that differ between versions of Burn. They can
/// use `self.0`, the queue, and `self.shown()`, the value.
#[doc(hidden)]
#[macro_export]
macro_rules! scaler_metrics {
    ($metric:tt $numeric:tt) => {
        $crate::scaler_metrics! { @one
            /// The scale that the step's loss was multiplied by: the scaler's scale in f16, else 1. A
            /// unitless factor.
            ///
            /// A `Learner` computes its metrics on another thread, some steps later. Each value
            /// here still belongs to its own step: the values wait in a queue.
            LossScaleMetric "Loss Scale" "What the loss is multiplied by"
            [1.0, |step| f64::from(step.scale)] $metric $numeric
        }
        $crate::scaler_metrics! { @one
            /// How many steps were skipped up to this step; see [`LossScaleMetric`]. Devices that train together skip
            /// a step together, and it counts once.
            SkippedStepsMetric "Skipped Steps" "Steps skipped so far because their loss or gradients were not finite"
            [0.0, |step| step.skipped as f64] $metric $numeric
        }
    };
    (@one
        $(#[$doc:meta])* $name:ident $title:literal $description:literal
        [$before:expr, $value:expr] {$($metric:tt)*} {$($numeric:tt)*}
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(pub(super) std::sync::Arc<$crate::StepQueue>);

        impl $name {
            /// Follows these scalers: those of the training devices.
            pub fn new(scalers: impl IntoIterator<Item = GradScaler>) -> Self {
                let scalers = scalers.into_iter();
                Self($crate::StepQueue::follow(scalers.map(|scaler| scaler.shared)))
            }

            fn shown(&self) -> f64 {
                self.0.shown().map_or($before, $value)
            }
        }

        impl Metric for $name {
            type Input = ();

            fn name(&self) -> MetricName {
                std::sync::Arc::new($title.into())
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

            /// The counts continue across epochs.
            fn clear(&mut self) {}

            $($metric)*
        }

        impl Numeric for $name {
            $($numeric)*
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaler::{Findings, LossScaleConfig, LossScaler, StepOutcome};

    fn scaler() -> SharedScaler<()> {
        LossScaler::new(LossScaleConfig::default()).unwrap().into()
    }

    #[test]
    fn each_item_shows_its_own_step_and_the_newest_after_many() {
        let scaler = scaler();
        let queue = StepQueue::follow([scaler.clone()]);
        assert_eq!(queue.text("bf16"), "bf16");
        let pass = |outcome| {
            scaler.record(Some(8.0), outcome, Findings::default());
        };
        pass(StepOutcome::Finite);
        pass(StepOutcome::Overflow);
        let shown = |skipped| {
            Some(ShownStep {
                scale: 8.0,
                skipped,
            })
        };
        for skipped in [0, 1, 1] {
            queue.advance();
            assert_eq!(queue.shown(), shown(skipped));
        }
        assert_eq!(queue.text("f16"), "f16, scale 8, 1 skipped");
        (0..WAITING + 1).for_each(|_| pass(StepOutcome::Overflow));
        queue.advance();
        assert_eq!(queue.shown(), shown(WAITING as u64 + 2));
    }
}
