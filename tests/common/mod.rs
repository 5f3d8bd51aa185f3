//! What the tests share: the backend, precisions, tolerances and comparisons.
#![allow(dead_code)]

pub mod mlp;

use burn_amp::{Precision, precision_of, with_precision};
use burn_backend::{Backend, DType, DTypeUsage};

/// The backend that the behaviour is tested on: Flex, or the one whose feature is on.
#[cfg(feature = "cuda")]
pub type Inner = burn_cuda::Cuda;
#[cfg(all(feature = "vulkan", not(feature = "cuda")))]
pub type Inner = burn_wgpu::Vulkan;
#[cfg(all(feature = "wgpu", not(any(feature = "cuda", feature = "vulkan"))))]
pub type Inner = burn_wgpu::Wgpu;
#[cfg(all(feature = "tch", not(any(feature = "cuda", feature = "wgpu"))))]
pub type Inner = burn_tch::LibTorch;
#[cfg(not(any(feature = "cuda", feature = "wgpu", feature = "tch")))]
pub type Inner = burn::backend::Flex;

/// The half precisions.
pub const HALVES: [Precision; 2] = [Precision::F16, Precision::Bf16];

/// Whether it is one of CubeCL's, which lack some backward passes.
pub const ON_CUBECL: bool = cfg!(any(feature = "cuda", feature = "wgpu"));

/// Whether it computes by WGSL, which lacks one average pooling.
pub const ON_WGSL: bool = cfg!(all(feature = "wgpu", not(feature = "vulkan")));

/// Whether operations are fused, where one backward pass and FP64 panic.
pub const FUSED: bool = ON_CUBECL && cfg!(feature = "fusion");

/// Whether it is LibTorch, for which Burn lacks some operations and does some otherwise.
pub const ON_LIBTORCH: bool = cfg!(feature = "tch") && !ON_CUBECL;

/// Those that the tested backend can do.
pub fn possible<const N: usize>(precisions: [Precision; N]) -> Vec<Precision> {
    let can = |p: &Precision| with_precision(*p, || precision_of::<Inner>(&Default::default()));
    precisions.into_iter().filter(|p| can(p).is_ok()).collect()
}

/// The half precisions of the tested backend.
pub fn halves() -> Vec<Precision> {
    possible(HALVES)
}

/// Whether the tested backend computes in a dtype.
pub fn computes_in(dtype: &DType) -> bool {
    // CubeCL's fusion panics at ones in FP64, which a backward pass begins with, in plain Burn too.
    if FUSED && *dtype == DType::F64 {
        return false;
    }
    Inner::dtype_usage(&Default::default(), *dtype).is_superset(DTypeUsage::general())
}

/// The relative error of one rounding: 2^-11 in f16, 2^-8 in bf16.
pub fn roundoff(precision: Precision) -> f64 {
    match precision {
        Precision::F16 => 2f64.powi(-11),
        Precision::Bf16 => 2f64.powi(-8),
        Precision::F32 | Precision::Auto => 2f64.powi(-24),
    }
}

/// The norm of the difference over the norm of what is expected.
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

/// Every value is finite, and together they are within `roundoffs` roundings of what is expected.
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
