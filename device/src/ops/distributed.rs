//! Burn's collective operations. Replicas may hold the same tensor in different dtypes, so all of
//! them reduce it in the client's dtype.

#[cfg(feature = "burn-0-22")]
use burn_backend::DeviceId;
#[cfg(feature = "burn-0-22")]
use burn_backend::distributed::{CollectiveTensor, ReduceOperation};
use burn_backend::distributed::{DistributedConfig, DistributedOps, DistributedParams, TensorRef};
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, TensorMetadata};

use super::delegate;
use crate::device::Session;
use crate::{Amp, AmpTensor};

impl<B: Backend, P: Session> DistributedOps<Self> for Amp<B, P> {
    delegate! {
        fn start_communication_server(devices: &[Device<Self>], config: DistributedConfig);
        fn close_communication_server(device: &Device<Self>);
        fn register_sync_parameters(device: &Device<Self>, distributed_params: Vec<DistributedParams>);
        fn submit_sync_collective(device: &Device<Self>);
        #[cfg(feature = "burn-0-22")]
        fn sync_collective(device: &Device<Self>);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, distributed_params: DistributedParams) {
        // Safety: the caller does not use the gradient until it has synced, and nothing else accesses it.
        let gradient = unsafe { &mut *tensor.0 };
        let reduced = gradient.clone().into_declared("all_reduce");
        *gradient = AmpTensor::new(reduced.primitive, gradient.declared(), gradient.flags());
        B::submit_gradient_sync(TensorRef(&mut gradient.primitive), distributed_params);
    }

    #[cfg(feature = "burn-0-22")]
    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let tensor = tensor.into_declared("all_reduce");
        let reduced = B::all_reduce(tensor.into_primitive(), op, device_ids);
        // Safety: the caller resolves the tensor that wraps it.
        let reduced = unsafe { reduced.assume_resolved() };
        CollectiveTensor::new(AmpTensor::plain(reduced))
    }

    unsafe fn comm_device(tensor: &TensorRef<Self>) -> Device<Self> {
        // Safety: as the caller's.
        unsafe { &*tensor.0 }.device()
    }

    unsafe fn float_from_ref(tensor: &TensorRef<Self>) -> FloatTensor<Self> {
        // Safety: as the caller's.
        unsafe { &*tensor.0 }.clone()
    }
}
