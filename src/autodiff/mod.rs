//! The gradient pass: the loss is scaled, the gradients are unscaled to FP32 and checked.
//!
//! Each gradient is unscaled and checked by itself. In one flat buffer, as fastai's `flat_master`
//! does it, 400 gradients of together 463,360 elements take 0.6 of the time on a CPU (0.52 against
//! 0.80 ms; `cargo xtask bench flat`, Flex, 2 cores, 2026-11-21). It is not done: the gradients
//! would be views that hold the whole buffer and that an optimizer cannot reuse, and a skipped step
//! could not tell which of them overflowed.

mod gradients;
pub(crate) mod leaves;
mod recorded;
pub(crate) mod tape;

use std::collections::HashMap;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, DType, TensorMetadata};

pub use gradients::AmpGradients;

use crate::finite::FiniteCheck;
use crate::policy::Mode;
use crate::precision::following;
use crate::scaler::{self, InForce, Outcome};
use crate::tensor::{Marks, at_least_f32, is_half};
use crate::{Amp, AmpTensor, GradScaler, device};

/// The backend to train on: automatic mixed precision, in the forward and in the backward pass.
///
/// [`Amp`] stands on both sides of Burn's autodiff. The upper one decides each operation's
/// precision, so that its casts are on the tape; the lower one keeps the formulas of the backward
/// pass from leaving the half range.
///
/// `C` is Burn's checkpointing strategy, as in `Autodiff<B, C>`.
pub type AmpAutodiff<B, C = NoCheckpointing> = Amp<Autodiff<Amp<B>, C>>;

/// The tape below the upper layer.
type Tape<B, C> = Autodiff<Amp<B>, C>;

impl<B: Backend, C: CheckpointStrategy> AutodiffBackend for AmpAutodiff<B, C> {
    type InnerBackend = Amp<B>;
    type Gradients = AmpGradients<B>;

    /// The backward pass of a loss of any shape and float dtype.
    ///
    /// Where f16 is in force or was where the loss was computed, and loss scaling is not disabled,
    /// the loss is scaled before and the gradients are unscaled after, in FP32 or wider; if one of
    /// them, or the loss, is not finite there are no gradients, the loss scaler in force is told,
    /// and the optimizer step that follows changes nothing. That costs one read-back from the
    /// device. In bf16 and FP32 this is autodiff's own backward pass.
    ///
    /// # Panics
    ///
    /// As `Autodiff`, for a loss that no tape knows.
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
                let loss = loss.into_primitive();
                AmpGradients::of_tape(following(|| Tape::<B, C>::backward(loss)))
            }
            #[cfg(feature = "train")]
            Some(InForce::Explicit(scaler)) => {
                let value = Self::inner(loss.clone());
                let scale = scaler.scales::<Amp<B>>(&device, value);
                AmpGradients::unscaled(scaled_backward::<B, C>(loss, scale, |_| {}))
            }
            Some(InForce::Implicit(scaler)) => checked_backward::<B, C>(loss, &scaler),
        }
    }

    fn grad(tensor: &FloatTensor<Self>, grads: &AmpGradients<B>) -> Option<AmpTensor<B>> {
        let id = node_id::<B, C>(&tensor.primitive);
        grads.ready.get(&id).cloned().or_else(|| {
            let grad = Tape::<B, C>::grad(&tensor.primitive, grads.tape.as_ref()?)?;
            Some(finished(grad, tensor.dtype(), tensor.marks()))
        })
    }

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

/// The backward pass of a scaled loss: the gradients of the leaves, without the scale, by the ids
/// of their nodes. `seen` is shown each of them in FP32 or wider.
fn scaled_backward<B: Backend, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scale: f32,
    mut seen: impl FnMut(FloatTensor<B>),
) -> HashMap<u64, AmpTensor<B>> {
    let loss = match is_half(loss.dtype()) {
        true => loss.into_dtype(DType::F32),
        false => loss.into_primitive(),
    };
    let loss = following(|| Tape::<B, C>::float_mul_scalar(loss, scale.into()));
    // Autodiff finds a gradient by the node of its tensor alone.
    let mut leaf = loss.clone();
    let mut tape = following(|| Tape::<B, C>::backward(loss));
    leaves::alive()
        .into_iter()
        .filter_map(|(node, of)| {
            leaf.node = node.downcast().ok()?;
            let grad = Tape::<B, C>::grad_remove(&leaf, &mut tape)?;
            let unscaled = unscaled::<B>(grad.into_primitive(), scale);
            seen(unscaled.clone());
            let grad = finished(AmpTensor::plain(unscaled), of.dtype, of.marks);
            Some((node_id::<B, C>(&leaf), grad))
        })
        .collect()
}

/// The backward pass that takes or skips the step by itself.
fn checked_backward<B: Backend, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scaler: &GradScaler,
) -> AmpGradients<B> {
    let mut finite = FiniteCheck::<B>::new(loss.device());
    finite.add(AmpAutodiff::<B, C>::inner(loss.clone()).into_primitive());
    let grads = scaled_backward::<B, C>(loss, scaler.loss_scale(), |grad| finite.add(grad));

    let [loss_is_finite, gradients @ ..] = &finite.read()[..] else {
        unreachable!("the loss was added")
    };
    let overflowed = gradients.iter().filter(|finite| !**finite).count();
    let outcome = Outcome::of(*loss_is_finite, overflowed == 0);
    scaler.record(outcome, overflowed, Vec::new());
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
