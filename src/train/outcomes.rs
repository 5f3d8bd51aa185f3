//! The outcomes of steps between two calls of an optimizer or a scheduler.

use std::collections::HashMap;
use std::sync::Arc;

use burn_amp_core::{Listener, RecordedStep};
use parking_lot::Mutex;

use crate::GradScaler;
use crate::autodiff::replicas;

/// The outcomes of these scalers' steps since they were last taken. A replica sees only its own
/// passes, because the replicas' steps end at different times.
#[derive(Debug)]
pub(super) struct Outcomes {
    seen: Arc<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Whether the observer is an optimizer, which makes batches of passes.
    makes_batches: bool,
    scalers: Vec<GradScaler>,
    /// The steps of each replica.
    steps: Mutex<HashMap<Option<String>, Steps>>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Steps {
    /// Whether a backward pass began, in any precision.
    pub begun: bool,
    /// Whether a backward pass was taken.
    pub taken: bool,
    /// Whether a backward pass was skipped.
    pub skipped: bool,
    /// Whether the last learning rate was used, if an optimizer has decided on it: an `AmpOptimizer` on
    /// a batch, or the explicit protocol on its window.
    pub batch: Option<bool>,
}

impl Outcomes {
    /// Follows these scalers; an optimizer `makes_batches`.
    pub fn of(scalers: impl IntoIterator<Item = GradScaler>, makes_batches: bool) -> Self {
        let seen = Arc::new(Seen {
            makes_batches,
            scalers: scalers.into_iter().collect(),
            steps: Mutex::default(),
        });
        let scalers = seen.scalers.iter();
        scalers.for_each(|scaler| scaler.shared.listen(&seen));
        Self { seen }
    }

    pub fn scalers(&self) -> &[GradScaler] {
        &self.seen.scalers
    }

    /// Takes the outcomes; on a replica, not those of other replicas.
    pub fn take(&self) -> Steps {
        let here = replicas::here();
        let mut all = Steps::default();
        self.seen.steps.lock().retain(|replica, steps| {
            let elsewhere = here.is_some() && replica.is_some() && *replica != here;
            if !elsewhere {
                all.add(*steps);
            }
            elsewhere
        });
        all
    }

    /// Drops the outcomes, also those of other replicas.
    pub fn forget(&self) {
        self.seen.forget();
    }

    /// Whether an optimizer reports whole batches.
    pub fn has_batches(&self) -> bool {
        self.scalers().iter().any(GradScaler::has_batches)
    }
}

/// A clone observes steps on its own.
impl Clone for Outcomes {
    fn clone(&self) -> Self {
        let copy = Self::of(self.scalers().to_vec(), self.seen.makes_batches);
        *copy.seen.steps.lock() = self.seen.steps.lock().clone();
        copy
    }
}

impl Seen {
    fn add(&self, steps: Steps) {
        let mut all = self.steps.lock();
        all.entry(replicas::here()).or_default().add(steps);
    }
}

impl Listener for Seen {
    fn begun(&self) {
        self.add(Steps {
            begun: true,
            ..Steps::default()
        });
    }

    fn recorded(&self, recorded: &RecordedStep) {
        let taken = recorded.step.stepped();
        self.add(if recorded.by_pass {
            Steps {
                taken,
                skipped: !taken,
                ..Steps::default()
            }
        } else {
            let batch = Some(taken);
            Steps {
                batch,
                ..Steps::default()
            }
        });
    }

    fn batch(&self, taken: bool) {
        let batch = Some(taken);
        self.add(Steps {
            batch,
            ..Steps::default()
        });
    }

    fn forget(&self) {
        self.steps.lock().clear();
    }

    fn makes_batches(&self) -> bool {
        self.makes_batches
    }
}

impl Steps {
    pub fn has_passes(&self) -> bool {
        self.taken || self.skipped
    }

    fn add(&mut self, other: Self) {
        self.begun |= other.begun;
        self.taken |= other.taken;
        self.skipped |= other.skipped;
        self.batch = self.batch.max(other.batch);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn_amp_core::Findings;

    use super::*;
    use crate::autodiff::replicas::Replicas;
    use crate::{LossScaleConfig, StepOutcome};

    #[test]
    fn a_replica_sees_its_own_steps_and_any_other_thread_sees_all() {
        let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
        let outcomes = Outcomes::of([scaler.clone()], false);
        let [clone, other] = [(); 2].map(|()| outcomes.clone());
        let replicas = Arc::new(Replicas::new(vec!["a".into(), "b".into()]));
        let pass = |outcome| scaler.record_pass(1.0, outcome, Findings::default());
        thread::scope(|scope| {
            let skips = || {
                replicas::join(replicas.clone(), "a".into());
                pass(StepOutcome::Overflow);
            };
            scope.spawn(skips).join().unwrap();
            let takes = || {
                replicas::join(replicas.clone(), "b".into());
                pass(StepOutcome::Finite);
                let seen = outcomes.take();
                assert!(seen.taken && !seen.skipped, "{seen:?}");
                assert!(!outcomes.take().has_passes());
            };
            scope.spawn(takes).join().unwrap();
        });
        // Devices that share a batch have threads of their own, too.
        let seen = clone.take();
        assert!(seen.taken && seen.skipped, "{seen:?}");
        other.forget();
        assert!(!other.take().has_passes());
    }

    #[test]
    fn a_learning_rate_that_was_used_once_was_used() {
        let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
        let outcomes = Outcomes::of([scaler.clone()], true);
        for taken in [true, false] {
            scaler.batch(taken);
        }
        assert_eq!(outcomes.take().batch, Some(true));
        scaler.batch(false);
        assert_eq!(outcomes.take().batch, Some(false));
        assert_eq!(outcomes.take().batch, None);
    }
}
