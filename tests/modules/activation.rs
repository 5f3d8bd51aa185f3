//! Activation modules and functions.

use burn::nn::activation::*;
use burn::tensor::activation;

use crate::cases::RECORDED;
use crate::harness::{Lab, Run};

fn input<B: Run>(lab: &mut Lab<B>) -> floats!(B, 2) {
    lab.input([8, 16])
}

cases! {
    relu(0.0, 1.0) |lab| Relu::new().forward(input(lab));
    leaky_relu(0.0, 1.0) |lab| LeakyReluConfig::new().init().forward(input(lab));
    prelu(1.0, 1.0) |lab| {
        let prelu = lab.module(PReluConfig::new().init(&lab.device));
        prelu.forward(input(lab))
    };
    prelu_of_many_slopes(2.0, 2.0) |lab| {
        let prelu = lab.module(PReluConfig::new().with_num_parameters(16).init(&lab.device));
        prelu.forward(input(lab))
    };
    gelu(0.0, 1.0) |lab| Gelu::new().forward(input(lab));
    gelu_approximate(0.0, 1.0) |lab| Gelu::new_approximate().forward(input(lab));
    // The formula cubes its input: beyond 65504 in f16.
    gelu_of_large_values(0.0, 1.0) |lab| Gelu::new().forward(lab.scaled_input([8, 16], 64.0));
    gelu_approximate_of_large_values(0.0, 1.0) |lab| {
        Gelu::new_approximate().forward(lab.scaled_input([8, 16], 64.0))
    };
    sigmoid(0.0, 1.0) |lab| Sigmoid::new().forward(input(lab));
    hard_sigmoid(0.0, 1.0) |lab| HardSigmoidConfig::new().init().forward(input(lab));
    hard_swish(0.0, 1.5) |lab| HardSwish::new().forward(input(lab));
    tanh(0.0, 1.5) |lab| Tanh::new().forward(input(lab));
    softplus(0.0, 1.0) |lab| SoftplusConfig::new().init().forward(input(lab));
    softplus_steep(0.0, 1.0) |lab| SoftplusConfig::new().with_beta(4.0).init().forward(input(lab));
    softsign(0.0, 1.0) |lab| Softsign::new().forward(input(lab));
    elu(0.0, 1.0) |lab| EluConfig::new().init().forward(input(lab));
    celu(0.0, 1.0) |lab| CeluConfig::new().with_alpha(1.5).init().forward(input(lab));
    selu(0.0, 1.5) |lab| Selu::new().forward(input(lab));
    thresholded_relu(0.0, 1.0) |lab| ThresholdedReluConfig::new().init().forward(input(lab));
    shrink(0.0, 1.0) |lab| ShrinkConfig::new().with_bias(0.25).init().forward(input(lab));
    soft_shrink(0.0, 1.0) |lab| SoftShrinkConfig::new().init().forward(input(lab));
    hard_shrink(0.0, 1.0) |lab| HardShrinkConfig::new().init().forward(input(lab));
    glu(0.0, 1.5) |lab| GLU::new(1).forward(input(lab));
    swiglu(3.0, 3.0) |lab| {
        let swiglu = lab.module(SwiGluConfig::new(16, 12).with_bias(true).init(&lab.device));
        swiglu.forward(input(lab))
    };
    silu(0.0, 1.5) |lab| activation::silu(input(lab));
    mish(0.0, 1.0) |lab| activation::mish(input(lab));
    log_sigmoid(0.0, 1.0) |lab| activation::log_sigmoid(input(lab));
    log_sigmoid_of_large_values(0.0, 1.0) |lab| {
        activation::log_sigmoid(lab.scaled_input([8, 16], 16.0))
    };
    softmax(RECORDED, 1.0) |lab| activation::softmax(input(lab), 1);
    softmax_of_large_values(RECORDED, 2.0) |lab| {
        activation::softmax(lab.scaled_input([8, 16], 16.0), 0)
    };
    log_softmax(RECORDED, 1.0) |lab| activation::log_softmax(input(lab), 1);
    log_softmax_of_large_values(RECORDED, 1.0) |lab| {
        activation::log_softmax(lab.scaled_input([8, 16], 16.0), 0)
    };
    softmin(RECORDED, 1.0) |lab| activation::softmin(input(lab), 1);
    quiet_softmax(0.0, 1.0) |lab| activation::quiet_softmax(input(lab), 1);
    // The wrapper, once for each of its variants.
    activation_wrapper(6.0, 6.0) |lab| {
        for (i, config) in [
            ActivationConfig::Gelu,
            ActivationConfig::GeluApproximate,
            PReluConfig::new().into(),
            ActivationConfig::Relu,
            LeakyReluConfig::new().into(),
            SwiGluConfig::new(16, 16).into(),
            ActivationConfig::Selu,
            ActivationConfig::Sigmoid,
            ActivationConfig::Tanh,
            HardSigmoidConfig::new().into(),
            ActivationConfig::HardSwish,
            SoftplusConfig::new().into(),
            ActivationConfig::Softsign,
            EluConfig::new().into(),
            CeluConfig::new().into(),
            ThresholdedReluConfig::new().into(),
            HardShrinkConfig::new().into(),
            SoftShrinkConfig::new().into(),
        ]
        .into_iter()
        .enumerate()
        {
            let activation = lab.module(config.init(&lab.device));
            let output = activation.forward(lab.input([2, 16]));
            lab.output(&format!("activation {i}"), output);
        }
        let activation = ActivationConfig::from(ShrinkConfig::new()).init(&lab.device);
        activation.forward(lab.input([2, 16]))
    };
}
