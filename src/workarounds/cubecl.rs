//! Faults of CubeCL's backends.

use burn_backend::Backend;

use crate::device::BackendKind;

/// Whether the backend's own attention in half may not accumulate in FP32: CubeCL's kernels multiply f16 whatever the
/// dtype of their operands is, and Burn composes the attentions that they refuse of steps with a softmax in half.
///
/// Until: Burn's attention takes bf16, and its fallback a softmax in FP32. Burn 0.22.1 has the fault.
pub(crate) fn attends_inexactly<B: Backend>(device: &B::Device) -> bool {
    BackendKind::of::<B>(device).may_be_cubecl
}
