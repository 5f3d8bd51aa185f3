//! Reductions in the form that Burn's fusion makes one kernel of.

use super::*;
use crate::call::{max_dim, sum_dim};
use crate::device::is_fused;

/// Whether a reduction of a tensor may be a [`fused_reduction`]: on a device that fuses, and not for an empty
/// one. In Burn's shapes for a view, a 0 is the dimension of the tensor.
pub(super) fn reduces_fused<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.shape().num_elements() > 0 && is_fused::<B>(&tensor.device())
}

/// The sum over all rows, in FP32, of what `summand` makes of the tensors, each with its rows in one
/// dimension. The result has this shape.
pub(super) fn fused_row_sum<B: Backend, const N: usize>(
    tensors: [&AmpTensor<B>; N],
    summand: impl FnOnce([AmpTensor<B>; N]) -> AmpTensor<B>,
    shape: Shape,
) -> AmpTensor<B> {
    let (of, rank) = (tensors[0].shape(), tensors[0].rank());
    let features = of[rank - 1];
    let mut view = vec![1; rank + 1];
    view[rank - 1] = of.num_elements() / features;
    view[rank] = features;
    let sum = |views| sum_dim(widened(summand(views)), rank - 1);
    fused_reduction(tensors, view, sum, shape)
}

/// The largest values along a dimension, in FP32.
pub(super) fn fused_max_dim<B: Backend>(tensor: &AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    let mut shape = tensor.shape().to_vec();
    let mut view = shape.clone();
    view.insert(dim, 1);
    shape[dim] = 1;
    let largest = |[view]: [_; 1]| max_dim(widened(view), dim + 1);
    fused_reduction([tensor], view, largest, shape.into())
}

/// A reduction of views of the tensors. Fusion makes one kernel of the views, the operations of `reduce`
/// and the reduction at its end, since
///
/// - the views are not of a lower rank than the tensors, and
/// - an operation follows the reduction: Burn 0.21 counts its result as a tensor that is written, so that a
///   kernel without the reduction would be worth as much, and be chosen.
fn fused_reduction<B: Backend, const N: usize>(
    tensors: [&AmpTensor<B>; N],
    view: Vec<usize>,
    reduce: impl FnOnce([AmpTensor<B>; N]) -> AmpTensor<B>,
    shape: Shape,
) -> AmpTensor<B> {
    let view = Shape::from(view);
    let views = tensors.map(|t| t.moved(|t| B::float_reshape(t, view.clone())));
    reshape(mul_scalar(reduce(views), 1), shape)
}
