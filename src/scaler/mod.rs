//! Loss scaling: configuration, state machine, history, saved form, and the handle that a backward
//! pass uses. Independent of tensors and modules.

mod anomaly;
mod config;
mod handle;
mod history;
#[cfg(feature = "train")]
mod pending_step;
mod saved;
mod state;

pub use anomaly::{Anomaly, Pass};
pub use config::{Dynamic, LossScaleConfig};
pub use handle::{GradScaler, LastStep};
pub use history::{ScaleEntry, ScaleHistory, Skipped};
pub use state::{LossScaler, Outcome, Transition};

#[cfg(feature = "train")]
pub(crate) use handle::Listener;
pub(crate) use handle::{NonFinite, ScaledLoss, in_scope};
#[cfg(feature = "train")]
pub(crate) use pending_step::{PendingStep, PendingStepRecord, UnscaledGradient};
