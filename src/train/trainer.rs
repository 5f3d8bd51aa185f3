//! A trainer for hand-written loops.

use burn_core::module::AutodiffModule;
use burn_core::record::{FileRecorder, PrecisionSettings, Record};
use burn_core::tensor::backend::{AutodiffBackend, Backend};
use burn_core::tensor::{ElementConversion, Tensor, TensorData};
use burn_optim::lr_scheduler::LrScheduler;
use burn_optim::{GradientsAccumulator, GradientsParams, LearningRate, Optimizer};
use serde::{Deserialize, Serialize};

use std::fs::{self, File};
use std::path::PathBuf;

use super::{MixedPrecision, gradients};
use crate::scaler::Begun;
use crate::scaler::explicit::is_amp;
use crate::{
    AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, Transition, precision_of,
    with_precision,
};

/// Trains a model in mixed precision, a call a batch: forward and backward pass, loss scaling,
/// accumulation, clipping, learning rate, and the state of all of it in one record.
///
/// An overflow anywhere in an accumulation window skips the whole window; the scale is updated once
/// for each optimizer step, and the learning-rate scheduler advances over steps that are taken
/// alone.
///
/// ```
/// use burn::{backend::Flex, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Tensor};
/// use burn_amp::{AmpAutodiff, LossScaleConfig, MixedPrecisionTrainer, Precision};
///
/// type B = AmpAutodiff<Flex>;
///
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(4, 1).init(&device);
/// let optimizer = SgdConfig::new().init();
/// let mut trainer =
///     MixedPrecisionTrainer::new(model, optimizer, Precision::F16, LossScaleConfig::default())?
///         .with_learning_rate(0.1);
/// let input = Tensor::<B, 2>::ones([8, 4], &device);
/// let target = Tensor::<B, 2>::zeros([8, 1], &device);
/// let metrics = trainer.train_step(input, target, |model, input, target| {
///     (model.forward(input) - target).powi_scalar(2).mean()
/// })?;
/// println!("loss {}, stepped: {}", metrics.loss, metrics.stepped());
/// assert!(metrics.loss.is_finite());
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub struct MixedPrecisionTrainer<B, M, O, S = LearningRate>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
{
    /// Absent only while the optimizer has it.
    model: Option<M>,
    optimizer: O,
    scheduler: S,
    mixed: MixedPrecision,
    accumulation: u32,
    max_norm: Option<f32>,
    stuck_is_error: bool,
    micro_batches: u32,
    accumulator: GradientsAccumulator<M>,
    backend: std::marker::PhantomData<B>,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepProgress {
    /// Its gradients wait for the rest of the accumulation window.
    Accumulated,
    /// The optimizer's step was taken.
    Stepped,
    /// The step was skipped, with all of its window.
    Skipped,
}

/// A batch's figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The loss of this batch as `loss_fn` gave it, without any scale and not divided by the
    /// batches of a window. Reading it waits for the device, once a batch.
    pub loss: f64,
    /// What the loss was multiplied with; 1 in bf16 and FP32.
    pub scale: f32,
    /// What became of the batch.
    pub progress: StepProgress,
    /// Steps skipped so far.
    pub skipped_steps: u64,
    /// The precision of the trainer as it was given, which may be [`Auto`](Precision::Auto).
    pub precision: Precision,
}

impl StepMetrics {
    /// Whether the optimizer's step was taken.
    pub fn stepped(&self) -> bool {
        self.progress == StepProgress::Stepped
    }
}

/// Everything a trainer needs to go on exactly: the model, the optimizer, the scheduler and the
/// scaler, and the part of an accumulation window that was there.
pub type TrainerRecord<B, M, O, S> = (
    <M as burn_core::module::Module<B>>::Record,
    <O as Optimizer<M, B>>::Record,
    (<S as LrScheduler>::Record<B>, LossScaler),
    AccumulationRecord,
);

/// The part of an accumulation window that was there when a trainer was recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccumulationRecord {
    micro_batches: u32,
    begun: Begun,
    gradients: Vec<(u64, TensorData)>,
}

impl<B: Backend> Record<B> for AccumulationRecord {
    type Item<S: PrecisionSettings> = Self;

    fn into_item<S: PrecisionSettings>(self) -> Self {
        self
    }

    fn from_item<S: PrecisionSettings>(item: Self, _device: &B::Device) -> Self {
        item
    }
}

impl<B, M, O> MixedPrecisionTrainer<B, M, O>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    /// A trainer at a learning rate of 1e-3, until
    /// [`with_learning_rate`](MixedPrecisionTrainer::with_learning_rate) or
    /// [`with_scheduler`](MixedPrecisionTrainer::with_scheduler) say otherwise.
    ///
    /// `loss_scale` is for f16; with bf16 and FP32 it has to be the default or disabled, and is not
    /// used.
    ///
    /// # Errors
    ///
    /// - [`AmpError::InvalidLossScale`] when a setting is out of its range.
    /// - [`AmpError::LossScaleWithoutF16`] when another than the default is given with bf16 or
    ///   FP32.
    /// - [`AmpError::UnsupportedPrecision`] when a device of the model cannot do the precision.
    pub fn new(
        model: M,
        optimizer: O,
        precision: Precision,
        loss_scale: LossScaleConfig,
    ) -> Result<Self, AmpError> {
        for device in model.devices().iter().filter(|device| is_amp::<B>(device)) {
            with_precision(precision, || precision_of::<B>(device))?;
        }
        let scaler = GradScaler::new(loss_scale)?;
        let scaler = match loss_scale == LossScaleConfig::default() {
            true if !precision.scales_loss() && precision != Precision::Auto => None,
            _ => Some(scaler),
        };
        Ok(Self {
            model: Some(model),
            optimizer,
            scheduler: 1e-3,
            mixed: MixedPrecision::of(precision, scaler)?,
            accumulation: 1,
            max_norm: None,
            stuck_is_error: false,
            micro_batches: 0,
            accumulator: GradientsAccumulator::new(),
            backend: std::marker::PhantomData,
        })
    }

    /// Sets a learning rate that stays as it is. Default 1e-3.
    pub fn with_learning_rate(mut self, learning_rate: LearningRate) -> Self {
        self.scheduler = learning_rate;
        self
    }
}

impl<B, M, O, S> MixedPrecisionTrainer<B, M, O, S>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
{
    /// Sets a learning-rate scheduler. It advances with every step that is taken, and with no
    /// other.
    pub fn with_scheduler<T: LrScheduler>(self, scheduler: T) -> MixedPrecisionTrainer<B, M, O, T> {
        MixedPrecisionTrainer {
            model: self.model,
            optimizer: self.optimizer,
            scheduler,
            mixed: self.mixed,
            accumulation: self.accumulation,
            max_norm: self.max_norm,
            stuck_is_error: self.stuck_is_error,
            micro_batches: self.micro_batches,
            accumulator: self.accumulator,
            backend: self.backend,
        }
    }

    /// Takes a step after so many batches, on the mean of their losses. Default 1.
    ///
    /// # Panics
    ///
    /// For 0 batches.
    pub fn with_accumulation(mut self, batches: u32) -> Self {
        assert!(batches > 0, "a step needs at least 1 batch, 0 were given");
        self.accumulation = batches;
        self
    }

    /// Scales the unscaled gradients of a step down where the L2 norm of all of them together, in
    /// FP32, is above `max_norm`: times `min(1, max_norm / (norm + 1e-6))`, as PyTorch's
    /// `torch.nn.utils.clip_grad_norm_`. By default they are not clipped.
    ///
    /// # Panics
    ///
    /// For a norm that is not positive.
    pub fn with_grad_clipping_norm(mut self, max_norm: f32) -> Self {
        assert!(
            max_norm > 0.0,
            "a norm to clip at is positive, {max_norm} was given"
        );
        self.max_norm = Some(max_norm);
        self
    }

    /// Makes [`AmpError::StuckAtMinimum`] of a scale that is stuck at its minimum, which otherwise
    /// only the log tells.
    pub fn with_stuck_as_error(mut self) -> Self {
        self.stuck_is_error = true;
        self
    }

    /// Trains on one batch. `loss_fn` gives the loss, of shape `[1]` and any float dtype, from the
    /// model, `input` and `target`, of whatever types it takes.
    ///
    /// # Errors
    ///
    /// - [`AmpError::LossShape`] for a loss of another shape. Nothing is changed.
    /// - [`AmpError::ForeignGradients`] when the loss reaches no parameter of the model. The batch
    ///   is then dropped with its window.
    /// - [`AmpError::StuckAtMinimum`] when that was asked for. The trainer can go on.
    ///
    /// # Panics
    ///
    /// - As the backend's `backward()`, for a loss that no tape knows.
    /// - When the loss cannot be read back synchronously, as on WebAssembly.
    pub fn train_step<I, T>(
        &mut self,
        input: I,
        target: T,
        loss_fn: impl FnOnce(&M, I, T) -> Tensor<B, 1>,
    ) -> Result<StepMetrics, AmpError> {
        let model = self
            .model
            .as_ref()
            .expect("the model is here between steps");
        let (value, scale, grads) = self.mixed.forward_context(|| {
            let loss = loss_fn(model, input, target);
            let given = loss.dims();
            if given != [1] {
                return Err(AmpError::LossShape {
                    given: given.to_vec(),
                });
            }
            let value = loss.clone().inner();
            let scale = self.mixed.scaler().scale_at::<B>(&loss.device());
            let loss = match self.accumulation {
                1 => loss,
                batches => loss / batches,
            };
            Ok((value, scale, self.mixed.backward(loss, model)))
        })?;
        self.accumulator.accumulate(model, grads);
        self.micro_batches += 1;
        let progress = match self.micro_batches < self.accumulation {
            true => StepProgress::Accumulated,
            false => self.optimizer_step()?,
        };
        Ok(StepMetrics {
            loss: value.into_scalar().elem(),
            scale,
            progress,
            skipped_steps: self.skipped_steps(),
            precision: self.precision(),
        })
    }

    fn optimizer_step(&mut self) -> Result<StepProgress, AmpError> {
        self.micro_batches = 0;
        let grads = self.accumulator.grads();
        // Whatever may fail does so here, before the model is out of hand.
        let grads = self
            .mixed
            .unscale::<B, M>(self.model(), grads)
            .inspect_err(|_| self.mixed.scaler().resume(Begun::default()))?;
        let grads = match self.max_norm {
            Some(max_norm) => gradients::clip_grad_norm::<B, M>(self.model(), grads, max_norm),
            None => grads,
        };
        let model = self.model.take().expect("the model is here between steps");
        let mut scheduler = self.scheduler.clone();
        let lr = scheduler.step();
        let (model, stepped, transition) = self
            .mixed
            .step_and_update(&mut self.optimizer, lr, model, grads)
            .expect("the gradients are checked");
        self.model = Some(model);
        if stepped {
            self.scheduler = scheduler;
        }
        if transition == Transition::StuckAtMinimum && self.stuck_is_error {
            return Err(AmpError::StuckAtMinimum {
                steps: self.mixed.state().skipped_in_a_row(),
                scale: self.loss_scale(),
                parameters: self
                    .mixed
                    .scaler()
                    .last_step()
                    .map(|step| step.listed())
                    .unwrap_or_default(),
            });
        }
        Ok(match stepped {
            true => StepProgress::Stepped,
            false => StepProgress::Skipped,
        })
    }

    /// The model.
    pub fn model(&self) -> &M {
        self.model
            .as_ref()
            .expect("the model is here between steps")
    }

    /// The model, to be changed between steps.
    pub fn model_mut(&mut self) -> &mut M {
        self.model
            .as_mut()
            .expect("the model is here between steps")
    }

    /// The model, when training is done.
    pub fn into_model(self) -> M {
        self.model.expect("the model is here between steps")
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// The scheduler as it will be for the next step.
    pub fn scheduler(&self) -> &S {
        &self.scheduler
    }

    /// The precision as it was given, which may be [`Auto`](Precision::Auto).
    pub fn precision(&self) -> Precision {
        self.mixed.precision()
    }

    /// What the next loss is multiplied with; 1 in bf16 and FP32.
    pub fn loss_scale(&self) -> f32 {
        let device = self.model().devices().into_iter().next();
        let scale = || {
            let scaler = self.mixed.scaler();
            scaler.scale_at::<B>(&device.unwrap_or_default())
        };
        self.mixed.forward_context(scale)
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.mixed.scaler().skipped_steps()
    }

    /// The scaler.
    pub fn scaler(&self) -> &GradScaler {
        self.mixed.scaler()
    }

    /// Everything that is needed to go on exactly, also in the middle of an accumulation window,
    /// for any of Burn's recorders. One of full precision is needed for that.
    pub fn to_record(&mut self) -> TrainerRecord<B, M, O, S> {
        let grads: GradientsParams = self.accumulator.grads();
        let accumulation = AccumulationRecord {
            micro_batches: self.micro_batches,
            begun: self.mixed.scaler().begun::<B>(),
            gradients: gradients::to_data::<B, M>(self.model(), &grads),
        };
        let model = self
            .model
            .as_ref()
            .expect("the model is here between steps");
        self.accumulator.accumulate(model, grads);
        (
            model.clone().into_record(),
            self.optimizer.to_record(),
            (self.scheduler.to_record::<B>(), self.mixed.state()),
            accumulation,
        )
    }

    /// Goes on from a record. Precision, accumulation and clipping are this trainer's own; the
    /// scaler's settings are the record's, but for one of a precision that scales where this one
    /// does not, or the other way round: see [`MixedPrecision::load_state`].
    ///
    /// # Panics
    ///
    /// As Burn's `Module::load_record`, for the record of another model. Nothing is changed then.
    pub fn load_record(&mut self, record: TrainerRecord<B, M, O, S>) {
        let (model, optimizer, (scheduler, scaler), accumulation) = record;
        let model = self.model().clone().load_record(model);
        self.optimizer = self.optimizer.clone().load_record(optimizer);
        self.scheduler = self.scheduler.clone().load_record(scheduler);
        self.mixed.load_state(scaler);
        self.mixed.scaler().resume(accumulation.begun);
        self.micro_batches = accumulation.micro_batches;
        self.accumulator = GradientsAccumulator::new();
        let grads = gradients::from_data::<B, M>(&model, accumulation.gradients);
        self.accumulator.accumulate(&model, grads);
        self.model = Some(model);
    }

    /// Saves [`to_record`](MixedPrecisionTrainer::to_record) to a file, which afterwards holds all
    /// of it or is as it was before. The recorder sets the file's extension.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when it cannot be written.
    pub fn save_file<R: FileRecorder<B>>(
        &mut self,
        path: impl Into<PathBuf>,
        recorder: &R,
    ) -> Result<(), AmpError>
    where
        <M as burn_core::module::Module<B>>::Record: 'static,
    {
        let path = path.into();
        let mut part = path.file_stem().unwrap_or_default().to_owned();
        part.push("-part");
        let part = path.with_file_name(part);
        // The recorder puts its extension on the one, and so do we on the other.
        let file = |path: &PathBuf| path.with_extension(R::file_extension());
        let whole = || {
            File::open(file(&part))?.sync_all()?;
            fs::rename(file(&part), file(&path))
        };
        recorder
            .record(self.to_record(), part.clone())
            .map_err(|error| error.to_string())
            .and_then(|()| whole().map_err(|error| error.to_string()))
            .map_err(|error| {
                // Half a file helps nobody, and may not even be there.
                let _ = fs::remove_file(file(&part));
                AmpError::unwritten(file(&path).display(), error)
            })
    }

    /// Goes on from a file that [`save_file`](MixedPrecisionTrainer::save_file) wrote, with the
    /// model on `device`.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when it is missing or damaged; the trainer is then as it was.
    ///
    /// # Panics
    ///
    /// As [`load_record`](MixedPrecisionTrainer::load_record).
    pub fn load_file<R: FileRecorder<B>>(
        &mut self,
        path: impl Into<PathBuf>,
        recorder: &R,
        device: &B::Device,
    ) -> Result<(), AmpError> {
        let path = path.into();
        let record = recorder
            .load(path.clone(), device)
            .map_err(|error| AmpError::unread(path.display(), error))?;
        self.load_record(record);
        Ok(())
    }
}
