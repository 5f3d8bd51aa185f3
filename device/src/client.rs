//! Connecting to a server, with a limit to the time it takes.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::Device;

use crate::Error;

/// Connects to the first device of `host`, within `patience`.
///
/// Burn's own `Device::remote_options(host).init()` does the same, but waits forever for something
/// that listens and never answers. It tries for 16 seconds where nothing listens yet.
///
/// Where the server ends later, a read gives an error (`try_into_data`, `Device::sync`) or panics
/// with it (`into_data`, `into_scalar`), and no operation waits for an answer that cannot come.
///
/// # Errors
///
/// - [`Error::NoAnswer`] after `patience`. A thread of Burn's then still waits.
/// - [`Error::Connect`] where Burn's client does not connect: a wrong token, a server of another
///   version, something that is no server, or nothing that listens.
pub fn connect(host: &RemoteHost, patience: Duration) -> Result<Device, Error> {
    let options = Device::remote_options(host);
    let (sender, receiver) = channel();
    thread::spawn(move || {
        // Nobody may wait for it any more.
        let _ = sender.send(options.init());
    });
    match receiver.recv_timeout(patience) {
        Ok(device) => Ok(device?),
        Err(RecvTimeoutError::Timeout) => Err(Error::NoAnswer { patience }),
        Err(RecvTimeoutError::Disconnected) => Err(ConnectError::Interrupted.into()),
    }
}
