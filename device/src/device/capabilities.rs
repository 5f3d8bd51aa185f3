//! A device's capabilities as its backend reports them.

use burn_amp_core::{Capabilities, DTypeUses};
use burn_backend::{Backend, DType, DTypeUsage};

pub(super) fn capabilities<B: Backend>(device: &B::Device) -> Capabilities {
    let uses = |dtype| {
        let usage = B::dtype_usage(device, dtype);
        DTypeUses {
            storage: usage.contains(DTypeUsage::Storage),
            arithmetic: usage.contains(DTypeUsage::Arithmetic),
            accelerated: usage.contains(DTypeUsage::Accelerated),
        }
    };
    Capabilities {
        f16: uses(DType::F16),
        bf16: uses(DType::BF16),
    }
}
