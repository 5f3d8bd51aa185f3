//! Operations that take each element for itself.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive, activation};
use burn_amp::Precision;

use crate::harness::{
    Case, cases, check, check_plain_f16, checked_points, full, half, half_of, pairs, points,
    rounded,
};

pub fn cases() -> Vec<Case> {
    [
        unary(),
        powers(),
        scalar(),
        binary(),
        comparisons(),
        composed(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A method of the backend that no method of `Tensor` calls.
fn raw<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    op: impl FnOnce(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(op(x.into_primitive().tensor())))
}

/// Roundings: one where the exact result is rounded, one more where a half factor of the gradient
/// was rounded before.
#[rustfmt::skip]
fn unary() -> Vec<Case> {
    cases! {
        "float_abs", points(), half(0.0, 1.0) => |a| a.x().abs();
        "float_neg", points(), half(0.0, 1.0) => |a| a.x().neg();
        "float_sign", points(), half(0.0, 0.0) => |a| a.x().sign();
        "float_sin", points(), half(1.0, 2.0) => |a| a.x().sin();
        "float_cos", points(), half(1.0, 2.0) => |a| a.x().cos();
        "float_atan", points(), half(1.0, 1.0) => |a| a.x().atan();
        "float_tanh", points(), half(1.0, 1.0).absolute(4.0) => |a| a.x().tanh();
        "float_round", points(), half(0.0, 0.0) => |a| a.x().round();
        "float_floor", points(), half(0.0, 0.0) => |a| a.x().floor();
        "float_ceil", points(), half(0.0, 0.0) => |a| a.x().ceil();
        "float_trunc", points(), half(0.0, 0.0) => |a| a.x().trunc();

        "float_exp", points(), full(1.0) => |a| a.x().exp();
        "float_log", points(), full(1.0) => |a| a.x().log();
        "float_log1p", points(), full(1.0) => |a| a.x().log1p();
        "float_recip", points(), full(1.0) => |a| a.x().recip();
        "float_tan", points(), full(1.0) => |a| a.x().tan();
        "float_sinh", points(), full(1.0) => |a| a.x().sinh();
        "float_cosh", points(), full(1.0) => |a| a.x().cosh();
        "float_asin", points(), full(1.0) => |a| a.x().asin();
        "float_acos", points(), full(1.0) => |a| a.x().acos();
        "float_asinh", points(), full(1.0) => |a| a.x().asinh();
        "float_acosh", points(), full(1.0) => |a| a.x().acosh();
        "float_atanh", points(), full(1.0) => |a| a.x().atanh();
        "float_erf", points(), full(1.0) => |a| a.x().erf();
        "float_sqrt", points(), half(1.0, 1.0) => |a| a.x().sqrt();

        "relu relu_backward", points(), half(0.0, 1.0) => |a| activation::relu(a.x());
        "leaky_relu", points(), half(2.0, 2.0) => |a| activation::leaky_relu(a.x(), 0.01);
        "gelu gelu_backward", points(), half(1.0, 1.0) => |a| activation::gelu(a.x());
        "sigmoid sigmoid_backward", points(), half(1.0, 1.0).absolute(2.0) => |a| activation::sigmoid(a.x());
        "hard_sigmoid", points(), half(1.0, 1.0) => |a| activation::hard_sigmoid(a.x(), 0.2, 0.5);
        "log_sigmoid log_sigmoid_backward", points(), full(1.0) => |a| activation::log_sigmoid(a.x());
    }
}

#[rustfmt::skip]
fn powers() -> Vec<Case> {
    cases! {
        "float_powi_scalar:square", points(), full(1.0) => |a| a.x().square();
        "float_powi_scalar:0", points(), full(1.0) => |a| a.x().powi_scalar(0) * a.x();
        "float_powi_scalar:1", points(), full(1.0) => |a| a.x().powi_scalar(1);
        "float_powi_scalar:3", points(), full(1.0) => |a| a.x().powi_scalar(3);
        "float_powi_scalar:-1", points(), full(1.0) => |a| a.x().powi_scalar(-1);
        "float_powi_scalar:-2", points(), full(1.0) => |a| a.x().powi_scalar(-2);
        "float_powi_scalar:-3", points(), full(1.0) => |a| a.x().powi_scalar(-3);
        "float_powi_scalar_impl", points(), full(1.0) => |a| raw(a.x(), |x| B::float_powi_scalar_impl(x, 3.into()));
        "float_powf_scalar:2", points(), full(1.0) => |a| a.x().powf_scalar(2.0);
        "float_powf_scalar:1.5", points(), full(1.0) => |a| a.x().powf_scalar(1.5);
        "float_powf_scalar:0.5", points(), full(1.0) => |a| a.x().powf_scalar(0.5);
        "float_powf_scalar:-0.5", points(), full(1.0) => |a| a.x().powf_scalar(-0.5);
        "float_powf_scalar_impl", points(), full(1.0) => |a| raw(a.x(), |x| B::float_powf_scalar_impl(x, 2.5.into()));
        "float_powf", pairs(), full(1.0) => |a| a.x().powf(a.y());
        "float_powf:fp32 exponent", pairs().fp32(), full(1.0) => |a| a.x().powf(a.y());
        "float_powi", points(), full(1.0) => |a| {
            let exponents = a.x().zeros_like().int().add_scalar(3);
            raw(a.x(), |x| B::float_powi(x, exponents.into_primitive()))
        };
    }
}

#[rustfmt::skip]
fn scalar() -> Vec<Case> {
    cases! {
        "float_add_scalar", points(), half(1.0, 1.0) => |a| a.x().add_scalar(1.5);
        "float_sub_scalar", points(), half(1.0, 1.0) => |a| a.x().sub_scalar(1.5);
        "float_mul_scalar", points(), half(1.0, 1.0) => |a| a.x().mul_scalar(-3.0);
        // The reciprocal of the divisor is rounded, and then its product.
        "float_div_scalar", points(), half(1.0, 2.0) => |a| a.x().div_scalar(3.0);
        "float_remainder_scalar", points(), half(1.0, 1.0) => |a| a.x().remainder_scalar(0.75);
        "float_clamp", points(), half(0.0, 1.0) => |a| a.x().clamp(-1.25, 2.5);
        "float_clamp_min", points(), half(0.0, 1.0) => |a| a.x().clamp_min(-1.25);
        "float_clamp_max", points(), half(0.0, 1.0) => |a| a.x().clamp_max(2.5);
        "float_mask_fill", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.mask(a.x().dims()), 2.5);
    }
}

#[rustfmt::skip]
fn binary() -> Vec<Case> {
    cases! {
        "float_add", pairs(), half(1.0, 1.0) => |a| a.x() + a.y();
        "float_sub", pairs(), half(1.0, 1.0) => |a| a.x() - a.y();
        "float_mul", pairs(), half(1.0, 1.0) => |a| a.x() * a.y();
        "float_div", pairs(), half(1.0, 1.0) => |a| a.x() / a.y();
        "float_remainder", pairs(), full(1.0) => |a| a.x().remainder(a.y());
        "float_atan2", pairs(), half(1.0, 1.0) => |a| a.x().atan2(a.y());
        "float_mask_where", pairs(), half(0.0, 1.0) => |a| a.x().mask_where(a.mask(a.x().dims()), a.y());
        ":max_pair", pairs(), half(0.0, 1.0) => |a| a.x().max_pair(a.y());
        ":min_pair", pairs(), half(0.0, 1.0) => |a| a.x().min_pair(a.y());

        "float_add:fp32", pairs().fp32(), full(1.0) => |a| a.x() + a.y();
        "float_sub:fp32", pairs().fp32(), full(1.0) => |a| a.y() - a.x();
        "float_mul:fp32", pairs().fp32(), full(1.0) => |a| a.x() * a.y();
        "float_div:fp32 divisor", pairs().fp32(), full(1.0) => |a| a.x() / a.y();
        "float_div:fp32 dividend", pairs().fp32(), full(1.0) => |a| a.y() / a.x();
        "float_remainder:fp32", pairs().fp32(), full(1.0) => |a| a.x().remainder(a.y());
        "float_atan2:fp32", pairs().fp32(), full(1.0) => |a| a.x().atan2(a.y());
        "float_mask_where:fp32", pairs().fp32(), full(1.0) => |a| a.x().mask_where(a.mask(a.x().dims()), a.y());
    }
}

/// Comparisons, which decide where another operation applies.
#[rustfmt::skip]
fn comparisons() -> Vec<Case> {
    cases! {
        "float_equal", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().equal(a.y()), 0);
        "float_not_equal", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().not_equal(a.y()), 0);
        "float_greater", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater(a.y()), 0);
        "float_greater_equal", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater_equal(a.y()), 0);
        "float_lower", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().lower(a.y()), 0);
        "float_lower_equal", pairs(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().lower_equal(a.y()), 0);
        "float_greater:fp32", pairs().fp32(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater(a.y()), 0);
        "float_equal_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().equal_elem(1.5), 0);
        "float_not_equal_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().not_equal_elem(1.5), 0);
        "float_greater_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater_elem(1.5), 0);
        "float_greater_equal_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater_equal_elem(1.5), 0);
        "float_lower_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().lower_elem(1.5), 0);
        "float_lower_equal_elem", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().lower_equal_elem(1.5), 0);
        // A threshold below half's range still separates its neighbours.
        "float_greater_elem:tiny", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().greater_elem(1e-9), 0);
        "float_lower_elem:huge", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().lower_elem(-1e9), 0);
        "float_is_nan", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().is_nan(), 0);
        "float_is_inf", points(), half(0.0, 1.0) => |a| a.x().mask_fill(a.x().is_inf(), 0);
        "float_into_int int_into_float", points().only_fp32(), full(1.0) => |a| a.x() * a.x().clamp(-99, 99).int().float();
        "bool_into_float", points().only_fp32(), half(0.0, 1.0) => |a| a.x() * a.mask(a.x().dims()).float();
    }
}

/// Operations that Burn and its users compose, without rows of their own. Not `fmod`, which Burn
/// composes with a quotient: in half the quotient overflows and rounds up to integers.
#[rustfmt::skip]
fn composed() -> Vec<Case> {
    cases! {
        ":hypot", pairs(), half(1.0, 1.0) => |a| (a.x().square() + a.y().square()).sqrt().cast(a.x().dtype());
        ":1/sqrt", points(), full(3.0).rounded(1.0) => |a| a.x().sqrt().recip();
        ":softplus", points(), full(1.0) => |a| activation::softplus(a.x(), 1.0);
        ":mish", points(), full(2.0).absolute(1.0) => |a| activation::mish(a.x());
        ":elu", points(), full(1.0) => |a| activation::elu(a.x(), 0.5);
        ":celu", points(), full(2.0) => |a| activation::celu(a.x(), 0.5);
        ":selu", points(), full(3.0).rounded(2.0) => |a| activation::selu(a.x());
        ":gelu, approximate", points(), full(2.0).absolute(1.0) => |a| activation::gelu_approximate(a.x());
        ":softsign", points(), half(2.0, 4.0).absolute(2.0) => |a| activation::softsign(a.x());
        ":hard_swish", points(), half(2.0, 4.0) => |a| activation::hard_swish(a.x());
        ":thresholded_relu", points(), half(0.0, 1.0) => |a| activation::thresholded_relu(a.x(), 1.5);
        ":hard_shrink", points(), half(0.0, 1.0) => |a| activation::hard_shrink(a.x(), 1.5);
        ":soft_shrink", points(), half(1.0, 1.0) => |a| activation::soft_shrink(a.x(), 1.5);
    }
}

#[test]
fn unary_operations() {
    check(&unary());
}

#[test]
fn powers_in_all_forms() {
    check(&powers());
}

#[test]
fn operations_with_a_scalar() {
    check(&scalar());
}

#[test]
fn binary_operations() {
    check(&binary());
}

#[test]
fn comparisons_and_conversions() {
    check(&comparisons());
}

#[test]
fn composed_operations() {
    check(&composed());
}

/// The points that break half are not among those left out.
#[test]
fn the_traps_are_checked() {
    let traps: [(&str, Precision, &[f64]); 12] = [
        ("float_div", Precision::F16, &[1.0, 300.0]),
        ("float_div", Precision::F16, &[6e4, 300.0]),
        ("float_div", Precision::F16, &[1e-4, 2e-4]),
        ("float_div", Precision::Bf16, &[300.0, 1e4]),
        ("float_powi_scalar:square", Precision::F16, &[256.0]),
        ("float_powi_scalar:square", Precision::F16, &[-300.0]),
        ("gelu gelu_backward", Precision::F16, &[45.0]),
        ("gelu gelu_backward", Precision::F16, &[-45.0]),
        ("float_sqrt", Precision::F16, &[65504.0]),
        ("float_sqrt", Precision::Bf16, &[1.3e-38]),
        ("float_recip", Precision::F16, &[300.0]),
        ("float_exp", Precision::Bf16, &[45.0]),
    ];
    let cases = cases();
    for (name, precision, point) in traps {
        let case = cases.iter().find(|case| case.rows == name).expect(name);
        let point = rounded(point, half_of(precision));
        let points = checked_points(case, precision);
        assert!(
            points.contains(&point),
            "{name} in {precision} at {point:?}"
        );
    }
}

/// The check is worth having: it fails for plain Burn in f16.
#[test]
fn plain_half_fails_the_same_check() {
    let broken = cases! {
        ":quotient", pairs(), half(1.0, 1.0) => |a| a.x() / a.y();
        ":square", points(), half(1.0, 1.0) => |a| a.x().square();
        ":sqrt", points(), half(1.0, 1.0) => |a| a.x().sqrt();
    };
    for case in broken {
        let wrong = check_plain_f16(&case);
        assert!(!wrong.is_empty(), "plain f16 got {} right", case.rows);
    }
}
