//! Faults of Burn and of its backends: each with its issue, where there is one, and with what makes the code here
//! superfluous. `cargo xtask workarounds` lists them.

pub(crate) mod cubecl;
pub(crate) mod fusion;
pub(crate) mod libtorch;
