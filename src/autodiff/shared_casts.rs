//! A tensor that is used several times: one cast for several uses, and sums of gradients whose error
//! does not grow with the number of uses.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, DType};

use super::leaves::{self, LeafInfo};
use super::recorded::{TapeTensor, alias};
use crate::call::cast;
use crate::device::DeviceState;
use crate::tensor::{Above, NextCopy, WeakNode};
use crate::{Amp, AmpTensor};

/// The cast of a tensor that is used several times. The gradients of the uses add up in FP32 or, a few
/// at a time, in bf16, which has the range of FP32. In f16 the sum of scaled gradients could overflow.
///
/// PyTorch's autocast shares only the casts of parameters. A parameter outlives a backward pass,
/// which consumes the node of a cast, so its half copy is a leaf too.
pub(super) fn shared_cast<B: Backend, C: CheckpointStrategy>(
    tensor: &AmpTensor<Autodiff<Amp<B>, C>, Above>,
    dtype: DType,
) -> Option<TapeTensor<B>> {
    if !matches!(dtype, DType::F32 | DType::BF16) {
        return None;
    }
    let shared = tensor.shared_copy(dtype)?;
    if let Some(copy) = shared.get() {
        return Some((**copy).clone());
    }
    if Autodiff::<Amp<B>, C>::float_is_require_grad(&tensor.primitive) {
        return half_copy(tensor, dtype);
    }
    let copy = tensor.clone().cast_alone(dtype);
    Some((**shared.get_or_init(|| copy.into())).clone())
}

/// The half copy of a leaf, for one use.
fn half_copy<B: Backend, C: CheckpointStrategy>(
    leaf: &AmpTensor<Autodiff<Amp<B>, C>, Above>,
    dtype: DType,
) -> Option<TapeTensor<B>> {
    if dtype == DType::F32 {
        return None;
    }
    let uses = leaf.half_copies()?;
    let is_held = |node: &TapeTensor<B>| WeakNode::of(node).is_held();
    let passes = DeviceState::of::<B>(&leaf.device()).passes();
    let root = match uses.next(passes, is_held) {
        NextCopy::Again(node) => return Some(node),
        NextCopy::New(root) => root,
    };
    let node = match root {
        Some(root) => alias_of_half_leaf::<B, C>(root, leaf),
        None => half_leaf(leaf, dtype)?,
    };
    uses.keep(&node);
    Some(node)
}

/// A half copy of an FP32 leaf, as a leaf of its own. The backward pass adds its gradient to that
/// of the FP32 leaf. `None` if replicas reduce the gradient of the leaf.
fn half_leaf<B: Backend, C: CheckpointStrategy>(
    leaf: &AmpTensor<Autodiff<Amp<B>, C>, Above>,
    dtype: DType,
) -> Option<TapeTensor<B>> {
    let of = &leaf.primitive;
    #[cfg(feature = "distributed")]
    if of.node.distributed_params.is_some() {
        return None;
    }
    let copy = TapeTensor::<B>::new(cast(of.primitive.clone(), dtype)).require_grad();
    let info = LeafInfo {
        copy_of: Some(of.node.id.value),
        ..LeafInfo::of(leaf)
    };
    leaves::add(WeakNode::of(&copy), info);
    Some(copy)
}

/// A half leaf as a node of its own, where the gradients of some uses add up. Their sum reaches the
/// half leaf in FP32. Gradient checkpointing keeps the node.
///
/// If two losses share the node, the first backward pass consumes its step. The second pass ends at
/// the node, and the gradient there is added to that of the FP32 leaf.
fn alias_of_half_leaf<B: Backend, C: CheckpointStrategy>(
    half_leaf: TapeTensor<B>,
    leaf: &AmpTensor<Autodiff<Amp<B>, C>, Above>,
) -> TapeTensor<B> {
    let alias = alias::<B, C>(half_leaf);
    let info = LeafInfo {
        copy_of: Some(leaf.primitive.node.id.value),
        ..LeafInfo::of(&leaf.primitive.primitive)
    };
    leaves::add(WeakNode::of(&alias), info);
    alias
}
