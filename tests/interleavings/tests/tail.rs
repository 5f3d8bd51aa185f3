//! Clones of a tensor on several threads create, share and drop the state beside it. `loom` runs
//! every order of the atomic operations, and reports a leak or a use after the last drop.

#[allow(dead_code)]
#[path = "../../../src/tensor/tail.rs"]
mod tail;

/// What `tail` is made of.
mod sync {
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::{AtomicPtr, Ordering};
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use tail::Tail;

const FLAGS: u16 = 0b101;

/// State as an operation creates it: written by the thread that shares it, read by every other.
struct State {
    written: UnsafeCell<u8>,
    /// Counts the states that were not dropped.
    alive: Arc<()>,
}

impl State {
    fn new(alive: &Arc<()>) -> Self {
        let written = UnsafeCell::new(0);
        written.with_mut(|value| unsafe { *value = 1 });
        let alive = alive.clone();
        Self { written, alive }
    }

    fn check(&self) {
        assert_eq!(self.written.with(|value| unsafe { *value }), 1);
        assert!(Arc::strong_count(&self.alive) > 1);
    }
}

/// Runs two threads on a tail, in every order.
fn on_two_threads(
    first: impl Fn(&Tail<State>, &Arc<()>) + Copy + Send + Sync + 'static,
    second: impl Fn(&Tail<State>, &Arc<()>) + Copy + Send + Sync + 'static,
) {
    loom::model(move || {
        let alive = Arc::new(());
        let tail = Arc::new(Tail::new(FLAGS));
        let other = {
            let (tail, alive) = (tail.clone(), alive.clone());
            thread::spawn(move || second(&tail, &alive))
        };
        first(&tail, &alive);
        other.join().unwrap();
        assert_eq!(tail.flags(), FLAGS);
        drop(tail);
        assert_eq!(
            Arc::strong_count(&alive),
            1,
            "the last clone drops the state"
        );
    });
}

#[test]
fn threads_that_share_at_once_share_one_value() {
    let share = |tail: &Tail<State>, alive: &Arc<()>| {
        tail.share(|| State::new(alive)).check();
        assert_eq!(tail.flags(), FLAGS);
    };
    on_two_threads(share, share);
}

#[test]
fn a_clone_is_taken_while_another_thread_shares() {
    on_two_threads(
        |tail, alive| tail.share(|| State::new(alive)).check(),
        |tail, _| {
            let clone = tail.clone();
            assert_eq!(clone.flags(), FLAGS);
            if let Some(state) = clone.shared() {
                state.check();
                assert!(!clone.is_alone(), "`tail` has the state, too");
            }
        },
    );
}

#[test]
fn clones_are_dropped_on_both_threads() {
    loom::model(|| {
        let value = Arc::new(());
        let tail = Tail::with(FLAGS, value.clone());
        let clone = tail.clone();
        let other = thread::spawn(move || drop(clone));
        assert!(tail.shared().is_some());
        drop(tail);
        other.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
    });
}
