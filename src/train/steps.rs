//! The steps of a `Learner`: gradients of several backward passes are applied as a whole or not at all.

use std::mem::take;

use burn_amp_core::ShownStep;
use burn_backend::Device as _;
use burn_core::module::AutodiffModule;
use burn_core::tensor::Device;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsAccumulator, GradientsParams, MultiGradientsParams};
use burn_train::{Learner, LearningComponentsTypes, MultiDeviceOptim, TrainingModel};

use super::gradients;
use super::workers::{Passed, Place};
use crate::scaler::{Pass, Passes};
use crate::{GradScaler, StepOutcome};

/// A learner, and the step that is under way.
pub(super) struct Steps<LC: LearningComponentsTypes> {
    pub learner: Learner<LC>,
    /// The learner before a step that may be skipped: such a step gives its learning rates back.
    before: Option<Learner<LC>>,
    /// One for each device.
    parts: Vec<Part<LC>>,
    /// The place of the part of each worker: several workers can share a device.
    part_of: Vec<usize>,
    optim: MultiDeviceOptim,
    /// Micro-batches in a step.
    accumulation: usize,
    /// Micro-batches in the step that is under way.
    micro_batches: usize,
}

/// A device's part of a step.
struct Part<LC: LearningComponentsTypes> {
    device: Device<LC::Backend>,
    /// The scaler of the device's passes.
    scaler: GradScaler,
    gradients: Sum<TrainingModel<LC>>,
    passes: Passes,
}

/// The sum of gradients.
struct Sum<M> {
    passes: usize,
    /// The gradients of the first pass, until there is another.
    single: GradientsParams,
    sum: GradientsAccumulator<M>,
}

/// What is shown for the items of a micro-batch.
pub(super) struct Shown {
    pub lr: f64,
    /// `None` if nothing was scaled.
    pub step: Option<ShownStep>,
}

impl<LC: LearningComponentsTypes> Steps<LC> {
    /// Steps with the gradients of one worker at each of these places.
    pub fn new(
        learner: Learner<LC>,
        places: Vec<Place<LC>>,
        optim: MultiDeviceOptim,
        accumulation: usize,
    ) -> Self {
        let mut parts: Vec<Part<LC>> = Vec::new();
        let mut part_of = Vec::new();
        for (device, scaler) in places {
            let known = parts.iter().position(|part| part.device == device);
            part_of.push(known.unwrap_or(parts.len()));
            if known.is_none() {
                parts.push(Part {
                    device,
                    scaler,
                    gradients: Sum::default(),
                    passes: Passes::default(),
                });
            }
        }
        Self {
            learner,
            before: None,
            parts,
            part_of,
            optim,
            accumulation,
            micro_batches: 0,
        }
    }

    /// The place of each worker.
    pub fn places(&self) -> Vec<Place<LC>> {
        let parts = self.part_of.iter().map(|part| &self.parts[*part]);
        parts
            .map(|part| (part.device.clone(), part.scaler.clone()))
            .collect()
    }

    /// Brings the parameters to the first device, where each is a leaf.
    pub fn gather(&mut self) {
        self.learner.fork(&self.parts[0].device);
    }

    /// Adds what the passes of a micro-batch gave, and moves the schedule by `lr_steps`. Takes or skips the step that
    /// is complete then.
    pub fn add(&mut self, passed: Vec<Passed>, lr_steps: usize) -> Shown {
        let own = passed.iter().flat_map(|passed| &passed.passes.own);
        let scale = own.max_by_key(|pass| pass.scale.is_some());
        let scale = scale.map(|pass| pass.scale.unwrap_or(1.0));
        let is_skipped = passed.iter().any(|passed| passed.passes.are_skipped());
        if self.micro_batches == 0 && (self.accumulation > 1 || is_skipped) {
            self.before = Some(self.learner.clone());
        }
        (0..lr_steps).for_each(|_| self.learner.lr_step());
        let lr = self.learner.lr_current();
        let model = self.learner.model();
        for passed in passed {
            let part = &mut self.parts[self.part_of[passed.worker]];
            part.gradients.add(&model, passed.gradients);
            part.passes.own.extend(passed.passes.own);
            part.passes.other_skipped |= passed.passes.other_skipped;
        }
        self.micro_batches += 1;
        if self.micro_batches >= self.accumulation {
            self.step(model);
        }
        let skipped = self.parts.iter().map(|part| part.scaler.skipped_steps());
        let step = scale.zip(skipped.max());
        let step = step.map(|(scale, skipped)| ShownStep { scale, skipped });
        Shown { lr, step }
    }

    /// Forgets the micro-batches of a step that is not complete.
    pub fn forget(&mut self) {
        (self.micro_batches, self.before) = (0, None);
        for part in &mut self.parts {
            part.gradients = Sum::default();
            part.passes = Passes::default();
        }
    }

    fn step(&mut self, model: TrainingModel<LC>) {
        self.micro_batches = 0;
        let passes: Vec<_> = self
            .parts
            .iter_mut()
            .map(|part| take(&mut part.passes))
            .collect();
        let own = passes.iter().flat_map(|passes| &passes.own);
        let outcome = own.map(|pass| pass.outcome).max_by_key(severity);
        let outcome = outcome.unwrap_or(StepOutcome::Finite);
        let is_taken = !passes.iter().any(Passes::are_skipped);
        if is_taken || outcome != StepOutcome::Finite {
            // As in PyTorch, the scales of all devices back off together.
            for (part, passes) in self.parts.iter().zip(passes) {
                if let Some(mut pass) = passes.own.into_iter().reduce(worse) {
                    if !is_taken {
                        let nodes = gradients::nodes::<LC::Backend, _>(&model);
                        pass.findings.name(&nodes);
                    }
                    let shared = &part.scaler.shared;
                    shared.record(pass.scale, outcome, pass.findings);
                }
            }
        }
        // Only the learner has the model and the optimizer's state now, so that they change in place.
        drop(model);
        let before = self.before.take();
        if is_taken {
            drop(before);
            self.optimize();
        } else {
            self.learner = before.expect("the learner before a step that may be skipped");
            self.forget();
        }
    }

    fn optimize(&mut self) {
        let gradients = self.parts.iter_mut().map(|part| part.gradients.take());
        let mut gradients: Vec<_> = gradients.collect();
        if let [gradients] = &mut gradients[..] {
            return self.learner.optimizer_step(take(gradients));
        }
        let parts = self.parts.iter().zip(gradients);
        match self.optim {
            MultiDeviceOptim::OptimSharded => {
                let grads = parts.map(|(part, gradients)| (gradients, part.device.to_id()));
                let grads = grads.collect();
                self.learner
                    .optimizer_step_multi(MultiGradientsParams { grads });
            }
            MultiDeviceOptim::OptimMainDevice => {
                let (model, mut sum) = (self.learner.model(), GradientsAccumulator::new());
                for (_, gradients) in parts {
                    let gradients = gradients.to_device(&self.parts[0].device, &model);
                    sum.accumulate(&model, gradients);
                }
                drop(model);
                self.learner.optimizer_step(sum.grads());
            }
        }
    }
}

/// An overflow moves the scale, and a loss that is not finite may follow from it.
fn severity(outcome: &StepOutcome) -> u8 {
    match outcome {
        StepOutcome::Finite => 0,
        StepOutcome::NonFiniteLoss => 1,
        StepOutcome::Overflow => 2,
    }
}

/// The worse of two passes, with the anomalies of both. Of two alike, the one whose loss was scaled: the step counts
/// for its scale.
fn worse(one: Pass, other: Pass) -> Pass {
    let rank = |pass: &Pass| (severity(&pass.outcome), pass.scale.is_some());
    let is_worse = rank(&other) > rank(&one);
    let (mut worse, better) = if is_worse { (other, one) } else { (one, other) };
    worse.findings.watched.extend(better.findings.watched);
    worse
}

impl<M> Default for Sum<M> {
    fn default() -> Self {
        Self {
            passes: 0,
            single: GradientsParams::new(),
            sum: GradientsAccumulator::new(),
        }
    }
}

impl<M> Sum<M> {
    fn add<B>(&mut self, model: &M, gradients: GradientsParams)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        match self.passes {
            0 => self.single = gradients,
            passes => {
                if passes == 1 {
                    self.sum.accumulate(model, take(&mut self.single));
                }
                self.sum.accumulate(model, gradients);
            }
        }
        self.passes += 1;
    }

    fn take(&mut self) -> GradientsParams {
        match take(&mut self.passes) {
            0 | 1 => take(&mut self.single),
            _ => self.sum.grads(),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_amp_core::Findings;

    use super::*;
    use StepOutcome::{Finite, NonFiniteLoss, Overflow};

    /// A step of scaled and unscaled passes moves the scale by what was scaled.
    #[test]
    fn of_two_passes_the_worse_one_counts_and_of_two_alike_the_scaled_one() {
        let pass = |(scale, outcome)| Pass {
            scale,
            outcome,
            findings: Findings::default(),
        };
        for (one, other, expected) in [
            ((None, Finite), (Some(8.0), Finite), (Some(8.0), Finite)),
            ((None, Overflow), (Some(8.0), Finite), (None, Overflow)),
            (
                (None, Overflow),
                (Some(8.0), Overflow),
                (Some(8.0), Overflow),
            ),
            (
                (Some(8.0), NonFiniteLoss),
                (None, Overflow),
                (None, Overflow),
            ),
        ] {
            for (one, other) in [(one, other), (other, one)] {
                let worse = worse(pass(one), pass(other));
                assert_eq!((worse.scale, worse.outcome), expected);
            }
        }
    }
}
