//! A device of this Burn, for the trials of `burn-amp-core`.

use burn_amp_core::policy::HalfSupport;
use burn_amp_core::policy::trials::{TrialDevice, TriedOp};
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorData, try_read_sync};

/// Tries an operation on a device. Returns whether the device is exact in it, in `half`.
pub(super) fn tried<B: Backend>(
    device: &B::Device,
    half: DType,
    support: HalfSupport,
    op: TriedOp,
) -> bool {
    op.tried(&Tried::<B>(device.clone()), half, support, "")
}

#[cfg(feature = "burn-0-22")]
burn_amp_core::trial_device! { for Burn 0.22 }
#[cfg(feature = "burn-0-23")]
burn_amp_core::trial_device! { for Burn 0.23 }
