//! What code that is generic over its backend asks of an `AmpAutodiff`. No bound says that a backend is one.

use std::any::{Any, TypeId};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn_backend::backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;

use super::AmpGradients;
use crate::AmpTensor;
use crate::scaler::ScaledLoss;
use crate::tensor::Above;

/// Whether a backend is an `AmpAutodiff`, which scales by itself.
pub(crate) fn is_amp<B: AutodiffBackend>() -> bool {
    TypeId::of::<B::Gradients>() == TypeId::of::<AmpGradients<B::InnerBackend>>()
}

/// Some of what `$f` makes of a tensor of an `AmpAutodiff`. `None` for another backend, and for a checkpointing
/// strategy that is not one of Burn's.
macro_rules! if_above {
    ($tensor:expr, $downcast:ident, |$above:ident| $f:expr) => {
        if let Some($above) = $tensor.$downcast::<On<B::InnerBackend, NoCheckpointing>>() {
            Some($f)
        } else if let Some($above) =
            $tensor.$downcast::<On<B::InnerBackend, BalancedCheckpointing>>()
        {
            Some($f)
        } else {
            None
        }
    };
}

/// A tensor of the layer above an autodiff whose inner backend is `I`.
type On<I, C> = AmpTensor<Autodiff<I, C>, Above>;

/// The id of a tensor's node, if `B` is an `AmpAutodiff`.
pub(crate) fn node_id<B: AutodiffBackend>(tensor: &FloatTensor<B>) -> Option<u64> {
    let tensor = tensor as &dyn Any;
    if_above!(tensor, downcast_ref, |above| above.primitive.node.id.value)
}

/// Marks a tensor as a scaled loss, if `B` is an `AmpAutodiff`.
pub(crate) fn set_scaled<B: AutodiffBackend>(
    tensor: &mut FloatTensor<B>,
    scaled: ScaledLoss,
) -> Option<()> {
    let tensor = tensor as &mut dyn Any;
    if_above!(tensor, downcast_mut, |above| above.set_scaled(scaled))
}
