//! Automatic mixed precision for [Burn](https://burn.dev): change one type, train in half
//! precision.
//!
//! ```
//! use burn::backend::Flex;
//! use burn_amp::AmpAutodiff;
//!
//! type MyBackend = AmpAutodiff<Flex>; // was: Autodiff<Flex>
//! ```
//!
//! Contractions run in bf16 or f16, what is sensitive runs in FP32, and parameters, gradients and
//! files stay FP32. In f16 the loss is scaled, and a step whose gradients overflow is skipped.
//!
//! - [`Precision`] and [`AmpConfig`]: what a device computes in; [`with_precision`] and
//!   [`full_precision`]: what a piece of code does.
//! - [`GradScaler`]: the loss scale, and the explicit protocol of PyTorch's `GradScaler`.
//! - [`AmpReport`]: what became of it on a device.
//! - [`policy`]: which operation runs in which precision.
//! - [`prelude`]: a ready type for each of Burn's backends, and what a program mostly uses.
//! - [`guide`]: the guide, from a quick start to troubleshooting.
#![cfg_attr(
    feature = "train",
    doc = "- [`MixedPrecisionTrainer`] and [`MixedPrecision`]: a training loop, and its pieces.
- [`AmpTrainingExt`], [`AmpLrScheduler`] and [`AmpOptimizer`]: for Burn's `Learner`."
)]
//!
//! # Features
//!
//! - `train` (default): the explicit protocol, [`GradScaler`] as a Burn record, the trainer, and
//!   what Burn's `Learner` takes.
//! - `plot`: [`AmpReport::save_svg`](AmpReport), the loss scale as a picture.
//! - `distributed`: Burn's distributed data parallel, for backends that can do it.
//! - `flex`, `ndarray`, `cuda`, `rocm`, `wgpu`, `vulkan`, `metal`, `webgpu`, `tch`, `cpu`: Burn's
//!   backends, for the ready types of the [`prelude`]. [`Amp`] and [`AmpAutodiff`] need none of
//!   them: they take any backend.
//! - `fusion`, `autotune`: those of the backends that are switched on.

#![warn(missing_docs)]

mod anomaly;
mod autodiff;
mod backend;
mod device;
#[cfg(feature = "distributed")]
mod distributed;
mod error;
mod file;
mod finite;
pub mod guide;
mod ir;
mod ops;
#[cfg(feature = "plot")]
mod plot;
pub mod policy;
mod precision;
pub mod prelude;
mod qualification;
mod report;
mod scaler;
mod tail;
mod tensor;
mod traffic;
#[cfg(feature = "train")]
mod train;

pub use anomaly::{Anomaly, Pass};
pub use autodiff::{AmpAutodiff, AmpGradients};
pub use backend::Amp;
pub use device::{AmpConfig, WhenStuck, precision_of};
pub use error::AmpError;
pub use precision::{Precision, full_precision, with_precision};
pub use report::AmpReport;
pub use scaler::{
    Dynamic, GradScaler, LastStep, LossScaleConfig, LossScaler, Outcome, ScaleEntry, ScaleHistory,
    Skipped, Transition,
};
pub use tensor::AmpTensor;
pub use traffic::Casts;
#[cfg(feature = "train")]
pub use train::{
    AccumulationRecord, AmpLrScheduler, AmpLrSchedulerItem, AmpLrSchedulerRecord, AmpOptimizer,
    AmpTraining, AmpTrainingExt, ConvertFloat, LossScaleMetric, MixedPrecision,
    MixedPrecisionTrainer, PrecisionMetric, SkippedStepsMetric, StepMetrics, StepProgress,
    TrainerRecord, clip_grad_norm,
};
