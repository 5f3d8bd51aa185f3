//! The steps of a `Learner`: gradients are added up, checked, and applied as a whole or not at all.

use burn_amp_core::ShownStep;
use burn_backend::Device as _;
use burn_core::module::AutodiffModule;
use burn_core::tensor::Device;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsAccumulator, GradientsParams, MultiGradientsParams};
use burn_train::{Learner, LearningComponentsTypes, MultiDeviceOptim, TrainingModel};

use super::workers::Place;
use crate::precision::in_step;
use crate::{AmpError, GradScaler};

/// A learner, and the step that is under way.
pub(super) struct Steps<LC: LearningComponentsTypes> {
    pub learner: Learner<LC>,
    /// The learner before the step, where losses are scaled: a skipped step gives its learning rates back.
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
    scales: bool,
}

/// A device's part of a step.
struct Part<LC: LearningComponentsTypes> {
    device: Device<LC::Backend>,
    /// The device's scaler, with the step that is under way.
    scaler: GradScaler,
    window: Window<TrainingModel<LC>>,
}

/// The sum of gradients.
struct Window<M> {
    /// The passes added up.
    passes: usize,
    /// The gradients of the first pass, until there is another.
    single: GradientsParams,
    sum: GradientsAccumulator<M>,
}

/// What is shown for the items of a step.
pub(super) struct Shown {
    pub lr: f64,
    /// `None` if nothing was scaled.
    pub step: Option<ShownStep>,
}

impl<LC: LearningComponentsTypes> Steps<LC> {
    /// Steps with the gradients of one worker on each of these devices.
    pub fn new(
        learner: Learner<LC>,
        devices: &[Device<LC::Backend>],
        optim: MultiDeviceOptim,
        accumulation: usize,
        scales: bool,
    ) -> Self {
        let mut parts: Vec<Part<LC>> = Vec::new();
        let part_of = devices.iter().map(|device| {
            let known = parts.iter().position(|part| part.device == *device);
            known.unwrap_or_else(|| {
                parts.push(Part {
                    device: device.clone(),
                    scaler: GradScaler::of::<LC::Backend>(device).another(),
                    window: Window::default(),
                });
                parts.len() - 1
            })
        });
        Self {
            learner,
            before: None,
            part_of: part_of.collect(),
            parts,
            optim,
            accumulation,
            micro_batches: 0,
            scales,
        }
    }

    /// The device of each worker, and the scaler of its passes.
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

    /// Adds the gradients of a micro-batch, each with the number of its worker, and moves the schedule by
    /// `lr_steps`. Takes or skips the step that is complete then.
    ///
    /// # Errors
    ///
    /// Those of [`GradScaler::step`].
    pub fn add(
        &mut self,
        grads: Vec<(usize, GradientsParams)>,
        lr_steps: usize,
    ) -> Result<Shown, AmpError> {
        if self.micro_batches == 0 && self.scales {
            self.before = Some(self.learner.clone());
        }
        (0..lr_steps).for_each(|_| self.learner.lr_step());
        let model = self.learner.model();
        for (worker, grads) in grads {
            self.parts[self.part_of[worker]].window.add(&model, grads);
        }
        self.micro_batches += 1;
        let lr = self.learner.lr_current();
        let scale = self.parts.iter().find_map(|part| {
            let pending = part.scaler.shared.pending();
            pending.scale_in_use()
        });
        if self.micro_batches >= self.accumulation {
            self.step(model)?;
        }
        let skipped = self.parts.iter().map(|part| part.scaler.skipped_steps());
        let step = scale.zip(skipped.max());
        Ok(Shown {
            lr,
            step: step.map(|(scale, skipped)| ShownStep { scale, skipped }),
        })
    }

    /// Forgets the micro-batches of a step that is not complete.
    pub fn forget(&mut self) {
        (self.micro_batches, self.before) = (0, None);
        for part in &mut self.parts {
            part.window = Window::default();
            part.scaler.discard_step();
        }
    }

    fn step(&mut self, model: TrainingModel<LC>) -> Result<(), AmpError> {
        self.micro_batches = 0;
        let mut grads: Vec<_> = self
            .parts
            .iter_mut()
            .map(|part| part.window.take())
            .collect();
        let parts = self.parts.iter().zip(&mut grads);
        let scaled = parts.filter(|(part, grads)| {
            let is_scaled = part.scaler.shared.pending().is_scaled();
            is_scaled && !grads.is_empty()
        });
        let scaled: Vec<_> = scaled.map(|(part, grads)| (&part.scaler, grads)).collect();
        let scalers: Vec<_> = scaled.iter().map(|(scaler, _)| *scaler).collect();
        let is_taken = GradScaler::checked_steps::<LC::Backend, _>(&model, scaled)?;
        for scaler in scalers {
            scaler.update()?;
        }
        // Of a part that scaled nothing.
        self.parts
            .iter()
            .for_each(|part| part.scaler.discard_step());
        // Only the learner has the model and the optimizer's state now, so that they change in place.
        drop(model);
        let before = self.before.take();
        if is_taken {
            drop(before);
            in_step(|| self.optimize(grads));
        } else if let Some(before) = before {
            self.learner = before;
        }
        Ok(())
    }

    fn optimize(&mut self, mut grads: Vec<GradientsParams>) {
        if let [grads] = &mut grads[..] {
            return self.learner.optimizer_step(std::mem::take(grads));
        }
        let parts = self.parts.iter().zip(grads);
        match self.optim {
            MultiDeviceOptim::OptimSharded => {
                let grads = parts
                    .map(|(part, grads)| (grads, part.device.to_id()))
                    .collect();
                self.learner
                    .optimizer_step_multi(MultiGradientsParams { grads });
            }
            MultiDeviceOptim::OptimMainDevice => {
                let (model, mut sum) = (self.learner.model(), GradientsAccumulator::new());
                for (_, grads) in parts {
                    sum.accumulate(&model, grads.to_device(&self.parts[0].device, &model));
                }
                drop(model);
                self.learner.optimizer_step(sum.grads());
            }
        }
    }
}

impl<M> Default for Window<M> {
    fn default() -> Self {
        Self {
            passes: 0,
            single: GradientsParams::new(),
            sum: GradientsAccumulator::new(),
        }
    }
}

impl<M> Window<M> {
    fn add<B>(&mut self, model: &M, grads: GradientsParams)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        match self.passes {
            0 => self.single = grads,
            passes => {
                if passes == 1 {
                    let single = std::mem::take(&mut self.single);
                    self.sum.accumulate(model, single);
                }
                self.sum.accumulate(model, grads);
            }
        }
        self.passes += 1;
    }

    fn take(&mut self) -> GradientsParams {
        match std::mem::take(&mut self.passes) {
            0 | 1 => std::mem::take(&mut self.single),
            _ => self.sum.grads(),
        }
    }
}
