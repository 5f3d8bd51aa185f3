//! Parameters that come in half are trained in FP32.

mod common;

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_amp::{
    AmpAutodiff, GradScaler, LossScaleConfig, MixedPrecisionTrainer, MixedPrecisionTrainerConfig,
    Precision, full_precision, with_precision,
};

use common::mlp::{Fill, parameters, values};
use common::{HALVES, assert_close};

type B = AmpAutodiff<Flex>;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    first: Linear<B>,
    norm: LayerNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new() -> Self {
        let device = Default::default();
        let model = Self {
            first: LinearConfig::new(6, 8).init(&device),
            norm: LayerNormConfig::new(8).init(&device),
            last: LinearConfig::new(8, 2).init(&device),
        };
        model.map(&mut Fill(0))
    }

    fn loss(&self) -> Tensor<B, 1> {
        let x = self.norm.forward(self.first.forward(values([4, 6], 3)));
        (self.last.forward(x) - 1.0).powi_scalar(2).mean()
    }
}

/// Casts the parameters, as a file in another precision has them.
struct Cast(FloatDType);

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let wanted = tensor.is_require_grad();
            let cast = tensor.detach().set_require_grad(false).cast(self.0);
            cast.set_require_grad(wanted)
        })
    }
}

/// The dtypes of a model's parameters.
fn dtypes<B: Backend>(model: &impl Module<B>) -> Vec<DType> {
    struct Collect(Vec<DType>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().dtype());
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

/// A model in half, as it is where the policy is off, and the same model widened.
fn half_and_widened(precision: Precision) -> [Model<B>; 2] {
    let half = precision.compute_dtype::<DType>().unwrap().into();
    full_precision(|| {
        let half = Model::<B>::new().map(&mut Cast(half));
        let widened = half.clone().map(&mut Cast(FloatDType::F32));
        assert!(dtypes(&half).iter().all(|dtype| *dtype != DType::F32));
        [half, widened]
    })
}

/// A hand-written loop.
fn trained(
    mut model: Model<B>,
    precision: Precision,
    mut optimizer: impl Optimizer<Model<B>, B>,
) -> Vec<f32> {
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    with_precision(precision, || {
        scaler.scope(|| {
            for _ in 0..5 {
                let grads = GradientsParams::from_grads(model.loss().backward(), &model);
                model = optimizer.step(1e-3, model, grads);
            }
            parameters(&model)
        })
    })
}

#[test]
fn a_model_loaded_in_half_trains_bit_for_bit_like_one_that_was_widened() {
    for precision in HALVES {
        let [half, widened] = half_and_widened(precision);
        let loaded = with_precision(precision, || {
            Model::<B>::new().load_record(half.into_record())
        });
        assert_eq!(dtypes(&loaded), [DType::F32; 6], "{precision}");
        let train = |model| trained(model, precision, AdamWConfig::new().init());
        assert_eq!(train(loaded), train(widened));
    }
}

/// A model that was loaded before the precision was chosen: the optimizer gets FP32 from its first
/// step on.
#[test]
fn an_optimizer_sees_fp32_whenever_the_model_was_loaded() {
    let precision = Precision::Bf16;
    let [half, widened] = half_and_widened(precision);
    // Asserts that parameters are FP32.
    let [half, widened] =
        [half, widened].map(|model| trained(model, precision, SgdConfig::new().init()));
    assert_close("parameters", precision, &half, &widened, 0.1);
}

/// The optimizer runs outside the region, where the policy is off.
#[test]
fn an_optimizer_outside_the_region_sees_fp32_too() {
    for precision in HALVES {
        let [half, widened] = half_and_widened(precision).map(|mut model| {
            let mut optimizer = SgdConfig::new().init();
            let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();
            for _ in 0..3 {
                let grads = with_precision(precision, || {
                    let grads = scaler.scope(|| model.loss().backward());
                    GradientsParams::from_grads(grads, &model)
                });
                model = full_precision(|| optimizer.step(1e-3, model, grads));
            }
            parameters(&model)
        });
        assert_close("parameters", precision, &half, &widened, 0.1);
    }
}

#[test]
fn the_explicit_protocol_trains_half_parameters_in_fp32() {
    for precision in HALVES {
        let [half, widened] = half_and_widened(precision).map(|mut model| {
            let mut optimizer = AdamWConfig::new().init();
            let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();
            for _ in 0..3 {
                let stepped;
                (model, stepped) = with_precision(precision, || {
                    let grads = scaler.scale(model.loss()).backward();
                    let mut grads = GradientsParams::from_grads(grads, &model);
                    scaler.unscale(&model, &mut grads).unwrap();
                    scaler.step(&mut optimizer, 1e-3, model, grads)
                });
                assert!(stepped.unwrap());
                scaler.update().unwrap();
            }
            parameters(&model)
        });
        assert_close("parameters", precision, &half, &widened, 1.0);
    }
}

/// The tensors of the record are no leaves, as from a file.
#[test]
fn it_does_not_matter_whether_what_is_loaded_was_trained() {
    for precision in HALVES {
        let [half, widened] = half_and_widened(precision);
        let [loaded, untrained] = [half.clone(), half.no_grad()].map(|half| {
            with_precision(precision, || {
                Model::<B>::new().load_record(half.into_record())
            })
        });
        let expected = parameters(&widened);
        assert_eq!(parameters(&loaded), expected);
        assert_eq!(parameters(&untrained), expected);
    }
}

type Trainer = MixedPrecisionTrainer<B, Model<B>, OptimizerAdaptor<AdamW, Model<B>, B>>;

fn trainer(model: Model<B>, precision: Precision) -> Trainer {
    MixedPrecisionTrainerConfig::new()
        .with_precision(precision)
        .init(model, AdamWConfig::new().init(), 1e-3)
        .unwrap()
}

/// The parameters after so many steps.
fn stepped(mut trainer: Trainer, steps: usize) -> Vec<f32> {
    for _ in 0..steps {
        let step = trainer.train_step((), (), |model, (), ()| model.loss());
        step.unwrap();
    }
    parameters(trainer.model())
}

#[test]
fn a_trainer_widens_the_parameters_of_its_model() {
    for precision in HALVES {
        let models = half_and_widened(precision);
        let [half, widened] = models.map(|model| stepped(trainer(model, precision), 5));
        assert_eq!(half, widened, "{precision}");
    }
}

#[test]
fn a_trainer_widens_the_parameters_of_a_record() {
    for precision in HALVES {
        let [half, widened] = half_and_widened(precision).map(|model| {
            let (_, optimizer, scheduler, window) = trainer(model.clone(), precision).to_record();
            let mut resumed = trainer(Model::new(), precision);
            resumed.load_record((model.into_record(), optimizer, scheduler, window));
            stepped(resumed, 1)
        });
        assert_eq!(half, widened, "{precision}");
    }
}

#[test]
fn a_frozen_model_stays_half() {
    for precision in HALVES {
        let [half, _] = half_and_widened(precision);
        let expected = precision.compute_dtype::<DType>().unwrap();
        let frozen = with_precision(precision, || {
            Model::<B>::new().no_grad().load_record(half.into_record())
        });
        assert_eq!(dtypes(&frozen), [expected; 6], "{precision}");
    }
}

/// Nothing changes where the policy is off.
#[test]
fn a_model_in_half_stays_half_in_fp32_mode() {
    let [half, _] = half_and_widened(Precision::Bf16);
    let loaded = full_precision(|| Model::<B>::new().load_record(half.into_record()));
    assert_eq!(dtypes(&loaded), [DType::BF16; 6]);
}

/// The forward pass runs in the region. The backward pass runs outside it, with the policy off, and scales
/// the loss.
#[test]
fn a_gradient_after_a_region_in_f16_is_not_in_f16() {
    let [model, _] = half_and_widened(Precision::F16);
    let gradient = |factor: f32, scale| {
        let scaler = GradScaler::new(LossScaleConfig::Fixed(scale)).unwrap();
        full_precision(|| {
            let x = Tensor::<B, 2>::ones([4, 6], &Default::default());
            let forward = || model.first.forward(x.clone()).mean();
            let loss = with_precision(Precision::F16, forward) * factor;
            let grads = scaler.scope(|| loss.backward());
            model.first.bias.as_ref().unwrap().grad(&grads).unwrap()
        })
    };
    // f16 holds neither number: its smallest is 6e-8 and its largest 65504.
    for (factor, scale) in [(1e-7, 65536.0), (8e6, 2.0f32.powi(-6))] {
        let grad = gradient(factor, scale);
        assert_eq!(grad.dtype(), DType::F32);
        let expected = vec![factor / 8.0; 8];
        let grad = grad.into_data().to_vec::<f32>().unwrap();
        assert_close("the bias's gradient", Precision::F16, &grad, &expected, 1.0);
    }
}

/// Half parameters of a program that computes in half by itself, beside a region elsewhere.
#[test]
fn where_the_policy_is_off_half_parameters_are_the_users() {
    with_precision(Precision::Bf16, || Model::<B>::new().loss());
    for precision in HALVES {
        let [mut model, _] = half_and_widened(precision);
        let half = precision.compute_dtype::<DType>().unwrap();
        let model = full_precision(|| {
            let x = Tensor::<B, 2>::ones([4, 6], &Default::default()).cast(half);
            let mut optimizer = SgdConfig::new().init();
            for _ in 0..2 {
                let grads = model.first.forward(x.clone()).mean().backward();
                let bias = model.first.bias.as_ref().unwrap();
                assert_eq!(bias.grad(&grads).unwrap().dtype(), half);
                assert_eq!(model.first.weight.grad(&grads).unwrap().dtype(), half);
                let grads = GradientsParams::from_grads(grads, &model);
                model = optimizer.step(1e-3, model, grads);
            }
            model
        });
        assert_eq!(dtypes(&model), [half; 6]);
    }
}
