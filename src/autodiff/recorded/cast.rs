//! A cast, whose gradient is cast back, and an alias.

use super::*;
use crate::precision::in_kernel;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_cast(tensor: TapeTensor<B>, dtype: DType) -> TapeTensor<B> {
        let from = tensor.dtype();
        // The optimizer reads the gradient of a parameter.
        let is_parameter =
            from == DType::F32 && Autodiff::<Amp<B>, C>::float_is_require_grad(&tensor);
        Self::record(
            [tensor],
            move |[tensor]| cast(tensor, dtype),
            |[tensor]| ((), cast(tensor, dtype)),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    let is_rounded = is_half(grad.dtype()) && grad.wide().is_none();
                    if is_parameter && is_rounded && device::is_fused::<B>(&grad.device()) {
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
        Amp::<B>::float_cast(tensor, dtype.into())
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
    let features = shape[shape.num_dims() - 1];
    if shape.num_dims() == 2 {
        return tensor;
    }
    let rows = Shape::new([shape.num_elements() / features.max(1), features]);
    let wide = tensor
        .wide()
        .map(|wide| in_kernel(|| B::float_reshape(wide, rows.clone())));
    Amp::<B>::float_reshape(tensor, rows).with_wide(wide)
}

/// Whether [`fused_row_sum`] serves a gradient: on a device that fuses, and not for an empty one. In Burn's
/// shapes for a view, a 0 is the dimension of the tensor.
pub(super) fn sums_fused<B: Backend>(grad: &AmpTensor<B>) -> bool {
    grad.shape().num_elements() > 0 && device::is_fused::<B>(&grad.device())
}

/// The sum over all rows, in FP32, of what `summand` makes of the tensors, each with its rows in one
/// dimension. Fusion makes one kernel of the views, the operations of `summand` and the sum, since
///
/// - the views are not of a lower rank than the tensors, and
/// - an operation follows the sum: Burn 0.21 counts the sum as a tensor that is written, so that a
///   kernel without the sum would be worth as much, and be chosen.
pub(super) fn fused_row_sum<B: Backend, const N: usize>(
    tensors: [&AmpTensor<B>; N],
    summand: impl FnOnce([AmpTensor<B>; N]) -> AmpTensor<B>,
) -> AmpTensor<B> {
    let (shape, rank) = (tensors[0].shape(), tensors[0].rank());
    let features = shape[rank - 1];
    let mut view = vec![1; rank + 1];
    view[rank - 1] = shape.num_elements() / features;
    view[rank] = features;
    let view = Shape::from(view);
    let views = tensors.map(|t| Amp::<B>::float_reshape(t.unshared(), view.clone()));
    let sum = Amp::<B>::float_sum_dim(widened(summand(views)), rank - 1);
    let sum = Amp::<B>::float_mul_scalar(sum, 1.into());
    Amp::<B>::float_reshape(sum, Shape::new([features]))
}

/// A half tensor in FP32; any other tensor unchanged.
pub(super) fn widened<B: Backend>(tensor: AmpTensor<B>) -> AmpTensor<B> {
    if is_half(tensor.dtype()) {
        cast(tensor, DType::F32)
    } else {
        tensor
    }
}
