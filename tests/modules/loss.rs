//! Losses, on FP32 inputs and on the half output of a layer.

use burn::nn::LinearConfig;
use burn::nn::loss::*;
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::loss::cross_entropy_with_logits;

use crate::cases::RECORDED;
use crate::harness::{Lab, Run};

fn predictions_and_targets<B: Run>(lab: &mut Lab<B>) -> [floats!(B, 2); 2] {
    [lab.input([6, 8]), lab.constant([6, 8])]
}

/// Logits and labels, of which 0 is the padding where there is one.
fn logits_and_labels<B: Run>(lab: &mut Lab<B>) -> (floats!(B, 2), ints!(B, 1)) {
    (lab.input([8, 6]), lab.ints([0, 3, 1, 5, 0, 2, 4, 1]))
}

const WEIGHTS: [f32; 6] = [0.5, 2.0, 1.0, 0.25, 1.5, 3.0];

fn labels_of_many<B: Run>(lab: &mut Lab<B>) -> ints!(B, 2) {
    lab.integers([8, 6], 2)
}

/// Targets and the lengths of inputs and targets, for eight steps.
fn sequences<B: Run>(lab: &Lab<B>) -> (ints!(B, 2), ints!(B, 1), ints!(B, 1)) {
    let targets = Tensor::from_data([[1, 2, 2], [3, 1, 0]], &lab.device);
    (targets, lab.ints([8, 6]), lab.ints([3, 2]))
}

cases! {
    cross_entropy(RECORDED, 1.0) |lab| {
        let (logits, labels) = logits_and_labels(lab);
        CrossEntropyLossConfig::new().init(&lab.device).forward(logits, labels)
    };
    cross_entropy_smoothed(RECORDED, 1.0) |lab| {
        let (logits, labels) = logits_and_labels(lab);
        let config = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
        config.init(&lab.device).forward(logits, labels)
    };
    cross_entropy_weighted(RECORDED, 1.0) |lab| {
        let (logits, labels) = logits_and_labels(lab);
        let config = CrossEntropyLossConfig::new().with_weights(Some(WEIGHTS.to_vec()));
        config.init(&lab.device).forward(logits, labels)
    };
    cross_entropy_padded(RECORDED, 1.0) |lab| {
        let (logits, labels) = logits_and_labels(lab);
        let config = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0]));
        config.init(&lab.device).forward(logits, labels)
    };
    cross_entropy_smoothed_weighted_padded(RECORDED, 1.0) |lab| {
        let (logits, labels) = logits_and_labels(lab);
        let config = CrossEntropyLossConfig::new()
            .with_smoothing(Some(0.1))
            .with_weights(Some(WEIGHTS.to_vec()))
            .with_pad_tokens(Some(vec![0]));
        config.init(&lab.device).forward(logits, labels)
    };
    cross_entropy_of_probabilities(0.0, 1.0) |lab| {
        let (probabilities, labels) = (lab.probabilities([8, 6]), logits_and_labels(lab).1);
        let config = CrossEntropyLossConfig::new().with_logits(false);
        config.init(&lab.device).forward(probabilities, labels)
    };
    cross_entropy_of_probabilities_smoothed(0.0, 1.0) |lab| {
        let (probabilities, labels) = (lab.probabilities([8, 6]), logits_and_labels(lab).1);
        let config =
            CrossEntropyLossConfig::new().with_logits(false).with_smoothing(Some(0.1));
        config.init(&lab.device).forward(probabilities, labels)
    };
    cross_entropy_with_logits(RECORDED, 1.0) |lab| {
        let (logits, targets) = (lab.input([8, 6]), lab.constant_probabilities([8, 6]));
        cross_entropy_with_logits(logits, targets)
    };
    binary_cross_entropy(0.0, 1.0) |lab| {
        let (probabilities, labels) = (lab.probabilities([8, 6]), labels_of_many(lab));
        BinaryCrossEntropyLossConfig::new().init(&lab.device).forward(probabilities, labels)
    };
    binary_cross_entropy_smoothed_weighted(0.0, 1.0) |lab| {
        let (probabilities, labels) = (lab.probabilities([8, 6]), labels_of_many(lab));
        let config = BinaryCrossEntropyLossConfig::new()
            .with_smoothing(Some(0.1))
            .with_weights(Some(WEIGHTS.to_vec()));
        config.init(&lab.device).forward(probabilities, labels)
    };
    binary_cross_entropy_of_logits(0.0, 1.5) |lab| {
        let (logits, labels) = (lab.input([8, 6]), labels_of_many(lab));
        let config = BinaryCrossEntropyLossConfig::new().with_logits(true);
        config.init(&lab.device).forward(logits, labels)
    };
    binary_cross_entropy_of_one_logit(0.0, 1.5) |lab| {
        let (logits, labels) = (lab.input([6]), lab.ints([0, 1, 1, 0, 1, 0]));
        let config = BinaryCrossEntropyLossConfig::new()
            .with_logits(true)
            .with_smoothing(Some(0.1))
            .with_weights(Some(vec![0.5, 2.0]));
        config.init(&lab.device).forward(logits, labels)
    };
    mse(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        MseLoss::new().forward(predictions, targets, Reduction::Mean)
    };
    mse_unreduced(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        MseLoss::new().forward_no_reduction(predictions, targets)
    };
    // The squares, and their sum, are beyond 65504.
    mse_of_large_values(0.0, 1.0) |lab| {
        let (predictions, targets) = (lab.scaled_input([6, 8], 512.0), lab.constant([6, 8]));
        MseLoss::new().forward(predictions, targets, Reduction::Mean)
    };
    huber(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        HuberLossConfig::new(0.5).init().forward(predictions, targets, Reduction::Mean)
    };
    huber_of_residuals(0.0, 1.0) |lab| {
        HuberLossConfig::new(0.5).init().forward_residuals(lab.input([6, 8]))
    };
    smooth_l1(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        let loss = SmoothL1LossConfig::new().with_beta(0.5).init();
        loss.forward_with_reduction(predictions, targets, Reduction::Sum)
    };
    smooth_l1_by_row(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        SmoothL1LossConfig::new().init().forward_reduce_dims(predictions, targets, &[1])
    };
    lp_1(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        LpLossConfig::l1().forward(predictions, targets, Reduction::Mean)
    };
    // The sum is beyond 65504.
    lp_1_of_large_values(0.0, 1.5) |lab| {
        let predictions = lab.scaled_input([6, 8], 4096.0);
        let targets = lab.scaled_input([6, 8], 4096.0);
        LpLossConfig::l1().forward(predictions, targets, Reduction::Sum)
    };
    lp_2(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        LpLossConfig::l2().forward(predictions, targets, Reduction::Mean)
    };
    lp_3(0.0, 1.0) |lab| {
        let [predictions, targets] = predictions_and_targets(lab);
        LpLossConfig::new(3.0).init().forward_reduce_dims(predictions, targets, &[0])
    };
    kl_div(RECORDED, 1.0) |lab| {
        let predictions = log_softmax(lab.input([6, 8]), 1);
        let targets = lab.constant_probabilities([6, 8]);
        KLDivLossConfig::new().init().forward(predictions, targets, Reduction::BatchMean)
    };
    // Targets from a teacher network: half too.
    kl_div_of_log_targets(0.0, 1.0) |lab| {
        let [predictions, targets] = [lab.input([6, 8]), lab.input([6, 8])];
        let loss = KLDivLossConfig::new().with_log_target(true).init();
        loss.forward(predictions, targets, Reduction::Mean)
    };
    kl_div_of_half_targets(0.0, 1.5) |lab| {
        let [predictions, targets] = [lab.input([6, 8]), lab.probabilities([6, 8])];
        KLDivLossConfig::new().init().forward(predictions, targets, Reduction::Sum)
    };
    poisson_nll(0.0, 1.5) |lab| {
        let (predictions, targets) = (lab.input([6, 8]), lab.integers([6, 8], 9).float());
        PoissonNllLossConfig::new().init().forward(predictions, targets, Reduction::Mean)
    };
    poisson_nll_of_rates(0.0, 1.0) |lab| {
        let (rates, targets) = (lab.probabilities([6, 8]), lab.integers([6, 8], 9).float());
        let loss = PoissonNllLossConfig::new().with_log_input(false).init();
        loss.forward(rates, targets, Reduction::Mean)
    };
    poisson_nll_full(0.0, 1.5) |lab| {
        let (predictions, targets) = (lab.input([6, 8]), lab.constant_probabilities([6, 8]));
        let targets = targets.mul_scalar(8.0);
        let loss = PoissonNllLossConfig::new().with_full(true).init();
        loss.forward(predictions, targets, Reduction::Mean)
    };
    cosine_embedding(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        let target = lab.ints([1, -1, 1, 1, -1, -1]);
        CosineEmbeddingLoss::new().forward(one, other, target)
    };
    cosine_embedding_with_margin(0.0, 1.5) |lab| {
        let [one, other] = [lab.input([6, 8]), lab.input([6, 8])];
        let target = lab.ints([1, -1, 1, 1, -1, -1]);
        let config = CosineEmbeddingLossConfig::new().with_margin(-0.25);
        config.with_reduction(Reduction::Sum).init().forward(one, other, target)
    };
    ctc(RECORDED, 1.0) |lab| {
        let log_probs = log_softmax(lab.input([8, 2, 4]), 2);
        let (targets, inputs, lengths) = sequences(lab);
        let loss = CTCLossConfig::new().init();
        loss.forward_with_reduction(log_probs, targets, inputs, lengths, Reduction::Mean)
    };
    ctc_of_half_log_probabilities(0.0, 1.0) |lab| {
        let log_probs = lab.input([8, 2, 4]);
        let (targets, inputs, lengths) = sequences(lab);
        CTCLossConfig::new().with_zero_infinity(true).init().forward(
            log_probs, targets, inputs, lengths,
        )
    };
    rnnt(RECORDED, 1.0) |lab| {
        let logits = lab.input([2, 8, 4, 4]);
        let (targets, inputs, lengths) = sequences(lab);
        let loss = RNNTLossConfig::new().init();
        loss.forward_with_reduction(logits, targets, inputs, lengths, Reduction::Mean)
    };
    rnnt_of_half_log_probabilities(0.0, 1.0) |lab| {
        let log_probs = lab.input([2, 8, 4, 4]);
        let (targets, inputs, lengths) = sequences(lab);
        let loss = RNNTLossConfig::new().with_logits(false).init();
        loss.forward(log_probs, targets, inputs, lengths)
    };
    // A classifier and a regression, as they are trained.
    classifier(2.0, 2.0) |lab| {
        let layers = lab.module(vec![
            LinearConfig::new(16, 24).init(&lab.device),
            LinearConfig::new(24, 6).init(&lab.device),
        ]);
        let hidden = relu(layers[0].forward(lab.input([8, 16])));
        let labels = lab.integers([8], 6);
        let loss = CrossEntropyLossConfig::new().init(&lab.device);
        loss.forward(layers[1].forward(hidden), labels)
    };
    regression(1.5, 1.5) |lab| {
        let linear = lab.module(LinearConfig::new(16, 3).init(&lab.device));
        let (input, targets) = (lab.input([8, 16]), lab.constant([8, 3]));
        MseLoss::new().forward(linear.forward(input), targets, Reduction::Mean)
    };
}
