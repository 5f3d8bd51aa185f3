//! What the upper layer records on the tape by itself, where Burn's own record would keep FP32
//! tensors: the same values, with half copies kept for the backward pass.
//!
//! The upper [`Amp`] is generic over its backend, and only the lower one can name the `Autodiff`
//! between them. So the lower layer registers a [`Tape`] for each checkpointing strategy of Burn's,
//! and the upper finds the one of its backend by type. A backend without one, as `Amp` over another
//! autodiff, records what Burn does.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};

use super::recorded::Recorded;
use crate::{Amp, AmpTensor};

/// Operations with a record of their own, on an autodiff backend `B`. Those that return `None`
/// have nothing to gain, and leave it to Burn.
pub(crate) trait Tape<B: Backend>: Send + Sync {
    /// Whether a gradient flows to the tensor.
    fn is_tracked(&self, tensor: &FloatTensor<B>) -> bool;

    /// A cast, which gradient checkpointing recomputes instead of keeping its result.
    fn cast(&self, tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B>;

    /// A product or quotient in FP32 whose operands are kept in the dtypes given.
    fn arithmetic(
        &self,
        op: Arithmetic,
        operands: [FloatTensor<B>; 2],
        kept: [DType; 2],
    ) -> Option<FloatTensor<B>>;

    /// A square in FP32, whose operand is kept in the dtype given.
    fn square(&self, tensor: FloatTensor<B>, kept: DType) -> Option<FloatTensor<B>>;

    /// A product with zeros and ones of the same shape, kept as booleans where those are small.
    fn dropout(&self, tensor: &FloatTensor<B>, noise: &FloatTensor<B>) -> Option<FloatTensor<B>>;

    /// A ReLU that keeps its result, as the layer behind it does, instead of its operand.
    fn relu(&self, tensor: FloatTensor<B>) -> FloatTensor<B>;

    /// A softmax over `dim` in FP32, of which probabilities in the dtype `kept` are kept.
    fn softmax(
        &self,
        kind: Softmax,
        tensor: FloatTensor<B>,
        dim: usize,
        kept: DType,
    ) -> FloatTensor<B>;

    /// Layer norm over the last dimension in FP32, without the shift, of which the normalized
    /// tensor is kept in the dtype `kept`.
    fn layer_norm(
        &self,
        tensor: FloatTensor<B>,
        gamma: FloatTensor<B>,
        epsilon: f64,
        kept: DType,
    ) -> FloatTensor<B>;
}

/// The arithmetic that keeps its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Mul,
    Div,
}

/// The variants of softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Softmax {
    /// exp(x) / sum(exp(x)).
    Plain,
    /// Its logarithm.
    Log,
    /// Attention's: zeros for a row of minus infinities, instead of NaN.
    Masked,
}

/// What is known of a backend's tape: the [`Tape`] of an autodiff backend, or the [`NodeOf`] of its
/// tensors.
type Known = &'static (dyn Any + Send + Sync);
/// A tape as [`Any`].
struct Entry<B: Backend>(&'static dyn Tape<B>);
/// How to get at a tensor's node on the tape, whatever the checkpointing strategy.
struct NodeOf<T>(fn(&T) -> WeakNode);

/// The id of a tensor's node.
struct IdOf<T>(fn(&T) -> u64);

/// What autodiff's types, which have no public names, are held as.
type Anything = dyn Any + Send + Sync;

/// A node of autodiff's, for as long as somebody else holds it.
pub(crate) struct WeakNode {
    node: Weak<Anything>,
    /// What tells autodiff that a tensor of the node is held.
    #[cfg(feature = "distributed")]
    held: Weak<Anything>,
}

/// A [`WeakNode`] that is alive.
pub(crate) struct Node {
    pub node: Arc<Anything>,
    #[cfg(feature = "distributed")]
    pub held: Option<Arc<Anything>>,
}

impl WeakNode {
    pub(crate) fn upgrade(&self) -> Option<Node> {
        Some(Node {
            node: self.node.upgrade()?,
            #[cfg(feature = "distributed")]
            held: self.held.upgrade(),
        })
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.node.strong_count() > 0
    }
}

static KNOWN: LazyLock<Mutex<HashMap<TypeId, Known>>> = LazyLock::new(Mutex::default);

thread_local! {
    static SEEN: RefCell<Vec<(TypeId, Option<Known>)>> = const { RefCell::new(Vec::new()) };
}

/// The tape of a backend, if it is an `Autodiff` over [`Amp`]. Costs a short walk over the
/// backends that this thread has asked for.
pub(crate) fn of<B: Backend>(device: &B::Device) -> Option<&'static dyn Tape<B>> {
    let Entry(tape) = known::<B>(TypeId::of::<B>(), device)?.downcast_ref::<Entry<B>>()?;
    Some(*tape)
}

/// The node of a tensor, if its backend is an `Autodiff` over [`Amp`]. Costs as [`of`].
pub(crate) fn node<B: Backend>(tensor: &FloatTensor<B>) -> Option<WeakNode> {
    let of_tensor = known::<B>(TypeId::of::<FloatTensor<B>>(), &B::float_device(tensor))?;
    let NodeOf(node) = of_tensor.downcast_ref::<NodeOf<FloatTensor<B>>>()?;
    Some(node(tensor))
}

/// The id of the node of a tensor of a backend, if that is an `AmpAutodiff` or the `Autodiff` in
/// it.
pub(crate) fn id<B: Backend, T: 'static>(tensor: &T, device: &B::Device) -> Option<u64> {
    let IdOf(id) = known::<B>(TypeId::of::<T>(), device)?.downcast_ref::<IdOf<T>>()?;
    Some(id(tensor))
}

fn known<B: Backend>(of: TypeId, device: &B::Device) -> Option<Known> {
    let seen = SEEN.with_borrow(|seen| seen.iter().find(|(k, _)| *k == of).map(|(_, t)| *t));
    seen.unwrap_or_else(|| {
        // Reaches the layer below, which registers.
        B::dtype_usage(device, DType::F32);
        let known = lock().get(&of).copied();
        SEEN.with_borrow_mut(|seen| seen.push((of, known)));
        known
    })
}

/// Registers the tapes of the autodiff backends over `Amp<B>`.
pub(crate) fn register<B: Backend>() {
    let mut known = lock();
    known
        .entry(TypeId::of::<Autodiff<Amp<B>, NoCheckpointing>>())
        .or_insert_with(entry::<B, NoCheckpointing>);
    known
        .entry(TypeId::of::<Autodiff<Amp<B>, BalancedCheckpointing>>())
        .or_insert_with(entry::<B, BalancedCheckpointing>);
    known
        .entry(TypeId::of::<FloatTensor<Autodiff<Amp<B>>>>())
        .or_insert_with(node_of::<B>);
    known
        .entry(TypeId::of::<OnTape<B, NoCheckpointing>>())
        .or_insert_with(id_of::<B, NoCheckpointing>);
    known
        .entry(TypeId::of::<OnTape<B, BalancedCheckpointing>>())
        .or_insert_with(id_of::<B, BalancedCheckpointing>);
}

/// A tensor of the upper layer.
type OnTape<B, C> = AmpTensor<Autodiff<Amp<B>, C>>;

fn id_of<B: Backend, C: CheckpointStrategy>() -> Known {
    let id = |tensor: &OnTape<B, C>| tensor.primitive.node.id.value;
    Box::leak(Box::new(IdOf(id as fn(&OnTape<B, C>) -> u64)))
}

/// Lives as long as the process, as [`node_of`]: there is one for each backend type.
fn entry<B: Backend, C: CheckpointStrategy>() -> Known {
    let tape: &'static dyn Tape<Autodiff<Amp<B>, C>> = &Recorded::<B, C>(PhantomData);
    Box::leak(Box::new(Entry(tape)))
}

fn node_of<B: Backend>() -> Known {
    let node = |tensor: &FloatTensor<Autodiff<Amp<B>>>| WeakNode {
        node: Arc::downgrade(&tensor.node) as Weak<Anything>,
        #[cfg(feature = "distributed")]
        held: Arc::downgrade(&tensor.rc) as Weak<Anything>,
    };
    Box::leak(Box::new(NodeOf(node)))
}

fn lock() -> MutexGuard<'static, HashMap<TypeId, Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}
