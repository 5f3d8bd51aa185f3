//! f16 that mends itself: an operation that overflows f16 at any loss scale becomes an exception of its device.
//! Independent of tensors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{DynamicLossScale, Listener, LossScaleConfig, RecordedStep, StepOutcome, Transition};
use crate::exceptions::{Exceptions, News};

/// An operation that a watched pass found: finite values went in, and values that are not finite came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    /// The operation of the forward pass.
    pub op: &'static str,
    /// The terms of a sum of a contraction, or the last dimension.
    pub length: usize,
    /// What was not finite.
    pub of: Overflowed,
}

/// What is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflowed {
    /// The result of the operation, computed in f16 or from operands in f16.
    Result,
    /// The gradient of its result, or of an operand that it casts to f16.
    Gradient,
    /// The result, although the call is an exception and in FP32: no precision mends it.
    InFp32,
    /// The gradient of such a result. What reads the result may be in f16, and need a lower loss scale.
    GradientInFp32,
}

/// Watches passes on a device that the loss scale does not mend, and makes an exception of each operation that overflows
/// f16 there. PyTorch skips every step of such a run.
///
/// ```text
/// needed by   a loss that is not finite, and an overflow at a scale that has fallen by 2^6, or to its minimum,
///             since it last grew
/// watched     the next 1, 2, 4, .. 32 passes after the 1st, 2nd, 3rd, .. 8th such step; then none, until the scale
///             grows. An overflow may be that of some batches alone
/// found       a result in f16         exception; begin anew
///             only a gradient         exception, after 8 such steps and at a scale of 16 or less, or at the minimum;
///                                     begin anew
///             of an exception, either the program's own: withdrawn, and not made again; because of a gradient, at a scale
///                                     of 16 or less, or at the minimum
/// ```
///
/// An infinity need not reach the loss: `1 / inf` is 0. So the pass after 8, 64, 512, .. steps taken is looked at as well,
/// where this compiles no kernels: the first calls of each operation alone, since nothing is wrong so far.
///
/// Exceptions begin when the step is recorded: no recomputation of this step sees them.
#[derive(Debug, Default)]
pub struct OverflowFallback {
    exceptions: Exceptions,
    is_off: AtomicBool,
    looks: AtomicBool,
    watches: AtomicBool,
    is_look: AtomicBool,
    run: Mutex<Run>,
}

#[derive(Debug, Default)]
struct Run {
    /// The scale before it fell.
    from: Option<f32>,
    /// How many steps needed a watched pass, since one was mended.
    asked: u32,
    /// How many passes are still to be watched.
    left: u32,
    /// Whether no step asked for the pass.
    is_look: bool,
    /// The operation whose gradient overflowed last, and in how many steps.
    suspect: Option<(&'static str, usize, u32)>,
    /// Operations that are not finite in FP32 either.
    own: Vec<(&'static str, usize)>,
}

/// How far the scale falls before a pass is watched: some skipped steps are normal at the start.
const FALLEN: f32 = 64.0;
/// In so many steps, and at so low a scale, the gradient of an operation overflows before the operation becomes an
/// exception: half then loses small gradients.
const STEPS: u32 = 8;
const LOW: f32 = 16.0;
/// So many steps ask for watched passes, and get so many of them at most.
const ASKED: u32 = 8;
const LONGEST: u32 = 32;

impl OverflowFallback {
    /// The exceptions of the device, to which it adds.
    pub fn exceptions(&self) -> &Exceptions {
        &self.exceptions
    }

    /// Turns it on or off, and begins anew. Whether it `looks`: a watched pass compiles no kernels.
    pub fn set(&self, is_on: bool, looks: bool) {
        self.is_off.store(!is_on, Ordering::Relaxed);
        self.looks.store(looks, Ordering::Relaxed);
        self.watches.store(false, Ordering::Relaxed);
        *self.run() = Run::default();
    }

    /// Whether the pass on the device is watched.
    #[inline]
    pub fn is_watching(&self) -> bool {
        self.watches.load(Ordering::Relaxed) && !self.exceptions.is_frozen()
    }

    /// Whether the pass that is watched is only looked at: no step was skipped for it.
    #[inline]
    pub fn is_looking(&self) -> bool {
        self.is_look.load(Ordering::Relaxed)
    }

    /// Adds the exceptions that follow from a watched step. Returns whether there are any.
    fn mend(
        &self,
        run: &mut Run,
        recorded: &RecordedStep,
        minimum: f32,
        news: &mut Vec<News>,
    ) -> bool {
        let (mut mended, mut is_explained) = (false, false);
        let scale = recorded.step.scale;
        let is_low = scale <= minimum || scale <= LOW;
        for Overflow { op, length, of } in &recorded.overflows {
            let is_own = run.own.contains(&(op, *length));
            match of {
                Overflowed::Result if !is_own => {
                    let new = self.exceptions.add_overflowed(op, *length, "forward");
                    mended |= new.is_some();
                    news.extend(new);
                }
                Overflowed::InFp32 | Overflowed::GradientInFp32
                    if !is_own && (*of == Overflowed::InFp32 || is_low) =>
                {
                    news.push(self.exceptions.withdraw(op, *length));
                    run.own.push((op, *length));
                    is_explained = true;
                }
                _ => {}
            }
        }
        // What is not finite in the forward pass, or in the loss, explains the gradients.
        if mended || is_explained || recorded.step.outcome != StepOutcome::Overflow {
            return mended;
        }
        let is_gradient = |overflow: &&Overflow| overflow.of == Overflowed::Gradient;
        if let Some(Overflow { op, length, .. }) = recorded.overflows.iter().find(is_gradient)
            && !run.own.contains(&(op, *length))
        {
            let before = run
                .suspect
                .filter(|(of, over, _)| (of, over) == (op, length));
            let steps = before.map_or(0, |(.., steps)| steps) + 1;
            run.suspect = Some((op, *length, steps));
            if scale <= minimum || steps >= STEPS && scale <= LOW {
                let new = self.exceptions.add_overflowed(op, *length, "backward");
                mended = new.is_some();
                news.extend(new);
            }
        }
        mended
    }

    /// What follows from a step. Returns what the log says of it.
    fn after(
        &self,
        run: &mut Run,
        recorded: &RecordedStep,
        dynamic: &DynamicLossScale,
    ) -> Vec<News> {
        let (mut mended, mut news) = (false, Vec::new());
        if self.is_watching() {
            run.left = run.left.saturating_sub(1);
            mended = self.mend(run, recorded, dynamic.min_scale, &mut news);
        }
        if mended || recorded.transition == Transition::Grown {
            (run.from, run.asked, run.suspect) = (None, 0, None);
            // The next operation may overflow, too.
            run.left = u32::from(mended);
            run.is_look &= !mended;
        }
        if mended {
            return news;
        }
        let scale = recorded.after.scale();
        match recorded.step.outcome {
            StepOutcome::Finite => {
                let taken = recorded.after.taken_steps();
                let is_power =
                    taken > 1 && taken.is_power_of_two() && taken.ilog2().is_multiple_of(3);
                if is_power && run.left == 0 && self.looks.load(Ordering::Relaxed) {
                    (run.left, run.is_look) = (1, true);
                }
            }
            outcome => {
                let from = *run.from.get_or_insert(recorded.step.scale);
                let is_beyond = from >= scale * FALLEN || scale <= dynamic.min_scale;
                if (outcome == StepOutcome::NonFiniteLoss || is_beyond) && run.asked < ASKED {
                    run.left = run.left.max(LONGEST.min(1 << run.asked));
                    run.is_look = false;
                    run.asked += 1;
                }
            }
        }
        news
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for OverflowFallback {
    fn ended(&self, recorded: &RecordedStep) {
        let LossScaleConfig::Dynamic(dynamic) = recorded.after.config() else {
            return;
        };
        if !recorded.is_scaled || self.is_off.load(Ordering::Relaxed) {
            return;
        }
        let news = {
            let run = &mut *self.run();
            let news = self.after(run, recorded, dynamic);
            self.is_look.store(run.is_look, Ordering::Relaxed);
            self.watches.store(run.left > 0, Ordering::Relaxed);
            news
        };
        if !news.is_empty() {
            self.exceptions.publish(news);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::LossScaler;
    use crate::scaler::{Findings, SharedScaler, Watched};
    use Overflowed::{Gradient, GradientInFp32, InFp32, Result};
    use StepOutcome::{Finite, NonFiniteLoss};

    /// A scaler with the fallback of its device.
    struct Device {
        scaler: SharedScaler<()>,
        fallback: Arc<OverflowFallback>,
    }

    fn device(config: LossScaleConfig) -> Device {
        let fallback = Arc::<OverflowFallback>::default();
        let scaler = SharedScaler::from(LossScaler::new(config).unwrap());
        for _ in 0..2 {
            scaler.listen(&fallback);
        }
        Device { scaler, fallback }
    }

    fn dynamic() -> Device {
        device(DynamicLossScale::default().into())
    }

    impl Device {
        /// Records a step. Returns whether the next one is watched.
        fn step(&self, outcome: StepOutcome, overflows: &[Overflow]) -> bool {
            // What is not watched finds nothing.
            let overflows = match self.fallback.is_watching() {
                true => overflows.to_vec(),
                false => Vec::new(),
            };
            let findings = Findings {
                watched: Watched {
                    overflows,
                    ..Watched::default()
                },
                ..Findings::default()
            };
            self.scaler.record(Some(self.scale()), outcome, findings);
            self.fallback.is_watching()
        }

        fn scale(&self) -> f32 {
            self.scaler.loss_scale()
        }

        fn listed(&self) -> Vec<String> {
            let list = self.fallback.exceptions().list();
            list.iter().map(ToString::to_string).collect()
        }
    }

    const MATMUL: Overflow = Overflow {
        op: "float_matmul",
        length: 64,
        of: Result,
    };

    fn of(of: Overflowed) -> Overflow {
        Overflow { of, ..MATMUL }
    }

    #[test]
    fn a_loss_that_is_not_finite_is_watched_in_the_next_pass() {
        let device = dynamic();
        assert!(!device.step(Finite, &[MATMUL]));
        assert!(device.step(NonFiniteLoss, &[MATMUL]));
        assert!(device.listed().is_empty());
        // The next operation may overflow, too.
        assert!(device.step(NonFiniteLoss, &[MATMUL]));
        assert_eq!(device.listed(), ["matmul over 64"]);
        let mul = Overflow {
            op: "float_mul",
            ..MATMUL
        };
        assert!(device.step(NonFiniteLoss, &[mul]));
        assert!(!device.step(Finite, &[]));
        assert_eq!((device.listed().len(), device.scale()), (2, 65536.0));
    }

    #[test]
    fn an_overflow_of_some_batches_is_watched_for_longer_each_time_and_not_for_ever() {
        let device = dynamic();
        let mut watched = Vec::new();
        for _ in 0..10 {
            device.step(NonFiniteLoss, &[]);
            let finite = (0..40).take_while(|_| {
                device.fallback.is_watching() && {
                    device.step(Finite, &[]);
                    true
                }
            });
            watched.push(finite.count());
        }
        assert_eq!(watched, [1, 2, 4, 8, 16, 32, 32, 32, 0, 0]);
    }

    #[test]
    fn the_scale_falls_before_a_pass_is_watched() {
        let device = dynamic();
        let overflow = StepOutcome::Overflow;
        let watched: Vec<_> = (0..6).map(|_| device.step(overflow, &[MATMUL])).collect();
        assert_eq!(watched, [false, false, false, false, false, true]);
        assert_eq!(device.scale(), 1024.0);
        assert!(device.step(overflow, &[MATMUL]));
        assert_eq!((device.listed().len(), device.scale()), (1, 512.0));
    }

    #[test]
    fn a_gradient_overflows_at_many_scales_first() {
        let device = dynamic();
        let overflow = StepOutcome::Overflow;
        for _ in 0..6 + STEPS {
            assert!(device.listed().is_empty(), "{}", device.scale());
            device.step(overflow, &[of(Gradient)]);
        }
        assert_eq!(device.listed(), ["matmul over 64"]);
        // Another operation each time: no one is suspected, but at the minimum scale.
        let device = dynamic();
        for step in 0..17 {
            assert!(device.listed().is_empty(), "{}", device.scale());
            let length = 64 + step;
            device.step(
                overflow,
                &[Overflow {
                    length,
                    ..of(Gradient)
                }],
            );
        }
        assert_eq!(device.listed(), ["matmul over 80"]);
    }

    #[test]
    fn what_fp32_has_too_is_withdrawn_and_not_made_again() {
        let device = dynamic();
        device.step(NonFiniteLoss, &[]);
        device.step(NonFiniteLoss, &[MATMUL]);
        assert_eq!(device.listed().len(), 1);
        for found in [of(InFp32), MATMUL, of(InFp32)] {
            device.step(NonFiniteLoss, &[found]);
            assert!(device.listed().is_empty(), "{found:?}");
        }
        // It does not explain the gradients of another.
        let device = dynamic();
        device.step(NonFiniteLoss, &[]);
        device.step(NonFiniteLoss, &[of(InFp32)]);
        let mul = Overflow {
            op: "float_mul",
            ..of(Gradient)
        };
        for _ in 0..20 {
            device.step(StepOutcome::Overflow, &[of(InFp32), mul]);
        }
        assert_eq!(device.listed(), ["mul over 64"]);
    }

    /// What reads an exception's result may be in f16 and overflow at a large scale: a cast of the program's own.
    #[test]
    fn the_gradient_of_an_exception_withdraws_it_at_a_low_scale_alone() {
        let device = dynamic();
        let overflow = StepOutcome::Overflow;
        device.step(NonFiniteLoss, &[]);
        device.step(NonFiniteLoss, &[MATMUL]);
        for _ in 0..6 {
            device.step(overflow, &[of(GradientInFp32)]);
            assert_eq!(device.listed(), ["matmul over 64"], "{}", device.scale());
        }
        device.step(Finite, &[]);
        assert_eq!(device.listed(), ["matmul over 64"]);
        // At a scale of 16, nothing mends it.
        while device.scale() > LOW {
            assert_eq!(device.listed().len(), 1, "{}", device.scale());
            device.step(overflow, &[of(GradientInFp32)]);
        }
        device.step(overflow, &[of(GradientInFp32)]);
        assert!(device.listed().is_empty());
        device.step(NonFiniteLoss, &[MATMUL]);
        assert!(device.listed().is_empty());
    }

    /// Steps of several threads end on one device.
    #[test]
    fn threads_lose_no_step_of_each_other() {
        let device = dynamic();
        let asked = |of: &Device| of.fallback.run().asked;
        std::thread::scope(|scope| {
            for _ in 0..ASKED {
                scope.spawn(|| {
                    device
                        .scaler
                        .record(Some(8.0), NonFiniteLoss, Findings::default())
                });
            }
        });
        assert_eq!(asked(&device), ASKED);
    }

    #[test]
    fn infinities_that_reach_no_loss_are_looked_for_where_this_compiles_nothing() {
        for looks in [true, false] {
            let device = dynamic();
            device.fallback.set(true, looks);
            let watched: Vec<_> = (1..=512).filter(|_| device.step(Finite, &[])).collect();
            assert_eq!(watched, if looks { vec![8, 64, 512] } else { vec![] });
        }
    }

    #[test]
    fn without_a_dynamic_scale_and_where_it_is_off_or_frozen_nothing_is_watched() {
        let off = dynamic();
        off.fallback.set(false, true);
        let frozen = dynamic();
        frozen.fallback.exceptions().freeze(true);
        for device in [device(LossScaleConfig::Fixed(8.0)), off, frozen] {
            for _ in 0..20 {
                assert!(!device.step(NonFiniteLoss, &[MATMUL]));
            }
            assert!(device.listed().is_empty());
        }
    }
}
