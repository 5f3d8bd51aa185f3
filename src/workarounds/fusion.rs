//! Faults of Burn's fusion.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Shape, TensorMetadata};

use crate::device::is_fused;
use crate::policy::is_half;
use crate::tensor::Side;

/// A linear layer on rows. The bias is added apart from a product of one row or one column: see
/// [`row_or_column_unfused`].
///
/// Until: burn#5122 is closed.
pub(crate) fn linear_of_rows<B: Backend, S: Side<B>>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let (last, columns) = (x.rank() - 1, weight.shape()[1]);
    let mut shape = x.shape();
    shape[last] = columns;
    match bias {
        Some(bias) if is_row_or_column(&shape) && must_not_fuse::<B, S>(&x) => {
            let product = row_or_column_unfused::<B, S>(B::linear(x, weight, None));
            let mut row = vec![1; last + 1];
            row[last] = columns;
            B::float_add(product, B::float_reshape(bias, row.into()))
        }
        bias => row_or_column_unfused::<B, S>(B::linear(x, weight, bias)),
    }
}

/// A tensor kept apart from the operations on its other side by one that changes nothing and is no kernel, where
/// [`must_not_fuse`] wants it.
///
/// For the weight of a convolution: with fusion, the operations before and after a convolution wait together while any
/// of them could still be joined with a later one, and those behind it then run one by one. If the convolution depends
/// on two rows of operations that cannot be joined, everything before it runs at once, and those behind it are joined.
/// Fusion may join a weight of `[.., .., 1, 1]` with what is before: then nothing is gained.
///
/// Until: `cargo xtask bench casts` counts as many kernels of a CNN without it. No issue.
pub(crate) fn unfused<B: Backend, S: Side<B>>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match must_not_fuse::<B, S>(&tensor) {
        true => B::float_swap_dims(tensor, 0, 0),
        false => tensor,
    }
}

/// A half product of one row or one column, kept apart from what is behind it by a copy.
///
/// With fusion and autotune, Burn 0.21 multiplies a row with a transposed matrix, and a matrix with a column, by a
/// kernel for a row and a matrix (burn#5122, burn#5257): the result is wrong, in any precision. The product alone has a
/// kernel that is right. Fusion joins no concatenation. It does join the view of [`unfused`] with what is behind: a
/// decoder's gradient was then wrong in f16.
///
/// Until: burn#5122 is closed. Burn 0.22.1 has the mend, in cubek-matmul 0.3.1.
pub(crate) fn row_or_column_unfused<B: Backend, S: Side<B>>(
    product: FloatTensor<B>,
) -> FloatTensor<B> {
    let is_one = is_half(product.dtype()) && is_row_or_column(&product.shape());
    match is_one && must_not_fuse::<B, S>(&product) {
        true => B::float_cat(vec![product], 0),
        false => product,
    }
}

fn is_row_or_column(product: &Shape) -> bool {
    product.iter().rev().take(2).any(|&length| length == 1)
}

/// Whether tensors like this one are kept apart: in half, with fusion, below autodiff.
fn must_not_fuse<B: Backend, S: Side<B>>(tensor: &FloatTensor<B>) -> bool {
    is_half(tensor.dtype()) && !S::RECORDS && is_fused::<B>(&B::float_device(tensor))
}
