//! Every module, loss and activation function of the Burn in use has a case.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{activation, attention, conv, layers, loss, new, norm, pool, rnn};

/// Public items of burn-nn, and activation and loss functions of burn-tensor, with what the names
/// of their cases begin with. Later releases of Burn have more of them: those are in [`new`].
const COVERED: &[(&str, &str)] = &[
    ("Linear", "layers::linear"),
    ("Embedding", "layers::embedding"),
    ("PositionalEncoding", "layers::positional_encoding"),
    ("generate_sinusoids", "layers::sinusoids"),
    ("RotaryEncoding", "layers::rotary_encoding"),
    ("Dropout", "layers::dropout"),
    ("GaussianNoise", "layers::gaussian_noise"),
    ("Conv1d", "conv::conv1d"),
    ("Conv2d", "conv::conv2d"),
    ("Conv3d", "conv::conv3d"),
    ("ConvTranspose1d", "conv::conv_transpose1d"),
    ("ConvTranspose2d", "conv::conv_transpose2d"),
    ("ConvTranspose3d", "conv::conv_transpose3d"),
    ("DeformConv2d", "conv::deform_conv2d"),
    ("Unfold4d", "conv::unfold4d"),
    ("BatchNorm", "norm::batch_norm"),
    ("LayerNorm", "norm::layer_norm"),
    ("GroupNorm", "norm::group_norm"),
    ("InstanceNorm", "norm::instance_norm"),
    ("RmsNorm", "norm::rms_norm"),
    ("LocalResponseNorm", "norm::local_response_norm"),
    ("Normalization", "norm::normalization"),
    ("Rnn", "rnn::rnn"),
    ("BiRnn", "rnn::bi_rnn"),
    ("Lstm", "rnn::lstm"),
    ("BiLstm", "rnn::bi_lstm"),
    ("Gru", "rnn::gru"),
    ("BiGru", "rnn::bi_gru"),
    ("GateController", "rnn::gate_controller"),
    ("MultiHeadAttention", "attention::mha"),
    ("CrossAttention", "attention::cross_attention"),
    ("generate_padding_mask", "attention::mha_padded"),
    (
        "generate_autoregressive_mask",
        "attention::mha_autoregressive",
    ),
    ("PositionWiseFeedForward", "attention::feed_forward"),
    ("TransformerEncoder", "attention::transformer_encoder"),
    ("TransformerEncoderLayer", "attention::transformer_encoder"),
    ("TransformerDecoder", "attention::transformer_decoder"),
    ("TransformerDecoderLayer", "attention::transformer_decoder"),
    ("AvgPool1d", "pool::avg_pool1d"),
    ("AvgPool2d", "pool::avg_pool2d"),
    ("MaxPool1d", "pool::max_pool1d"),
    ("MaxPool2d", "pool::max_pool2d"),
    ("AdaptiveAvgPool1d", "pool::adaptive_avg_pool1d"),
    ("AdaptiveAvgPool2d", "pool::adaptive_avg_pool2d"),
    ("Interpolate1d", "pool::interpolate"),
    ("Interpolate2d", "pool::interpolate"),
    ("Relu", "activation::relu"),
    ("LeakyRelu", "activation::leaky_relu"),
    ("PRelu", "activation::prelu"),
    ("Gelu", "activation::gelu"),
    ("Sigmoid", "activation::sigmoid"),
    ("HardSigmoid", "activation::hard_sigmoid"),
    ("HardSwish", "activation::hard_swish"),
    ("Tanh", "activation::tanh"),
    ("Softplus", "activation::softplus"),
    ("Softsign", "activation::softsign"),
    ("Elu", "activation::elu"),
    ("Celu", "activation::celu"),
    ("Selu", "activation::selu"),
    ("ThresholdedRelu", "activation::thresholded_relu"),
    ("Shrink", "activation::shrink"),
    ("SoftShrink", "activation::soft_shrink"),
    ("HardShrink", "activation::hard_shrink"),
    ("GLU", "activation::glu"),
    ("SwiGlu", "activation::swiglu"),
    ("Activation", "activation::activation_wrapper"),
    ("CrossEntropyLoss", "loss::cross_entropy"),
    ("BinaryCrossEntropyLoss", "loss::binary_cross_entropy"),
    ("MseLoss", "loss::mse"),
    ("HuberLoss", "loss::huber"),
    ("SmoothL1Loss", "loss::smooth_l1"),
    ("LpLoss", "loss::lp_"),
    ("KLDivLoss", "loss::kl_div"),
    ("PoissonNllLoss", "loss::poisson_nll"),
    ("CosineEmbeddingLoss", "loss::cosine_embedding"),
    ("CTCLoss", "loss::ctc"),
    ("RNNTLoss", "loss::rnnt"),
    // Functions that the modules above only wrap.
    ("relu", "activation::relu"),
    ("leaky_relu", "activation::leaky_relu"),
    ("prelu", "activation::prelu"),
    ("gelu", "activation::gelu"),
    ("gelu_approximate", "activation::gelu_approximate"),
    ("sigmoid", "activation::sigmoid"),
    ("hard_sigmoid", "activation::hard_sigmoid"),
    ("hard_swish", "activation::hard_swish"),
    ("tanh", "activation::tanh"),
    ("softplus", "activation::softplus"),
    ("softsign", "activation::softsign"),
    ("elu", "activation::elu"),
    ("celu", "activation::celu"),
    ("selu", "activation::selu"),
    ("thresholded_relu", "activation::thresholded_relu"),
    ("shrink", "activation::shrink"),
    ("soft_shrink", "activation::soft_shrink"),
    ("hard_shrink", "activation::hard_shrink"),
    ("glu", "activation::glu"),
    // Functions without a module.
    ("silu", "activation::silu"),
    ("mish", "activation::mish"),
    ("log_sigmoid", "activation::log_sigmoid"),
    ("softmax", "activation::softmax"),
    ("log_softmax", "activation::log_softmax"),
    ("softmin", "activation::softmin"),
    ("quiet_softmax", "activation::quiet_softmax"),
    (
        "cross_entropy_with_logits",
        "loss::cross_entropy_with_logits",
    ),
];

/// The items above and the new ones.
fn covered() -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    COVERED.iter().chain(new::COVERED)
}

/// The names of all cases, with their files'.
fn cases() -> impl Iterator<Item = String> {
    [
        ("activation", activation::NAMES),
        ("attention", attention::NAMES),
        ("conv", conv::NAMES),
        ("layers", layers::NAMES),
        ("loss", loss::NAMES),
        ("new", new::NAMES),
        ("norm", norm::NAMES),
        ("pool", pool::NAMES),
        ("rnn", rnn::NAMES),
    ]
    .into_iter()
    .flat_map(|(file, names)| names.iter().map(move |name| format!("{file}::{name}")))
}

/// The output of a cargo command.
fn cargo(args: &[&str]) -> Vec<u8> {
    let output = Command::new(std::env::var("CARGO").unwrap_or("cargo".into()))
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap_or_else(|error| panic!("cannot start cargo: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    let (command, status) = (args.join(" "), output.status);
    assert!(status.success(), "cargo {command}: {status}\n{said}");
    output.stdout
}

/// The folder of a dependency's sources.
fn sources(package: &str) -> PathBuf {
    // Without a platform, cargo would want the crates of all of them.
    let version = String::from_utf8(cargo(&["-vV"])).expect("text");
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.expect("cargo -vV names the host");
    let format = ["metadata", "--format-version", "1"];
    let only = ["--locked", "--filter-platform", host];
    let metadata = cargo(&[&format, &only, new::FEATURES].concat());
    let metadata: serde_json::Value = serde_json::from_slice(&metadata).expect("metadata");
    let packages = metadata["packages"].as_array().expect("packages");
    let manifests: Vec<&str> = packages
        .iter()
        .filter(|found| found["name"] == package)
        // A weak feature names the other version of Burn, too.
        .filter(|found| {
            let version = found["version"].as_str();
            version.is_some_and(|version| version.starts_with(new::BURN))
        })
        .filter_map(|found| found["manifest_path"].as_str())
        .collect();
    let [manifest] = manifests[..] else {
        panic!("{package}: {manifests:?}")
    };
    Path::new(manifest).with_file_name("src")
}

/// Public functions, and public types that are modules.
fn items(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_module = false;
    for line in source.lines() {
        if line.starts_with("#[derive(") {
            is_module = line.contains("Module");
        }
        let named = |keyword| {
            line.strip_prefix(keyword).map(|rest: &str| {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                rest[..end.unwrap_or(rest.len())].to_string()
            })
        };
        found.extend(named("pub fn "));
        if let Some(name) = named("pub struct ").or_else(|| named("pub enum ")) {
            found.extend(is_module.then_some(name));
            is_module = false;
        }
    }
    found
}

fn items_in(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            items_in(&path, found);
        } else {
            found.extend(items(&std::fs::read_to_string(path).expect("a source")));
        }
    }
}

#[test]
fn every_module_loss_and_activation_of_burn_has_a_case() {
    let mut present = BTreeSet::new();
    items_in(&sources("burn-nn"), &mut present);
    let tensor = sources("burn-tensor").join("tensor");
    items_in(&tensor.join("activation"), &mut present);
    items_in(&tensor.join("loss"), &mut present);

    let covered: BTreeSet<String> = covered().map(|(item, _)| item.to_string()).collect();
    assert_eq!(covered, present, "covered and existing items differ");
}

#[test]
fn every_item_has_cases_and_every_case_an_item() {
    for (item, prefix) in covered() {
        assert!(
            cases().any(|case| case.starts_with(prefix)),
            "{item} has no case {prefix}"
        );
    }
    // Cases of no single item: a kernel below the modules, and modules together.
    let others = [
        "attention::dot_product",
        "loss::classifier",
        "loss::regression",
    ];
    for case in cases() {
        let prefixes = covered().map(|(_, prefix)| prefix).chain(&others);
        assert!(
            prefixes.into_iter().any(|prefix| case.starts_with(prefix)),
            "{case} is of no item"
        );
    }
}
