//! The training strategies of Burn's `Learner`. A step that overflows leaves model, optimizer and learning rate as
//! they are. Otherwise they train like Burn's strategies: on one device, on several, and as replicas.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn_amp_core::{ShownStep, StepQueue};
use burn_core::data::dataloader::split::split_dataloader;
use burn_core::data::dataloader::{DataLoaderIterator, Progress};
use burn_core::module::{AutodiffModule, Module};
use burn_core::tensor::Device;
use burn_core::tensor::backend::{Backend, DeviceOps};
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, CustomLearningStrategy, EventProcessorTraining, ExecutionStrategy,
    InferenceStep, Interrupter, Learner, LearnerEvent, LearningCheckpointer,
    LearningComponentsTypes, LearningResult, MultiDeviceOptim, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingItem, TrainingModel,
    ValidLoader,
};

use super::gradients::in_f32;
use super::steps::Steps;
use super::workers::{Item, Place, Workers};
use crate::{AmpError, GradScaler};

/// One of Burn's strategies, with steps that are taken whole or not at all.
pub(super) struct Strategy<LC: LearningComponentsTypes> {
    pub on: ExecutionStrategy<LC::Backend>,
    /// Its devices, each with the scaler of its passes.
    pub places: Vec<Place<LC>>,
    /// Whether losses are scaled.
    pub scales: bool,
    /// The queues from which the metrics read the step of each item.
    pub shown: Vec<Arc<StepQueue>>,
}

impl<LC> SupervisedLearningStrategy<LC> for Strategy<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let main = self.on.main_device();
        let devices = devices_of(&self.on);
        log::info!("burn-amp: the training uses {devices:?}");
        if self.scales && starting_epoch > 1 {
            resume_scalers(self.places.iter().map(|(_, scaler)| scaler));
        }
        // The model, or that of the checkpoint, was loaded before its precision was known.
        if let (model, true) = in_f32(learner.model()) {
            learner.load_model(model.into_record());
        }
        let training = Arc::new(Training {
            epochs: starting_epoch..=components.num_epochs,
            is_sharded: matches!(
                self.on,
                ExecutionStrategy::MultiDevice(_, MultiDeviceOptim::OptimSharded)
            ),
            shown: self.shown.clone(),
            interrupter: components.interrupter,
            event_store: components.event_store,
            events: Mutex::new(components.event_processor),
        });
        let early_stopping = components.early_stopping;
        let of_main = Some(Main {
            valid: valid.to_device(main.inner()),
            checkpointer: components.checkpointer,
        });
        let accumulation = components.grad_accumulation.unwrap_or(1);
        let run = |learner, places, loaders, optim| Run {
            training: training.clone(),
            steps: Steps::new(learner, places, optim, accumulation),
            loaders,
            replicas: None,
            early_stopping: early_stopping.as_ref().map(|one| one.clone_box()),
        };
        let place = |device: &Device<LC::Backend>| {
            let mut places = self.places.iter();
            let place = places.find(|(known, _)| known == device);
            place
                .expect("the devices of a strategy have scalers")
                .clone()
        };
        let optim = MultiDeviceOptim::OptimMainDevice;
        let model = match &self.on {
            ExecutionStrategy::MultiDevice(devices, optim) if devices.len() > 1 => {
                let places = devices.iter().map(place).collect();
                let loaders = split_dataloader(train, devices);
                run(learner, places, loaders, *optim).fit(of_main)
            }
            ExecutionStrategy::SingleDevice(_) | ExecutionStrategy::MultiDevice(..) => {
                let loaders = vec![train.to_device(main)];
                run(learner, vec![place(main)], loaders, optim).fit(of_main)
            }
            #[cfg(feature = "distributed")]
            ExecutionStrategy::DistributedDataParallel { devices, runtime } => {
                let loaders = split_dataloader(train, devices);
                let replicas = devices.iter().zip(loaders).map(|(device, loader)| Run {
                    replicas: Some(devices.len()),
                    ..run(learner.clone(), vec![place(device)], vec![loader], optim)
                });
                let replicas: Vec<_> = replicas.collect();
                drop(learner);
                runtime.start();
                // As in Burn, these threads outlive this function if one of them panics: the others may wait for it.
                let (mut of_main, mut running) = (of_main, Vec::new());
                for replica in replicas {
                    let main = of_main.take();
                    running.push(thread::spawn(move || replica.fit(main)));
                }
                let first = running.remove(0);
                let joined = "a replica ends without a panic";
                for other in running {
                    other.join().expect(joined);
                }
                runtime.close();
                first.join().expect(joined)
            }
        };
        if training.interrupter.should_stop() {
            let reason = training.interrupter.get_message();
            let reason = reason.as_deref().unwrap_or("reason unknown");
            log::info!("burn-amp: training interrupted: {reason}");
        }
        let training = Arc::into_inner(training).expect("all replicas have ended");
        let events = training.events.into_inner();
        (model, events.unwrap_or_else(PoisonError::into_inner))
    }
}

/// All devices of a strategy.
pub(super) fn devices_of<B: Backend>(strategy: &ExecutionStrategy<B>) -> Vec<B::Device> {
    match strategy {
        ExecutionStrategy::SingleDevice(device) => vec![device.clone()],
        ExecutionStrategy::MultiDevice(devices, _) => devices.clone(),
        #[cfg(feature = "distributed")]
        ExecutionStrategy::DistributedDataParallel { devices, .. } => devices.clone(),
    }
}

/// Gives the scalers that a checkpoint did not restore the state of one that it did.
fn resume_scalers<'a>(scalers: impl Iterator<Item = &'a GradScaler>) {
    let is_restored = |scaler: &&GradScaler| scaler.state().steps() > 0;
    let (restored, others): (Vec<_>, Vec<_>) = scalers.partition(is_restored);
    match restored.first() {
        Some(restored) => {
            let state = restored.state();
            others.iter().for_each(|scaler| scaler.load_state(state));
        }
        None => log::info!(
            "burn-amp: the training resumes, and its loss scale starts over at {}. To save the loss scale in \
             checkpoints, give the Learner the schedule scaler.checkpoint_with(schedule)",
            others[0].loss_scale()
        ),
    }
}

/// A training under way, for all its replicas.
struct Training<LC: LearningComponentsTypes> {
    epochs: RangeInclusive<usize>,
    /// Whether the parameters are scattered over the devices after each step.
    is_sharded: bool,
    shown: Vec<Arc<StepQueue>>,
    interrupter: Interrupter,
    event_store: Arc<EventStoreClient>,
    events: Mutex<SupervisedTrainingEventProcessor<LC>>,
}

/// What only the first replica does.
struct Main<LC: LearningComponentsTypes> {
    valid: ValidLoader<LC>,
    checkpointer: Option<LearningCheckpointer<LC>>,
}

/// A training on this thread: the whole of it, or that of one replica.
struct Run<LC: LearningComponentsTypes> {
    training: Arc<Training<LC>>,
    steps: Steps<LC>,
    /// One for each worker.
    loaders: Vec<TrainLoader<LC>>,
    /// How many replicas there are, if this is one.
    replicas: Option<usize>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

impl<LC: LearningComponentsTypes + 'static> Run<LC> {
    fn fit(mut self, mut main: Option<Main<LC>>) -> TrainingModel<LC> {
        let training = self.training.clone();
        self.steps.gather();
        #[cfg(feature = "distributed")]
        if self.replicas.is_some() {
            self.steps.learner.grad_sharded();
        }
        for epoch in training.epochs.clone() {
            let epochs = Progress::new(epoch, *training.epochs.end());
            self.train(&epochs);
            if main.is_some() {
                training
                    .events()
                    .process_train(LearnerEvent::EndEpoch(epoch));
            }
            if training.interrupter.should_stop() {
                break;
            }
            if training.is_sharded {
                self.steps.gather();
            }
            if let Some(main) = &mut main {
                let learner = &self.steps.learner;
                training.validate(&learner.model(), &main.valid, &epochs);
                if let Some(checkpointer) = &mut main.checkpointer {
                    checkpointer.checkpoint(learner, epoch, &training.event_store);
                }
            }
            if let Some(early_stopping) = &mut self.early_stopping
                && early_stopping.should_stop(epoch, &training.event_store)
            {
                break;
            }
        }
        self.steps.learner.model()
    }

    /// Trains for an epoch.
    fn train(&mut self, epochs: &Progress) {
        let (training, steps) = (&self.training, &mut self.steps);
        let replicas = self.replicas.unwrap_or(1);
        let mut batches: Vec<_> = self.loaders.iter().map(|loader| loader.iter()).collect();
        let mut iteration = 0;
        thread::scope(|threads| {
            let workers = Workers::start(threads, steps.places());
            loop {
                let mut progress = Progress::new(0, 0);
                let next = |(of, batches): (usize, &mut Box<dyn DataLoaderIterator<_> + '_>)| {
                    let batch = batches.next()?;
                    let own = batches.progress();
                    progress.items_processed += replicas * own.items_processed;
                    progress.items_total += replicas * own.items_total;
                    Some((of, batch))
                };
                let given = batches.iter_mut().enumerate().filter_map(next);
                let (passed, items) = workers.passes(given, &steps.learner);
                if items.is_empty() {
                    break;
                }
                let shown = steps.add(passed, replicas);
                for item in items {
                    iteration += replicas;
                    let (progress, epochs) = (progress.clone(), epochs.clone());
                    let (iteration, lr) = (Some(iteration), Some(shown.lr));
                    let item = TrainingItem::new(item, progress, epochs, iteration, lr);
                    training.item(item, shown.step);
                }
                if training.interrupter.should_stop() {
                    break;
                }
            }
        });
        // As in Burn 0.21, what is left of an epoch is no step.
        steps.forget();
    }
}

impl<LC: LearningComponentsTypes> Training<LC> {
    fn events(&self) -> MutexGuard<'_, SupervisedTrainingEventProcessor<LC>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an item of training, with the values that the metrics show for its step.
    fn item(&self, item: TrainingItem<Item<LC>>, shown: Option<ShownStep>) {
        let mut events = self.events();
        if let Some(step) = shown {
            self.shown.iter().for_each(|shown| shown.push(step));
        }
        events.process_train(LearnerEvent::ProcessedItem(item));
    }

    fn validate(&self, model: &TrainingModel<LC>, loader: &ValidLoader<LC>, epochs: &Progress) {
        let mut events = self.events();
        let model = model.valid();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let progress = batches.progress();
            iteration += 1;
            let item = model.step(batch);
            let item = TrainingItem::new(item, progress, epochs.clone(), Some(iteration), None);
            events.process_valid(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() {
                break;
            }
        }
        events.process_valid(LearnerEvent::EndEpoch(epochs.items_processed));
    }
}

/// A strategy of the user's own, which takes its steps itself.
pub(super) struct Own<LC: LearningComponentsTypes> {
    pub strategy: CustomLearningStrategy<LC>,
    /// Whether steps are checked.
    pub checks: bool,
    /// The error that stopped the training.
    pub failed: Arc<Mutex<Option<AmpError>>>,
}

impl<LC: LearningComponentsTypes> SupervisedLearningStrategy<LC> for Own<LC> {
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        match components.grad_accumulation {
            Some(micro_batches) if self.checks && micro_batches > 1 => {
                let failed = self.failed.lock();
                *failed.unwrap_or_else(PoisonError::into_inner) =
                    Some(AmpError::PartialBatch { micro_batches });
                LearningResult {
                    model: learner.model().valid(),
                    renderer: components.event_processor.renderer(),
                }
            }
            _ => self.strategy.train(learner, train, valid, components),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let own = &self.strategy;
        own.fit(components, learner, train, valid, starting_epoch)
    }
}
