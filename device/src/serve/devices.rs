//! Devices of any backend, and how Burn serves them. Independent of the listening socket.

use std::pin::Pin;
use std::sync::Arc;

use burn::server::{AuthorizationRequest, PeerAuthorizer, Transport};
use burn_dispatch::__remote::server::BackendServer;
use burn_ir::BackendIr;

use crate::Error;

pub(crate) type Serving = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Devices of any backend, and how Burn serves them.
pub(crate) trait Host: Send + Sync {
    /// The number of devices.
    fn devices(&self) -> usize;

    /// Starts another Burn server.
    fn serve_async(&self, transport: Transport, authorizer: Arc<dyn PeerAuthorizer>) -> Serving;
}

/// Devices of one backend.
pub(crate) struct Hosted<B: BackendIr> {
    pub(crate) devices: Vec<B::Device>,
}

impl<B: BackendIr> Host for Hosted<B> {
    fn devices(&self) -> usize {
        self.devices.len()
    }

    fn serve_async(&self, transport: Transport, authorizer: Arc<dyn PeerAuthorizer>) -> Serving {
        let authorize = move |request: AuthorizationRequest<'_>| authorizer.authorize(request);
        let server = BackendServer::<B>::new(self.devices.clone()).with_authorizer(authorize);
        let serving = server.serve_async(transport);
        Box::pin(async move { Ok(serving.await?) })
    }
}
