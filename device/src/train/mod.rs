//! Training: the loss scale, a model's gradients and weights, a trainer for loops, and the parts for Burn's `Learner`.

#[cfg(feature = "train")]
mod events;
mod grad_scaler;
mod gradients;
mod half_weights;
#[cfg(feature = "train")]
mod metrics;
mod schedule;
#[cfg(feature = "train")]
mod strategy;
mod trainer;
#[cfg(feature = "train")]
mod training;

pub use grad_scaler::GradScaler;
pub use gradients::clip_grad_norm;
pub use half_weights::half_weights;
#[cfg(feature = "train")]
pub use metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
pub use trainer::{
    AccumulationRecord, MixedPrecisionTrainer, MixedPrecisionTrainerConfig, TrainerRecord,
};
#[cfg(feature = "train")]
pub use training::{AmpTraining, AmpTrainingExt};
