//! Loss scaling: configuration, state machine, history, saved form, what a step remembers, the
//! explicit protocol, and what the clones of a handle share.

mod anomaly;
mod config;
mod handle;
mod history;
mod json;
mod left;
mod log;
mod metrics;
mod progress;
mod protocol;
mod saved;
mod state;
mod step;

pub use anomaly::{Anomaly, AnomalyPass, is_watched_by_environment};
pub use config::{DynamicLossScale, LossScaleConfig};
pub use handle::{Listener, Shared, SharedScaler};
pub use history::{ScaleEntry, ScaleHistory, SkippedStep};
pub use log::RecordedStep;
pub use metrics::{ShownStep, StepQueue};
pub use progress::{StepMetrics, StepProgress, WhenStuck, check_trainer, continues_window};
pub use protocol::{Parameter, PendingStep, PendingStepRecord};
pub use state::{LossScaler, StepOutcome, Transition};
pub use step::{Findings, LastStep};

use history::skipped;
