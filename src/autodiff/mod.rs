//! The backward pass: the loss is scaled; the gradients are checked, and unscaled in FP32.
//!
//! Each gradient is unscaled by itself. One flat buffer, like fastai's `flat_master`,
//! takes 0.56 of the time on a CPU for 400 gradients with 463,360 elements in all (0.65 against
//! 1.15 ms on Flex, 2 cores, 2026-11-21). burn-amp does not use one: its gradients would be views that
//! hold the whole buffer, an optimizer could not reuse them, and a skipped step could not name the
//! gradients that overflowed.

mod above;
#[cfg(feature = "train")]
pub(crate) mod generic;
mod gradients;
mod leaves;
pub(crate) mod recorded;
pub(crate) mod replicas;
#[cfg(feature = "train")]
pub(crate) mod scaled_loss;
pub(crate) mod seed;
pub(crate) mod shared_casts;
pub(crate) mod trained;

use std::collections::HashMap;
use std::sync::Arc;

use burn_amp_core::{Findings, Watched};
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
use leaves::LeafInfo;
use replicas::Replicas;

use crate::call::compare_pass;
use crate::device::{self, DeviceContext, DeviceState};
use crate::diagnostics::{FiniteCheck, anomaly};
use crate::policy::{Mode, is_half};
use crate::precision::{half_wanted, in_kernel};
use crate::scaler;
#[cfg(feature = "distributed")]
use crate::tensor::Side;
use crate::tensor::{Above, Node, TensorFlags};
use crate::{Amp, AmpTensor, GradScaler, Precision, StepOutcome};

/// The trait that Burn's autodiff requires of the backend that it trains on.
#[cfg(not(feature = "distributed"))]
pub(crate) use burn_backend::Backend as AutodiffInner;
#[cfg(feature = "distributed")]
pub(crate) use burn_backend::distributed::DistributedBackend as AutodiffInner;

/// The backend to train on: automatic mixed precision in the forward and the backward pass.
///
/// Replaces `Autodiff<B, C>`, on the devices of `B`. FP32 parameters stay FP32 and get FP32
/// gradients: the master weights of Micikevicius et al., "Mixed Precision Training" (2018).
///
/// One layer of [`Amp`] lies above Burn's autodiff, another below. The upper layer decides each
/// operation's precision, so the tape records the casts. The lower layer keeps the formulas of the
/// backward pass within the half range.
///
/// `C` is Burn's checkpointing strategy, as in `Autodiff<B, C>`.
pub type AmpAutodiff<B, C = NoCheckpointing> = Amp<Autodiff<Amp<B>, C>, Above>;

/// Burn's autodiff between the two layers.
type AutodiffLayer<B, C> = Autodiff<Amp<B>, C>;

/// Conversions between the layers, for tensors that no layer wraps.
macro_rules! same_in_each_layer {
    ($(fn $name:ident($from:ty) -> $to:ty;)*) => {$(
        fn $name(tensor: $from) -> $to {
            tensor
        }
    )*};
}

#[deny(clippy::missing_trait_methods)]
impl<B: AutodiffInner, C: CheckpointStrategy> AutodiffBackend for AmpAutodiff<B, C> {
    type InnerBackend = Amp<B>;
    type Gradients = AmpGradients<Amp<B>>;

    /// Runs the backward pass of a loss of any shape and float dtype. The gradients are those of the
    /// loss's sum.
    ///
    /// Loss scaling applies if it is enabled and f16 is in force, or was in force when the loss was
    /// computed. The loss is then scaled, and the gradients are unscaled in FP32 or wider. If a
    /// gradient or the loss is not finite, there are no gradients, the loss scaler in force is
    /// notified, and the next optimizer step changes nothing. The check costs one read-back from the
    /// device, and an overflow costs a second one. In bf16 and FP32 this is autodiff's own backward
    /// pass, unless [`AmpConfig::with_finite_check`](crate::AmpConfig::with_finite_check) is on.
    ///
    /// # Panics
    ///
    /// - For a loss that is on no tape, as in `Autodiff`.
    /// - If a region requests a precision that the loss's device does not support.
    /// - If the loss is scaled and the check cannot be read back synchronously, as on WebAssembly.
    /// - With the feature `distributed`, on every replica, if their losses are not scaled alike.
    fn backward(loss: FloatTensor<Self>) -> AmpGradients<Amp<B>> {
        let device = loss.device();
        let grads = pass::<B, C>(loss);
        compare_pass::<B>(&device);
        grads
    }

    /// The unscaled gradient of a tensor that requires one, in the tensor's shape and dtype; `None`
    /// after an overflow. The gradient of a half tensor is FP32 if the loss was scaled.
    fn grad(tensor: &FloatTensor<Self>, grads: &AmpGradients<Amp<B>>) -> Option<AmpTensor<B>> {
        let id = tensor.primitive.node.id.value;
        grads.ready.get(&id).cloned().or_else(|| {
            let grad = AutodiffLayer::<B, C>::grad(&tensor.primitive, grads.tape.as_ref()?)?;
            Some(finished(LeafInfo::of(tensor), grad, None))
        })
    }

    /// As `grad`, but removes the gradient.
    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut AmpGradients<Amp<B>>,
    ) -> Option<AmpTensor<B>> {
        let id = tensor.primitive.node.id.value;
        grads.ready.remove(&id).or_else(|| {
            let grad = AutodiffLayer::<B, C>::grad_remove(&tensor.primitive, grads.tape.as_mut()?)?;
            Some(finished(LeafInfo::of(tensor), grad, None))
        })
    }

    /// Replaces a gradient. The new gradient is stored as given, whatever its scale.
    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut AmpGradients<Amp<B>>,
        grad: AmpTensor<B>,
    ) {
        if let Some(tape) = &mut grads.tape {
            AutodiffLayer::<B, C>::grad_remove(&tensor.primitive, tape);
        }
        grads.ready.insert(tensor.primitive.node.id.value, grad);
    }

    /// The tensor that an optimizer gets: a leaf is in the dtype in which it is trained.
    fn inner(tensor: FloatTensor<Self>) -> AmpTensor<B> {
        let mut flags = tensor.flags();
        let is_leaf = AutodiffLayer::<B, C>::float_is_require_grad(&tensor.primitive);
        let is_cast = is_leaf && tensor.primitive.primitive.is_used_in_half();
        flags.set(TensorFlags::USED_IN_HALF, is_cast);
        let of_inner = |operand| AutodiffLayer::<B, C>::inner(operand).into_primitive();
        let unrounded = tensor.unrounded();
        let unrounded = unrounded.map(|of| of.elsewhere(of_inner, |mask| mask));
        let inner = AutodiffLayer::<B, C>::inner(tensor.into_primitive());
        let dtype = if is_leaf {
            trained::trained_dtype::<B>(inner.dtype(), &inner.device())
        } else {
            inner.dtype()
        };
        if dtype == inner.dtype() {
            inner.with_flags(flags).with_unrounded(unrounded)
        } else {
            AmpTensor::new(inner.into_dtype(dtype), TensorFlags::LEARNED)
        }
    }

    same_in_each_layer! {
        fn int_inner(IntTensor<Self>) -> IntTensor<Amp<B>>;
        fn bool_inner(BoolTensor<Self>) -> BoolTensor<Amp<B>>;
        fn q_inner(QuantizedTensor<Self>) -> QuantizedTensor<Amp<B>>;
        fn int_from_inner(IntTensor<Amp<B>>) -> IntTensor<Self>;
        fn bool_from_inner(BoolTensor<Amp<B>>) -> BoolTensor<Self>;
        fn q_from_inner(QuantizedTensor<Amp<B>>) -> QuantizedTensor<Self>;
    }

    /// A parameter computed from gradients is not itself a gradient.
    fn from_inner(tensor: AmpTensor<B>) -> FloatTensor<Self> {
        let below = TensorFlags::DEMOTED | TensorFlags::WEIGHT | TensorFlags::LEARNED;
        let below = tensor.flags() & below;
        let flags = below | tensor.flags() & TensorFlags::USED_IN_HALF;
        let of_outer = |operand| AutodiffLayer::<B, C>::from_inner(AmpTensor::plain(operand));
        let unrounded = tensor.unrounded();
        let unrounded = unrounded.map(|of| of.elsewhere(of_outer, |mask| mask));
        let tensor = AutodiffLayer::<B, C>::from_inner(tensor.with_flags(below));
        AmpTensor::new(tensor, flags).with_unrounded(unrounded)
    }

    #[cfg(feature = "distributed")]
    fn set_distributed_params(
        tensor: FloatTensor<Self>,
        id: DistributedParamId,
    ) -> FloatTensor<Self> {
        if let Some(replicas) = replicas::of::<B>() {
            replicas::join(replicas, crate::device::name::<B>(&tensor.device()));
        }
        let flags = tensor.flags();
        let tensor = AutodiffLayer::<B, C>::set_distributed_params(tensor.into_primitive(), id);
        // The tensor has a new node now.
        let leaf = AmpTensor::new(tensor, flags);
        Above::remember(&leaf);
        leaf
    }

    #[cfg(feature = "distributed")]
    fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams> {
        AutodiffLayer::<B, C>::distributed_params(&tensor.primitive)
    }

    #[cfg(feature = "distributed")]
    fn is_distributed(tensor: &FloatTensor<Self>) -> bool {
        AutodiffLayer::<B, C>::is_distributed(&tensor.primitive)
    }
}

/// A leaf's gradient as the user gets it: in the dtype in which the leaf is trained, and never demoted.
/// The gradient has the leaf's flags, so it is read back in the same dtype as the leaf. The gradient of a
/// scaled loss is divided by `scale`. It may be outside f16's range, so it stays FP32.
///
/// With fusion, the cast and the division are left to the optimizer.
fn finished<B: Backend>(leaf: LeafInfo, grad: AmpTensor<B>, scale: Option<f32>) -> AmpTensor<B> {
    let device = grad.device();
    let trained = trained::trained_dtype::<B>(leaf.dtype, &device);
    let dtype = if scale.is_some() && is_half(trained) {
        DType::F32
    } else {
        trained
    };
    let flags = leaf.flags | TensorFlags::GRADIENT;
    let grad = match scale {
        None if grad.dtype() == dtype => grad.into_unshared(),
        _ => grad.divided_later(scale.unwrap_or(1.0)),
    };
    if grad.dtype() == dtype && device::is_fused::<B>(&device) {
        grad.with_flags(flags)
    } else {
        AmpTensor::new(grad.into_dtype(dtype), flags)
    }
}

/// The backward pass of a loss: scaled and checked where it has to be.
fn pass<B: AutodiffInner, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
) -> AmpGradients<Amp<B>> {
    let device = loss.device();
    let context = DeviceContext::of::<AutodiffLayer<B, C>>(&device);
    let f16 = loss.flags().contains(TensorFlags::FROM_F16) || context.mode == Mode::On(DType::F16);
    // Do not scale an untracked loss: autodiff panics for the loss itself, but not for a scaled
    // one.
    let tracked = loss.primitive.is_tracked();
    let explicit = loss.scaled().cloned();
    let scaler = match &explicit {
        Some(scaled) => scaled.scaler.clone(),
        None => scaler::in_scope().unwrap_or_else(|| GradScaler::of::<B>(&device)),
    };
    #[cfg(feature = "train")]
    if explicit.is_some() {
        scaler::other_scaled();
    }
    let scales = f16 && scaler.state().is_enabled();
    if !tracked || !(scales || context.in_force.checked) {
        let loss = loss.into_primitive();
        let leaves = half_wanted().then(leaves::alive);
        let scale = (tracked && half_wanted()).then_some(1.0);
        let (mut tape, replicas) = tape_of::<B, C>(loss.clone(), scale);
        let finite = StepOutcome::Finite;
        replicas::agreed::<B>(
            replicas.as_deref(),
            &device,
            None,
            finite,
            &mut Watched::default(),
        );
        let take = |leaves| take_gradients::<B, C>(loss, &mut tape, leaves, true);
        let copied = leaves.map(take).unwrap_or_default();
        // Of the device and not of the region: this pass may be in FP32 within a step in f16.
        let in_f16 = context.in_force.precision == Precision::F16;
        anomaly::end_unreported(in_f16 && scaler.state().is_enabled());
        #[cfg(feature = "train")]
        if explicit.is_some() {
            scaler.shared.pending().note_pass();
        }
        return AmpGradients {
            tape: Some(tape),
            ready: of_leaves::<B>(copied, None),
        };
    }
    if scales {
        let fallback = DeviceState::of::<B>(&device).overflow_fallback();
        scaler.shared.listen(fallback);
    }
    match explicit {
        #[cfg(feature = "train")]
        Some(scaled) => {
            let value = AmpAutodiff::<B, C>::inner(loss.clone());
            let scale = scales.then(|| initial_gradient(&loss, scaled.scale));
            let factor = scale.unwrap_or(1.0);
            let (grads, replicas) = scaled_backward::<B, C>(loss, factor);
            scaled_loss::add_loss::<Amp<B>>(&scaler, &device, value, scales);
            scaled_loss::end_pass::<B>(&scaler, replicas, &device, factor);
            AmpGradients::of_leaves(of_leaves::<B>(grads, scale))
        }
        _ => {
            let scale = scales.then(|| scaler.state().scale());
            checked_backward::<B, C>(loss, &scaler, scale)
        }
    }
}

/// The gradients of a loss times `scale` as the tape returns them, and the replicas that reduce them
/// together.
fn tape_of<B: AutodiffInner, C: CheckpointStrategy>(
    loss: FloatTensor<AutodiffLayer<B, C>>,
    scale: Option<f32>,
) -> (Gradients, Option<Arc<Replicas>>) {
    #[cfg(feature = "distributed")]
    let leaf = loss.clone();
    DeviceState::of::<B>(&loss.primitive.device()).begin_pass();
    let tape = seed::with_scale(scale, || AutodiffLayer::<B, C>::backward(loss));
    #[cfg(feature = "distributed")]
    if tape.is_distributed() {
        register_distributed::<B, C>(leaf, &tape);
        return (tape, replicas::of::<B>());
    }
    (tape, None)
}

/// Re-registers distributed leaves: the backward pass drops the registration, and a skipped step
/// does not recreate the leaves.
#[cfg(feature = "distributed")]
fn register_distributed<B: AutodiffInner, C: CheckpointStrategy>(
    mut leaf: FloatTensor<AutodiffLayer<B, C>>,
    tape: &Gradients,
) {
    for (of, _) in leaves::alive() {
        let (Ok(node), Some(held)) = (of.node.downcast(), of.held) else {
            continue;
        };
        leaf.node = node;
        let params = AutodiffLayer::<B, C>::distributed_params(&leaf);
        if let (Some(params), Ok(held)) = (params, held.downcast())
            && AutodiffLayer::<B, C>::grad(&leaf, tape).is_some()
        {
            leaf.rc = held;
            AutodiffLayer::<B, C>::set_distributed_params(leaf.clone(), params.param_id);
        }
    }
}

/// The gradient of a loss that is scaled: the loss scale, or for a loss in f16 the largest power of two that f16 holds.
fn initial_gradient<B: AutodiffInner, C: CheckpointStrategy>(
    loss: &FloatTensor<AmpAutodiff<B, C>>,
    scale: f32,
) -> f32 {
    match loss.dtype() {
        DType::F16 => scale.min(32_768.0),
        _ => scale,
    }
}

/// The backward pass of a scaled loss: the scaled gradients of the leaves.
fn scaled_backward<B: AutodiffInner, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scale: f32,
) -> (Vec<LeafGradient<B>>, Option<Arc<Replicas>>) {
    let loss = loss.into_primitive();
    let leaves = leaves::alive();
    let (mut tape, replicas) = tape_of::<B, C>(loss.clone(), Some(scale));
    let grads = take_gradients::<B, C>(loss, &mut tape, leaves, false);
    (grads, replicas)
}

/// Gradients divided by `scale`, in FP32 or wider.
fn divided<B: Backend>(grads: Vec<LeafGradient<B>>, scale: f32) -> Vec<LeafGradient<B>> {
    let divided = |(id, leaf, grad): LeafGradient<B>| {
        let grad = grad.divided_later(scale).into_primitive();
        (id, leaf, AmpTensor::plain(grad))
    };
    grads.into_iter().map(divided).collect()
}

/// Gradients as the user gets them, by the node ids of their leaves.
fn of_leaves<B: Backend>(
    grads: Vec<LeafGradient<B>>,
    scale: Option<f32>,
) -> HashMap<u64, AmpTensor<B>> {
    let finished = |(id, leaf, grad)| (id, finished(leaf, grad, scale));
    grads.into_iter().map(finished).collect()
}

/// The node id of a leaf, the leaf, and its gradient.
type LeafGradient<B> = (u64, LeafInfo, AmpTensor<B>);

/// Takes gradients off the tape: those of all leaves, or only those of leaves with a half copy at which
/// the pass ended. The gradient of a half copy is added to its leaf's, in FP32 or wider.
///
/// A half gradient is not cast here but where it is used: fusion then joins the cast with that kernel.
fn take_gradients<B: AutodiffInner, C: CheckpointStrategy>(
    // Autodiff looks up a gradient only by the tensor's node.
    mut tensor: FloatTensor<AutodiffLayer<B, C>>,
    tape: &mut Gradients,
    // The leaves alive before the pass: the tape may be the only holder of a half copy.
    leaves: Vec<(Node, LeafInfo)>,
    only_copied: bool,
) -> Vec<LeafGradient<B>> {
    let mut take = |node| {
        tensor.node = node;
        AutodiffLayer::<B, C>::grad_remove(&tensor, tape)
    };
    let sum = |one, other| match (one, other) {
        (Some(one), Some(other)) => {
            let [one, other] =
                [one, other].map(|grad: AmpTensor<B>| grad.cast_later().into_primitive());
            Some(AmpTensor::plain(in_kernel(|| B::float_add(one, other))))
        }
        (one, other) => one.or(other),
    };
    let (copies, leaves): (Vec<_>, Vec<_>) = leaves
        .into_iter()
        .filter_map(|(node, info)| Some((node.node.downcast().ok()?, info)))
        .partition(|(_, info)| info.copy_of.is_some());
    let mut copied = HashMap::new();
    for (node, info) in copies {
        if let Some(leaf) = info.copy_of {
            let grad = sum(copied.remove(&leaf), take(node));
            copied.extend(grad.map(|grad| (leaf, grad)));
        }
    }
    let mut grads = Vec::new();
    for (node, info) in leaves {
        let id = node.id.value;
        let of_copy = copied.remove(&id);
        if of_copy.is_none() && only_copied {
            continue;
        }
        let grad = sum(take(node), of_copy);
        grads.extend(grad.map(|grad| (id, info, grad)));
    }
    grads
}

/// The backward pass that decides by itself whether the step is taken or skipped. The loss is multiplied by `scale`, if
/// it is scaled.
fn checked_backward<B: AutodiffInner, C: CheckpointStrategy>(
    loss: FloatTensor<AmpAutodiff<B, C>>,
    scaler: &GradScaler,
    scale: Option<f32>,
) -> AmpGradients<Amp<B>> {
    let device = loss.device();
    let mut finite = FiniteCheck::<B>::new(device.clone());
    finite.add(AmpAutodiff::<B, C>::inner(loss.clone()).into_primitive());
    let factor = scale.map_or(1.0, |scale| initial_gradient(&loss, scale));
    let (mut grads, replicas) = scaled_backward::<B, C>(loss, factor);
    // Without fusion each cast is a kernel: cast once for the check and the product.
    if !device::is_fused::<B>(&device) {
        grads = divided::<B>(grads, 1.0);
    }
    // Unscaling by a scale below 1 can overflow FP32.
    let mut left = scale.and(Some(factor));
    if factor < 1.0 {
        grads = divided::<B>(grads, factor);
        left = Some(1.0);
    }
    for (_, _, grad) in &grads {
        finite.add(grad.primitive.clone());
    }

    let finite = finite.read();
    let (loss_is_finite, gradients) = finite.split_first().expect("the loss was added");
    let here = StepOutcome::of(*loss_is_finite, !gradients.contains(&false));
    let mut watched = anomaly::take();
    let (replicas, factor) = (replicas.as_deref(), Some(factor));
    let outcome = replicas::agreed::<B>(replicas, &device, factor, here, &mut watched);
    let mut findings = Findings {
        watched,
        ..Findings::default()
    };
    if outcome != StepOutcome::Finite {
        let leaves = grads.drain(..).map(|(leaf, ..)| leaf);
        findings.leaves = leaves.zip(gradients.iter().copied()).collect();
    }
    scaler.record_pass(scale, outcome, findings);
    AmpGradients::of_leaves(of_leaves::<B>(grads, left))
}
