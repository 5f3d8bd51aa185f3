//! Servers of devices that compute in mixed precision, from a connection to Burn's own server.

#[cfg(feature = "burn-0-22")]
#[path = "../burn_0_22/batching.rs"]
pub(crate) mod batching;
mod clients;
pub(crate) mod devices;
mod handshake;
mod peers;
pub(crate) mod proxy;
mod server;
mod shutdown;
pub(crate) mod upstream;

pub use server::AmpServer;
