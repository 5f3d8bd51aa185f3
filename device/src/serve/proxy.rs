//! The proxy in front of Burn's server. It reads the first message of each session, under limits of connections, time
//! and bytes, and forwards authorized connections.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use burn::server::{AuthorizationRequest, ClientId, Credential, PeerAuthorizer};
use futures_util::{SinkExt, StreamExt};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_buf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Bytes, Message};
use tokio_tungstenite::{accept_hdr_async_with_config, tungstenite};

use crate::Error;
use crate::serve::clients::Clients;
use crate::serve::devices::Host;
use crate::serve::handshake::{Init, Refusal};
use crate::serve::peers;
use crate::serve::upstream::{self, WebSocket};

/// How many connections may be waiting for authorization. One more connection ends the oldest.
const GREETED: usize = 64;

/// How long a connection may take until its authorization.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The bytes of a first message: a credential and little else.
const FIRST: usize = 16 << 10;

/// The size of the read buffer of a forwarded connection.
const BUFFER: usize = 64 << 10;

/// Detects a peer that vanished after about a minute.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(10))
    .with_interval(Duration::from_secs(5));

/// The connections that a proxy admits.
pub(crate) struct Admission {
    pub(crate) authorizer: Arc<dyn PeerAuthorizer>,
    /// Whether only this process is admitted. Burn's route `/data`, which needs no token, is open
    /// to this process and closed otherwise.
    pub(crate) private: bool,
    /// How many sessions were refused.
    refused: AtomicU64,
}

impl Admission {
    pub(crate) fn new(authorizer: Arc<dyn PeerAuthorizer>, private: bool) -> Self {
        Self {
            authorizer,
            private,
            refused: AtomicU64::new(0),
        }
    }
}

/// An admitted connection.
pub(crate) enum Admitted {
    /// A session that is authorized.
    Session(WebSocket, Init),
    /// Another server of this process, which fetches tensors. Only on Burn 0.22.
    Data(#[cfg_attr(feature = "burn-0-23", expect(dead_code))] WebSocket),
}

/// Accepts connections, and reads their requests.
pub(crate) struct Proxy {
    listener: TcpListener,
    admission: Arc<Admission>,
    greetings: JoinSet<Option<Admitted>>,
    /// Their handles, the oldest first.
    ages: VecDeque<AbortHandle>,
}

impl Proxy {
    /// Requires a Tokio runtime.
    pub(crate) fn new(listener: std::net::TcpListener, admission: Admission) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: TcpListener::from_std(listener)?,
            admission: Arc::new(admission),
            greetings: JoinSet::new(),
            ages: VecDeque::new(),
        })
    }

    /// The next admitted connection. Dropping the future loses no connection.
    pub(crate) async fn admitted(&mut self) -> Admitted {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, peer)) => self.greet(stream, peer),
                    // The peer has gone. Linux does not report this.
                    Err(error) if has_gone(&error) => {
                        log::debug!("burn-amp-device: a connection has ended: {error}");
                    }
                    Err(error) => {
                        // For example because no file descriptors are free. Unauthorized connections end soon
                        // and free some.
                        log::warn!("burn-amp-device: cannot accept a connection: {error}");
                        sleep(Duration::from_millis(100)).await;
                    }
                },
                Some(greeted) = self.greetings.join_next() => {
                    if let Ok(Some(admitted)) = greeted {
                        return admitted;
                    }
                }
            }
        }
    }

    fn greet(&mut self, stream: TcpStream, peer: SocketAddr) {
        // `None` if the operating system does not report it, or if nothing depends on it: the token decides.
        let is_ours = match stream.local_addr() {
            _ if !self.admission.private => None,
            Ok(own) => peers::is_within(own, peer),
            Err(_) => Some(false),
        };
        if is_ours == Some(false) {
            log::debug!("burn-amp-device: {peer} is refused: it is another program");
            return;
        }
        // Where connections of this process cannot be recognized, no tensor is sent without a token.
        let data_is_open = is_ours == Some(true);
        self.ages.retain(|greeting| !greeting.is_finished());
        if self.ages.len() >= GREETED
            && let Some(oldest) = self.ages.pop_front()
        {
            oldest.abort();
        }
        let admission = self.admission.clone();
        let greeting = self.greetings.spawn(async move {
            match timeout(
                HANDSHAKE_TIMEOUT,
                greet(stream, peer, &admission, data_is_open),
            )
            .await
            {
                Ok(Ok(admitted)) => Some(admitted),
                Ok(Err(reason)) => {
                    log::debug!("burn-amp-device: {peer} is refused: {reason}");
                    None
                }
                Err(_) => {
                    log::debug!(
                        "burn-amp-device: {peer} sent no request within {HANDSHAKE_TIMEOUT:?}"
                    );
                    None
                }
            }
        });
        self.ages.push_back(greeting);
    }
}

/// Reads a connection's request and checks whether it is allowed.
#[allow(clippy::result_large_err)] // The type is tungstenite's.
async fn greet(
    stream: TcpStream,
    peer: SocketAddr,
    admission: &Admission,
    data_is_open: bool,
) -> Result<Admitted, String> {
    stream
        .set_nodelay(true)
        .map_err(|error| error.to_string())?;
    // A connection also works without keepalive.
    let _ = SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE);
    let mut wants_data = false;
    let look = |request: &Request, response: Response| {
        if request.headers().contains_key("origin") {
            return refuse(StatusCode::FORBIDDEN, "this server refuses web pages");
        }
        match request.uri().path() {
            "/session" => {}
            "/data" if data_is_open => wants_data = true,
            "/data" => {
                let reason = "this server sends no tensors to other servers: read them in the \
                              client, and send them from there";
                return refuse(StatusCode::FORBIDDEN, reason);
            }
            _ => return refuse(StatusCode::NOT_FOUND, "expected /session"),
        }
        Ok(response)
    };
    let config = WebSocketConfig::default()
        .read_buffer_size(4 << 10)
        .max_message_size(Some(FIRST))
        .max_frame_size(Some(FIRST));
    let accepted = accept_hdr_async_with_config(stream, look, Some(config)).await;
    let mut client = accepted.map_err(|error| error.to_string())?;
    if wants_data {
        return Ok(Admitted::Data(client));
    }
    // Nothing but the request: tungstenite keeps the answers to pings without a bound.
    let first = content(client.next().await)?;
    let admitted = Init::decode(&first).and_then(|init| {
        let request = AuthorizationRequest {
            client: ClientId::WebSocket(peer),
            device_index: init.device_index,
            credential: &Credential::from(init.credential.as_slice()),
        };
        match admission.authorizer.authorize(request) {
            Ok(()) => Ok(init),
            Err(reason) => {
                let refused = 1 + admission.refused.fetch_add(1, Ordering::Relaxed);
                // Whoever reaches the port decides how often.
                if refused.is_power_of_two() {
                    log::warn!("burn-amp-device: a session is refused, {refused} so far: {reason}");
                }
                Err(Refusal::Unauthorized)
            }
        }
    });
    match admitted {
        Ok(init) => Ok(Admitted::Session(client, init)),
        Err(refusal) => {
            // The connection is refused even if the reply does not arrive.
            let _ = client.send(Message::Binary(refusal.encode().into())).await;
            let _ = client.close(None).await;
            Err(format!("{refusal:?}"))
        }
    }
}

#[allow(clippy::result_large_err)] // The type is tungstenite's.
fn refuse(status: StatusCode, reason: &str) -> Result<Response, ErrorResponse> {
    let mut response = ErrorResponse::new(Some(reason.into()));
    *response.status_mut() = status;
    Err(response)
}

fn has_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    )
}

/// The content of a binary message.
pub(crate) fn content(received: Option<tungstenite::Result<Message>>) -> Result<Bytes, String> {
    match received {
        Some(Ok(Message::Binary(content))) => Ok(content),
        Some(Ok(other)) => Err(format!("expected a binary message, got {other:?}")),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("the connection ended".into()),
    }
}

/// Whether a session runs, as far as its proxy knows.
#[derive(Default)]
pub(crate) struct Life {
    /// The last bytes of the server may close the connection.
    closing: AtomicBool,
    ended: AtomicBool,
}

/// For the devices of this process that are served.
#[cfg(feature = "burn-0-22")]
impl Life {
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn may_be_ending(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

/// Whether bytes of a WebSocket server end like its last frame, of 2 bytes and a reason (RFC 6455, 5.5.1). Those of
/// a tensor may, too.
fn may_close(bytes: &[u8]) -> bool {
    const CLOSE: u8 = 0x88;
    const LONGEST_REASON: usize = 125;
    (0..=LONGEST_REASON).any(|reason| {
        let start = bytes.len().checked_sub(2 + reason);
        start.is_some_and(|start| bytes[start..][..2] == [CLOSE, reason as u8])
    })
}

/// Sends the first message of a session to Burn's server, and forwards all later bytes until either end
/// closes. `life` shows the end before the client sees it.
pub(crate) async fn forward(client: WebSocket, first: Vec<u8>, mut server: WebSocket, life: &Life) {
    /// Also when the session is aborted.
    struct Ended<'a>(&'a Life);

    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.ended.store(true, Ordering::Release);
        }
    }

    let ended = Ended(life);
    if server.send(Message::Binary(first.into())).await.is_err() {
        return;
    }
    // A client waits for the answer to its first message, so nothing is read ahead yet.
    let (mut client, mut server) = (client.into_inner(), server.into_inner());
    let (from_client, mut to_client) = client.split();
    let (from_server, mut to_server) = server.split();
    let (mut from_client, mut from_server) = (
        BufReader::with_capacity(BUFFER, from_client),
        BufReader::with_capacity(BUFFER, from_server),
    );
    let answers = async {
        loop {
            let bytes = from_server.fill_buf().await?;
            let read = bytes.len();
            if read == 0 {
                return Ok::<_, io::Error>(());
            }
            life.closing.store(may_close(bytes), Ordering::Release);
            to_client.write_all(bytes).await?;
            from_server.consume(read);
        }
    };
    // A broken connection counts as ended.
    tokio::select! {
        _ = copy_buf(&mut from_client, &mut to_server) => {}
        _ = answers => {}
    }
    drop(ended);
    let _ = to_client.shutdown().await;
}

/// Serves `host` on `listener`. The sessions end with the future.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    host: Arc<dyn Host>,
    authorizer: Arc<dyn PeerAuthorizer>,
) -> Result<(), Error> {
    let admission = Admission::new(authorizer, false);
    let mut proxy = Proxy::new(listener, admission).map_err(Error::Listen)?;
    let several = match host.devices() {
        1 => None,
        _ => Some(Arc::new(Clients::start(&*host)?)),
    };
    let mut sessions = JoinSet::new();
    loop {
        tokio::select! {
            admitted = proxy.admitted() => {
                let (host, several) = (host.clone(), several.clone());
                sessions.spawn(async move {
                    if let Admitted::Session(client, init) = admitted
                        && let Err(error) = session(client, init, &*host, several.as_deref()).await
                    {
                        log::error!("burn-amp-device: {error}");
                    }
                });
            }
            Some(_) = sessions.join_next() => {}
        }
    }
}

async fn session(
    client: WebSocket,
    init: Init,
    host: &dyn Host,
    several: Option<&Clients>,
) -> Result<(), Error> {
    let life = Life::default();
    // A device that does not exist is Burn's to refuse, and leaves nothing.
    let exists = (init.device_index as usize) < host.devices();
    let Some(clients) = several.filter(|_| exists) else {
        let (server, [connection]) = upstream::FixedServer::start(host, ["session"]).await?;
        let first = init.with_credential(&server.secret);
        forward(client, first, connection, &life).await;
        return Ok(());
    };
    let computer = client.get_ref().peer_addr().map_err(Error::Listen)?.ip();
    let (credential, device) = (&init.credential, init.device_index);
    let Some(seat) = clients.seat(host, computer, credential, device).await? else {
        log::warn!(
            "burn-amp-device: a session of {computer} for device {device} is refused: another program there \
             uses the server with the same token, or has just used it. On Burn 0.22 one would receive the \
             other's tensors. Give each program a server of its own"
        );
        // Burn's protocol has no refusal for it. Its client reports a handshake that broke off.
        return Ok(());
    };
    let connection = seat.server().session().await?;
    let first = init.with_credential(&seat.server().secret);
    forward(client, first, connection, &life).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_frame_of_a_server_is_seen_behind_whatever_came_with_it() {
        let close = |reason: &[u8]| [&[0x88, reason.len() as u8], reason].concat();
        for reason in [&b""[..], b"\x03\xe8", b"\x03\xe8Peer is closing", &[7; 125]] {
            let close = close(reason);
            assert!(may_close(&close));
            assert!(may_close(&[&b"\x82\x03abc"[..], &close].concat()));
            assert!(!may_close(&close[..close.len() - 1]));
        }
        assert!(!may_close(b"") && !may_close(b"\x88") && !may_close(b"\x82\x03abc"));
    }
}
