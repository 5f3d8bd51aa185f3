//! Devices of this process on Burn 0.22: each is served only to this process, over the loopback interface.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::remote::RemoteHost;
use burn::server::TokenAuthorizer;
use burn::tensor::Device;
use burn_amp_core::Chosen;
use burn_dispatch::DispatchDevice;
use burn_ir::BackendIr;
use futures_util::{SinkExt, StreamExt};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::chosen;
use crate::client::within;
use crate::device::{Bf16, F16};
use crate::serve::batching;
use crate::serve::devices::{Host, Hosted};
use crate::serve::proxy::{Admission, Admitted, Life, Proxy, content, forward};
use crate::serve::upstream::{self, WebSocket};
use crate::{Amp, Error, Precision, connect};

/// How long a server of this process may take to answer.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a device may take to show that its session has ended, where the proxy has seen a sign of it. A device
/// that computes takes longer.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);

/// How long a transfer of a tensor between devices of this process may take, including its computation.
const TRANSFER: Duration = Duration::from_secs(600);

/// How many devices of this process fetch the tensors of a device over connections of their own. Burn's server
/// answers the requests of a connection in order, and a tensor that is not computed yet holds up the next
/// request. If both devices wait for tensors that the other computes later, neither gets one.
const FETCHING: usize = 8;

/// A device of this process that computes in mixed precision. Its server ends with it.
pub(super) struct Local {
    pub(super) on: Device,
    pub(super) in_force: Chosen,
    pub(super) device: Device,
    life: Arc<Life>,
    /// Runs the server until this device is dropped.
    runtime: Option<Runtime>,
}

/// Process-wide, since all threads get the same device for one Burn device and precision. No call that waits
/// is made while the list is locked.
pub(super) static LOCAL: Mutex<Vec<Arc<Local>>> = Mutex::new(Vec::new());

/// Runs the server of a device. It only moves bytes: the session computes on its own thread.
///
/// With one worker: Burn's data service looks for a tensor that another device has asked for, and only then
/// begins to wait for it (burn-communication 0.22.1, `get_exposed_tensor_bytes`). On another worker the tensor
/// could arrive in between, and nothing would wake the wait.
fn runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("burn-amp-device")
        .enable_all()
        .build()
}

/// One of Burn's devices, computing in `precision`.
///
/// In a training loop of your own, give the device to the data loader with
/// `DataLoaderBuilder::set_device`, and `device.inner()` to the loader for validation with `model.valid()`.
/// Without it a loader uses `Device::default()`, which is another device, and the first forward pass panics
/// (Burn 0.22: "input tensor 'weight' is on the wrong backend"; Burn 0.23: "The provided tensors are not on
/// the same device"). A `Learner` moves its loaders. In f16, scale the loss with
/// [`GradScaler::of`](crate::GradScaler::of).
///
/// The device is served to this process, on a free port of the loopback interface. A connection of another
/// program is closed before a byte of it is read. Where the operating system does not report the owner of a
/// connection (Windows), a random token decides. A second call with the same device and precision returns the
/// same device without waiting, unless an operation that panicked has ended its session: then the call returns a
/// new device, without the old device's tensors. The result has autodiff if `device` has autodiff.
///
/// Two settings of Burn change for the whole process. Burn's server makes CubeCL's runtime asynchronous.
/// Burn's clients send 32 operations at once instead of Burn's default of 4 (`remote.flush_threshold`), unless
/// `burn.toml` sets the number, or the program has already set or used Burn's configuration.
///
/// # Errors
///
/// - [`Error::Amp`] when the device does not compute in `precision`.
/// - [`Error::UnsupportedDevice`] when the device is not one of Flex or CubeCL.
/// - [`Error::Token`] and [`Error::Listen`] when the operating system refuses random bytes or a socket, or
///   when the server takes too long. A later call tries again.
pub fn mixed_precision(device: Device, precision: Precision) -> Result<Device, Error> {
    batching::enlarge();
    let on = device.clone().without_autodiff();
    let hosted: Result<Hosting, Error> = on_backend!(on, hosted(precision))?;
    let (host, in_force) = hosted?;
    let key = (on, in_force.precision);

    let found = Local::find(&key);
    let local = match &found {
        Some(local) if local.is_alive() => local.clone(),
        _ => Local::serve(&key.0, host, in_force)?.or_first(&key, found.as_ref()),
    };
    Ok(local.device.clone().with_autodiff_context_from(&device))
}

/// The devices that a server hosts, and the precision in force.
type Hosting = (Arc<dyn Host>, Chosen);

fn hosted<B: BackendIr>(device: &B::Device, precision: Precision) -> Result<Hosting, Error> {
    let devices = vec![device.clone()];
    let in_force = chosen::<B>(device, precision)?;
    let host: Arc<dyn Host> = match in_force.precision {
        Precision::F16 => Arc::new(Hosted::<Amp<B, F16>> { devices }),
        Precision::Bf16 => Arc::new(Hosted::<Amp<B, Bf16>> { devices }),
        // In FP32 every operation goes to the backend unchanged.
        Precision::F32 | Precision::Auto => Arc::new(Hosted::<B> { devices }),
    };
    Ok((host, in_force))
}

/// The identity of a device of this process.
type Key = (Device, Precision);

impl Local {
    fn find(key: &Key) -> Option<Arc<Self>> {
        // A panic leaves the list as it was.
        let list = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().find(|local| local.is(key)).cloned()
    }

    fn is(&self, (on, precision): &Key) -> bool {
        self.on == *on && self.in_force.precision == *precision
    }

    /// Whether the session still runs: an operation that panicked ends it. The proxy sees the end before the
    /// client does.
    fn is_alive(&self) -> bool {
        if !self.life.has_ended() && !self.life.may_be_ending() {
            return true;
        }
        // Waits for the operations that were sent before. Of an ended session, Burn's client frees the connection
        // once it sends something, as `sync` does.
        let device = self.device.clone();
        let answers = within(SIGN_OF_LIFE, move || device.sync().is_ok()).unwrap_or(true);
        answers && !self.life.has_ended()
    }

    /// Starts a server and connects to it.
    fn serve(on: &Device, host: Arc<dyn Host>, in_force: Chosen) -> Result<Arc<Self>, Error> {
        let token = upstream::random()?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::Listen)?;
        let address = listener.local_addr().map_err(Error::Listen)?;
        let life = Arc::new(Life::default());
        let token_decides = TokenAuthorizer::new(&token).expect("a token of 32 bytes");
        let admission = Admission::new(Arc::new(token_decides), true);
        let runtime = runtime().map_err(Error::Listen)?;
        let (tell, started) = channel();
        let of_session = life.clone();
        runtime.spawn(async move {
            let starting = async {
                let proxy = Proxy::new(listener, admission).map_err(Error::Listen)?;
                let mut routes = ["data"; 1 + FETCHING];
                routes[0] = "session";
                let (server, connections) = upstream::FixedServer::start(&*host, routes).await?;
                Ok::<_, Error>((proxy, server, connections))
            };
            match starting.await {
                Ok((proxy, server, connections)) => {
                    let _ = tell.send(Ok(()));
                    serve(proxy, server, connections, of_session).await;
                }
                // The caller may have stopped waiting.
                Err(error) => drop(tell.send(Err(error))),
            }
        });
        let mut local = Self {
            on: on.clone(),
            in_force,
            // Replaced once the client is connected.
            device: on.clone(),
            life,
            runtime: Some(runtime),
        };
        // Opening a connection to Burn's server has a limit of its own.
        match started.recv_timeout(2 * START_TIMEOUT) {
            Ok(started) => started?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(upstream::interrupted("did not start in time"));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(upstream::interrupted("panicked")),
        }
        let host = RemoteHost::websocket(&format!("ws://{address}")).with_credential(&token);
        // A server of this process that does not answer lacks resources, too.
        local.device = connect(&host, START_TIMEOUT)
            .map_err(|error| Error::Listen(io::Error::other(error)))?;
        Ok(Arc::new(local))
    }

    /// Replaces `old` in the list by this device, and returns it. If another thread was first, returns that
    /// thread's device.
    fn or_first(self: Arc<Self>, key: &Key, old: Option<&Arc<Self>>) -> Arc<Self> {
        let mut list = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        let place = list.iter_mut().find(|local| local.is(key));
        match (place, old) {
            (Some(place), Some(old)) if Arc::ptr_eq(place, old) => *place = self.clone(),
            (Some(place), _) => return place.clone(),
            (None, _) => list.push(self.clone()),
        }
        self
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Serves this process: one session, and the other servers of this process that fetch its tensors. Continues
/// after the session, so that these servers get a refusal at once.
async fn serve(
    mut proxy: Proxy,
    server: upstream::FixedServer,
    connections: [WebSocket; 1 + FETCHING],
    life: Arc<Life>,
) {
    let [session, data @ ..] = connections;
    let data = data.map(|socket| Arc::new(tokio::sync::Mutex::new(Some(socket))));
    let mut session = Some(session);
    let mut sessions = JoinSet::new();
    let mut fetching = JoinSet::new();
    let secret = server.secret;
    let mut server = Some(server);
    loop {
        tokio::select! {
            admitted = proxy.admitted() => match admitted {
                Admitted::Session(client, init) => {
                    if let Some(session) = session.take() {
                        let (first, life) = (init.with_credential(&secret), life.clone());
                        sessions.spawn(async move { forward(client, first, session, &life).await });
                    }
                }
                Admitted::Data(client) => {
                    if server.is_some()
                        && let Some(data) = least_used(&data)
                    {
                        fetching.spawn(fetch(client, data.clone(), TRANSFER));
                    }
                }
            },
            Some(_) = sessions.join_next() => {
                fetching.shutdown().await;
                if server.is_some() {
                    let closing = data.iter().cloned();
                    let closing: JoinSet<_> = closing
                        .map(|data| async move { close(&mut *data.lock().await).await })
                        .collect();
                    closing.join_all().await;
                }
                server = None;
            }
            Some(_) = fetching.join_next() => {}
        }
    }
}

/// A connection to the tensors of a Burn server, until it is closed.
type Data = Arc<tokio::sync::Mutex<Option<WebSocket>>>;

/// The open connection that serves the fewest devices. The ninth device shares one.
fn least_used(all: &[Data]) -> Option<&Data> {
    let is_open = |data: &&Data| data.try_lock().map_or(true, |socket| socket.is_some());
    all.iter()
        .filter(is_open)
        .min_by_key(|data| Arc::strong_count(data))
}

/// Closes a connection in the way that Burn's server expects. Otherwise the server panics.
async fn close(data: &mut Option<WebSocket>) {
    let Some(mut socket) = data.take() else {
        return;
    };
    let closed = timeout(Duration::from_secs(1), async {
        if socket.close(None).await.is_ok() {
            while socket.next().await.is_some() {}
        }
    });
    // A server that waits for a tensor that never comes does not answer.
    let _ = closed.await;
}

/// The next message with content.
async fn message(socket: &mut WebSocket) -> Result<Bytes, String> {
    loop {
        match socket.next().await {
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            received => return content(received),
        }
    }
}

/// Answers the requests of another server of this process for tensors, one after the other. Each tensor may
/// take as long as `patience`.
async fn fetch(mut client: WebSocket, data: Data, patience: Duration) {
    while let Ok(request) = message(&mut client).await {
        // Burn's server answers the requests in order.
        let mut data = data.lock().await;
        let Some(tensor) = answer(&mut data, request, patience).await else {
            log::error!("burn-amp-device: a tensor did not arrive on another device");
            // Its late answer would be the answer to the next request.
            close(&mut data).await;
            return;
        };
        drop(data);
        if client.send(Message::Binary(tensor)).await.is_err() {
            return;
        }
    }
}

/// The answer of Burn's server to a request for a tensor.
async fn answer(data: &mut Option<WebSocket>, request: Bytes, patience: Duration) -> Option<Bytes> {
    let socket = data.as_mut()?;
    let answer = timeout(patience, async {
        socket.send(Message::Binary(request)).await.ok()?;
        message(socket).await.ok()
    });
    answer.await.ok()?
}

#[cfg(test)]
mod tests {
    /// See `runtime`: with more, a tensor that is moved between two devices may never arrive.
    #[test]
    fn a_devices_server_has_one_worker() {
        assert_eq!(super::runtime().unwrap().metrics().num_workers(), 1);
    }

    use tokio::net::{TcpListener, TcpStream};
    use tokio_tungstenite::{accept_async, client_async};

    use super::*;

    /// The two ends of a connection.
    async fn pair() -> [WebSocket; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = async {
            let stream = TcpStream::connect(address).await.unwrap();
            client_async(format!("ws://{address}"), stream)
                .await
                .unwrap()
                .0
        };
        let accept = async {
            accept_async(listener.accept().await.unwrap().0)
                .await
                .unwrap()
        };
        tokio::join!(open, accept).into()
    }

    #[tokio::test]
    async fn a_tensor_that_comes_too_late_is_not_the_answer_to_the_next_request() {
        let patience = Duration::from_millis(100);
        let [data, mut server] = pair().await;
        let data = Arc::new(tokio::sync::Mutex::new(Some(data)));
        // Answers the first request late, and each request with its own content.
        tokio::spawn(async move {
            tokio::time::sleep(2 * patience).await;
            while let Ok(request) = message(&mut server).await {
                let _ = server.send(Message::Binary(request)).await;
            }
        });
        let ask = async |request: &'static str| {
            let [mut client, proxy] = pair().await;
            let fetching = tokio::spawn(fetch(proxy, data.clone(), patience));
            client.send(Message::Binary(request.into())).await.unwrap();
            let answer = message(&mut client).await.ok();
            drop(client);
            fetching.await.unwrap();
            answer
        };
        assert_eq!(ask("first").await, None);
        tokio::time::sleep(4 * patience).await;
        assert_eq!(ask("second").await, None);
    }
}
