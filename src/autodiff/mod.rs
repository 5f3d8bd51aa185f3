//! The gradient pass: the loss is scaled, the gradients are unscaled to FP32 and checked.
//!
//! Each gradient is unscaled and checked by itself. In one flat buffer, as fastai's `flat_master`
//! does it, 400 gradients of together 463,360 elements take 0.56 of the time on a CPU (0.65 against
//! 1.15 ms; `cargo xtask bench flat`, Flex, 2 cores, 2026-11-21). It is not done: the gradients
//! would be views that hold the whole buffer and that an optimizer cannot reuse, and a skipped step
//! could not tell which of them overflowed.

mod gradients;
pub(crate) mod leaves;
mod recorded;
pub(crate) mod replicas;
pub(crate) mod tape;

use std::collections::HashMap;
use std::sync::Arc;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_backend::backend::AutodiffBackend;
#[cfg(feature = "distributed")]
use burn_backend::distributed::{DistributedParamId, DistributedParams};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, DType, TensorMetadata};

pub use gradients::AmpGradients;
use replicas::{Replicas, Vote};

use crate::anomaly::in_backward;
use crate::finite::FiniteCheck;
use crate::policy::Mode;
use crate::precision::following;
use crate::scaler::{self, InForce, NonFinite, Outcome};
use crate::tensor::{Marks, at_least_f32, is_half};
use crate::{Amp, AmpTensor, GradScaler, anomaly, device};

/// What Burn's autodiff asks of the backend that it trains on.
#[cfg(not(feature = "distributed"))]
pub(crate) use burn_backend::Backend as Trained;
#[cfg(feature = "distributed")]
pub(crate) use burn_backend::distributed::DistributedBackend as Trained;

/// The backend to train on: automatic mixed precision, in the forward and in the backward pass.
///
/// In the place of `Autodiff<B, C>`, on the devices of `B`. FP32 parameters stay FP32 and get FP32
/// gradients: the master weights of Micikevicius et al., "Mixed Precision Training" (2018).
///
/// [`Amp`] stands on both sides of Burn's autodiff. The upper one decides each operation's
/// precision, so that its casts are on the tape; the lower one keeps the formulas of the backward
/// pass from leaving the half range.
///
/// `C` is Burn's checkpointing strategy, as in `Autodiff<B, C>`.
pub type AmpAutodiff<B, C = NoCheckpointing> = Amp<Autodiff<Amp<B>, C>>;

/// The tape below the upper layer.
type Tape<B, C> = Autodiff<Amp<B>, C>;

impl<B: Trained, C: CheckpointStrategy> AutodiffBackend for AmpAutodiff<B, C> {
    type InnerBackend = Amp<B>;
    type Gradients = AmpGradients<B>;

    /// The backward pass of a loss of any shape and float dtype: the gradients of its sum.
    ///
    /// Where f16 is in force or was where the loss was computed, and loss scaling is not disabled,
    /// the loss is scaled before and the gradients are unscaled after, in FP32 or wider; if one of
    /// them, or the loss, is not finite there are no gradients, the loss scaler in force is told,
    /// and the optimizer step that follows changes nothing. That costs one read-back from the
    /// device, and after an overflow a second one. In bf16 and FP32 this is autodiff's own backward
    /// pass.
    ///
    /// # Panics
    ///
    /// - As `Autodiff`, for a loss that no tape knows.
    /// - When a region asks for a precision that the loss's device cannot do.
    /// - Where the loss is scaled, when the check cannot be read back synchronously, as on
    ///   WebAssembly.
    /// - With the feature `distributed`, on every replica, when their losses are not scaled alike.
    fn backward(loss: FloatTensor<Self>) -> AmpGradients<B> {
        let device = loss.device();
        let f16 = loss.marks().contains(Marks::FROM_F16)
            || device::mode::<Tape<B, C>>(&device) == Mode::On(DType::F16);
        // An untracked loss is autodiff's to refuse, which it would not if it were scaled first.
        let tracked = !loss.primitive.node.requirement.is_none();
        let scaler = scaler::in_force::<B>(&device, tracked && f16)
            .filter(|scaler| scaler.handle().state().is_enabled());
        match scaler {
            None => {
                let (tape, replicas) = tape_of::<B, C>(loss.into_primitive());
                if let Some(replicas) = replicas {
                    replicas.agree(Vote::scaled(None));
                }
                AmpGradients::of_tape(tape)
            }
            #[cfg(feature = "train")]
            Some(InForce::Explicit(scaler)) => {
                let value = Self::inner(loss.clone());
                let scale = scaler.scales::<Amp<B>>(&device, value);
                let (grads, replicas) = scaled_backward::<B, C>(loss, scale, |_, _| {});
                scaler.gathers(replicas, scale);
                AmpGradients::unscaled(grads)
            }
            Some(InForce::Implicit(scaler)) => checked_backward::<B, C>(loss, &scaler),
        }
    }

    /// The gradient of a tensor that requires one, in its shape and dtype and without the scale;
    /// none after an overflow.
    fn grad(tensor: &FloatTensor<Self>, grads: &AmpGradients<B>) -> Option<AmpTensor<B>> {
        let id = node_id::<B, C>(&tensor.primitive);
        grads.ready.get(&id).cloned().or_else(|| {
            let grad = Tape::<B, C>::grad(&tensor.primitive, grads.tape.as_ref()?)?;
            Some(finished(grad, tensor.dtype(), tensor.marks()))
        })
    }

    /// As `grad`, and takes the gradient out.
    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut AmpGradients<B>,
    ) -> Option<AmpTensor<B>> {
        let id = node_id::<B, C>(&tensor.primitive);
        grads.ready.remove(&id).or_else(|| {
            let grad = Tape::<B, C>::grad_remove(&tensor.primitive, grads.tape.as_mut()?)?;
            Some(finished(grad, tensor.dtype(), tensor.marks()))
        })
    }

    /// Puts a gradient in the place of another, as it is: its scale is not looked at.
    fn grad_replace(tensor: &FloatTensor<Self>, grads: &mut AmpGradients<B>, grad: AmpTensor<B>) {
        if let Some(tape) = &mut grads.tape {
            Tape::<B, C>::grad_remove(&tensor.primitive, tape);
        }
        grads.ready.insert(node_id::<B, C>(&tensor.primitive), grad);
    }

    fn inner(tensor: FloatTensor<Self>) -> AmpTensor<B> {
        let marks = tensor.marks();
        Tape::<B, C>::inner(tensor.into_primitive()).with_marks(marks)
    }

    fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Amp<B>> {
        tensor
    }

    fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Amp<B>> {
        tensor
    }

    fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Amp<B>> {
        tensor
    }

    /// A parameter that an optimizer computed from gradients is no gradient itself.
    fn from_inner(tensor: AmpTensor<B>) -> FloatTensor<Self> {
        let marks = tensor.marks() & Marks::DEMOTED;
        AmpTensor::new(Tape::<B, C>::from_inner(tensor.with_marks(marks)), marks)
    }

    fn int_from_inner(tensor: IntTensor<Amp<B>>) -> IntTensor<Self> {
        tensor
    }

    fn bool_from_inner(tensor: BoolTensor<Amp<B>>) -> BoolTensor<Self> {
        tensor
    }

    fn q_from_inner(tensor: QuantizedTensor<Amp<B>>) -> QuantizedTensor<Self> {
        tensor
    }

    #[cfg(feature = "distributed")]
    fn set_distributed_params(
        tensor: FloatTensor<Self>,
        id: DistributedParamId,
    ) -> FloatTensor<Self> {
        let marks = tensor.marks();
        let tensor = Tape::<B, C>::set_distributed_params(tensor.into_primitive(), id);
        // It has another node now.
        let leaf = AmpTensor::new(tensor, marks);
        leaves::remember(&leaf);
        leaf
    }

    #[cfg(feature = "distributed")]
    fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams> {
        Tape::<B, C>::distributed_params(&tensor.primitive)
    }

    #[cfg(feature = "distributed")]
    fn is_distributed(tensor: &FloatTensor<Self>) -> bool {
        Tape::<B, C>::is_distributed(&tensor.primitive)
    }
}

/// The id by which autodiff knows a tensor.
fn node_id<B: Backend, C: CheckpointStrategy>(tensor: &FloatTensor<Tape<B, C>>) -> u64 {
    tensor.node.id.value
}

/// A gradient as the user gets it: in its tensor's dtype, leaving as the tensor would, and never
/// demoted from here on.
fn finished<B: Backend>(grad: AmpTensor<B>, dtype: DType, of: Marks) -> AmpTensor<B> {
    AmpTensor::new(grad.into_dtype(dtype), of | Marks::GRADIENT)
}

/// The gradients of a loss as the tape gives them, and the replicas that they are reduced with.
fn tape_of<B: Trained, C: CheckpointStrategy>(
    loss: FloatTensor<Tape<B, C>>,
) -> (Gradients, Option<Arc<Replicas>>) {
    #[cfg(feature = "distributed")]
    let leaf = loss.clone();
    let tape = in_backward(|| following(|| Tape::<B, C>::backward(loss)));
    #[cfg(feature = "distributed")]
    if tape.is_distributed() {
        mark_again::<B, C>(leaf, &tape);
        return (tape, replicas::of::<B>());
    }
    (tape, None)
}

/// Marks the leaves of a pass as distributed again. Autodiff forgets it in the pass, and only a
/// step that is taken makes them anew: after one that is skipped nothing would be reduced.
#[cfg(feature = "distributed")]
fn mark_again<B: Trained, C: CheckpointStrategy>(
    mut leaf: FloatTensor<Tape<B, C>>,
    tape: &Gradients,
) {
    for (of, _) in leaves::alive() {
        let (Ok(node), Some(held)) = (of.node.downcast(), of.held) else {
            continue;
        };
        leaf.node = node;
        let params = Tape::<B, C>::distributed_params(&leaf);
        if let (Some(params), Ok(held)) = (params, held.downcast())
            && Tape::<B, C>::grad(&leaf, tape).is_some()
        {
            leaf.rc = held;
            Tape::<B, C>::set_distributed_params(leaf.clone(), params.param_id);
        }
    }
}

/// The gradients of the leaves, without the scale, by the ids of their nodes.
type Unscaled<B> = HashMap<u64, AmpTensor<B>>;

/// The backward pass of a scaled loss. `seen` is shown each gradient in FP32 or wider.
fn scaled_backward<B: Trained, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scale: f32,
    mut seen: impl FnMut(u64, FloatTensor<B>),
) -> (Unscaled<B>, Option<Arc<Replicas>>) {
    let loss = match is_half(loss.dtype()) {
        true => loss.into_dtype(DType::F32),
        false => loss.into_primitive(),
    };
    let loss = following(|| Tape::<B, C>::float_mul_scalar(loss, scale.into()));
    // Autodiff finds a gradient by the node of its tensor alone.
    let mut leaf = loss.clone();
    let (mut tape, replicas) = tape_of::<B, C>(loss);
    let grads = leaves::alive()
        .into_iter()
        .filter_map(|(node, of)| {
            leaf.node = node.node.downcast().ok()?;
            let grad = Tape::<B, C>::grad_remove(&leaf, &mut tape)?;
            let unscaled = unscaled::<B>(grad.into_primitive(), scale);
            let id = node_id::<B, C>(&leaf);
            seen(id, unscaled.clone());
            let grad = finished(AmpTensor::plain(unscaled), of.dtype, of.marks);
            Some((id, grad))
        })
        .collect();
    (grads, replicas)
}

/// The backward pass that takes or skips the step by itself.
fn checked_backward<B: Trained, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scaler: &GradScaler,
) -> AmpGradients<B> {
    let mut finite = FiniteCheck::<B>::new(loss.device());
    finite.add(AmpAutodiff::<B, C>::inner(loss.clone()).into_primitive());
    let scale = scaler.loss_scale();
    let mut leaves = Vec::new();
    let (grads, replicas) = scaled_backward::<B, C>(loss, scale, |leaf, grad| {
        leaves.push(leaf);
        finite.add(grad);
    });

    let [loss_is_finite, gradients @ ..] = &finite.read()[..] else {
        unreachable!("the loss was added")
    };
    let overflowed = gradients.iter().filter(|finite| !**finite).count();
    let vote = Vote {
        scale: Some(scale),
        loss_is_finite: *loss_is_finite,
        gradients_are_finite: overflowed == 0,
    };
    let outcome = replicas::agreed(replicas.as_deref(), vote).outcome();
    let anomalies = anomaly::take();
    let found = match outcome {
        Outcome::Finite => NonFinite {
            by_pass: true,
            ..NonFinite::default()
        },
        _ => NonFinite {
            by_pass: true,
            gradients: overflowed,
            leaves: leaves.into_iter().zip(gradients.iter().copied()).collect(),
            anomalies,
            parameters: Vec::new(),
        },
    };
    scaler.record(outcome, found);
    match outcome {
        Outcome::Finite => AmpGradients::unscaled(grads),
        Outcome::Overflow | Outcome::NonFiniteLoss => AmpGradients::absent(),
    }
}

/// A gradient without the scale, in FP32 or wider.
fn unscaled<B: Backend>(grad: FloatTensor<B>, scale: f32) -> FloatTensor<B> {
    let grad = at_least_f32::<B>(grad);
    B::float_mul_scalar(grad, (1.0 / f64::from(scale)).into())
}
