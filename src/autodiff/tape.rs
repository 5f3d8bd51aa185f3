//! Operations that the upper layer records on the tape itself, because Burn's own record would keep
//! FP32 tensors. The values are the same, and half copies are kept for the backward pass.
//!
//! The upper [`Amp`] is generic over its backend; only the lower layer can name the `Autodiff` between
//! the two. So the lower layer registers a [`TapeExtension`] for each of Burn's checkpointing
//! strategies when it creates its first tensor. The upper layer has no tensor before that, and finds
//! its extension by backend type. A backend without an extension, such as `Amp` over another autodiff,
//! is recorded as in Burn.

use std::any::{Any, TypeId};
use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use burn_amp_core::Registry;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, DeviceOps, TensorMetadata};

use super::recorded::{Recorded, TapeTensor};
use crate::device::{self, DeviceContext};
use crate::policy::{Mode, Support};
use crate::precision::{around_step, half_wanted};
#[cfg(feature = "train")]
use crate::scaler::ScaledLoss;
use crate::tensor::{TensorFlags, converted};
use crate::{Amp, AmpTensor};

/// Operations on an autodiff backend `B` that are recorded here. A method returns `None` if its record
/// would gain nothing; Burn then records the operation.
pub(crate) trait TapeExtension<B: Backend>: Send + Sync {
    /// Whether a gradient flows to the tensor.
    fn is_tracked(&self, tensor: &FloatTensor<B>) -> bool;

    /// A cast. Gradient checkpointing recomputes the cast instead of keeping its result.
    fn cast(&self, tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B>;

    /// Casts an FP32 leaf into its cast cache, before an operation needs the copy.
    fn cast_ahead(&self, leaf: &FloatTensor<B>, half: DType);

    /// A half copy of an FP32 leaf, as a leaf of its own. The backward pass adds its gradient to that
    /// of the FP32 leaf; `flags` are the FP32 leaf's. `None` if replicas reduce the gradient of the
    /// leaf.
    fn half_leaf(
        &self,
        leaf: &FloatTensor<B>,
        flags: TensorFlags,
        dtype: DType,
    ) -> Option<FloatTensor<B>>;

    /// A half leaf as a node of its own, where the gradients of some uses add up. Their sum reaches the
    /// half leaf in FP32. Gradient checkpointing keeps the node.
    ///
    /// If two losses share the node, the first backward pass consumes its step. The second pass ends at
    /// the node, and the gradient there is added to that of the FP32 leaf.
    fn alias_of_half_leaf(
        &self,
        half_leaf: FloatTensor<B>,
        leaf: &FloatTensor<B>,
    ) -> FloatTensor<B>;

    /// A product or quotient in FP32. Keeps the operands in the dtypes `kept`. With `kept_quotient`,
    /// keeps the quotient in that dtype instead of the dividend: the next operation may keep it too.
    fn arithmetic(
        &self,
        op: Arithmetic,
        operands: [FloatTensor<B>; 2],
        kept: [DType; 2],
        kept_quotient: Option<DType>,
    ) -> Option<FloatTensor<B>>;

    /// A quotient of half operands. Computes its gradients in FP32.
    fn half_quotient(&self, operands: [FloatTensor<B>; 2]) -> FloatTensor<B>;

    /// A sum or mean in FP32, over one dimension or over all.
    fn reduction(
        &self,
        kind: Reduction,
        tensor: FloatTensor<B>,
        dim: Option<usize>,
    ) -> Option<FloatTensor<B>>;

    /// A sum or difference of operands in one dtype, one of which is broadcast.
    fn sum(&self, sign: Sign, operands: [FloatTensor<B>; 2]) -> FloatTensor<B>;

    /// A square in FP32. Keeps the operand in the dtype `kept`.
    fn square(&self, tensor: FloatTensor<B>, kept: DType) -> Option<FloatTensor<B>>;

    /// A product with zeros and ones of the same shape, if the device has bytes. Keeps the zeros and
    /// ones as bytes or, with fusion, as a mask of bytes.
    fn dropout(&self, tensor: &FloatTensor<B>, noise: &FloatTensor<B>) -> Option<FloatTensor<B>>;

    /// A ReLU that keeps its result instead of its operand; the next layer keeps the result too.
    fn relu(&self, tensor: FloatTensor<B>) -> FloatTensor<B>;

    /// A sigmoid or a hyperbolic tangent that keeps its result instead of its operand.
    fn sigmoidal(&self, kind: Sigmoidal, tensor: FloatTensor<B>) -> FloatTensor<B>;

    /// A softmax over `dim` in FP32. Keeps the probabilities in the dtype `kept`.
    fn softmax(
        &self,
        kind: Softmax,
        tensor: FloatTensor<B>,
        dim: usize,
        kept: DType,
    ) -> FloatTensor<B>;

    /// A linear layer whose backward pass computes gradients in an order that fusion can join. `None`
    /// without fusion, and with gradient checkpointing.
    fn linear(
        &self,
        x: &FloatTensor<B>,
        weight: &FloatTensor<B>,
        bias: Option<&FloatTensor<B>>,
    ) -> Option<FloatTensor<B>>;

    /// Layer norm over the last dimension in FP32, without the shift. Keeps the normalized tensor
    /// in the dtype `kept`.
    fn layer_norm(
        &self,
        tensor: FloatTensor<B>,
        gamma: FloatTensor<B>,
        epsilon: f64,
        kept: DType,
    ) -> FloatTensor<B>;
}

/// The arithmetic operations that keep their operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Mul,
    Div,
}

/// The sign of a sum's second operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    Plus,
    Minus,
}

/// The reductions whose gradient is the same for each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Mean,
}

/// The activations whose gradient follows from their result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sigmoidal {
    Sigmoid,
    Tanh,
}

/// The variants of softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Softmax {
    /// exp(x) / sum(exp(x)).
    Plain,
    /// The logarithm of `Plain`.
    Log,
    /// For attention: a row of minus infinities gives zeros instead of NaN.
    Masked,
}

/// Stands in for types that have no public name, such as those of autodiff.
type Anything = dyn Any + Send + Sync;
/// An [`Entry`], a [`NodeOf`] or an [`Upper`].
type Registered = &'static Anything;
/// The tape extension of an autodiff backend.
struct Entry<B: Backend>(&'static dyn TapeExtension<B>);
/// Gets a tensor's node on the tape, for any checkpointing strategy.
struct NodeOf<T>(fn(&T) -> WeakNode);

/// Access to a tensor of the upper layer, for code that cannot name the layer's backends.
struct Upper<T> {
    /// The id of the tensor's node.
    id: fn(&T) -> u64,
    /// Marks the tensor as a scaled loss.
    #[cfg(feature = "train")]
    with_scaled: fn(T, ScaledLoss) -> T,
}

/// A weak reference to a node of autodiff.
pub(crate) struct WeakNode {
    node: Weak<Anything>,
    /// Autodiff's reference count of the node's tensors.
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
    pub(super) fn of<B: Backend>(tensor: &TapeTensor<B>) -> Self {
        Self {
            node: Arc::downgrade(&tensor.node) as Weak<Anything>,
            #[cfg(feature = "distributed")]
            held: Arc::downgrade(&tensor.rc) as Weak<Anything>,
        }
    }

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

    /// Whether anything holds the node besides one tensor.
    pub(crate) fn is_held(&self) -> bool {
        self.node.strong_count() > 1
    }
}

/// The registered values, by type. Process-wide, like the types.
static TAPES: Registry<TypeId, Registered> = Registry::new();

fn known<T: 'static>() -> Option<&'static T> {
    TAPES.get(&TypeId::of::<T>())?.downcast_ref()
}

/// The tape extension of a backend, if the backend is an `Autodiff` over [`Amp`].
pub(crate) fn of<B: Backend>() -> Option<&'static dyn TapeExtension<B>> {
    known::<Entry<B>>().map(|entry| entry.0)
}

/// A cast. On a tape with an extension, gradient checkpointing recomputes the cast.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let device = B::float_device(&tensor);
    if half_wanted()
        && B::ad_enabled(&device)
        && let Some(tape) = of::<B>()
    {
        return tape.cast(tensor, dtype);
    }
    converted::<B>(tensor, dtype.into())
}

/// The node of a tensor, if its backend is an `Autodiff` over [`Amp`]. Costs as much as [`of`].
pub(crate) fn node<B: Backend>(tensor: &FloatTensor<B>) -> Option<WeakNode> {
    let of = known::<NodeOf<FloatTensor<B>>>()?;
    Some(of.0(tensor))
}

/// The node id of a tensor, if its backend is an `AmpAutodiff` or the `Autodiff` in one.
pub(crate) fn id<B: Backend, T: 'static>(tensor: &T, device: &B::Device) -> Option<u64> {
    let upper = B::ad_enabled(device).then(known::<Upper<T>>)??;
    Some((upper.id)(tensor))
}

/// Marks a tensor of an `AmpAutodiff` as a scaled loss.
///
/// # Panics
///
/// For another backend, or a checkpointing strategy that is not one of Burn's.
#[cfg(feature = "train")]
pub(crate) fn with_scaled<B: Backend>(
    tensor: FloatTensor<B>,
    scaled: ScaledLoss,
) -> FloatTensor<B> {
    let upper = known::<Upper<FloatTensor<B>>>()
        .expect("an AmpAutodiff with one of Burn's checkpointing strategies");
    (upper.with_scaled)(tensor, scaled)
}

/// Casts an updated parameter to half ahead of its use, if half precision is in force. With fusion, the
/// cast joins the kernel of the optimizer; otherwise the first use casts the parameter.
pub(crate) fn cast_ahead<B: Backend>(leaf: &FloatTensor<B>) {
    let device = B::float_device(leaf);
    if leaf.dtype() == DType::F32
        && device::is_fused::<B>(&device)
        && let Mode::On(half) = around_step(|| DeviceContext::of::<B>(&device).mode)
        && let Some(tape) = of::<B>()
    {
        tape.cast_ahead(leaf, half);
    }
}

/// Puts a device in use when the layer above `B` creates a tensor on it, and registers the tapes above
/// that layer. Returns the device's half support.
pub(crate) fn registered<B: Backend>(device: &B::Device) -> Support {
    if known::<NodeOf<TapeTensor<B>>>().is_none() {
        // The device without its own autodiff, as the layers use it.
        register::<B>(device.inner());
    }
    device::put_in_use::<B>(device)
}

#[cold]
fn register<B: Backend>(device: &B::Device) {
    assert_one_autodiff::<B>(device);
    if !B::ad_enabled(device) {
        register_strategy::<B, NoCheckpointing>();
        register_strategy::<B, BalancedCheckpointing>();
    }
    // Added last: [`registered`] checks only this entry.
    add(const { &NodeOf::<TapeTensor<B>>(WeakNode::of) });
}

fn register_strategy<B: Backend, C: CheckpointStrategy>() {
    add(const { &Entry::<Autodiff<Amp<B>, C>>(&Recorded::<B, C>(PhantomData)) });
    add(const {
        &Upper::<AmpTensor<Autodiff<Amp<B>, C>>> {
            id: |tensor| tensor.primitive.node.id.value,
            #[cfg(feature = "train")]
            with_scaled: |tensor, scaled| tensor.with_scaled(Some(scaled)),
        }
    });
}

fn add<T: Send + Sync>(value: &'static T) {
    TAPES.get_or_add(TypeId::of::<T>(), || value);
}

/// # Panics
///
/// If the backend of a layer has autodiff that is not burn-amp's.
pub(crate) fn assert_one_autodiff<B: Backend>(device: &B::Device) {
    assert!(
        !B::ad_enabled(device) || B::name(device).starts_with("autodiff<amp<"),
        "burn-amp: AmpAutodiff adds autodiff, but its backend {} has autodiff already. Use the backend \
         without autodiff: AmpAutodiff<Flex>, not AmpAutodiff<Autodiff<Flex>>",
        B::name(device)
    );
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::Shape;
    use burn_backend::ops::FloatTensorOps;

    use super::*;

    #[test]
    fn a_tensor_registers_its_tapes_and_a_query_registers_nothing() {
        /// A stack that no other test has.
        type Layers = Autodiff<Amp<Amp<Amp<Flex>>>, BalancedCheckpointing>;

        let device = Default::default();
        Layers::dtype_usage(&device, DType::F32);
        Layers::name(&device);
        assert!(of::<Layers>().is_none());
        let tensor = Layers::float_zeros(Shape::new([1]), &device, DType::F32.into());
        assert!(of::<Layers>().is_some());
        assert!(node::<Layers>(&tensor).is_some_and(|node| node.is_alive()));
    }
}
