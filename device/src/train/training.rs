//! A `SupervisedTraining` with a precision.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Device;
use burn::train::{
    Interrupter, Learner, LearnerModel, LearningResult, MultiDeviceOptim, SupervisedTraining,
    TrainingStrategy,
};

use super::metrics::ItemMetrics;
use super::strategy::Strategy;
use crate::local::{self, mixed_precision};
use crate::{AmpError, Error, GradScaler, LossScaleConfig, Precision};

/// Sets the precision of a [`SupervisedTraining`], after all of Burn's settings. `to_fp16` and the
/// others are named as in fastai's `Learner`.
///
/// The model may be on a plain Burn device: [`launch`](AmpTraining::launch) moves the model and the data
/// loaders to the device that computes in the precision. In f16 the model's `TrainStep` scales the loss, with a
/// scaler that it gets from [`GradScaler::of`] each time: the training takes up the step of a scaler that was
/// dropped. The same model then trains in any precision:
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::{burn, GradScaler};
/// # use burn::nn::Linear;
/// # use burn::tensor::Tensor;
/// # use burn::train::{RegressionOutput, TrainOutput, TrainStep};
/// # #[derive(burn::module::Module, Debug)]
/// # struct Model { linear: Linear }
/// # impl Model {
/// #     fn forward(&self, batch: Tensor<2>) -> RegressionOutput {
/// #         let output = self.linear.forward(batch.clone());
/// #         RegressionOutput::new((output.clone() - batch.clone()).mean(), output, batch)
/// #     }
/// # }
/// impl TrainStep for Model {
///     # type Input = Tensor<2>;
///     # type Output = RegressionOutput;
///     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
///         let item = self.forward(batch);
///         let scaler = GradScaler::of(&item.loss.device());
///         let grads = scaler.scale(item.loss.clone()).backward();
///         TrainOutput::new(self, grads, item)
///     }
/// }
/// # }
/// ```
///
/// ```no_run
/// # use burn_amp_device::{burn, AmpTrainingExt, Error};
/// # use burn::train::{Learner, LearnerModel, SupervisedTraining};
/// # fn train<M: LearnerModel>(training: SupervisedTraining<M>, learner: Learner<M>)
/// # -> Result<(), Error> {
/// let result = training // SupervisedTraining::new(directory, train, valid) ...
///     .num_epochs(10)
///     .to_fp16()
///     .launch(learner)?;
/// # Ok(()) }
/// ```
pub trait AmpTrainingExt<M: LearnerModel>: Sized {
    /// Trains on the model's own device, which may compute in any precision and may be on another
    /// machine. If the device scales losses, a step that overflows is skipped.
    fn with_amp(self) -> AmpTraining<M>;

    /// Trains in a precision, on a device that [`mixed_precision`] returns.
    fn with_precision(self, precision: Precision) -> AmpTraining<M> {
        let training = self.with_amp();
        AmpTraining {
            precision: Some(precision),
            ..training
        }
    }

    /// Trains in f16.
    fn to_fp16(self) -> AmpTraining<M> {
        self.with_precision(Precision::F16)
    }

    /// Trains in bf16.
    fn to_bf16(self) -> AmpTraining<M> {
        self.with_precision(Precision::Bf16)
    }

    /// Trains in FP32.
    fn to_fp32(self) -> AmpTraining<M> {
        self.with_precision(Precision::F32)
    }
}

impl<M: LearnerModel> AmpTrainingExt<M> for SupervisedTraining<M> {
    fn with_amp(self) -> AmpTraining<M> {
        AmpTraining {
            training: self,
            precision: None,
            loss_scale: None,
            devices: Vec::new(),
            optim: MultiDeviceOptim::OptimMainDevice,
            checkpoints_gradients: false,
            stops_when_stuck: false,
        }
    }
}

/// A [`SupervisedTraining`] with a precision, ready to be launched.
///
/// It trains with its own strategy, instead of a strategy that was set before. Gradient checkpointing that
/// was set on [`SupervisedTraining`] is not visible to this crate: set it here.
///
/// A step that overflows changes neither the model nor the optimizer, and the learning rate does not
/// advance. With accumulation, and with several devices, an overflow anywhere skips the whole batch.
/// The model's `TrainStep` scales its loss, and leaves `unscale`, `step` and `update` to the training:
/// clip with the optimizer's own clipping.
pub struct AmpTraining<M: LearnerModel> {
    training: SupervisedTraining<M>,
    /// If `None`, the precision of the model's device.
    precision: Option<Precision>,
    /// If `None`, the configuration of the devices' scalers.
    loss_scale: Option<LossScaleConfig>,
    /// If empty, the model's first device.
    devices: Vec<Device>,
    /// With several devices.
    optim: MultiDeviceOptim,
    checkpoints_gradients: bool,
    stops_when_stuck: bool,
}

impl<M: LearnerModel> AmpTraining<M> {
    /// Configures the loss scaling of the devices at launch. Without this call, their scalers keep
    /// their configuration and state: see [`GradScaler::of`].
    pub fn with_loss_scale(mut self, config: impl Into<LossScaleConfig>) -> Self {
        self.loss_scale = Some(config.into());
        self
    }

    /// Trains on these devices, each on its part of a batch, as `ExecutionStrategy::MultiDevice` does.
    /// The first device validates. Distributed data parallel training has no counterpart here.
    pub fn with_devices(
        mut self,
        devices: impl IntoIterator<Item = Device>,
        optim: MultiDeviceOptim,
    ) -> Self {
        self.devices = devices.into_iter().collect();
        self.optim = optim;
        self
    }

    /// Like [`SupervisedTraining::gradient_checkpointing`].
    pub fn gradient_checkpointing(mut self) -> Self {
        self.checkpoints_gradients = true;
        self
    }

    /// Stops the training when it is stuck: see [`Transition::Stuck`](crate::Transition).
    /// [`LearningResult::interrupted`] has the reason. Without this call, the error is only logged.
    pub fn stop_when_stuck(mut self) -> Self {
        self.stops_when_stuck = true;
        self
    }

    /// A handle to stop the training from elsewhere.
    pub fn interrupter(&self) -> Interrupter {
        self.training.interrupter()
    }

    /// Moves the model to its devices, registers the metrics and trains.
    ///
    /// The metrics are [`PrecisionMetric`](crate::PrecisionMetric) and, if losses are scaled, also
    /// [`LossScaleMetric`](crate::LossScaleMetric) and [`SkippedStepsMetric`](crate::SkippedStepsMetric). The
    /// resulting model computes in the precision; its parameters are FP32.
    ///
    /// # Errors
    ///
    /// Before the first step:
    ///
    /// - the errors of [`mixed_precision`], when a device does not support the precision;
    /// - [`AmpError::LossScaleWithoutF16`] when a loss scale is given, and no loss is scaled;
    /// - [`AmpError::InvalidLossScale`] when a setting of the loss scale is out of its range;
    /// - [`Error::RepeatedDevice`] when a device is given twice, and losses are scaled.
    ///
    /// After a step. The model is then lost, except for its checkpoints:
    ///
    /// - [`AmpError::NothingScaled`] in the first step, when losses are to be scaled and the model's
    ///   `TrainStep` scaled none;
    /// - [`AmpError::ForeignGradients`] when a step has no gradient;
    /// - [`AmpError::HalfParameter`] when the program makes a trained parameter half under way;
    /// - [`AmpError::SeveralSteps`] with several devices, when another training runs at once on one of them;
    /// - [`Error::Read`] when a device gives no answer.
    ///
    /// # Panics
    ///
    /// Where [`SupervisedTraining::launch`] panics.
    pub fn launch(self, learner: Learner<M>) -> Result<LearningResult<M>, Error> {
        let devices = match self.devices.is_empty() {
            true => learner.model().devices().into_iter().take(1).collect(),
            false => self.devices,
        };
        let devices = devices.into_iter();
        let devices: Vec<_> = devices
            .map(|device| on(device, self.precision, self.checkpoints_gradients))
            .collect::<Result<_, _>>()?;
        let scaled: Vec<_> = devices
            .iter()
            .filter(|device| GradScaler::scales_on(device))
            .map(GradScaler::of)
            .collect();
        let will_scale = |device: &Device| {
            let configured = || *GradScaler::of(device).state().config();
            let config = self.loss_scale.unwrap_or_else(configured);
            GradScaler::scales_on(device) && config != LossScaleConfig::Disabled
        };
        let is_repeated =
            |&i: &usize| will_scale(&devices[i]) && devices[..i].contains(&devices[i]);
        if let Some(repeated) = (0..devices.len()).find(is_repeated) {
            let device = local::described(&devices[repeated]);
            return Err(Error::RepeatedDevice { device });
        }
        if let Some(config) = self.loss_scale {
            if scaled.is_empty() {
                let here = local::below(&devices[0].clone().without_autodiff());
                let precision = here.map_or(Precision::F32, |(_, in_force)| in_force.precision);
                return Err(AmpError::LossScaleWithoutF16 { precision }.into());
            }
            for scaler in &scaled {
                scaler.configure(config)?;
            }
        }

        let metrics = ItemMetrics::new(&devices[0]);
        let shown = metrics.queues();
        let mut training = self.training;
        if scaled.iter().any(|scaler| scaler.state().is_enabled()) {
            training = training
                .metric_train_numeric(metrics.scale)
                .metric_train_numeric(metrics.skipped);
        }
        training = training.metric_train(metrics.precision);
        let failed = Arc::new(Mutex::new(None));
        let strategy = Strategy {
            devices,
            optim: self.optim,
            shown: shown.into(),
            stops_when_stuck: self.stops_when_stuck,
            failed: failed.clone(),
        };
        let result = training
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
            .launch(learner);
        let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        failed.map_or(Ok(result), Err)
    }
}

/// The device for training: with autodiff, and in the precision if one is given.
fn on(
    device: Device,
    precision: Option<Precision>,
    checkpoints_gradients: bool,
) -> Result<Device, Error> {
    let device = match precision {
        None => device,
        Some(precision) => {
            let below = local::below(&device.clone().without_autodiff());
            let plain = below.map_or_else(
                || device.clone(),
                |(below, _)| below.with_autodiff_context_from(&device),
            );
            mixed_precision(plain, precision)?
        }
    };
    let device = if device.is_autodiff() {
        device
    } else {
        device.autodiff()
    };
    Ok(if checkpoints_gradients {
        device.gradient_checkpointing()
    } else {
        device
    })
}
