//! Half weights in a process that never used half precision.

use burn::backend::Flex;
use burn::nn::LinearConfig;
use burn::tensor::{DType, Tensor, Tolerance};
use burn_amp::{Amp, Precision, half_weights};
use shared as _; // with what it instantiates

#[test]
fn operations_cast_the_weights_back() {
    let device = Default::default();
    let model = LinearConfig::new(64, 8).init::<Amp<Flex>>(&device);
    let input = Tensor::<Amp<Flex>, 2>::ones([2, 64], &device);
    let expected = model.forward(input.clone()).into_data();

    let model = half_weights(model, Precision::F16).unwrap();
    assert_eq!(model.weight.val().dtype(), DType::F16);
    let output = model.forward(input);
    assert_eq!(output.dtype(), DType::F32);
    // 64 weights of at most 1/8, each rounded to 11 bits: 64 / 8 / 2048 at most.
    let tolerance = Tolerance::absolute(64.0 / 8.0 / 2048.0);
    output
        .into_data()
        .assert_approx_eq::<f32>(&expected, tolerance);
}
