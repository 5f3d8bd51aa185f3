//! Connecting to a server within a time limit.

use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use burn::remote::RemoteHost;
use burn::tensor::Device;

use crate::Error;

/// Connects to the first device of `host`, within `patience`.
///
/// Burn's own `Device::remote_options(host).init()` does the same, but waits forever if a program listens and
/// never answers. If nothing listens yet, it tries for 16 seconds.
///
/// If the server ends later, a read returns an error (`try_into_data`, `Device::sync`) or panics
/// (`into_data`, `into_scalar`). No operation waits for an answer that cannot come.
///
/// # Errors
///
/// - [`Error::NoAnswer`] after `patience`. A thread of Burn then still waits.
/// - [`Error::Connect`] where Burn's client does not connect: because of a wrong token, a server of another
///   version, a program that is not a Burn server, or no listener.
pub fn connect(host: &RemoteHost, patience: Duration) -> Result<Device, Error> {
    let options = Device::remote_options(host);
    match within(patience, move || options.init()) {
        Some(device) => Ok(device?),
        None => Err(Error::NoAnswer { patience }),
    }
}

/// The result of `f`; `None` after `patience`. A thread then still waits for `f`.
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
        // The receiver may have stopped waiting.
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
