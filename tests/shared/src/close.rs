//! Compares half precision with exact values.

use burn_amp::Precision;

/// The half precisions.
pub const HALVES: [Precision; 2] = [Precision::F16, Precision::Bf16];

/// The relative error of one rounding: 2^-11 in f16, 2^-8 in bf16.
pub fn roundoff(precision: Precision) -> f64 {
    match precision {
        Precision::F16 => 2f64.powi(-11),
        Precision::Bf16 => 2f64.powi(-8),
        Precision::F32 | Precision::Auto => 2f64.powi(-24),
    }
}

/// The norm of the difference over the norm of the expected values.
pub fn relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let pairs = actual.iter().zip(expected);
    let difference = norm(&mut pairs.map(|(a, e)| f64::from(*a) - f64::from(*e)));
    let size = norm(&mut expected.iter().map(|e| f64::from(*e)));
    match difference == 0.0 {
        true => 0.0,
        false => difference / size,
    }
}

/// Asserts that every value is finite, and that together they are within `roundoffs` roundings of the
/// expected values.
#[track_caller]
pub fn assert_close(
    what: &str,
    precision: Precision,
    actual: &[f32],
    expected: &[f32],
    roundoffs: f64,
) {
    assert!(
        actual.iter().all(|v| v.is_finite()),
        "{what} in {precision}: not finite: {actual:?}"
    );
    let error = relative_error(actual, expected);
    let tolerance = roundoffs * roundoff(precision);
    assert!(
        error <= tolerance,
        "{what} in {precision}: relative error {error:.2e} above {tolerance:.2e}\n\
         actual   {actual:?}\nexpected {expected:?}"
    );
}
