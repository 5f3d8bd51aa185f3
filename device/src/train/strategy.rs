//! A training strategy of Burn's `Learner`. A step that overflows leaves model, optimizer and learning rate
//! as they are. Otherwise it trains like Burn's strategies for one device and for several devices.

use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::split::split_dataloader;
use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::optim::{GradientsAccumulator, GradientsParams, MultiGradientsParams};
use burn::tensor::Device;
use burn::train::train::MultiDevicesTrainStep;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    MultiDeviceOptim, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader,
    TrainOutput, TrainStep, TrainingComponents, TrainingError, TrainingItem, ValidLoader,
};
use burn_amp_core::{ShownStep, StepQueue, Transition};

use super::events::{end_split, start_split, together};
use crate::train::gradients::{self, found, in_f32, widen};
use crate::{AmpError, Error, GradScaler};

/// Trains on these devices, the first of which validates.
pub(super) struct Strategy {
    pub devices: Vec<Device>,
    /// With several devices.
    pub optim: MultiDeviceOptim,
    /// The queues from which the metrics read the step of each item.
    pub shown: Vec<Arc<StepQueue>>,
    /// Whether to stop when the run is stuck.
    pub stops_when_stuck: bool,
    /// The error that stopped the training.
    pub failed: Arc<Mutex<Option<Error>>>,
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Strategy {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let main = &self.devices[0];
        // The scalers keep the state of an earlier run of the process, or of a checkpoint.
        let scalers: Vec<_> = self.devices.iter().map(GradScaler::of).collect();
        scalers.iter().for_each(GradScaler::begin_run);
        let valid = valid.to_device(&main.clone().inner());
        learner.fork(main);
        if let (model, true) = in_f32(learner.model()) {
            learner.load_model(model.into_record());
        }
        let mut run = Run {
            strategy: self,
            workers: (self.devices.len() > 1).then(|| MultiDevicesTrainStep::new(&self.devices)),
            loaders: match &self.devices[..] {
                [device] => vec![train.to_device(device)],
                devices => split_dataloader(train, devices),
            },
            windows: self.devices.iter().map(|_| Window::default()).collect(),
            without_gradients: false,
            scaler: scalers
                .iter()
                .find(|scaler| scaler.state().is_enabled())
                .cloned(),
            accumulation: components.grad_accumulation.unwrap_or(1),
            learner,
            events: components.event_processor,
            interrupter: components.interrupter,
        };
        let (mut checkpointer, mut early_stopping) =
            (components.checkpointer, components.early_stopping);

        for epoch in starting_epoch..=components.num_epochs {
            run.train(epoch);
            if run.stopped() {
                break;
            }
            if let MultiDeviceOptim::OptimSharded = self.optim {
                run.learner.fork(main);
            }
            run.validate(epoch, &valid);
            #[cfg(feature = "burn-0-23")]
            if run.stopped() {
                break;
            }
            run.event(|events| events.process_train(LearnerEvent::EndEpoch(epoch)));
            if checkpointer.is_some() || early_stopping.is_some() {
                run.event(EventProcessorTraining::flush);
            }
            if run.stopped() {
                break;
            }
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(&run.learner, epoch, &components.event_store);
            }
            if let Some(early_stopping) = &mut early_stopping
                && early_stopping.should_stop(epoch, &components.event_store)
            {
                break;
            }
        }
        // A window that the end of the run cuts is no part of the next training.
        scalers
            .iter()
            .for_each(|scaler| scaler.shared.forget_left());
        (run.learner.model(), run.events)
    }
}

/// A training under way.
struct Run<'a, M: LearnerModel> {
    strategy: &'a Strategy,
    /// A thread for each of several devices.
    workers: Option<MultiDevicesTrainStep<M>>,
    /// One for each device.
    loaders: Vec<TrainLoader<M>>,
    /// One for each device.
    windows: Vec<Window<M>>,
    /// Whether a batch of the windows had no gradient.
    without_gradients: bool,
    /// The first scaler that is enabled. The devices step together.
    scaler: Option<GradScaler>,
    /// Batches in a step.
    accumulation: usize,
    learner: Learner<M>,
    events: SupervisedTrainingEventProcessor<M>,
    interrupter: Interrupter,
}

/// The sum of the scaled gradients of a device since the last step.
struct Window<M> {
    sum: GradientsAccumulator<M>,
    batches: usize,
}

impl<M> Default for Window<M> {
    fn default() -> Self {
        Self {
            sum: GradientsAccumulator::new(),
            batches: 0,
        }
    }
}

type Batches<'a, M> = [Box<dyn DataLoaderIterator<<M as TrainStep>::Input> + 'a>];
type Outputs<M> = Vec<TrainOutput<<M as TrainStep>::Output>>;

impl<M: LearnerModel> Run<'_, M> {
    fn train(&mut self, epoch: usize) {
        let loaders = self.loaders.clone();
        let mut batches: Vec<_> = loaders.iter().map(|loader| loader.iter()).collect();
        self.event(|events| events.process_train(start_split(epoch, progress(&batches))));
        let (mut iteration, mut waiting) = (0, 0);
        while !self.interrupter.should_stop() {
            let outputs = match self.passes(&mut batches) {
                Ok(outputs) if outputs.is_empty() => break,
                Ok(outputs) => outputs,
                Err(error) => {
                    self.interrupter.fail(error);
                    break;
                }
            };
            let scale = self.scaler.as_ref().map(GradScaler::scale_of_step);
            let items = self.accumulate(outputs);
            waiting += 1;
            if waiting == self.accumulation {
                waiting = 0;
                self.step();
            }
            for item in items {
                iteration += 1;
                let lr = Some(self.learner.lr_current());
                let item = TrainingItem::new(item, progress(&batches), Some(iteration), lr);
                if let (Some(scaler), Some(scale)) = (&self.scaler, scale) {
                    let skipped = scaler.skipped_steps();
                    let step = ShownStep { scale, skipped };
                    self.strategy
                        .shown
                        .iter()
                        .for_each(|shown| shown.push(step));
                }
                self.event(|events| events.process_train(LearnerEvent::ProcessedItem(item)));
            }
        }
        self.event(EventProcessorTraining::flush);
        if waiting > 0 && !self.interrupter.should_stop() {
            self.step();
        }
        let whole = !self.interrupter.should_stop();
        self.event(|events| events.process_train(end_split(epoch, progress(&batches), whole)));
        self.event(EventProcessorTraining::flush);
    }

    /// Runs the forward and backward pass of the next batch of each device that has one.
    fn passes(&self, batches: &mut Batches<'_, M>) -> Result<Outputs<M>, TrainingError> {
        let Some(workers) = &self.workers else {
            let batch = batches[0].next().transpose()?;
            return Ok(batch
                .map(|batch| self.learner.train_step(batch))
                .into_iter()
                .collect());
        };
        let (outputs, _) = workers.step(batches, &self.learner.model())?;
        Ok(outputs.into_iter().map(|one| one.output).collect())
    }

    /// Adds the gradients to the window of their device.
    fn accumulate(&mut self, outputs: Outputs<M>) -> Vec<<M as TrainStep>::Output> {
        let model = self.learner.model();
        let window_of = |grads: &GradientsParams| {
            let device = found(&model, grads).device?;
            let of = |own: &Device| own.clone().without_autodiff() == device;
            self.strategy.devices.iter().position(of)
        };
        let mut items = Vec::new();
        for TrainOutput { mut grads, item } in outputs {
            items.push(item);
            if self.accumulation > 1 || self.workers.is_some() {
                widen(&model, &mut grads);
            }
            // A worker's gradients are on the worker's device.
            let window = match self.windows.len() {
                1 => Some(0),
                _ => window_of(&grads),
            };
            let Some(window) = window else {
                self.without_gradients = true;
                continue;
            };
            self.windows[window].batches += 1;
            self.windows[window].sum.accumulate(&model, grads);
        }
        items
    }

    /// Takes or skips the step of the window that is complete.
    fn step(&mut self) {
        let devices = self.strategy.devices.iter().cloned();
        let mut parts = Vec::new();
        for (device, window) in devices.zip(&mut self.windows) {
            // At the end of an epoch, a device may have no batch.
            if std::mem::take(&mut window.batches) > 0 {
                parts.push((device, window.sum.grads()));
            }
        }
        if self.scaler.is_some() {
            let scalers: Vec<_> = parts.iter().map(|(on, _)| GradScaler::of(on)).collect();
            match self.checked(&scalers, &mut parts) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    self.interrupter.stop(Some(&error.to_string()));
                    let failed = self.strategy.failed.lock();
                    *failed.unwrap_or_else(PoisonError::into_inner) = Some(error);
                    return;
                }
            }
        } else {
            let model = self.learner.model();
            parts
                .iter_mut()
                .for_each(|(_, grads)| gradients::unmark(&model, grads));
        }
        self.learner.lr_step();
        match self.strategy.optim {
            _ if self.workers.is_none() => {
                let grads = parts.pop().map(|(_, grads)| grads);
                self.learner.optimizer_step(grads.unwrap_or_default());
            }
            MultiDeviceOptim::OptimSharded => {
                let grads = parts.into_iter().map(|(on, grads)| (grads, on)).collect();
                self.learner
                    .optimizer_step_multi(MultiGradientsParams { grads });
            }
            MultiDeviceOptim::OptimMainDevice => {
                let model = self.learner.model();
                let mut sum = GradientsAccumulator::new();
                for (_, grads) in parts {
                    sum.accumulate(&model, grads.to_device(&self.strategy.devices[0], &model));
                }
                self.learner.optimizer_step(sum.grads());
            }
        }
    }

    /// Unscales and checks the gradients, and updates the scales. Returns whether to take the step.
    fn checked(
        &mut self,
        scalers: &[GradScaler],
        parts: &mut [(Device, GradientsParams)],
    ) -> Result<bool, Error> {
        if std::mem::take(&mut self.without_gradients) {
            return Err(AmpError::no_gradients("step").into());
        }
        let grads = parts.iter_mut().map(|(_, grads)| grads);
        let taken = GradScaler::checked_steps(&self.learner.model(), scalers.iter().zip(grads))?;
        for scaler in scalers {
            if let Transition::Stuck(reason) = scaler.update()?
                && self.strategy.stops_when_stuck
            {
                let last = scaler.last_step().expect("there was a step");
                let error = scaler.state().stuck_error(reason, &last);
                self.interrupter.stop(Some(&error.to_string()));
            }
        }
        Ok(taken)
    }

    fn validate(&mut self, epoch: usize, loader: &ValidLoader<M>) {
        let model = self.learner.model().valid();
        let mut batches = [loader.iter()];
        self.event(|events| events.process_valid(start_split(epoch, progress(&batches))));
        let mut iteration = 0;
        while !self.interrupter.should_stop() {
            let batch = match batches[0].next() {
                Some(Ok(batch)) => batch,
                Some(Err(error)) => {
                    self.interrupter.fail(error);
                    break;
                }
                None => break,
            };
            iteration += 1;
            let item = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(item, progress(&batches), Some(iteration), None);
            self.event(|events| events.process_valid(LearnerEvent::ProcessedItem(item)));
        }
        self.event(EventProcessorTraining::flush);
        let whole = !self.interrupter.should_stop();
        self.event(|events| events.process_valid(end_split(epoch, progress(&batches), whole)));
        self.event(EventProcessorTraining::flush);
    }

    fn event<E: Into<TrainingError>>(
        &mut self,
        event: impl FnOnce(&mut SupervisedTrainingEventProcessor<M>) -> Result<(), E>,
    ) {
        self.interrupter.fail_on_error(event(&mut self.events));
    }

    fn stopped(&self) -> bool {
        if let Some(interruption) = self.interrupter.interruption() {
            let reason = interruption.reason.as_deref().unwrap_or("reason unknown");
            log::info!("burn-amp: training interrupted: {reason}");
        }
        self.interrupter.should_stop()
    }
}

fn progress<O>(batches: &[Box<dyn DataLoaderIterator<O> + '_>]) -> Progress {
    together(batches.iter().map(|one| one.progress()))
}
