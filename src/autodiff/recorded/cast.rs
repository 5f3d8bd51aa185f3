//! A cast, whose gradient is cast back, and an alias.

use super::*;
use crate::precision::{in_kernel, keep_dtypes};

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_cast(tensor: TapeTensor<B>, dtype: DType) -> TapeTensor<B> {
        let from = tensor.dtype();
        Self::record(
            [tensor],
            move |[tensor]| cast(tensor, dtype),
            |[tensor]| ((), cast(tensor, dtype)),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    let is_rounded = is_half(grad.dtype()) && grad.wide().is_none();
                    // The operations that read the gradient cast it, as the optimizer for a parameter.
                    if from == DType::F32 && is_rounded && device::is_fused::<B>(&grad.device()) {
                        grad.cast_later()
                    } else {
                        cast(grad, from)
                    }
                });
            },
        )
    }

    /// The same tensor as a node of its own, with its gradient in FP32.
    pub(super) fn record_alias(tensor: TapeTensor<B>) -> TapeTensor<B> {
        // Another thread's backward pass frees nodes that nothing holds.
        let _held = tensor.rc.clone();
        let step = |ops: Ops<(), 1>, grads: &mut _, _: &mut Checkpointer| {
            unary::<Amp<B>, _>(ops.parents, ops.node, grads, widened);
        };
        let prep = Closure(step, PhantomData).prepare::<C>([tensor.node.clone()]);
        match prep.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), tensor.primitive),
            OpsKind::UnTracked(prep) => prep.finish(tensor.primitive),
        }
    }
}

pub(super) fn cast<B: Backend>(tensor: AmpTensor<B>, dtype: DType) -> AmpTensor<B> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        // The formula's own, and not the user's.
        keep_dtypes(|| Amp::<B>::float_cast(tensor, dtype.into()))
    }
}

/// The gradient of an operand of this dtype. `formula` computes it from the gradient of the
/// result. FP32 tensors inside `formula` stay FP32.
pub(super) fn operand_grad<B: Backend>(
    grad: AmpTensor<B>,
    dtype: DType,
    formula: impl FnOnce(AmpTensor<B>) -> AmpTensor<B>,
) -> AmpTensor<B> {
    let flags = grad.flags() - TensorFlags::TERMS;
    let inside = grad.with_flags(flags - TensorFlags::BACKWARD);
    let wide = formula(inside);
    let kept = (wide.dtype() != dtype).then(|| wide.unshared().into_primitive());
    let grad = cast(wide, dtype);
    let flags = grad.flags() | flags;
    grad.with_flags(flags).with_wide(kept)
}

/// A tensor as the rows of a matrix: its leading dimensions folded into one. Keeps the FP32 values that
/// a half gradient was rounded from.
pub(super) fn rows<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    let shape = tensor.shape();
    let (leading, features) = shape.split_at(shape.num_dims() - 1);
    if leading.len() == 1 {
        return tensor;
    }
    let rows = Shape::new([leading.iter().product(), features[0]]);
    let wide = tensor
        .wide()
        .map(|wide| in_kernel(|| B::float_reshape(wide, rows.clone())));
    Amp::<B>::float_reshape(tensor, rows).with_wide(wide)
}

/// Whether a reduction of a tensor may be [`fused_reduction`]: on a device that fuses, and not for an empty
/// one. In Burn's shapes for a view, a 0 is the dimension of the tensor.
pub(super) fn reduces_fused<B: Backend>(tensor: &AmpTensor<B>) -> bool {
    tensor.shape().num_elements() > 0 && device::is_fused::<B>(&tensor.device())
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
    let sum = |views| Amp::<B>::float_sum_dim(widened(summand(views)), rank - 1);
    fused_reduction(tensors, view, sum, shape)
}

/// The largest values along a dimension, in FP32.
pub(super) fn fused_max_dim<B: Backend>(tensor: &AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    let mut shape = tensor.shape().to_vec();
    let mut view = shape.clone();
    view.insert(dim, 1);
    shape[dim] = 1;
    let largest = |[view]: [_; 1]| Amp::<B>::float_max_dim(widened(view), dim + 1);
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
    let reduced = Amp::<B>::float_mul_scalar(reduce(views), 1.into());
    Amp::<B>::float_reshape(reduced, shape)
}

/// A half tensor in FP32; any other tensor unchanged.
pub(super) fn widened<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    if is_half(tensor.dtype()) {
        cast(tensor, DType::F32)
    } else {
        tensor
    }
}
