//! A module's parameters and their gradients.

use std::collections::{HashMap, HashSet};

use burn_amp_core::Parameter;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::backend::{AutodiffBackend, Backend};
use burn_core::tensor::{DType, FloatDType, Tensor, TensorData, TensorPrimitive};
use burn_optim::GradientsParams;

use crate::AmpError;
use crate::autodiff::generic::node_id;
use crate::diagnostics::FiniteCheck;
use crate::policy::is_half;

/// A gradient of any number of dimensions: [`GradientsParams`] does not store this number, and does not
/// check the number in the type. Use it only for operations that do not depend on the number.
type Gradient<I> = Tensor<I, 1>;

/// Calls `each` with the id, the path and the value of each float parameter, in module order. A shared
/// parameter is visited once for each of its places. The value is a closure, because reading it
/// initializes a lazy parameter.
pub(super) fn for_each_parameter<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    each: impl FnMut(ParamId, &[String], &dyn Fn() -> FloatTensor<B>),
) {
    module.visit(&mut Visitor { path: vec![], each });
}

struct Visitor<F> {
    path: Vec<String>,
    each: F,
}

impl<B, F> ModuleVisitor<B> for Visitor<F>
where
    B: Backend,
    F: FnMut(ParamId, &[String], &dyn Fn() -> FloatTensor<B>),
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = || param.val().into_primitive().tensor();
        (self.each)(param.id, &self.path, &value);
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// The model with its trained parameters in FP32, where the policy is on, and whether one was half: the model was
/// loaded before its precision was chosen. Frozen parameters stay half.
pub(super) fn in_f32<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> (M, bool) {
    let mut half = TrainedInHalf(false);
    model.visit(&mut half);
    match half.0 {
        true => (model.map(&mut Widen), true),
        false => (model, false),
    }
}

struct TrainedInHalf(bool);
struct Widen;

/// Whether a parameter is trained in half. Reading a lazy parameter would initialize it out of its turn.
fn is_trained_in_half<B: AutodiffBackend, const D: usize>(param: &Param<Tensor<B, D>>) -> bool {
    param.is_initialized() && param.is_require_grad() && is_half(param.val().dtype())
}

impl<B: AutodiffBackend> ModuleVisitor<B> for TrainedInHalf {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0 |= is_trained_in_half(param);
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Widen {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if is_trained_in_half(&param) {
            // An `AmpAutodiff` gives an optimizer's tensor in FP32.
            param.map(|tensor| Tensor::from_inner(tensor.inner()).require_grad())
        } else {
            param
        }
    }
}

/// The tape nodes of a module's parameters with their paths, in module order. Empty if the backend
/// is not an `AmpAutodiff`.
pub(super) fn nodes<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Vec<(u64, String)> {
    let mut nodes = Vec::new();
    for_each_parameter::<B, M>(module, |_, path, value| {
        let node = node_id::<B>(&value());
        nodes.extend(node.map(|node| (node, path.join("."))));
    });
    nodes
}

/// The module's parameters that have a gradient, each once, in module order.
pub(super) struct Found<B: Backend> {
    pub parameters: Vec<Parameter>,
    /// The device of the first gradient.
    pub device: B::Device,
    /// The path of the first parameter whose gradient is in f16.
    pub f16: Option<String>,
}

pub(super) fn found<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &GradientsParams,
) -> Found<B> {
    let mut parameters = Vec::new();
    let mut device = None;
    let mut f16 = None;
    let mut seen = HashSet::new();
    for_each_parameter::<B, M>(model, |id, path, _| {
        if let Some(grad) = grads.get::<B::InnerBackend, 1>(id)
            && seen.insert(id)
        {
            device.get_or_insert_with(|| grad.device());
            if grad.dtype() == DType::F16 {
                f16.get_or_insert_with(|| path.join("."));
            }
            parameters.push((id.val(), path.join(".")));
        }
    });
    Found {
        parameters,
        device: device.unwrap_or_default(),
        f16,
    }
}

/// Whether the gradients of a model are finite. Reads them back.
pub(super) fn are_finite<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &mut GradientsParams,
) -> bool {
    let found = found::<B, M>(model, grads);
    let mut check = FiniteCheck::<B::InnerBackend>::new(found.device);
    unscale(
        &found.parameters.iter().collect::<Vec<_>>(),
        grads,
        None,
        &mut check,
    );
    !check.read().contains(&false)
}

/// Multiplies the gradients of these parameters by `factor`, in FP32 or wider, and adds them to
/// `check`, in this order.
pub(super) fn unscale<I: Backend>(
    parameters: &[&Parameter],
    grads: &mut GradientsParams,
    factor: Option<f64>,
    check: &mut FiniteCheck<I>,
) {
    // An FP32 gradient here may be f16 on a server that computes in f16. On the server, f16 times a
    // scalar stays f16, and f16 times an FP32 tensor becomes FP32.
    let mut factor_tensor = None;
    for (id, _) in parameters {
        let id = ParamId::from(*id);
        let Some(grad) = grads.remove::<I, 1>(id) else {
            continue;
        };
        let dtype = grad.dtype();
        let wide = match dtype {
            DType::F16 | DType::BF16 => grad.cast(FloatDType::F32),
            _ => grad,
        };
        let wide = match (factor, wide.dtype()) {
            (None, _) => wide,
            (Some(factor), DType::F32) => {
                let on = (&wide.device(), DType::F32);
                let tensor = || Tensor::from_data(TensorData::from([factor]), on);
                times(wide, factor_tensor.get_or_insert_with(tensor))
            }
            (Some(factor), _) => wide * factor,
        };
        check.add(wide.clone().into_primitive().tensor());
        grads.register(id, wide.cast(dtype));
    }
}

/// Scales a model's gradients down if their total norm is above `max_norm`: multiplies them by
/// `min(1, max_norm / (norm + 1e-6))`, like PyTorch's `torch.nn.utils.clip_grad_norm_`. Reads
/// nothing back from the device. With the explicit protocol, call it between
/// [`GradScaler::unscale`](crate::GradScaler::unscale) and [`step`](crate::GradScaler::step). One
/// non-finite gradient spoils all of them: an infinite gradient, for example, sets the finite ones to 0. So
/// does, as in PyTorch, a gradient beyond 1.8e19, whose square is infinite in FP32.
/// Gradients keep their shape and dtype.
///
/// Returns the total norm before clipping, an FP32 tensor of shape `[1]`; 0 if there are no
/// gradients, as after an overflow.
///
/// # Errors
///
/// [`AmpError::ForeignGradients`] when gradients are not this model's. They are then unchanged.
///
/// ```
/// # use burn::{backend::Flex, nn::LinearConfig, optim::GradientsParams, tensor::Tensor};
/// # use burn_amp::{AmpAutodiff, clip_grad_norm};
/// # type B = AmpAutodiff<Flex>;
/// # let device = Default::default();
/// # let model = LinearConfig::new(4, 1).with_bias(false).init::<B>(&device);
/// # let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).sum();
/// let mut grads = GradientsParams::from_grads(loss.backward(), &model);
/// let norm = clip_grad_norm(&model, &mut grads, 1.0)?;
/// # assert_eq!(norm.into_scalar(), 4.0);
/// # let grad = grads.get::<burn_amp::Amp<Flex>, 2>(model.weight.id).unwrap();
/// # let norm: f32 = grad.powi_scalar(2).sum().sqrt().into_scalar();
/// # assert!((norm - 1.0).abs() < 1e-5);
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub fn clip_grad_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &mut GradientsParams,
    max_norm: f32,
) -> Result<Tensor<B::InnerBackend, 1>, AmpError> {
    let Found {
        parameters, device, ..
    } = found::<B, M>(model, grads);
    let (given, of_model) = (grads.len(), parameters.len());
    if of_model < given {
        return Err(AmpError::ForeignGradients {
            call: "clip_grad_norm",
            given,
            of_model,
        });
    }
    let ids: Vec<_> = parameters
        .iter()
        .map(|(id, _)| ParamId::from(*id))
        .collect();
    let squares = ids.iter().filter_map(|id| {
        let grad = grads.get::<B::InnerBackend, 1>(*id)?;
        Some(grad.cast(FloatDType::F32).powi_scalar(2).sum())
    });
    let Some(squares) = squares.reduce(|sum, square| {
        let square = square.to_device(&sum.device());
        sum + square
    }) else {
        return Ok(Tensor::zeros([1], (&device, DType::F32)));
    };
    let norm = squares.sqrt();
    let factor = ((norm.clone() + 1e-6).recip() * max_norm).clamp_max(1.0);
    for id in ids {
        if let Some(grad) = grads.remove(id) {
            grads.register(id, times(grad, &factor));
        }
    }
    Ok(norm)
}

/// Multiplies the gradient with the fewest elements, but not without any, by `factor`. Reads nothing back.
pub(super) fn smallest_times<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    mut grads: GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
) -> GradientsParams {
    let sized = |(id, _)| {
        let id = ParamId::from(id);
        let grad = grads.get::<B::InnerBackend, 1>(id)?;
        Some((grad.shape().num_elements(), id)).filter(|(elements, _)| *elements > 0)
    };
    let parameters = found::<B, M>(model, &grads).parameters.into_iter();
    // On a tie the first gradient wins: the backward pass reaches it last.
    let smallest = parameters
        .filter_map(sized)
        .min_by_key(|(elements, _)| *elements);
    if let Some((_, id)) = smallest
        && let Some(grad) = grads.remove(id)
    {
        grads.register(id, times(grad, &factor));
    }
    grads
}

/// A gradient times a factor, in the gradient's dtype and on its device.
fn times<I: Backend>(grad: Gradient<I>, factor: &Tensor<I, 1>) -> Gradient<I> {
    let factor = factor.clone().to_device(&grad.device());
    let factor = factor.cast(grad.dtype()).into_primitive().tensor();
    let grad = grad.into_primitive().tensor();
    let factor = I::float_reshape(factor, Shape::from(vec![1; grad.shape().num_dims()]));
    Tensor::from_primitive(TensorPrimitive::Float(I::float_mul(grad, factor)))
}

/// The gradients as data, with their parameter ids, in module order.
pub(super) fn to_data<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &GradientsParams,
) -> Vec<(u64, TensorData)> {
    let parameters = found::<B, M>(model, grads).parameters.into_iter();
    let grad = |id: u64| grads.get::<B::InnerBackend, 1>(id.into());
    let data = |(id, _): Parameter| Some((id, grad(id)?.into_data()));
    parameters.filter_map(data).collect()
}

/// Restores the gradients from [`to_data`], each times `factor` and on its parameter's device.
pub(super) fn from_data<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    data: Vec<(u64, TensorData)>,
    factor: f64,
) -> GradientsParams {
    let mut data: HashMap<_, _> = data.into_iter().collect();
    let mut grads = GradientsParams::new();
    for_each_parameter::<B, M>(model, |id, _, value| {
        if let Some(data) = data.remove(&id.val()) {
            let grad = B::InnerBackend::float_from_data(data, &B::float_device(&value()));
            let grad = TensorPrimitive::Float(grad);
            let grad = Gradient::<B::InnerBackend>::from_primitive(grad);
            let grad = match factor {
                1.0 => grad,
                _ => grad * factor,
            };
            grads.register(id, grad);
        }
    });
    grads
}
