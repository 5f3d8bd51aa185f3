//! One outcome for all replicas of a model whose gradients Burn reduces. Handles no tensors.
//!
//! Reduced gradients are the same on every replica. Losses differ, and a replica may have gradients
//! that others lack. So the replicas vote after each backward pass. They wait for each other, until a
//! replica has ended or was silent for too long.

use std::mem;
use std::time::Duration;

use burn_amp_core::{Overflow, Watched};
use burn_backend::Backend;
use parking_lot::{Condvar, Mutex};

use crate::StepOutcome;
use crate::device::{self, DeviceState};

/// The replicas of a model, one per device.
#[derive(Debug)]
pub(crate) struct Replicas {
    /// The names of the replicas' devices.
    names: Vec<String>,
    round: Mutex<Round>,
    decided: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    /// The replicas that have voted.
    voted: Vec<String>,
    vote: Option<Result<Vote, Failure>>,
    /// The previous round's outcome. Kept until all replicas have read it and voted again.
    last: Option<Result<Vote, Failure>>,
    /// The reason why no more outcomes will follow.
    failure: Option<Failure>,
}

#[derive(Debug, Clone)]
enum Failure {
    /// The thread of this replica has ended.
    #[cfg(any(test, feature = "distributed"))]
    Ended(String),
    /// These replicas were silent for this long.
    Silent(Vec<String>, Duration),
    /// Two losses of a round have these different factors. Later rounds can still have outcomes.
    Different(Option<f32>, Option<f32>),
}

impl Failure {
    fn text(&self) -> String {
        match self {
            #[cfg(any(test, feature = "distributed"))]
            Failure::Ended(name) => format!(
                "the thread of the replica on {name} has ended, by a panic or by returning, while this \
                 replica waited for it. See the error of that thread. All replicas have to take the \
                 same number of steps"
            ),
            Failure::Silent(names, timeout) => format!(
                "this replica has waited {timeout:?} for the replica on {}, without a response. If a \
                 step takes longer, raise the limit with AmpConfig::with_replica_timeout",
                names.join(", ")
            ),
            Failure::Different(one, other) => {
                let [one, other] = [one, other].map(|factor| match factor {
                    Some(1.0) => "checked and not scaled".into(),
                    Some(factor) => format!("scaled by {factor}"),
                    None => "not checked".into(),
                });
                format!(
                    "the loss of one replica is {one}, and the loss of another is {other}: their \
                     gradients do not add up. Give all devices the same precision and loss scale, and the \
                     same AmpConfig::with_finite_check"
                )
            }
        }
    }
}

/// A replica's vote on a backward pass.
#[derive(Debug, Clone, PartialEq)]
struct Vote {
    /// The factor on the replica's loss, 1 where it is only checked; `None` where nothing is checked.
    factor: Option<f32>,
    outcome: StepOutcome,
    /// What overflowed. All replicas get the same exceptions in the same step.
    overflows: Vec<Overflow>,
}

impl Vote {
    /// Combines two votes: a value is finite only if it is finite on every replica.
    fn and(mut self, other: Self) -> Result<Self, Failure> {
        if self.factor != other.factor {
            return Err(Failure::Different(self.factor, other.factor));
        }
        for overflow in other.overflows {
            if !self.overflows.contains(&overflow) {
                self.overflows.push(overflow);
            }
        }
        Ok(Self {
            outcome: self.outcome.max(other.outcome),
            ..self
        })
    }
}

impl Replicas {
    #[cfg(any(test, feature = "distributed"))]
    pub(crate) fn new(names: Vec<String>) -> Self {
        Self {
            names,
            round: Mutex::default(),
            decided: Condvar::new(),
        }
    }

    /// Waits for the votes of all replicas and returns the combined vote. `name` is the name of
    /// this replica's device.
    ///
    /// # Panics
    ///
    /// - On every replica, if their scales differ: gradients of different scales were added up.
    /// - On every other replica, if one has ended or was silent for `timeout`.
    fn agree(&self, name: &str, timeout: Duration, vote: Vote) -> Vote {
        match self.vote(name, timeout, vote) {
            Ok(vote) => vote,
            Err(failure) => panic!("burn-amp: in distributed training, {}", failure.text()),
        }
    }

    fn vote(&self, name: &str, timeout: Duration, vote: Vote) -> Result<Vote, Failure> {
        let mut round = self.round.lock();
        if let Some(failure) = &round.failure {
            return Err(failure.clone());
        }
        round.vote = Some(match round.vote.take() {
            None => Ok(vote),
            Some(votes) => votes.and_then(|votes| votes.and(vote)),
        });
        round.voted.push(name.into());
        let number = round.number;
        if round.voted.len() == self.names.len() {
            *round = Round {
                number: number + 1,
                last: round.vote.take(),
                ..Round::default()
            };
            self.decided.notify_all();
        }
        let undecided = |round: &mut Round| round.number == number && round.failure.is_none();
        self.decided.wait_while_for(&mut round, undecided, timeout);
        if undecided(&mut round) {
            let mut silent = self.names.clone();
            silent.retain(|name| !round.voted.contains(name));
            round.failure = Some(Failure::Silent(silent, timeout));
            self.decided.notify_all();
        }
        match &round.failure {
            Some(failure) if round.number == number => Err(failure.clone()),
            _ => round.last.clone().expect("a round was decided"),
        }
    }

    /// Tells the other replicas to stop waiting for this one, because its thread ends.
    #[cfg(any(test, feature = "distributed"))]
    fn leave(&self, name: &str) {
        let mut round = self.round.lock();
        round.failure.get_or_insert(Failure::Ended(name.into()));
        self.decided.notify_all();
    }
}

/// The outcome that the replicas agree on, for a pass that is checked and whose loss was multiplied by `factor`, or
/// for one that is not checked. Without replicas, `outcome` itself. What one replica `watched` overflows is then found on
/// all.
pub(crate) fn agreed<B: Backend>(
    replicas: Option<&Replicas>,
    device: &B::Device,
    factor: Option<f32>,
    outcome: StepOutcome,
    watched: &mut Watched,
) -> StepOutcome {
    let Some(replicas) = replicas else {
        return outcome;
    };
    let timeout = DeviceState::of::<B>(device)
        .in_force::<B>(device)
        .replica_timeout;
    let vote = Vote {
        factor,
        outcome,
        overflows: mem::take(&mut watched.overflows),
    };
    let vote = replicas.agree(&device::name::<B>(device), timeout, vote);
    watched.overflows = vote.overflows;
    watched
        .overflows
        .sort_by_key(|overflow| (overflow.op, overflow.length));
    vote.outcome
}

#[cfg(feature = "distributed")]
pub(crate) use joined::join;

#[cfg(feature = "distributed")]
mod joined {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::Replicas;

    /// The replica on this thread, set when its first parameter is registered.
    struct Joined {
        replicas: Arc<Replicas>,
        name: String,
    }

    impl Drop for Joined {
        fn drop(&mut self) {
            self.replicas.leave(&self.name);
        }
    }

    thread_local! {
        /// Dropped with the thread, so that a panic anywhere in a replica is noticed.
        static JOINED: RefCell<Option<Joined>> = const { RefCell::new(None) };
    }

    /// Makes this thread the replica of this name. When the thread ends, the others are notified.
    pub(crate) fn join(replicas: Arc<Replicas>, name: String) {
        JOINED.with_borrow_mut(|joined| {
            let is_new = |joined: &Joined| !Arc::ptr_eq(&joined.replicas, &replicas);
            if joined.as_ref().is_none_or(is_new) {
                *joined = Some(Joined { replicas, name });
            }
        });
    }
}

#[cfg(feature = "distributed")]
pub(crate) use started::{of, start, stop};

/// One set of replicas per backend, as Burn has one server per backend.
#[cfg(feature = "distributed")]
mod started {
    use std::any::TypeId;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use burn_backend::Backend;
    use parking_lot::Mutex;

    use super::Replicas;
    use crate::device;

    static STARTED: Mutex<BTreeMap<TypeId, Arc<Replicas>>> = Mutex::new(BTreeMap::new());

    /// The replicas on a backend.
    pub(crate) fn of<B: Backend>() -> Option<Arc<Replicas>> {
        STARTED.lock().get(&TypeId::of::<B>()).cloned()
    }

    /// Starts one replica on each of these devices.
    pub(crate) fn start<B: Backend>(devices: &[B::Device]) {
        let names = devices.iter().map(device::name::<B>).collect();
        let replicas = Arc::new(Replicas::new(names));
        STARTED.lock().insert(TypeId::of::<B>(), replicas);
    }

    pub(crate) fn stop<B: Backend>() {
        STARTED.lock().remove(&TypeId::of::<B>());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;
    use std::time::Duration;

    use burn_amp_core::{Overflow, Overflowed};

    use super::{Replicas, Vote};
    use crate::StepOutcome;

    const LONG: Duration = Duration::from_secs(60);

    fn replicas(count: usize) -> Replicas {
        Replicas::new((0..count).map(|i| format!("device {i}")).collect())
    }

    /// Each numbered replica votes on its own thread. Returns each replica's answer.
    fn told_of(
        replicas: &Replicas,
        timeout: Duration,
        votes: impl IntoIterator<Item = (usize, Vote)>,
    ) -> Vec<Result<Vote, String>> {
        thread::scope(|scope| {
            let each = |(i, vote): (usize, Vote)| {
                scope.spawn(move || {
                    let agree = || replicas.agree(&format!("device {i}"), timeout, vote);
                    catch_unwind(AssertUnwindSafe(agree))
                        .map_err(|panic| panic.downcast_ref::<String>().unwrap().clone())
                })
            };
            let replicas: Vec<_> = votes.into_iter().map(each).collect();
            replicas.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    fn vote(loss_is_finite: bool, gradients_are_finite: bool) -> Vote {
        Vote {
            factor: Some(8.0),
            outcome: StepOutcome::of(loss_is_finite, gradients_are_finite),
            overflows: Vec::new(),
        }
    }

    /// Each replica's answer after these votes.
    fn told(replicas: &Replicas, votes: &[Vote]) -> Vec<Result<Vote, String>> {
        told_of(replicas, LONG, votes.iter().cloned().enumerate())
    }

    #[test]
    fn one_that_ends_wakes_the_others() {
        let replicas = &replicas(3);
        let fine = || vote(true, true);
        let told = thread::scope(|scope| {
            let others = scope.spawn(|| told_of(replicas, LONG, [(0, fine()), (2, fine())]));
            // The others may be waiting already or may not have voted yet.
            thread::sleep(Duration::from_millis(20));
            replicas.leave("device 1");
            others.join().unwrap()
        });
        for told in told {
            let text = told.unwrap_err();
            assert!(text.contains("the replica on device 1 has ended"), "{text}");
        }
        // A replica that votes later does not wait either.
        let later = told_of(replicas, LONG, [(0, fine())]).remove(0);
        assert!(later.unwrap_err().contains("device 1"));
    }

    #[test]
    fn one_that_ends_after_the_last_step_is_no_failure() {
        let replicas = &replicas(4);
        for _ in 0..200 {
            let fine = (0..4).map(|i| (i, vote(true, true)));
            let told = told_of(replicas, LONG, fine);
            assert!(told.iter().all(Result::is_ok), "{told:?}");
        }
        replicas.leave("device 3");
    }

    #[test]
    fn one_that_is_silent_is_given_up() {
        let replicas = replicas(3);
        let fine = || vote(true, true);
        let short = Duration::from_millis(30);
        for told in told_of(&replicas, short, [(0, fine()), (1, fine())]) {
            let text = told.unwrap_err();
            for part in ["30ms", "device 2", "with_replica_timeout"] {
                assert!(text.contains(part), "{text}");
            }
            assert!(
                !text.contains("device 0") && !text.contains("device 1"),
                "{text}"
            );
        }
        // If the silent replica votes after all, it does not wait either.
        let late = told_of(&replicas, LONG, [(2, fine())]).remove(0);
        assert!(late.is_err());
    }

    #[test]
    fn one_that_is_not_finite_is_so_for_all() {
        let replicas = replicas(3);
        let fine = || vote(true, true);
        for (odd, outcome) in [
            (fine(), StepOutcome::Finite),
            (vote(true, false), StepOutcome::Overflow),
            (vote(false, true), StepOutcome::NonFiniteLoss),
            (vote(false, false), StepOutcome::NonFiniteLoss),
        ] {
            for at in 0..3 {
                let mut votes = [fine(), fine(), fine()];
                votes[at] = odd.clone();
                let told = told(&replicas, &votes);
                assert!(
                    told.iter()
                        .all(|told| told.as_ref().unwrap().outcome == outcome)
                );
            }
        }
        let mixed = [vote(false, true), vote(true, false), fine()];
        let told = told(&replicas, &mixed);
        assert!(told.iter().all(|told| *told == Ok(vote(false, false))));
    }

    #[test]
    fn what_overflows_on_one_is_found_on_all() {
        let replicas = replicas(3);
        let overflow = |length| Overflow {
            op: "float_matmul",
            length,
            of: Overflowed::Result,
        };
        let of = |overflows| Vote {
            overflows,
            ..vote(false, true)
        };
        let votes = [
            of(vec![overflow(8)]),
            of(vec![]),
            of(vec![overflow(8), overflow(9)]),
        ];
        for told in told(&replicas, &votes) {
            let mut all = told.unwrap().overflows;
            all.sort_by_key(|overflow| overflow.length);
            assert_eq!(all, [overflow(8), overflow(9)]);
        }
    }

    #[test]
    fn different_scales_are_an_error_everywhere_and_the_next_round_is_none() {
        let replicas = replicas(2);
        let votes = [
            vote(true, true),
            Vote {
                factor: Some(4.0),
                ..vote(true, true)
            },
        ];
        for told in told(&replicas, &votes) {
            let message = told.unwrap_err();
            assert!(message.contains("do not add up"), "{message}");
            assert!(message.contains('8') && message.contains('4'), "{message}");
        }
        let votes = [None, Some(1.0)].map(|factor| Vote {
            factor,
            ..vote(true, true)
        });
        for told in told(&replicas, &votes) {
            let message = told.unwrap_err();
            let both =
                message.contains("not checked") && message.contains("checked and not scaled");
            assert!(both && message.contains("with_finite_check"), "{message}");
        }
        assert_eq!(
            told(&replicas, &[vote(true, true), vote(true, true)]),
            [Ok(vote(true, true)), Ok(vote(true, true))]
        );
    }

    #[test]
    fn rounds_do_not_mix() {
        let replicas = &replicas(4);
        let overflows = |replica: usize, step: usize| step % 7 == replica;
        thread::scope(|scope| {
            for replica in 0..4 {
                scope.spawn(move || {
                    for step in 0..500 {
                        let vote = vote(true, !overflows(replica, step));
                        let told = replicas.agree(&format!("device {replica}"), LONG, vote);
                        let any = (0..4).any(|replica| overflows(replica, step));
                        assert_eq!(told.outcome == StepOutcome::Finite, !any);
                    }
                });
            }
        });
    }
}
