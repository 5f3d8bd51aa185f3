//! Burn's distributed data parallel below AMP. The backend below reduces the gradients while they
//! are still scaled, and one outcome is decided for all replicas.

use burn_backend::DeviceId;
use burn_backend::distributed::{
    CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation,
    TensorRef,
};
use burn_backend::tensor::FloatTensor;

use crate::autodiff::replicas;
use crate::call::delegate;
use crate::tensor::Side;
use crate::{Amp, AmpTensor, GradScaler};

/// Forwards to the backend below. All replicas start with the loss scale of the first device, and
/// step or skip together: each waits for the others in `backward()`, and in `unscale` or `step` of
/// the explicit protocol. All replicas panic if their losses are scaled differently, or if a
/// replica has ended or was silent for [`AmpConfig::with_replica_timeout`].
///
/// [`AmpConfig::with_replica_timeout`]: crate::AmpConfig::with_replica_timeout
impl<B: DistributedBackend, S: Side<B>> DistributedBackend for Amp<B, S> {
    fn start_communication_server(devices: &[Self::Device], config: DistributedConfig) {
        if let [first, ..] = devices
            && !S::RECORDS
        {
            let state = GradScaler::of::<B>(first).state();
            for device in devices {
                GradScaler::of::<B>(device).load_state(state);
            }
            replicas::start::<B>(devices);
        }
        B::start_communication_server(devices, config);
    }

    fn close_communication_server(device: &Self::Device) {
        if !S::RECORDS {
            replicas::stop::<B>();
        }
        B::close_communication_server(device);
    }

    delegate! {
        fn register_sync_parameters(device: &Self::Device, params: Vec<DistributedParams>);
        fn submit_sync_collective(device: &Self::Device);
        fn sync_collective(device: &Self::Device);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        // The gradient stays in the tape's container until the pass ends, and nothing else accesses it
        // there.
        let gradient = unsafe { &mut *tensor.0 };
        // Drops the cast cache: its half copies would hold the values before the reduction. The reduction
        // adds in FP32.
        *gradient = AmpTensor::new(gradient.unshared().into_primitive(), gradient.flags());
        B::submit_gradient_sync(TensorRef(&mut gradient.primitive), params);
    }

    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        devices: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let flags = tensor.flags();
        let reduced = B::all_reduce(tensor.into_primitive(), op, devices);
        // Resolved when the caller resolves the returned tensor.
        let reduced = unsafe { reduced.assume_resolved() };
        CollectiveTensor::new(AmpTensor::new(reduced, flags))
    }
}
