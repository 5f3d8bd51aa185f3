//! Loss scaling: configuration, state machine, history, saved form, and what a step remembers.

mod anomaly;
mod config;
mod history;
mod json;
mod log;
mod saved;
mod state;
mod step;

pub use anomaly::{Anomaly, Pass};
pub use config::{Dynamic, LossScaleConfig};
pub use history::{ScaleEntry, ScaleHistory, Skipped, skipped};
pub use log::RecordedStep;
pub use state::{LossScaler, Outcome, Transition};
pub use step::{LastStep, NonFinite};
