//! The protocol of `scale`, `unscale`, `step` and `update`. Independent of tensors: a
//! parameter is an id, and the result of a check is a boolean.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{Findings, LossScaler, StepOutcome, Watched};
use crate::AmpError;

/// A parameter with a gradient: its id, and its path in the module.
pub type Parameter = (u64, String);

/// After this many losses of one step, the losses' checks are read back from the device and freed.
pub(super) const MANY_LOSSES: u32 = 1000;

/// A step, from its first scaled loss to `update`.
///
/// ```text
/// scale(loss):      the first loss of a step sets S = the scaler's scale
///                   loss * S, unless nothing is scaled
/// unscale(grads):   NothingScaled     if no loss was given
///                   ForeignGradients  if there are none, or some are not the model's
///                   AlreadyUnscaled   if one of them was given to unscale or step
///                   if a loss was scaled or checked: for each gradient that is not unscaled yet
///                       grad / S
///                       finite[id] = whether it is finite, here and on all replicas
/// step(grads):      NothingScaled, ForeignGradients as above
///                   AlreadyStepped    if one of them is
///                   unscale those that are left
///                   check those again that were unscaled before the last loss's backward pass, which may be in them
///                   take the step if every loss and each finite[id] of these is finite
/// update():         NothingStepped    if there was no step
///                   if gradients were checked, update the scaler with
///                       non-finite loss   if a loss was not finite
///                       overflow          else, if a gradient was not finite
///                       finite            else
///                   begin anew
/// ```
///
/// This is the protocol of PyTorch's `torch.amp.GradScaler`, over all optimizers and micro-batches of a step.
/// An error changes nothing. The caller visits modules and computes on tensors. `L` is the caller's record of
/// the losses until they are checked.
#[derive(Debug, Default)]
pub struct PendingStep<L> {
    /// Losses given to `scale`, over all micro-batches.
    losses_given: u32,
    /// The scale of these losses, where they are scaled. Set by the first loss.
    scale: Option<f32>,
    /// The backward passes of these losses; where the loss itself is multiplied, the losses.
    passes: u32,
    /// Whether any loss was scaled. If so, the gradients of the step are checked.
    scaled: bool,
    /// Whether the gradients of the step are checked though no loss was scaled.
    checked: bool,
    /// The losses whose checks are not read yet.
    pub losses: L,
    /// Whether any loss read so far was not finite.
    non_finite_loss: bool,
    /// The parameters whose gradients were given to `unscale`, also where nothing is scaled.
    unscaled: HashSet<u64>,
    /// The unscaled gradients.
    finite: HashMap<u64, Checked>,
    /// The parameters that a step was taken or skipped with.
    stepped: HashSet<u64>,
    /// The paths of the unscaled parameters, each with whether its gradient is finite here.
    parameters: Vec<(String, bool)>,
    /// What was found in watched passes.
    pub watched: Watched,
}

/// An unscaled gradient.
#[derive(Debug)]
struct Checked {
    /// Whether it is finite, here and on all replicas.
    finite: bool,
    /// How many backward passes had run.
    passes: u32,
    /// Where it stands in `parameters`.
    named: usize,
}

/// The gradients of a step to check.
#[derive(Debug, PartialEq)]
pub struct ToCheck<'a> {
    /// What those of `left` are divided by.
    pub scale: f32,
    /// To unscale and to check.
    pub left: Vec<&'a Parameter>,
    /// To check again: they were unscaled before the last backward pass.
    pub again: Vec<&'a Parameter>,
}

impl<'a> ToCheck<'a> {
    /// All of them, in the order of the check: first those to unscale.
    pub fn parameters(&self) -> Vec<&'a Parameter> {
        [&self.left[..], &self.again].concat()
    }
}

/// The part of a [`PendingStep`] that a record saves: the losses given, and what is known about
/// them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PendingStepRecord {
    losses_given: u32,
    scale: Option<f32>,
    #[serde(default)]
    checked: bool,
    non_finite_loss: bool,
}

impl<L: Default> PendingStep<L> {
    /// Counts a loss. Returns the scale, which is the same for the whole step even if the scaler's scale is
    /// set during the step.
    pub fn scale(&mut self, scaler: &LossScaler) -> f32 {
        self.losses_given = self.losses_given.saturating_add(1);
        *self.scale.get_or_insert(scaler.scale())
    }

    /// How many losses were given since the last update.
    pub fn losses_given(&self) -> u32 {
        self.losses_given
    }

    /// The number of losses at every 1,000 losses of a step.
    pub(super) fn many_losses(&self) -> Option<u32> {
        let given = self.losses_given;
        (self.factor().is_some() && given.is_multiple_of(MANY_LOSSES)).then_some(given)
    }

    /// Notes that a loss was multiplied by the scale: in its backward pass, or before it.
    pub fn set_scaled(&mut self) {
        self.scaled = true;
        self.note_pass();
    }

    /// Notes that the gradients are checked where no loss is scaled, as [`set_scaled`](PendingStep::set_scaled).
    pub fn set_checked(&mut self) {
        self.checked = true;
        self.note_pass();
    }

    /// Notes the backward pass of a loss that is neither scaled nor checked, as in FP32.
    pub fn note_pass(&mut self) {
        self.passes = self.passes.saturating_add(1);
    }

    /// Whether a loss was multiplied by the scale.
    pub fn is_scaled(&self) -> bool {
        self.scaled
    }

    /// The scale that the first loss set, even if no loss was scaled.
    pub fn scale_given(&self) -> Option<f32> {
        self.scale
    }

    /// The scale of the losses, if any loss was scaled.
    pub fn scale_in_use(&self) -> Option<f32> {
        self.scale.filter(|_| self.scaled)
    }

    /// What the gradients that are to be checked are multiplied by.
    fn factor(&self) -> Option<f32> {
        self.scale_in_use().or(self.checked.then_some(1.0))
    }

    /// Notes whether the losses that were checked before the gradients are finite.
    pub fn set_losses(&mut self, are_finite: bool) {
        self.non_finite_loss |= !are_finite;
    }

    /// Whether `unscale` may be called with `given` gradients. `parameters` lists the model's parameters
    /// among them.
    pub fn check_unscale(&self, given: usize, parameters: &[Parameter]) -> Result<(), AmpError> {
        self.check("unscale", given, parameters)?;
        let mut parameters = parameters.iter();
        let unscaled =
            parameters.find(|(id, _)| self.unscaled.contains(id) || self.stepped.contains(id));
        unscaled.map_or(Ok(()), |(_, path)| {
            let parameter = path.clone();
            Err(AmpError::AlreadyUnscaled { parameter })
        })
    }

    /// Notes an `unscale` with these parameters.
    pub fn unscale(&mut self, parameters: &[Parameter]) {
        self.unscaled.extend(parameters.iter().map(|(id, _)| id));
    }

    /// Whether `step` may be called with these gradients.
    pub fn check_step(&self, given: usize, parameters: &[Parameter]) -> Result<(), AmpError> {
        self.check("step", given, parameters)?;
        let stepped = parameters.iter().find(|(id, _)| self.stepped.contains(id));
        stepped.map_or(Ok(()), |(_, path)| {
            let parameter = path.clone();
            Err(AmpError::AlreadyStepped { parameter })
        })
    }

    fn check(
        &self,
        call: &'static str,
        given: usize,
        parameters: &[Parameter],
    ) -> Result<(), AmpError> {
        let of_model = parameters.len();
        if self.losses_given == 0 {
            return Err(AmpError::NothingScaled { call });
        }
        if of_model == 0 || of_model < given {
            return Err(AmpError::ForeignGradients {
                call,
                given,
                of_model,
            });
        }
        Ok(())
    }

    /// The gradients that are to be checked before a step with these parameters. `None` if there is nothing
    /// to do.
    pub fn to_check<'a>(&self, parameters: &'a [Parameter]) -> Option<ToCheck<'a>> {
        let is_checked = |(id, _): &&Parameter| self.finite.contains_key(id);
        let (checked, left): (Vec<_>, Vec<_>) = parameters.iter().partition(is_checked);
        let is_older = |(id, _): &&Parameter| self.finite[id].passes < self.passes;
        let again: Vec<_> = checked.into_iter().filter(is_older).collect();
        self.factor()
            .filter(|_| !left.is_empty() || !again.is_empty())
            .map(|scale| ToCheck { scale, left, again })
    }

    /// The outcome of a check. `finite` has the losses first, then the gradients of `parameters`.
    pub fn found(&self, parameters: &[&Parameter], finite: &[bool]) -> StepOutcome {
        let (losses, gradients) = finite.split_at(finite.len() - parameters.len());
        let losses_are_finite = !self.non_finite_loss && !losses.contains(&false);
        StepOutcome::of(losses_are_finite, !gradients.contains(&false))
    }

    /// Notes that the gradients of `parameters` were unscaled. `outcome` is what
    /// [`found`](PendingStep::found) returned, or what all replicas agreed on.
    pub fn set_unscaled(
        &mut self,
        parameters: &[&Parameter],
        finite: &[bool],
        outcome: StepOutcome,
    ) {
        let gradients = &finite[finite.len() - parameters.len()..];
        self.non_finite_loss |= outcome == StepOutcome::NonFiniteLoss;
        // Another replica overflowed, and this replica did not.
        let elsewhere = outcome == StepOutcome::Overflow && !gradients.contains(&false);
        for ((id, path), &finite) in parameters.iter().zip(gradients) {
            let checked = self.finite.entry(*id).or_insert_with(|| {
                self.parameters.push((path.clone(), finite));
                Checked {
                    finite: true,
                    passes: 0,
                    named: self.parameters.len() - 1,
                }
            });
            checked.finite &= finite && !elsewhere;
            checked.passes = self.passes;
            self.parameters[checked.named].1 &= finite;
        }
    }

    /// Notes a step with these parameters. Returns whether to take the step.
    pub fn step(&mut self, parameters: &[Parameter]) -> bool {
        self.stepped.extend(parameters.iter().map(|(id, _)| id));
        self.outcome(parameters) == StepOutcome::Finite
    }

    /// The outcome of a step with these parameters, as far as known.
    pub fn outcome(&self, parameters: &[Parameter]) -> StepOutcome {
        let is_finite = |(id, _): &Parameter| self.finite.get(id).is_none_or(|c| c.finite);
        StepOutcome::of(!self.non_finite_loss, parameters.iter().all(is_finite))
    }

    /// Ends the step. Returns its scale, its outcome and its findings. `None` if no gradient was checked,
    /// because nothing was scaled.
    pub fn update(&mut self) -> Result<Option<(Option<f32>, StepOutcome, Findings)>, AmpError> {
        self.check_update()?;
        Ok(std::mem::take(self).so_far())
    }

    /// Whether `update` may be called.
    pub fn check_update(&self) -> Result<(), AmpError> {
        match self.stepped.is_empty() {
            true => Err(AmpError::NothingStepped),
            false => Ok(()),
        }
    }

    /// The scale of the step that was taken or skipped, and its outcome and findings so far. `None` before, and
    /// if no gradient was checked.
    pub(super) fn so_far(&self) -> Option<(Option<f32>, StepOutcome, Findings)> {
        if self.stepped.is_empty() || self.finite.is_empty() {
            return None;
        }
        let all_finite = self.finite.values().all(|checked| checked.finite);
        let outcome = StepOutcome::of(!self.non_finite_loss, all_finite);
        let findings = Findings {
            parameters: self.parameters.clone(),
            watched: self.watched.clone(),
            ..Findings::default()
        };
        Some((self.scale_in_use(), outcome, findings))
    }

    /// The part that a record saves. The checks of the losses must have been read.
    pub fn record(&self) -> PendingStepRecord {
        PendingStepRecord {
            losses_given: self.losses_given,
            scale: self.scale_in_use(),
            checked: self.checked,
            non_finite_loss: self.non_finite_loss,
        }
    }

    /// Continues a step that was pending when it was recorded, possibly in another precision. `carried`:
    /// whether the gradients are still multiplied by the scale. They are, unless the backend unscales them
    /// itself. The record may contain no step.
    pub fn resume(&mut self, record: PendingStepRecord, scaler: &LossScaler, carried: bool) {
        let scale = match record.losses_given {
            0 => None,
            _ if !carried => record.scale,
            // Whether the next losses are scaled does not depend on the losses in the record.
            _ if scaler.is_enabled() => Some(record.scale.unwrap_or(scaler.scale())),
            _ => record.scale.map(|_| 1.0),
        };
        *self = Self {
            losses_given: record.losses_given,
            scale,
            scaled: scale.is_some(),
            checked: record.checked,
            non_finite_loss: record.non_finite_loss,
            ..Self::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LossScaleConfig;
    use StepOutcome::{Finite, NonFiniteLoss, Overflow};

    type Step = PendingStep<()>;

    fn scaler(config: LossScaleConfig) -> LossScaler {
        LossScaler::new(config).unwrap()
    }

    fn fixed(scale: f32) -> LossScaler {
        scaler(LossScaleConfig::Fixed(scale))
    }

    fn model(ids: impl IntoIterator<Item = u64>) -> Vec<Parameter> {
        ids.into_iter().map(|id| (id, format!("p{id}"))).collect()
    }

    /// A step whose one loss is scaled by 8.
    fn scaled() -> Step {
        let mut step = Step::default();
        assert_eq!(step.scale(&fixed(8.0)), 8.0);
        step.set_scaled();
        step
    }

    /// Unscales the gradients that are not unscaled yet, with the check's result for the losses and for each
    /// gradient.
    fn unscale(step: &mut Step, parameters: &[Parameter], finite: &[bool]) -> Option<f32> {
        let to_check = step.to_check(parameters)?;
        let checked = to_check.parameters();
        let outcome = step.found(&checked, finite);
        step.set_unscaled(&checked, finite, outcome);
        Some(to_check.scale)
    }

    /// A step with one loss. If the loss is scaled, the loss and the gradients are checked, and finite.
    fn with_finite(parameters: &[Parameter], scales: bool) -> Step {
        let mut step = Step::default();
        step.scale(&fixed(8.0));
        if scales {
            step.set_scaled();
            unscale(&mut step, parameters, &vec![true; 1 + parameters.len()]);
        }
        step
    }

    /// The outcome of a whole step with two parameters.
    fn outcome(finite: &[bool; 3]) -> (bool, StepOutcome) {
        let (mut step, model) = (scaled(), model([1, 2]));
        unscale(&mut step, &model, finite);
        let taken = step.step(&model);
        (taken, step.update().unwrap().unwrap().1)
    }

    #[test]
    fn a_step_is_taken_if_the_losses_and_all_its_gradients_are_finite() {
        assert_eq!(outcome(&[true, true, true]), (true, Finite));
        assert_eq!(outcome(&[true, true, false]), (false, Overflow));
        assert_eq!(outcome(&[false, true, true]), (false, NonFiniteLoss));
        assert_eq!(outcome(&[false, false, true]), (false, NonFiniteLoss));
    }

    #[test]
    fn the_first_loss_sets_the_scale_until_the_update() {
        let (mut step, model) = (scaled(), model([1]));
        assert_eq!(step.scale(&fixed(2.0)), 8.0);
        assert_eq!((step.losses_given(), step.scale_given()), (2, Some(8.0)));
        assert_eq!(unscale(&mut step, &model, &[true, true, true]), Some(8.0));
        assert!(step.step(&model));
        assert_eq!(step.update().unwrap().unwrap().0, Some(8.0));
        assert_eq!(step.losses_given(), 0);
        assert_eq!(step.scale(&fixed(2.0)), 2.0);
    }

    #[test]
    fn every_thousandth_loss_of_a_step_has_the_others_read() {
        let (mut step, mut unscaled) = (scaled(), Step::default());
        let many = (2..=2500).filter(|_| {
            step.scale(&fixed(8.0));
            unscaled.scale(&fixed(8.0));
            assert_eq!(unscaled.many_losses(), None);
            step.many_losses().is_some()
        });
        assert_eq!(many.collect::<Vec<_>>(), [1000, 2000]);
    }

    #[test]
    fn each_gradient_is_unscaled_once_wherever_it_is_named_first() {
        let (mut step, all) = (scaled(), model([1, 2, 3]));
        unscale(&mut step, &all[..1], &[true, true]);
        let to_check = step.to_check(&all).unwrap();
        assert_eq!(to_check.left, [&all[1], &all[2]]);
        assert!(to_check.again.is_empty());
        // The first call has read the loss.
        unscale(&mut step, &all, &[true, false]);
        assert_eq!(step.to_check(&all), None);
        assert!(!step.step(&all));
        let (_, outcome, found) = step.update().unwrap().unwrap();
        assert_eq!((outcome, found.non_finite_gradients()), (Overflow, 1));
        let named = [("p1", true), ("p2", true), ("p3", false)];
        assert_eq!(
            found.parameters,
            named.map(|(path, finite)| (path.into(), finite))
        );
    }

    /// Their loop may have added that pass's gradients.
    #[test]
    fn gradients_that_were_unscaled_before_the_last_pass_are_checked_again() {
        let (mut step, all) = (scaled(), model([1, 2]));
        step.scale(&fixed(8.0)); // its backward pass runs later
        unscale(&mut step, &all[..1], &[true, true]);
        assert!(step.to_check(&all[..1]).is_none());
        step.set_scaled();
        let to_check = step.to_check(&all).unwrap();
        assert_eq!(
            (to_check.left, to_check.again),
            (vec![&all[1]], vec![&all[0]])
        );
        assert_eq!(unscale(&mut step, &all, &[true, true, false]), Some(8.0));
        assert_eq!(step.to_check(&all), None);
        assert!(!step.step(&all));
        let (_, outcome, found) = step.update().unwrap().unwrap();
        assert_eq!(outcome, Overflow);
        let named = [("p1".to_string(), false), ("p2".to_string(), true)];
        assert_eq!(found.parameters, named);
    }

    #[test]
    fn of_several_models_only_those_that_overflow_are_skipped() {
        let (mut step, models) = (scaled(), [model([1]), model([2])]);
        unscale(&mut step, &models[0], &[true, true]);
        assert!(step.step(&models[0]));
        unscale(&mut step, &models[1], &[false]);
        assert!(!step.step(&models[1]));
        assert_eq!(step.update().unwrap().unwrap().1, Overflow);
    }

    #[test]
    fn a_loss_that_is_not_finite_skips_all_models_from_then_on() {
        let (mut step, models) = (scaled(), [model([1]), model([2])]);
        step.set_losses(true);
        unscale(&mut step, &models[0], &[true]);
        assert!(step.step(&models[0]));
        step.set_losses(false);
        step.set_losses(true);
        unscale(&mut step, &models[1], &[true]);
        assert!(!step.step(&models[1]));
        assert_eq!(step.update().unwrap().unwrap().1, NonFiniteLoss);
    }

    #[test]
    fn what_is_not_finite_on_a_replica_skips_the_step_here_and_names_nothing() {
        for outcome in [Overflow, NonFiniteLoss] {
            let (mut step, model) = (scaled(), model([1, 2]));
            let left = step.to_check(&model).unwrap().left;
            let finite = [true; 3];
            assert_eq!(step.found(&left, &finite), Finite);
            step.set_unscaled(&left, &finite, outcome);
            assert!(!step.step(&model));
            let (_, ended, found) = step.update().unwrap().unwrap();
            assert_eq!((ended, found.non_finite_gradients()), (outcome, 0));
        }
    }

    #[test]
    fn where_nothing_is_scaled_every_step_is_taken_and_none_is_recorded() {
        let model = model([1]);
        let disabled = scaler(LossScaleConfig::Disabled);
        for (scaler, scale) in [(disabled, 1.0), (fixed(8.0), 8.0)] {
            let mut step = Step::default();
            assert_eq!(step.scale(&scaler), scale);
            assert_eq!(step.to_check(&model), None);
            assert_eq!(step.check_unscale(1, &model), Ok(()));
            assert!(step.step(&model));
            assert!(step.update().unwrap().is_none());
        }
    }

    #[test]
    fn a_loss_that_is_scaled_after_the_step_is_no_step() {
        let (mut step, model) = (Step::default(), model([1]));
        step.scale(&fixed(8.0));
        assert!(step.step(&model));
        step.scale(&fixed(8.0));
        step.set_scaled();
        assert!(step.update().unwrap().is_none());
    }

    #[test]
    fn before_a_loss_nothing_is_to_be_unscaled_or_stepped() {
        let (step, model) = (Step::default(), model([1]));
        let nothing = |call| Err(AmpError::NothingScaled { call });
        assert_eq!(step.check_unscale(1, &model), nothing("unscale"));
        assert_eq!(step.check_step(1, &model), nothing("step"));
        assert_eq!(step.check_step(0, &[]), nothing("step"));
    }

    #[test]
    fn gradients_that_are_not_all_the_models_are_refused() {
        let (step, model) = (scaled(), model([1, 2]));
        for (given, of_model) in [(0, 0), (3, 0), (3, 2)] {
            let foreign = |call| {
                Err(AmpError::ForeignGradients {
                    call,
                    given,
                    of_model,
                })
            };
            let parameters = &model[..of_model];
            assert_eq!(step.check_unscale(given, parameters), foreign("unscale"));
            assert_eq!(step.check_step(given, parameters), foreign("step"));
        }
        assert_eq!(step.check_unscale(2, &model), Ok(()));
    }

    /// Also where nothing is scaled: a wrong loop gets this error in every precision.
    #[test]
    fn unscaling_twice_or_after_a_step_is_refused_and_a_step_after_it_is_not() {
        let model = model([1, 2]);
        for scales in [true, false] {
            let mut step = with_finite(&model[1..], scales);
            step.unscale(&model[1..]);
            let parameter = "p2".to_string();
            let twice = Err(AmpError::AlreadyUnscaled { parameter });
            assert_eq!(step.check_unscale(2, &model), twice);
            assert_eq!(step.check_unscale(1, &model[..1]), Ok(()));
            assert_eq!(step.check_step(2, &model), Ok(()));
            assert!(step.step(&model[..1]));
            let parameter = "p1".to_string();
            let late = Err(AmpError::AlreadyUnscaled { parameter });
            assert_eq!(step.check_unscale(1, &model[..1]), late);
            step.update().unwrap();
            step.scale(&fixed(8.0));
            assert_eq!(step.check_unscale(2, &model), Ok(()));
        }
    }

    /// Also where nothing is scaled: a wrong loop gets this error in every precision.
    #[test]
    fn stepping_twice_is_refused_until_the_update() {
        let model = model([1, 2]);
        for scales in [true, false] {
            let mut step = with_finite(&model, scales);
            assert!(step.step(&model[..1]));
            let parameter = "p1".to_string();
            let twice = Err(AmpError::AlreadyStepped { parameter });
            assert_eq!(step.check_step(2, &model), twice);
            assert_eq!(step.check_step(1, &model[1..]), Ok(()));
            step.update().unwrap();
            step.scale(&fixed(8.0));
            assert_eq!(step.check_step(2, &model), Ok(()));
        }
    }

    #[test]
    fn an_update_without_a_step_is_refused_and_changes_nothing() {
        let (mut step, model) = (scaled(), model([1]));
        unscale(&mut step, &model, &[true, false]);
        assert_eq!(step.update().err(), Some(AmpError::NothingStepped));
        assert!(!step.step(&model));
        assert_eq!(step.update().unwrap().unwrap().1, Overflow);
        assert_eq!(step.update().err(), Some(AmpError::NothingStepped));
    }

    /// The scale of a step that was recorded with a scale of 8, or with none, where the next losses
    /// are scaled by 2 or not at all.
    #[test]
    fn a_record_goes_on_in_another_precision() {
        let mut unscaled = Step::default();
        unscaled.scale(&fixed(8.0));
        let records = [scaled().record(), unscaled.record()];
        let disabled = scaler(LossScaleConfig::Disabled);
        for (scaler, carried, expected) in [
            (fixed(2.0), true, [Some(8.0), Some(2.0)]),
            (disabled, true, [Some(1.0), None]),
            (fixed(2.0), false, [Some(8.0), None]),
            (disabled, false, [Some(8.0), None]),
        ] {
            for (record, expected) in records.into_iter().zip(expected) {
                let mut step = Step::default();
                step.resume(record, &scaler, carried);
                assert_eq!((step.losses_given(), step.scale_in_use()), (1, expected));
            }
            let mut none = scaled();
            none.resume(Step::default().record(), &scaler, carried);
            assert_eq!((none.losses_given(), none.scale_given()), (0, None));
        }
    }

    #[test]
    fn a_record_keeps_a_loss_that_was_not_finite() {
        let (mut saved, mut step, model) = (scaled(), Step::default(), model([1]));
        saved.set_losses(false);
        step.resume(saved.record(), &fixed(8.0), true);
        unscale(&mut step, &model, &[true]);
        assert!(!step.step(&model));
        assert_eq!(step.update().unwrap().unwrap().1, NonFiniteLoss);
    }
}
