//! What can go wrong between a program and its device.

use std::io;
use std::time::Duration;

use burn::remote::ConnectError;
use burn::server::ServeError;
use burn::tensor::ExecutionError;

use crate::{AmpError, Precision};

/// Why a device is not there, or is not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The precision is not one that the device computes in.
    #[error(transparent)]
    Amp(#[from] AmpError),

    /// A device whose backend is not compiled in here, or cannot be served.
    #[error(
        "{device} cannot compute in mixed precision: expected a device of Flex or of CubeCL (CUDA, \
         ROCm, Metal, Vulkan, WebGPU, CPU), with the feature of burn-amp-device of that name"
    )]
    UnsupportedDevice {
        /// The device that was given.
        device: String,
    },

    /// A weight that its device cannot hold in half.
    #[error(
        "the weight {parameter} is on {device}: expected a device of burn-amp-device in {precision}, \
         without autodiff. Load the record into a model on `burn_amp_device::vulkan(kind, precision)`, or \
         call `valid()` on a model that was trained there"
    )]
    HalfWeights {
        /// The path of the parameter in its module.
        parameter: String,
        /// Its device.
        device: String,
        /// The precision that was asked for.
        precision: Precision,
    },

    /// Burn makes no device of the one that was given.
    #[cfg(feature = "burn-0-23")]
    #[error(transparent)]
    Group(#[from] burn_group::GroupError),

    /// A server of this process cannot listen, or cannot be reached from within.
    #[error(
        "no connection on the loopback interface: {0}. Is the loopback interface up, and are there descriptors left?"
    )]
    Listen(#[source] io::Error),

    /// No token: the operating system gave no random bytes.
    #[error("the operating system gives no random token: {0}")]
    Token(#[source] getrandom::Error),

    /// The server did not start, or failed later.
    #[error(transparent)]
    Serve(#[from] ServeError),

    /// No session with the server.
    #[error("cannot connect: {0}")]
    Connect(#[from] ConnectError),

    /// The device gave no answer: its server has ended, or an operation failed there.
    #[error("cannot read from the device: {0}. Has its server ended?")]
    Read(#[source] ExecutionError),

    /// Something listens at the address, but does not answer as a server would.
    #[error("no answer within {patience:?}: is this a server of Burn's?")]
    NoAnswer {
        /// How long the client waited.
        patience: Duration,
    },
}
