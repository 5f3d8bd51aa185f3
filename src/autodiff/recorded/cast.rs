//! A cast, whose gradient is cast back, and an alias.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::{Backward, OpsKind};

use super::tape::TapeTensor;
use super::*;
use crate::device;

/// A cast to this dtype.
#[derive(Debug, Clone)]
pub(in crate::autodiff) struct Cast(pub DType);

impl<B: Backend> Step<B, 1> for Cast {
    /// The dtype of the operand.
    type Kept = DType;

    const CHECKPOINT: Checkpoint = Checkpoint::Kept;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        cast(tensor, self.0)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        (tensor.dtype(), cast(tensor, self.0))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let from = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            let is_widened = from == DType::F32 && is_half(grad.dtype());
            if is_widened && grad.wide().is_some() {
                // The FP32 gradient may be rounded again, for the other operand of a sum.
                let wide = cast(grad.clone(), from);
                wide.set_copy(&grad);
                wide
            } else if is_widened && device::is_fused::<B>(&grad.device()) {
                // The operations that read the gradient cast it, as the optimizer for a parameter.
                grad.cast_later()
            } else {
                cast(grad, from)
            }
        });
    }
}

/// The same tensor as a node of its own, with its gradient in FP32.
pub(in crate::autodiff) fn alias<B: Backend, C: CheckpointStrategy>(
    tensor: TapeTensor<B>,
) -> TapeTensor<B> {
    #[derive(Debug, Clone)]
    struct Alias;

    impl<B: Backend> Backward<Amp<B>, 1> for Alias {
        type State = ();

        fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            unary::<Amp<B>, _>(ops.parents, ops.node, grads, widened);
        }
    }

    // Another thread's backward pass frees nodes that nothing holds.
    let _held = tensor.rc.clone();
    let prep = Backward::<Amp<B>, 1>::prepare::<C>(Alias, [tensor.node.clone()]);
    match prep.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), tensor.primitive),
        OpsKind::UnTracked(prep) => prep.finish(tensor.primitive),
    }
}

/// The gradient of an operand of this dtype. `formula` computes it from the gradient of the
/// result. FP32 tensors inside `formula` stay FP32.
pub(super) fn operand_grad<B: Backend>(
    grad: AmpTensor<B>,
    dtype: DType,
    formula: impl FnOnce(AmpTensor<B>) -> AmpTensor<B>,
) -> AmpTensor<B> {
    let flags = grad.flags();
    let inside = grad.with_flags(flags - TensorFlags::BACKWARD).with_terms(1);
    let wide = formula(inside);
    let kept = (wide.dtype() != dtype).then(|| wide.unshared().into_primitive());
    let grad = cast(wide, dtype);
    let flags = grad.flags() | flags;
    grad.with_flags(flags).with_wide(kept)
}
