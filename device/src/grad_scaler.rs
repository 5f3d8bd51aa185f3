//! Loss scaling in the client: on a device that computes in f16 it works as it does in PyTorch.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_amp_core::{NonFinite, RecordedStep};

use crate::{
    AmpError, Error, LastStep, LossScaleConfig, LossScaler, Outcome, ScaleHistory, Transition,
};

/// Scales the loss, checks and unscales the gradients, and skips the steps that overflow. For
/// training on a device that computes in f16: bf16 and FP32 have the range to train without.
///
/// Its methods are those of PyTorch's `torch.amp.GradScaler`. Cheap to clone; all clones share one
/// state, on any thread. They also share the step: from `scale` to `update` it is one thread's, since
/// threads that step at once mix their losses and gradients.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{GradientsParams, SgdConfig};
/// # use burn::tensor::Tensor;
/// use burn_amp_device::{GradScaler, LossScaleConfig, Precision};
///
/// let device = burn_amp_device::flex(Precision::F16)?.autodiff();
/// # let mut model = LinearConfig::new(4, 2).init(&device);
/// # let mut optimizer = SgdConfig::new().init();
/// let scaler = GradScaler::new(LossScaleConfig::default())?;
/// for _ in 0..3 {
///     let input = Tensor::<2>::ones([8, 4], &device);
///     let loss = model.forward(input).mean();
///     let grads = scaler.scale(loss).backward();
///     let grads = GradientsParams::from_grads(grads, &model);
///     let grads = scaler.unscale(&model, grads)?; // only to look at them, or to clip them
///     let stepped;
///     (model, stepped) = scaler.step(&mut optimizer, 1e-2, model, grads);
///     # let taken =
///     stepped?;
///     # assert!(taken);
///     scaler.update()?;
/// }
/// # assert_eq!(scaler.state().taken_steps(), 3);
/// # }
/// # Ok::<(), burn_amp_device::Error>(())
/// ```
///
/// With [`LossScaleConfig::Disabled`] it scales and checks nothing, and every step is taken: for a
/// loop that trains in any precision.
#[derive(Debug, Clone, Default)]
pub struct GradScaler {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    scaler: LossScaler,
    history: ScaleHistory,
    last_step: Option<LastStep>,
    pending: PendingStep,
}

/// A step, from its first scaled loss to `update`.
#[derive(Debug, Default)]
struct PendingStep {
    /// Losses given to `scale`, over all micro-batches.
    losses_given: u32,
    /// What these losses are multiplied by, unless scaling is disabled.
    scale: Option<f32>,
    /// Whether they are finite, as long as nobody has read it.
    losses: FiniteCheck,
    non_finite_loss: bool,
    unscaled: HashMap<ParamId, Unscaled>,
    /// The parameters' paths, each with whether its gradient is finite.
    gradients: Vec<(String, bool)>,
    steps: u32,
}

/// A parameter's gradient after unscaling.
#[derive(Debug)]
struct Unscaled {
    finite: bool,
    stepped: bool,
}

impl GradScaler {
    /// A new scaler.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range.
    pub fn new(config: LossScaleConfig) -> Result<Self, AmpError> {
        Ok(Self::from(LossScaler::new(config)?))
    }

    /// Scales a loss of any shape. Call `backward()` on the result, once per micro-batch. A loss in
    /// half precision becomes FP32. The counterpart of PyTorch's `GradScaler.scale`.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let shared = &mut *self.shared();
        let pending = &mut shared.pending;
        pending.losses_given += 1;
        if !shared.scaler.is_enabled() {
            return loss;
        }
        // One scale for the whole step, even if it is set within.
        let scale = *pending.scale.get_or_insert(shared.scaler.scale());
        let loss = at_least_f32(loss);
        // The device may hold the loss in half precision, where the largest f32 is infinite.
        let value = loss.clone().inner();
        let one = factor(1.0, &value);
        pending.losses.add(times(value, &one));
        loss * scale
    }

    /// Runs the backward pass of a loss for a model's parameters:
    /// `GradientsParams::from_grads(scaler.scale(loss).backward(), model)`.
    ///
    /// # Panics
    ///
    /// Where `loss.backward()` panics.
    pub fn backward<const D: usize>(
        &self,
        loss: Tensor<D>,
        model: &impl Module,
    ) -> GradientsParams {
        GradientsParams::from_grads(self.scale(loss).backward(), model)
    }

    /// Unscales the gradients in FP32 or wider, to inspect or clip them before
    /// [`step`](GradScaler::step). Without this call, `step` unscales them. Each keeps its shape,
    /// dtype and device. Costs the step's one read-back, plus a second one after an overflow. The
    /// counterpart of PyTorch's `GradScaler.unscale_`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyUnscaled`] when `unscale` was already called for these parameters since
    ///   the last update.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`Error::Read`] when the device gives no answer.
    ///
    /// After an error the gradients are lost. Except after [`Error::Read`], the scaler is
    /// unchanged.
    pub fn unscale(
        &self,
        model: &impl Module,
        grads: GradientsParams,
    ) -> Result<GradientsParams, Error> {
        let pending = &mut self.shared().pending;
        let found = pending.checked("unscale", model, &grads)?;
        if let Some(parameter) = pending.first(&found, |_| true) {
            return Err(AmpError::AlreadyUnscaled { parameter }.into());
        }
        pending.unscale(model, grads, &found)
    }

    /// Steps the optimizer at learning rate `lr` if the losses and this model's gradients are
    /// finite. Otherwise the model and the optimizer stay as they are, bit for bit. Returns the
    /// model, and whether the step was taken. The counterpart of PyTorch's `GradScaler.step`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyStepped`] when `step` was already called for these parameters since the
    ///   last update.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`Error::Read`] when the device gives no answer.
    ///
    /// With an error the model comes back as it was, and the gradients are lost; the optimizer and,
    /// except after [`Error::Read`], the scaler are unchanged.
    #[must_use = "the model is in it"]
    pub fn step<M: Module>(
        &self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> (M, Result<bool, Error>) {
        match self.checked_step(&model, grads) {
            Ok((grads, true)) => (optimizer.step(lr, model, grads), Ok(true)),
            Ok((_, false)) => (model, Ok(false)),
            Err(error) => (model, Err(error)),
        }
    }

    /// Unscales the gradients of a step. With whether the step is taken.
    fn checked_step(
        &self,
        model: &impl Module,
        grads: GradientsParams,
    ) -> Result<(GradientsParams, bool), Error> {
        let pending = &mut self.shared().pending;
        let found = pending.checked("step", model, &grads)?;
        if let Some(parameter) = pending.first(&found, |unscaled| unscaled.stepped) {
            return Err(AmpError::AlreadyStepped { parameter }.into());
        }
        let grads = pending.unscale(model, grads, &found)?;
        Ok((grads, pending.stepped(&found)))
    }

    /// Ends the step. The scale grows, stays or backs off according to all steps since the last
    /// update. The next loss may then be scaled. The counterpart of PyTorch's `GradScaler.update`.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingStepped`] when there was no [`step`](GradScaler::step) since the last
    /// update.
    pub fn update(&self) -> Result<Transition, AmpError> {
        let mut shared = self.shared();
        if shared.pending.steps == 0 {
            return Err(AmpError::NothingStepped);
        }
        let pending = std::mem::take(&mut shared.pending);
        let Some(scale) = pending.scale else {
            return Ok(Transition::Kept);
        };
        let gradients = pending.gradients.iter().filter(|(_, finite)| !finite);
        let gradients = gradients.count();
        let outcome = Outcome::of(!pending.non_finite_loss, gradients == 0);
        let found = NonFinite {
            gradients,
            parameters: pending.gradients,
            ..NonFinite::default()
        };
        let Shared {
            scaler, history, ..
        } = &mut *shared;
        let recorded = RecordedStep::of(scaler, history, scale, outcome, found);
        shared.last_step = Some(recorded.step.clone());
        drop(shared);
        recorded.log("");
        Ok(recorded.transition)
    }

    /// A copy of the state as it is now.
    pub fn state(&self) -> LossScaler {
        self.shared().scaler
    }

    /// The settings.
    pub fn config(&self) -> LossScaleConfig {
        *self.state().config()
    }

    /// What the next loss is multiplied by; 1 when disabled. PyTorch's `get_scale`.
    pub fn loss_scale(&self) -> f32 {
        self.state().scale()
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.state().skipped_steps()
    }

    /// What happened in the last step, with the names of the parameters whose gradients were not
    /// finite; `None` before the first step.
    pub fn last_step(&self) -> Option<LastStep> {
        self.shared().last_step.clone()
    }

    /// The skipped steps and scale changes since the scaler was created, configured or given a
    /// state. The history is not part of the saved state.
    pub fn history(&self) -> ScaleHistory {
        self.shared().history.clone()
    }

    /// Sets the scale. The counts are kept, and the growth interval starts over.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when the configuration does not allow the scale. The scaler
    /// is then unchanged.
    pub fn set_scale(&self, scale: f32) -> Result<(), AmpError> {
        let shared = &mut *self.shared();
        shared.scaler.set_scale(scale)?;
        shared.history.push(None, &shared.scaler);
        Ok(())
    }

    /// Starts over with a configuration, with every count at zero.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range. The scaler is then
    /// unchanged.
    pub fn configure(&self, config: LossScaleConfig) -> Result<(), AmpError> {
        self.load_state(LossScaler::new(config)?);
        Ok(())
    }

    /// Continues from a state. Discards a pending step.
    pub fn load_state(&self, state: LossScaler) {
        *self.shared() = Shared::new(state);
    }

    /// Writes the state as JSON, in the form that burn-amp reads and writes.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state cannot be written. The writer may then hold part of it.
    pub fn to_writer(&self, writer: impl Write) -> Result<(), AmpError> {
        self.state().to_writer(writer)
    }

    /// Continues from a state that [`to_writer`](GradScaler::to_writer) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state is damaged, truncated or from a newer version. The scaler
    /// is then unchanged.
    pub fn from_reader(&self, reader: impl Read) -> Result<(), AmpError> {
        self.load_state(LossScaler::from_reader(reader)?);
        Ok(())
    }

    /// Saves the state to a file. The file ends up complete, or stays as it was.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        self.state().save(path)
    }

    /// Continues from a file that [`save`](GradScaler::save) wrote, here or in burn-amp.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing, or its state is damaged, truncated or from a
    /// newer version. The scaler is then unchanged.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        self.load_state(LossScaler::load(path)?);
        Ok(())
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // A panic of the user's module, in a visit, leaves the state as it was.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A new scaler that continues from a state.
impl From<LossScaler> for GradScaler {
    fn from(scaler: LossScaler) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared::new(scaler))),
        }
    }
}

impl Shared {
    fn new(scaler: LossScaler) -> Self {
        Self {
            history: ScaleHistory::from(&scaler),
            scaler,
            ..Self::default()
        }
    }
}

impl PendingStep {
    /// The model's parameters that have a gradient, with their paths, if all gradients belong to
    /// the model.
    fn checked(
        &self,
        call: &'static str,
        model: &impl Module,
        grads: &GradientsParams,
    ) -> Result<Vec<(ParamId, String)>, AmpError> {
        if self.losses_given == 0 {
            return Err(AmpError::NothingScaled { call });
        }
        let mut found = Found {
            grads,
            path: Vec::new(),
            seen: HashSet::new(),
            parameters: Vec::new(),
        };
        model.visit(&mut found);
        let parameters = found.parameters;
        if parameters.is_empty() || parameters.len() < grads.len() {
            return Err(AmpError::ForeignGradients {
                call,
                given: grads.len(),
                of_model: parameters.len(),
            });
        }
        Ok(parameters)
    }

    /// The path of the first parameter that is already unscaled and satisfies `is`.
    fn first(&self, found: &[(ParamId, String)], is: impl Fn(&Unscaled) -> bool) -> Option<String> {
        let is = |(id, _): &&(ParamId, String)| self.unscaled.get(id).is_some_and(&is);
        found.iter().find(is).map(|(_, path)| path.clone())
    }

    /// Unscales the gradients. Those that were already unscaled are returned as they are.
    fn unscale(
        &mut self,
        model: &impl Module,
        mut grads: GradientsParams,
        found: &[(ParamId, String)],
    ) -> Result<GradientsParams, Error> {
        let Some(scale) = self.scale else {
            return Ok(grads);
        };
        let scaled = found
            .iter()
            .filter(|(id, _)| !self.unscaled.contains_key(id));
        let scaled: Vec<_> = scaled.collect();
        if scaled.is_empty() {
            return Ok(grads);
        }
        let mut unscale = Unscale {
            grads: &mut grads,
            left: scaled.iter().map(|(id, _)| *id).collect(),
            scale,
            factor: None,
            check: std::mem::take(&mut self.losses),
        };
        model.visit(&mut unscale);
        let finite = unscale.check.read()?;
        let (losses, gradients) = finite.split_at(finite.len() - scaled.len());
        self.non_finite_loss |= losses.contains(&false);
        for ((id, path), finite) in scaled.into_iter().zip(gradients) {
            self.gradients.push((path.clone(), *finite));
            let (finite, stepped) = (*finite, false);
            self.unscaled.insert(*id, Unscaled { finite, stepped });
        }
        Ok(grads)
    }

    /// Counts a step of these parameters. Whether it is taken.
    fn stepped(&mut self, found: &[(ParamId, String)]) -> bool {
        self.steps += 1;
        let mut finite = !self.non_finite_loss;
        for (id, _) in found {
            let disabled = Unscaled {
                finite: true,
                stepped: false,
            };
            let unscaled = self.unscaled.entry(*id).or_insert(disabled);
            unscaled.stepped = true;
            finite &= unscaled.finite;
        }
        finite
    }
}

/// Finds a model's parameters that have a gradient, each once: a shared parameter comes up at each
/// of its places.
struct Found<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    parameters: Vec<(ParamId, String)>,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.grads.get::<D>(param.id).is_some() && self.seen.insert(param.id) {
            self.parameters.push((param.id, self.path.join(".")));
        }
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// Divides the gradients that are `left` by the scale and checks them, in module order.
struct Unscale<'a> {
    grads: &'a mut GradientsParams,
    left: HashSet<ParamId>,
    scale: f32,
    factor: Option<Tensor<1>>,
    check: FiniteCheck,
}

impl ModuleVisitor for Unscale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.left.remove(&param.id) {
            return;
        }
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let dtype = grad.dtype();
        let wide = at_least_f32(grad);
        // A gradient that is FP32 here may be f16 on the device. There, f16 times a number stays
        // f16, where a small gradient is lost; f16 times an FP32 tensor is FP32.
        let inverse = 1.0 / f64::from(self.scale);
        let factor = self.factor.get_or_insert_with(|| factor(inverse, &wide));
        let unscaled = times(wide, factor);
        self.check.add(unscaled.clone());
        let unscaled = match unscaled.dtype() == dtype {
            true => unscaled,
            false => unscaled.cast(dtype),
        };
        self.grads.register(param.id, unscaled);
    }
}

fn at_least_f32<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// A factor for tensors like this one.
fn factor<const D: usize>(factor: f64, like: &Tensor<D>) -> Tensor<1> {
    Tensor::from_data(
        TensorData::from([factor]),
        (&like.device().without_autodiff(), like.dtype()),
    )
}

fn times<const D: usize>(tensor: Tensor<D>, factor: &Tensor<1>) -> Tensor<D> {
    let factor = factor.clone().to_device(&tensor.device());
    let factor = match factor.dtype() == tensor.dtype() {
        true => factor,
        false => factor.cast(tensor.dtype()),
    };
    tensor * factor.reshape([1; D])
}

/// Tests tensors for non-finite values, all tensors together.
#[derive(Debug, Default)]
struct FiniteCheck {
    checked: Vec<Checked>,
}

struct Checked {
    /// Of its values, in FP32.
    sum: Tensor<1>,
    /// Gives the sum of its non-finite values, in FP32. Zero if there are none.
    rest: Box<dyn FnOnce() -> Tensor<1> + Send>,
}

impl FiniteCheck {
    /// Adds a tensor, FP32 or wider, at the cost of its sum. Reads nothing back.
    fn add<const D: usize>(&mut self, tensor: Tensor<D>) {
        let first = self.checked.first().map(|first| first.sum.device());
        let device = first.unwrap_or_else(|| tensor.device());
        self.checked.push(Checked {
            sum: sum(tensor.clone(), &device),
            rest: Box::new(move || sum(non_finite(tensor), &device)),
        });
    }

    /// For each added tensor, whether all its values are finite. One number is read back: a sum that
    /// has met an infinity or NaN is never finite again, so a finite sum of all is proof. Any other
    /// may also come from large finite values; a second read-back then tells by the values
    /// themselves.
    fn read(self) -> Result<Vec<bool>, Error> {
        let sums = self.checked.iter().map(|checked| checked.sum.clone());
        let Some(total) = sums.reduce(|a, b| a + b) else {
            return Ok(Vec::new());
        };
        if values(total)?.iter().all(|sum| sum.is_finite()) {
            return Ok(vec![true; self.checked.len()]);
        }
        let rests = self.checked.into_iter().map(|checked| (checked.rest)());
        let rests = values(Tensor::cat(rests.collect(), 0))?;
        Ok(rests.into_iter().map(|rest| rest == 0.0).collect())
    }
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").finish_non_exhaustive()
    }
}

fn sum<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<1> {
    let sum = tensor.sum();
    let sum = match sum.dtype() {
        DType::F32 => sum,
        _ => sum.cast(FloatDType::F32),
    };
    sum.to_device(device)
}

/// A tensor's values that are not finite; zeros in the place of the others.
///
/// A value is finite if its magnitude is at most the dtype's largest. NaN never is, and non-finite
/// values never sum to zero. Compilers that assume finite values fold `x - x == 0`.
fn non_finite<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let largest = match tensor.dtype() {
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let finite = tensor.clone().abs().lower_equal_elem(largest);
    tensor.mask_fill(finite, 0.0)
}

fn values(tensor: Tensor<1>) -> Result<Vec<f32>, Error> {
    let data = tensor.try_into_data().map_err(Error::Read)?;
    Ok(data.iter::<f32>().collect())
}
