//! Devices of any backend, and how Burn serves them. Independent of what listens.

use std::pin::Pin;
use std::sync::Arc;

use burn::remote::CustomOpClient;
use burn::server::{AuthorizationRequest, CustomOpIr, PeerAuthorizer, Transport};
use burn::tensor::Device;
use burn_backend::Backend;
use burn_dispatch::DispatchDevice;
use burn_ir::BackendIr;
use burn_remote::server::BackendServer;

use crate::device::session;
use crate::{Amp, Error, Precision};

/// The operation that puts the precision of a server in force for the session that sends it.
const ENTER: &str = "burn_amp.enter";

/// Puts the precision of a [server of sessions](crate::AmpServer::of_sessions) in force for the session
/// that this remote device stands for.
pub(crate) fn enter(device: &Device) -> Result<(), Error> {
    if let DispatchDevice::Remote(remote) = device.as_dispatch() {
        CustomOpClient::new(remote).register(CustomOpIr::new(ENTER, &[], &[]));
    }
    device.sync().map_err(Error::Read)
}

pub(crate) type Serving = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Devices of any backend, and how Burn serves them.
pub(crate) trait Host: Send + Sync {
    /// How many devices.
    fn devices(&self) -> usize;

    /// Starts another server of Burn's.
    fn serve_async(&self, transport: Transport, authorizer: Arc<dyn PeerAuthorizer>) -> Serving;
}

/// Devices of one backend.
pub(crate) struct Hosted<B: BackendIr> {
    pub(crate) devices: Vec<B::Device>,
    /// What a session is in once its client calls [`enter`], where this is not the devices' own.
    pub(crate) session_precision: Option<Precision>,
}

impl<B: Backend> Host for Hosted<Amp<B>>
where
    Amp<B>: BackendIr<Device = B::Device>,
{
    fn devices(&self) -> usize {
        self.devices.len()
    }

    fn serve_async(&self, transport: Transport, authorizer: Arc<dyn PeerAuthorizer>) -> Serving {
        let authorize = move |request: AuthorizationRequest<'_>| authorizer.authorize(request);
        let mut server =
            BackendServer::<Amp<B>>::new(self.devices.clone()).with_authorizer(authorize);
        if let Some(precision) = self.session_precision {
            server = server.with_custom_op(ENTER, move |_, _, _| session::set_precision(precision));
        }
        let serving = server.serve_async(transport);
        Box::pin(async move { Ok(serving.await?) })
    }
}
