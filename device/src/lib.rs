#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod backend;
mod client;
mod device;
mod error;
mod grad_scaler;
mod local;
mod ops;
mod report;
mod server;
mod tensor;

pub use backend::Amp;
pub use burn_amp_core::{
    AmpError, Casts, Dynamic, LastStep, LossScaleConfig, LossScaler, Outcome, Precision,
    ScaleEntry, ScaleHistory, Skipped, StuckReason, Transition, policy,
};
pub use client::connect;
pub use device::{OpCasts, configure, precision_of, share_half_copies};
pub use error::Error;
pub use grad_scaler::GradScaler;
pub use local::*;
pub use report::AmpReport;
pub use server::AmpServer;
pub use tensor::AmpTensor;
