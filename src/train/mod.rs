//! Training loops: the pieces of mixed precision, and a trainer built from them.

mod compare;
mod convert;
mod grad_scaler;
mod gradients;
mod half_weights;
mod metrics;
mod mixed_precision;
mod schedule;
mod steps;
mod strategy;
mod trainer;
mod training;
mod workers;

pub use compare::{ComparedGradient, ComparedOperation, Comparison, compare};
pub use convert::ConvertFloat;
pub use gradients::clip_grad_norm;
pub use half_weights::half_weights;
pub use metrics::{LossScaleMetric, PrecisionMetric, SkippedStepsMetric};
pub use mixed_precision::MixedPrecision;
pub use schedule::{LrSchedulerWithScaler, LrSchedulerWithScalerItem, LrSchedulerWithScalerRecord};
pub use trainer::{
    AccumulationRecord, MixedPrecisionTrainer, MixedPrecisionTrainerConfig, TrainerRecord,
};
pub use training::{AmpTraining, AmpTrainingExt};
