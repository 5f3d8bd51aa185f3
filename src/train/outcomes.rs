//! The outcomes of backward passes, for observers that follow a training run pass by pass.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::scaler::Listener;
use crate::{GradScaler, LastStep, Transition};

/// The outcomes of these scalers' steps since they were last taken. In distributed training, each
/// replica has its own thread and sees only its own passes, because the replicas' steps end at
/// different times.
#[derive(Debug)]
pub(super) struct Outcomes {
    pub scalers: Vec<GradScaler>,
    seen: Arc<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Whether the observer is an optimizer, which makes batches of passes. Steps of the explicit
    /// protocol already cover a whole window.
    makes_batches: bool,
    threads: Mutex<HashMap<ThreadId, StepsSeen>>,
}

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
    /// Follows these scalers; an optimizer `makes_batches`.
    pub fn of(scalers: impl IntoIterator<Item = GradScaler>, makes_batches: bool) -> Self {
        let scalers: Vec<_> = scalers.into_iter().collect();
        let seen = Arc::new(Seen {
            makes_batches,
            threads: Mutex::default(),
        });
        scalers.iter().for_each(|scaler| scaler.listen(&seen));
        Self { scalers, seen }
    }

    /// Takes the outcomes; for a replica, only those of its own thread.
    pub fn take(&self) -> StepsSeen {
        let is_replica = self.is_replica();
        let mut seen = self.seen.threads.lock();
        match is_replica {
            true => seen.remove(&thread::current().id()).unwrap_or_default(),
            false => StepsSeen::all(std::mem::take(&mut *seen)),
        }
    }

    pub fn is_replica(&self) -> bool {
        self.scalers.iter().any(GradScaler::is_replica)
    }

    /// Whether an optimizer reports whole batches.
    pub fn has_batches(&self) -> bool {
        self.scalers.iter().any(GradScaler::has_batches)
    }
}

/// A clone observes steps on its own.
impl Clone for Outcomes {
    fn clone(&self) -> Self {
        let copy = Self::of(self.scalers.clone(), self.seen.makes_batches);
        *copy.seen.threads.lock() = self.seen.threads.lock().clone();
        copy
    }
}

impl Seen {
    fn here(&self, change: impl FnOnce(&mut StepsSeen)) {
        change(
            self.threads
                .lock()
                .entry(thread::current().id())
                .or_default(),
        );
    }
}

impl Listener for Seen {
    fn step(&self, step: &LastStep, _: Transition, by_pass: bool) {
        if by_pass || !self.makes_batches {
            self.here(|seen| {
                seen.taken |= step.stepped();
                seen.skipped |= !step.stepped();
            });
        }
    }

    fn batch(&self, taken: bool) {
        self.here(|seen| seen.batch = Some(taken));
    }

    fn forget(&self) {
        self.threads.lock().clear();
    }

    fn makes_batches(&self) -> bool {
        self.makes_batches
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
