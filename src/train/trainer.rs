//! A trainer for hand-written loops.

use burn_amp_core::{
    PendingStepRecord, ask_for_exceptions, check_trainer, continues_window, files_of_exceptions,
    replace_file,
};
use burn_core as burn;
use burn_core::config::Config;
use burn_core::module::AutodiffModule;
use burn_core::record::{BurnRecord, FileRecorder, PrecisionSettings, Record, Recorder};
use burn_core::tensor::backend::{AutodiffBackend, Backend};
use burn_core::tensor::{ElementConversion, Tensor, TensorData};
use burn_optim::lr_scheduler::LrScheduler;
use burn_optim::{GradientsAccumulator, LearningRate, Optimizer};
use serde::{Deserialize, Serialize};

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use super::mixed_precision::{in_precision, may_scale};
use super::{MixedPrecision, gradients};
use crate::autodiff::generic::is_amp;
use crate::device::DeviceState;
use crate::{
    AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, StepMetrics, StepProgress,
    Transition, WhenStuck, precision_of,
};

/// The settings of a [`MixedPrecisionTrainer`].
#[derive(Config, Debug, PartialEq)]
pub struct MixedPrecisionTrainerConfig {
    /// The precision of the forward and the backward pass. Default [`Auto`](Precision::Auto): the
    /// device's, from its [`AmpConfig`](crate::AmpConfig) or what the hardware does best.
    #[config(default = "Precision::Auto")]
    pub precision: Precision,
    /// How the loss is scaled in f16. In bf16 and FP32 no loss is scaled: the only value is then
    /// [`Disabled`](LossScaleConfig::Disabled). Default `None`: as the [`AmpConfig`](crate::AmpConfig) of the model's first
    /// device says, if the device computes in f16.
    pub loss_scale: Option<LossScaleConfig>,
    /// Batches for each optimizer step, which is on the mean of their losses. Default 1.
    #[config(default = 1)]
    pub grads_accumulation: usize,
    /// Clips a step's unscaled gradients to this total L2 norm, computed in FP32; see
    /// [`clip_grad_norm`](crate::clip_grad_norm). Default `None`.
    pub grad_clipping_norm: Option<f32>,
    /// What to do when steps are skipped one after the other, and no change of the loss scale helps.
    /// With [`WhenStuck::Stop`], [`train_step`](MixedPrecisionTrainer::train_step) returns
    /// [`AmpError::Stuck`]. Default [`WhenStuck::Log`].
    #[config(default = "WhenStuck::Log")]
    pub when_stuck: WhenStuck,
}

impl MixedPrecisionTrainerConfig {
    /// A trainer, from what Burn's `Learner::new` takes. A learning rate is a constant schedule.
    ///
    /// # Errors
    ///
    /// - [`AmpError::InvalidTrainer`] when `grads_accumulation` is 0, or `grad_clipping_norm` is not
    ///   positive.
    /// - [`AmpError::InvalidLossScale`] when a setting of `loss_scale` is out of its range.
    /// - [`AmpError::LossScaleWithoutF16`] when `loss_scale` is neither the default nor disabled,
    ///   with bf16 or FP32.
    /// - [`AmpError::UnsupportedPrecision`] when a device of the model cannot do the precision.
    pub fn init<B, M, O, S>(
        &self,
        model: M,
        optimizer: O,
        lr_scheduler: S,
    ) -> Result<MixedPrecisionTrainer<B, M, O, S>, AmpError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
    {
        check_trainer(self.grads_accumulation, self.grad_clipping_norm)?;
        let precision = self.precision;
        let devices = model.devices();
        if is_amp::<B>() {
            for device in &devices {
                in_precision(precision, || precision_of::<B>(device))?;
            }
        } else if let Some(device) = devices.first()
            && precision != Precision::F32
        {
            log::warn!(
                "burn-amp: the model is on {}, not on AmpAutodiff: nothing but its loss is in mixed \
                 precision here",
                B::name(device)
            );
        }
        // Where the device does not compute in f16, its configuration is for no loss.
        let in_f16 = |device: &&B::Device| {
            is_amp::<B>()
                && DeviceState::of::<B>(device).in_force::<B>(device).precision == Precision::F16
        };
        let of_device = || match devices.first().filter(in_f16) {
            Some(device) => *GradScaler::of::<B>(device).state().config(),
            None => LossScaleConfig::default(),
        };
        let may_scale = may_scale(precision);
        let is_asked =
            |config: &LossScaleConfig| may_scale || *config != LossScaleConfig::default();
        let given = self.loss_scale.filter(is_asked);
        let config = given.or_else(|| may_scale.then(of_device));
        let scaler = config.map(GradScaler::new).transpose()?;
        Ok(MixedPrecisionTrainer {
            model: Some(in_precision(precision, || gradients::in_f32(model).0)),
            optimizer,
            scheduler: lr_scheduler,
            mixed: MixedPrecision::new(precision, scaler)?,
            config: self.clone(),
            micro_batches: 0,
            accumulator: GradientsAccumulator::new(),
            backend: std::marker::PhantomData,
        })
    }
}

/// Trains a model in mixed precision with one call per batch: forward and backward pass, loss
/// scaling, gradient accumulation, clipping and learning rate. One record holds the whole state.
///
/// An overflow anywhere in an accumulation window skips the whole window. The scale is updated once
/// per optimizer step. The learning-rate scheduler advances only when a step is taken.
///
/// ```
/// use burn::{backend::Flex, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Tensor};
/// use burn_amp::{AmpAutodiff, MixedPrecisionTrainerConfig, Precision};
///
/// type B = AmpAutodiff<Flex>;
///
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(4, 1).init(&device);
/// let optimizer = SgdConfig::new().init();
/// let mut trainer = MixedPrecisionTrainerConfig::new()
///     .with_precision(Precision::F16)
///     .init(model, optimizer, 0.1)?; // a learning rate or a schedule
/// let input = Tensor::<B, 2>::ones([8, 4], &device);
/// let target = Tensor::<B, 2>::zeros([8, 1], &device);
/// let metrics = trainer.train_step(input, target, |model, input, target| {
///     (model.forward(input) - target).powi_scalar(2).mean()
/// })?;
/// println!("loss {}, stepped: {}", metrics.loss, metrics.stepped());
/// assert!(metrics.loss.is_finite());
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub struct MixedPrecisionTrainer<B, M, O, S = LearningRate> {
    /// `None` only while the optimizer holds the model.
    model: Option<M>,
    optimizer: O,
    scheduler: S,
    mixed: MixedPrecision,
    config: MixedPrecisionTrainerConfig,
    micro_batches: usize,
    accumulator: GradientsAccumulator<M>,
    backend: std::marker::PhantomData<B>,
}

const MODEL_IS_PRESENT: &str = "the model is here between steps";

/// The model, borrowed without the rest of the trainer.
fn present<M>(model: &Option<M>) -> &M {
    model.as_ref().expect(MODEL_IS_PRESENT)
}

/// Everything a trainer needs to resume exactly: the model, the optimizer, the scheduler, the
/// scaler, and an incomplete accumulation window.
pub type TrainerRecord<B, M, O, S> = (
    <M as burn_core::module::Module<B>>::Record,
    <O as Optimizer<M, B>>::Record,
    (<S as LrScheduler>::Record<B>, LossScaler),
    AccumulationRecord,
);

/// What a recorder's file contains.
type Saved<R, B, M, O, S> =
    BurnRecord<<TrainerRecord<B, M, O, S> as Record<B>>::Item<<R as Recorder<B>>::Settings>, B>;

/// A trainer's incomplete accumulation window at the time of the record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccumulationRecord {
    /// In a window, and of these so many are done.
    batches: usize,
    micro_batches: usize,
    pending: PendingStepRecord,
    gradients: Vec<(u64, TensorData)>,
    /// What the gradients are multiplied by.
    scale: f32,
    /// The files of the exceptions of the devices.
    #[serde(default)]
    exceptions: Vec<String>,
}

/// Saved as it is, in every precision.
impl<B: Backend> Record<B> for AccumulationRecord {
    type Item<S: PrecisionSettings> = Self;

    fn into_item<S: PrecisionSettings>(self) -> Self {
        self
    }

    fn from_item<S: PrecisionSettings>(item: Self, _device: &B::Device) -> Self {
        item
    }
}

impl<B, M, O, S> MixedPrecisionTrainer<B, M, O, S>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
{
    /// Trains on one batch. `loss_fn` computes the loss from the model, `input` and `target`, which
    /// may have any type. The loss has shape `[1]` and any float dtype.
    ///
    /// # Errors
    ///
    /// - [`AmpError::LossShape`] for a loss of another shape. Nothing is changed.
    /// - [`AmpError::ForeignGradients`] when the loss reaches no parameter of the model. The batch
    ///   and its window are then dropped.
    /// - [`AmpError::HalfParameter`] when a gradient on a plain `Autodiff` is in f16. The window is then
    ///   dropped.
    /// - [`AmpError::Stuck`] with [`WhenStuck::Stop`]. The trainer can continue.
    ///
    /// # Panics
    ///
    /// - Where the backend's `backward()` panics, for a loss that is not on a tape.
    /// - Where the optimizer's step panics. The model is lost then, and later calls panic as well.
    /// - When the loss cannot be read back synchronously, as on WebAssembly.
    pub fn train_step<I, T>(
        &mut self,
        input: I,
        target: T,
        loss_fn: impl FnOnce(&M, I, T) -> Tensor<B, 1>,
    ) -> Result<StepMetrics, AmpError> {
        self.forget_dropped();
        let model = present(&self.model);
        let (value, grads) = self.mixed.forward_context(|| {
            let loss = loss_fn(model, input, target);
            let given = loss.dims().to_vec();
            if given != [1] {
                return Err(AmpError::LossShape { given });
            }
            let value = loss.clone().inner();
            let loss = match self.config.grads_accumulation {
                1 => loss,
                batches => loss / batches as f64,
            };
            Ok((value, self.mixed.backward(loss, model)))
        })?;
        let scale = self.scaler().shared.pending().scale_in_use();
        if grads.is_empty() {
            self.forget_window();
            return Err(AmpError::no_gradients("train_step"));
        }
        self.accumulator.accumulate(model, grads);
        self.micro_batches += 1;
        let progress = if self.micro_batches < self.config.grads_accumulation {
            StepProgress::Accumulated
        } else {
            self.optimizer_step()?
        };
        Ok(StepMetrics {
            loss: value.into_scalar().elem(),
            scale: scale.unwrap_or(1.0),
            progress,
            skipped_steps: self.skipped_steps(),
            precision: self.precision(),
        })
    }

    /// Drops a window whose step the scaler no longer has.
    fn forget_dropped(&mut self) {
        if self.scaler().shared.has_dropped(self.micro_batches) {
            self.forget_window();
        }
    }

    /// Drops the accumulation window.
    fn forget_window(&mut self) {
        self.micro_batches = 0;
        self.accumulator = GradientsAccumulator::new();
        self.mixed.scaler().discard_step();
    }

    fn optimizer_step(&mut self) -> Result<StepProgress, AmpError> {
        self.micro_batches = 0;
        let mut grads = self.accumulator.grads();
        self.mixed
            .unscale::<B, M>(self.model(), &mut grads)
            .inspect_err(|_| self.mixed.scaler().discard_step())?;
        if let Some(max_norm) = self.config.grad_clipping_norm {
            gradients::clip_grad_norm::<B, M>(self.model(), &mut grads, max_norm)?;
        }
        let model = self.model.take().expect(MODEL_IS_PRESENT);
        let mut scheduler = self.scheduler.clone();
        let lr = scheduler.step();
        let scaler = self.mixed.scaler();
        let step = || scaler.step(&mut self.optimizer, lr, model, grads);
        let (model, stepped) = self.mixed.forward_context(step);
        self.model = Some(model);
        let stepped = stepped?;
        let transition = scaler.update()?;
        if stepped {
            self.scheduler = scheduler;
        }
        if let Transition::Stuck(reason) = transition
            && self.config.when_stuck == WhenStuck::Stop
        {
            let last = scaler.last_step().expect("there was a step");
            return Err(scaler.state().stuck_error(reason, &last));
        }
        Ok(if stepped {
            StepProgress::Stepped
        } else {
            StepProgress::Skipped
        })
    }

    /// The model.
    pub fn model(&self) -> &M {
        present(&self.model)
    }

    /// The model, to modify between steps.
    pub fn model_mut(&mut self) -> &mut M {
        self.model.as_mut().expect(MODEL_IS_PRESENT)
    }

    /// The model, when training is done.
    pub fn into_model(self) -> M {
        self.model.expect(MODEL_IS_PRESENT)
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// The scheduler in its state for the next step.
    pub fn scheduler(&self) -> &S {
        &self.scheduler
    }

    /// The given precision, possibly [`Auto`](Precision::Auto).
    pub fn precision(&self) -> Precision {
        self.mixed.precision()
    }

    /// What the next loss is multiplied by; 1 in bf16 and FP32.
    pub fn loss_scale(&self) -> f32 {
        let (scaler, device) = (self.scaler(), self.device());
        self.mixed.forward_context(|| scaler.scale_at::<B>(&device))
    }

    /// The model's first device.
    fn device(&self) -> B::Device {
        let devices = self.model().devices();
        devices.into_iter().next().unwrap_or_default()
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.mixed.scaler().skipped_steps()
    }

    /// The scaler. Where it discards the step under way, as in `load_state` and `discard_step`, the trainer
    /// drops its incomplete accumulation window, and the log has a warning.
    pub fn scaler(&self) -> &GradScaler {
        self.mixed.scaler()
    }

    /// Everything needed to resume exactly, even within an accumulation window, for any of Burn's
    /// recorders. To resume exactly, use a full-precision recorder.
    pub fn to_record(&mut self) -> TrainerRecord<B, M, O, S> {
        self.forget_dropped();
        let model = self.model().clone();
        let grads = self.accumulator.grads();
        let accumulation = AccumulationRecord {
            batches: self.config.grads_accumulation,
            micro_batches: self.micro_batches,
            pending: self.mixed.scaler().pending_record(),
            scale: self.scaler().carried_scale::<B>(),
            exceptions: files_of_exceptions(),
            gradients: gradients::to_data::<B, M>(&model, &grads),
        };
        self.accumulator.accumulate(&model, grads);
        (
            model.into_record(),
            self.optimizer.to_record(),
            (self.scheduler.to_record::<B>(), self.mixed.state()),
            accumulation,
        )
    }

    /// Resumes from a record. The settings stay this trainer's own; a window of another accumulation is
    /// dropped, and the log has a warning. The scaler's settings come from the record, unless only one
    /// of the two precisions scales the loss: see [`MixedPrecision::load_state`].
    ///
    /// # Panics
    ///
    /// Where Burn's `Module::load_record` panics, for another model's record. The trainer can go on, but
    /// its running statistics (batch norm) may be the record's.
    pub fn load_record(&mut self, record: TrainerRecord<B, M, O, S>) {
        let (model, optimizer, (scheduler, scaler), accumulation) = record;
        ask_for_exceptions(&accumulation.exceptions);
        // Burn's `RunningState` keeps the statistics of the last batch aside until the next forward pass or
        // `valid`, which would overwrite the loaded ones.
        drop(self.model().valid());
        let load = || self.model().clone().load_record(model);
        let model = self.mixed.forward_context(|| gradients::in_f32(load()).0);
        self.optimizer = self.optimizer.clone().load_record(optimizer);
        self.scheduler = self.scheduler.clone().load_record(scheduler);
        self.mixed.load_state(scaler);
        self.model = Some(model);
        self.accumulator = GradientsAccumulator::new();
        self.micro_batches = 0;
        let scaler = self.mixed.scaler();
        let own = self.config.grads_accumulation;
        if !continues_window(accumulation.micro_batches, accumulation.batches, own) {
            scaler.discard_step();
            return;
        }
        scaler.resume::<B>(accumulation.pending);
        self.micro_batches = accumulation.micro_batches;
        let carried = scaler.carried_scale::<B>();
        let factor = f64::from(carried) / f64::from(accumulation.scale);
        let model = present(&self.model);
        let grads = gradients::from_data::<B, M>(model, accumulation.gradients, factor);
        self.accumulator.accumulate(model, grads);
    }

    /// Saves [`to_record`](MixedPrecisionTrainer::to_record) to a file. The file ends up complete,
    /// or stays as it was, also while others save to it. The recorder sets the file's extension. A
    /// process that is killed meanwhile leaves a folder beside the file, with `.part` at its end.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save_file<R: FileRecorder<B>>(
        &mut self,
        path: impl Into<PathBuf>,
        recorder: &R,
    ) -> Result<(), AmpError>
    where
        <M as burn_core::module::Module<B>>::Record: 'static,
    {
        let given = path.into();
        // The recorder sets its extension on the path, so this code does too.
        let path = given.with_extension(R::file_extension());
        let mut save = || -> Result<(), Box<dyn Error>> {
            // As Burn's recorders do.
            fs::create_dir_all(path.parent().unwrap_or(&path))?;
            replace_file(&path, |part| {
                let mut part = part.with_file_name(given.file_name().unwrap_or_default());
                recorder.record(self.to_record(), part.clone())?;
                // Burn's recorders drop the error of the last bytes, as of a full disk: read them back.
                recorder.load_item::<Saved<R, B, M, O, S>>(&mut part)?;
                Ok(())
            })
        };
        save().map_err(|error| AmpError::unwritten(path.display(), error))
    }

    /// Resumes from a file that [`save_file`](MixedPrecisionTrainer::save_file) wrote with the same recorder,
    /// which sets the file's extension, with the model on `device`.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing or damaged. The trainer is then unchanged.
    ///
    /// # Panics
    ///
    /// Where [`load_record`](MixedPrecisionTrainer::load_record) panics.
    pub fn load_file<R: FileRecorder<B>>(
        &mut self,
        path: impl Into<PathBuf>,
        recorder: &R,
        device: &B::Device,
    ) -> Result<(), AmpError> {
        let path = path.into();
        let file = path.with_extension(R::file_extension());
        let record = recorder
            .load(path, device)
            .map_err(|error| AmpError::unread(file.display(), error))?;
        self.load_record(record);
        Ok(())
    }
}
