//! Reductions in the form that Burn's fusion makes one kernel of, with views and operations before them. That takes
//! two things:
//!
//! - No view is of a lower rank than its tensor: such a view would be an operation by itself, and so would be those
//!   behind it.
//! - An operation follows the reduction. Burn 0.21 counts the reduction's result as a tensor that is written: a kernel
//!   without the reduction would be worth as much, and be chosen.

use super::*;
use crate::call::{max_dim, sum_dim};
use crate::device::is_fused;
use crate::precision::seed_of_pass;

/// Whether a reduction of [`views`] of a tensor may be one kernel: on a device that fuses, and not for an empty
/// tensor. In Burn's shapes for a view, a 0 is the dimension of the tensor.
pub(super) fn reduces_fused<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.shape().num_elements() > 0 && is_fused::<B>(&tensor.device())
}

/// The sum over all rows, in FP32, of what `summand` makes of the tensors, each with its rows in one
/// dimension. The result has this shape.
///
/// The same kernel divides the sum by the pass's loss scale, if the scale is a power of two. For a leaf's gradient
/// that is the whole division; any other reader sees the scaled sum.
pub(super) fn fused_row_sum<B: Backend, const N: usize>(
    tensors: [&AmpTensor<B>; N],
    summand: impl FnOnce([AmpTensor<B>; N]) -> AmpTensor<B>,
    shape: Shape,
) -> AmpTensor<B> {
    let (of, rank) = (tensors[0].shape(), tensors[0].rank());
    // A matrix has its rows in one dimension.
    let (matrices, dim) = if rank == 2 {
        (tensors.map(AmpTensor::unshared), 0)
    } else {
        let features = of[rank - 1];
        let mut view = vec![1; rank + 1];
        view[rank - 1] = of.num_elements() / features;
        view[rank] = features;
        (views(tensors, view), rank - 1)
    };
    let sum = sum_dim(widened(summand(matrices)), dim);
    // By a power of two, the division and the product that undoes it round nothing, and neither overflows.
    let is_power_of_two = |scale: &f32| {
        *scale >= 1.0 && scale.to_bits().trailing_zeros() >= 23 && (1.0 / scale).is_normal()
    };
    let scale = seed_of_pass().filter(is_power_of_two).unwrap_or(1.0);
    let sum = mul_scalar(sum, 1.0 / scale).moved(|sum| B::float_reshape(sum, shape));
    match scale {
        1.0 => sum,
        scale => sum.divided_later(1.0 / scale),
    }
}

/// The largest values along a dimension, in FP32.
pub(super) fn fused_max_dim<B: Backend>(tensor: &AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    let mut shape = tensor.shape().to_vec();
    let mut view = shape.clone();
    view.insert(dim, 1);
    shape[dim] = 1;
    let [view] = views([tensor], view);
    let largest = max_dim(widened(view), dim + 1);
    reshape(mul_scalar(largest, 1), shape.into())
}

/// Each tensor in the shape `view`. What is deferred stays so.
fn views<B: Backend, const N: usize>(
    tensors: [&AmpTensor<B>; N],
    view: Vec<usize>,
) -> [AmpTensor<B>; N] {
    let view = Shape::from(view);
    tensors.map(|t| t.moved(|t| B::float_reshape(t, view.clone())))
}
