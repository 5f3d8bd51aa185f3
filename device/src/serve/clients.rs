//! The Burn servers of a proxy with several devices.
//!
//! On Burn 0.22 a client's process numbers the tensors that it moves between devices from 0, and Burn's server
//! keeps them under this number alone (burn-remote 0.22.1, `client/runner.rs` and `server/local_comm.rs`): of two
//! processes, one would get the other's tensor. So each client has a Burn server of its own. A connection does not
//! tell its process: those from one address with one credential are one client, in which each device has one
//! session. After one has ended, nobody is admitted until all have. So of at most three devices, only one process
//! has two to move tensors between. Burn 0.23 draws the number at random, and all clients share a server.

use crate::Error;

#[cfg(feature = "burn-0-22")]
pub(crate) use own::Clients;
#[cfg(feature = "burn-0-23")]
pub(crate) use shared::Clients;

/// The most devices of a server, unless all clients share one.
const MOST: usize = 3;

/// Checks that no client can get another client's tensor.
pub(crate) fn check(devices: usize, is_behind_proxy: bool) -> Result<(), Error> {
    let most = if is_behind_proxy { MOST } else { 1 };
    if cfg!(feature = "burn-0-23") || devices <= most {
        return Ok(());
    }
    Err(Error::SharedDevices { devices, most })
}

#[cfg(feature = "burn-0-22")]
mod own {
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
    const PATIENCE: Duration = Duration::from_secs(10);

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
            let end = Instant::now() + PATIENCE;
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
}

#[cfg(feature = "burn-0-23")]
mod shared {
    use std::net::IpAddr;
    use std::sync::Arc;

    use crate::Error;
    use crate::serve::devices::Host;
    use crate::serve::upstream::SharedServer;

    /// The server of all clients.
    pub(crate) struct Clients(Arc<SharedServer>);

    pub(crate) struct Seat(Arc<SharedServer>);

    impl Clients {
        pub(crate) fn start(host: &dyn Host) -> Result<Self, Error> {
            Ok(Self(Arc::new(SharedServer::start(host)?)))
        }

        pub(crate) async fn seat(
            &self,
            _: &dyn Host,
            _: IpAddr,
            _: &[u8],
            _: u32,
        ) -> Result<Option<Seat>, Error> {
            Ok(Some(Seat(self.0.clone())))
        }
    }

    impl Seat {
        pub(crate) fn server(&self) -> &SharedServer {
            &self.0
        }
    }
}
