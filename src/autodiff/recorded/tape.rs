//! A step on Burn's tape.

use std::any::TypeId;
use std::fmt::Debug;
use std::marker::PhantomData;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::diagnostics::anomaly;
use crate::tensor::{Checkpoint, Step};
use crate::{Amp, AmpTensor};

/// A tensor on the tape. Its type is the same for all checkpointing strategies.
pub(in crate::autodiff) type TapeTensor<B> = FloatTensor<Autodiff<Amp<B>>>;

/// Records a step, unless it leaves its record to Burn with the checkpointing strategy `C`.
pub(in crate::autodiff) fn record<B, C, K, const N: usize>(
    step: K,
    operands: [TapeTensor<B>; N],
) -> Result<TapeTensor<B>, [TapeTensor<B>; N]>
where
    B: Backend,
    C: CheckpointStrategy,
    K: Step<B, N>,
{
    if K::CHECKPOINT == Checkpoint::Burns && recomputes::<C>() {
        return Err(operands);
    }
    Ok(record_with::<B, C, K, N>(step, operands, K::keep))
}

/// As [`record`], with what `keep` computes in the place of [`Step::keep`].
pub(super) fn record_with<B, C, K, const N: usize>(
    step: K,
    operands: [TapeTensor<B>; N],
    keep: impl FnOnce(&K, [AmpTensor<B>; N], [bool; N]) -> (K::Kept, AmpTensor<B>),
) -> TapeTensor<B>
where
    B: Backend,
    C: CheckpointStrategy,
    K: Step<B, N>,
{
    let nodes = operands.each_ref().map(|operand| operand.node.clone());
    let tracked = operands.each_ref().map(|operand| operand.is_tracked());
    // Another thread's backward pass frees nodes that nothing holds.
    let _held = operands.each_ref().map(|operand| operand.rc.clone());
    let on_tape = OnTape {
        step: step.clone(),
        operands: nodes.each_ref().map(|node| node.id),
        op: anomaly::recorded_op(),
        backend: PhantomData::<fn() -> B>,
    };
    let prep = on_tape
        .clone()
        .prepare::<C>(nodes)
        .memory_bound()
        .retro_forward(on_tape)
        .parents(&operands)
        .stateful();
    match prep {
        OpsKind::Tracked(mut prep)
            if K::CHECKPOINT == Checkpoint::Operands && recomputes::<C>() =>
        {
            for operand in &operands {
                prep.checkpoint(operand);
            }
            prep.finish(
                None,
                step.forward(operands.map(|operand| operand.primitive)),
            )
        }
        OpsKind::Tracked(prep) => {
            let operands = operands.map(|operand| operand.primitive);
            let (kept, out) = keep(&step, operands, tracked);
            prep.finish(Some(kept), out)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(step.forward(operands.map(|operand| operand.primitive)))
        }
    }
}

/// Whether the checkpointing strategy recomputes what it can.
fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() != TypeId::of::<NoCheckpointing>()
}

/// A step, with the nodes of its operands and, for anomaly detection, the operation that it records.
#[derive(Debug, Clone)]
struct OnTape<B, K, const N: usize> {
    step: K,
    operands: [NodeId; N],
    op: Option<&'static str>,
    backend: PhantomData<fn() -> B>,
}

impl<B: Backend, K: Step<B, N>, const N: usize> Backward<Amp<B>, N> for OnTape<B, K, N> {
    type State = Option<K::Kept>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let kept = ops.state.unwrap_or_else(|| {
            let operand = |node| checkpointer.retrieve_node_output(node);
            self.step.retrieve(self.operands.map(operand))
        });
        anomaly::in_step_of(self.op, || {
            self.step
                .backward(Ops::new(ops.parents, ops.node, kept), grads);
        });
    }
}

impl<B: Backend, K: Step<B, N>, const N: usize> RetroForward for OnTape<B, K, N> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let operands = self
            .operands
            .map(|node| states.get_state::<AmpTensor<B>>(&node));
        states.save(out_node, self.step.forward(operands));
    }
}
