//! Faults of CubeCL's backends.

use burn_amp_core::{Capabilities, DTypeUses};
use burn_backend::Backend;
#[cfg(feature = "cuda")]
use burn_backend::DeviceOps;

use crate::device::BackendKind;

/// What a device accelerates. CubeCL reports bf16 for all NVIDIA GPUs from compute capability 7.0 on; those before 8.0, such as
/// V100 and T4, have no matrix units for it.
///
/// Until: CubeCL 0.11, which Burn 0.22 uses.
pub(crate) fn accelerated<B: Backend>(device: &B::Device, reported: Capabilities) -> Capabilities {
    if !is_cuda_before_8_0::<B>(device) {
        return reported;
    }
    let bf16 = DTypeUses {
        accelerated: false,
        ..reported.bf16
    };
    Capabilities { bf16, ..reported }
}

/// Whether a device is CUDA's, without the asynchronous copies of compute capability 8.0.
#[cfg(feature = "cuda")]
fn is_cuda_before_8_0<B: Backend>(device: &B::Device) -> bool {
    use cubecl::Runtime;
    use cubecl::cuda::{CudaDevice, CudaRuntime};

    let device: &dyn std::any::Any = device.inner();
    device
        .downcast_ref::<CudaDevice>()
        .is_some_and(|device| !CudaRuntime::client(device).properties().features.copy_async)
}

#[cfg(not(feature = "cuda"))]
fn is_cuda_before_8_0<B: Backend>(_device: &B::Device) -> bool {
    false
}

/// Whether the backend's own attention in half may not accumulate in FP32: CubeCL's kernels multiply f16 whatever the
/// dtype of their operands is, and Burn composes the attentions that they refuse of steps with a softmax in half.
///
/// Until: Burn's attention takes bf16, and its fallback a softmax in FP32. Burn 0.22.1 has the fault.
pub(crate) fn attends_inexactly<B: Backend>(device: &B::Device) -> bool {
    BackendKind::of::<B>(device).may_be_cubecl
}
