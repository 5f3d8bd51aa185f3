//! The errors between a program and its device.

#[cfg(feature = "remote")]
use std::{io, time::Duration};

use burn::tensor::ExecutionError;
#[cfg(feature = "remote")]
use burn::{remote::ConnectError, server::ServeError};

use crate::{AmpError, Precision};

/// Why a device is not available, or cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device does not compute in the precision, or another error of the core.
    #[error(transparent)]
    Amp(#[from] AmpError),

    /// A device whose backend is not compiled in here, or cannot be served.
    #[error(
        "{device} cannot compute in mixed precision: expected a device of Flex or CubeCL (CUDA, ROCm, \
         Metal, Vulkan, WebGPU, CPU), and burn-amp-device's feature for that backend"
    )]
    UnsupportedDevice {
        /// The device that was given.
        device: String,
    },

    /// Devices of one server for which `Precision::Auto` is not the same precision.
    #[cfg(feature = "remote")]
    #[error(
        "Precision::Auto is {of_first} on {first} and {of_device} on {device}: expected one precision for \
         all devices of a server. Name one that all of them compute in, or start a server for each"
    )]
    UnlikeDevices {
        /// The first device.
        first: String,
        /// Its precision.
        of_first: Precision,
        /// The first device in another precision.
        device: String,
        /// Its precision.
        of_device: Precision,
    },

    /// Devices of one server, of which a client could get another client's tensors.
    #[cfg(feature = "remote")]
    #[error(
        "a server of {devices} devices on Burn 0.22: expected at most {most}. Burn 0.22 numbers the tensors that \
         a client moves between devices, and a server confuses those of two clients. Serve at most 3 devices with \
         `AmpServer::serve_on`, or one with another transport. Burn 0.23 has no such limit"
    )]
    SharedDevices {
        /// How many devices there are.
        devices: usize,
        /// How many there may be.
        most: usize,
    },

    /// A device on which several workers of one training would scale their losses.
    #[cfg(feature = "train")]
    #[error(
        "{device} was given to `with_devices` more than once: expected different devices where losses are scaled. Give it \
         once, and add up the gradients of several batches with `grads_accumulation`"
    )]
    RepeatedDevice {
        /// The device that was given.
        device: String,
    },

    /// A weight that its device cannot store in half.
    #[error(
        "the weight {parameter} is on {device}: expected a device of burn-amp-device in {precision}, \
         without autodiff. Pass the precision of the device, load the record into a model on \
         `burn_amp_device::mixed_precision(device, precision)`, or call `valid()` on a model that was trained there"
    )]
    HalfWeights {
        /// The path of the parameter in its module.
        parameter: String,
        /// Its device.
        device: String,
        /// The requested precision.
        precision: Precision,
    },

    /// Burn cannot make a group of the given device.
    #[cfg(feature = "burn-0-23")]
    #[error(transparent)]
    Group(#[from] burn_group::GroupError),

    /// A server of this process cannot listen, or cannot be reached from this process.
    #[cfg(feature = "remote")]
    #[error(
        "no connection on the loopback interface: {0}. Is the interface up, and has the process free file descriptors?"
    )]
    Listen(#[source] io::Error),

    /// No token: the operating system returned no random bytes.
    #[cfg(feature = "remote")]
    #[error("the operating system returned no random bytes for a token: {0}")]
    Token(#[source] getrandom::Error),

    /// The server did not start, or failed later.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Serve(#[from] ServeError),

    /// Burn's client did not start.
    #[cfg(feature = "remote")]
    #[error("Burn's client cannot start: {reason}. Has the process free file descriptors?")]
    Client {
        /// What it said.
        reason: String,
    },

    /// No session with the server.
    #[cfg(feature = "remote")]
    #[error("cannot connect: {0}")]
    Connect(#[from] ConnectError),

    /// The device gave no answer: its server has ended, or an operation failed there.
    #[error("cannot read from the device: {0}. Has its server ended?")]
    Read(#[source] ExecutionError),

    /// A program listens at the address, but does not answer like a Burn server.
    #[cfg(feature = "remote")]
    #[error("no answer within {patience:?}: is this the address of a Burn server?")]
    NoAnswer {
        /// How long the client waited.
        patience: Duration,
    },
}
