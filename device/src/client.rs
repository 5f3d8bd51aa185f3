//! Connecting to a server, with a limit to the time it takes.

use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use burn::remote::RemoteHost;
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
    match within(patience, move || options.init()) {
        Some(device) => Ok(device?),
        None => Err(Error::NoAnswer { patience }),
    }
}

/// What `f` gives, within `patience`. Afterwards a thread still waits for it.
///
/// # Panics
///
/// Where `f` panics.
pub(crate) fn within<T: Send + 'static>(
    patience: Duration,
    f: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = channel();
    let thread = thread::spawn(move || {
        // Nobody may wait for it any more.
        let _ = sender.send(f());
    });
    match receiver.recv_timeout(patience) {
        Ok(value) => Some(value),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => unreachable!("the thread sends before it ends"),
        },
    }
}
