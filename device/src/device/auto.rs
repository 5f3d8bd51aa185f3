//! The precision that `Precision::Auto` selects on a device, by what its backend reports.

use burn_amp_core::Precision;
use burn_amp_core::policy::HalfSupport;
use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet};

use super::capabilities::half_support;

/// What `Auto` selects on a device, and why.
pub(super) fn select<B: Backend>(device: &B::Device) -> (Precision, &'static str) {
    reported(
        B::dtype_usage(device, DType::F16),
        B::dtype_usage(device, DType::BF16),
    )
}

fn reported(f16: DTypeUsageSet, bf16: DTypeUsageSet) -> (Precision, &'static str) {
    let is_accelerated = |usage: DTypeUsageSet| {
        usage.contains(DTypeUsage::Accelerated) && half_support(usage) != HalfSupport::None
    };
    match (is_accelerated(f16), is_accelerated(bf16)) {
        (_, true) => (Precision::Bf16, "the device accelerates bf16"),
        (true, false) => (Precision::F16, "the device accelerates f16, but not bf16"),
        (false, false) => (
            Precision::F32,
            "the device accelerates neither f16 nor bf16",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_prefers_accelerated_bf16_then_f16_then_fp32() {
        let none = DTypeUsageSet::empty();
        let general = DTypeUsage::general();
        let accelerated = general | DTypeUsage::Accelerated;
        let contractions = DTypeUsage::Storage | DTypeUsage::Accelerated;
        for (f16, bf16, expected) in [
            (accelerated, accelerated, Precision::Bf16),
            (accelerated, contractions, Precision::Bf16),
            (accelerated, general, Precision::F16),
            (contractions, none, Precision::F16),
            (general, general, Precision::F32),
            (none, none, Precision::F32),
            (DTypeUsage::Accelerated.into(), none, Precision::F32),
        ] {
            assert_eq!(reported(f16, bf16).0, expected, "{f16:?} {bf16:?}");
        }
    }
}
