//! The record of a step in a scaler and its history, and the line in the log.

use super::{Findings, LastStep, LossScaler, ScaleHistory, StepOutcome, Transition, skipped};
use crate::StuckReason;
use crate::error::{AmpError, NOT_THE_SCALE};

/// A recorded step, for listeners and the log.
#[derive(Debug)]
pub struct RecordedStep {
    /// The step.
    pub step: LastStep,
    /// How the step changed the scale.
    pub transition: Transition,
    before: LossScaler,
    pub(super) after: LossScaler,
}

impl RecordedStep {
    /// Records the outcome of a step whose loss was multiplied by `scale`. Another thread may have
    /// changed the current scale since.
    pub(super) fn of(
        scaler: &mut LossScaler,
        history: &mut ScaleHistory,
        scale: f32,
        outcome: StepOutcome,
        findings: &Findings,
    ) -> Self {
        let step = LastStep::of(scale, outcome, findings);
        let before = *scaler;
        let transition = scaler.update_at(scale, outcome);
        history.push(skipped(&step), scaler);
        Self {
            step,
            transition,
            before,
            after: *scaler,
        }
    }

    /// Logs one line per event, with its values as fields. Of repeated events, only the 1st, 2nd, 4th, 8th,
    /// .. are logged, with the count so far. `or` is a further remedy after bf16. Empty, or starts with a
    /// comma.
    pub(super) fn log(&self, or: &str) {
        let Self { step, after, .. } = self;
        let mut named = String::new();
        if !step.parameters.is_empty() {
            named = format!(" ({})", step.listed());
        }
        for anomaly in &step.anomalies {
            named = format!("{named} [{anomaly}]");
        }
        let (steps, scale, new_scale) = (after.steps(), step.scale, after.scale());
        let (gradients, losses) = (step.non_finite_gradients, after.non_finite_losses());
        let (before, in_a_row) = (self.before.skipped_in_a_row(), after.skipped_in_a_row());
        match step.outcome {
            StepOutcome::Finite if !step.anomalies.is_empty() => log::warn!(
                step = steps, scale = scale;
                "burn-amp: loss and gradients are finite and the step is taken, but an operation has a \
                 result that is not finite{named}"
            ),
            StepOutcome::Finite if before > 1 => log::debug!(
                step = steps, scale = scale, skipped_in_a_row = before;
                "burn-amp: step taken at loss scale {scale}, after {before} skipped steps in a row"
            ),
            StepOutcome::Overflow if in_a_row.is_power_of_two() => log::debug!(
                step = steps, scale = scale, new_scale = new_scale, gradients = gradients,
                skipped_in_a_row = in_a_row;
                "burn-amp: {gradients} gradients{named} overflowed at loss scale {scale}; step \
                 skipped, {in_a_row} in a row, scale now {new_scale}"
            ),
            StepOutcome::NonFiniteLoss if losses.is_power_of_two() => log::warn!(
                step = steps, scale = scale, losses = losses;
                "burn-amp: the loss is not finite{named}; step skipped, loss scale {scale} kept \
                 (non-finite losses so far: {losses}). {NOT_THE_SCALE}{or}"
            ),
            _ => {}
        }
    }
}

impl LossScaler {
    /// Logs that the run is stuck since its last step.
    pub(super) fn log_stuck(&self, reason: StuckReason, last: &LastStep, or: &str) {
        let mut listed = vec![last.listed()];
        listed.extend(last.anomalies.iter().map(|anomaly| format!("[{anomaly}]")));
        let in_a_row = self.skipped_in_a_row();
        let text = reason.explained(in_a_row, last.scale, listed.join(" ").trim());
        log::error!(
            step = self.steps(), scale = self.scale(), skipped_in_a_row = in_a_row;
            "burn-amp: {text}{or}"
        );
    }

    /// The error of a run that is stuck since its last step.
    #[doc(hidden)]
    pub fn stuck_error(&self, reason: StuckReason, last: &LastStep) -> AmpError {
        AmpError::Stuck {
            reason,
            steps: self.skipped_in_a_row(),
            scale: last.scale,
            parameters: last.listed(),
        }
    }
}
