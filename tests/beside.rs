//! Statements of the guide's page on limits about other techniques beside mixed precision.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::quantization::{
    Calibration, QTensorPrimitive, QuantLevel, QuantParam, QuantScheme, QuantValue,
};
use burn::tensor::{DType, TensorPrimitive};
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};
use burn_backend::BackendTypes;

use common::mlp::{Fill, data, in_scope, scaler, values};
use common::{HALVES, assert_close};

fn quantized<B: Backend>() -> Linear<B> {
    let layer = LinearConfig::new(32, 32).with_bias(false);
    let layer = layer.init::<B>(&Default::default()).map(&mut Fill(0));
    let scheme: QuantScheme = <B as BackendTypes>::QuantizedTensorPrimitive::default_scheme()
        .with_value(QuantValue::Q8S)
        .with_level(QuantLevel::Tensor)
        .with_param(QuantParam::F32);
    layer.quantize_weights(&mut Quantizer {
        calibration: Calibration::MinMax,
        scheme,
    })
}

#[test]
fn a_quantized_model_computes_in_half() {
    let output = |layer: &Linear<Amp<Flex>>| layer.forward(values::<Amp<Flex>, 2>([4, 32], 3));
    let plain = quantized::<Flex>().forward(values::<Flex, 2>([4, 32], 3));
    let plain = data(plain);
    let whole = LinearConfig::new(32, 32).with_bias(false);
    let whole: Linear<Flex> = whole.init(&Default::default()).map(&mut Fill(0));
    assert_ne!(data(whole.forward(values::<Flex, 2>([4, 32], 3))), plain);
    for precision in HALVES {
        with_precision(precision, || {
            let layer = quantized::<Amp<Flex>>();
            let weight = layer.weight.val().into_primitive();
            assert!(matches!(weight, TensorPrimitive::QFloat(_)));
            let output = output(&layer);
            assert_eq!(Some(output.dtype()), precision.compute_dtype());
            // Roundings of the weight, the input and the output.
            assert_close("quantized", precision, &data(output), &plain, 3.0);
        });
    }
    with_precision(Precision::F32, || {
        assert_eq!(data(output(&quantized())), plain);
    });
}

/// The gradient of a square with respect to its operand, and whether a penalty on that gradient reaches
/// the operand.
fn gradient<B: AutodiffBackend>() -> (Vec<f32>, bool) {
    let x = values::<B, 2>([2, 4], 1).require_grad();
    let loss = (x.clone() * x.clone()).sum();
    let grad: Tensor<B::InnerBackend, 2> = x.grad(&loss.backward()).unwrap();
    assert_eq!(grad.dtype(), DType::F32);
    let again = Tensor::<B, 2>::from_inner(grad.clone());
    let penalty = (again.powi_scalar(2).sum().sqrt() - 1.0).powi_scalar(2);
    // A loss on no tape may panic.
    let second = catch_unwind(AssertUnwindSafe(|| x.grad(&penalty.backward())));
    (data(grad), second.is_ok_and(|second| second.is_some()))
}

#[test]
fn a_gradient_is_unscaled_and_has_no_graph() {
    let (expected, reaches) = gradient::<Autodiff<Flex>>();
    assert!(!reaches);
    for precision in HALVES {
        let (grad, reaches) = in_scope(precision, &scaler(1024.0), gradient::<AmpAutodiff<Flex>>);
        assert!(!reaches);
        assert_close("gradient", Precision::F32, &grad, &expected, 1.0);
    }
}
