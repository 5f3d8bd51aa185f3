//! The generic code that most tests instantiate. Without optimization, a crate takes what a crate that it depends on has
//! instantiated: the programs of the tests would each compile it again. Nothing here runs.

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex, NdArray};
use burn::module::AutodiffModule;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::{gelu, log_softmax, relu, sigmoid, softmax, tanh};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, module};
use burn_amp::{Amp, AmpAutodiff, GradScaler, MixedPrecisionTrainerConfig};

use crate::checked::Checked;
use crate::mlp::{Mlp, data, gradients, parameters, scaler, state};

/// Where the code is instantiated.
pub fn all() {
    training::<Autodiff<Flex>>();
    training::<AmpAutodiff<Flex>>();
    training::<AmpAutodiff<Flex, BalancedCheckpointing>>();
    training::<AmpAutodiff<NdArray>>();
    training::<AmpAutodiff<Checked>>();
    inference::<Flex>();
    inference::<Amp<Flex>>();
}

fn training<B: AutodiffBackend>() {
    let device = Default::default();
    operations::<B>();
    let x = Tensor::<B, 2>::ones([2, 2], &device).require_grad();
    let loss = Model::new(&device).forward(x.clone()).mean();
    x.grad(&loss.backward());

    let (mut sgd, mut adam) = (SgdConfig::new().init(), AdamConfig::new().init());
    let scaler: GradScaler = scaler(1.0);
    let model = Mlp::<B>::new();
    let grads = GradientsParams::from_grads(model.loss(1).backward(), &model);
    gradients::<B>(&model, &grads);
    let model = sgd.step(0.1, model, grads);
    let mut grads = scaler.backward(model.loss(1), &model);
    scaler.unscale(&model, &mut grads).ok();
    let (model, _) = scaler.step(&mut adam, 0.1, model, grads);
    state(&adam, &model);
    parameters(&model);
    parameters(&model.valid());
    if let Ok(mut trainer) = MixedPrecisionTrainerConfig::new().init(model, adam, 0.1) {
        let loss = |model: &Mlp<B>, seed, ()| model.loss(seed);
        trainer.train_step(1, (), loss).ok();
    }
}

fn inference<B: Backend>() {
    operations::<B>();
    let device = Default::default();
    Model::new(&device).forward(Tensor::<B, 2>::ones([2, 2], &device));
    parameters(&Mlp::<B>::new());
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    linear: Linear<B>,
    norm: LayerNorm<B>,
    conv: Conv2d<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            linear: LinearConfig::new(2, 2).init(device),
            norm: LayerNormConfig::new(2).init(device),
            conv: Conv2dConfig::new([1, 1], [1, 1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let image = self.norm.forward(self.linear.forward(x)).unsqueeze::<4>();
        self.conv.forward(image).flatten(0, 2)
    }
}

fn operations<B: Backend>() {
    let x = Tensor::<B, 2>::ones([1, 1], &Default::default());
    let indices = Tensor::<B, 1, Int>::from_data([0], &x.device());
    let product = module::linear(x.clone().matmul(x.clone().transpose()), x.clone(), None);
    let taken = product
        .select(0, indices.clone())
        .gather(1, indices.unsqueeze());
    data(elementwise(taken.clone()));
    data(elementwise(taken.clone().unsqueeze::<3>()));
    data(elementwise(taken.squeeze_dim::<1>(0)));
}

fn elementwise<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let mask = x
        .clone()
        .greater(x.clone())
        .bool_or(x.clone().equal_elem(0.5));
    let y = x.clone() + x.clone() - x.clone() * x.clone() / x.clone();
    let y = (-y * 2.0 + 1.0 - 1.0) / 2.0;
    let y = y
        .exp()
        .log()
        .sqrt()
        .abs()
        .recip()
        .powf_scalar(2.0)
        .powi_scalar(2);
    let y = y.clone().mask_fill(mask.clone(), 0.0).mask_where(mask, y);
    let y = y.clamp(0.0, 1.0).clamp_min(0.0).clamp_max(1.0).detach();
    let y = y.clone().sum_dim(0) + y.clone().mean_dim(0) + y.max_dim(0);
    let y = log_softmax(softmax(y, 0), 0);
    let y = tanh(sigmoid(relu(gelu(y))))
        .cast(DType::F16)
        .cast(DType::F32);
    let y = y.clone().reshape(y.shape()).swap_dims(0, 0).flip([0]);
    let y = Tensor::cat(vec![y.clone(), y], 0)
        .narrow(0, 0, 1)
        .repeat_dim(0, 1);
    let of_all = y.clone().sum() + y.clone().mean() + y.clone().max() + y.clone().min();
    y + of_all.into_scalar().elem::<f32>()
}
