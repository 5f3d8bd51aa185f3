//! Burn's own WebSocket server, on a port of the loopback interface that only the proxy connects to. Before
//! Burn's server authorizes a connection, the [proxy](crate::serve::proxy) has made the checks that Burn's server
//! omits.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use burn::server::{TokenAuthorizer, WebSocketTransport};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use crate::Error;
use crate::serve::devices::{Host, Serving};
use crate::serve::peers;

pub(crate) type WebSocket = WebSocketStream<TcpStream>;

/// How long Burn's server in the same process may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes that Burn sends in one message.
const MESSAGE: usize = 1 << 30;

/// 32 bytes that cannot be guessed.
pub(crate) fn random() -> Result<[u8; 32], Error> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(Error::Token)?;
    Ok(bytes)
}

/// A Burn server that has accepted its connections, and accepts no others. The future that accepts
/// connections is kept, because the sessions end with it, but is no longer polled.
pub(crate) struct FixedServer {
    _serving: Serving,
    /// The secret that authorizes the server's sessions.
    pub(crate) secret: [u8; 32],
}

impl FixedServer {
    /// Starts a server and opens a connection for each of `routes`.
    pub(crate) async fn start<const N: usize>(
        host: &dyn Host,
        routes: [&str; N],
    ) -> Result<(Self, [WebSocket; N]), Error> {
        let mut attempts = 3;
        loop {
            attempts -= 1;
            match Self::try_start(host, routes).await {
                // Another program connected to the port.
                Err(Error::Listen(_)) if attempts > 0 => {}
                other => return other,
            }
        }
    }

    async fn try_start<const N: usize>(
        host: &dyn Host,
        routes: [&str; N],
    ) -> Result<(Self, [WebSocket; N]), Error> {
        let (listener, address) = listen(N)?;
        let secret = random()?;
        let mut serving = serve(host, listener, &secret);
        let opened = async {
            let mut opened = Vec::with_capacity(N);
            for route in routes {
                opened.push(open(address, route).await?);
            }
            Ok::<_, Error>(opened)
        };
        let opened = tokio::select! {
            opened = opened => opened?,
            ended = &mut serving => {
                ended?;
                return Err(interrupted("ended"));
            }
        };
        let ours = opened.iter().map(|opened| opened.get_ref().local_addr());
        let ours: Vec<_> = ours.collect::<io::Result<_>>().map_err(Error::Listen)?;
        if !peers::accepted_only(address, &ours) {
            let reason = "another program connected to a port of this process, or no file descriptor is \
                          free to see that none did";
            return Err(Error::Listen(io::Error::other(reason)));
        }
        let opened = opened.try_into().expect("a connection for each route");
        let server = Self {
            _serving: serving,
            secret,
        };
        Ok((server, opened))
    }
}

/// A Burn server that accepts connections as long as it lives. Devices of one server exchange tensors within
/// the server, so the sessions of several devices need the same server.
pub(crate) struct SharedServer {
    address: SocketAddr,
    pub(crate) secret: [u8; 32],
    _serving: JoinSet<()>,
}

impl SharedServer {
    pub(crate) fn start(host: &dyn Host) -> Result<Self, Error> {
        let (listener, address) = listen(128)?;
        let secret = random()?;
        let serving = serve(host, listener, &secret);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            if let Err(error) = serving.await {
                log::error!("burn-amp-device: {error}");
            }
        });
        Ok(Self {
            address,
            secret,
            _serving: tasks,
        })
    }

    pub(crate) async fn session(&self) -> Result<WebSocket, Error> {
        open(self.address, "session").await
    }
}

/// A free port, with a queue for `waiting` connections that are not accepted yet.
fn listen(waiting: usize) -> Result<(TcpListener, SocketAddr), Error> {
    let listener = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        // Listening again sets the length of the queue.
        socket2::SockRef::from(&listener).listen(waiting as i32)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    listener().map_err(Error::Listen)
}

fn serve(host: &dyn Host, listener: TcpListener, secret: &[u8]) -> Serving {
    let authorizer = TokenAuthorizer::new(secret).expect("a secret of 32 bytes");
    let transport = WebSocketTransport::from_listener(listener);
    host.serve_async(transport.into(), Arc::new(authorizer))
}

async fn open(address: SocketAddr, route: &str) -> Result<WebSocket, Error> {
    let opened = timeout(ANSWER_TIMEOUT, async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MESSAGE))
            .max_frame_size(Some(MESSAGE));
        let url = format!("ws://{address}/{route}");
        let opened = tokio_tungstenite::client_async_with_config(url, stream, Some(config)).await;
        opened.map_err(io::Error::other)
    });
    let opened = opened.await.unwrap_or(Err(ErrorKind::TimedOut.into()));
    let (socket, _) = opened.map_err(Error::Listen)?;
    Ok(socket)
}

/// The error of a server that did not start.
pub(crate) fn interrupted(what: &str) -> Error {
    Error::Listen(io::Error::other(format!(
        "the server {what} during its start"
    )))
}
