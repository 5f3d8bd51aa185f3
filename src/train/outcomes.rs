//! The outcomes of backward passes, for observers that follow a training run pass by pass.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn_amp_core::Listener;
use parking_lot::Mutex;

use crate::{GradScaler, LastStep};

/// The outcomes of these scalers' steps since they were last taken. In distributed training, each
/// replica has its own thread and sees only its own passes, because the replicas' steps end at
/// different times.
#[derive(Debug)]
pub(super) struct Outcomes {
    seen: Arc<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Whether the observer is an optimizer, which makes batches of passes.
    makes_batches: bool,
    scalers: Vec<GradScaler>,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default, Clone)]
struct Steps {
    /// Whether the scalers belong to replicas, since the first step. Burn ends the replicas while
    /// the last step of one is still under way.
    of_replicas: Option<bool>,
    threads: HashMap<ThreadId, StepsSeen>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct StepsSeen {
    /// Whether a pass was taken.
    pub taken: bool,
    /// Whether a pass was skipped.
    pub skipped: bool,
    /// Whether the last batch of an `AmpOptimizer` was taken.
    pub batch: Option<bool>,
    /// Whether a step of the explicit protocol was taken. It covers a whole window, and was given
    /// its learning rate.
    pub explicit: Option<bool>,
    /// Whether all passes were on other threads.
    pub elsewhere: bool,
}

impl Outcomes {
    /// Follows these scalers; an optimizer `makes_batches`.
    pub fn of(scalers: impl IntoIterator<Item = GradScaler>, makes_batches: bool) -> Self {
        let seen = Arc::new(Seen {
            makes_batches,
            scalers: scalers.into_iter().collect(),
            steps: Mutex::default(),
        });
        seen.scalers
            .iter()
            .for_each(|scaler| scaler.shared.listen(&seen));
        Self { seen }
    }

    pub fn scalers(&self) -> &[GradScaler] {
        &self.seen.scalers
    }

    /// Takes the outcomes; for a replica, only those of its own thread.
    pub fn take(&self) -> StepsSeen {
        let is_replica = self.is_replica();
        let mut steps = self.seen.steps.lock();
        match is_replica {
            true => {
                let here = steps.threads.remove(&thread::current().id());
                here.unwrap_or_default()
            }
            false => StepsSeen::all(std::mem::take(&mut steps.threads)),
        }
    }

    /// Drops the outcomes, of all threads.
    pub fn forget(&self) {
        self.seen.forget();
    }

    pub fn is_replica(&self) -> bool {
        let of_replicas = self.seen.steps.lock().of_replicas;
        of_replicas.unwrap_or_else(|| self.seen.is_replica())
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
    fn is_replica(&self) -> bool {
        self.scalers.iter().any(GradScaler::is_replica)
    }

    fn here(&self, change: impl FnOnce(&mut StepsSeen)) {
        let mut steps = self.steps.lock();
        steps.of_replicas.get_or_insert_with(|| self.is_replica());
        change(steps.threads.entry(thread::current().id()).or_default());
    }
}

impl Listener for Seen {
    fn step(&self, step: &LastStep, by_pass: bool) {
        let stepped = step.stepped();
        self.here(|seen| match by_pass {
            true => {
                seen.taken |= stepped;
                seen.skipped |= !stepped;
            }
            false => seen.explicit = Some(seen.explicit.unwrap_or(false) | stepped),
        });
    }

    fn batch(&self, taken: bool) {
        self.here(|seen| seen.batch = Some(taken));
    }

    fn forget(&self) {
        *self.steps.lock() = Steps::default();
    }

    fn makes_batches(&self) -> bool {
        self.makes_batches
    }
}

impl StepsSeen {
    fn has_passes(&self) -> bool {
        self.taken || self.skipped
    }

    fn all(seen: HashMap<ThreadId, StepsSeen>) -> Self {
        let mut all = Self::default();
        let mut here = false;
        for (thread, other) in seen {
            here |= thread == thread::current().id() && other.has_passes();
            all.taken |= other.taken;
            all.skipped |= other.skipped;
            all.batch = all.batch.or(other.batch);
            all.explicit = all.explicit.max(other.explicit);
        }
        all.elsewhere = all.has_passes() && !here;
        all
    }
}

#[cfg(test)]
mod tests {
    use burn_amp_core::NonFinite;

    use super::*;
    use crate::{LossScaleConfig, Outcome};

    /// As when the slower replica applies the last step, while Burn ends the others.
    #[test]
    fn a_replica_sees_its_own_steps_to_the_end() {
        let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
        let outcomes = Outcomes::of([scaler.clone()], false);
        let pass = || NonFinite {
            by_pass: true,
            ..NonFinite::default()
        };
        let record = |outcome| scaler.record(1.0, outcome, pass());
        scaler.set_replica(true);
        thread::scope(|scope| scope.spawn(|| record(Outcome::Overflow)).join().unwrap());
        record(Outcome::Finite);
        scaler.set_replica(false);
        let seen = outcomes.take();
        assert!(seen.taken && !seen.skipped, "{seen:?}");
        // Of devices that share a batch, an optimizer sees all.
        scaler.load_state(scaler.state());
        thread::scope(|scope| scope.spawn(|| record(Outcome::Overflow)).join().unwrap());
        record(Outcome::Finite);
        assert!(outcomes.take().skipped);
    }
}
