//! Loss scaling: configuration, state machine, history, saved form, what a step remembers, the
//! explicit protocol, and what the clones of a handle share.

mod config;
mod handle;
mod history;
mod json;
mod left;
mod metrics;
mod overflow;
mod protocol;
mod saved;
mod state;
mod step;

pub use config::{DynamicLossScale, LossScaleConfig};
pub use handle::{Listener, Shared, SharedScaler};
pub use history::{RecordedStep, ScaleEntry, ScaleHistory, SkippedStep};
pub use metrics::{ShownStep, StepQueue};
pub use overflow::{Overflow, OverflowFallback, Overflowed};
pub use protocol::{Parameter, PendingStep, PendingStepRecord};
pub use state::{LossScaler, StepOutcome, Transition};
pub use step::{Anomaly, AnomalyPass, Findings, LastStep, Watched, is_watched_by_environment};
