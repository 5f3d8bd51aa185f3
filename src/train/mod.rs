//! Training loops: the pieces of mixed precision, and a trainer built from them.

mod convert;
mod explicit;
mod gradients;
mod half_weights;
mod learner;
mod lr_scheduler;
mod masters;
mod metrics;
mod mixed_precision;
mod optimizer;
mod outcomes;
mod trainer;

pub use convert::ConvertFloat;
pub use gradients::clip_grad_norm;
pub use half_weights::half_weights;
pub use learner::{AmpTraining, AmpTrainingExt};
pub use lr_scheduler::{AmpLrScheduler, AmpLrSchedulerItem, AmpLrSchedulerRecord};
pub use metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
pub use mixed_precision::MixedPrecision;
pub use optimizer::AmpOptimizer;
pub use trainer::{
    AccumulationRecord, MixedPrecisionTrainer, MixedPrecisionTrainerConfig, TrainerRecord,
};
