//! The steps of the explicit protocol whose handle was dropped before their end.

use std::sync::{Arc, Weak};

use super::PendingStep;

/// So many are kept: a program that drops its steps does not keep their losses for ever.
const KEPT: usize = 64;

thread_local! {
    /// Lives as long as its thread.
    static THREAD: Arc<()> = Arc::default();
}

/// This thread; as if it had ended, while its locals are dropped.
fn this_thread() -> Weak<()> {
    THREAD.try_with(Arc::downgrade).unwrap_or_default()
}

/// Steps under way, each with the thread that dropped its handle.
pub(super) struct LeftSteps<L>(Vec<(Weak<()>, PendingStep<L>)>);

impl<L> Default for LeftSteps<L> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<L> LeftSteps<L> {
    /// Keeps a step. Returns the oldest one if it is one too many: dropped, its losses may wait for a device.
    #[must_use = "drop it without a lock"]
    pub fn push(&mut self, step: PendingStep<L>) -> Option<PendingStep<L>> {
        let oldest = (self.0.len() == KEPT).then(|| self.take(0));
        self.0.push((this_thread(), step));
        oldest
    }

    /// The place of this thread's last step.
    pub fn of_this_thread(&self) -> Option<usize> {
        let this = this_thread();
        self.0.iter().rposition(|(thread, _)| thread.ptr_eq(&this))
    }

    /// The place of the only step of this thread; if it has none, of the threads that still run; if they have none,
    /// of all. An error is the number of several.
    pub fn only(&self) -> Result<Option<usize>, usize> {
        let this = this_thread();
        let places = |of: &dyn Fn(&Weak<()>) -> bool| -> Vec<usize> {
            let places = 0..self.0.len();
            places.filter(|&place| of(&self.0[place].0)).collect()
        };
        let own = places(&|thread| thread.ptr_eq(&this));
        let running = places(&|thread| thread.strong_count() > 0);
        let all = places(&|_| true);
        let first = [own, running, all].into_iter().find(|of| !of.is_empty());
        match first.as_deref() {
            None => Ok(None),
            Some(&[place]) => Ok(Some(place)),
            Some(several) => Err(several.len()),
        }
    }

    pub fn at(&self, place: usize) -> &PendingStep<L> {
        &self.0[place].1
    }

    pub fn take(&mut self, place: usize) -> PendingStep<L> {
        self.0.remove(place).1
    }

    /// Forgets the steps of this thread and of threads that have ended, and returns them.
    #[must_use = "drop them without a lock"]
    pub fn forget(&mut self) -> Self {
        let this = this_thread();
        let is_forgotten =
            |(thread, _): &mut (Weak<()>, _)| thread.strong_count() == 0 || thread.ptr_eq(&this);
        Self(self.0.extract_if(.., is_forgotten).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;
    use crate::{LossScaleConfig, LossScaler};

    /// A step at this scale.
    fn step(scale: f32) -> PendingStep<()> {
        let mut step = PendingStep::default();
        step.scale(&LossScaler::new(LossScaleConfig::Fixed(scale)).unwrap());
        step
    }

    fn only(left: &mut LeftSteps<()>) -> Result<Option<f32>, usize> {
        let place = left.only()?;
        Ok(place.and_then(|place| left.take(place).scale_given()))
    }

    #[test]
    fn this_threads_only_step_comes_first_then_a_running_threads_only_one_then_the_only_one() {
        let left = Mutex::new(LeftSteps::default());
        let push = |scale| drop(left.lock().unwrap().push(step(scale)));
        let on_ended_thread = |scale| thread::scope(|on| on.spawn(|| push(scale)).join().unwrap());
        assert_eq!(only(&mut left.lock().unwrap()), Ok(None));
        on_ended_thread(1.0);
        on_ended_thread(2.0);
        assert_eq!(only(&mut left.lock().unwrap()), Err(2));
        thread::scope(|on| {
            let (done, when_done) = std::sync::mpsc::channel::<()>();
            let (pushed, when_pushed) = std::sync::mpsc::channel();
            let push = &push;
            on.spawn(move || {
                push(4.0);
                pushed.send(()).unwrap();
                let _ = when_done.recv();
            });
            when_pushed.recv().unwrap();
            push(8.0);
            push(16.0);
            let mut left = left.lock().unwrap();
            assert_eq!(only(&mut left), Err(2));
            let own = left.of_this_thread().unwrap();
            assert_eq!(left.take(own).scale_given(), Some(16.0));
            assert_eq!(only(&mut left), Ok(Some(8.0)));
            assert_eq!(left.of_this_thread(), None);
            assert_eq!(only(&mut left), Ok(Some(4.0)));
            drop(done);
        });
        assert_eq!(only(&mut left.lock().unwrap()), Err(2));
        let forgotten = left.lock().unwrap().forget();
        assert_eq!(forgotten.0.len(), 2);
        on_ended_thread(32.0);
        assert_eq!(only(&mut left.lock().unwrap()), Ok(Some(32.0)));
    }

    #[test]
    fn the_oldest_are_dropped() {
        let mut left = LeftSteps::default();
        let push = |i| left.push(step(1.0 + i as f32));
        let oldest: Vec<_> = (0..KEPT + 2).filter_map(push).collect();
        let scales: Vec<_> = oldest.iter().map(PendingStep::scale_given).collect();
        assert_eq!(scales, [Some(1.0), Some(2.0)]);
        assert_eq!(left.0.len(), KEPT);
        assert_eq!(left.0[0].1.scale_given(), Some(3.0));
    }
}
