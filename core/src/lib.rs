//! The op policy, the precision and the loss scale of
//! [burn-amp](https://docs.rs/burn-amp), without tensors.
//!
//! Use burn-amp, which re-exports what its users need. This crate contains the parts that do not depend on
//! the version of Burn. The features `burn-0-21`, `burn-0-22` and `burn-0-23` implement [`FloatDType`] for
//! the dtypes of these versions.

#![warn(missing_docs)]

mod casts;
mod dtype;
mod error;
mod exceptions;
mod file;
mod operations;
pub mod policy;
mod precision;
#[cfg(feature = "record-0-21")]
mod record;
mod reference;
mod scaler;
mod trainer;
mod verified;
mod words;

pub use casts::Casts;
pub use dtype::FloatDType;
pub use error::{AmpError, StuckReason};
pub use exceptions::{Exception, Exceptions, Reason};
#[doc(hidden)]
pub use exceptions::{ask_for_exceptions, files_of_exceptions, report_lines};
#[doc(hidden)]
pub use file::replace_file;
pub use precision::Precision;
#[doc(hidden)]
pub use precision::{Capabilities, Chosen, DTypeUses, Registry};
#[doc(hidden)]
pub use reference::{Reference, Taken, Verdict, multiplied};
pub use scaler::{
    Anomaly, AnomalyPass, DynamicLossScale, LastStep, LossScaleConfig, LossScaler, ScaleEntry,
    ScaleHistory, SkippedStep, StepOutcome, Transition,
};
#[doc(hidden)]
pub use scaler::{
    Findings, Listener, Overflow, OverflowFallback, Overflowed, Parameter, PendingStep,
    PendingStepRecord, RecordedStep, Shared, SharedScaler, ShownStep, StepQueue, Watched,
    is_watched_by_environment,
};
pub use trainer::{StepMetrics, StepProgress, WhenStuck};
#[doc(hidden)]
pub use trainer::{check_trainer, continues_window};
#[doc(hidden)]
pub use verified::{Begun, Verification};
#[doc(hidden)]
pub use words::{counted, grouped, line};
