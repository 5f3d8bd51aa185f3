//! Explains a skipped step: its parameters and, on request, its operation.

#[path = "common/mod.rs"]
mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::relu;
use burn_amp::{
    AmpAutodiff, AmpConfig, Anomaly, AnomalyPass, GradScaler, LastStep, LossScaleConfig, Precision,
    StepOutcome, full_precision,
};

use common::activation;
use common::mlp::{Fill, values};

type B = AmpAutodiff<Flex>;

/// Linear layers without anything between them.
#[derive(Module, Debug)]
struct Chain<B: Backend> {
    layers: Vec<Linear<B>>,
}

/// Where the overflow is planted.
const PLANTED: usize = 2;

impl<B: Backend> Chain<B> {
    /// The weights of one layer are 1e4 times what they should be.
    fn planted() -> Self {
        let device = Default::default();
        let layer = |_| LinearConfig::new(8, 8).with_bias(false).init(&device);
        let mut chain = Self {
            layers: (0..5).map(layer).collect(),
        }
        .map(&mut Fill(0));
        let layer = chain.layers.remove(PLANTED);
        chain.layers.insert(PLANTED, layer.map(&mut Times(1e4)));
        chain
    }

    fn loss(&self, inputs: f32) -> Tensor<B, 1> {
        let x = values::<B, 2>([4, 8], 7) * inputs;
        let y = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        y.mean()
    }
}

struct Times(f64);

impl<B: Backend> ModuleMapper<B> for Times {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let untracked = Tensor::from_data(tensor.to_data(), &tensor.device());
            (untracked * self.0).set_require_grad(tensor.is_require_grad())
        })
    }
}

/// Inputs with which the forward pass overflows in the planted layer.
const LARGE: f32 = 100.0;
/// Inputs with which only the backward pass overflows, on its way through the planted layer.
const SMALL: f32 = 1e-4;

/// Flex has one device, whose configuration is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn configured(anomaly_detection: bool, scale: f32) -> GradScaler {
    let config = AmpConfig::new()
        .with_precision(Precision::F16)
        .with_loss_scale(LossScaleConfig::Fixed(scale))
        .with_anomaly_detection(anomaly_detection);
    config.apply::<B>(&Default::default()).unwrap();
    GradScaler::of::<B>(&Default::default())
}

/// The forward pass overflows, and with it all that comes after.
#[track_caller]
fn assert_forward(step: &LastStep, detected: bool) {
    assert_ne!(step.outcome, StepOutcome::Finite);
    assert_eq!(step.last_finite, None);
    assert_eq!(step.parameters[0], "layers.4.weight");
    let [first, ..] = &step.anomalies[..] else {
        return assert!(!detected, "{step:?}");
    };
    assert!(detected);
    assert_eq!(first.parameter.as_deref(), Some("layers.2.weight"));
    assert_eq!(
        (first.op.as_str(), first.pass),
        ("linear", AnomalyPass::Forward)
    );
    assert_eq!(
        (first.dtype.as_str(), &first.shape[..]),
        ("F16", &[4, 8][..])
    );
    assert!((1e3..65504.0).contains(&first.largest_operand), "{first}");
    let text = first.to_string();
    assert!(
        text.starts_with("forward: linear [4, 8] in F16, operands up to"),
        "{text}"
    );
    assert!(text.ends_with("at layers.2.weight"), "{text}");
}

/// The gradients of the layers below the planted one, which it passed on, are not finite.
#[track_caller]
fn assert_backward(step: &LastStep, detected: bool) {
    assert_eq!(step.outcome, StepOutcome::Overflow);
    assert_eq!(step.last_finite.as_deref(), Some("layers.2.weight"));
    let below = ["layers.1.weight", "layers.0.weight"];
    assert_eq!(step.parameters, below);
    assert_eq!(step.non_finite_gradients, below.len());
    match &step.anomalies[..] {
        [] => assert!(!detected, "{step:?}"),
        [first] => {
            assert!(detected);
            assert_eq!(first.pass, AnomalyPass::Backward);
            assert!(
                first.op.contains("backward") || first.op == "matmul",
                "{first}"
            );
            assert_eq!(
                (first.dtype.as_str(), &first.shape[..]),
                ("F16", &[4, 8][..])
            );
            assert_eq!(first.parameter, None);
        }
        more => panic!("{more:?}"),
    }
}

fn by_backward(model: &Chain<B>, inputs: f32) -> GradientsParams {
    GradientsParams::from_grads(model.loss(inputs).backward(), model)
}

#[test]
fn a_planted_overflow_is_found() {
    let _alone = alone();
    let model = Chain::<B>::planted();
    for detected in [false, true] {
        for (inputs, scale, assert) in [
            (LARGE, 1.0, assert_forward as fn(&LastStep, bool)),
            (SMALL, 65536.0, assert_backward),
        ] {
            // A loop that calls backward itself.
            let scaler = configured(detected, scale);
            assert!(by_backward(&model, inputs).is_empty());
            assert_eq!(scaler.last_step().unwrap().parameters, [""; 0]);
            let step = scaler.explain(&model).unwrap();
            assert(&step, detected);
            assert_eq!(scaler.last_step(), Some(step.clone()));
            assert_eq!(scaler.explain(&model), Some(step.clone()));
            let text = serde_json::to_string(&step).unwrap();
            let mut read: LastStep = serde_json::from_str(&text).unwrap();
            for (read, step) in read.anomalies.iter_mut().zip(&step.anomalies) {
                let parameter = read.parameter.take();
                assert_eq!(parameter, step.parameter);
            }
            assert_eq!(read.parameters, step.parameters);

            // The explicit protocol.
            let grads = scaler.backward(model.loss(inputs), &model);
            let mut optimizer = SgdConfig::new().init();
            let (_, stepped) = scaler.step(&mut optimizer, 0.1, model.clone(), grads);
            assert!(!stepped.unwrap());
            scaler.update().unwrap();
            assert(&scaler.last_step().unwrap(), detected);
        }
    }

    // A step without a fault has nothing to explain.
    let scaler = configured(true, 1.0);
    assert!(!by_backward(&model, SMALL).is_empty());
    let step = scaler.explain(&model).unwrap();
    assert!(step.stepped() && step.parameters.is_empty() && step.anomalies.is_empty());
    assert_eq!(step.last_finite, None);

    // Masks of minus infinity are no anomalies.
    let masked = |model: &Chain<B>| {
        let x = values::<B, 2>([8, 8], 9);
        let mask = Tensor::<B, 2, Bool>::tril_mask([8, 8], 0, &Default::default());
        let scores = model.layers[0]
            .forward(x)
            .mask_fill(mask, f32::NEG_INFINITY);
        burn::tensor::activation::softmax(scores, 1).sum() * 1e30
    };
    let _ = masked(&model).backward();
    let step = scaler.explain(&model).unwrap();
    let forward = step
        .anomalies
        .iter()
        .find(|a: &&Anomaly| a.pass == AnomalyPass::Forward);
    assert_eq!(forward, None, "{step:?}");

    // On another backend a step has no names to find.
    let plain = Chain::<Autodiff<Flex>>::planted();
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    assert_eq!(scaler.explain(&plain), None);
}

/// A loss over no boxes, as a detector has for an image without objects.
#[test]
fn a_tensor_without_elements_is_no_anomaly() {
    let _alone = alone();
    let model = Chain::<B>::planted();
    let scaler = configured(true, 1024.0);
    let none = Tensor::<B, 2>::zeros([0, 8], &Default::default());
    let layer = &model.layers[0];
    let loss = layer.forward(none).powi_scalar(2).sum() + layer.weight.val().sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    assert!(!grads.is_empty());
    let step = scaler.last_step().unwrap();
    assert_eq!(
        (step.outcome, &step.anomalies[..]),
        (StepOutcome::Finite, &[][..])
    );
}

/// Encoder and decoder, or several models on one scaler.
#[test]
fn each_of_several_modules_has_its_parameters_named() {
    let _alone = alone();
    let model = Chain::<B>::planted();
    let part = |layers: std::ops::Range<usize>| Chain {
        layers: model.layers[layers].to_vec(),
    };
    let scaler = configured(false, 65536.0);
    let of = |parts: [std::ops::Range<usize>; 2]| {
        assert!(by_backward(&model, SMALL).is_empty());
        parts.map(|layers| scaler.explain(&part(layers)).unwrap())
    };
    // The gradients of the layers 0 and 1 are not finite.
    let [upper, both] = of([2..5, 0..2]);
    assert_eq!(upper.parameters, [""; 0]);
    assert_eq!(both.parameters, ["layers.1.weight", "layers.0.weight"]);
    assert_eq!(both.non_finite_gradients, 2);
    let [one, both] = of([1..3, 0..1]);
    assert_eq!(one.parameters, ["layers.0.weight"]);
    assert_eq!(both.parameters, ["layers.0.weight", "layers.0.weight"]);
    for step in [one, both.clone()] {
        assert_eq!(step.last_finite.as_deref(), Some("layers.1.weight"));
    }
    assert_eq!(scaler.last_step(), Some(both));
}

/// An overflow in an operation with a scalar, by name.
fn scalar_overflow(name: &str, op: fn(Tensor<B, 2>) -> Tensor<B, 2>) {
    let scaler = configured(true, 1.0);
    // 1,000 in f16.
    let x = Tensor::from_data([[1000.0]], &Default::default()).require_grad();
    // A sum reads its operand in FP32, and so adds the scalar again in FP32.
    let loss = op(activation(x)).abs().sum();
    loss.backward();
    let step = scaler.last_step().unwrap();
    assert_eq!(step.outcome, StepOutcome::NonFiniteLoss, "{name}");
    let [found, ..] = &step.anomalies[..] else {
        panic!("{name}: {step:?}")
    };
    assert_eq!(
        (found.op.as_str(), found.pass),
        (name, AnomalyPass::Forward)
    );
    assert_eq!(
        (found.dtype.as_str(), &found.shape[..]),
        ("F16", &[1, 1][..])
    );
    assert!(found.largest_operand >= 1000.0, "{found}");
}

#[test]
fn arithmetic_with_scalars_is_watched() {
    let _alone = alone();
    scalar_overflow("mul_scalar", |x| x * 100.0);
    scalar_overflow("div_scalar", |x| x / 0.001);
    scalar_overflow("add_scalar", |x| x * 60.0 + 60000.0);
    scalar_overflow("sub_scalar", |x| x * 60.0 - -60000.0);
}

/// The loss scale is too large: the gradient fits in FP32, but not in f16.
#[test]
fn a_gradient_beyond_f16_is_a_cast() {
    let _alone = alone();
    let scaler = configured(true, 65536.0);
    let model: Linear<B> = LinearConfig::new(16, 1).init(&Default::default());
    let loss = model.forward(Tensor::<B, 2>::ones([8, 16], &Default::default()));
    let _ = (loss.mean() * 1000.0).backward();
    let step = scaler.last_step().unwrap();
    assert_eq!(step.outcome, StepOutcome::Overflow);
    let [found] = &step.anomalies[..] else {
        panic!("{step:?}")
    };
    let text = found.to_string();
    let expected = "backward: cast [1] in F16, operands up to 8.192e6, for the gradient of mean";
    assert_eq!(text, expected);
}

/// Operations that cast the gradient of their operand, and one whose own formula does. A program's own cast has its
/// name too.
#[test]
fn a_cast_of_a_gradient_names_the_operation_that_it_is_for() {
    let _alone = alone();
    let scaler = configured(true, 65536.0);
    type Run = fn(Tensor<B, 2>) -> Tensor<B, 2>;
    let ops: [(&str, Run); 4] = [
        ("log", |x| (x * 0.001).log()),
        ("powi_scalar", |x| x.square() * 1000.0),
        ("exp", |x| x.exp() * 1000.0),
        ("cast", |x| x.cast(DType::F32) * 1000.0),
    ];
    for (name, op) in ops {
        let model: Linear<B> = LinearConfig::new(4, 4)
            .with_bias(false)
            .init(&Default::default());
        let ones = Tensor::<B, 2>::ones([4, 4], &Default::default());
        let out = model.forward(ones).abs() + 0.5;
        let _ = op(out).sum().backward();
        let step = scaler.last_step().unwrap();
        let [found] = &step.anomalies[..] else {
            panic!("{name}: {step:?}")
        };
        assert_eq!((&*found.op, found.step.as_deref()), ("cast", Some(name)));
        assert!(
            found
                .to_string()
                .ends_with(&format!(", for the gradient of {name}"))
        );
    }
}

#[test]
fn a_pass_in_fp32_between_leaves_the_anomalies_of_the_step() {
    let _alone = alone();
    let scaler = configured(true, 1024.0);
    let loss = Chain::<B>::planted().loss(LARGE);
    full_precision(|| {
        let penalty = Tensor::<B, 1>::ones([4], &Default::default()).require_grad();
        penalty.exp().sum().backward();
    });
    loss.backward();
    let anomalies = scaler.last_step().unwrap().anomalies;
    assert_eq!(anomalies[0].pass, AnomalyPass::Forward);
}

/// Minus infinity that the user writes into a tensor is no anomaly.
#[test]
fn an_infinite_scalar_is_the_users_own() {
    let _alone = alone();
    let scaler = configured(true, 1.0);
    let x = values::<B, 2>([2, 4], 3).require_grad();
    let masked = x.clone().matmul(values([4, 4], 4));
    let mask = masked.clone().greater_elem(-10.0);
    let loss = masked.mask_fill(mask, f32::NEG_INFINITY).sum();
    loss.backward();
    let step = scaler.last_step().unwrap();
    assert_eq!(step.outcome, StepOutcome::NonFiniteLoss);
    assert_eq!(step.anomalies, []);
}

/// Burn's ReLU on Flex makes 0 of NaN, unlike PyTorch's: no loss and no gradient shows the overflow.
#[test]
fn an_overflow_of_the_forward_pass_behind_a_finite_loss_is_found() {
    let _alone = alone();
    let scaler = configured(true, 1024.0);
    let layer = LinearConfig::new(2, 2).init::<B>(&Default::default());
    let x = Tensor::<B, 2>::full([4, 2], 3e4, &Default::default()).require_grad();
    let y = x.matmul(Tensor::full([2, 2], 3e4, &Default::default()));
    let loss = layer.forward(relu(y.clone() - y)).mean();
    assert!(loss.clone().into_scalar().is_finite());
    loss.backward();
    let step = scaler.last_step().unwrap();
    assert_eq!(step.outcome, StepOutcome::Finite);
    assert_eq!(step.anomalies[0].pass, AnomalyPass::Forward);
    assert_eq!(step.anomalies[0].op, "matmul");
}
