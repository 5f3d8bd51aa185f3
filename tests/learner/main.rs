//! Burn's `Learner` on `AmpAutodiff`: all that it does on any backend, and what burn-amp adds.

#[path = "../common/mod.rs"]
mod common;
mod harness;

mod devices;
mod events;
mod launch;
mod metrics;
mod readme;
mod resume;
mod schedule;
mod unchanged;
