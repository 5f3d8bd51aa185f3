//! How a loss scale came to be what it is. Knows no tensor, no backend and no device.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{LastStep, LossScaler, Outcome};

/// How many entries are kept. In a healthy training there is one or two to a growth interval: they
/// then reach back a million steps.
const KEPT: usize = 1024;

/// The skipped steps of a training and the changes of its loss scale, the oldest first. Steps are
/// counted from 1, with the skipped ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleHistory {
    /// The scale that it begins with.
    pub first_scale: f32,
    /// The last step before it begins: 0, or where a state was loaded.
    pub first_step: u64,
    /// What happened since. At most 1,024 entries: the oldest make room, and what they led to is
    /// what the history then begins with.
    pub entries: VecDeque<ScaleEntry>,
}

/// A skipped step, or a change of the scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleEntry {
    /// The step after which it happened.
    pub step: u64,
    /// The scale from then on.
    pub scale: f32,
    /// What was skipped, if that step was.
    pub skipped: Option<Skipped>,
}

/// Why a step was skipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// [`Overflow`](Outcome::Overflow) or [`NonFiniteLoss`](Outcome::NonFiniteLoss).
    pub outcome: Outcome,
    /// What its loss was multiplied with.
    pub scale: f32,
    /// How many parameters had a gradient that was not finite.
    pub non_finite_gradients: usize,
    /// The first of them, as [`LastStep::parameters`], where they are named.
    pub first_parameter: Option<String>,
    /// Where anomaly detection is on, the first operation whose result was not finite, as text.
    pub first_operation: Option<String>,
}

impl Default for ScaleHistory {
    /// That of the default configuration.
    fn default() -> Self {
        Self::from(&LossScaler::default())
    }
}

impl ScaleHistory {
    /// That of a state from which a training begins or goes on.
    pub(super) fn from(state: &LossScaler) -> Self {
        Self {
            first_scale: state.scale(),
            first_step: state.steps(),
            entries: VecDeque::new(),
        }
    }

    /// Takes a step, after which the state is `state`.
    pub(super) fn take(&mut self, step: &LastStep, state: &LossScaler) {
        let skipped = (!step.stepped()).then(|| Skipped {
            outcome: step.outcome,
            scale: step.scale,
            non_finite_gradients: step.non_finite_gradients,
            first_parameter: step.parameters.first().cloned(),
            first_operation: first_operation(step),
        });
        self.push(skipped, state);
    }

    /// Takes a scale that was set between steps.
    pub(super) fn set(&mut self, state: &LossScaler) {
        self.push(None, state);
    }

    fn push(&mut self, skipped: Option<Skipped>, state: &LossScaler) {
        if skipped.is_none() && state.scale() == self.scale() {
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

    /// Names the parameters of the step that was taken last, where it was skipped.
    #[cfg(feature = "train")]
    pub(super) fn name(&mut self, step: &LastStep, state: &LossScaler) {
        if let Some(entry) = self.entries.back_mut()
            && entry.step == state.steps()
            && let Some(skipped) = &mut entry.skipped
        {
            skipped.first_parameter = step.parameters.first().cloned();
            skipped.first_operation = first_operation(step);
        }
    }

    /// The skipped steps by their numbers, the oldest first.
    pub fn skipped(&self) -> impl DoubleEndedIterator<Item = (u64, &Skipped)> {
        self.entries
            .iter()
            .filter_map(|entry| Some((entry.step, entry.skipped.as_ref()?)))
    }

    /// Every scale that was in force, the oldest first; again where a skipped step has kept it.
    pub fn scales(&self) -> impl Iterator<Item = f32> {
        std::iter::once(self.first_scale).chain(self.entries.iter().map(|entry| entry.scale))
    }

    fn scale(&self) -> f32 {
        self.entries
            .back()
            .map_or(self.first_scale, |entry| entry.scale)
    }
}

fn first_operation(step: &LastStep) -> Option<String> {
    step.anomalies.first().map(|anomaly| anomaly.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dynamic, GradScaler, LossScaleConfig};

    fn scaler(dynamic: Dynamic) -> GradScaler {
        GradScaler::new(LossScaleConfig::Dynamic(dynamic)).unwrap()
    }

    fn take(scaler: &GradScaler, outcome: Outcome) {
        scaler.record(outcome, Default::default());
    }

    #[test]
    fn has_the_skipped_steps_and_the_changes_and_nothing_else() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0).with_growth_interval(2));
        take(&scaler, Outcome::Finite);
        assert_eq!(scaler.history().entries, []);
        take(&scaler, Outcome::Finite);
        take(&scaler, Outcome::NonFiniteLoss);
        take(&scaler, Outcome::Overflow);
        scaler.set_scale(4.0).unwrap();
        scaler.set_scale(16.0).unwrap();
        let history = scaler.history();
        let entry = |e: &ScaleEntry| (e.step, e.scale, e.skipped.as_ref().map(|s| s.outcome));
        assert_eq!(
            history.entries.iter().map(entry).collect::<Vec<_>>(),
            [
                (2, 8.0, None),
                (3, 8.0, Some(Outcome::NonFiniteLoss)),
                (4, 4.0, Some(Outcome::Overflow)),
                (4, 16.0, None),
            ]
        );
        assert_eq!(
            history.skipped().map(|(step, _)| step).collect::<Vec<_>>(),
            [3, 4]
        );
        assert_eq!(
            history.scales().collect::<Vec<_>>(),
            [4.0, 8.0, 8.0, 4.0, 16.0]
        );
    }

    #[test]
    fn begins_where_a_state_was_loaded() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0));
        take(&scaler, Outcome::Finite);
        take(&scaler, Outcome::Overflow);
        scaler.load_state(scaler.state());
        let history = scaler.history();
        assert_eq!((history.first_step, history.first_scale), (2, 2.0));
        assert!(history.entries.is_empty());
    }

    #[test]
    fn the_oldest_make_room_and_leave_the_scale_that_they_led_to() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0));
        (0..KEPT + 3).for_each(|_| take(&scaler, Outcome::Overflow));
        let history = scaler.history();
        assert_eq!(history.entries.len(), KEPT);
        // 4, 2, 1: what the third overflow led to.
        assert_eq!((history.first_step, history.first_scale), (3, 1.0));
        assert_eq!(history.entries[0].step, 4);
    }
}
