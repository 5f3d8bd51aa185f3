//! Bounds and thresholds that half does not hold: comparisons and clamps with them are in FP32.

mod common;

use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::sigmoid;
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};

use common::{Inner, activation, halves};

type B = AmpAutodiff<Inner>;

/// These values in half.
fn half<const N: usize>(values: [f32; N]) -> Tensor<B, 2> {
    let half = activation(Tensor::<B, 2>::from_data([values], &Default::default()));
    assert!(matches!(half.dtype(), DType::F16 | DType::BF16));
    half
}

fn data(tensor: Tensor<B, 2>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// Runs `f` in a precision, without a scale of the loss. The device, which other tests use, stays as it is.
fn unscaled(precision: Precision, f: impl FnOnce()) {
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();
    scaler.scope(|| with_precision(precision, f));
}

/// A public segmentation program: in bf16, 1 - 1e-6 is 1, and the gradient was 0 times minus infinity.
#[test]
fn a_guarded_logarithm_is_finite() {
    for precision in [vec![Precision::F32], halves()].concat() {
        unscaled(precision, || {
            let device = Default::default();
            let x = Tensor::<B, 2>::from_data([[9.0, -0.5]], &device).require_grad();
            let layer = Tensor::<B, 2>::eye(2, &device).require_grad();
            let tiny = 1e-6;
            let p = sigmoid(x.clone().matmul(layer)).clamp(tiny, 1.0 - tiny);
            assert_eq!(p.dtype(), DType::F32, "{precision}");
            let target = Tensor::<B, 2>::from_data([[1.0, 0.0]], &device);
            let rest = (target.ones_like() - target) * (p.ones_like() - p).log();
            let grads = rest.sum().neg().backward();
            let grad = data(Tensor::from_inner(x.grad(&grads).unwrap()));
            // The gradient of the second is its sigmoid.
            let second = 1.0 / (1.0 + 0.5f32.exp());
            assert!(
                grad[0] == 0.0 && (grad[1] / second - 1.0).abs() < 0.02,
                "{precision}: {grad:?}"
            );
        });
    }
}

#[test]
fn a_threshold_between_two_half_numbers_divides_them() {
    for precision in halves() {
        with_precision(precision, || {
            // Half holds no number between 0.996 and 1.
            let values = half([1.0, 0.75]);
            let above = values.clone().greater_elem(0.999).into_data();
            assert_eq!(above.iter::<bool>().collect::<Vec<_>>(), [true, false]);
            let below = values.clone().lower_equal_elem(0.999).into_data();
            assert_eq!(below.iter::<bool>().collect::<Vec<_>>(), [false, true]);
            for (bounded, expected) in [
                (values.clone().clamp_max(0.999), [0.999, 0.75]),
                (values.clone().clamp_min(0.8), [1.0, 0.8]),
                (values.clone().clamp(0.8, 0.999), [0.999, 0.8]),
            ] {
                assert_eq!(bounded.dtype(), DType::F32, "{precision}");
                assert_eq!(data(bounded), expected, "{precision}");
            }
        });
    }
}

/// What was filled with a scalar that half rounds is found again by a comparison. A bound is no such scalar.
#[test]
fn a_bound_of_what_was_filled_is_not_rounded() {
    for precision in halves() {
        with_precision(precision, || {
            let values = half([1.0, 0.5]);
            let masked = values
                .clone()
                .mask_fill(values.clone().equal_elem(0.5), -10_001.0);
            let found = masked
                .clamp_min(-10_001.0)
                .equal_elem(-10_001.0)
                .into_data();
            assert_eq!(
                found.iter::<bool>().collect::<Vec<_>>(),
                [false, true],
                "{precision}"
            );
            let filled = values.clone().mask_fill(values.equal_elem(0.5), 0.1);
            let bounded = data(filled.clamp(-0.9998, 0.9998));
            assert_eq!(bounded[0], 0.9998, "{precision}");
            assert!((bounded[1] - 0.1).abs() < 1e-3, "{precision}: {bounded:?}");
        });
    }
}

/// A teacher's probability that requires no gradient ends the tape, also where FP32 computes it again.
#[test]
fn what_requires_no_gradient_has_none() {
    for precision in halves() {
        unscaled(precision, || {
            let w = Tensor::<B, 2>::from_data([[0.0]], &Default::default()).require_grad();
            let z = activation(Tensor::<B, 2>::ones([1, 1], &Default::default())).matmul(w.clone());
            let teacher = sigmoid(z.clone()).set_require_grad(false);
            let grads = (teacher.log() + z).sum().backward();
            let grad = data(Tensor::from_inner(w.grad(&grads).unwrap()));
            assert_eq!(grad, [1.0], "{precision}");
        });
    }
}

/// Random numbers have the gradients of the numbers that the forward pass has multiplied.
#[test]
fn a_factor_of_random_numbers_is_its_gradient() {
    for precision in halves() {
        unscaled(precision, || {
            let like = half([0.5; 64]);
            let noise = like.random_like(burn::tensor::Distribution::Normal(0.0, 1.0));
            let noise = noise.cast(DType::F32);
            let std = Tensor::<B, 2>::ones([1, 64], &Default::default()).require_grad();
            let product = noise * std.clone();
            let grads = product.clone().sum().backward();
            let grad = data(Tensor::from_inner(std.grad(&grads).unwrap()));
            assert_eq!(grad, data(product), "{precision}");
        });
    }
}

/// The bounds of a ReLU to 6 and of a hard tanh: half holds them, and the result stays half.
#[test]
fn a_bound_that_half_holds_stays_in_half() {
    for precision in halves() {
        with_precision(precision, || {
            let values = half([9.0, -3.0]);
            for (bounded, expected) in [
                (values.clone().clamp(0.0, 6.0), [6.0, 0.0]),
                (values.clone().clamp_min(-1.0), [9.0, -1.0]),
                (values.clone().clamp_max(f32::INFINITY), [9.0, -3.0]),
            ] {
                assert_eq!(bounded.dtype(), values.dtype(), "{precision}");
                assert_eq!(data(bounded), expected, "{precision}");
            }
        });
    }
}

/// bf16 rounds -1e4 to -9984, f16 rounds -1e4 - 1: the mask is compared with the number that it holds.
#[test]
fn a_mask_is_compared_with_its_own_scalar() {
    for precision in halves() {
        with_precision(precision, || {
            let scalar = -10_001.0;
            let values = half([1.0, 2.0]);
            let places = values.clone().greater_elem(1.5);
            let bools =
                |mask: Tensor<B, 2, Bool>| -> Vec<bool> { mask.into_data().iter().collect() };
            let masked = values.clone().mask_fill(places, scalar);
            assert_eq!(masked.dtype(), values.dtype(), "{precision}");
            for masked in [masked.clone(), masked.reshape([1, 2]) * 1.0] {
                assert_eq!(bools(masked.clone().equal_elem(scalar)), [false, true]);
                assert_eq!(bools(masked.clone().greater_elem(scalar)), [true, false]);
                assert_eq!(bools(masked.lower_equal_elem(scalar)), [false, true]);
            }
            let full = values.full_like(scalar);
            assert_eq!(bools(full.greater_elem(scalar)), [false, false]);
        });
    }
}

#[test]
fn a_users_own_half_stays_in_half() {
    for precision in halves() {
        with_precision(precision, || {
            let dtype = half([1.0]).dtype();
            let own = Tensor::<B, 2>::from_data([[0.5, 2.0]], &Default::default()).cast(dtype);
            let bounded = own.clamp(0.1, 0.999);
            assert_eq!((bounded.dtype(), bounded.into_data().dtype), (dtype, dtype));
        });
    }
}

/// What a confident sigmoid leaves, where the sigmoid changes its backend or becomes a leaf: a teacher's probabilities, and a
/// backward pass in two parts.
#[test]
fn a_sigmoid_is_as_fp32_computes_it_on_the_other_side_and_as_a_leaf() {
    let exact = [9.0, -2.0].map(|x: f64| -x.exp().ln_1p());
    for precision in halves() {
        with_precision(precision, || {
            let p = sigmoid(half([9.0, -2.0]));
            let teacher = sigmoid(half([9.0, -2.0]).inner());
            let sides = [
                Tensor::from_inner(teacher),
                Tensor::from_inner(p.clone().inner()),
                p.clone().detach().require_grad(),
                p.clone().detach().set_require_grad(false),
            ];
            for (i, side) in sides.into_iter().enumerate() {
                let logs = data((side.neg() + 1.0).log());
                let error = |(found, exact): (&f32, &f64)| (f64::from(*found) / exact - 1.0).abs();
                let errors: Vec<_> = logs.iter().zip(&exact).map(error).collect();
                assert!(
                    errors.iter().all(|e| *e < 0.01),
                    "{precision}, {i}: {logs:?}"
                );
            }
        });
    }
}
