//! FP32 master weights for parameters that are half, for example from a file in half precision.

use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::{Backend, DType, TensorMetadata};

use crate::AmpTensor;
use crate::device::{self, DeviceContext, DeviceState};
use crate::policy::{Mode, is_half};
use crate::tensor::{Side, converted};

/// The dtype in which a leaf of this dtype is trained. Where the policy is on, a leaf in half is
/// trained in FP32: in half, its updates would be rounded away. PyTorch's `GradScaler` refuses such a
/// parameter ("Attempting to unscale FP16 gradients").
pub(crate) fn trained_dtype<B: Backend>(dtype: DType, device: &B::Device) -> DType {
    if is_half(dtype) && DeviceContext::of::<B>(device).mode != Mode::Off {
        DType::F32
    } else {
        dtype
    }
}

/// A tensor that becomes a leaf, in the dtype in which it is trained.
pub(crate) fn trained<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    let (from, device) = (tensor.dtype(), tensor.device());
    if !S::RECORDS {
        // A parameter computed in half, for inference: files have it in FP32.
        return match tensor.is_demoted() {
            true => AmpTensor::plain(tensor.into_dtype(DType::F32)),
            false => tensor,
        };
    }
    let dtype = trained_dtype::<B>(from, &device);
    if dtype == from {
        return tensor;
    }
    log_once::<B>(from, &device);
    let tensor = tensor.computed_in_fp32().into_primitive();
    // The result of casting a leaf is not a leaf.
    let tensor = if B::float_is_require_grad(&tensor) {
        B::float_set_require_grad(tensor, false)
    } else {
        tensor
    };
    AmpTensor::plain(converted::<B, S>(tensor, dtype))
}

/// Logs at most one line between two backward passes: one for a model, not one for each parameter.
fn log_once<B: Backend>(from: DType, device: &B::Device) {
    static LOGGED_AFTER: AtomicU64 = AtomicU64::new(u64::MAX);
    let passes = DeviceState::of::<B>(device).passes();
    if LOGGED_AFTER.swap(passes, Ordering::Relaxed) != passes {
        log::info!(
            "burn-amp: tensors in {} that require a gradient are trained in FP32 on {}: an update in half would \
             be rounded away. The parameters of a file in half precision are such tensors, and a `Param` that a \
             program makes of a half result",
            from.name(),
            device::name::<B>(device)
        );
    }
}
