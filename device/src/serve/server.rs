//! A server of devices that compute in mixed precision.

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;

use burn::server::{PeerAuthorizer, ServeError, ServerLogging, Transport};
use burn::tensor::Device;
use burn_amp_core::{AmpError, Chosen};
use burn_backend::Backend;
use burn_dispatch::DispatchDevice;

use crate::device::{DeviceState, name};
use crate::serve::devices::{Host, Hosted};
use crate::serve::{clients, proxy, shutdown};
use crate::{Amp, Error, Precision};

/// Serves devices that compute in mixed precision. The counterpart of Burn's
/// [`RemoteServer`](burn::server::RemoteServer).
///
/// A client is any program on the same release of Burn, without any mixed-precision code:
///
/// ```no_run
/// # use burn_amp_device::burn;
/// # use burn::tensor::Device;
/// use burn::remote::RemoteHost;
///
/// let host = RemoteHost::websocket("ws://gpu:3000").with_credential("the token");
/// let device = Device::remote_options(&host).init()?.autodiff();
/// # Ok::<(), burn::remote::ConnectError>(())
/// ```
///
/// The client's tensors are FP32. In f16 the client scales its loss with a [`GradScaler`](crate::GradScaler).
///
/// ```no_run
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::burn;
/// # use burn::tensor::Device;
/// use std::net::TcpListener;
///
/// use burn::server::TokenAuthorizer;
/// use burn_amp_device::{AmpServer, Precision};
///
/// let token = TokenAuthorizer::new("the token")?;
/// AmpServer::new([Device::flex()], Precision::Bf16, token)?
///     .serve_on(TcpListener::bind("0.0.0.0:3000")?)?;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AmpServer {
    pub(crate) host: Arc<dyn Host>,
    pub(crate) authorizer: Arc<dyn PeerAuthorizer>,
    pub(crate) in_force: Chosen,
}

impl AmpServer {
    /// Hosts `devices`, all of one backend, for the clients that `authorizer` admits. A client selects a
    /// device by its position in this list. Autodiff runs in the client: the server removes it from
    /// `devices`.
    ///
    /// The precision belongs to the devices: a later server of the same device, in the same process, changes
    /// it for both servers.
    ///
    /// # Errors
    ///
    /// - [`Error::Amp`] when a device does not compute in `precision`.
    /// - [`Error::UnlikeDevices`] when [`Precision::Auto`] is not the same on all devices.
    /// - [`Error::UnsupportedDevice`] when a device is not one of Flex or CubeCL.
    /// - [`Error::Serve`] without a device, or with devices of several backends.
    /// - [`Error::SharedDevices`] with more than three devices, on Burn 0.22.
    ///
    /// After an error every device has the precision that it had.
    pub fn new(
        devices: impl IntoIterator<Item = Device>,
        precision: Precision,
        authorizer: impl PeerAuthorizer,
    ) -> Result<Self, Error> {
        let devices: Vec<_> = devices.into_iter().map(Device::without_autodiff).collect();
        clients::check(devices.len(), true)?;
        let first = devices.first().ok_or(ServeError::NoDevices)?;
        match first.as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) => {
                let devices = devices.iter().map(|device| match device.as_dispatch() {
                    DispatchDevice::Cube(device) => Ok(device.clone()),
                    _ => Err(ServeError::MixedBackends),
                });
                let devices = devices.collect::<Result<_, _>>()?;
                hosting::<burn_dispatch::backends::Cube>(devices, precision, authorizer)
            }
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => {
                let devices = devices.iter().map(|device| match device.as_dispatch() {
                    DispatchDevice::Flex(device) => Ok(*device),
                    _ => Err(ServeError::MixedBackends),
                });
                let devices = devices.collect::<Result<_, _>>()?;
                hosting::<burn_dispatch::backends::Flex>(devices, precision, authorizer)
            }
            device => Err(Error::UnsupportedDevice {
                device: format!("{device:?}"),
            }),
        }
    }

    /// The precision that all devices compute in: the choice of [`Precision::Auto`], or the given precision.
    pub fn precision(&self) -> Precision {
        self.in_force.precision
    }

    /// Serves over WebSocket on `listener` until the process receives Ctrl+C or `SIGTERM`, and then
    /// ends within 5 seconds, or at once at a second signal. Installs Burn's [`ServerLogging`], and
    /// blocks the calling thread. From then on, also after it has returned, these signals do not end the process by
    /// themselves: a program that goes on uses [`serve_on_async`](AmpServer::serve_on_async).
    ///
    /// A proxy checks connections before they reach Burn's own server. Until a connection is authorized, it
    /// may last 5 seconds and send 16 KiB besides its request, and at most 64 such connections are open. The
    /// proxy refuses requests of web pages, and requests of other servers for tensors.
    ///
    /// With several devices on Burn 0.22, each device has one session at a time for the programs of one address
    /// with one token: Burn 0.22 would give one program the tensors that another one moves between devices.
    /// After one has ended, new ones wait until all of the address have. A session that has waited for 10 seconds is
    /// refused, and the log says so. Its client reports [`ConnectError::Handshake`].
    ///
    /// # Errors
    ///
    /// [`Error::Listen`] and [`Error::Serve`] when the operating system refuses the resources of a server.
    ///
    /// [`ConnectError::Handshake`]: burn::remote::ConnectError::Handshake
    pub fn serve_on(&self, listener: TcpListener) -> Result<(), Error> {
        ServerLogging::install();
        shutdown::until_signal(self.serve_on_async(listener))
    }

    /// Like [`serve_on`](AmpServer::serve_on), until the returned future is dropped, which also ends
    /// the sessions. Requires a Tokio runtime. Installs no logging and no signal handlers.
    ///
    /// # Errors
    ///
    /// The errors of [`serve_on`](AmpServer::serve_on).
    pub fn serve_on_async(
        &self,
        listener: TcpListener,
    ) -> impl Future<Output = Result<(), Error>> + Send + 'static + use<> {
        proxy::serve(listener, self.host.clone(), self.authorizer.clone())
    }

    /// Serves on a Burn transport until the process receives Ctrl+C or `SIGTERM`, and then ends like
    /// [`serve_on`](AmpServer::serve_on). Installs Burn's [`ServerLogging`], and blocks the calling thread.
    ///
    /// Burn's own server then accepts the connections. Its WebSocket transport accepts messages of 1 GiB from
    /// everyone who can reach it, and has a route that needs no token: prefer
    /// [`serve_on`](AmpServer::serve_on).
    ///
    /// # Errors
    ///
    /// - [`Error::Serve`] when the transport cannot bind, or fails.
    /// - [`Error::SharedDevices`] with several devices, on Burn 0.22.
    pub fn serve(&self, transport: impl Into<Transport>) -> Result<(), Error> {
        ServerLogging::install();
        shutdown::until_signal(self.serve_async(transport.into()))
    }

    /// Like [`serve`](AmpServer::serve), until the returned future is dropped, which also ends the
    /// sessions. Requires a Tokio runtime. Installs no logging and no signal handlers.
    ///
    /// # Errors
    ///
    /// The errors of [`serve`](AmpServer::serve).
    pub fn serve_async<T: Into<Transport>>(
        &self,
        transport: T,
    ) -> impl Future<Output = Result<(), Error>> + Send + 'static + use<T> {
        let serving = clients::check(self.host.devices(), false).map(|()| {
            self.host
                .serve_async(transport.into(), self.authorizer.clone())
        });
        async move { serving?.await }
    }
}

impl fmt::Debug for AmpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmpServer")
            .field("precision", &self.precision())
            .finish_non_exhaustive()
    }
}

fn hosting<B: Backend>(
    devices: Vec<B::Device>,
    precision: Precision,
    authorizer: impl PeerAuthorizer,
) -> Result<AmpServer, Error> {
    let chosen = devices.iter().map(|device| {
        let chosen = DeviceState::of::<B>(device).chosen::<B>(device, precision)?;
        Ok((name::<B>(device), chosen))
    });
    let in_force = same(chosen.collect::<Result<_, AmpError>>()?)?;
    // No device changes before all are checked.
    for device in &devices {
        DeviceState::of::<B>(device).configure::<B>(device, precision)?;
    }
    Ok(AmpServer {
        in_force,
        host: Arc::new(Hosted::<Amp<B>> { devices }),
        authorizer: Arc::new(authorizer),
    })
}

/// The choice for all of these devices.
fn same(devices: Vec<(String, Chosen)>) -> Result<Chosen, Error> {
    let mut devices = devices.into_iter();
    let (first, chosen) = devices.next().ok_or(ServeError::NoDevices)?;
    match devices.find(|(_, other)| other.precision != chosen.precision) {
        Some((device, other)) => Err(Error::UnlikeDevices {
            first,
            of_first: chosen.precision,
            device,
            of_device: other.precision,
        }),
        None => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_one_precision() {
        let chosen = |precision| Chosen {
            precision,
            why: "a test",
        };
        let devices = |of: &[Precision]| {
            let devices = of.iter().enumerate();
            same(
                devices
                    .map(|(i, precision)| (format!("gpu {i}"), chosen(*precision)))
                    .collect(),
            )
        };
        let (bf16, f32) = (Precision::Bf16, Precision::F32);
        assert_eq!(devices(&[bf16, bf16]).unwrap(), chosen(bf16));
        let error = devices(&[bf16, bf16, f32]).unwrap_err();
        let expected = "Precision::Auto is bf16 on gpu 0 and f32 on gpu 2: expected one precision";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(matches!(
            devices(&[]).unwrap_err(),
            Error::Serve(ServeError::NoDevices)
        ));
    }
}
