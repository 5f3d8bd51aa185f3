//! Training steps of every kind under both checkpointing strategies: the backend accepts every
//! operation, the gradients are right, and each operation runs in the dtype of its class.

use burn::nn::LayerNormConfig;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::module::attention as attend;
use burn::tensor::{DType, Tensor};
use burn_amp::policy::{self, Class};
use burn_amp::{Amp, Precision};

use crate::common::{HALVES, assert_close, roundoff};
use crate::device_in;
use crate::steps::{KINDS, Kind, Step, input};
use shared::checked::{Checked, CheckedDevice, Counts, is_contraction};

fn kind(name: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.name == name).expect("a kind")
}

fn half(precision: Precision) -> DType {
    precision.compute_dtype().expect("a half precision")
}

/// The loss is a sum of terms of about one, which may cancel.
#[track_caller]
pub fn assert_like(what: &str, precision: Precision, step: &Step, plain: &Step) {
    let what = format!("{what}: gradients");
    // Rounded to half, neighbours tie in a max pooling, and the gradient goes to the first.
    assert_close(&what, precision, &step.grads, &plain.grads, 20.0);
    let difference = f64::from((step.loss - plain.loss).abs());
    let tolerance = 16.0 * roundoff(precision) * f64::from(plain.loss.abs().max(1.0));
    assert!(
        difference <= tolerance,
        "{what} in {precision}: loss {} instead of {}",
        step.loss,
        plain.loss
    );
}

/// Operations that must not run in half whatever the table says.
const SENSITIVE: &[&str] = &[
    "float_exp",
    "float_log",
    "float_log1p",
    "float_recip",
    "float_powi_scalar",
    "float_powf_scalar",
    "float_sum",
    "float_sum_dim",
    "float_mean",
    "float_mean_dim",
    "float_cumsum",
    "float_scatter_add",
    "float_select_add",
    "avg_pool2d",
    "avg_pool2d_backward",
    "embedding_backward",
    "linear_bias_backward",
    "conv2d_bias_backward",
    "gelu_backward",
    "sigmoid_backward",
];

/// Every operation ran in a dtype that its class allows, `half` being the only half dtype.
#[track_caller]
fn assert_policy(what: &str, counts: &Counts, half: DType) {
    for (op, dtype, _) in counts.ops() {
        let row = policy::rows().find(|row| row.op == op);
        let class = row.unwrap_or_else(|| panic!("{op} has no row")).class;
        let allowed: &[DType] = match class {
            _ if is_contraction(op) => &[half],
            Class::Fp32 | Class::Fp32Inside => &[DType::F32],
            _ if SENSITIVE.contains(&op) => &[DType::F32],
            _ => &[half, DType::F32],
        };
        assert!(
            allowed.contains(&dtype),
            "{what}: {op}, which is {class:?}, ran in {dtype:?}"
        );
    }
}

fn trains(name: &str) {
    let kind = kind(name);
    let plain = (kind.plain)(&CheckedDevice::new());
    assert!(plain.grads.iter().any(|grad| *grad != 0.0));
    for precision in HALVES {
        for (strategy, steps) in [("kept", kind.keeping), ("recomputed", kind.recomputing)] {
            let what = format!("{name}, {strategy}");
            let step = steps(&device_in(precision));
            assert_like(&what, precision, &step, &plain);
            assert_policy(&what, &step.counts, half(precision));
            let in_half = step.counts.in_half();
            let contracted = in_half.iter().any(|(op, ..)| is_contraction(op));
            assert!(contracted, "{what}: nothing was contracted in half");
        }
    }
}

macro_rules! trains {
    ($($kind:ident),* $(,)?) => {
        $(#[test]
        fn $kind() {
            trains(stringify!($kind));
        })*

        #[test]
        fn every_kind_of_step_is_tried() {
            let tried = [$(stringify!($kind)),*];
            assert!(KINDS.iter().map(|kind| kind.name).eq(tried));
        }
    };
}

trains! {
    mlp, convolutions, transposed, cnn, norms, transformer, attention, masked_heads, rnns,
    embedding, losses, indexing, assigning, activations, reductions, prelu, pooling, sampling,
}

#[test]
fn every_sensitive_operation_is_tried() {
    let device = device_in(Precision::F16);
    let steps: Vec<_> = KINDS.iter().map(|kind| (kind.keeping)(&device)).collect();
    for op in SENSITIVE {
        assert!(steps.iter().any(|step| step.counts.ran(op) > 0), "{op}");
    }
}

/// Without autodiff no operation is split that the backend may have a kernel for.
#[test]
fn inference_gives_the_backend_whole_operations() {
    for precision in HALVES {
        let device = device_in(precision);
        let eye = Tensor::<Amp<Checked>, 2>::eye(8, &device);
        let x = input::<_, 2>([8, 8], 1, &device).matmul(eye);
        let heads = x.clone().reshape([1, 2, 4, 8]);
        let norm = LayerNormConfig::new(8).init(&device);
        device.reset();
        let _ = (
            softmax(x.clone(), 1),
            log_softmax(x.clone(), 1),
            norm.forward(x),
        );
        let attended = attend(
            heads.clone(),
            heads.clone(),
            heads,
            None,
            None,
            Default::default(),
        );
        assert_eq!(attended.dtype(), half(precision));
        let counts = device.counts();
        for (op, dtype) in [
            ("softmax", DType::F32),
            ("log_softmax", DType::F32),
            ("layer_norm", DType::F32),
            ("attention", half(precision)),
        ] {
            assert_eq!(counts.ran(op), 1, "{op}");
            assert_eq!(counts.ran_in(op, dtype), 1, "{op} in {dtype:?}");
        }
        for part in [
            "float_exp",
            "float_sum_dim",
            "float_mean_dim",
            "float_matmul",
        ] {
            assert_eq!(counts.ran(part), 0, "{part}");
        }
    }
}
