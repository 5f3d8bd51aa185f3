//! A user's own operations, from the example: the kernels get the dtypes of their classes, and the
//! gradients are right.

mod common;
#[path = "../examples/custom_op/ops.rs"]
mod ops;

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Amp, AmpAutodiff, AnomalyPass, GradScaler, Precision, with_precision};
use burn_backend::DType;

use common::mlp::{scaler, values};
use common::{HALVES, assert_close};
use ops::{MyOps, gated_linear, log_cosh};
use shared::checked::{self, Checked, CheckedDevice};

impl MyOps for Checked {}

/// Loss and gradients of both operations, one after the other.
fn step<B: MyOps + AutodiffBackend>() -> Vec<f32> {
    let x = values::<B, 2>([6, 8], 1).require_grad();
    let [w, v] = [2, 3].map(|seed| values::<B, 2>([8, 4], seed).require_grad());
    // Beyond 12, where eˣ leaves f16, and back.
    let loss = log_cosh(gated_linear(x.clone(), w.clone(), v.clone()) * 40.0).mean();
    let value = loss.clone().into_data();
    let grads = loss.backward();
    let gradients = [x, w, v].map(|t| t.grad(&grads).unwrap().into_data());
    [value]
        .into_iter()
        .chain(gradients)
        .flat_map(|data| data.to_vec::<f32>().expect("FP32"))
        .collect()
}

#[test]
fn gradients_are_those_of_fp32_within_roundings() {
    let expected = step::<Autodiff<Flex>>();
    // The formulas give the gradients that autodiff gives for their composition.
    let x = values::<Autodiff<Flex>, 2>([6, 8], 1).require_grad();
    let [w, v] = [2, 3].map(|seed| values::<Autodiff<Flex>, 2>([8, 4], seed).require_grad());
    let gate = sigmoid(x.clone().matmul(v.clone()));
    let y = x.clone().matmul(w.clone()) * gate * 40.0;
    let composed = (y.clone().exp() + (-y).exp()).mul_scalar(0.5).log().mean();
    let grads = composed.backward();
    let composed: Vec<f32> = [x, w, v]
        .iter()
        .flat_map(|t| t.grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap())
        .collect();
    assert_close("composed", Precision::F32, &expected[1..], &composed, 32.0);

    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        let run = |step: fn() -> Vec<f32>| scaler(64.0).scope(|| with_precision(precision, step));
        for actual in [
            run(step::<AmpAutodiff<Flex>>),
            run(step::<AmpAutodiff<Flex, BalancedCheckpointing>>),
        ] {
            match precision {
                Precision::F32 => assert_eq!(actual, expected),
                _ => assert_close("step", precision, &actual, &expected, 16.0),
            }
        }
    }
}

#[test]
fn a_kernel_gets_the_dtype_of_its_class() {
    for precision in HALVES {
        let half = precision.compute_dtype().unwrap();
        let device = CheckedDevice::new();
        let config = checked::config().with_precision(precision);
        config.apply::<Checked>(&device).unwrap();
        let ones = || Tensor::<AmpAutodiff<Checked>, 2>::ones([4, 4], &device).require_grad();
        let loss = log_cosh(gated_linear(ones(), ones(), ones())).mean();
        let counts = device.counts();
        assert_eq!(counts.ran_in("float_matmul", half), 2);
        assert_eq!(counts.ran_in("sigmoid", half), 1);
        assert_eq!(counts.ran_in("float_exp", DType::F32), 2);
        assert_eq!(counts.ran("float_matmul") + counts.ran("float_exp"), 4);
        device.reset();
        loss.backward();
        let counts = device.counts();
        assert_eq!(counts.ran_in("float_matmul", half), 4);
        assert_eq!(counts.ran("float_matmul"), 4);
        // The tanh of the loss.
        assert_eq!(counts.ran_in("float_tanh", DType::F32), 1);
    }
}

#[test]
fn in_inference_the_kernels_are_reached_as_well() {
    let ones = Tensor::<Amp<Flex>, 2>::ones([4, 4], &Default::default());
    let ones = ones.set_require_grad(false);
    for precision in HALVES {
        let (layer, loss) = with_precision(precision, || {
            let layer = gated_linear(ones.clone(), ones.clone(), ones.clone());
            (layer.clone(), log_cosh(layer))
        });
        assert_eq!(Some(layer.dtype()), precision.compute_dtype());
        assert_eq!(loss.dtype(), DType::F32);
        // Data read back is FP32.
        assert_eq!(layer.into_data().dtype, DType::F32);
    }
}

#[test]
fn a_device_without_the_dtype_gets_fp32() {
    let device = CheckedDevice::with_support(
        burn_backend::DTypeUsage::general(),
        burn_backend::DTypeUsageSet::empty(),
    );
    let ones = || Tensor::<Amp<Checked>, 2>::ones([4, 4], &device);
    let config = checked::config().with_precision(Precision::F16);
    config.apply::<Checked>(&device).unwrap();
    assert_eq!(gated_linear(ones(), ones(), ones()).dtype(), DType::F16);
    let config = checked::config();
    config.apply::<Checked>(&device).unwrap();
    assert_eq!(gated_linear(ones(), ones(), ones()).dtype(), DType::F32);
}

#[test]
fn anomaly_detection_knows_them_by_name() {
    type B = AmpAutodiff<Checked>;
    let device = CheckedDevice::new();
    let config = checked::config()
        .with_precision(Precision::F16)
        .with_anomaly_detection(true);
    config.apply::<B>(&device).unwrap();
    let x = Tensor::<B, 2>::full([2, 2], 100.0, &device).require_grad();
    // e¹⁰⁰ leaves FP32 as well.
    log_cosh(x).mean().backward();
    let step = GradScaler::of::<B>(&device).last_step().unwrap();
    let first = &step.anomalies[0];
    assert_eq!(
        (first.op.as_str(), first.pass),
        ("log_cosh", AnomalyPass::Forward)
    );
}
