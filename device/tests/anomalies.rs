//! Anomaly detection, in its own process: an environment variable turns it on.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{
    Anomaly, AnomalyPass, GradScaler, LossScaleConfig, Precision, StepOutcome, flex,
};

#[derive(Module, Debug)]
struct Weight {
    weight: Param<Tensor<2>>,
}

impl Weight {
    fn new(value: f32, device: &Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::full([4, 4], value, device)),
        }
    }
}

/// Runs a step with this loss. Returns its outcome and anomalies.
fn step(
    scaler: &GradScaler,
    model: Weight,
    loss: impl FnOnce(Tensor<2>) -> Tensor<1>,
) -> (StepOutcome, Vec<Anomaly>) {
    let grads = scaler.scale(loss(model.weight.val())).backward();
    let grads = GradientsParams::from_grads(grads, &model);
    let mut sgd = SgdConfig::new().init();
    let (_, stepped) = scaler.step(&mut sgd, 1.0, model, grads);
    stepped.unwrap();
    scaler.update().unwrap();
    let step = scaler.last_step().expect("a step");
    (step.outcome, step.anomalies)
}

#[test]
fn the_first_operation_of_each_pass_that_overflowed_is_named() {
    // Safety: no other thread has started.
    unsafe { std::env::set_var("BURN_AMP_DETECT_ANOMALY", "1") };
    let device = flex(Precision::F16).unwrap().autodiff();
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1024.0)).unwrap();
    let ones = || Tensor::<2>::ones([4, 4], &device);

    let (outcome, found) = step(&scaler, Weight::new(1.0, &device), |w| {
        w.matmul(ones()).mean()
    });
    assert_eq!((outcome, found), (StepOutcome::Finite, Vec::new()));

    // 4 * 300 * 300 is above 65504.
    let (outcome, found) = step(&scaler, Weight::new(300.0, &device), |w| {
        (w.matmul(ones() * 300.0) * 1.0).mean()
    });
    assert_eq!(outcome, StepOutcome::NonFiniteLoss);
    let first = &found[0];
    assert_eq!(first.pass, AnomalyPass::Forward);
    assert_eq!((first.op.as_str(), first.dtype.as_str()), ("matmul", "F16"));
    assert_eq!(
        (&first.shape[..], first.largest_operand),
        (&[4, 4][..], 300.0)
    );

    // Only the loss scale makes the gradient of this loss infinite in f16.
    let (outcome, found) = step(&scaler, Weight::new(1.0, &device), |w| {
        (w.matmul(ones()) * 1000.0).sum()
    });
    assert_eq!(outcome, StepOutcome::Overflow);
    let [backward] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(backward.pass, AnomalyPass::Backward);
    assert_eq!(backward.dtype, "F16");

    // The next step has no anomalies of the overflow.
    let (outcome, found) = step(&scaler, Weight::new(1.0, &device), |w| {
        w.matmul(ones()).mean()
    });
    assert_eq!((outcome, found), (StepOutcome::Finite, Vec::new()));

    // The next step has no anomalies of a step that was discarded.
    let left_out = Weight::new(300.0, &device);
    let product = left_out.weight.val().matmul(ones() * 300.0);
    scaler.scale(product.mean()).backward();
    scaler.discard_step();
    let (outcome, found) = step(&scaler, Weight::new(1.0, &device), |w| {
        w.matmul(ones()).mean()
    });
    assert_eq!((outcome, found), (StepOutcome::Finite, Vec::new()));
}
