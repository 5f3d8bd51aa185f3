//! Burn's distributed data parallel below AMP: gradients are reduced as the backend below does it,
//! with their loss scale, and one outcome is decided for all replicas.

use burn_backend::DeviceId;
use burn_backend::distributed::{
    CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation,
    TensorRef,
};
use burn_backend::tensor::FloatTensor;

use crate::autodiff::replicas;
use crate::{Amp, AmpTensor, GradScaler};

/// As the backend below. All replicas start with the loss scale of the first device, and they step
/// or skip together: in `backward()`, and in `unscale` or `step` of the explicit protocol, each
/// waits for the others. All of them panic where losses are scaled differently.
impl<B: DistributedBackend> DistributedBackend for Amp<B> {
    fn start_communication_server(devices: &[Self::Device], config: DistributedConfig) {
        if let [first, ..] = devices
            && !B::ad_enabled(first)
        {
            let state = GradScaler::of::<B>(first).state();
            let scalers: Vec<_> = devices.iter().map(GradScaler::of::<B>).collect();
            for scaler in &scalers {
                scaler.load_state(state);
            }
            replicas::start::<B>(scalers);
        }
        B::start_communication_server(devices, config);
    }

    fn close_communication_server(device: &Self::Device) {
        if !B::ad_enabled(device) {
            replicas::stop::<B>();
        }
        B::close_communication_server(device);
    }

    fn register_sync_parameters(device: &Self::Device, params: Vec<DistributedParams>) {
        B::register_sync_parameters(device, params);
    }

    fn submit_sync_collective(device: &Self::Device) {
        B::submit_sync_collective(device);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        // The gradient stands in the tape's container until the pass is over, where nothing else
        // touches it.
        let gradient = unsafe { &mut *tensor.0 };
        // Half copies would be of what it was before.
        *gradient = AmpTensor::new(gradient.primitive.clone(), gradient.marks());
        B::submit_gradient_sync(TensorRef(&mut gradient.primitive), params);
    }

    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        devices: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let marks = tensor.marks();
        let reduced = B::all_reduce(tensor.into_primitive(), op, devices);
        // Waited for where ours is.
        let reduced = unsafe { reduced.assume_resolved() };
        CollectiveTensor::new(AmpTensor::new(reduced, marks))
    }

    fn sync_collective(device: &Self::Device) {
        B::sync_collective(device);
    }
}
