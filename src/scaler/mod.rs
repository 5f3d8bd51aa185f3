//! Loss scaling: the handle that a backward pass uses. Independent of tensors and modules.

mod handle;
#[cfg(feature = "train")]
mod losses;

pub use handle::GradScaler;

#[cfg(feature = "train")]
pub(crate) use handle::{Pass, Passes, of_loop, other_scaled};
pub(crate) use handle::{ScaledLoss, in_scope};
#[cfg(feature = "train")]
pub(crate) use losses::{LossCheck, Losses};
