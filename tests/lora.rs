//! Adapters of low rank (LoRA) beside a frozen base with its weights in half.

mod common;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, full_precision, half_weights};

use common::mlp::{Fill, data, gradients, in_scope, values};
use common::{HALVES, assert_close};

type B = AmpAutodiff<Flex>;

#[derive(Module, Debug)]
struct Base<B: Backend> {
    first: Linear<B>,
    norm: LayerNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Base<B> {
    /// The same numbers on every backend.
    fn new() -> Self {
        let device = Default::default();
        let base = Self {
            first: LinearConfig::new(6, 8).init(&device),
            norm: LayerNormConfig::new(8).init(&device),
            last: LinearConfig::new(8, 2).init(&device),
        };
        base.map(&mut Fill(0))
    }
}

/// A frozen base with its weights in half.
fn half_base(precision: Precision) -> Base<B> {
    let frozen = Base::<B>::new().no_grad();
    Base::from_inner(half_weights(frozen.valid(), precision).unwrap())
}

/// Its scale is 2.
#[derive(Module, Debug)]
struct Lora<B: Backend> {
    a: Linear<B>,
    b: Linear<B>,
}

impl<B: Backend> Lora<B> {
    fn new([from, to]: [usize; 2], seed: u64) -> Self {
        let device = Default::default();
        let b = LinearConfig::new(2, to).with_initializer(Initializer::Zeros);
        let a: Linear<B> = LinearConfig::new(from, 2).with_bias(false).init(&device);
        Self {
            a: a.map(&mut Fill(seed)),
            b: b.with_bias(false).init(&device),
        }
    }

    fn forward(&self, base: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
        base.forward(x.clone()) + self.b.forward(self.a.forward(x)) * 2.0
    }

    fn merged(&self, base: Linear<B>) -> Linear<B> {
        let product = || self.a.weight.val().matmul(self.b.weight.val()) * 2.0;
        let merged = |weight: Tensor<B, 2>| full_precision(|| weight + product());
        Linear {
            weight: base.weight.map(merged),
            ..base
        }
    }
}

/// A base with adapters, in one module: the optimizer gets the base as well.
#[derive(Module, Debug)]
struct Adapted<B: Backend> {
    base: Base<B>,
    first: Lora<B>,
    last: Lora<B>,
}

impl<B: Backend> Adapted<B> {
    fn new(base: Base<B>, seed: u64) -> Self {
        Self {
            base,
            first: Lora::new([6, 8], seed),
            last: Lora::new([8, 2], seed + 1),
        }
    }

    /// As after some steps: B is not zero.
    fn trained(base: Base<B>, seed: u64) -> Self {
        let mut model = Self::new(base, seed);
        model.first.b = model.first.b.map(&mut Fill(seed + 2));
        model.last.b = model.last.b.map(&mut Fill(seed + 3));
        model
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.first.forward(&self.base.first, x);
        self.last
            .forward(&self.base.last, self.base.norm.forward(x))
    }

    fn loss(&self) -> Tensor<B, 1> {
        (self.forward(values([4, 6], 3)) - 1.0)
            .powi_scalar(2)
            .mean()
    }
}

/// The gradients of the adapters: A and B of the first, A and B of the last.
fn adapter_gradients<B: AutodiffBackend>(model: &Adapted<B>) -> Vec<f32> {
    let grads = GradientsParams::from_grads(model.loss().backward(), model);
    assert_eq!(grads.len(), 4);
    gradients(model, &grads)
}

/// Those of a base in FP32, in plain Burn.
fn plain_gradients(model: impl Fn(Base<Autodiff<Flex>>) -> Adapted<Autodiff<Flex>>) -> Vec<f32> {
    adapter_gradients(&model(Base::<Autodiff<Flex>>::new().no_grad()))
}

/// The data of all parameters, in their dtypes.
fn parameters<B: Backend>(module: &impl Module<B>) -> Vec<TensorData> {
    struct Collect(Vec<TensorData>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

fn train(mut model: Adapted<B>, steps: usize) -> Adapted<B> {
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..steps {
        let grads = GradientsParams::from_grads(model.loss().backward(), &model);
        model = optimizer.step(5e-2, model, grads);
    }
    model
}

/// In each half precision, with a loss scale that f16 has room for.
fn in_halves(test: impl Fn(Precision, DType)) {
    for precision in HALVES {
        let scaler = GradScaler::new(LossScaleConfig::Fixed(256.0)).unwrap();
        let half = precision.compute_dtype::<DType>().unwrap();
        in_scope(precision, &scaler, || test(precision, half));
        assert_eq!(scaler.skipped_steps(), 0, "{precision}");
    }
}

#[test]
fn the_base_stays_as_it_is_and_the_adapters_are_trained_in_fp32() {
    in_halves(|precision, half| {
        let model = Adapted::new(half_base(precision), 10);
        let (before, loss) = (
            parameters(&model.base),
            model.loss().into_scalar().elem::<f32>(),
        );
        let dtypes: Vec<_> = before.iter().map(|data| data.dtype).collect();
        let fp32 = DType::F32;
        assert_eq!(dtypes, [half, fp32, fp32, fp32, half, fp32]);

        let model = train(model, 50);
        assert_eq!(parameters(&model.base), before, "{precision}");
        for adapter in [&model.first, &model.last] {
            for data in parameters(adapter) {
                assert_eq!(data.dtype, fp32);
                assert!(data.iter::<f32>().any(|value| value != 0.0));
            }
        }
        let trained = model.loss().into_scalar().elem::<f32>();
        assert!(trained < 0.5 * loss, "{precision}: {loss} to {trained}");
    });
}

#[test]
fn half_weights_take_half_the_memory_while_adapters_train() {
    in_halves(|precision, _| {
        let bytes = |base: &Base<B>| -> usize {
            let bytes = |data: TensorData| data.num_elements() * data.dtype.size();
            parameters(base).into_iter().map(bytes).sum()
        };
        let model = train(Adapted::new(half_base(precision), 10), 2);
        let weights = 6 * 8 + 8 * 2;
        let fp32 = bytes(&Base::<B>::new().no_grad());
        assert_eq!(fp32 - bytes(&model.base), 2 * weights);
    });
}

/// Linear layers round their weights anyway.
#[test]
fn a_half_base_gives_the_gradients_of_an_fp32_base() {
    in_halves(|precision, _| {
        let half = adapter_gradients(&Adapted::trained(half_base(precision), 10));
        let fp32 = adapter_gradients(&Adapted::trained(Base::<B>::new().no_grad(), 10));
        assert_eq!(half, fp32, "{precision}");
        let plain = plain_gradients(|base| Adapted::trained(base, 10));
        assert_close("gradients", precision, &half, &plain, 8.0);
    });
}

/// This is no underflow: the gradient of A has B as a factor.
#[test]
fn where_b_is_zero_the_gradient_of_a_is_zero_and_that_of_b_is_not() {
    in_halves(|precision, _| {
        let model = Adapted::new(half_base(precision), 10);
        let found = adapter_gradients(&model);
        let plain = plain_gradients(|base| Adapted::new(base, 10));
        assert_close("gradients", precision, &found, &plain, 8.0);

        // A and B of the first, A and B of the last.
        let of_each = |gradients: &[f32]| {
            let mut rest = gradients.to_vec();
            [6 * 2, 2 * 8, 8 * 2, 2 * 2].map(|count| rest.drain(..count).collect::<Vec<f32>>())
        };
        let is_zero = |gradient: Vec<f32>| gradient.iter().all(|value| *value == 0.0);
        let expected = [true, false, true, false];
        assert_eq!(of_each(&found).map(is_zero), expected, "{precision}");

        // The first step moves B, the second moves A.
        let stepped = adapter_gradients(&train(model, 1));
        assert_eq!(of_each(&stepped).map(is_zero), [false; 4], "{precision}");
    });
}

#[test]
fn adapters_that_share_a_base_get_gradients_of_their_own() {
    in_halves(|precision, _| {
        let base = half_base(precision);
        let [one, other] = [10, 20].map(|seed| Adapted::trained(base.clone(), seed));
        let alone = [adapter_gradients(&one), adapter_gradients(&other)];
        assert!(alone[0] != alone[1]);

        let mut grads = (one.loss() + other.loss()).backward();
        let together = [&one, &other].map(|model| {
            let grads = GradientsParams::from_module(&mut grads, model);
            gradients(model, &grads)
        });
        assert_eq!(together, alone, "{precision}");
        assert!(GradientsParams::from_module(&mut grads, &base).is_empty());

        // The training of one changes nothing of the other.
        train(one, 3);
        assert_eq!(adapter_gradients(&other), alone[1], "{precision}");
    });
}

#[test]
fn merged_weights_give_the_results_of_base_and_adapters() {
    in_halves(|precision, half| {
        let model = Adapted::trained(half_base(precision), 10).valid();
        let merged = Base {
            first: model.first.merged(model.base.first.clone()),
            last: model.last.merged(model.base.last.clone()),
            norm: model.base.norm.clone(),
        };
        assert_eq!(merged.first.weight.val().dtype(), DType::F32);
        let merged = half_weights(merged, precision).unwrap();
        assert_eq!(merged.first.weight.val().dtype(), half);

        let x = values([4, 6], 3);
        let expected = data(model.forward(x.clone()));
        let x = merged.norm.forward(merged.first.forward(x));
        let found = data(merged.last.forward(x));
        assert_close("merged", precision, &found, &expected, 8.0);
    });
}
