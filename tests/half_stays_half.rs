//! The guide's page on where half rounds: what stays in half, or overflows, because a model computed it.

mod common;

use burn::backend::Flex;
use burn::nn::loss::{LpLossConfig, MseLoss, Reduction};
use burn::prelude::*;
use burn_amp::{
    AmpAutodiff, GradScaler, LossScaleConfig, Precision, StepOutcome, full_precision,
    with_precision,
};

use common::{HALVES, activation};

type B = AmpAutodiff<Flex>;

fn row<const N: usize>(values: [f32; N]) -> Tensor<B, 2> {
    activation(Tensor::from_data([values], &Default::default()))
}

/// The largest value of what a program makes of half values.
fn largest(program: impl Fn() -> Tensor<B, 2>) -> f32 {
    program().abs().max().into_scalar()
}

fn in_f16(program: impl Fn() -> Tensor<B, 2>) -> f32 {
    with_precision(Precision::F16, || largest(&program))
}

fn in_bf16(program: impl Fn() -> Tensor<B, 2>) -> f32 {
    with_precision(Precision::Bf16, || largest(&program))
}

#[test]
fn a_product_of_activations_overflows_f16() {
    // q·k before its scale: 64 times 40².
    let heads = || row([40.0; 64]);
    let scores = || heads().matmul(heads().transpose()) / 8.0;
    // The area of a box of 300 by 320 pixels.
    let area = || row([300.0]) * row([320.0]);
    let square = || row([300.0]).powi_scalar(2);
    let own_square = || row([300.0]) * row([300.0]);
    for (program, exact) in [
        (&scores as &dyn Fn() -> Tensor<B, 2>, 12_800.0),
        (&area, 96_000.0),
        (&own_square, 90_000.0),
    ] {
        assert_eq!(in_f16(program), f32::INFINITY);
        let in_full = with_precision(Precision::F16, || full_precision(|| largest(program)));
        assert_eq!(in_full, exact);
        let relative = in_bf16(program) / exact - 1.0;
        assert!(relative.abs() < 0.01, "{relative}");
    }
    assert_eq!(in_f16(square), 90_000.0);
    let scaled = || (heads() / 8.0).matmul(heads().transpose());
    assert_eq!(in_f16(scaled), 12_800.0);
}

#[test]
fn the_square_of_lp_loss_overflows_f16_and_mse_does_not() {
    let far = || (row([300.0, 0.0]), row([0.0, 0.0]));
    let lp = || {
        let (x, y) = far();
        let loss = LpLossConfig::l2();
        loss.forward(x, y, Reduction::Mean).unsqueeze()
    };
    let mse = || {
        let (x, y) = far();
        MseLoss::new().forward(x, y, Reduction::Mean).unsqueeze()
    };
    assert_eq!(in_f16(lp), f32::INFINITY);
    assert_eq!(in_f16(mse), 45_000.0);
}

/// The value is 0, and its gradient 1e12.
#[test]
fn a_row_of_zeros_over_its_norm_has_a_gradient_beyond_f16() {
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();
    let outcome = |epsilon: f64| {
        with_precision(Precision::F16, || {
            let leaf = Tensor::<B, 2>::zeros([1, 4], &Default::default()).require_grad();
            let x = activation(leaf);
            let norm = x.clone().square().sum_dim(1).sqrt().detach();
            let loss = (x / (norm + epsilon)).sum();
            assert_eq!(loss.clone().into_scalar(), 0.0);
            scaler.scope(|| drop(loss.backward()));
            scaler.last_step().unwrap().outcome
        })
    };
    assert_eq!(outcome(1e-12), StepOutcome::Overflow);
    assert_eq!(outcome(1e-4), StepOutcome::Finite);
}

#[test]
fn what_cancels_near_one_is_lost() {
    let exact = 1.0 - 5f32.tanh().powi(2);
    let by_itself = || {
        let tanh = row([5.0]).tanh();
        (tanh.clone() * tanh).neg() + 1.0
    };
    for half in [in_f16(by_itself), in_bf16(by_itself)] {
        assert_eq!(half, 0.0);
    }
    // FP32 computes a tanh again before it squares it.
    let squares: [fn(Tensor<B, 2>) -> Tensor<B, 2>; 3] = [
        Tensor::square,
        |tanh| tanh.powi_scalar(2),
        |tanh| tanh.powf_scalar(2.0),
    ];
    for square in squares {
        let rest = || square(row([5.0]).tanh()).neg() + 1.0;
        for half in [in_f16(rest), in_bf16(rest)] {
            assert!((half / exact - 1.0).abs() < 1e-3, "{half} for {exact}");
        }
    }
    let other = || row([5.0]).cosh().powi_scalar(-2);
    for half in [in_f16(other), in_bf16(other)] {
        assert!((half / exact - 1.0).abs() < 0.01, "{half} for {exact}");
    }
}

/// Of rows of length 1 at an angle of a hundredth.
#[test]
fn a_small_angle_has_a_cosine_of_one() {
    let (a, b) = ([1.0, 0.0], [0.01f32.cos(), 0.01f32.sin()]);
    let sine = || {
        let cosine = row(a).matmul(row(b).transpose());
        (cosine.square().neg() + 1.0).sqrt()
    };
    let chord = || (row(a) - row(b)).square().sum_dim(1).sqrt();
    for half in [in_f16(sine), in_bf16(sine)] {
        assert_eq!(half, 0.0);
    }
    for half in [in_f16(chord), in_bf16(chord)] {
        assert!((half / 0.01 - 1.0).abs() < 0.01, "{half}");
    }
}

#[test]
fn distances_of_features_by_expansion_are_lost() {
    // A sixteenth, of rows whose squares are 2,080.
    let (a, b) = ([32.5, 32.0], [32.25, 32.0]);
    let expanded = || {
        let (a, b) = (row(a), row(b));
        let squares = a.clone().square().sum_dim(1) + b.clone().square().sum_dim(1);
        squares - a.matmul(b.transpose()) * 2.0
    };
    let subtracted = || (row(a) - row(b)).square().sum_dim(1);
    let exact = 0.0625;
    for half in [in_f16(expanded), in_bf16(expanded)] {
        assert!((half - exact).abs() > 0.05, "{half}");
    }
    for half in [in_f16(subtracted), in_bf16(subtracted)] {
        assert_eq!(half, exact);
    }
}

#[test]
fn an_id_that_passes_a_layer_is_rounded() {
    assert_eq!(in_bf16(|| row([257.0])), 256.0);
    assert_eq!(in_f16(|| row([4097.0])), 4096.0);
}

#[test]
fn a_total_in_half_stops_and_one_in_fp32_does_not() {
    let sum = |from: fn(&Tensor<B, 2>) -> Tensor<B, 2>| {
        let half = row([0.5]);
        (0..700).fold(from(&half), |total, _| total + half.clone())
    };
    assert_eq!(in_bf16(|| sum(|half| half.zeros_like())), 128.0);
    assert_eq!(
        in_bf16(|| sum(|half| Tensor::zeros([1, 1], &half.device()))),
        350.0
    );
    let decayed = |from: fn(&Tensor<B, 2>) -> Tensor<B, 2>| {
        let (decay, one) = (row([1.0]), row([1.0]));
        (0..4000).fold(from(&one), |state, _| state * decay.clone() + one.clone())
    };
    let like = || decayed(|one| one.zeros_like());
    assert_eq!((in_f16(like), in_bf16(like)), (2048.0, 256.0));
    let zeros = || decayed(|one| Tensor::zeros([1, 1], &one.device()));
    assert_eq!((in_f16(zeros), in_bf16(zeros)), (4000.0, 4000.0));
    let given = || decayed(|one| Tensor::from_data([[0.0]], &one.device()));
    assert_eq!((in_f16(given), in_bf16(given)), (4000.0, 4000.0));
}

/// Where the model is learned, a product of positions is one.
#[test]
fn positions_times_a_learned_matrix_are_rounded() {
    for precision in HALVES {
        let rounded = with_precision(precision, || {
            let positions = Tensor::<B, 2>::from_data([[4_097.0, 0.0]], &Default::default());
            let weight = Tensor::<B, 2>::eye(2, &Default::default()).require_grad();
            largest(|| positions.clone().matmul(weight.clone()))
        });
        assert_eq!(rounded, 4_096.0, "{precision}");
    }
}
