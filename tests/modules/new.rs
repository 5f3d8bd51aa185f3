//! Modules, losses and activation functions that are of this release of Burn alone: none.

/// Public items, with what the names of their cases begin with.
pub const COVERED: &[(&str, &str)] = &[];

/// The names of their cases.
pub const NAMES: &[&str] = &[];

/// What cargo is told to find the sources of this release of Burn.
pub const FEATURES: &[&str] = &[];
