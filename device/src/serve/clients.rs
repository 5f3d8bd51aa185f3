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
#[path = "../burn_0_22/clients.rs"]
mod own;

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
