//! How a server that blocks its caller ends: within a time limit after a signal, and at once at a second
//! signal.

use std::io;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::time::sleep;

use crate::Error;

/// How long sessions may take to finish computing.
const SESSIONS_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs `serving` until it ends, or the process receives Ctrl+C or `SIGTERM`.
pub(crate) fn until_signal(
    serving: impl Future<Output = Result<(), Error>> + Send,
) -> Result<(), Error> {
    // Uses its own thread: the caller's thread may belong to a runtime, and must then not be blocked.
    thread::scope(|scope| {
        let served = scope.spawn(|| {
            let runtime = Builder::new_multi_thread().enable_all().build();
            let runtime = runtime.map_err(Error::Listen)?;
            let served = runtime.block_on(serve(serving));
            // Tasks that have not ended by now do not keep the process alive.
            runtime.shutdown_background();
            served
        });
        served
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

async fn serve(serving: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    let mut signals = Signals::listen().map_err(Error::Listen)?;
    let ended = {
        tokio::pin!(serving);
        tokio::select! {
            served = serving => Some(served),
            () = signals.next() => None,
        }
    };
    match ended {
        Some(served) => served,
        None => {
            log::info!("ending");
            tokio::select! {
                () = sessions_end() => {}
                () = sleep(SESSIONS_TIMEOUT) => log::warn!("ending while a session computes"),
                () = signals.next() => {}
            }
            Ok(())
        }
    }
}

/// Waits until nothing runs on this runtime.
async fn sessions_end() {
    while Handle::current().metrics().num_alive_tasks() > 0 {
        sleep(Duration::from_millis(20)).await;
    }
}

/// Ctrl+C and, on Unix, `SIGTERM`. From then on these signals do not end the process by themselves.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};

        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}
