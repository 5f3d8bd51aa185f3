//! The training strategies of Burn's `Learner`. A step that overflows leaves model, optimizer and learning rate as
//! they are. Otherwise they train like Burn's strategies: on one device, on several, and as replicas.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use burn_amp_core::{ShownStep, StepQueue};
use burn_core::data::dataloader::split::split_dataloader;
use burn_core::data::dataloader::{DataLoaderIterator, Progress};
use burn_core::module::{AutodiffModule, Module};
use burn_core::tensor::Device;
use burn_core::tensor::backend::DeviceOps;
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
use super::workers::{Output, Workers};
use crate::{AmpError, GradScaler};

/// The error that stopped a training.
pub(super) type Failed = Arc<Mutex<Option<AmpError>>>;

/// One of Burn's strategies, with steps that are taken whole or not at all.
pub(super) struct Strategy<LC: LearningComponentsTypes> {
    pub on: ExecutionStrategy<LC::Backend>,
    /// Whether losses are scaled.
    pub scales: bool,
    /// The queues from which the metrics read the step of each item.
    pub shown: Vec<Arc<StepQueue>>,
    pub failed: Failed,
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
        let scaler = GradScaler::of::<LC::Backend>(main);
        if self.scales && starting_epoch > 1 && scaler.state().steps() == 0 {
            log::info!(
                "burn-amp: the training resumes, and its loss scale starts over at {}. To save the loss scale in \
                 checkpoints, give the Learner the schedule scaler.checkpoint_with(schedule)",
                scaler.loss_scale()
            );
        }
        // The model, or that of the checkpoint, was loaded before its precision was known.
        if let (model, true) = in_f32(learner.model()) {
            learner.load_model(model.into_record());
        }
        let events = Mutex::new(components.event_processor);
        let training = Training {
            strategy: self,
            epochs: starting_epoch..=components.num_epochs,
            interrupter: components.interrupter,
            event_store: &components.event_store,
            events: &events,
        };
        let early_stopping = components.early_stopping;
        let of_main = Some(Main {
            valid: valid.to_device(main.inner()),
            checkpointer: components.checkpointer,
        });
        let accumulation = components.grad_accumulation.unwrap_or(1);
        let run = |learner, devices: &[Device<LC::Backend>], loaders, optim| Run {
            training: &training,
            steps: Steps::new(learner, devices, optim, accumulation, self.scales),
            loaders,
            replicas: 1,
            early_stopping: early_stopping.as_ref().map(|one| one.clone_box()),
        };
        let model = match &self.on {
            ExecutionStrategy::MultiDevice(devices, optim) if devices.len() > 1 => {
                let loaders = split_dataloader(train, devices);
                run(learner, devices, loaders, *optim).fit(of_main)
            }
            ExecutionStrategy::SingleDevice(_) | ExecutionStrategy::MultiDevice(..) => {
                let (devices, loaders) = ([main.clone()], vec![train.to_device(main)]);
                run(
                    learner,
                    &devices,
                    loaders,
                    MultiDeviceOptim::OptimMainDevice,
                )
                .fit(of_main)
            }
            #[cfg(feature = "distributed")]
            ExecutionStrategy::DistributedDataParallel { devices, runtime } => {
                let loaders = split_dataloader(train, devices);
                let replica = |(device, loader): (&Device<LC::Backend>, _)| {
                    let (on, optim) = ([device.clone()], MultiDeviceOptim::OptimMainDevice);
                    let mut replica = run(learner.clone(), &on, vec![loader], optim);
                    replica.replicas = devices.len();
                    replica
                };
                let replicas: Vec<_> = devices.iter().zip(loaders).map(replica).collect();
                drop(learner);
                runtime.start();
                thread::scope(|threads| {
                    let mut of_main = of_main;
                    let mut running = Vec::new();
                    for replica in replicas {
                        let main = of_main.take();
                        running.push(threads.spawn(move || replica.fit(main)));
                    }
                    let first = running.remove(0);
                    let joined = "a replica ends without a panic";
                    for other in running {
                        other.join().expect(joined);
                    }
                    runtime.close();
                    first.join().expect(joined)
                })
            }
        };
        if training.interrupter.should_stop() {
            let reason = training.interrupter.get_message();
            let reason = reason.as_deref().unwrap_or("reason unknown");
            log::info!("burn-amp: training interrupted: {reason}");
        }
        let events = events.into_inner();
        (model, events.unwrap_or_else(PoisonError::into_inner))
    }
}

/// A training under way, for all its replicas.
struct Training<'a, LC: LearningComponentsTypes> {
    strategy: &'a Strategy<LC>,
    epochs: RangeInclusive<usize>,
    interrupter: Interrupter,
    event_store: &'a EventStoreClient,
    events: &'a Mutex<SupervisedTrainingEventProcessor<LC>>,
}

/// What only the first replica does.
struct Main<LC: LearningComponentsTypes> {
    valid: ValidLoader<LC>,
    checkpointer: Option<LearningCheckpointer<LC>>,
}

/// A training on this thread: the whole of it, or that of one replica.
struct Run<'a, LC: LearningComponentsTypes> {
    training: &'a Training<'a, LC>,
    steps: Steps<LC>,
    /// One for each device.
    loaders: Vec<TrainLoader<LC>>,
    replicas: usize,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

impl<LC: LearningComponentsTypes + 'static> Run<'_, LC> {
    fn fit(mut self, mut main: Option<Main<LC>>) -> TrainingModel<LC> {
        let training = self.training;
        self.steps.gather();
        #[cfg(feature = "distributed")]
        if let ExecutionStrategy::DistributedDataParallel { .. } = training.strategy.on {
            self.steps.learner.grad_sharded();
        }
        for epoch in training.epochs.clone() {
            let epochs = Progress::new(epoch, *training.epochs.end());
            self.train(&epochs);
            if main.is_some() {
                training.train_event(LearnerEvent::EndEpoch(epoch));
            }
            if training.interrupter.should_stop() {
                break;
            }
            if let ExecutionStrategy::MultiDevice(_, MultiDeviceOptim::OptimSharded) =
                training.strategy.on
            {
                self.steps.gather();
            }
            if let Some(main) = &mut main {
                let learner = &self.steps.learner;
                training.validate(&learner.model(), &main.valid, &epochs);
                if let Some(checkpointer) = &mut main.checkpointer {
                    checkpointer.checkpoint(learner, epoch, training.event_store);
                }
            }
            if let Some(early_stopping) = &mut self.early_stopping
                && early_stopping.should_stop(epoch, training.event_store)
            {
                break;
            }
        }
        self.steps.learner.model()
    }

    /// Trains for an epoch.
    fn train(&mut self, epochs: &Progress) {
        let (training, replicas) = (self.training, self.replicas);
        let mut batches: Vec<_> = self.loaders.iter().map(|loader| loader.iter()).collect();
        let steps = &mut self.steps;
        let mut iteration = 0;
        thread::scope(|threads| {
            let workers = Workers::start(threads, steps.places());
            loop {
                let mut progress = Progress::new(0, 0);
                let next = |(of, batches): (usize, &mut Box<dyn DataLoaderIterator<_> + '_>)| {
                    let batch = batches.next()?;
                    let of_device = batches.progress();
                    progress.items_processed += replicas * of_device.items_processed;
                    progress.items_total += replicas * of_device.items_total;
                    Some((of, batch))
                };
                let given: Vec<_> = batches.iter_mut().enumerate().filter_map(next).collect();
                if given.is_empty() {
                    break;
                }
                let (grads, items) = workers.passes(given, &steps.learner);
                let shown = match steps.add(grads, replicas) {
                    Ok(shown) => shown,
                    Err(error) => {
                        training.interrupter.stop(Some(&error.to_string()));
                        fail(&training.strategy.failed, error);
                        break;
                    }
                };
                for item in items {
                    iteration += replicas;
                    let (epochs, lr) = (epochs.clone(), Some(shown.lr));
                    let item =
                        TrainingItem::new(item, progress.clone(), epochs, Some(iteration), lr);
                    training.item_event(item, shown.step);
                }
                if training.interrupter.should_stop() {
                    break;
                }
            }
        });
        self.steps.forget();
    }
}

impl<LC: LearningComponentsTypes> Training<'_, LC> {
    fn train_event(&self, event: LearnerEvent<Output<LC>>) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.process_train(event);
    }

    /// Reports an item of training, with the values that the metrics show for its step.
    fn item_event(&self, item: TrainingItem<Output<LC>>, shown: Option<ShownStep>) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(step) = shown {
            let queues = self.strategy.shown.iter();
            queues.for_each(|shown| shown.push(step));
        }
        events.process_train(LearnerEvent::ProcessedItem(item));
    }

    fn validate(&self, model: &TrainingModel<LC>, loader: &ValidLoader<LC>, epochs: &Progress) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
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
    /// Whether losses are scaled.
    pub scales: bool,
    pub failed: Failed,
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
            Some(micro_batches) if self.scales && micro_batches > 1 => {
                fail(&self.failed, AmpError::PartialBatch { micro_batches });
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

fn fail(failed: &Failed, error: AmpError) {
    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
}
