//! A model for inference with its weights in half.

mod common;

use burn::backend::Flex;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::prelude::*;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::DType;
use burn_amp::{Amp, AmpAutodiff, Precision, full_precision, half_weights, with_precision};

use common::mlp::values;
use common::{HALVES, assert_close};

type B = Amp<Flex>;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    conv: Conv2d<B>,
    batch_norm: BatchNorm<B>,
    layer_norm: LayerNorm<B>,
    linear: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 1);
        Self {
            conv: Conv2dConfig::new([3, 32], [3, 3]).init(&device),
            batch_norm: BatchNormConfig::new(32).init(&device),
            layer_norm: LayerNormConfig::new(6).init(&device),
            linear: LinearConfig::new(6, 64).init(&device),
        }
    }

    fn forward(&self) -> Tensor<B, 4> {
        let x = self.conv.forward(values::<B, 4>([2, 3, 8, 8], 3));
        self.linear
            .forward(self.layer_norm.forward(self.batch_norm.forward(x)))
    }
}

/// The bytes of a model's parameters, and the dtype of each.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    bytes: usize,
    dtypes: Vec<(String, DType)>,
}

impl<B: Backend> ModuleVisitor<B> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        self.bytes += value.shape().num_elements() * value.dtype().size();
        self.dtypes.push((self.path.join("."), value.dtype()));
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

fn data<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

fn halves() -> [(Precision, DType); 2] {
    let dtypes = [DType::F16, DType::BF16];
    std::array::from_fn(|i| (HALVES[i], dtypes[i]))
}

fn of<B: Backend>(model: &impl Module<B>) -> Parameters {
    let mut parameters = Parameters::default();
    model.visit(&mut parameters);
    parameters
}

#[test]
fn weights_take_half_the_memory_and_give_the_same_results() {
    for (precision, dtype) in halves() {
        with_precision(precision, || {
            let model = Model::<AmpAutodiff<Flex>>::new().valid();
            let (expected, before) = (data(model.forward()), of(&model).bytes);
            let model = half_weights(model, precision).unwrap();
            let after = of(&model);
            let weights = 32 * 3 * 3 * 3 + 6 * 64;
            assert_eq!(before - after.bytes, 2 * weights);
            let halves: Vec<_> = after.dtypes.iter().filter(|(_, d)| *d == dtype).collect();
            let names: Vec<_> = halves.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["conv.weight", "linear.weight"]);
            assert!(after.dtypes.len() > 2);
            // The layers round their weights anyway.
            assert!(data(model.forward()) == expected);
            assert!(expected.iter().all(|value| value.is_finite()));
        });
    }
}

#[test]
fn an_embedding_gives_rounded_rows() {
    let device = Default::default();
    let rows = Tensor::<B, 2, Int>::from_ints([[0, 3, 1]], &device);
    let model: Embedding<B> = EmbeddingConfig::new(4, 8).init(&device);
    for (precision, dtype) in halves() {
        with_precision(precision, || {
            let expected = model.forward(rows.clone());
            let model = half_weights(model.clone(), precision).unwrap();
            let found = model.forward(rows.clone());
            assert_eq!(found.dtype(), dtype);
            assert_close("rows", precision, &data(found), &data(expected), 1.0);
        });
    }
}

#[test]
fn a_record_has_the_rounded_values_and_another_dtype_stays() {
    let device = Default::default();
    let fresh = || LinearConfig::new(3, 3).init::<B>(&device);
    let model = half_weights(fresh(), Precision::Bf16).unwrap();
    let weight = data(model.weight.val());
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = recorder.record(model.clone().into_record(), ()).unwrap();
    for model in [fresh(), model.clone()] {
        let loaded = model.load_record(recorder.load(bytes.clone(), &device).unwrap());
        assert_eq!(loaded.weight.val().dtype(), DType::F32);
        assert_eq!(data(loaded.weight.val()), weight);
    }

    // bf16 stays bf16.
    let again = half_weights(model, Precision::F16).unwrap();
    assert_eq!(again.weight.val().dtype(), DType::BF16);
}

/// 300 x 300 x 4 is beyond f16. Rows of an embedding and a weight are both half weights.
#[test]
fn what_is_computed_from_half_weights_alone_is_in_the_precision_in_force() {
    let device = Default::default();
    for (precision, half) in halves() {
        with_precision(precision, || {
            let filled = |weight: Tensor<B, 2>| weight * 0.0 + 300.0;
            let mut embedding: Embedding<B> = EmbeddingConfig::new(1, 4).init(&device);
            let mut linear: Linear<B> = LinearConfig::new(4, 1).with_bias(false).init(&device);
            embedding.weight = embedding.weight.map(filled);
            linear.weight = linear.weight.map(filled);
            let embedding = half_weights(embedding, precision).unwrap();
            let linear = half_weights(linear, precision).unwrap();
            let rows = || embedding.forward(Tensor::zeros([1, 1], &device));
            let product = || linear.forward(rows());
            assert_eq!(rows().dtype(), half);
            assert_eq!(product().dtype(), half);
            let value: Vec<f32> = full_precision(product).into_data().to_vec().unwrap();
            assert_eq!(value, [360_000.0]);
            // Frozen, below autodiff.
            let trained = || {
                let rows = embedding.clone().train::<AmpAutodiff<Flex>>();
                let rows = rows.forward(Tensor::zeros([1, 1], &device));
                linear.clone().train::<AmpAutodiff<Flex>>().forward(rows)
            };
            let value: Vec<f32> = full_precision(trained).into_data().to_vec().unwrap();
            assert_eq!(value, [360_000.0]);
            // The data of a result is FP32, that of a weight and of its rows is half.
            assert!(product().into_data().to_vec::<f32>().is_ok());
            let weight = || linear.weight.val();
            for weight in [weight(), weight().transpose(), weight() * 0.5] {
                assert_eq!((weight.dtype(), weight.into_data().dtype), (half, half));
            }
        });
    }
}

/// Files have a header of the dtype and a body of the data.
#[test]
fn a_parameter_that_is_a_product_is_fp32() {
    let device = Default::default();
    for (precision, half) in halves() {
        with_precision(precision, || {
            let weight = values::<B, 2>([4, 4], 2).set_require_grad(false);
            let product = values([4, 4], 1).matmul(weight);
            assert_eq!(product.dtype(), half);
            let parameter = Param::from_tensor(product.clone()).val();
            assert_eq!(parameter.dtype(), DType::F32);
            assert_eq!(data(parameter), data(product));
            // A program's own half parameter stays so.
            let own = Tensor::<B, 2>::zeros([2, 2], &device).cast(half);
            assert_eq!(Param::from_tensor(own).val().dtype(), half);
        });
    }
}
