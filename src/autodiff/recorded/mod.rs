//! Operations that the upper layer records itself, as custom backward steps of Burn's autodiff.
//!
//! The operations run on the lower [`Amp`], whose policy keeps each formula in FP32. With gradient
//! checkpointing, an operation keeps its operands' nodes instead of tensors, and recomputes.

mod arithmetic;
mod cast;
mod dropout;
mod layer_norm;
mod linear;
mod quotient;
mod reduction;
mod relu;
mod sigmoidal;
mod softmax;
mod square;
mod sum;

use std::any::{TypeId, type_name};
use std::fmt::{self, Debug};
use std::marker::PhantomData;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, binary, unary};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata};

use super::leaves::{self, LeafInfo};
use super::tape::{Arithmetic, Reduction, Sigmoidal, Sign, Softmax, TapeExtension, WeakNode};
use crate::device;
use crate::diagnostics::anomaly;
use crate::policy::is_half;
use crate::tensor::TensorFlags;
use crate::{Amp, AmpTensor};
use cast::{cast, fused_max_dim, fused_row_sum, operand_grad, reduces_fused, rows, widened};
pub(crate) use softmax::masked_softmax;
use sum::reduced;

/// The tape of `Autodiff<Amp<B>, C>`.
pub(super) struct Recorded<B, C>(pub(super) PhantomData<fn() -> (B, C)>);

/// A tensor on the tape. Its type is the same for all checkpointing strategies.
pub(super) type TapeTensor<B> = FloatTensor<Autodiff<Amp<B>>>;

impl<B: Backend, C: CheckpointStrategy> TapeExtension<Autodiff<Amp<B>, C>> for Recorded<B, C> {
    fn is_tracked(&self, tensor: &TapeTensor<B>) -> bool {
        tensor.is_tracked()
    }

    fn cast(&self, tensor: TapeTensor<B>, dtype: DType) -> TapeTensor<B> {
        Self::record_cast(tensor, dtype)
    }

    fn cast_ahead(&self, leaf: &TapeTensor<B>, half: DType) {
        leaf.primitive.cast_ahead(half);
    }

    fn half_leaf(
        &self,
        leaf: &TapeTensor<B>,
        flags: TensorFlags,
        dtype: DType,
    ) -> Option<TapeTensor<B>> {
        #[cfg(feature = "distributed")]
        if leaf.node.distributed_params.is_some() {
            return None;
        }
        let copy = TapeTensor::<B>::new(cast(leaf.primitive.clone(), dtype)).require_grad();
        let info = LeafInfo {
            dtype: leaf.dtype(),
            flags,
            copy_of: Some(leaf.node.id.value),
        };
        leaves::add(WeakNode::of(&copy), info);
        Some(copy)
    }

    fn alias_of_half_leaf(&self, half_leaf: TapeTensor<B>, leaf: &TapeTensor<B>) -> TapeTensor<B> {
        let alias = Self::record_alias(half_leaf);
        let info = LeafInfo {
            copy_of: Some(leaf.node.id.value),
            ..LeafInfo::of(&leaf.primitive)
        };
        leaves::add(WeakNode::of(&alias), info);
        alias
    }

    fn arithmetic(
        &self,
        op: Arithmetic,
        operands: [TapeTensor<B>; 2],
        kept: [DType; 2],
        kept_quotient: Option<DType>,
    ) -> Option<TapeTensor<B>> {
        (!recomputes::<C>()).then(|| Self::record_arithmetic(op, operands, kept, kept_quotient))
    }

    fn reduction(
        &self,
        kind: Reduction,
        tensor: TapeTensor<B>,
        dim: Option<usize>,
    ) -> Option<TapeTensor<B>> {
        (!recomputes::<C>()).then(|| Self::record_reduction(kind, tensor, dim))
    }

    fn half_quotient(&self, operands: [TapeTensor<B>; 2]) -> TapeTensor<B> {
        Self::record_half_quotient(operands)
    }

    fn sum(&self, sign: Sign, operands: [TapeTensor<B>; 2]) -> TapeTensor<B> {
        Self::record_sum(sign, operands)
    }

    fn square(&self, tensor: TapeTensor<B>, kept: DType) -> Option<TapeTensor<B>> {
        (!recomputes::<C>()).then(|| Self::record_square(tensor, kept))
    }

    fn dropout(&self, tensor: &TapeTensor<B>, noise: &TapeTensor<B>) -> Option<TapeTensor<B>> {
        Self::record_dropout(tensor, noise)
    }

    fn relu(&self, tensor: TapeTensor<B>) -> TapeTensor<B> {
        Self::record_relu(tensor)
    }

    fn sigmoidal(&self, kind: Sigmoidal, tensor: TapeTensor<B>) -> TapeTensor<B> {
        Self::record_sigmoidal(kind, tensor)
    }

    fn softmax(
        &self,
        kind: Softmax,
        tensor: TapeTensor<B>,
        dim: usize,
        kept: DType,
    ) -> TapeTensor<B> {
        Self::record_softmax(kind, tensor, dim, kept)
    }

    fn linear(
        &self,
        x: &TapeTensor<B>,
        weight: &TapeTensor<B>,
        bias: Option<&TapeTensor<B>>,
    ) -> Option<TapeTensor<B>> {
        let records = device::is_fused::<B>(&x.primitive.device()) && !recomputes::<C>();
        records.then(|| Self::record_linear(x, weight, bias))
    }

    fn layer_norm(
        &self,
        tensor: TapeTensor<B>,
        gamma: TapeTensor<B>,
        epsilon: f64,
        kept: DType,
    ) -> TapeTensor<B> {
        Self::record_layer_norm([tensor, gamma], epsilon, kept)
    }
}

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    /// Records an operation with `N` operands.
    ///
    /// - `forward` computes the result, also when gradient checkpointing recomputes it.
    /// - `keep` computes the result and the state of `backward`, if a gradient flows to an operand.
    /// - `retrieve` computes that state from the operands. Gradient checkpointing then keeps the
    ///   operands' nodes instead of the state. Without `retrieve`, it keeps the state.
    /// - `backward` registers the gradients of the operands.
    fn record<T: Clone + Debug + Send + 'static, const N: usize>(
        operands: [TapeTensor<B>; N],
        forward: impl Fn([AmpTensor<B>; N]) -> AmpTensor<B> + Clone + Send + 'static,
        keep: impl FnOnce([AmpTensor<B>; N]) -> (T, AmpTensor<B>),
        retrieve: Option<impl FnOnce([AmpTensor<B>; N]) -> T + Send + 'static>,
        backward: impl FnOnce(Ops<T, N>, &mut Gradients) + Send + 'static,
    ) -> TapeTensor<B> {
        let nodes = operands.each_ref().map(|operand| operand.node.clone());
        let parents = nodes.each_ref().map(|node| node.id);
        // Another thread's backward pass frees nodes that nothing holds.
        let _held = operands.each_ref().map(|operand| operand.rc.clone());
        let retrieves = retrieve.is_some() && recomputes::<C>();
        let op = anomaly::recorded_op();
        let step = move |ops: Ops<Option<T>, N>, grads: &mut _, states: &mut Checkpointer| {
            let kept = ops.state.unwrap_or_else(|| {
                let retrieve = retrieve.expect("nothing was kept");
                retrieve(parents.map(|parent| states.retrieve_node_output(parent)))
            });
            anomaly::in_step_of(op, || {
                backward(Ops::new(ops.parents, ops.node, kept), grads)
            });
        };
        let again = forward.clone();
        let recompute = move |states: &mut BackwardStates, out| {
            let operands = parents.map(|parent| states.get_state(&parent));
            states.save(out, again(operands));
        };
        let prep = Closure(step, PhantomData)
            .prepare::<C>(nodes)
            .memory_bound()
            .retro_forward(Closure(recompute, PhantomData))
            .parents(&operands)
            .stateful();
        match prep {
            OpsKind::Tracked(mut prep) if retrieves => {
                for operand in &operands {
                    prep.checkpoint(operand);
                }
                prep.finish(None, forward(operands.map(|operand| operand.primitive)))
            }
            OpsKind::Tracked(prep) => {
                let (kept, out) = keep(operands.map(|operand| operand.primitive));
                prep.finish(Some(kept), out)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(forward(operands.map(|operand| operand.primitive)))
            }
        }
    }
}

/// Whether the checkpointing strategy recomputes what it can.
fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() != TypeId::of::<NoCheckpointing>()
}

/// A closure with `Debug`, which Burn requires and no closure implements. `S` is the state of a
/// backward step.
struct Closure<F, S>(F, PhantomData<fn(S)>);

impl<B: Backend, F, S, const N: usize> Backward<Amp<B>, N> for Closure<F, S>
where
    F: FnOnce(Ops<S, N>, &mut Gradients, &mut Checkpointer) + Send + 'static,
    S: Clone + Debug + Send + 'static,
{
    type State = S;

    fn backward(self, ops: Ops<S, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        (self.0)(ops, grads, checkpointer);
    }
}

impl<F: Fn(&mut BackwardStates, NodeId) + Send + 'static> RetroForward for Closure<F, ()> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        (self.0)(states, out_node);
    }
}

impl<F, S> Debug for Closure<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(type_name::<F>())
    }
}
