//! A tensor that is used several times: one cast for several uses, and sums of gradients whose error
//! does not grow with the number of uses.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};

use super::tape::{self, cast};
use crate::AmpTensor;
use crate::tensor::Use;

/// A tensor in `dtype`: by a [`cast`] on the tape or, without autodiff, through the cast cache.
pub(crate) fn into_dtype<B: Backend>(tensor: AmpTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype || !B::ad_enabled(&tensor.device()) {
        return tensor.into_dtype(dtype);
    }
    shared_cast(&tensor, dtype).unwrap_or_else(|| cast::<B>(tensor.primitive, dtype))
}

/// The number of backward passes of this process so far: a tensor of any thread may be used before and
/// after one.
static PASSES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static PASSES_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Begins a backward pass, which consumes the nodes of its tape.
pub(super) fn begin_pass() {
    PASSES.fetch_add(1, Ordering::Relaxed);
    PASSES_HERE.set(PASSES_HERE.get() + 1);
}

/// The number of backward passes of this thread so far.
#[cfg(feature = "train")]
pub(crate) fn passes_here() -> u64 {
    PASSES_HERE.get()
}

pub(super) fn passes() -> u64 {
    PASSES.load(Ordering::Relaxed)
}

/// The cast of a tensor that is used several times. The gradients of the uses add up in FP32 or, a few
/// at a time, in bf16, which has the range of FP32. In f16 the sum of scaled gradients could overflow.
///
/// PyTorch's autocast shares only the casts of parameters. A parameter outlives a backward pass,
/// which consumes the node of a cast, so its half copy is a leaf too.
fn shared_cast<B: Backend>(tensor: &AmpTensor<B>, dtype: DType) -> Option<FloatTensor<B>> {
    if !matches!(dtype, DType::F32 | DType::BF16) {
        return None;
    }
    let shared = tensor.shared_copy(dtype)?;
    if let Some(copy) = shared.get() {
        return Some((**copy).clone());
    }
    if B::float_is_require_grad(&tensor.primitive) {
        return half_copy(tensor, dtype);
    }
    let copy = cast::<B>(tensor.primitive.clone(), dtype);
    Some((**shared.get_or_init(|| copy.into())).clone())
}

/// The half copy of a leaf, for one use.
fn half_copy<B: Backend>(leaf: &AmpTensor<B>, dtype: DType) -> Option<FloatTensor<B>> {
    if dtype == DType::F32 {
        return None;
    }
    let uses = leaf.uses_in_half()?;
    let is_held = |node: &FloatTensor<B>| tape::node::<B>(node).is_none_or(|node| node.is_held());
    let root = match uses.next(passes(), is_held) {
        Use::Again(node) => return Some(node),
        Use::New(root) => root,
    };
    let tape = tape::of::<B>()?;
    let node = match root {
        Some(root) => tape.alias_of_half_leaf(root, &leaf.primitive),
        None => tape.half_leaf(&leaf.primitive, leaf.flags(), dtype)?,
    };
    uses.keep(&node);
    Some(node)
}
