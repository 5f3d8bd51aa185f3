//! Loss scaling in the client: on a device that computes in f16 it works as it does in PyTorch.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_amp_core::{Parameter, SharedScaler, scaler_handle};
use burn_dispatch::DispatchDevice;

use crate::device::UNSCALED;
use crate::{AmpError, Error, LossScaleConfig, Precision, Transition, local};

/// Scales the loss, checks and unscales the gradients, and skips the steps that overflow. For
/// training on a device that computes in f16: bf16 and FP32 have the range to train without.
///
/// Its methods are those of PyTorch's `torch.amp.GradScaler`. Cheap to clone; all clones share one
/// state, on any thread. They also share the step: from `scale` to `update` it is one thread's, since
/// threads that step at once mix their losses and gradients.
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
/// Where a device of this process computes the gradient of an activation, a convolution, a pool or an
/// embedding in f16 before any loss was scaled, the log warns once.
///
/// With [`LossScaleConfig::Disabled`](crate::LossScaleConfig::Disabled) it scales and checks nothing,
/// and every step is taken: for a loop that trains in any precision.
#[derive(Clone, Default)]
pub struct GradScaler {
    shared: SharedScaler<FiniteCheck>,
}

scaler_handle!(GradScaler);

/// Process-wide, as the device and its precision are. In the order of the first calls.
static OF_DEVICES: Mutex<Vec<(Device, Precision, GradScaler)>> = Mutex::new(Vec::new());

impl GradScaler {
    /// The scaler of a device: the same one at each call, on any thread, for the life of the process.
    ///
    /// In f16 it begins with the default [`Dynamic`](crate::Dynamic) scale;
    /// [`load_state`](GradScaler::load_state) gives it another. In bf16 and in FP32, and so for a
    /// plain device of Burn's, it is disabled: the same loop trains in any precision. It also scales
    /// for a device on another machine, whose precision a client does not have: in bf16 and FP32 that
    /// does no harm.
    pub fn of(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let (on, precision) = match local::below(&device) {
            Some((on, in_force)) => (on, in_force.precision),
            // It may compute in f16.
            None if matches!(device.as_dispatch(), DispatchDevice::Remote(_)) => {
                (device, Precision::F16)
            }
            None => (device, Precision::F32),
        };
        // A panic leaves the list as it was.
        let mut list = OF_DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., scaler)) = list.iter().find(|(of, p, _)| (of, *p) == (&on, precision)) {
            return scaler.clone();
        }
        let config = if precision.scales_loss() {
            LossScaleConfig::default()
        } else {
            LossScaleConfig::Disabled
        };
        let scaler = Self::new(config).expect("the default configuration is valid");
        list.push((on, precision, scaler.clone()));
        scaler
    }

    /// Scales a loss of any shape. Call `backward()` on the result, once per micro-batch. A loss in
    /// half precision becomes FP32. The counterpart of PyTorch's `GradScaler.scale`.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let shared = &mut *self.shared.lock();
        let pending = &mut shared.pending;
        let scale = pending.scale(&shared.scaler);
        if !shared.scaler.is_enabled() {
            return loss;
        }
        pending.set_scaled();
        UNSCALED.scaled();
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
    /// After an error the gradients and the scaler are unchanged, except after [`Error::Read`]: some
    /// gradients may then be unscaled, and a step with them is skipped.
    pub fn unscale(&self, model: &impl Module, grads: &mut GradientsParams) -> Result<(), Error> {
        let (given, found) = (grads.len(), found(model, grads));
        self.shared.lock().pending.check_unscale(given, &found)?;
        self.unscale_found(model, grads, &found)
    }

    /// Unscales the gradients. Those that were already unscaled stay as they are.
    fn unscale_found(
        &self,
        model: &impl Module,
        grads: &mut GradientsParams,
        found: &[Parameter],
    ) -> Result<(), Error> {
        let to_unscale = self.shared.lock().pending.to_unscale(found);
        let Some((scale, scaled)) = to_unscale else {
            return Ok(());
        };
        let mut unscale = Unscale {
            grads,
            left: scaled.iter().map(|(id, _)| *id).collect(),
            scale,
            factor: None,
            check: std::mem::take(&mut self.shared.lock().pending.losses),
        };
        // Without the lock: the module's code may call this scaler.
        model.visit(&mut unscale);
        let finite = unscale.check.read();
        let pending = &mut self.shared.lock().pending;
        // What nobody can read is not known to be finite.
        let finite = finite.inspect_err(|_| pending.set_losses(false))?;
        let outcome = pending.found(&scaled, &finite);
        pending.set_unscaled(&scaled, &finite, outcome);
        Ok(())
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
        mut grads: GradientsParams,
    ) -> (M, Result<bool, Error>) {
        match self.checked_step(&model, &mut grads) {
            Ok(true) => (optimizer.step(lr, model, grads), Ok(true)),
            refused_or_skipped => (model, refused_or_skipped),
        }
    }

    /// Unscales the gradients of a step. Whether the step is to be taken.
    fn checked_step(
        &self,
        model: &impl Module,
        grads: &mut GradientsParams,
    ) -> Result<bool, Error> {
        let (given, found) = (grads.len(), found(model, grads));
        self.shared.lock().pending.check_step(given, &found)?;
        self.unscale_found(model, grads, &found)?;
        Ok(self.shared.lock().pending.step(&found))
    }

    /// Ends the step. The scale grows, stays or backs off according to all steps since the last
    /// update. The next loss may then be scaled. The counterpart of PyTorch's `GradScaler.update`.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingStepped`] when there was no [`step`](GradScaler::step) since the last
    /// update.
    pub fn update(&self) -> Result<Transition, AmpError> {
        self.shared.update("")
    }
}

/// The model's parameters that have a gradient, each once, in module order.
fn found(model: &impl Module, grads: &GradientsParams) -> Vec<Parameter> {
    let mut found = Found {
        grads,
        path: Vec::new(),
        seen: HashSet::new(),
        parameters: Vec::new(),
    };
    model.visit(&mut found);
    found.parameters
}

/// A shared parameter comes up at each of its places.
struct Found<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    seen: HashSet<u64>,
    parameters: Vec<Parameter>,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.grads.get::<D>(param.id).is_some() && self.seen.insert(param.id.val()) {
            self.parameters.push((param.id.val(), self.path.join(".")));
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
    left: HashSet<u64>,
    scale: f32,
    factor: Option<Tensor<1>>,
    check: FiniteCheck,
}

impl ModuleVisitor for Unscale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.left.remove(&param.id.val()) {
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
        let unscaled = if unscaled.dtype() == dtype {
            unscaled
        } else {
            unscaled.cast(dtype)
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
    let factor = if factor.dtype() == tensor.dtype() {
        factor
    } else {
        factor.cast(tensor.dtype())
    };
    tensor * factor.reshape([1; D])
}

/// Tests tensors for non-finite values, all tensors together.
#[derive(Default)]
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
    /// may also come from large finite values; a second read-back then decides by the values
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
