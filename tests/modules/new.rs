//! Modules, losses and activation functions that only this release of Burn has: none.

/// Public items, with what the names of their cases begin with.
pub const COVERED: &[(&str, &str)] = &[];

/// The names of their cases.
pub const NAMES: &[&str] = &[];

/// This release of Burn.
pub const BURN: &str = "0.21.";

/// Cargo's features to find the sources of this release of Burn.
pub const FEATURES: &[&str] = &[];
