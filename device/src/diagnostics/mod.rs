//! What mixed precision did on a device, and whether tensors are finite.

pub(crate) mod finite;
mod report;

pub use report::AmpReport;
