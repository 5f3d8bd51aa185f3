//! Normalizations, also of values whose squares overflow f16.

use burn::nn::norm::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LocalResponseNormConfig,
    NormalizationConfig, RmsNormConfig,
};

use crate::cases::RECORDED;

/// The squares of normal numbers times this are beyond 65504.
const LARGE: f32 = 512.0;

/// A batch norm in training, and then its running statistics.
macro_rules! batch_norm {
    ($lab:ident, $input:expr, $channels:expr) => {{
        let norm = $lab.module(BatchNormConfig::new($channels).init(&$lab.device));
        let output = norm.forward($input);
        $lab.buffer("running_mean", norm.running_mean.value_sync());
        $lab.buffer("running_var", norm.running_var.value_sync());
        output
    }};
}

/// CubeCL's kernels add up the rows of a gradient in another order, in which FP32's roundings add up too.
const OF_MANY_ROWS: f64 = if cfg!(any(feature = "cuda", feature = "wgpu")) {
    4.0 * RECORDED
} else {
    RECORDED
};

cases! {
    batch_norm(0.0, 1.5) |lab| batch_norm!(lab, lab.input([16, 6]), 6);
    batch_norm_1d(0.0, 1.5) |lab| batch_norm!(lab, lab.input([4, 6, 10]), 6);
    batch_norm_2d(0.0, 1.5) |lab| batch_norm!(lab, lab.input([4, 3, 5, 5]), 3);
    batch_norm_3d(0.0, 2.5) |lab| batch_norm!(lab, lab.input([4, 3, 2, 3, 4]), 3);
    batch_norm_of_large_values(0.0, 1.5) |lab| {
        batch_norm!(lab, lab.scaled_input([4, 3, 5, 5], LARGE), 3)
    };
    // Statistics and gradients are sums too long for a half accumulator.
    batch_norm_of_many_values(0.0, 1.5) |lab| {
        batch_norm!(lab, lab.input([64, 2, 8, 8]), 2)
    };
    // The second step starts from the running statistics of the first.
    batch_norm_twice(0.0, 1.5) |lab| {
        let norm = lab.module(BatchNormConfig::new(3).init(&lab.device));
        let (first, second) = (lab.input([4, 3, 8]), lab.input([4, 3, 8]));
        let output = norm.forward(first) + norm.forward(second);
        lab.buffer("running_mean", norm.running_mean.value_sync());
        lab.buffer("running_var", norm.running_var.value_sync());
        output
    };
    layer_norm(RECORDED, 1.5) |lab| {
        let norm = lab.module(LayerNormConfig::new(32).init(&lab.device));
        norm.forward(lab.input([4, 5, 32]))
    };
    layer_norm_without_bias(RECORDED, 1.5) |lab| {
        let norm = lab.module(LayerNormConfig::new(32).with_bias(false).init(&lab.device));
        norm.forward(lab.input([4, 32]))
    };
    layer_norm_of_large_values(RECORDED, 1.5) |lab| {
        let norm = lab.module(LayerNormConfig::new(32).init(&lab.device));
        norm.forward(lab.scaled_input([4, 32], LARGE))
    };
    layer_norm_of_many_rows(OF_MANY_ROWS, 1.5) |lab| {
        let norm = lab.module(LayerNormConfig::new(4).init(&lab.device));
        norm.forward(lab.input([2048, 4]))
    };
    group_norm(0.0, 1.5) |lab| {
        let norm = lab.module(GroupNormConfig::new(2, 6).init(&lab.device));
        norm.forward(lab.input([3, 6, 4, 4]))
    };
    group_norm_without_affine(0.0, 1.5) |lab| {
        let norm = lab.module(GroupNormConfig::new(2, 6).with_affine(false).init(&lab.device));
        norm.forward(lab.input([3, 6, 8]))
    };
    group_norm_of_large_values(0.0, 1.5) |lab| {
        let norm = lab.module(GroupNormConfig::new(2, 6).init(&lab.device));
        norm.forward(lab.scaled_input([3, 6, 8], LARGE))
    };
    // A group's sum is beyond 65504.
    group_norm_of_values_far_from_zero(0.0, 1.5) |lab| {
        let norm = lab.module(GroupNormConfig::new(2, 6).init(&lab.device));
        norm.forward(lab.probabilities([3, 6, 8]).mul_scalar(8192.0))
    };
    instance_norm(0.0, 1.5) |lab| {
        let norm = lab.module(InstanceNormConfig::new(4).init(&lab.device));
        norm.forward(lab.input([3, 4, 5, 5]))
    };
    instance_norm_without_affine(0.0, 1.5) |lab| {
        let norm = lab.module(InstanceNormConfig::new(4).with_affine(false).init(&lab.device));
        norm.forward(lab.input([3, 4, 16]))
    };
    rms_norm(0.0, 1.5) |lab| {
        let norm = lab.module(RmsNormConfig::new(32).init(&lab.device));
        norm.forward(lab.input([4, 5, 32]))
    };
    rms_norm_of_large_values(0.0, 1.5) |lab| {
        let norm = lab.module(RmsNormConfig::new(32).init(&lab.device));
        norm.forward(lab.scaled_input([4, 5, 32], LARGE))
    };
    local_response_norm(0.0, 1.5) |lab| {
        let norm = lab.module(LocalResponseNormConfig::new(3).with_alpha(0.5).init());
        norm.forward(lab.input([2, 6, 4, 4]))
    };
    local_response_norm_of_even_size(0.0, 1.5) |lab| {
        let norm = lab.module(LocalResponseNormConfig::new(4).with_alpha(0.5).init());
        norm.forward(lab.input([2, 6, 4, 4]))
    };
    local_response_norm_of_large_values(0.0, 1.5) |lab| {
        let norm = lab.module(LocalResponseNormConfig::new(3).init());
        norm.forward(lab.scaled_input([2, 6, 4, 4], LARGE))
    };
    // The wrapper, once for each of its variants.
    normalization(RECORDED, 1.5) |lab| {
        for (i, config) in [
            NormalizationConfig::from(BatchNormConfig::new(0)),
            GroupNormConfig::new(2, 0).into(),
            InstanceNormConfig::new(0).into(),
            LayerNormConfig::new(0).into(),
        ]
        .into_iter()
        .enumerate()
        {
            let norm = lab.module(config.with_num_features(6).init(&lab.device));
            let output = norm.forward(lab.input([5, 6, 6]));
            lab.output(&format!("norm {i}"), output);
        }
        let norm = NormalizationConfig::from(RmsNormConfig::new(6)).init(&lab.device);
        lab.module(norm).forward(lab.input([5, 6]))
    };
}
