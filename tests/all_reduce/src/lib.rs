//! The documentation's examples of peers that reduce their gradients, which need `burn-collective`.

#[cfg(doctest)]
#[doc = include_str!("../../../src/guide/several_devices.md")]
mod guide {}

#[cfg(doctest)]
#[doc = include_str!("../../../src/train/peers.md")]
mod scaler {}
