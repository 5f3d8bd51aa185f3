//! Loss scaling: the handle that a backward pass uses. Independent of tensors and modules.

mod handle;
#[cfg(feature = "train")]
mod pending_step;

pub use handle::GradScaler;

#[cfg(feature = "train")]
pub(crate) use handle::Listener;
pub(crate) use handle::{ScaledLoss, in_scope};
#[cfg(feature = "train")]
pub(crate) use pending_step::{LossCheck, PendingStep, PendingStepRecord, UnscaledGradient};
