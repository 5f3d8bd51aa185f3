//! A model's gradients, one after another.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_amp_core::Parameter;

use crate::region::{ends_backward, has_marks};
use crate::{AmpError, Precision};

/// The model's parameters that have a gradient, each once, in module order.
#[derive(Default)]
pub(crate) struct Found {
    pub parameters: Vec<Parameter>,
    /// The device of the first gradient.
    pub device: Option<Device>,
    /// The path of the first parameter that is half, or whose gradient is, and its precision.
    pub in_half: Option<(String, Precision)>,
}

pub(crate) fn found(model: &impl Module, grads: &GradientsParams) -> Found {
    let mut finder = Finder {
        grads,
        path: Vec::new(),
        seen: HashSet::new(),
        found: Found::default(),
    };
    model.visit(&mut finder);
    finder.found
}

/// Visits a shared parameter at each of its places.
struct Finder<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    seen: HashSet<u64>,
    found: Found,
}

impl ModuleVisitor for Finder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id)
            && self.seen.insert(param.id.val())
        {
            let found = &mut self.found;
            let path = self.path.join(".");
            found.device.get_or_insert_with(|| grad.device());
            if let Some(half) = half(grad.dtype()).or_else(|| half(param.val().dtype())) {
                found.in_half.get_or_insert_with(|| (path.clone(), half));
            }
            found.parameters.push((param.id.val(), path));
        }
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

fn half(dtype: DType) -> Option<Precision> {
    match dtype {
        DType::F16 => Some(Precision::F16),
        DType::BF16 => Some(Precision::Bf16),
        _ => None,
    }
}

/// The model in FP32 if trained parameters are half, as after a file in half, and whether they were. The log then
/// names the first. All other parameters that are half become FP32, too, since Burn's operations take operands of
/// one dtype.
pub(crate) fn in_f32<M: Module>(model: M) -> (M, bool) {
    let mut trained = TrainedInHalf::default();
    model.visit(&mut trained);
    let Some((parameter, half)) = trained.first else {
        return (model, false);
    };
    log::info!(
        "burn-amp-device: {} parameters in {half}, such as {parameter}, are trained in FP32 from now on",
        trained.parameters
    );
    // Moves running statistics of the last batch to where the mapper finds them.
    model.valid();
    (model.map(&mut WidenParameters), true)
}

/// The value of a parameter that is half. A parameter without a value yet becomes FP32, and in the order of use.
fn half_value<const D: usize>(param: &Param<Tensor<D>>) -> Option<(Tensor<D>, Precision)> {
    let value = param.is_initialized().then(|| param.val())?;
    half(value.dtype()).map(|precision| (value, precision))
}

#[derive(Default)]
struct TrainedInHalf {
    path: Vec<String>,
    first: Option<(String, Precision)>,
    parameters: usize,
}

impl ModuleVisitor for TrainedInHalf {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((_, half)) = half_value(param).filter(|(value, _)| value.is_require_grad()) {
            self.parameters += 1;
            let path = &self.path;
            self.first.get_or_insert_with(|| (path.join("."), half));
        }
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

struct WidenParameters;

impl ModuleMapper for WidenParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((value, _)) = half_value(&param) else {
            return param;
        };
        let trains = value.is_require_grad();
        param.map(|tensor| {
            let untracked = tensor.detach().set_require_grad(false);
            untracked.cast(FloatDType::F32).set_require_grad(trains)
        })
    }
}

/// Maps each gradient to a new one.
pub(crate) trait EachGradient {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D>;
}

/// Replaces the gradients of these parameters, in module order.
pub(crate) fn replace<'a>(
    parameters: impl IntoIterator<Item = &'a Parameter>,
    model: &impl Module,
    grads: &mut GradientsParams,
    each: &mut impl EachGradient,
) {
    let left = parameters.into_iter().map(|(id, _)| *id).collect();
    model.visit(&mut Replace { left, grads, each });
}

struct Replace<'a, E> {
    left: HashSet<u64>,
    grads: &'a mut GradientsParams,
    each: &'a mut E,
}

impl<E: EachGradient> ModuleVisitor for Replace<'_, E> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.left.remove(&param.id.val())
            && let Some(grad) = self.grads.remove::<D>(param.id)
        {
            self.grads.register(param.id, self.each.gradient(grad));
        }
    }
}

/// Scales a model's gradients down if their total norm is above `max_norm`: multiplies them by
/// `min(1, max_norm / (norm + 1e-6))`, like PyTorch's `torch.nn.utils.clip_grad_norm_`. Reads nothing back
/// from the device. With a scaler, call it between [`GradScaler::unscale`](crate::GradScaler::unscale) and
/// [`step`](crate::GradScaler::step). One non-finite gradient spoils all of them: an infinite gradient, for
/// example, sets the finite ones to 0. So does, as in PyTorch, a gradient beyond 1.8e19, whose square is
/// infinite in FP32. Gradients keep their shape and dtype.
///
/// Returns the total norm before clipping, an FP32 tensor of shape `[1]`, on the device of the first
/// gradient; 0 if there are no gradients.
///
/// # Errors
///
/// [`AmpError::ForeignGradients`] when gradients are not this model's. They are then unchanged.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::{burn, Precision, clip_grad_norm, flex};
/// # use burn::{nn::LinearConfig, optim::GradientsParams, tensor::Tensor};
/// # let device = flex(Precision::Bf16)?.autodiff();
/// # let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// # let loss = model.forward(Tensor::<2>::ones([2, 4], &device)).sum();
/// let mut grads = GradientsParams::from_grads(loss.backward(), &model);
/// let norm = clip_grad_norm(&model, &mut grads, 1.0)?;
/// # assert_eq!(norm.into_scalar::<f32>(), 4.0);
/// # let grad = grads.get::<2>(model.weight.id).unwrap();
/// # let norm: f32 = grad.powi_scalar(2).sum().sqrt().into_scalar();
/// # assert!((norm - 1.0).abs() < 1e-5);
/// # }
/// # Ok::<(), burn_amp_device::Error>(())
/// ```
pub fn clip_grad_norm(
    model: &impl Module,
    grads: &mut GradientsParams,
    max_norm: f32,
) -> Result<Tensor<1>, AmpError> {
    let given = grads.len();
    let Found {
        parameters, device, ..
    } = found(model, grads);
    if parameters.len() < given {
        return Err(AmpError::ForeignGradients {
            call: "clip_grad_norm",
            given,
            of_model: parameters.len(),
        });
    }
    let mut squares = Squares(None);
    replace(&parameters, model, grads, &mut squares);
    let Some(squares) = squares.0 else {
        return Ok(Tensor::zeros(
            [1],
            (&device.unwrap_or_default(), DType::F32),
        ));
    };
    let norm = squares.sqrt();
    let factor = ((norm.clone() + 1e-6).recip() * max_norm).clamp_max(1.0);
    replace(&parameters, model, grads, &mut Times(factor));
    Ok(norm)
}

/// Adds up the squares of gradients.
struct Squares(Option<Tensor<1>>);

impl EachGradient for Squares {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        let square = at_least_f32(grad.clone()).powi_scalar(2).sum();
        let square = match square.dtype() {
            DType::F32 => square,
            _ => square.cast(FloatDType::F32),
        };
        self.0 = Some(match self.0.take() {
            Some(sum) => {
                let square = square.to_device(&sum.device());
                sum + square
            }
            None => square,
        });
        grad
    }
}

/// Multiplies gradients by a factor.
struct Times(Tensor<1>);

impl EachGradient for Times {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        times(grad, &self.0)
    }
}

/// Makes gradients FP32 on their device, where some may be half. A sum of FP32 gradients is not rounded to
/// half, and is the same after saving and loading.
pub(crate) fn widen(model: &impl Module, grads: &mut GradientsParams) {
    let parameters = found(model, grads).parameters;
    replace(&parameters, model, grads, &mut Widen(None));
}

/// Multiplies gradients by an FP32 tensor of 1.
struct Widen(Option<Tensor<1>>);

impl EachGradient for Widen {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        let one = self.0.get_or_insert_with(|| factor(1.0, &grad));
        times(grad, one)
    }
}

/// Removes the marks of gradients that leave the backward pass. A parameter would inherit them in the step.
pub(crate) fn unmark(model: &impl Module, grads: &mut GradientsParams) {
    if has_marks() {
        let parameters = found(model, grads).parameters;
        replace(&parameters, model, grads, &mut Unmark);
    }
}

struct Unmark;

impl EachGradient for Unmark {
    fn gradient<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        ends_backward(grad)
    }
}

pub(crate) fn at_least_f32<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// A factor for tensors like this one.
pub(crate) fn factor<const D: usize>(factor: f64, like: &Tensor<D>) -> Tensor<1> {
    Tensor::from_data(
        TensorData::from([factor]),
        (&like.device().without_autodiff(), like.dtype()),
    )
}

/// A tensor times a factor, in the tensor's dtype and on its device.
pub(crate) fn times<const D: usize>(tensor: Tensor<D>, factor: &Tensor<1>) -> Tensor<D> {
    let factor = factor.clone().to_device(&tensor.device());
    let factor = if factor.dtype() == tensor.dtype() {
        factor
    } else {
        factor.cast(tensor.dtype())
    };
    tensor * factor.reshape([1; D])
}
