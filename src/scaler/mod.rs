//! Loss scaling: the configuration, the state machine, and the handle that a backward pass uses.

mod config;
mod handle;
mod state;

pub use config::{Dynamic, LossScaleConfig};
pub use handle::GradScaler;
pub use state::{LossScaler, Outcome, Transition};

pub(crate) use handle::current;
