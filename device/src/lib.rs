#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod back;
mod backend;
mod batching;
mod client;
mod device;
mod ending;
mod error;
mod front;
mod grad_scaler;
mod host;
mod local;
mod ops;
mod report;
mod server;
mod sockets;
mod tensor;
mod wire;

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
