//! A small model with reproducible parameters and data, its scaler, and its state in full.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn::prelude::*;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, activation};
use burn_amp::{DynamicLossScale, GradScaler, LossScaleConfig, Precision, with_precision};

#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    pub first: Linear<B>,
    pub second: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let device = Default::default();
        let model = Self {
            first: LinearConfig::new(8, 16).init(&device),
            second: LinearConfig::new(16, 4).init(&device),
        };
        model.map(&mut Fill(0))
    }

    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second.forward(activation::tanh(self.first.forward(x)))
    }

    /// The loss on 32 samples.
    pub fn loss(&self, seed: u64) -> Tensor<B, 1> {
        self.loss_on(values([32, 8], seed), values([32, 4], seed + 1))
    }

    pub fn loss_on(&self, x: Tensor<B, 2>, y: Tensor<B, 2>) -> Tensor<B, 1> {
        let error = self.forward(x) - y;
        error.powi_scalar(2).mean()
    }
}

/// Gives each parameter values of its own, the same on every backend.
pub struct Fill(pub u64);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        param.map(|tensor| {
            let grad = tensor.is_require_grad();
            let filled = values(tensor.dims(), 1000 + self.0) * 0.5;
            filled.set_require_grad(grad)
        })
    }
}

/// Reproducible numbers between -1 and 1.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let mut z = (seed << 32)
                .wrapping_add(i)
                .wrapping_add(1)
                .wrapping_mul(0x9e3779b97f4a7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
            ((z ^ (z >> 31)) >> 40) as f32 / 2f32.powi(23) - 1.0
        })
        .collect()
}

pub fn values<B: Backend, const D: usize>(shape: [usize; D], seed: u64) -> Tensor<B, D> {
    let data = TensorData::new(numbers(shape.iter().product(), seed), shape);
    Tensor::from_data(data, &Default::default())
}

/// Every parameter's values, in the order of the module.
pub fn parameters<B: Backend>(module: &impl Module<B>) -> Vec<f32> {
    struct Collect(Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            assert_eq!(param.val().dtype(), DType::F32);
            self.0.extend(data(param.val()));
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

pub fn data<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// Every gradient that exists, in the order of the module.
pub fn gradients<B: AutodiffBackend>(module: &impl Module<B>, grads: &GradientsParams) -> Vec<f32> {
    struct Collect<'a>(&'a GradientsParams, Vec<f32>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = self.0.get::<B::InnerBackend, D>(param.id) {
                assert_eq!(grad.dtype(), DType::F32);
                self.1.extend(data(grad));
            }
        }
    }
    let mut collect = Collect(grads, Vec::new());
    module.visit(&mut collect);
    collect.1
}

/// The optimizer's state of each parameter that has one, by the parameter's place in the module.
pub fn state<B, M, O>(
    optimizer: &OptimizerAdaptor<O, M, B>,
    module: &impl Module<B>,
) -> Vec<(usize, Vec<u8>)>
where
    B: AutodiffBackend,
    M: burn::module::AutodiffModule<B>,
    O: SimpleOptimizer<B::InnerBackend>,
{
    struct Ids(Vec<ParamId>);
    impl<B: Backend> ModuleVisitor<B> for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.id);
        }
    }
    let record = optimizer.to_record();
    let mut ids = Ids(Vec::new());
    module.visit(&mut ids);
    ids.0
        .iter()
        .enumerate()
        .filter_map(|(i, id)| {
            let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
            let bytes = Recorder::<B>::record(&recorder, record.get(id)?.clone(), ()).unwrap();
            Some((i, bytes))
        })
        .collect()
}

pub fn scaler(init_scale: f32) -> GradScaler {
    GradScaler::new(LossScaleConfig::Dynamic(DynamicLossScale {
        init_scale,
        ..DynamicLossScale::default()
    }))
    .unwrap()
}

pub fn in_scope<T>(precision: Precision, scaler: &GradScaler, f: impl FnOnce() -> T) -> T {
    with_precision(precision, || scaler.scope(f))
}
