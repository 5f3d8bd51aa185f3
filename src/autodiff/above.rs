//! The layer above autodiff, as a [`Side`] of it.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::{Backend, DType, TensorMetadata};

use super::recorded::{self, Cast, Recomputed, TapeTensor};
use super::{leaves, shared_casts};
use crate::device::{DeviceContext, is_fused};
use crate::policy::Mode;
use crate::precision::{around_step, half_wanted, keep_dtypes};
use crate::tensor::{Above, Function, Side, Step, WeakNode, converted};
use crate::{Amp, AmpTensor};

impl<B: Backend, C: CheckpointStrategy> Side<Autodiff<Amp<B>, C>> for Above {
    const RECORDS: bool = true;

    type Inner = B;

    fn record<K: Step<B, N>, const N: usize>(
        step: K,
        operands: [TapeTensor<B>; N],
    ) -> Result<TapeTensor<B>, [TapeTensor<B>; N]> {
        recorded::record::<B, C, K, N>(step, operands)
    }

    fn record_dropout(tensor: &TapeTensor<B>, noise: &TapeTensor<B>) -> Option<TapeTensor<B>> {
        recorded::record_dropout::<B, C>(tensor, noise)
    }

    fn cast(tensor: TapeTensor<B>, dtype: DType) -> TapeTensor<B> {
        if !half_wanted() {
            return converted::<Autodiff<Amp<B>, C>, Self>(tensor, dtype);
        }
        let Ok(cast) = recorded::record::<B, C, _, 1>(Cast(dtype), [tensor]) else {
            unreachable!("a cast is always recorded")
        };
        cast
    }

    fn computed(tensor: TapeTensor<B>, functions: &[Function]) -> TapeTensor<B> {
        let step = Recomputed {
            functions: functions.to_vec(),
            kept: tensor.dtype(),
        };
        let Ok(computed) = keep_dtypes(|| recorded::record::<B, C, _, 1>(step, [tensor])) else {
            unreachable!("it is recorded with every strategy")
        };
        computed
    }

    fn set_copy(tensor: &TapeTensor<B>, half: &TapeTensor<B>) {
        tensor.primitive.set_copy(&half.primitive);
    }

    fn into_dtype(tensor: AmpTensor<Autodiff<Amp<B>, C>, Self>, dtype: DType) -> TapeTensor<B> {
        if tensor.dtype() == dtype {
            return tensor.into_dtype(dtype);
        }
        shared_casts::shared_cast(&tensor, dtype).unwrap_or_else(|| tensor.cast_alone(dtype))
    }

    /// If half precision is in force. With fusion, the cast joins the kernel of the optimizer; otherwise the first
    /// use casts the parameter.
    fn cast_ahead(leaf: &TapeTensor<B>) {
        let device = leaf.primitive.device();
        if leaf.dtype() == DType::F32
            && is_fused::<B>(&device)
            && let Mode::On(half) = around_step(|| DeviceContext::of::<B>(&device).mode)
        {
            leaf.primitive.cast_ahead(half);
        }
    }

    fn remember(leaf: &AmpTensor<Autodiff<Amp<B>, C>, Self>) {
        leaves::add(WeakNode::of(&leaf.primitive), leaves::LeafInfo::of(leaf));
    }

    fn is_tracked(tensor: &TapeTensor<B>) -> bool {
        tensor.is_tracked()
    }

    fn node(tensor: &TapeTensor<B>) -> Option<WeakNode> {
        Some(WeakNode::of(tensor))
    }
}
