//! Mixed precision for Burn's `Learner`.

use std::sync::Arc;

use burn_amp_core::Listener;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_train::{
    ExecutionStrategy, Interrupter, Learner, LearningComponentsTypes, LearningResult,
    SupervisedTraining, TrainingStrategy,
};

use super::masters;
use super::metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
use crate::autodiff::AutodiffInner;
use crate::{AmpAutodiff, AmpConfig, AmpError, GradScaler, Precision, WhenStuck};

/// Sets the precision of a [`SupervisedTraining`], after all of Burn's settings. Only two of them come later,
/// because Burn does not reveal them: a strategy of several devices, or of another device than the model's,
/// with [`AmpTraining::with_training_strategy`], and accumulation, with [`AmpTraining::grads_accumulation`].
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
            devices: Vec::new(),
            sharing: 1,
            accumulation: 1,
        }
    }
}

/// A [`SupervisedTraining`] with a precision, ready to be launched.
pub struct AmpTraining<LC: LearningComponentsTypes> {
    training: SupervisedTraining<LC>,
    config: AmpConfig,
    /// If empty, the model's devices.
    devices: Vec<Device<LC::Backend>>,
    /// How many devices share a batch. Burn sums their gradients.
    sharing: usize,
    /// How many micro-batches make a batch. Burn sums their gradients.
    accumulation: usize,
}

impl<LC> AmpTraining<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    /// Like [`SupervisedTraining::with_training_strategy`], and the strategy's devices are
    /// configured at launch. Burn does not reveal a strategy that was set earlier.
    ///
    /// If several devices share a batch, f16 needs an [`AmpOptimizer`](crate::AmpOptimizer), which
    /// skips the whole batch if one device overflows. Give the devices of a custom strategy to
    /// [`with_devices`](AmpTraining::with_devices).
    pub fn with_training_strategy(mut self, strategy: impl Into<TrainingStrategy<LC>>) -> Self {
        let strategy = strategy.into();
        if let TrainingStrategy::Default(strategy) = &strategy {
            match strategy {
                ExecutionStrategy::SingleDevice(device) => self.devices.push(device.clone()),
                ExecutionStrategy::MultiDevice(devices, _) => {
                    self.sharing = devices.len();
                    self.devices.extend_from_slice(devices);
                }
                // Replicas step or skip together.
                #[cfg(feature = "distributed")]
                ExecutionStrategy::DistributedDataParallel { devices, .. } => {
                    self.devices.extend_from_slice(devices);
                }
            }
        }
        self.training = self.training.with_training_strategy(strategy);
        self
    }

    /// Like [`SupervisedTraining::grads_accumulation`]. In f16 it needs an
    /// [`AmpOptimizer`](crate::AmpOptimizer), which skips the whole batch if one micro-batch overflows.
    /// Without one, [`launch`](AmpTraining::launch) returns an error. An accumulation that was set
    /// earlier is not checked, because Burn does not reveal it.
    pub fn grads_accumulation(mut self, accumulation: usize) -> Self {
        self.accumulation = accumulation;
        self.training = self.training.grads_accumulation(accumulation);
        self
    }

    /// Adds devices to configure at launch. Without any, the model's devices are configured.
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
    /// The metrics are [`PrecisionMetric`] and, in f16, also [`LossScaleMetric`] and
    /// [`SkippedStepsMetric`]. The loss scalers start over before a checkpoint is loaded; with an
    /// [`AmpLrScheduler`](crate::AmpLrScheduler) the checkpoint restores them.
    ///
    /// # Errors
    ///
    /// Before the first step, with every device unchanged:
    ///
    /// - those of [`AmpConfig::apply`], when a device does not support the precision, or a given loss
    ///   scale has no effect;
    /// - [`AmpError::PartialBatch`] when losses are scaled, and several devices or micro-batches
    ///   make a batch, unless an [`AmpOptimizer`](crate::AmpOptimizer) follows every device's
    ///   scaler.
    ///
    /// # Panics
    ///
    /// Where [`SupervisedTraining::launch`] panics.
    pub fn launch(
        self,
        mut learner: Learner<LC>,
    ) -> Result<LearningResult<LC::InferenceModel>, AmpError> {
        let given = if self.devices.is_empty() {
            learner.model().devices()
        } else {
            self.devices
        };
        let mut devices = Vec::new();
        for device in given {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        let scalers: Vec<_> = devices.iter().map(GradScaler::of::<LC::Backend>).collect();
        let scales = self.config.apply_to::<LC::Backend>(&devices, |scales| {
            let whole = scalers.iter().all(GradScaler::has_batches);
            let (devices, micro_batches) = (self.sharing, self.accumulation);
            if scales && devices.max(micro_batches) > 1 && !whole {
                return Err(AmpError::PartialBatch {
                    devices,
                    micro_batches,
                });
            }
            Ok(())
        })?;

        let stop = Arc::new(StopWhenStuck(self.training.interrupter()));
        let mut training = self.training;
        if scales {
            training = training
                .metric_train_numeric(LossScaleMetric::new(scalers.clone()))
                .metric_train_numeric(SkippedStepsMetric::new(scalers.clone()));
        }
        if let Some(device) = devices.first() {
            let precision = PrecisionMetric::new::<LC::Backend>(device, scalers.clone());
            training = training.metric_train(precision);
        }
        if self.config.when_stuck() == WhenStuck::Stop {
            scalers
                .iter()
                .for_each(|scaler| scaler.shared.listen(&stop));
        }
        // The model was loaded before the devices were configured.
        if masters::is_half(&learner.model()) {
            learner.load_model(masters::with_masters(learner.model()).into_record());
        }
        Ok(training.launch(learner))
    }
}

/// Stops a training run when no loss scale helps.
struct StopWhenStuck(Interrupter);

impl Listener for StopWhenStuck {
    fn stuck(&self, error: &AmpError) {
        self.0.stop(Some(&error.to_string()));
    }
}
