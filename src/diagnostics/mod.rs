//! Diagnostics: the search for non-finite values, and the report of a training run.

pub(crate) mod anomaly;
pub(crate) mod compare;
mod finite;
#[cfg(feature = "plot")]
mod plot;
mod report;

pub(crate) use finite::FiniteCheck;
pub use report::AmpReport;
