//! The state machine of loss scaling: takes the outcome of each step and gives the next scale.
//! Independent of tensors, backends and devices.

use serde::{Deserialize, Serialize};

use super::saved::State;
use super::{DynamicLossScale, LossScaleConfig};
use crate::{AmpError, StuckReason};

/// How a step ended. The outcome of several passes or replicas together is the greatest of their outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StepOutcome {
    /// Every gradient is finite. The step is taken.
    Finite,
    /// A gradient is infinite or NaN although the loss is finite: the scale was too large.
    Overflow,
    /// The loss itself is infinite or NaN: no scale would have helped.
    NonFiniteLoss,
}

impl StepOutcome {
    /// A non-finite loss comes first, because it explains non-finite gradients.
    #[doc(hidden)]
    pub fn of(loss_is_finite: bool, gradients_are_finite: bool) -> Self {
        match (loss_is_finite, gradients_are_finite) {
            (true, true) => StepOutcome::Finite,
            (true, false) => StepOutcome::Overflow,
            (false, _) => StepOutcome::NonFiniteLoss,
        }
    }
}

/// How an outcome changed the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transition {
    /// The scale is unchanged.
    Kept,
    /// The scale was multiplied by the growth factor, or raised to its maximum.
    Grown,
    /// The scale was multiplied by the backoff factor, or lowered to its minimum.
    BackedOff,
    /// The scale is unchanged, and the run is stuck: [`stuck_after`](DynamicLossScale::stuck_after) steps, 20
    /// at a fixed scale, were skipped for a [`StuckReason`] without a step taken between them. Contains the
    /// reason of the last skipped step. Reported once, and again only after a step was taken.
    Stuck(StuckReason),
}

/// The loss scale and its history.
///
/// ```text
/// finite:           growth_tracker += 1; at growth_interval:
///                       scale = min(scale * growth_factor, max_scale)
///                       growth_tracker = 0; refill hysteresis
/// overflow:         growth_tracker = 0; hysteresis -= 1, not below 0; at 0:
///                       scale = max(scale * backoff_factor, min_scale)
/// non-finite loss:  the scale and both counts stay
/// ```
///
/// With hysteresis 1 and away from the bounds, this is the rule of PyTorch's `_amp_update_scale_`.
/// Hysteresis follows Megatron-LM and Apex: the scale backs off only after `hysteresis` overflows,
/// and then at every overflow until a growth interval is complete.
///
/// Serde and Burn records save and restore every field. A state that no scaler can reach, or
/// one from a newer version, is refused.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "State", try_from = "State")]
pub struct LossScaler {
    /// The state in its saved form.
    pub(super) state: State,
}

impl LossScaler {
    /// A fresh scaler.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range.
    pub fn new(config: LossScaleConfig) -> Result<Self, AmpError> {
        let state = State::new(config.validated()?);
        Ok(Self { state })
    }

    /// The settings.
    pub fn config(&self) -> &LossScaleConfig {
        &self.state.config
    }

    /// Whether the loss is scaled.
    pub fn is_enabled(&self) -> bool {
        self.state.config != LossScaleConfig::Disabled
    }

    /// The scale that the next loss is multiplied by; 1 when disabled.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// Steps with finite gradients since the last overflow or change of the scale.
    pub fn growth_tracker(&self) -> u32 {
        self.state.growth_tracker
    }

    /// Steps whose gradients were finite.
    pub fn taken_steps(&self) -> u64 {
        self.state.taken_steps
    }

    /// Skipped steps, for any reason.
    pub fn skipped_steps(&self) -> u64 {
        self.state.skipped_steps
    }

    /// Steps that were taken or skipped.
    pub fn steps(&self) -> u64 {
        self.state.taken_steps + self.state.skipped_steps
    }

    /// Steps skipped since the last step taken.
    pub fn skipped_in_a_row(&self) -> u64 {
        self.state.skipped_in_a_row
    }

    /// Steps skipped because the loss itself was not finite.
    pub fn non_finite_losses(&self) -> u64 {
        self.state.non_finite_losses
    }

    /// Sets the scale. The counts are kept, and the growth interval starts over.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when `scale` is not positive and finite, or outside a dynamic
    /// configuration's bounds, or not 1 while loss scaling is disabled.
    pub fn set_scale(&mut self, scale: f32) -> Result<(), AmpError> {
        self.state.config.check_scale(scale)?;
        self.state.scale = scale;
        self.state.growth_tracker = 0;
        Ok(())
    }

    /// Updates the scale from the outcome of one step and returns the change. Counts every step;
    /// only a dynamic scale moves.
    pub fn update(&mut self, outcome: StepOutcome) -> Transition {
        self.update_at(self.state.scale, outcome)
    }

    /// Like [`update`](LossScaler::update), for a step whose loss was multiplied by `scale`. If the
    /// current scale is smaller, another step has already backed off for the same overflow, and
    /// this overflow is only counted.
    #[doc(hidden)]
    pub fn update_at(&mut self, scale: f32, outcome: StepOutcome) -> Transition {
        if !self.is_enabled() {
            return self.update_unscaled(outcome);
        }
        self.count(outcome);
        let kept = match (self.state.config, outcome) {
            (LossScaleConfig::Dynamic(dynamic), StepOutcome::Finite) => Ok(self.finite(&dynamic)),
            (_, StepOutcome::Overflow) if scale > self.state.scale => Ok(Transition::Kept),
            (LossScaleConfig::Dynamic(dynamic), StepOutcome::Overflow) => self.overflow(&dynamic),
            (LossScaleConfig::Fixed(_), StepOutcome::Overflow) => Err(StuckReason::FixedScale),
            (_, StepOutcome::NonFiniteLoss) => Err(StuckReason::NonFiniteLoss),
            _ => Ok(Transition::Kept),
        };
        kept.unwrap_or_else(|reason| self.stuck(reason))
    }

    /// Records the outcome of a step whose loss was not scaled: the scale stays.
    pub(super) fn update_unscaled(&mut self, outcome: StepOutcome) -> Transition {
        self.count(outcome);
        match outcome {
            StepOutcome::Finite => Transition::Kept,
            StepOutcome::Overflow | StepOutcome::NonFiniteLoss => self.stuck(StuckReason::Unscaled),
        }
    }

    /// Restarts the count towards [`Transition::Stuck`], which is reported once. For a new run that continues
    /// from this state.
    #[doc(hidden)]
    pub fn forget_stuck(&mut self) {
        self.state.stuck = 0;
    }

    /// Restarts the count if it was reported: a run that continues from this state is reported itself.
    pub(super) fn forget_reported(&mut self) {
        if self.state.stuck >= self.stuck_after() {
            self.forget_stuck();
        }
    }

    /// How many skipped steps in a row, that leave the scale as it is, make a run stuck.
    fn stuck_after(&self) -> u32 {
        match self.state.config {
            LossScaleConfig::Dynamic(dynamic) => dynamic.stuck_after,
            LossScaleConfig::Fixed(_) | LossScaleConfig::Disabled => {
                DynamicLossScale::default().stuck_after
            }
        }
    }

    fn count(&mut self, outcome: StepOutcome) {
        let state = &mut self.state;
        if outcome == StepOutcome::Finite {
            state.taken_steps += 1;
            state.skipped_in_a_row = 0;
            state.stuck = 0;
        } else {
            state.skipped_steps += 1;
            state.skipped_in_a_row += 1;
            state.non_finite_losses += u64::from(outcome == StepOutcome::NonFiniteLoss);
        }
    }

    fn finite(&mut self, dynamic: &DynamicLossScale) -> Transition {
        let state = &mut self.state;
        state.growth_tracker += 1;
        if state.growth_tracker < dynamic.growth_interval {
            return Transition::Kept;
        }
        state.growth_tracker = 0;
        state.hysteresis_left = dynamic.hysteresis;
        let grown = state.scale * dynamic.growth_factor;
        self.move_to(grown.min(dynamic.max_scale))
    }

    fn overflow(&mut self, dynamic: &DynamicLossScale) -> Result<Transition, StuckReason> {
        let state = &mut self.state;
        state.growth_tracker = 0;
        state.hysteresis_left = state.hysteresis_left.saturating_sub(1);
        if state.scale <= dynamic.min_scale {
            return Err(StuckReason::MinimumScale);
        }
        if state.hysteresis_left > 0 {
            return Ok(Transition::Kept);
        }
        let backed_off = state.scale * dynamic.backoff_factor;
        Ok(self.move_to(backed_off.max(dynamic.min_scale)))
    }

    /// Counts a skipped step that leaves the scale as it is.
    fn stuck(&mut self, reason: StuckReason) -> Transition {
        self.state.stuck = self.state.stuck.saturating_add(1);
        if self.state.stuck == self.stuck_after() {
            Transition::Stuck(reason)
        } else {
            Transition::Kept
        }
    }

    fn move_to(&mut self, scale: f32) -> Transition {
        let before = std::mem::replace(&mut self.state.scale, scale);
        match scale.total_cmp(&before) {
            std::cmp::Ordering::Less => Transition::BackedOff,
            std::cmp::Ordering::Equal => Transition::Kept,
            std::cmp::Ordering::Greater => Transition::Grown,
        }
    }
}

impl Default for LossScaler {
    fn default() -> Self {
        Self::new(LossScaleConfig::default()).expect("the default configuration is valid")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use StepOutcome::{Finite, NonFiniteLoss, Overflow};
    use StuckReason::MinimumScale;
    use Transition::{BackedOff, Grown, Kept, Stuck};

    fn scaler(change: impl Fn(&mut DynamicLossScale)) -> LossScaler {
        let mut dynamic = DynamicLossScale::default();
        change(&mut dynamic);
        LossScaler::new(LossScaleConfig::Dynamic(dynamic)).unwrap()
    }

    /// Applies an outcome and returns everything it changed: the transition, the scale, the growth
    /// tracker, and the counts of taken, skipped, skipped in a row and non-finite losses.
    fn step(scaler: &mut LossScaler, outcome: StepOutcome) -> (Transition, f32, u32, [u64; 4]) {
        let transition = scaler.update(outcome);
        let counts = [
            scaler.taken_steps(),
            scaler.skipped_steps(),
            scaler.skipped_in_a_row(),
            scaler.non_finite_losses(),
        ];
        (transition, scaler.scale(), scaler.growth_tracker(), counts)
    }

    #[test]
    fn grows_after_the_interval_and_backs_off_at_once() {
        let mut s = scaler(|d| {
            d.init_scale = 4.0;
            d.growth_interval = 2;
        });
        assert_eq!(step(&mut s, Finite), (Kept, 4.0, 1, [1, 0, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Grown, 8.0, 0, [2, 0, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Kept, 8.0, 1, [3, 0, 0, 0]));
        assert_eq!(step(&mut s, Overflow), (BackedOff, 4.0, 0, [3, 1, 1, 0]));
        assert_eq!(step(&mut s, Overflow), (BackedOff, 2.0, 0, [3, 2, 2, 0]));
        assert_eq!(step(&mut s, Finite), (Kept, 2.0, 1, [4, 2, 0, 0]));
    }

    #[test]
    fn a_non_finite_loss_is_skipped_and_keeps_scale_and_tracker() {
        let mut s = scaler(|d| d.init_scale = 4.0);
        assert_eq!(step(&mut s, Finite), (Kept, 4.0, 1, [1, 0, 0, 0]));
        assert_eq!(step(&mut s, NonFiniteLoss), (Kept, 4.0, 1, [1, 1, 1, 1]));
        assert_eq!(step(&mut s, NonFiniteLoss), (Kept, 4.0, 1, [1, 2, 2, 2]));
    }

    #[test]
    fn a_new_run_is_stuck_anew() {
        let mut s = scaler(|d| (d.init_scale, d.min_scale, d.stuck_after) = (1.0, 1.0, 2));
        assert_eq!(step(&mut s, Overflow).0, Kept);
        assert_eq!(step(&mut s, Overflow).0, Stuck(MinimumScale));
        assert_eq!(step(&mut s, Overflow).0, Kept);
        s.forget_stuck();
        assert_eq!(step(&mut s, Overflow).0, Kept);
        assert_eq!(step(&mut s, Overflow).0, Stuck(MinimumScale));
    }

    #[test]
    fn stays_within_its_bounds() {
        let mut s = scaler(|d| {
            d.init_scale = 2.0;
            d.max_scale = 5.0;
            d.growth_interval = 1;
        });
        assert_eq!(step(&mut s, Finite), (Grown, 4.0, 0, [1, 0, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Grown, 5.0, 0, [2, 0, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Kept, 5.0, 0, [3, 0, 0, 0]));

        let mut s = scaler(|d| {
            d.init_scale = 3.0;
            d.min_scale = 1.0;
        });
        assert_eq!(step(&mut s, Overflow), (BackedOff, 1.5, 0, [0, 1, 1, 0]));
        assert_eq!(step(&mut s, Overflow), (BackedOff, 1.0, 0, [0, 2, 2, 0]));
        assert_eq!(step(&mut s, Overflow), (Kept, 1.0, 0, [0, 3, 3, 0]));
    }

    #[test]
    fn says_once_that_it_is_stuck_and_again_after_a_good_step() {
        let mut s = scaler(|d| {
            d.init_scale = 1.0;
            d.stuck_after = 2;
        });
        for _ in 0..2 {
            assert_eq!(s.update(Overflow), Kept);
            assert_eq!(s.update(Overflow), Stuck(MinimumScale));
            assert_eq!(s.update(Overflow), Kept);
            assert_eq!(s.update(Finite), Kept);
        }
    }

    #[test]
    fn is_stuck_whatever_the_reason_and_says_which() {
        let dynamic = scaler(|d| {
            d.init_scale = 4.0;
            d.stuck_after = 4;
        });
        let fixed = LossScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
        let disabled = LossScaler::new(LossScaleConfig::Disabled).unwrap();
        let cases = [
            (
                dynamic,
                &[NonFiniteLoss][..],
                Some((4, StuckReason::NonFiniteLoss)),
            ),
            (
                fixed,
                &[NonFiniteLoss],
                Some((20, StuckReason::NonFiniteLoss)),
            ),
            (fixed, &[Overflow], Some((20, StuckReason::FixedScale))),
            // Two overflows back off from 4 to 1.
            (dynamic, &[Overflow], Some((6, MinimumScale))),
            // Overflows at the minimum scale count together with the losses. Overflows above it do not count.
            (
                dynamic,
                &[Overflow, NonFiniteLoss],
                Some((6, StuckReason::NonFiniteLoss)),
            ),
            (
                dynamic,
                &[NonFiniteLoss, Overflow, Overflow],
                Some((6, MinimumScale)),
            ),
            (
                dynamic,
                &[NonFiniteLoss, NonFiniteLoss, NonFiniteLoss, Finite],
                None,
            ),
            (
                disabled,
                &[NonFiniteLoss, Overflow],
                Some((20, StuckReason::Unscaled)),
            ),
        ];
        for (mut scaler, outcomes, expected) in cases {
            let mut stuck = Vec::new();
            for (step, outcome) in (1..100).zip(outcomes.iter().cycle()) {
                if let Stuck(reason) = scaler.update(*outcome) {
                    stuck.push((step, reason));
                }
            }
            let expected: Vec<_> = expected.into_iter().collect();
            assert_eq!(stuck, expected, "{outcomes:?} of {:?}", scaler.config());
        }
    }

    #[test]
    fn hysteresis_tolerates_overflows_until_it_is_used_up_and_is_refilled_by_growth() {
        let mut s = scaler(|d| {
            d.init_scale = 8.0;
            d.hysteresis = 2;
            d.growth_interval = 2;
        });
        assert_eq!(step(&mut s, Overflow), (Kept, 8.0, 0, [0, 1, 1, 0]));
        assert_eq!(step(&mut s, Finite), (Kept, 8.0, 1, [1, 1, 0, 0]));
        assert_eq!(step(&mut s, Overflow), (BackedOff, 4.0, 0, [1, 2, 1, 0]));
        assert_eq!(step(&mut s, Overflow), (BackedOff, 2.0, 0, [1, 3, 2, 0]));
        assert_eq!(step(&mut s, Finite), (Kept, 2.0, 1, [2, 3, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Grown, 4.0, 0, [3, 3, 0, 0]));
        assert_eq!(step(&mut s, Overflow), (Kept, 4.0, 0, [3, 4, 1, 0]));
    }

    #[test]
    fn an_overflow_at_a_scale_that_was_left_is_only_counted() {
        let mut s = scaler(|d| {
            d.init_scale = 8.0;
            d.hysteresis = 2;
            d.growth_interval = 2;
        });
        let mut at = |scale, outcome| {
            let transition = s.update_at(scale, outcome);
            let counts = [s.taken_steps(), s.skipped_steps(), s.skipped_in_a_row()];
            (transition, s.scale(), s.growth_tracker(), counts)
        };
        // Two overflows at 8 use up the hysteresis; the third was computed before the scale was 4.
        assert_eq!(at(8.0, Overflow), (Kept, 8.0, 0, [0, 1, 1]));
        assert_eq!(at(8.0, Overflow), (BackedOff, 4.0, 0, [0, 2, 2]));
        assert_eq!(at(4.0, Finite), (Kept, 4.0, 1, [1, 2, 0]));
        assert_eq!(at(8.0, Overflow), (Kept, 4.0, 1, [1, 3, 1]));
        assert_eq!(at(8.0, Finite), (Grown, 8.0, 0, [2, 3, 0]));
        // An overflow at a smaller scale than the current one is an overflow at both scales.
        assert_eq!(at(4.0, Overflow), (Kept, 8.0, 0, [2, 4, 1]));
        assert_eq!(at(4.0, Overflow), (BackedOff, 4.0, 0, [2, 5, 2]));
        assert_eq!(at(4.0, NonFiniteLoss), (Kept, 4.0, 0, [2, 6, 3]));
    }

    #[test]
    fn fixed_and_disabled_never_move() {
        for (config, scale) in [
            (LossScaleConfig::Fixed(512.0), 512.0),
            (LossScaleConfig::Disabled, 1.0),
        ] {
            let mut s = LossScaler::new(config).unwrap();
            assert_eq!(step(&mut s, Finite), (Kept, scale, 0, [1, 0, 0, 0]));
            assert_eq!(step(&mut s, Overflow), (Kept, scale, 0, [1, 1, 1, 0]));
            assert_eq!(step(&mut s, NonFiniteLoss), (Kept, scale, 0, [1, 2, 2, 1]));
        }
    }

    #[test]
    fn a_scale_that_is_set_starts_a_growth_interval_and_keeps_the_counts() {
        let mut s = scaler(|d| d.growth_interval = 2);
        s.update(Finite);
        s.set_scale(8.0).unwrap();
        assert_eq!(step(&mut s, Finite), (Kept, 8.0, 1, [2, 0, 0, 0]));
        assert_eq!(step(&mut s, Finite), (Grown, 16.0, 0, [3, 0, 0, 0]));
        for bad in [0.5, 2f32.powi(25), f32::NAN, -1.0] {
            let before = s;
            assert!(
                s.set_scale(bad)
                    .unwrap_err()
                    .to_string()
                    .contains("scale is")
            );
            assert_eq!(s, before);
        }
        let mut fixed = LossScaler::new(LossScaleConfig::Fixed(4.0)).unwrap();
        assert!(fixed.set_scale(f32::INFINITY).is_err());
        fixed.set_scale(0.25).unwrap();
        assert_eq!(fixed.scale(), 0.25);
        let mut disabled = LossScaler::new(LossScaleConfig::Disabled).unwrap();
        assert!(disabled.set_scale(2.0).is_err());
    }

    #[test]
    fn every_field_survives_serde() {
        let mut s = scaler(|d| {
            d.init_scale = 1.0;
            d.hysteresis = 3;
        });
        for outcome in [Finite, Overflow, NonFiniteLoss, Overflow] {
            s.update(outcome);
        }
        let text = serde_json::to_string(&s).unwrap();
        assert_eq!(serde_json::from_str::<LossScaler>(&text).unwrap(), s);
    }
}
