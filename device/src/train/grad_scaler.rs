//! Loss scaling in the client. On a device that computes in f16, loss scaling works as in PyTorch.

use std::sync::{Mutex, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_amp_core::{Parameter, PendingStepRecord, SharedScaler, StepOutcome, scaler_handle};

use crate::device::{UNSCALED, is_watched};
use crate::diagnostics::finite::FiniteCheck;
use crate::region::{begins_backward, ends_backward};
use crate::train::gradients::{self, EachGradient, Found, at_least_f32, factor, found, times};
use crate::{AmpError, Error, LossScaleConfig, Precision, Transition, local};

/// Scales the loss, checks and unscales the gradients, and skips the steps that overflow. For
/// training on a device that computes in f16: bf16 and FP32 have the range to train without.
///
/// Its methods are those of PyTorch's `torch.amp.GradScaler`. Cheap to clone. All clones share the scale and
/// the step from `scale` to `update`, on any thread. Trainings that run at once on one device each call
/// [`GradScaler::of`] once: these scalers share the scale, and each has steps of its own.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::burn;
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{GradientsParams, SgdConfig};
/// # use burn::tensor::Tensor;
/// use burn_amp_device::{GradScaler, Precision};
///
/// let device = burn_amp_device::flex(Precision::F16)?.autodiff();
/// # let mut model = LinearConfig::new(4, 2).init(&device);
/// # let mut optimizer = SgdConfig::new().init();
/// let scaler = GradScaler::of(&device); // once, before the loop
/// for _ in 0..3 {
///     let input = Tensor::<2>::ones([8, 4], &device);
///     let loss = model.forward(input).mean();
///     let grads = scaler.scale(loss).backward();
///     let mut grads = GradientsParams::from_grads(grads, &model);
///     scaler.unscale(&model, &mut grads)?; // only to look at them, or to clip them
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
/// The log warns once if a device of this process computes the gradient of an activation, a convolution, a
/// pool or an embedding in f16 before any loss was scaled.
///
/// With [`LossScaleConfig::Disabled`](crate::LossScaleConfig::Disabled) the scaler scales and checks nothing,
/// and every step is taken. Use this setting in a loop that trains in any precision.
#[derive(Clone, Default)]
pub struct GradScaler {
    pub(crate) shared: SharedScaler<FiniteCheck>,
}

scaler_handle!(GradScaler);

/// Process-wide, like a device and its precision. In the order of the first calls.
static OF_DEVICES: Mutex<Vec<(Device, Precision, GradScaler)>> = Mutex::new(Vec::new());

impl GradScaler {
    /// The scaler of a device. Its scale, counts, history and settings last as long as the process, and all
    /// calls share them, on any thread. Each call returns a scaler with a step of its own.
    ///
    /// A step whose scaler is dropped before its first `update`, as in
    /// `GradScaler::of(&device).scale(loss).backward()`, goes on with the next scaler of the device that has no step
    /// under way: on the same thread, or if it is the only such step, on any thread. So a `TrainStep` calls `of`
    /// anew each time, and does not keep the scaler.
    ///
    /// In f16 the scaler begins with the default [`DynamicLossScale`](crate::DynamicLossScale);
    /// [`load_state`](GradScaler::load_state) sets another state. In bf16 and FP32 the scaler is
    /// disabled, and therefore also on a plain Burn device: the same loop trains in any precision. The scaler
    /// of a device behind a server scales in every precision, because the client does not have the device's
    /// precision. In bf16 and FP32 scaling does no harm.
    pub fn of(device: &Device) -> Self {
        let (on, precision) = of_device(device);
        // A panic leaves the list as it was.
        let mut list = OF_DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., scaler)) = list.iter().find(|(of, p, _)| (of, *p) == (&on, precision)) {
            let shared = scaler.shared.another();
            return Self { shared };
        }
        let config = if precision.scales_loss() {
            LossScaleConfig::default()
        } else {
            LossScaleConfig::Disabled
        };
        let scaler = Self::new(config).expect("the default configuration is valid");
        let shared = scaler.shared.another();
        list.push((on, precision, scaler));
        Self { shared }
    }

    /// Whether the scaler of a device scales by default.
    #[cfg(feature = "train")]
    pub(crate) fn scales_on(device: &Device) -> bool {
        of_device(device).1.scales_loss()
    }

    /// Forgets the steps that an earlier run left under way, and restarts the count towards a stuck run.
    #[cfg(feature = "train")]
    pub(crate) fn begin_run(&self) {
        self.shared.forget_left();
        self.shared.lock().scaler.forget_stuck();
    }

    /// The scale that the losses of the step under way are multiplied by, or else the next loss.
    pub(crate) fn scale_of_step(&self) -> f32 {
        self.shared.scale_of_step()
    }

    /// Scales a loss of any shape. Call `backward()` on the result, once per micro-batch. A loss in
    /// half precision becomes FP32. The counterpart of PyTorch's `GradScaler.scale`.
    ///
    /// Then call [`step`](GradScaler::step), and not the optimizer itself: the gradients are multiplied by
    /// the scale. The log warns once 1,000 losses were scaled without an [`update`](GradScaler::update).
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let (scaler, scale) = self.shared.count_loss();
        if !scaler.is_enabled() {
            return loss;
        }
        self.shared.pending().set_scaled();
        UNSCALED.scaled();
        if self.shared.has_many_losses() {
            self.read_losses();
        }
        let loss = at_least_f32(loss);
        // The device may store the loss in half precision, where the largest f32 is infinite.
        let value = loss.clone().inner();
        let one = factor(1.0, &value);
        let value = times(value, &one);
        self.shared.pending().losses.add(value);
        begins_backward(loss * scale)
    }

    /// Reads back the checks of the losses, and frees them.
    fn read_losses(&self) {
        let losses = std::mem::take(&mut self.shared.pending().losses);
        // Losses that cannot be read count as not finite.
        let are_finite = losses.read().is_ok_and(|finite| !finite.contains(&false));
        self.shared.pending().set_losses(are_finite);
    }

    /// The part of a step under way that a record keeps.
    pub(crate) fn pending_record(&self) -> PendingStepRecord {
        self.read_losses();
        self.shared.pending().record()
    }

    /// Discards the step under way: all losses since the last update, also those of earlier micro-batches, whose
    /// gradients the loop then drops, too. For a loop that leaves out a batch after its backward pass: otherwise
    /// the loss belongs to the next step, which is skipped if the loss is not finite. Call it after `backward()`,
    /// and not between [`step`](GradScaler::step) and [`update`](GradScaler::update). The scale and the counts
    /// stay. PyTorch checks no losses, and needs no such call.
    pub fn discard_step(&self) {
        let pending = self.shared.discard();
        if let Some(device) = pending.losses.device().filter(|_| is_watched()) {
            // Operations may still be on their way to the device. A device that does not answer has none.
            let _ = device.sync();
            local::anomalies(&device);
        }
    }

    /// Continues a step that was under way when it was recorded.
    pub(crate) fn resume(&self, record: PendingStepRecord) {
        let mut pending = self.shared.pending();
        pending.resume(record, &self.state(), true);
    }

    /// The scale that the gradients of the step under way are multiplied by; 1 if there is no step.
    pub(crate) fn carried_scale(&self) -> f32 {
        self.shared.pending().scale_given().unwrap_or(1.0)
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

    /// Unscales the gradients in FP32 or wider, to inspect or clip them before [`step`](GradScaler::step).
    /// Without this call, `step` unscales them. As in PyTorch, call it only once all micro-batches are
    /// accumulated: a gradient that is added afterwards still carries the scale. Each gradient keeps its shape,
    /// dtype and device. Costs the step's one read-back, plus a second read-back after an overflow. The
    /// counterpart of PyTorch's `GradScaler.unscale_`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::SeveralSteps`] when several steps are under way, as with scalers that were dropped.
    /// - [`AmpError::AlreadyUnscaled`] when `unscale` or `step` was already called for these
    ///   parameters since the last update, in every precision.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`AmpError::HalfParameter`] when a parameter, or its gradient, is half in the program.
    /// - [`Error::Read`] when the device gives no answer.
    ///
    /// After an error the gradients and the scaler are unchanged, except after [`Error::Read`]: some
    /// gradients may then be unscaled, and a step with them is skipped.
    pub fn unscale(&self, model: &impl Module, grads: &mut GradientsParams) -> Result<(), Error> {
        let (given, found) = (grads.len(), found(model, grads));
        let parameters = &found.parameters;
        self.shared.checked("unscale", |pending| {
            pending.check_unscale(given, parameters)?;
            check_dtypes("unscale", &found)
        })?;
        let checked = self.unscaled(model, grads, parameters)?;
        self.note(&checked, checked.outcome);
        self.shared.pending().unscale(parameters);
        Ok(())
    }

    /// Unscales the gradients and checks them. Those that were already unscaled keep their values; they are
    /// checked again if a loss was scaled since.
    fn unscaled<'a>(
        &self,
        model: &impl Module,
        grads: &mut GradientsParams,
        found: &'a [Parameter],
    ) -> Result<Checked<'a>, Error> {
        let to_check = self.shared.pending().to_check(found);
        let Some(to_check) = to_check else {
            // Where nothing is scaled, the gradients still have their marks.
            gradients::unmark(model, grads);
            return Ok(Checked {
                parameters: Vec::new(),
                finite: Vec::new(),
                outcome: self.shared.pending().outcome(found),
            });
        };
        let mut unscale = Unscale {
            scale: to_check.scale,
            factor: None,
            device: None,
            check: std::mem::take(&mut self.shared.pending().losses),
        };
        // Without the lock: the module's code may call this scaler.
        gradients::replace(to_check.left.iter().copied(), model, grads, &mut unscale);
        (unscale.scale, unscale.factor) = (1.0, None);
        gradients::replace(to_check.again.iter().copied(), model, grads, &mut unscale);
        let finite = unscale.check.read();
        let mut pending = self.shared.pending();
        // Losses that cannot be read count as not finite.
        let finite = finite.inspect_err(|_| pending.set_losses(false))?;
        if let Some(device) = unscale.device.filter(|_| is_watched()) {
            pending.watched.anomalies.extend(local::anomalies(&device));
        }
        let parameters = to_check.parameters();
        let outcome = pending.found(&parameters, &finite);
        Ok(Checked {
            parameters,
            finite,
            outcome,
        })
    }

    /// Notes the result of a check. `outcome` is the outcome of all devices of the step.
    fn note(&self, checked: &Checked, outcome: StepOutcome) {
        if !checked.parameters.is_empty() {
            let mut pending = self.shared.pending();
            pending.set_unscaled(&checked.parameters, &checked.finite, outcome);
        }
    }

    /// Steps the optimizer at learning rate `lr` if the losses and this model's gradients are
    /// finite. Otherwise the parameters and the optimizer stay as they are, bit for bit; running
    /// statistics (batch norm) change in the forward pass, as in PyTorch. Returns the
    /// model, and whether the step was taken. The counterpart of PyTorch's `GradScaler.step`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::SeveralSteps`] when several steps are under way, as with scalers that were dropped.
    /// - [`AmpError::AlreadyStepped`] when `step` was already called for these parameters since the
    ///   last update.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`AmpError::HalfParameter`] when a parameter, or its gradient, is half in the program.
    /// - [`Error::Read`] when the device gives no answer.
    ///
    /// After an error the model is returned unchanged, and the gradients are lost. The optimizer is unchanged
    /// and, except after [`Error::Read`], the scaler is, too.
    #[must_use = "the model is in it"]
    pub fn step<M: Module>(
        &self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        mut grads: GradientsParams,
    ) -> (M, Result<bool, Error>) {
        match self.checked_step(&model, &mut grads) {
            Ok(true) => (optimizer.step(lr, model, grads), Ok(true)),
            refused_or_skipped => (model, refused_or_skipped),
        }
    }

    /// Unscales the gradients of a step. Returns whether to take the step.
    fn checked_step(
        &self,
        model: &impl Module,
        grads: &mut GradientsParams,
    ) -> Result<bool, Error> {
        Self::checked_steps(model, [(self, grads)])
    }

    /// Unscales the gradients of one step on several devices, each with the scaler of its device. Returns
    /// whether to take the step: no device steps if another device overflowed.
    pub(crate) fn checked_steps<'a>(
        model: &impl Module,
        parts: impl IntoIterator<Item = (&'a Self, &'a mut GradientsParams)>,
    ) -> Result<bool, Error> {
        let mut parts: Vec<_> = parts
            .into_iter()
            .map(|(scaler, grads)| (scaler, found(model, grads), grads))
            .collect();
        for (scaler, found, grads) in &parts {
            scaler.shared.checked("step", |pending| {
                pending.check_step(grads.len(), &found.parameters)?;
                check_dtypes("step", found)
            })?;
        }
        let checked: Vec<_> = parts
            .iter_mut()
            .map(|(scaler, found, grads)| {
                Ok((*scaler, scaler.unscaled(model, grads, &found.parameters)?))
            })
            .collect::<Result<_, Error>>()?;
        let outcomes = checked.iter().map(|(_, checked)| checked.outcome);
        let outcome = outcomes.max().unwrap_or(StepOutcome::Finite);
        for (scaler, checked) in &checked {
            scaler.note(checked, outcome);
        }
        // No short-circuit: each scaler notes the step.
        let steps = parts
            .iter()
            .map(|(scaler, found, _)| scaler.shared.pending().step(&found.parameters));
        Ok(steps.fold(true, |all, step| all & step))
    }

    /// Ends the step. The scale grows, stays or backs off according to all steps since the last
    /// update. The next loss may then be scaled. The counterpart of PyTorch's `GradScaler.update`.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingStepped`] when there was no [`step`](GradScaler::step) since the last
    /// update, or [`AmpError::SeveralSteps`] as for [`step`](GradScaler::step).
    pub fn update(&self) -> Result<Transition, AmpError> {
        self.shared.update()
    }
}

/// The Burn device below a device, and the precision that its losses are scaled for.
fn of_device(device: &Device) -> (Device, Precision) {
    let device = device.clone().without_autodiff();
    match local::below(&device) {
        Some((on, in_force)) => (on, in_force.precision),
        // A device behind a server may compute in f16.
        None if local::is_remote(&device) => (device, Precision::F16),
        None => (device, Precision::F32),
    }
}

/// Whether the step is in FP32. As in PyTorch, gradients are not unscaled in f16: the values that the loss scale
/// saves would be lost. In both half precisions, the steps of an optimizer would be.
fn check_dtypes(call: &'static str, found: &Found) -> Result<(), AmpError> {
    match found.in_half.clone() {
        None => Ok(()),
        Some((parameter, precision)) => Err(AmpError::HalfParameter {
            call,
            parameter,
            precision,
        }),
    }
}

/// The result of a check of gradients.
struct Checked<'a> {
    parameters: Vec<&'a Parameter>,
    /// The losses first, then the gradients.
    finite: Vec<bool>,
    outcome: StepOutcome,
}

/// Divides gradients by the scale and checks them.
struct Unscale {
    scale: f32,
    factor: Option<Tensor<1>>,
    /// The device of the first gradient.
    device: Option<Device>,
    check: FiniteCheck,
}

impl EachGradient for Unscale {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        let dtype = grad.dtype();
        let wide = at_least_f32(grad);
        // A gradient that is FP32 in the client may be f16 on the device. On the device, f16 times a number
        // stays f16, which loses a small gradient; f16 times an FP32 tensor is FP32.
        let inverse = 1.0 / f64::from(self.scale);
        let factor = self.factor.get_or_insert_with(|| factor(inverse, &wide));
        let unscaled = times(wide, factor);
        self.device.get_or_insert_with(|| unscaled.device());
        self.check.add(unscaled.clone());
        let unscaled = ends_backward(unscaled);
        if unscaled.dtype() == dtype {
            unscaled
        } else {
            unscaled.cast(dtype)
        }
    }
}
