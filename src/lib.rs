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
//! This crate is for Burn 0.21, from Rust 1.92; for later versions of Burn there is `burn-amp-device`.
//!
//! Matrix products, convolutions and attention (contractions) run in bf16 or f16 if a parameter takes part, or
//! something computed from one; products of data stay FP32. Sensitive operations run in FP32, and parameters,
//! gradients and files stay FP32. In f16 the loss is scaled, and a step whose gradients overflow is skipped.
//!
//! - [`Precision`] and [`AmpConfig`]: the precision of a device; [`with_precision`] and
//!   [`full_precision`]: the precision of a piece of code.
//! - [`GradScaler`]: the loss scale, and the explicit protocol of PyTorch's `GradScaler`.
//! - [`AmpReport`]: what mixed precision did on a device.
//! - [`policy`]: which operation runs in which precision.
//! - [`prelude`]: a ready-made type for each of Burn's backends, and the most used names.
//! - [`guide`]: the guide, from a quick start to troubleshooting.
#![cfg_attr(
    feature = "train",
    doc = "- [`MixedPrecisionTrainer`] and [`MixedPrecision`]: a training loop, and its pieces.
- [`AmpTrainingExt`] and [`GradScaler::checkpoint_with`]: for Burn's `Learner`."
)]
//!
//! # Features
//!
//! - `train` (default): the explicit protocol, [`GradScaler`] as a Burn record, the trainer, and
//!   the parts for Burn's `Learner`.
//! - `plot`: [`AmpReport::save_svg`](AmpReport), a plot of the loss scale.
//! - `distributed`: Burn's distributed data parallel, for backends that support it.
//! - `flex`, `ndarray`, `cuda`, `rocm`, `wgpu`, `vulkan`, `metal`, `webgpu`, `tch`, `cpu`: Burn's
//!   backends, for the ready-made types of the [`prelude`]. [`Amp`] and [`AmpAutodiff`] take any
//!   backend without these features. With `tch`, mixed precision on LibTorch calls
//!   LibTorch where Burn composes operations: a half linear layer with a bias, the backward pass of
//!   a half ReLU, a softmax's backward pass in FP32, and the mask of a dropout as bytes. With `cuda`, [`Precision::Auto`]
//!   knows the GPUs that have no matrix units for bf16.
//! - `fusion`, `autotune`: the same features of the enabled backends.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

// State that is not held in a value, and the reason. A thread has
// - `precision::MODES`: regions, and state that the two layers pass each other around Burn's autodiff,
//   which has no argument for it,
// - `scaler::handle::IN_SCOPE`: the scalers of its scopes, which a `Copy` mode cannot hold,
// - `diagnostics::anomaly::WATCHED`: the findings of anomaly detection in the pass that runs on it,
// - `autodiff::replicas::JOINED` (feature `distributed`): dropped when the replica's thread ends.
//
// A process has these, and a few flags and counters:
// - `device::state::STATES`: a device outlives every tensor on it, and any thread may name it,
// - `device::kind::KINDS`: a backend's name is a new text each time,
// - `autodiff::leaves::LEAVES`: autodiff does not return the leaves that a pass reaches,
// - `autodiff::replicas::STARTED` (feature `distributed`): Burn starts one server for each backend.
mod autodiff;
mod backend;
mod call;
mod device;
mod diagnostics;
pub mod guide;
mod ops;
pub mod policy;
mod precision;
pub mod prelude;
mod scaler;
mod tensor;
#[cfg(feature = "train")]
mod train;
mod workarounds;

#[doc(inline)]
pub use burn_amp_core::{
    AmpError, Anomaly, AnomalyPass, Casts, DynamicLossScale, LastStep, LossScaleConfig, LossScaler,
    Precision, ScaleEntry, ScaleHistory, SkippedStep, StepOutcome, StuckReason, Transition,
    WhenStuck,
};
#[cfg(feature = "train")]
#[doc(inline)]
pub use burn_amp_core::{StepMetrics, StepProgress};

pub use autodiff::AmpAutodiff;
// Types that Burn's traits refer to, and that programs only pass on to Burn.
#[doc(hidden)]
pub use autodiff::AmpGradients;
pub use device::{AmpConfig, exceptions, precision_of};
// For `cargo xtask bench trials`.
#[doc(hidden)]
pub use device::is_exact;
pub use diagnostics::AmpReport;
pub use precision::{full_precision, with_precision};
pub use scaler::GradScaler;
#[doc(hidden)]
pub use tensor::AmpTensor;
pub use tensor::{Above, Amp, Below, Side};
#[doc(hidden)]
#[cfg(feature = "train")]
pub use train::{
    AccumulationRecord, LrSchedulerWithScalerItem, LrSchedulerWithScalerRecord, TrainerRecord,
};
#[cfg(feature = "train")]
pub use train::{
    AmpTraining, AmpTrainingExt, ComparedGradient, ComparedOperation, Comparison, ConvertFloat,
    LossScaleMetric, LrSchedulerWithScaler, MixedPrecision, MixedPrecisionTrainer,
    MixedPrecisionTrainerConfig, PrecisionMetric, SkippedStepsMetric, clip_grad_norm, compare,
    half_weights,
};
