//! A device of Burn 0.21, for the trials of `burn-amp-core`.

use burn_amp_core::policy::HalfSupport;
use burn_amp_core::policy::trials::{TrialDevice, TriedOp};
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorData, try_read_sync};

/// Runs the trial of an operation in `half`. Returns whether the device is exact in the operation.
pub(super) fn tried<B: Backend>(
    device: &B::Device,
    half: DType,
    support: HalfSupport,
    op: TriedOp,
) -> bool {
    let or = " If the device is known to be exact in the operation, AmpConfig::with_trials(false) \
              runs it in half";
    op.tried(&Tried::<B>(device.clone()), half, support, or)
}

/// Whether Burn 0.21 has the operation.
pub(super) fn exists<B: Backend>(op: TriedOp) -> bool {
    !Tried::<B>::trials(op).is_empty()
}

burn_amp_core::trial_device! { for Burn 0.21 }
