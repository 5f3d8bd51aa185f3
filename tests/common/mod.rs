//! Shared by the tests: the backend, precisions, tolerances and comparisons.
#![allow(dead_code, unused_imports)]

use burn::tensor::Tensor;
use burn_amp::{Precision, precision_of, with_precision};
use burn_backend::{Backend, DType, DTypeUsage};

pub use shared::close::{HALVES, assert_close, relative_error, roundoff};
pub use shared::mlp;

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

/// Whether the tested backend is one of CubeCL's, which lack some backward passes.
pub const ON_CUBECL: bool = cfg!(any(feature = "cuda", feature = "wgpu"));

/// Whether the tested backend computes with WGSL, which lacks one average pooling.
pub const ON_WGSL: bool = cfg!(all(feature = "wgpu", not(feature = "vulkan")));

/// Whether operations are fused, where one backward pass and FP64 panic.
pub const FUSED: bool = ON_CUBECL && cfg!(feature = "fusion");

/// Whether the tested backend is LibTorch, for which Burn lacks some operations and computes some
/// differently.
pub const ON_LIBTORCH: bool = cfg!(feature = "tch") && !ON_CUBECL;

/// A tensor as an activation: the result of a learned layer, which changes no value. A product that sums nothing would
/// not be half.
pub fn activation<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let (shape, device) = (x.shape(), x.device());
    let column = x.reshape([shape.num_elements(), 1]);
    let nothing = Tensor::zeros(column.shape(), (&device, column.dtype()));
    let one = Tensor::<B, 2>::from_data([[1.0], [0.0]], (&device, column.dtype()));
    let rows = Tensor::cat(vec![column, nothing], 1);
    rows.matmul(one.set_require_grad(false)).reshape(shape)
}

/// The precisions that the tested backend supports.
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
