//! Modules, losses and activation functions that Burn 0.21 lacks. Without `NearestExact`, for which Flex has
//! no interpolation.

use burn::nn::activation::*;
use burn::nn::loss::*;
use burn::nn::norm::NormalizationConfig;
use burn::nn::pool::*;
use burn::nn::*;
use burn::prelude::*;
use burn::tensor::activation;

use crate::harness::{Lab, Run};

/// Public items, with the prefix of the names of their cases.
pub const COVERED: &[(&str, &str)] = &[
    ("Identity", "new::identity"),
    ("CosineSimilarity", "new::cosine_similarity"),
    ("PairwiseDistance", "new::pairwise_distance"),
    ("PixelShuffle", "new::pixel_shuffle"),
    ("PixelUnshuffle", "new::pixel_unshuffle"),
    ("Fold4d", "new::fold4d"),
    ("AdaptiveAvgPool3d", "new::adaptive_avg_pool3d"),
    #[cfg(feature = "burn-0-23")]
    ("AvgPool3d", "new::avg_pool3d"),
    #[cfg(feature = "burn-0-23")]
    ("MaxPool3d", "new::max_pool3d"),
    #[cfg(feature = "burn-0-23")]
    ("LpPool1d", "new::lp_pool1d"),
    #[cfg(feature = "burn-0-23")]
    ("LpPool2d", "new::lp_pool2d"),
    ("Hardtanh", "new::hardtanh"),
    ("LogSigmoid", "new::log_sigmoid"),
    ("Mish", "new::mish"),
    ("Relu6", "new::relu6"),
    ("RRelu", "new::rrelu"),
    ("SiLU", "new::silu"),
    ("Tanhshrink", "new::tanhshrink"),
    ("Threshold", "new::threshold"),
    ("GaussianNLLLoss", "new::gaussian_nll"),
    ("HingeEmbeddingLoss", "new::hinge_embedding"),
    ("MarginRankingLoss", "new::margin_ranking"),
    ("MultiMarginLoss", "new::multi_margin"),
    ("SoftMarginLoss", "new::soft_margin"),
    ("TripletMarginLoss", "new::triplet_margin"),
    ("hardtanh", "new::hardtanh"),
    ("relu6", "new::relu6"),
    ("tanhshrink", "new::tanhshrink"),
    ("threshold", "new::threshold"),
    ("softplus_with_threshold", "new::softplus_with_threshold"),
    // Not an item, but a function that 0.21 lacks.
    ("RotaryEncoding", "new::rotary_encoding_reset"),
];

/// This release of Burn.
pub const BURN: &str = match cfg!(feature = "burn-0-22") {
    true => "0.22.",
    false => "0.23.",
};

/// Cargo's arguments to find the sources of this release of Burn.
pub const FEATURES: &[&str] = &[
    "--no-default-features",
    "--features",
    #[cfg(feature = "burn-0-22")]
    "burn-0-22",
    #[cfg(feature = "burn-0-23")]
    "burn-0-23",
];

fn input<B: Run>(lab: &mut Lab<B>) -> Tensor<2> {
    lab.input([8, 16])
}

/// Each 1 or -1.
fn signs<B: Run>(lab: &mut Lab<B>) -> Tensor<2> {
    lab.integers([6, 8], 2)
        .float()
        .mul_scalar(2.0)
        .sub_scalar(1.0)
}

fn anchor_positive_negative<B: Run>(lab: &mut Lab<B>) -> [Tensor<2>; 3] {
    [lab.input([6, 8]), lab.input([6, 8]), lab.input([6, 8])]
}

cases! {
    identity(0.0, 1.0) |lab| {
        let identity = lab.module(Identity::new());
        let normalization = lab.module(NormalizationConfig::Identity.init(&lab.device));
        let activation = lab.module(ActivationConfig::Identity.init(&lab.device));
        activation.forward(normalization.forward(identity.forward(input(lab))))
    };
    cosine_similarity(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        CosineSimilarityConfig::new().init().forward(one, other)
    };
    cosine_similarity_of_columns(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        CosineSimilarityConfig::new().with_dim(0).init().forward(one, other)
    };
    // The squares are beyond 65504.
    cosine_similarity_of_large_values(0.0, 1.5) |lab| {
        let [one, other] = [lab.scaled_input([6, 8], 512.0), lab.scaled_input([6, 8], 512.0)];
        CosineSimilarityConfig::new().init().forward(one, other)
    };
    pairwise_distance(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        PairwiseDistanceConfig::new().init().forward(one, other)
    };
    pairwise_distance_of_norm_3(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        PairwiseDistanceConfig::new().with_p(3.0).init().forward(one, other)
    };
    pairwise_distance_of_large_values(0.0, 1.5) |lab| {
        let [one, other] = [lab.scaled_input([6, 8], 512.0), lab.scaled_input([6, 8], 512.0)];
        PairwiseDistanceConfig::new().init().forward(one, other)
    };
    pixel_shuffle(0.0, 1.0) |lab| {
        PixelShuffleConfig::new(2).init().forward(lab.input([2, 8, 3, 4]))
    };
    pixel_unshuffle(0.0, 1.0) |lab| {
        PixelUnshuffleConfig::new(2).init().forward(lab.input([2, 2, 6, 4]))
    };
    // A transposed convolution with a one-hot kernel: a contraction, in half.
    fold4d(1.0, 1.5) |lab| {
        let fold = Fold4dConfig::new([5, 6], [2, 3]).init();
        fold.forward(lab.input([2, 18, 16]))
    };
    fold4d_strided_padded_dilated(1.0, 1.5) |lab| {
        let fold = Fold4dConfig::new([5, 6], [2, 2])
            .with_stride([2, 1])
            .with_padding([1, 1])
            .with_dilation([1, 2])
            .init();
        fold.forward(lab.input([2, 12, 18]))
    };
    adaptive_avg_pool3d(0.0, 1.0) |lab| {
        let pool = lab.module(AdaptiveAvgPool3dConfig::new([3, 2, 2]).init());
        pool.forward(lab.input([2, 3, 4, 5, 6]))
    };
    // The mean over the whole volume.
    adaptive_avg_pool3d_global(0.0, 1.5) |lab| {
        let pool = lab.module(AdaptiveAvgPool3dConfig::new([1, 1, 1]).init());
        pool.forward(lab.input([2, 3, 6, 8, 12]))
    };
    #[cfg(feature = "burn-0-23")]
    avg_pool3d(0.0, 1.0) |lab| {
        let pool = lab.module(AvgPool3dConfig::new([2, 1, 3]).init());
        pool.forward(lab.input([2, 3, 4, 5, 6]))
    };
    #[cfg(feature = "burn-0-23")]
    avg_pool3d_with_options(0.0, 1.5) |lab| {
        let config = AvgPool3dConfig::new([3, 2, 3])
            .with_strides([1, 2, 2])
            .with_padding(PaddingConfig3d::Explicit(1, 0, 1))
            .with_count_include_pad(false)
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 4, 5, 6]))
    };
    // A window of 1,152 elements, whose sum is beyond 65504.
    #[cfg(feature = "burn-0-23")]
    avg_pool3d_of_large_values(0.0, 1.0) |lab| {
        let pool = lab.module(AvgPool3dConfig::new([8, 12, 12]).init());
        pool.forward(lab.scaled_input([2, 3, 8, 12, 12], 4096.0))
    };
    #[cfg(feature = "burn-0-23")]
    max_pool3d(0.0, 1.0) |lab| {
        let pool = lab.module(MaxPool3dConfig::new([2, 1, 3]).init());
        pool.forward(lab.input([2, 3, 4, 5, 6]))
    };
    #[cfg(feature = "burn-0-23")]
    max_pool3d_with_options(0.0, 1.5) |lab| {
        let config = MaxPool3dConfig::new([3, 2, 3])
            .with_strides([1, 2, 2])
            .with_padding(PaddingConfig3d::Explicit(1, 0, 1))
            .with_dilation([1, 2, 1])
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 4, 5, 6]))
    };
    #[cfg(feature = "burn-0-23")]
    lp_pool1d(0.0, 1.5) |lab| {
        let pool = lab.module(LpPool1dConfig::new(3).with_ceil_mode(true).init());
        pool.forward(lab.input([2, 3, 10]))
    };
    // The squares are beyond 65504.
    #[cfg(feature = "burn-0-23")]
    lp_pool1d_of_large_values(0.0, 1.5) |lab| {
        let pool = lab.module(LpPool1dConfig::new(3).init());
        pool.forward(lab.scaled_input([2, 3, 9], 512.0))
    };
    #[cfg(feature = "burn-0-23")]
    lp_pool2d(0.0, 1.5) |lab| {
        let pool = lab.module(LpPool2dConfig::new([2, 3]).with_p(3.0).init());
        pool.forward(lab.input([2, 3, 6, 6]))
    };
    rotary_encoding_reset(1.0, 1.0) |lab| {
        let mut encoding = lab.module(RotaryEncodingConfig::new(16, 8).init(&lab.device));
        encoding.shift(1000);
        encoding.reset();
        encoding.forward(lab.input([2, 3, 9, 8]))
    };
    hardtanh(0.0, 1.0) |lab| HardtanhConfig::new().init().forward(input(lab));
    hardtanh_with_bounds(0.0, 1.0) |lab| {
        let config = HardtanhConfig::new().with_min_val(-0.3).with_max_val(1.7);
        config.init().forward(input(lab))
    };
    log_sigmoid(0.0, 1.0) |lab| LogSigmoid::new().forward(input(lab));
    mish(0.0, 1.0) |lab| Mish::new().forward(input(lab));
    relu6(0.0, 1.0) |lab| Relu6::new().forward(lab.scaled_input([8, 16], 4.0));
    // The outputs are close only if the slopes are equal.
    rrelu(0.0, 1.0) |lab| {
        let rrelu = lab.module(RReluConfig::new().init());
        let input = input(lab);
        lab.seed();
        rrelu.forward(input)
    };
    silu(0.0, 1.5) |lab| SiLU::new().forward(input(lab));
    tanhshrink(0.0, 1.5) |lab| Tanhshrink::new().forward(input(lab));
    threshold(0.0, 1.0) |lab| ThresholdConfig::new(0.5, -1.25).init().forward(input(lab));
    // The value is outside f16's range.
    threshold_with_large_value(0.0, 1.0) |lab| {
        ThresholdConfig::new(0.5, -1e9).init().forward(input(lab))
    };
    softplus_with_threshold(0.0, 1.0) |lab| {
        activation::softplus_with_threshold(lab.scaled_input([8, 16], 16.0), 2.0, 20.0)
    };
    gaussian_nll(0.0, 1.5) |lab| {
        let (input, target) = (lab.input([6, 8]), lab.constant([6, 8]));
        let variance = lab.probabilities([6, 8]);
        GaussianNLLLossConfig::new().init().forward(input, target, variance, Reduction::Mean)
    };
    gaussian_nll_full(0.0, 1.5) |lab| {
        let (input, target) = (lab.input([6, 8]), lab.constant([6, 8]));
        let variance = lab.probabilities([6, 8]);
        let loss = GaussianNLLLossConfig::new().with_full(true).init();
        loss.forward_no_reduction(input, target, variance)
    };
    // Squares are beyond 65504, and the least variance is below f16's range. The variance is a constant,
    // because f16 could not represent the variance's gradient either.
    gaussian_nll_of_large_values(0.0, 1.5) |lab| {
        let [input, target] = [lab.scaled_input([6, 8], 128.0), lab.scaled_input([6, 8], 128.0)];
        let variance = lab.constant_probabilities([6, 8]);
        GaussianNLLLossConfig::new().init().forward(input, target, variance, Reduction::Mean)
    };
    hinge_embedding(0.0, 1.0) |lab| {
        let (input, target) = (lab.input([6, 8]), signs(lab));
        HingeEmbeddingLossConfig::new().init().forward(input, target, Reduction::Mean)
    };
    hinge_embedding_unreduced(0.0, 1.0) |lab| {
        let (input, target) = (lab.input([6, 8]), signs(lab));
        let loss = HingeEmbeddingLossConfig::new().with_margin(0.3).init();
        loss.forward_no_reduction(input, target)
    };
    margin_ranking(0.0, 1.0) |lab| {
        let [first, second] = [lab.input([6, 8]), lab.input([6, 8])];
        let target = signs(lab);
        let loss = MarginRankingLossConfig::new().with_margin(0.5).init();
        loss.forward(first, second, target, Reduction::Mean)
    };
    margin_ranking_of_large_values(0.0, 1.0) |lab| {
        let [first, second] = [lab.scaled_input([6, 8], 4096.0), lab.scaled_input([6, 8], 4096.0)];
        let target = signs(lab);
        MarginRankingLossConfig::new().init().forward(first, second, target, Reduction::Sum)
    };
    multi_margin(0.0, 1.0) |lab| {
        let (input, target) = (lab.input([8, 6]), lab.ints([0, 3, 1, 5, 0, 2, 4, 1]));
        MultiMarginLossConfig::new().init().forward(input, target, Reduction::Mean)
    };
    multi_margin_squared(0.0, 1.0) |lab| {
        let (input, target) = (lab.input([8, 6]), lab.ints([0, 3, 1, 5, 0, 2, 4, 1]));
        MultiMarginLossConfig::new().with_p(2).init().forward_no_reduction(input, target)
    };
    soft_margin(0.0, 1.0) |lab| {
        let (logits, targets) = (lab.input([6, 8]), signs(lab));
        SoftMarginLoss::new().forward(logits, targets, Reduction::Mean)
    };
    soft_margin_unreduced(0.0, 1.0) |lab| {
        let (logits, targets) = (lab.scaled_input([6, 8], 16.0), signs(lab));
        SoftMarginLoss::new().forward_no_reduction(logits, targets)
    };
    triplet_margin(0.0, 1.5) |lab| {
        let [anchor, positive, negative] = anchor_positive_negative(lab);
        let loss = TripletMarginLossConfig::new().init();
        loss.forward(anchor, positive, negative, Reduction::Mean)
    };
    // A difference of distances.
    triplet_margin_of_norm_1(0.0, 3.0) |lab| {
        let [anchor, positive, negative] = anchor_positive_negative(lab);
        let loss = TripletMarginLossConfig::new().with_p(1.0).with_margin(2.0).init();
        loss.forward_no_reduction(anchor, positive, negative)
    };
    // Distances are of differences, in which the bias cancels.
    triplet_margin_after_linear(3.0, 3.0) |lab| {
        lab.cancels("bias");
        let linear = lab.module(LinearConfig::new(8, 6).init(&lab.device));
        let [anchor, positive, negative] =
            anchor_positive_negative(lab).map(|input| linear.forward(input));
        let loss = TripletMarginLossConfig::new().with_margin(4.0).init();
        loss.forward(anchor, positive, negative, Reduction::Mean)
    };
}
