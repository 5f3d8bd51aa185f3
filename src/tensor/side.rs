//! The side of autodiff that a layer is on, as a type.

use std::fmt::Debug;

use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::Ops;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};

use super::{AmpTensor, Function, WeakNode, converted};
use crate::precision::in_kernel;

/// The side of Burn's autodiff that an [`Amp`](crate::Amp) on `B` is on: [`Below`] or [`Above`].
///
/// A backend trait of your own is implemented for both sides at once:
/// `impl<B: MyOps, S: Side<B>> MyOps for Amp<B, S>`.
///
/// Sealed: what a side does is burn-amp's own, and may change.
pub trait Side<B: Backend>:
    Sealed + Debug + Clone + Copy + Default + Send + Sync + 'static
{
    /// Whether autodiff records the operations of `B`. Otherwise they are kernels.
    #[doc(hidden)]
    const RECORDS: bool = false;

    /// The backend on which a recorded step runs.
    #[doc(hidden)]
    type Inner: Backend;

    /// Records a step. Returns the operands if the policy leaves the record to Burn.
    #[doc(hidden)]
    fn record<K: Step<Self::Inner, N>, const N: usize>(
        _step: K,
        operands: [FloatTensor<B>; N],
    ) -> Result<FloatTensor<B>, [FloatTensor<B>; N]> {
        Err(operands)
    }

    /// Records a product with zeros and ones of the same shape, if the device has bytes. The tape keeps the
    /// zeros and ones as bytes or, with fusion, as a mask of bytes.
    #[doc(hidden)]
    fn record_dropout(_tensor: &FloatTensor<B>, _noise: &FloatTensor<B>) -> Option<FloatTensor<B>> {
        None
    }

    /// The policy's own cast, and not the user's. Gradient checkpointing recomputes it.
    #[doc(hidden)]
    fn cast(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
        converted::<B, Self>(tensor, dtype)
    }

    /// Functions of a half tensor, in FP32.
    #[doc(hidden)]
    fn computed(tensor: FloatTensor<B>, functions: &[Function]) -> FloatTensor<B> {
        let wide = Self::cast(tensor, DType::F32);
        in_kernel(|| functions.iter().fold(wide, super::computed::<B>))
    }

    /// Says that the second tensor is the first one in half.
    #[doc(hidden)]
    fn set_copy(_tensor: &FloatTensor<B>, _half: &FloatTensor<B>) {}

    /// A tensor in `dtype`, with one cast for several uses.
    #[doc(hidden)]
    fn into_dtype(tensor: AmpTensor<B, Self>, dtype: DType) -> FloatTensor<B> {
        tensor.into_dtype(dtype)
    }

    /// Casts an updated parameter to half ahead of its use.
    #[doc(hidden)]
    fn cast_ahead(_leaf: &FloatTensor<B>) {}

    /// Remembers a tensor whose gradient is wanted, so that a backward pass finds it.
    #[doc(hidden)]
    fn remember(_leaf: &AmpTensor<B, Self>) {}

    /// Whether a gradient flows to a tensor.
    #[doc(hidden)]
    fn is_tracked(_tensor: &FloatTensor<B>) -> bool {
        false
    }

    /// A tensor's node on the tape.
    #[doc(hidden)]
    fn node(_tensor: &FloatTensor<B>) -> Option<WeakNode> {
        None
    }
}

/// Below Burn's autodiff, or without autodiff: the operations of the backend are kernels.
#[derive(Debug, Clone, Copy, Default)]
pub struct Below;

/// Above Burn's autodiff: casts, and what the policy records itself, are on the tape.
#[derive(Debug, Clone, Copy, Default)]
pub struct Above;

impl<B: Backend> Side<B> for Below {
    type Inner = B;
}

/// No other crate adds a side.
pub trait Sealed {}

impl Sealed for Below {}
impl Sealed for Above {}

/// The operands of a step.
pub type Operands<B, const N: usize> = [AmpTensor<B>; N];

/// A recorded formula on `N` operands: the form that the tape keeps of an operation, where Burn's own form
/// would keep FP32 tensors. The values of the result are the same.
///
/// A step runs below autodiff, where the policy keeps each operation of a formula in FP32 or in its operands'
/// dtype.
pub trait Step<B: Backend, const N: usize>: Clone + Debug + Send + 'static {
    /// What the backward pass needs.
    type Kept: Clone + Debug + Send + 'static;

    /// What gradient checkpointing keeps.
    const CHECKPOINT: Checkpoint;

    /// Computes the result, also when gradient checkpointing recomputes it.
    fn forward(&self, operands: Operands<B, N>) -> AmpTensor<B>;

    /// Computes the result and what the backward pass needs, if a gradient flows to an operand: to those that
    /// are `tracked`.
    fn keep(&self, operands: Operands<B, N>, tracked: [bool; N]) -> (Self::Kept, AmpTensor<B>);

    /// Computes what the backward pass needs from the operands.
    fn retrieve(&self, operands: Operands<B, N>) -> Self::Kept {
        self.keep(operands, [true; N]).0
    }

    /// Registers the gradients of the operands.
    fn backward(self, ops: Ops<Self::Kept, N>, grads: &mut Gradients);
}

/// What a step keeps with gradient checkpointing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checkpoint {
    /// The nodes of its operands, from which it [retrieves](Step::retrieve) the rest.
    Operands,
    /// What it keeps anyway.
    Kept,
    /// Burn's own form: the step is not recorded.
    Burns,
}
