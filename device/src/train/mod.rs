//! Mixed precision for Burn's `Learner`.

mod events;
mod metrics;
mod strategy;
mod training;

pub use metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
pub use training::{AmpTraining, AmpTrainingExt};
