//! What belongs to a training loop: the pieces of mixed precision, and a trainer made of them.

mod convert;
pub(crate) mod gradients;
mod mixed_precision;
mod trainer;

pub use convert::ConvertFloat;
pub use mixed_precision::MixedPrecision;
pub use trainer::{
    AccumulationRecord, MixedPrecisionTrainer, StepMetrics, StepProgress, TrainerRecord,
};
