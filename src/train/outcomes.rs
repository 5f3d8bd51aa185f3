//! The outcomes of backward passes, for observers that follow a training run pass by pass.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::scaler::Listener;
use crate::{LastStep, Transition};

/// The outcomes since they were last taken. In distributed training, each replica has its own
/// thread and sees only its own passes, because the replicas' steps end at different times.
#[derive(Debug, Default)]
pub(super) struct Outcomes(Mutex<HashMap<ThreadId, StepsSeen>>);

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct StepsSeen {
    /// Whether a pass was taken.
    pub taken: bool,
    /// Whether a pass was skipped.
    pub skipped: bool,
    /// Whether the last batch of an `AmpOptimizer` was taken.
    pub batch: Option<bool>,
    /// Whether everything happened on other threads.
    pub elsewhere: bool,
}

impl Outcomes {
    /// Takes the outcomes; for a replica, only those of its own thread.
    pub fn take(&self, is_replica: bool) -> StepsSeen {
        let mut seen = self.0.lock();
        match is_replica {
            true => seen.remove(&thread::current().id()).unwrap_or_default(),
            false => StepsSeen::all(std::mem::take(&mut *seen)),
        }
    }

    /// Like `take`, but leaves the outcomes in place.
    pub fn look(&self, is_replica: bool) -> StepsSeen {
        let seen = self.0.lock();
        match is_replica {
            true => seen
                .get(&thread::current().id())
                .copied()
                .unwrap_or_default(),
            false => StepsSeen::all(seen.clone()),
        }
    }

    /// A copy of the outcomes, for another observer.
    pub fn copied(&self) -> Self {
        Self(Mutex::new(self.0.lock().clone()))
    }

    /// Records the outcome of a pass.
    pub fn see(&self, step: &LastStep) {
        self.here(|seen| {
            seen.taken |= step.stepped();
            seen.skipped |= !step.stepped();
        });
    }

    fn here(&self, change: impl FnOnce(&mut StepsSeen)) {
        change(self.0.lock().entry(thread::current().id()).or_default());
    }
}

impl Listener for Outcomes {
    fn step(&self, step: &LastStep, _: Transition) {
        self.see(step);
    }

    fn batch(&self, taken: bool) {
        self.here(|seen| seen.batch = Some(taken));
    }

    fn forget(&self) {
        self.0.lock().clear();
    }
}

impl StepsSeen {
    fn all(seen: HashMap<ThreadId, StepsSeen>) -> Self {
        let elsewhere = !seen.is_empty() && !seen.contains_key(&thread::current().id());
        let mut all = Self {
            elsewhere,
            ..Self::default()
        };
        for other in seen.into_values() {
            all.taken |= other.taken;
            all.skipped |= other.skipped;
            all.batch = all.batch.or(other.batch);
        }
        all
    }
}
