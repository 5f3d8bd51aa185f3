//! Faults of Burn and of its backends: each with its issue, and with the version of Burn that makes the
//! code here superfluous. `cargo xtask workarounds` lists them.

pub(crate) mod cubecl;
pub(crate) mod fusion;
pub(crate) mod libtorch;
