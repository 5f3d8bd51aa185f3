//! Loss scaling: the configuration, the state machine, and the handle that a backward pass uses.

mod config;
#[cfg(feature = "train")]
pub(crate) mod explicit;
mod handle;
mod history;
mod saved;
mod state;

pub use config::{Dynamic, LossScaleConfig};
pub use handle::{GradScaler, LastStep};
pub use history::{ScaleEntry, ScaleHistory, Skipped};
pub use state::{LossScaler, Outcome, Transition};

#[cfg(feature = "train")]
pub(crate) use explicit::Begun;
#[cfg(feature = "train")]
pub(crate) use handle::Listener;
pub(crate) use handle::{InForce, NonFinite, in_force};
