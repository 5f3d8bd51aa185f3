//! The items of `common` that the shared files use.

#[path = "../../../tests/shared/src/close.rs"]
#[allow(dead_code)]
mod close;

pub use close::{assert_close, roundoff};

/// Whether the backend is one of CubeCL's, which lack some backward passes.
pub const ON_CUBECL: bool = false;
