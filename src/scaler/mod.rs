//! Loss scaling: the handle that a backward pass uses. Independent of tensors and modules.

mod handle;
#[cfg(feature = "train")]
mod losses;

pub use handle::GradScaler;

pub(crate) use handle::{ScaledLoss, in_scope, of_loop};
#[cfg(feature = "train")]
pub(crate) use losses::{LossCheck, Losses};
