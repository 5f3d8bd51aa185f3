//! One outcome for all replicas of a model whose gradients Burn reduces. Knows no tensor.
//!
//! What is reduced is the same on every replica, but a loss is not, nor is a gradient that only
//! some of them have. So they vote after each backward pass, and wait for each other.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::scaler::Outcome;

/// The replicas of a model, one a device.
#[derive(Debug)]
pub(crate) struct Replicas {
    count: usize,
    round: Mutex<Round>,
    decided: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    votes: usize,
    vote: Option<Result<Vote, Different>>,
    /// The outcome of the round before. It stays until all have voted again, and have read it.
    last: Option<Result<Vote, Different>>,
}

/// What a replica found in a backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Vote {
    /// What its loss was multiplied with, if it was.
    pub scale: Option<f32>,
    pub loss_is_finite: bool,
    pub gradients_are_finite: bool,
}

/// Two scales in one round.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Different(Option<f32>, Option<f32>);

impl Vote {
    /// Of a pass that scales, and where nothing is checked yet.
    pub(crate) fn scaled(scale: Option<f32>) -> Self {
        Self {
            scale,
            loss_is_finite: true,
            gradients_are_finite: true,
        }
    }

    pub(crate) fn outcome(self) -> Outcome {
        Outcome::of(self.loss_is_finite, self.gradients_are_finite)
    }

    /// What is finite is so on every replica.
    fn and(self, other: Self) -> Result<Self, Different> {
        match self.scale == other.scale {
            false => Err(Different(self.scale, other.scale)),
            true => Ok(Self {
                scale: self.scale,
                loss_is_finite: self.loss_is_finite && other.loss_is_finite,
                gradients_are_finite: self.gradients_are_finite && other.gradients_are_finite,
            }),
        }
    }
}

impl Replicas {
    #[cfg(any(test, feature = "distributed"))]
    pub(crate) fn new(count: usize) -> Self {
        Self {
            count,
            round: Mutex::default(),
            decided: Condvar::new(),
        }
    }

    /// Waits for the votes of all replicas, and gives what they come to.
    ///
    /// # Panics
    ///
    /// On every replica, when their scales differ: gradients of different scales were added up.
    pub(crate) fn agree(&self, vote: Vote) -> Vote {
        let mut round = self.round.lock().unwrap_or_else(PoisonError::into_inner);
        round.vote = Some(match round.vote.take() {
            None => Ok(vote),
            Some(votes) => votes.and_then(|votes| votes.and(vote)),
        });
        round.votes += 1;
        if round.votes == self.count {
            *round = Round {
                number: round.number + 1,
                last: round.vote,
                ..Round::default()
            };
            self.decided.notify_all();
        } else {
            let number = round.number;
            let decided = self.decided.wait_while(round, |r| r.number == number);
            round = decided.unwrap_or_else(PoisonError::into_inner);
        }
        let last = round.last.expect("a round was decided");
        drop(round);
        last.unwrap_or_else(|Different(one, other)| {
            let text = |scale: Option<f32>| match scale {
                Some(scale) => format!("scaled by {scale}"),
                None => "not scaled".into(),
            };
            panic!(
                "burn-amp: of the replicas of a distributed training, the loss of one is {}, that of \
                 another {}: their gradients do not add up. Give all devices the same precision and \
                 loss scale",
                text(one),
                text(other)
            )
        })
    }
}

/// What the replicas agree on, if there are any.
pub(crate) fn agreed(replicas: Option<&Replicas>, vote: Vote) -> Vote {
    match replicas {
        Some(replicas) => replicas.agree(vote),
        None => vote,
    }
}

#[cfg(feature = "distributed")]
pub(crate) use started::{of, start, stop};

/// Burn has one server for the replicas of a backend, and so do we.
#[cfg(feature = "distributed")]
mod started {
    use std::any::TypeId;
    use std::collections::HashMap;
    use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

    use burn_backend::Backend;

    use super::Replicas;
    use crate::GradScaler;

    struct Started {
        replicas: Arc<Replicas>,
        scalers: Vec<GradScaler>,
    }

    static STARTED: LazyLock<Mutex<HashMap<TypeId, Started>>> = LazyLock::new(Mutex::default);

    /// The replicas on a backend.
    pub(crate) fn of<B: Backend>() -> Option<Arc<Replicas>> {
        let started = lock();
        let started = started.get(&TypeId::of::<B>())?;
        Some(started.replicas.clone())
    }

    /// From now on these are the scalers of replicas.
    pub(crate) fn start<B: Backend>(scalers: Vec<GradScaler>) {
        stop::<B>();
        scalers.iter().for_each(|scaler| scaler.set_replica(true));
        let replicas = Arc::new(Replicas::new(scalers.len()));
        let started = Started { replicas, scalers };
        lock().insert(TypeId::of::<B>(), started);
    }

    pub(crate) fn stop<B: Backend>() {
        if let Some(started) = lock().remove(&TypeId::of::<B>()) {
            let scalers = started.scalers.iter();
            scalers.for_each(|scaler| scaler.set_replica(false));
        }
    }

    fn lock() -> MutexGuard<'static, HashMap<TypeId, Started>> {
        STARTED.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::{Replicas, Vote, agreed};
    use crate::scaler::Outcome;

    fn vote(loss_is_finite: bool, gradients_are_finite: bool) -> Vote {
        Vote {
            scale: Some(8.0),
            loss_is_finite,
            gradients_are_finite,
        }
    }

    /// What each replica is told, if these are their votes.
    fn told(replicas: &Replicas, votes: &[Vote]) -> Vec<Result<Vote, String>> {
        thread::scope(|scope| {
            let each = |vote: &Vote| {
                let vote = *vote;
                scope.spawn(move || {
                    catch_unwind(AssertUnwindSafe(|| replicas.agree(vote)))
                        .map_err(|panic| panic.downcast_ref::<String>().unwrap().clone())
                })
            };
            let replicas: Vec<_> = votes.iter().map(each).collect();
            replicas.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn one_that_is_not_finite_is_so_for_all() {
        let replicas = Replicas::new(3);
        let fine = vote(true, true);
        for (odd, outcome) in [
            (fine, Outcome::Finite),
            (vote(true, false), Outcome::Overflow),
            (vote(false, true), Outcome::NonFiniteLoss),
            (vote(false, false), Outcome::NonFiniteLoss),
        ] {
            for at in 0..3 {
                let mut votes = [fine; 3];
                votes[at] = odd;
                let told = told(&replicas, &votes);
                assert!(
                    told.iter()
                        .all(|told| told.as_ref().unwrap().outcome() == outcome)
                );
            }
        }
        let mixed = [vote(false, true), vote(true, false), fine];
        let told = told(&replicas, &mixed);
        assert!(told.iter().all(|told| *told == Ok(vote(false, false))));
    }

    #[test]
    fn different_scales_are_an_error_everywhere_and_the_next_round_is_none() {
        let replicas = Replicas::new(2);
        let votes = [
            vote(true, true),
            Vote {
                scale: Some(4.0),
                ..vote(true, true)
            },
        ];
        for told in told(&replicas, &votes) {
            let message = told.unwrap_err();
            assert!(message.contains("do not add up"), "{message}");
            assert!(message.contains('8') && message.contains('4'), "{message}");
        }
        assert_eq!(
            told(&replicas, &[vote(true, true); 2]),
            [Ok(vote(true, true)), Ok(vote(true, true))]
        );
    }

    #[test]
    fn rounds_do_not_mix() {
        let replicas = &Replicas::new(4);
        let overflows = |replica: usize, step: usize| step % 7 == replica;
        thread::scope(|scope| {
            for replica in 0..4 {
                scope.spawn(move || {
                    for step in 0..500 {
                        let told = replicas.agree(vote(true, !overflows(replica, step)));
                        let any = (0..4).any(|replica| overflows(replica, step));
                        assert_eq!(told.gradients_are_finite, !any);
                    }
                });
            }
        });
    }

    #[test]
    fn without_replicas_a_vote_is_ones_own() {
        assert_eq!(agreed(None, vote(true, false)), vote(true, false));
        assert_eq!(Vote::scaled(None).outcome(), Outcome::Finite);
    }
}
