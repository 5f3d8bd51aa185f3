//! A module's gradients by the paths of its parameters.

use std::collections::{HashMap, HashSet};

use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_core::tensor::backend::{AutodiffBackend, Backend};
use burn_core::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_optim::GradientsParams;

use crate::diagnostics::FiniteCheck;

/// The module's parameters that have a gradient, with their paths, in module order.
pub(crate) struct Found<B: Backend> {
    pub parameters: Vec<(ParamId, String)>,
    /// The device of the first gradient.
    pub device: B::Device,
}

pub(crate) fn found<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &GradientsParams,
) -> Found<B> {
    let mut find = Find {
        grads,
        seen: HashSet::new(),
        path: Vec::new(),
        parameters: Vec::new(),
        device: None,
    };
    model.visit(&mut find);
    Found {
        parameters: find.parameters,
        device: find.device.unwrap_or_default(),
    }
}

struct Find<'a, B: AutodiffBackend> {
    grads: &'a GradientsParams,
    seen: HashSet<ParamId>,
    path: Vec<String>,
    parameters: Vec<(ParamId, String)>,
    device: Option<B::Device>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Find<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
            self.device.get_or_insert_with(|| grad.device());
            // A shared parameter counts once.
            if self.seen.insert(param.id) {
                self.parameters.push((param.id, self.path.join(".")));
            }
        }
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// Multiplies the gradients that satisfy `is_scaled` by `factor`, in FP32 or wider, and adds them
/// to `check` in the order of [`found`]. The other gradients are returned as they are.
pub(crate) fn unscale<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: GradientsParams,
    is_scaled: impl Fn(ParamId) -> bool,
    factor: Option<f64>,
    check: &mut FiniteCheck<B::InnerBackend>,
) -> GradientsParams {
    let mut unscale = Unscale::<B> {
        grads,
        is_scaled: &is_scaled,
        factor,
        factor_tensor: None,
        check,
        unscaled: GradientsParams::new(),
    };
    model.visit(&mut unscale);
    unscale.unscaled
}

struct Unscale<'a, B: AutodiffBackend> {
    grads: GradientsParams,
    is_scaled: &'a dyn Fn(ParamId) -> bool,
    factor: Option<f64>,
    /// An FP32 gradient here may be f16 on a server that computes in f16. On the server, f16 times
    /// a scalar stays f16, and f16 times an FP32 tensor becomes FP32.
    factor_tensor: Option<Tensor<B::InnerBackend, 1>>,
    check: &'a mut FiniteCheck<B::InnerBackend>,
    unscaled: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Unscale<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else {
            return;
        };
        if !(self.is_scaled)(param.id) {
            self.unscaled.register(param.id, grad);
            return;
        }
        let dtype = grad.dtype();
        let wide = match dtype {
            DType::F16 | DType::BF16 => grad.cast(FloatDType::F32),
            _ => grad,
        };
        let wide = match (self.factor, wide.dtype()) {
            (None, _) => wide,
            (Some(factor), DType::F32) => {
                let on = (&wide.device(), DType::F32);
                let tensor = || Tensor::from_data(TensorData::from([factor]), on);
                times(wide, self.factor_tensor.get_or_insert_with(tensor))
            }
            (Some(factor), _) => wide * factor,
        };
        self.check.add(wide.clone().into_primitive().tensor());
        self.unscaled.register(param.id, wide.cast(dtype));
    }
}

/// Scales a model's gradients down if their total norm is above `max_norm`: multiplies them by
/// `min(1, max_norm / (norm + 1e-6))`, like PyTorch's `torch.nn.utils.clip_grad_norm_`. Reads
/// nothing back from the device. With the explicit protocol, call it between
/// [`GradScaler::unscale`](crate::GradScaler::unscale) and [`step`](crate::GradScaler::step). One
/// non-finite gradient spoils all of them.
///
/// Gradients keep their shape and dtype. Gradients of other models are dropped, unless none belongs
/// to this model: then all are returned unchanged.
///
/// ```
/// # use burn::{backend::Flex, nn::LinearConfig, optim::GradientsParams, tensor::Tensor};
/// # use burn_amp::{AmpAutodiff, clip_grad_norm};
/// # type B = AmpAutodiff<Flex>;
/// # let device = Default::default();
/// # let model = LinearConfig::new(4, 1).with_bias(false).init::<B>(&device);
/// # let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).sum();
/// let grads = GradientsParams::from_grads(loss.backward(), &model);
/// let grads = clip_grad_norm(&model, grads, 1.0);
/// # let grad = grads.get::<burn_amp::Amp<Flex>, 2>(model.weight.id).unwrap();
/// # let norm: f32 = grad.powi_scalar(2).sum().sqrt().into_scalar();
/// # assert!((norm - 1.0).abs() < 1e-5);
/// ```
pub fn clip_grad_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: GradientsParams,
    max_norm: f32,
) -> GradientsParams {
    let mut norm = Norm::<B> {
        grads: &grads,
        seen: HashSet::new(),
        squares: None,
    };
    model.visit(&mut norm);
    let Some(squares) = norm.squares else {
        return grads;
    };
    let factor = ((squares.sqrt() + 1e-6).recip() * max_norm).clamp_max(1.0);
    let mut scale = Scale::<B> {
        grads,
        factor,
        scaled: GradientsParams::new(),
    };
    model.visit(&mut scale);
    scale.scaled
}

struct Norm<'a, B: AutodiffBackend> {
    grads: &'a GradientsParams,
    seen: HashSet<ParamId>,
    squares: Option<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Norm<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id)
            && self.seen.insert(param.id)
        {
            let square = grad.cast(FloatDType::F32).powi_scalar(2).sum();
            self.squares = Some(match self.squares.take() {
                Some(squares) => {
                    let square = square.to_device(&squares.device());
                    squares + square
                }
                None => square,
            });
        }
    }
}

struct Scale<B: AutodiffBackend> {
    grads: GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
    scaled: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) {
            self.scaled.register(param.id, times(grad, &self.factor));
        }
    }
}

/// Multiplies the gradient with the fewest elements by `factor`. Reads nothing back.
pub(crate) fn smallest_times<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
) -> GradientsParams {
    let mut smallest = Smallest {
        grads: &grads,
        smallest: None,
    };
    model.visit(&mut smallest);
    let Some((_, id)) = smallest.smallest else {
        return grads;
    };
    let mut scale = ScaleOne::<B> { grads, id, factor };
    model.visit(&mut scale);
    scale.grads
}

struct Smallest<'a> {
    grads: &'a GradientsParams,
    /// The smallest gradient's number of elements, and its parameter.
    smallest: Option<(usize, ParamId)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Smallest<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
            let elements = grad.shape().num_elements();
            // On a tie the first gradient wins: the backward pass reaches it last.
            if self.smallest.is_none_or(|(least, _)| elements < least) {
                self.smallest = Some((elements, param.id));
            }
        }
    }
}

struct ScaleOne<B: AutodiffBackend> {
    grads: GradientsParams,
    id: ParamId,
    factor: Tensor<B::InnerBackend, 1>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for ScaleOne<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.id == self.id
            && let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id)
        {
            self.grads.register(param.id, times(grad, &self.factor));
        }
    }
}

/// A gradient times a factor, in the gradient's dtype and on its device.
fn times<B: Backend, const D: usize>(grad: Tensor<B, D>, factor: &Tensor<B, 1>) -> Tensor<B, D> {
    let factor = factor.clone().to_device(&grad.device());
    let factor = factor.cast(grad.dtype()).reshape([1; D]);
    grad * factor
}

/// The gradients as data, with their parameter ids, in module order.
pub(crate) fn to_data<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &GradientsParams,
) -> Vec<(u64, TensorData)> {
    struct Collect<'a>(&'a GradientsParams, Vec<(u64, TensorData)>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = self.0.get::<B::InnerBackend, D>(param.id) {
                self.1.push((param.id.val(), grad.into_data()));
            }
        }
    }
    let mut collect = Collect(grads, Vec::new());
    model.visit(&mut collect);
    collect.1
}

/// Restores the gradients from [`to_data`], each on its parameter's device.
pub(crate) fn from_data<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    data: Vec<(u64, TensorData)>,
) -> GradientsParams {
    struct Restore(HashMap<u64, TensorData>, GradientsParams);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Restore {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(data) = self.0.remove(&param.id.val()) {
                let dtype = data.dtype;
                let device = param.val().device();
                let grad = Tensor::<B::InnerBackend, D>::from_data(data, (&device, dtype));
                self.1.register(param.id, grad);
            }
        }
    }
    let mut restore = Restore(data.into_iter().collect(), GradientsParams::new());
    model.visit(&mut restore);
    restore.1
}
