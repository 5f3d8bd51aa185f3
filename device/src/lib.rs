#![doc = include_str!("../README.md")]
#![warn(missing_docs)]
// Without a backend, as for a client of a server, nothing is decorated.
#![cfg_attr(
    not(any(feature = "flex", feature = "cube")),
    allow(dead_code, unused_imports, unused_variables)
)]

#[cfg(all(feature = "burn-0-22", feature = "burn-0-23"))]
compile_error!(
    "burn-amp-device has both features `burn-0-22` (in `default`) and `burn-0-23` on: expected one \
     version of Burn. For Burn 0.23 add `default-features = false`, for Burn 0.22 remove `burn-0-23`"
);
#[cfg(not(any(feature = "burn-0-22", feature = "burn-0-23")))]
compile_error!(
    "burn-amp-device has no version of Burn: expected the feature `burn-0-22` or `burn-0-23`, as the \
     program's version. Beside `default-features = false`, add this feature to `features`"
);

include!("burn.rs");

mod backend;
#[cfg(feature = "remote")]
mod client;
mod device;
mod diagnostics;
mod error;
mod local;
mod ops;
mod region;
#[cfg(feature = "remote")]
mod serve;
mod tensor;
mod train;

#[doc(hidden)]
pub use backend::Amp;
pub use burn_amp_core::{
    AmpError, Anomaly, AnomalyPass, Casts, DynamicLossScale, Exception, LastStep, LossScaleConfig,
    LossScaler, Precision, Reason, ScaleEntry, ScaleHistory, SkippedStep, StepMetrics, StepOutcome,
    StepProgress, StuckReason, Transition, WhenStuck, policy,
};
#[cfg(feature = "remote")]
pub use client::connect;
pub use device::OpCasts;
#[doc(hidden)]
pub use device::configure;
pub use diagnostics::AmpReport;
pub use error::Error;
pub use local::*;
pub use region::{RegionTensors, full_precision, with_precision};
#[cfg(feature = "remote")]
pub use serve::AmpServer;
#[doc(hidden)]
pub use tensor::AmpTensor;
#[doc(hidden)]
pub use train::AccumulationRecord;
#[cfg(feature = "train")]
pub use train::{
    AmpTraining, AmpTrainingExt, LossScaleMetric, PrecisionMetric, SkippedStepsMetric,
};
pub use train::{
    GradScaler, MixedPrecisionTrainer, MixedPrecisionTrainerConfig, TrainerRecord, clip_grad_norm,
    half_weights,
};
