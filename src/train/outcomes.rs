//! What became of the passes of a training, for those who follow it from pass to pass.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::scaler::Listener;
use crate::{LastStep, Transition};

/// What was heard since one last asked, by the thread on which it happened.
///
/// A training on one device asks on the thread of its passes, and so does each replica of a
/// distributed one. One on several devices asks on the thread that waits for theirs.
#[derive(Debug, Default)]
pub(super) struct Outcomes(Mutex<HashMap<ThreadId, Heard>>);

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Heard {
    /// Whether a pass was taken.
    pub taken: bool,
    /// Whether one was skipped.
    pub skipped: bool,
    /// Whether the last batch of an `AmpOptimizer` was taken.
    pub batch: Option<bool>,
    /// Whether all of it happened on other threads.
    pub elsewhere: bool,
}

impl Outcomes {
    /// What was heard, once; by a replica, on its own thread.
    pub fn take(&self, is_replica: bool) -> Heard {
        let mut heard = self.lock();
        match heard.remove(&thread::current().id()) {
            Some(here) => here,
            None if is_replica => Heard::default(),
            None => Heard::elsewhere(heard.drain().map(|(_, heard)| heard)),
        }
    }

    /// The same, which is still there to be taken.
    pub fn look(&self, is_replica: bool) -> Heard {
        let heard = self.lock();
        match heard.get(&thread::current().id()) {
            Some(here) => *here,
            None if is_replica => Heard::default(),
            None => Heard::elsewhere(heard.values().copied()),
        }
    }

    /// What happened so far, for somebody else.
    pub fn copied(&self) -> Self {
        Self(Mutex::new(self.lock().clone()))
    }

    /// A pass ended.
    pub fn hear(&self, step: &LastStep) {
        self.here(|heard| {
            heard.taken |= step.stepped();
            heard.skipped |= !step.stepped();
        });
    }

    fn here(&self, change: impl FnOnce(&mut Heard)) {
        change(self.lock().entry(thread::current().id()).or_default());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ThreadId, Heard>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for Outcomes {
    fn step(&self, step: &LastStep, _: Transition) {
        self.hear(step);
    }

    fn batch(&self, taken: bool) {
        self.here(|heard| heard.batch = Some(taken));
    }

    fn forget(&self) {
        self.lock().clear();
    }
}

impl Heard {
    fn elsewhere(others: impl Iterator<Item = Heard>) -> Self {
        others.fold(Self::default(), |all, other| Self {
            taken: all.taken || other.taken,
            skipped: all.skipped || other.skipped,
            batch: all.batch.or(other.batch),
            elsewhere: true,
        })
    }

    /// Whether nothing was heard.
    pub fn is_nothing(&self) -> bool {
        !self.taken && !self.skipped && self.batch.is_none()
    }
}
