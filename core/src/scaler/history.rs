//! The record of the steps: the history of a loss scale, and the log. Independent of tensors, backends and devices.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Findings, LastStep, LossScaler, Overflow, StepOutcome, Transition};
use crate::error::{AmpError, NOT_THE_SCALE, StuckReason, UNSCALED};
use crate::words::counted;

/// The number of entries kept. A healthy training run adds one or two per growth interval, so the
/// history reaches back a million steps.
const KEPT: usize = 1024;

/// The skipped steps and loss-scale changes of a training run, oldest first. Steps are counted from
/// 1, including skipped steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleHistory {
    /// The scale at the start of the history.
    pub first_scale: f32,
    /// The last step before the history starts: 0, or the step of a loaded state.
    pub first_step: u64,
    /// The skipped steps and scale changes since. At most 1,024 entries: the oldest are dropped, and the
    /// history then starts with the scale and step of the last dropped entry.
    pub entries: VecDeque<ScaleEntry>,
}

/// A skipped step, or a change of the scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleEntry {
    /// The skipped step, or the step after which the scale changed.
    pub step: u64,
    /// The scale from then on.
    pub scale: f32,
    /// Why the step was skipped, if it was.
    pub skipped: Option<SkippedStep>,
}

/// Why a step was skipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SkippedStep {
    /// [`Overflow`](StepOutcome::Overflow) or [`NonFiniteLoss`](StepOutcome::NonFiniteLoss).
    pub outcome: StepOutcome,
    /// The scale that the step's loss was multiplied by.
    pub scale: f32,
    /// How many parameters had a non-finite gradient.
    pub non_finite_gradients: usize,
    /// The first of these parameters, as in [`LastStep::parameters`], if they are named.
    pub first_parameter: Option<String>,
    /// With anomaly detection on, the first operation with a non-finite result, as text.
    pub first_operation: Option<String>,
}

impl Default for ScaleHistory {
    /// The history of a new scaler with the default configuration.
    fn default() -> Self {
        Self::from(&LossScaler::default())
    }
}

impl ScaleHistory {
    /// An empty history of a training run that starts or resumes from `state`.
    pub(super) fn from(state: &LossScaler) -> Self {
        Self {
            first_scale: state.scale(),
            first_step: state.steps(),
            entries: VecDeque::new(),
        }
    }

    /// Adds an entry for a skipped step or a change of the scale, which left the scaler in `state`.
    pub(super) fn push(&mut self, skipped: Option<SkippedStep>, state: &LossScaler) {
        let last = self.entries.back().map_or(self.first_scale, |e| e.scale);
        if skipped.is_none() && state.scale() == last {
            return;
        }
        self.entries.push_back(ScaleEntry {
            step: state.steps(),
            scale: state.scale(),
            skipped,
        });
        if self.entries.len() > KEPT
            && let Some(oldest) = self.entries.pop_front()
        {
            self.first_scale = oldest.scale;
            self.first_step = oldest.step;
        }
    }

    /// Names the parameters of the step with this number, if it was skipped.
    pub(super) fn name(&mut self, step: &LastStep, number: u64) {
        let mut latest = self.entries.iter_mut().rev();
        if let Some(entry) = latest.find(|entry| entry.step == number && entry.skipped.is_some()) {
            entry.skipped = skipped(step);
        }
    }

    /// The skipped steps with their numbers, oldest first.
    pub fn skipped(&self) -> impl DoubleEndedIterator<Item = (u64, &SkippedStep)> {
        self.entries
            .iter()
            .filter_map(|entry| Some((entry.step, entry.skipped.as_ref()?)))
    }

    /// Every scale that was in force, oldest first. A skipped step that kept the scale repeats it.
    pub fn scales(&self) -> impl Iterator<Item = f32> {
        std::iter::once(self.first_scale).chain(self.entries.iter().map(|entry| entry.scale))
    }
}

impl fmt::Display for SkippedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.scale)?;
        match self.outcome {
            StepOutcome::NonFiniteLoss => write!(f, "the loss is not finite")?,
            _ => {
                write!(f, "{} not finite", gradients_of(self.non_finite_gradients))?;
            }
        }
        if let Some(path) = &self.first_parameter {
            write!(f, ", first {path}")?;
        }
        match &self.first_operation {
            Some(operation) => write!(f, "; {operation}"),
            None => Ok(()),
        }
    }
}

/// The gradients of a step that are not finite.
fn gradients_of(count: usize) -> String {
    let here = counted(count as u64, "gradient", "gradients");
    here.unwrap_or_else(|| "another device's gradients".into())
}

/// The history's record of a skipped step; `None` for a step that was taken.
pub(super) fn skipped(step: &LastStep) -> Option<SkippedStep> {
    (!step.stepped()).then(|| SkippedStep {
        outcome: step.outcome,
        scale: step.scale,
        non_finite_gradients: step.non_finite_gradients,
        first_parameter: step.parameters.first().cloned(),
        first_operation: step.anomalies.first().map(ToString::to_string),
    })
}

/// A recorded step, for listeners and the log.
#[derive(Debug)]
pub struct RecordedStep {
    /// The step.
    pub step: LastStep,
    /// How the step changed the scale.
    pub transition: Transition,
    /// The operations that overflowed in watched passes.
    pub(super) overflows: Vec<Overflow>,
    /// Whether the loss was scaled.
    pub(super) is_scaled: bool,
    before: LossScaler,
    pub(super) after: LossScaler,
}

impl RecordedStep {
    /// Records the outcome of a step whose loss was multiplied by `scale`, if it was scaled. Another thread may have
    /// changed the current scale since.
    pub(super) fn of(
        scaler: &mut LossScaler,
        history: &mut ScaleHistory,
        scale: Option<f32>,
        outcome: StepOutcome,
        findings: &Findings,
    ) -> Self {
        let step = LastStep::of(scale.unwrap_or(1.0), outcome, findings);
        let before = *scaler;
        let transition = match scale {
            Some(scale) => scaler.update_at(scale, outcome),
            None => scaler.update_unscaled(outcome),
        };
        history.push(skipped(&step), scaler);
        Self {
            step,
            transition,
            overflows: findings.watched.overflows.clone(),
            is_scaled: scale.is_some(),
            before,
            after: *scaler,
        }
    }

    /// Logs one line per event, with its values as fields. Of repeated events, only the 1st, 2nd, 4th, 8th,
    /// .. are logged, with the count so far.
    pub(super) fn log(&self) {
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
            StepOutcome::Overflow if !self.is_scaled && in_a_row.is_power_of_two() => log::warn!(
                step = steps, gradients = gradients, skipped_in_a_row = in_a_row;
                "burn-amp: {of}{named} not finite; step skipped, {in_a_row} in a row. {UNSCALED}",
                of = gradients_of(gradients)
            ),
            StepOutcome::NonFiniteLoss if !self.is_scaled && losses.is_power_of_two() => {
                log::warn!(
                    step = steps, losses = losses;
                    "burn-amp: the loss is not finite{named}; step skipped (non-finite losses so far: {losses}). {UNSCALED}"
                )
            }
            StepOutcome::Overflow | StepOutcome::NonFiniteLoss if !self.is_scaled => {}
            StepOutcome::Overflow if in_a_row.is_power_of_two() => log::debug!(
                step = steps, scale = scale, new_scale = new_scale, gradients = gradients,
                skipped_in_a_row = in_a_row;
                "burn-amp: {of}{named} overflowed at loss scale {scale}; step \
                 skipped, {in_a_row} in a row, scale now {new_scale}",
                of = gradients_of(gradients)
            ),
            StepOutcome::NonFiniteLoss if losses.is_power_of_two() => log::warn!(
                step = steps, scale = scale, losses = losses;
                "burn-amp: the loss is not finite{named}; step skipped, loss scale {scale} kept \
                 (non-finite losses so far: {losses}). {NOT_THE_SCALE}"
            ),
            _ => {}
        }
    }
}

impl LossScaler {
    /// Logs that the run is stuck since its last step.
    pub(super) fn log_stuck(&self, reason: StuckReason, last: &LastStep) {
        let mut listed = vec![last.listed()];
        listed.extend(last.anomalies.iter().map(|anomaly| format!("[{anomaly}]")));
        let in_a_row = self.skipped_in_a_row();
        let text = reason.explained(in_a_row, last.scale, listed.join(" ").trim());
        log::error!(
            step = self.steps(), scale = self.scale(), skipped_in_a_row = in_a_row;
            "burn-amp: {text}"
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
