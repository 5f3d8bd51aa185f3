//! Mixed precision for Burn's `Learner`.

use std::sync::{Arc, Mutex, PoisonError};

use burn_amp_core::{Listener, StepQueue};
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_core::tensor::backend::Backend;
use burn_train::{
    CustomLearningStrategy, ExecutionStrategy, Interrupter, Learner, LearningComponentsTypes,
    LearningResult, SupervisedTraining, TrainingStrategy,
};

use super::metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
use super::strategy::{Own, Strategy, devices_of};
use crate::autodiff::AutodiffInner;
use crate::scaler::in_scope;
use crate::{AmpAutodiff, AmpConfig, AmpError, GradScaler, Precision, WhenStuck};

/// Sets the precision of a [`SupervisedTraining`], after all of Burn's settings. Only a strategy comes later, with
/// [`AmpTraining::with_training_strategy`], because Burn does not reveal it.
/// `to_fp16` and the others are named as in fastai's `Learner`. Nothing is checked before
/// [`launch`](AmpTraining::launch).
///
/// ```no_run
/// # use burn::backend::Flex;
/// # use burn::train::{Learner, LearningComponentsTypes, SupervisedTraining};
/// # use burn_amp::{AmpAutodiff, AmpError, AmpTrainingExt};
/// # type B = AmpAutodiff<Flex>;
/// # fn train<LC>(training: SupervisedTraining<LC>, learner: Learner<LC>) -> Result<(), AmpError>
/// # where LC: LearningComponentsTypes<Backend = B> + Send + 'static {
/// let result = training // SupervisedTraining::new(directory, train, valid) ...
///     .num_epochs(10)
///     .to_bf16()
///     .launch(learner)?;
/// # Ok(()) }
/// ```
pub trait AmpTrainingExt<LC: LearningComponentsTypes>: Sized {
    /// Trains with a configuration: its precision, its loss scaling, and what to do when no loss
    /// scale helps.
    fn with_amp(self, config: AmpConfig) -> AmpTraining<LC>;

    /// Trains in f16, with the default dynamic loss scaling.
    fn to_fp16(self) -> AmpTraining<LC> {
        self.with_amp(AmpConfig::new().with_precision(Precision::F16))
    }

    /// Trains in bf16.
    fn to_bf16(self) -> AmpTraining<LC> {
        self.with_amp(AmpConfig::new().with_precision(Precision::Bf16))
    }

    /// Trains in FP32.
    fn to_fp32(self) -> AmpTraining<LC> {
        self.with_amp(AmpConfig::new().with_precision(Precision::F32))
    }
}

impl<LC, B, C> AmpTrainingExt<LC> for SupervisedTraining<LC>
where
    LC: LearningComponentsTypes<Backend = AmpAutodiff<B, C>>,
    B: AutodiffInner,
    C: CheckpointStrategy,
{
    fn with_amp(self, config: AmpConfig) -> AmpTraining<LC> {
        AmpTraining {
            training: self,
            config,
            strategy: None,
            devices: Vec::new(),
        }
    }
}

/// A [`SupervisedTraining`] with a precision, ready to be launched.
pub struct AmpTraining<LC: LearningComponentsTypes> {
    training: SupervisedTraining<LC>,
    config: AmpConfig,
    /// On the model's first device if `None`.
    strategy: Option<TrainingStrategy<LC>>,
    /// More devices to configure.
    devices: Vec<Device<LC::Backend>>,
}

impl<LC> AmpTraining<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    /// Like [`SupervisedTraining::with_training_strategy`]. A strategy that was set before `.to_fp16()` has no
    /// effect, because Burn does not reveal it: [`launch`](AmpTraining::launch) logs the devices in use.
    ///
    /// Burn's strategies train as they do in Burn, except that a step is skipped as a whole if one of its devices or
    /// micro-batches overflows. A strategy of your own takes its steps itself: give its devices to
    /// [`with_devices`](AmpTraining::with_devices), and let its schedule wait where a pass is skipped, which
    /// [`GradScaler::last_step`] tells.
    pub fn with_training_strategy(mut self, strategy: impl Into<TrainingStrategy<LC>>) -> Self {
        self.strategy = Some(strategy.into());
        self
    }

    /// Adds devices to configure at launch, besides those of the strategy, or without one the model's first.
    pub fn with_devices(mut self, devices: impl IntoIterator<Item = Device<LC::Backend>>) -> Self {
        self.devices.extend(devices);
        self
    }

    /// A handle to stop the training from elsewhere.
    pub fn interrupter(&self) -> Interrupter {
        self.training.interrupter()
    }

    /// Configures the devices, registers the metrics and trains.
    ///
    /// A step that is skipped gives its learning rates back. The metrics are [`PrecisionMetric`] and, in f16, also
    /// [`LossScaleMetric`] and [`SkippedStepsMetric`]; the latter with [`AmpConfig::with_finite_check`] too. The loss
    /// scalers start over before a checkpoint is loaded; with [`GradScaler::checkpoint_with`] the checkpoint restores them.
    ///
    /// # Errors
    ///
    /// Before the first step:
    ///
    /// - those of [`AmpConfig::apply`], when a device does not support the precision, or a given loss
    ///   scale has no effect. Every device is unchanged then;
    /// - [`AmpError::PartialBatch`] when losses are scaled or checked, and a strategy of your own adds up micro-batches.
    ///
    /// # Panics
    ///
    /// Where [`SupervisedTraining::launch`] panics.
    pub fn launch(
        self,
        learner: Learner<LC>,
    ) -> Result<LearningResult<LC::InferenceModel>, AmpError> {
        let strategy = self.strategy.unwrap_or_else(|| {
            let device = learner.model().devices().into_iter().next();
            ExecutionStrategy::SingleDevice(device.unwrap_or_default()).into()
        });
        let of_strategy = match &strategy {
            TrainingStrategy::Default(strategy) => devices_of(strategy),
            TrainingStrategy::Custom(_) if self.devices.is_empty() => learner.model().devices(),
            TrainingStrategy::Custom(_) => Vec::new(),
        };
        let mut devices = Vec::new();
        for device in of_strategy.into_iter().chain(self.devices) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        let scales = self.config.apply_to::<LC::Backend>(&devices)?;
        let scalers = devices.iter().map(GradScaler::of::<LC::Backend>);
        let mut scalers: Vec<_> = scalers.collect();
        if let TrainingStrategy::Default(on) = &strategy
            && runs_here(on)
            && let Some(mine) = in_scope()
        {
            scalers[0] = mine;
        }
        let stop = Arc::new(StopWhenStuck(self.training.interrupter()));
        if self.config.when_stuck() == WhenStuck::Stop {
            scalers
                .iter()
                .for_each(|scaler| scaler.shared.listen(&stop));
        }
        // The steps of a strategy of the user's own are not known item by item.
        let steps = || match &strategy {
            TrainingStrategy::Default(_) => StepQueue::of_items(),
            TrainingStrategy::Custom(_) => {
                StepQueue::follow(scalers.iter().map(|scaler| scaler.shared.clone()))
            }
        };
        let shown = [(); 3].map(|()| steps());
        let mut training = self.training;
        if scales {
            training = training.metric_train_numeric(LossScaleMetric(shown[0].clone()));
        }
        let checks = scales || self.config.checks();
        if checks {
            training = training.metric_train_numeric(SkippedStepsMetric(shown[1].clone()));
        }
        if let Some(device) = devices.first() {
            let precision = PrecisionMetric::of::<LC::Backend>(device, shown[2].clone());
            training = training.metric_train(precision);
        }
        let failed = Arc::new(Mutex::new(None));
        let strategy: CustomLearningStrategy<LC> = match strategy {
            TrainingStrategy::Default(on) => Arc::new(Strategy {
                on,
                places: devices.iter().cloned().zip(scalers).collect(),
                scales,
                shown: shown.into(),
            }),
            TrainingStrategy::Custom(strategy) => Arc::new(Own {
                strategy,
                checks,
                failed: failed.clone(),
            }),
        };
        let result = training
            .with_training_strategy(TrainingStrategy::Custom(strategy))
            .launch(learner);
        let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        failed.map_or(Ok(result), Err)
    }
}

/// Whether the passes run on the thread of the caller, which may have a scaler in force.
fn runs_here<B: Backend>(strategy: &ExecutionStrategy<B>) -> bool {
    match strategy {
        ExecutionStrategy::SingleDevice(_) => true,
        ExecutionStrategy::MultiDevice(devices, _) => devices.len() == 1,
        #[cfg(feature = "distributed")]
        ExecutionStrategy::DistributedDataParallel { .. } => false,
    }
}

/// Stops a training run when no loss scale helps.
struct StopWhenStuck(Interrupter);

impl Listener for StopWhenStuck {
    fn stuck(&self, error: &AmpError) {
        self.0.stop(Some(&error.to_string()));
    }
}
