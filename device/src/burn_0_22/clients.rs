//! A Burn server for each client, since Burn's server confuses the tensors of two.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Error;
use crate::serve::devices::Host;
use crate::serve::upstream::SharedServer;

/// How long a session waits for the end of those before it, whose program may just have ended. Burn's server
/// ends a session once its work has ended.
const SEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// An address and a credential.
type Key = (IpAddr, Vec<u8>);

/// The clients that are connected.
#[derive(Default)]
pub(crate) struct Clients(Mutex<HashMap<Key, Weak<Client>>>);

struct Client {
    server: SharedServer,
    sessions: Mutex<Sessions>,
}

#[derive(Default)]
struct Sessions {
    /// The devices that have one.
    devices: HashSet<u32>,
    /// Whether one has ended: what it left on the server would meet the tensors of the next one.
    has_ended: bool,
}

/// A device of a client, for one session.
pub(crate) struct Seat {
    client: Arc<Client>,
    device: u32,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves the set as it was.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clients {
    pub(crate) fn start(_: &dyn Host) -> Result<Self, Error> {
        Ok(Self::default())
    }

    /// The device of a client; `None` if another session has it, or has had it of those that are connected.
    pub(crate) async fn seat(
        &self,
        host: &dyn Host,
        computer: IpAddr,
        credential: &[u8],
        device: u32,
    ) -> Result<Option<Seat>, Error> {
        let end = Instant::now() + SEAT_TIMEOUT;
        loop {
            // Not held while it waits: once the last session has ended, the server goes with it.
            let client = self.client(host, (computer, credential.to_vec()))?;
            let is_free = {
                let mut sessions = locked(&client.sessions);
                !sessions.has_ended && sessions.devices.insert(device)
            };
            if is_free {
                return Ok(Some(Seat { client, device }));
            }
            drop(client);
            if Instant::now() > end {
                return Ok(None);
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn client(&self, host: &dyn Host, key: Key) -> Result<Arc<Client>, Error> {
        let mut clients = locked(&self.0);
        if let Some(client) = clients.get(&key).and_then(Weak::upgrade) {
            return Ok(client);
        }
        clients.retain(|_, client| client.strong_count() > 0);
        let client = Arc::new(Client {
            server: SharedServer::start(host)?,
            sessions: Mutex::default(),
        });
        clients.insert(key, Arc::downgrade(&client));
        Ok(client)
    }
}

impl Seat {
    pub(crate) fn server(&self) -> &SharedServer {
        &self.client.server
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut sessions = locked(&self.client.sessions);
        sessions.devices.remove(&self.device);
        sessions.has_ended = true;
    }
}
