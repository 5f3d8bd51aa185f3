//! Connecting to a server within a time limit.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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
/// - [`Error::Client`] where Burn's client cannot start, as without free file descriptors.
pub fn connect(host: &RemoteHost, patience: Duration) -> Result<Device, Error> {
    let options = Device::remote_options(host);
    let init = move || catch_unwind(AssertUnwindSafe(|| options.init()));
    match within(patience, init) {
        Some(Ok(device)) => Ok(device?),
        // Burn's client starts a runtime, and tells by a panic that it has no file descriptors for it.
        Some(Err(panic)) => Err(Error::Client {
            reason: message(&*panic),
        }),
        None => Err(Error::NoAnswer { patience }),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "Burn's client panicked".into())
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
