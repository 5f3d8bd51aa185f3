//! `compare`: half precision beside FP32, operation by operation.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Flex;
use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::{DType, Distribution, activation};
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpError, Comparison, GradScaler, Precision, compare, with_precision,
};

use common::mlp::{Fill, Mlp, parameters, values};
use common::{HALVES, roundoff};
use shared::checked::{Checked, CheckedDevice};

type A = AmpAutodiff<Flex>;

/// The device's random numbers and configuration are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn in_half(precision: Precision, run: impl FnOnce() -> Result<Comparison, AmpError>) -> Comparison {
    with_precision(precision, run).unwrap()
}

/// A loss of what a linear layer makes of 64 rows, in half and in FP32.
fn of_linear(precision: Precision, loss: impl Fn(Tensor<A, 2>) -> Tensor<A, 1>) -> Comparison {
    let model: Linear<A> = LinearConfig::new(16, 16)
        .init::<A>(&Default::default())
        .map(&mut Fill(0));
    let report = in_half(precision, || {
        compare(&model, 7, |model| {
            loss(model.forward(values::<A, 2>([64, 16], 3)))
        })
    });
    println!("{report}");
    report
}

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    encoder: TransformerEncoder<B>,
    head: Linear<B>,
}

#[test]
fn a_transformer() {
    let _alone = alone();
    let device = Default::default();
    let config = TransformerEncoderConfig::new(32, 64, 4, 2);
    let model = Classifier::<A> {
        encoder: config.init(&device),
        head: LinearConfig::new(32, 4).init(&device),
    };
    for precision in HALVES {
        let report = in_half(precision, || {
            compare(&model, 7, |model| {
                let x = values::<A, 3>([4, 16, 32], 1);
                let out = model.encoder.forward(TransformerEncoderInput::new(x));
                model.head.forward(out).powi_scalar(2).mean()
            })
        });
        println!("{report}");
        let u = roundoff(precision);
        assert_eq!(
            (report.precision, &report.diverged_at, report.calls_left_out),
            (precision, &None, 0)
        );
        // One rounding of the result, and one of each operand.
        assert!(
            report.operations.iter().all(|of| of.added <= 4.0 * u),
            "{report}"
        );
        let close = (report.loss - report.loss_in_fp32).abs() / report.loss_in_fp32;
        assert!(f64::from(close) < 8.0 * u, "{report}");
        let first = report
            .operations
            .iter()
            .find(|of| of.op == "linear")
            .unwrap();
        let path = "encoder.layers.0.mha.query.weight";
        assert_eq!(first.parameter.as_deref(), Some(path), "{report}");
        assert_eq!(first.shapes[0], [4, 16, 32]);
        // Every parameter once.
        assert_eq!(report.gradients.len(), 2 * (4 + 2 + 2) * 2 + 2);
        assert!(
            report
                .gradients
                .iter()
                .all(|of| of.total < 100.0 * u || of.norm < 1e-6),
            "{report}"
        );
        assert!(!report.operations.iter().any(|of| of.grows), "{report}");
    }
}

/// A variance as a difference of means: each operation is as exact as half can be, and the difference is lost.
#[test]
fn a_variance_by_subtraction_grows_where_the_means_are_subtracted() {
    let _alone = alone();
    let report = of_linear(Precision::Bf16, |out| {
        let x = out * 0.01 + 30.0;
        let window = Tensor::<A, 2>::full([1, 64], 1.0 / 64.0, &Default::default());
        let mean = window.clone().matmul(x.clone());
        let of_squares = window.matmul(x.clone() * x);
        (of_squares - mean.clone() * mean).mean()
    });
    // Both products are rows of the report.
    let products = report.operations.iter().filter(|of| of.op == "matmul");
    assert_eq!(products.map(|of| of.calls).sum::<usize>(), 2, "{report}");
    let grown: Vec<_> = report.operations.iter().filter(|of| of.grows).collect();
    assert_eq!(grown.last().unwrap().op, "sub", "{report}");
    assert!(grown.last().unwrap().total > 0.5, "{report}");
    assert!(grown.last().unwrap().added < 1e-2, "{report}");
    assert!(
        report.suggestions()[0].contains("full_precision"),
        "{report}"
    );
}

/// The table has the operands that there are, and an infinity is one row that grows, not all that follows from it.
#[test]
fn an_infinity_grows_where_it_begins() {
    let _alone = alone();
    let model: Linear<A> = LinearConfig::new(16, 16)
        .with_bias(false)
        .init::<A>(&Default::default())
        .map(&mut Fill(0));
    let report = in_half(Precision::F16, || {
        compare(&model, 7, |model| {
            let x = model.forward(values::<A, 2>([64, 16], 3) * 300.0);
            let largest = (x.clone() * x).max().exp().log();
            ((largest.clone() + 1.0) * 0.5).mean() + (largest.neg() - 1.0).mean()
        })
    });
    println!("{report}");
    let of = |op: &str| report.operations.iter().find(|of| of.op == op).unwrap();
    assert_eq!(
        of("linear").shapes,
        [vec![64, 16], vec![16, 16]],
        "{report}"
    );
    let grown: Vec<_> = report.operations.iter().filter(|of| of.grows).collect();
    assert_eq!(grown.len(), 1, "{report}");
    assert!(
        grown[0].op == "mul" && grown[0].total.is_infinite(),
        "{report}"
    );
}

#[test]
fn a_tanh_near_one_grows_in_its_distance_from_one() {
    let _alone = alone();
    for precision in HALVES {
        let report = of_linear(precision, |out| {
            let tanh = (out.abs() + 4.0).tanh();
            (tanh.clone() * tanh).neg().add_scalar(1.0).mean()
        });
        let grown: Vec<_> = report.operations.iter().filter(|of| of.grows).collect();
        assert_eq!(grown.last().unwrap().op, "add_scalar", "{report}");
        assert!(grown.last().unwrap().total > 0.1, "{report}");
    }
}

/// The reference reads a half sigmoid as the operation does.
#[test]
fn a_sigmoid_near_one_is_as_far_from_one_as_in_fp32() {
    let _alone = alone();
    for precision in HALVES {
        let report = of_linear(precision, |out| {
            let p = activation::sigmoid(out.abs() + 8.0);
            (p.neg() + 1.0).log().mean()
        });
        let log = report.operations.iter().find(|of| of.op == "log").unwrap();
        assert!(log.added < 1e-3 && log.total < 1e-2, "{report}");
        assert!(!report.operations.iter().any(|of| of.grows), "{report}");
    }
}

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    last: Linear<B>,
}

fn normed() -> Normed<A> {
    let device = Default::default();
    Normed {
        first: LinearConfig::new(8, 8).init(&device),
        norm: BatchNormConfig::new(8).init(&device),
        dropout: DropoutConfig::new(0.5).init(),
        last: LinearConfig::new(8, 2).init(&device),
    }
}

fn loss(model: &Normed<A>) -> Tensor<A, 1> {
    let noise =
        Tensor::<A, 2>::random([32, 8], Distribution::Normal(0.0, 1.0), &Default::default());
    let x = model.norm.forward(model.first.forward(noise));
    model
        .last
        .forward(model.dropout.forward(activation::relu(x)))
        .powi_scalar(2)
        .mean()
}

#[test]
fn the_model_is_afterwards_what_it_was_and_both_runs_draw_the_same() {
    let _alone = alone();
    let model = normed();
    let state = |model: &Normed<A>| {
        let running = [&model.norm.running_mean, &model.norm.running_var];
        let running = running.map(|of| of.value_sync().into_data().to_vec::<f32>().unwrap());
        (parameters(model), running)
    };
    // Statistics that are not those of a new layer.
    with_precision(Precision::Bf16, || drop(loss(&model).backward()));
    let (before, ids) = (state(&model), model.last.weight.id);
    let scaler = GradScaler::of::<A>(&Default::default());
    let steps = scaler.state();
    for precision in HALVES {
        let report = in_half(precision, || compare(&model, 7, loss));
        assert_eq!(state(&model), before);
        assert_eq!(model.last.weight.id, ids);
        assert_eq!(scaler.state(), steps);
        // With other draws, the losses would have nothing in common.
        let u = roundoff(precision);
        let off = f64::from((report.loss - report.loss_in_fp32).abs() / report.loss_in_fp32);
        assert!(off < 16.0 * u, "{report}");
        let again = in_half(precision, || compare(&model, 7, loss));
        assert_eq!(again, report);
        let other = in_half(precision, || compare(&model, 8, loss));
        assert_ne!(other.loss, report.loss);
    }
}

#[test]
fn a_program_that_goes_another_way_in_half_is_reported() {
    let _alone = alone();
    let model: Linear<A> = LinearConfig::new(4, 4)
        .init::<A>(&Default::default())
        .map(&mut Fill(0));
    let report = in_half(Precision::Bf16, || {
        compare(&model, 7, |model| {
            let x = model.forward(values::<A, 2>([4, 4], 1));
            let is_exact = x.clone().into_data()
                == burn_amp::full_precision(|| model.forward(values::<A, 2>([4, 4], 1)))
                    .into_data();
            match is_exact {
                true => x.exp().mean(),
                false => x.sin().mean(),
            }
        })
    });
    assert_eq!(report.diverged_at.as_deref(), Some("sin [[4, 4]]"));
    assert!(
        report
            .to_string()
            .contains("went another way in bf16, from sin [[4, 4]] on"),
        "{report}"
    );
}

#[test]
fn what_half_computes_otherwise_is_one_operation() {
    let _alone = alone();
    let model: Linear<A> = LinearConfig::new(4, 4).init::<A>(&Default::default());
    let report = in_half(Precision::Bf16, || {
        compare(&model, 7, |model| {
            let gate = activation::sigmoid(model.forward(values::<A, 2>([4, 4], 1)));
            (gate.neg() + 1.0).mean()
        })
    });
    assert_eq!(report.diverged_at, None);
}

#[test]
fn a_kernel_that_is_wrong_at_a_shape_is_named() {
    type C = AmpAutodiff<Checked>;
    for precision in HALVES {
        let device = CheckedDevice::new();
        let config = AmpConfig::new().with_precision(precision);
        config.with_trials(false).apply::<C>(&device).unwrap();
        let model = Mlp::<C>::new().fork(&device);
        // 16 inputs, in half.
        device.set_wrong(|op, dtype, operands| {
            op == "linear" && dtype != DType::F32 && operands[1][0] == 16
        });
        let report = compare(&model, 7, |model| {
            let [x, y] = [8, 4].map(|width| values::<C, 2>([32, width], 1).to_device(&device));
            model.loss_on(x, y)
        });
        let report = report.unwrap();
        let named = "AmpConfig::with_op(\"linear\", OpPrecision::F32): its kernel";
        let all = report.suggestions();
        assert!(
            all.iter()
                .any(|of| of.starts_with(named) && of.contains("[16, 4]")),
            "{report}"
        );
        let wrong = report
            .operations
            .iter()
            .filter(|of| of.added > 4.0 * roundoff(precision));
        let wrong: Vec<_> = wrong.map(|of| of.parameter.as_deref()).collect();
        assert_eq!(wrong, [Some("second.weight")], "{report}");
    }
}

#[test]
fn in_fp32_there_is_nothing_to_compare() {
    let model: Linear<A> = LinearConfig::new(4, 4).init(&Default::default());
    let loss = |model: &Linear<A>| model.forward(values::<A, 2>([4, 4], 1)).mean();
    let error = with_precision(Precision::F32, || compare(&model, 7, loss)).unwrap_err();
    assert!(matches!(
        error,
        AmpError::NothingToCompare {
            precision: Precision::F32
        }
    ));
}

#[test]
fn json_keeps_every_field() {
    let _alone = alone();
    let report = in_half(Precision::Bf16, || compare(&normed(), 7, loss));
    let json = serde_json::to_string(&report).unwrap();
    let read: Comparison = serde_json::from_str(&json).unwrap();
    // A number as text may lose its last bit.
    assert_eq!(read.to_string(), report.to_string());
    assert_eq!(read.operations.len(), report.operations.len());
}
