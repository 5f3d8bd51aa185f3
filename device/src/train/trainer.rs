//! A trainer for hand-written loops.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use burn::config::Config;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Bytes, Tensor, TensorData};
use burn_amp_core::{PendingStepRecord, check_trainer, continues_window, replace_file};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::train::gradients::{clip_grad_norm, in_f32, widen};
use crate::{
    AmpError, Error, GradScaler, LossScaleConfig, LossScaler, Precision, StepMetrics, StepProgress,
    Transition, WhenStuck, local,
};

/// The settings of a [`MixedPrecisionTrainer`]. The precision is that of the model's device.
#[derive(Config, Debug, PartialEq)]
pub struct MixedPrecisionTrainerConfig {
    /// How the loss is scaled, whatever the precision of the device. Default `None`: as configured for
    /// the scaler of the model's first device ([`GradScaler::of`]), which is disabled in bf16 and FP32.
    pub loss_scale: Option<LossScaleConfig>,
    /// Batches for each optimizer step, which is on the mean of their losses. Gradients are
    /// accumulated in FP32. Default 1.
    #[config(default = 1)]
    pub grads_accumulation: usize,
    /// Clips a step's unscaled gradients to this total L2 norm, computed in FP32; see
    /// [`clip_grad_norm`]. Default `None`.
    pub grad_clipping_norm: Option<f32>,
    /// What to do when steps are skipped one after the other, and no change of the loss scale helps.
    /// With [`WhenStuck::Stop`], [`train_step`](MixedPrecisionTrainer::train_step) returns
    /// [`AmpError::Stuck`]. Default [`WhenStuck::Log`].
    #[config(default = "WhenStuck::Log")]
    pub when_stuck: WhenStuck,
}

impl MixedPrecisionTrainerConfig {
    /// A trainer, from what Burn's `Learner::new` takes. A learning rate is a constant schedule. The
    /// model's device has autodiff. The trainer has a scaler of its own. If a trained parameter is half in the
    /// program, as after a file in half, the whole model becomes FP32, with frozen parameters and running statistics,
    /// and the log has a line.
    ///
    /// # Errors
    ///
    /// - [`AmpError::InvalidTrainer`] when `grads_accumulation` is 0, or `grad_clipping_norm` is not
    ///   positive.
    /// - [`AmpError::InvalidLossScale`] when a setting of `loss_scale` is out of its range.
    pub fn init<M: Module>(
        &self,
        model: M,
        optimizer: impl Into<ModuleOptimizer>,
        lr_scheduler: impl Into<ModuleLrScheduler>,
    ) -> Result<MixedPrecisionTrainer<M>, AmpError> {
        check_trainer(self.grads_accumulation, self.grad_clipping_norm)?;
        let (model, _) = in_f32(model);
        let device = model.devices().into_iter().next().unwrap_or_default();
        let of_device = || *GradScaler::of(&device).state().config();
        Ok(MixedPrecisionTrainer {
            model: Some(model),
            optimizer: optimizer.into(),
            schedule: lr_scheduler.into(),
            scaler: GradScaler::new(self.loss_scale.unwrap_or_else(of_device))?,
            config: self.clone(),
            micro_batches: 0,
            accumulator: GradientsAccumulator::new(),
        })
    }
}

/// Trains a model with one call per batch: forward and backward pass, loss scaling, gradient
/// accumulation, clipping and learning rate. One record holds the whole state.
///
/// Gradients reach the optimizer in FP32. An overflow anywhere in an accumulation window skips the
/// whole window. The scale is updated once per optimizer step. The learning-rate schedule advances
/// only when a step is taken.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::burn;
/// use burn::{nn::LinearConfig, optim::SgdConfig, tensor::Tensor};
/// use burn_amp_device::{MixedPrecisionTrainerConfig, Precision, flex};
///
/// let device = flex(Precision::F16)?.autodiff();
/// let model = LinearConfig::new(4, 1).init(&device);
/// let optimizer = SgdConfig::new().init();
/// let mut trainer = MixedPrecisionTrainerConfig::new()
///     .init(model, optimizer, 0.1)?; // a learning rate or a schedule
/// let input = Tensor::<2>::ones([8, 4], &device);
/// let target = Tensor::<2>::zeros([8, 1], &device);
/// let metrics = trainer.train_step(input, target, |model, input, target| {
///     (model.forward(input) - target).powi_scalar(2).mean()
/// })?;
/// println!("loss {}, stepped: {}", metrics.loss, metrics.stepped());
/// assert!(metrics.loss.is_finite());
/// # }
/// # Ok::<(), burn_amp_device::Error>(())
/// ```
pub struct MixedPrecisionTrainer<M> {
    /// `None` only while the optimizer holds the model.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    schedule: ModuleLrScheduler,
    scaler: GradScaler,
    config: MixedPrecisionTrainerConfig,
    micro_batches: usize,
    accumulator: GradientsAccumulator<M>,
}

const MODEL_IS_PRESENT: &str = "the model is here between steps";

/// The model, borrowed without the rest of the trainer.
fn present<M>(model: &Option<M>) -> &M {
    model.as_ref().expect(MODEL_IS_PRESENT)
}

/// Moves the running statistics of the last batch to where a record reads and writes them: Burn's
/// `RunningState` keeps them aside until the next forward pass or `valid`, which overwrites what was loaded.
/// Returns the model with running statistics of its own, which clones would share.
fn end_running_statistics<M: Module>(model: &M) -> M {
    model.valid()
}

/// The optimizer with the record's state. Burn leaves out what is the state of another optimizer.
fn resumed_optimizer(
    optimizer: &ModuleOptimizer,
    record: OptimizerRecord,
) -> Result<ModuleOptimizer, AmpError> {
    let tensors = record.len();
    let resumed = optimizer.clone().load_record(record);
    match resumed.to_record().len() == tensors {
        true => Ok(resumed),
        false => Err(AmpError::unread(
            "a record",
            "the state of its optimizer does not fit this one",
        )),
    }
}

/// The schedule with the record's state. A run may go on with another schedule, so that is a warning.
fn resumed_schedule(schedule: &ModuleLrScheduler, record: LrSchedulerRecord) -> ModuleLrScheduler {
    let resumed = schedule.clone().load_record(record.clone());
    // The scalars have no other public access.
    if !record.is_empty() && format!("{:?}", resumed.to_record()) != format!("{record:?}") {
        log::warn!(
            "burn-amp-device: the schedule has taken only a part of its state in the trainer's record: a \
             schedule of another kind starts over"
        );
    }
    resumed
}

/// Everything a trainer needs to resume exactly: the model, the optimizer, the schedule, the scaler,
/// and an incomplete accumulation window.
#[derive(Debug)]
pub struct TrainerRecord {
    /// The parameters.
    pub model: ModuleRecord,
    /// The optimizer's state.
    pub optimizer: OptimizerRecord,
    /// The schedule's state.
    pub schedule: LrSchedulerRecord,
    /// The scaler's state and settings.
    pub scaler: LossScaler,
    /// The incomplete accumulation window.
    pub accumulation: AccumulationRecord,
}

/// A trainer's incomplete accumulation window at the time of the record.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct AccumulationRecord {
    /// In a window, and of these so many are done.
    batches: usize,
    micro_batches: usize,
    pending: PendingStepRecord,
    gradients: Vec<(u64, TensorData)>,
    /// What the gradients are multiplied by.
    scale: f32,
}

/// The file of a record: MessagePack, with Burn's records as the bytes of their own format.
#[derive(Serialize, Deserialize)]
struct RecordFile {
    model: Vec<ByteBuf>,
    optimizer: Vec<ByteBuf>,
    schedule: Vec<ByteBuf>,
    scaler: LossScaler,
    accumulation: AccumulationRecord,
}

impl<M: Module> MixedPrecisionTrainer<M> {
    /// Trains on one batch. `loss_fn` computes the loss from the model, `input` and `target`, which
    /// may have any type. The loss has shape `[1]` and any float dtype.
    ///
    /// # Errors
    ///
    /// - [`AmpError::LossShape`] for a loss of another shape. Nothing is changed.
    /// - [`AmpError::ForeignGradients`] when the loss reaches no parameter of the model. The batch
    ///   and its window are then dropped.
    /// - [`AmpError::HalfParameter`] when a trained parameter is half in the program, as after a record that was
    ///   loaded into [`model_mut`](MixedPrecisionTrainer::model_mut). The window is then dropped.
    /// - [`AmpError::Stuck`] with [`WhenStuck::Stop`]. The trainer can continue.
    /// - [`Error::Read`] when the device gives no answer. The window is then dropped.
    ///
    /// # Panics
    ///
    /// Where `loss.backward()` panics, for a loss without autodiff.
    pub fn train_step<I, T>(
        &mut self,
        input: I,
        target: T,
        loss_fn: impl FnOnce(&M, I, T) -> Tensor<1>,
    ) -> Result<StepMetrics, Error> {
        self.forget_dropped();
        let model = present(&self.model);
        let loss = loss_fn(model, input, target);
        let given = loss.dims().to_vec();
        if given != [1] {
            return Err(AmpError::LossShape { given }.into());
        }
        let value = loss.clone().inner();
        let scale = self.scaler.scale_of_step();
        let loss = match self.config.grads_accumulation {
            1 => loss,
            batches => loss / batches as f64,
        };
        let mut grads = self.scaler.backward(loss, model);
        if grads.is_empty() {
            self.forget_window();
            return Err(AmpError::no_gradients("train_step").into());
        }
        let value = match value.try_into_data() {
            Ok(data) => data.iter::<f64>().next().unwrap_or(f64::NAN),
            Err(error) => {
                self.forget_window();
                return Err(Error::Read(error));
            }
        };
        widen(model, &mut grads);
        self.accumulator.accumulate(model, grads);
        self.micro_batches += 1;
        let progress = if self.micro_batches < self.config.grads_accumulation {
            StepProgress::Accumulated
        } else {
            self.optimizer_step()?
        };
        Ok(StepMetrics {
            loss: value,
            scale,
            progress,
            skipped_steps: self.skipped_steps(),
            precision: self.precision(),
        })
    }

    /// Drops a window whose step the scaler no longer has.
    fn forget_dropped(&mut self) {
        if self.scaler.shared.has_dropped(self.micro_batches) {
            self.forget_window();
        }
    }

    /// Drops the accumulation window.
    fn forget_window(&mut self) {
        self.micro_batches = 0;
        self.accumulator = GradientsAccumulator::new();
        self.scaler.discard_step();
    }

    fn optimizer_step(&mut self) -> Result<StepProgress, Error> {
        self.micro_batches = 0;
        let mut grads = self.accumulator.grads();
        let model = present(&self.model);
        let unscaled = self.scaler.unscale(model, &mut grads);
        unscaled.inspect_err(|_| self.scaler.discard_step())?;
        if let Some(max_norm) = self.config.grad_clipping_norm {
            clip_grad_norm(model, &mut grads, max_norm)?;
        }
        let model = self.model.take().expect(MODEL_IS_PRESENT);
        let mut schedule = self.schedule.clone();
        let lr = schedule.step();
        let (model, stepped) = self.scaler.step(&mut self.optimizer, lr, model, grads);
        self.model = Some(model);
        let stepped = stepped.inspect_err(|_| self.scaler.discard_step())?;
        let transition = self.scaler.update()?;
        if stepped {
            self.schedule = schedule;
        }
        if let Transition::Stuck(reason) = transition
            && self.config.when_stuck == WhenStuck::Stop
        {
            let last = self.scaler.last_step().expect("there was a step");
            return Err(self.scaler.state().stuck_error(reason, &last).into());
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
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// The schedule in its state for the next step.
    pub fn scheduler(&self) -> &ModuleLrScheduler {
        &self.schedule
    }

    /// The precision of the model's first device: [`F32`](Precision::F32) for a plain device of
    /// Burn's, [`Auto`](Precision::Auto) for one on another machine, which does not tell.
    pub fn precision(&self) -> Precision {
        let device = self.model().devices().into_iter().next();
        let device = device.unwrap_or_default().without_autodiff();
        match local::below(&device) {
            Some((_, in_force)) => in_force.precision,
            None if local::is_remote(&device) => Precision::Auto,
            None => Precision::F32,
        }
    }

    /// What the next loss is multiplied by; 1 in bf16 and FP32.
    pub fn loss_scale(&self) -> f32 {
        self.scaler.scale_of_step()
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.scaler.skipped_steps()
    }

    /// The scaler. Where it discards the step under way, as in `load_state` and `discard_step`, the trainer
    /// drops its incomplete accumulation window, and the log has a warning.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// Everything needed to resume exactly, even within an accumulation window.
    ///
    /// # Errors
    ///
    /// [`Error::Read`] when the device gives no answer.
    pub fn to_record(&mut self) -> Result<TrainerRecord, Error> {
        self.forget_dropped();
        let model = present(&self.model);
        // Burn's records panic where a device does not answer.
        for device in model.devices() {
            device.sync().map_err(Error::Read)?;
        }
        end_running_statistics(model);
        let grads = self.accumulator.grads();
        let mut saved = Saved {
            grads: &grads,
            data: Vec::new(),
        };
        model.visit(&mut saved);
        let gradients: Result<_, _> = saved.data.into_iter().collect();
        self.accumulator.accumulate(model, grads);
        Ok(TrainerRecord {
            model: model.clone().into_record(),
            optimizer: self.optimizer.to_record(),
            schedule: self.schedule.to_record(),
            accumulation: AccumulationRecord {
                batches: self.config.grads_accumulation,
                micro_batches: self.micro_batches,
                pending: self.scaler.pending_record(),
                scale: self.scaler.carried_scale(),
                gradients: gradients?,
            },
            scaler: self.scaler.state(),
        })
    }

    /// Resumes from a record. Accumulation and clipping stay this trainer's own; a window of another
    /// accumulation is dropped, and the log has a warning. The scaler's settings come from the record, unless
    /// only one of the two scales the loss: the scaler then starts over, and the log has a warning. So it has
    /// where the state of the schedule does not fit.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] for the record of another model, or if the state of its optimizer does not fit.
    /// Nothing is changed then.
    pub fn load_record(&mut self, record: TrainerRecord) -> Result<(), AmpError> {
        let optimizer = resumed_optimizer(&self.optimizer, record.optimizer)?;
        let model = present(&self.model);
        let before = end_running_statistics(model);
        let loaded = model.clone().try_load_record(record.model);
        let loaded = loaded.map_err(|error| {
            // Clones share their running statistics, and some of the record's may be in them.
            model.clone().load_record(before.into_record());
            AmpError::unread("a record", error)
        });
        self.model = Some(in_f32(loaded?).0);
        self.optimizer = optimizer;
        self.schedule = resumed_schedule(&self.schedule, record.schedule);
        self.scaler.shared.resume_state(record.scaler);
        let accumulation = record.accumulation;
        let own = self.config.grads_accumulation;
        if !continues_window(accumulation.micro_batches, accumulation.batches, own) {
            self.forget_window();
            return Ok(());
        }
        self.scaler.resume(accumulation.pending);
        self.micro_batches = accumulation.micro_batches;
        let mut restored = Restored {
            data: accumulation.gradients.into_iter().collect(),
            factor: f64::from(self.scaler.carried_scale()) / f64::from(accumulation.scale),
            grads: GradientsParams::new(),
        };
        let model = present(&self.model);
        model.visit(&mut restored);
        self.accumulator = GradientsAccumulator::new();
        self.accumulator.accumulate(model, restored.grads);
        Ok(())
    }

    /// Saves [`to_record`](MixedPrecisionTrainer::to_record) to a file of MessagePack. The file ends
    /// up complete, or stays as it was, also while others save to it. A process that is killed
    /// meanwhile leaves a folder beside the file, with `.part` at its end.
    ///
    /// # Errors
    ///
    /// - [`AmpError::State`] when the file cannot be written.
    /// - [`Error::Read`] when the device gives no answer.
    pub fn save_file(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let record = self.to_record()?;
        let write = || -> Result<(), Box<dyn std::error::Error>> {
            let gradients = &record.accumulation.gradients;
            let longest = gradients.iter().map(|(_, data)| data.bytes().len()).max();
            if longest > Some(u32::MAX as usize) {
                return Err(
                    "a gradient of 4 GiB or more: save after the accumulation window".into(),
                );
            }
            let bytes = rmp_serde::to_vec_named(&RecordFile::of(record)?)?;
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            replace_file(path, |part| Ok(fs::write(part, &bytes)?))
        };
        write().map_err(|error| AmpError::unwritten(path.display(), error).into())
    }

    /// Resumes from a file that [`save_file`](MixedPrecisionTrainer::save_file) wrote, on any device.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing, damaged or of another model. The trainer is then
    /// unchanged.
    pub fn load_file(&mut self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        let read = || -> Result<TrainerRecord, Box<dyn std::error::Error>> {
            let file: RecordFile = rmp_serde::from_slice(&fs::read(path)?)?;
            Ok(file.into_record()?)
        };
        let record = read().map_err(|error| AmpError::unread(path.display(), error))?;
        self.load_record(record)
    }
}

/// MessagePack counts bytes in 32 bits, and `rmp` checks no length: 4 GiB would be written as 0 bytes.
const LONGEST_PIECE: usize = 1 << 30;

fn pieces(bytes: &[u8], longest: usize) -> Vec<ByteBuf> {
    bytes.chunks(longest).map(ByteBuf::from).collect()
}

fn whole(pieces: Vec<ByteBuf>) -> Bytes {
    let pieces = pieces.into_iter().map(ByteBuf::into_vec);
    let whole = pieces.reduce(|mut all, piece| {
        all.extend(piece);
        all
    });
    Bytes::from_bytes_vec(whole.unwrap_or_default())
}

impl RecordFile {
    fn of(record: TrainerRecord) -> Result<Self, RecordError> {
        Ok(Self {
            model: pieces(&record.model.into_bytes()?, LONGEST_PIECE),
            optimizer: pieces(&record.optimizer.into_bytes()?, LONGEST_PIECE),
            schedule: pieces(&record.schedule.into_bytes()?, LONGEST_PIECE),
            scaler: record.scaler,
            accumulation: record.accumulation,
        })
    }

    fn into_record(self) -> Result<TrainerRecord, RecordError> {
        Ok(TrainerRecord {
            model: ModuleRecord::from_bytes(whole(self.model))?,
            optimizer: OptimizerRecord::from_bytes(whole(self.optimizer))?,
            schedule: LrSchedulerRecord::from_bytes(whole(self.schedule))?,
            scaler: self.scaler,
            accumulation: self.accumulation,
        })
    }
}

/// Gradients as data, with the ids of their parameters.
struct Saved<'a> {
    grads: &'a GradientsParams,
    data: Vec<Result<(u64, TensorData), Error>>,
}

impl ModuleVisitor for Saved<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let data = grad.try_into_data().map_err(Error::Read);
            self.data.push(data.map(|data| (param.id.val(), data)));
        }
    }
}

/// Gradients of a record, each times a factor and on the device of its parameter.
struct Restored {
    data: HashMap<u64, TensorData>,
    factor: f64,
    grads: GradientsParams,
}

impl ModuleVisitor for Restored {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(data) = self.data.remove(&param.id.val()) {
            let device = param.val().device().without_autodiff();
            let dtype = data.dtype();
            let grad = Tensor::<D>::from_data(data, (&device, dtype));
            let grad = match self.factor {
                1.0 => grad,
                factor => grad * factor,
            };
            self.grads.register(param.id, grad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_in_pieces() {
        for (bytes, count) in [(&b""[..], 0), (b"abc", 1), (b"abcd", 1), (b"abcdefghi", 3)] {
            let pieces = pieces(bytes, 4);
            assert_eq!(pieces.len(), count);
            assert_eq!(&whole(pieces)[..], bytes);
        }
    }
}
