//! Shared by the tests of burn-amp.

pub mod checked;
pub mod close;
// Optimized code, as that of the examples, is not shared between crates.
#[cfg(debug_assertions)]
pub mod instances;
pub mod mlp;
