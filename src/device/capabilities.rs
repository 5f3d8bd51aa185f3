//! A device's capabilities as its backend reports them, and the precision that `Auto` selects.

use std::any::type_name;

use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet, DeviceOps};

use super::{bare_name, name};
use crate::policy::{HalfSupport, Support};
use crate::{AmpError, Precision};

/// A device's capabilities, constant for the life of the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capabilities {
    pub support: Support,
    /// The precision that `Auto` selects.
    pub auto: Precision,
    pub why_auto: &'static str,
}

impl Capabilities {
    pub(super) fn of<B: Backend>(device: &B::Device) -> Self {
        let usage = |dtype| B::dtype_usage(device.inner(), dtype);
        // For these, Burn reports the dtypes that the GPU computes in, not those it accelerates.
        let name = bare_name::<B>(device);
        let silent = matches!(name.as_str(), "libtorch<cuda>" | "libtorch<metal>");
        let (auto, why_auto) = auto(usage(DType::F16), usage(DType::BF16), silent);
        Self {
            auto,
            why_auto,
            support: Support {
                f16: half_support(usage(DType::F16)),
                bf16: half_support(usage(DType::BF16)),
            },
        }
    }

    fn possible(&self, precision: Precision) -> bool {
        let dtype = precision.compute_dtype().unwrap_or(DType::F32);
        self.support.of(dtype) != HalfSupport::None
    }

    pub(super) fn check<B: Backend>(
        &self,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Precision, AmpError> {
        if self.possible(precision) {
            return Ok(precision);
        }
        let all = [Precision::F16, Precision::Bf16, Precision::F32].into_iter();
        let possible = all.filter(|p| self.possible(*p)).map(|p| p.to_string());
        let dtype = precision.compute_dtype().unwrap_or(DType::F32);
        Err(AmpError::UnsupportedPrecision {
            precision,
            device: name::<B>(device),
            reported: usage_text(B::dtype_usage(device.inner(), dtype)),
            possible: possible.collect::<Vec<_>>().join(", "),
            hint: match type_name::<B>().contains("NdArray") {
                true => ", or the Flex backend, which computes in half on a CPU",
                false => "",
            },
        })
    }
}

/// Logs the precision that `Auto` selects.
pub(super) fn log_auto<B: Backend>(capabilities: &Capabilities, device: &B::Device) {
    let Capabilities { auto, why_auto, .. } = capabilities;
    let device = name::<B>(device);
    log::info!("burn-amp: auto on {device} is {auto}: {why_auto}");
}

fn half_support(usage: DTypeUsageSet) -> HalfSupport {
    if usage.is_superset(DTypeUsage::general()) {
        HalfSupport::Arithmetic
    } else if usage.is_superset(DTypeUsage::Storage | DTypeUsage::Accelerated) {
        HalfSupport::Contractions
    } else {
        HalfSupport::None
    }
}

/// The precision that `Auto` selects, and why. A silent device gets f16, as in PyTorch's autocast:
/// nothing tells whether f16 is fast on it, or whether bf16 is as fast.
fn auto(f16: DTypeUsageSet, bf16: DTypeUsageSet, silent: bool) -> (Precision, &'static str) {
    let accelerated = |usage: DTypeUsageSet| {
        usage.contains(DTypeUsage::Accelerated) && half_support(usage) != HalfSupport::None
    };
    if accelerated(bf16) {
        (Precision::Bf16, "the device accelerates bf16")
    } else if accelerated(f16) {
        (Precision::F16, "the device accelerates f16, but not bf16")
    } else if silent && half_support(f16) != HalfSupport::None {
        (
            Precision::F16,
            "LibTorch does not report what the device accelerates, and PyTorch's autocast uses f16",
        )
    } else {
        (
            Precision::F32,
            "the device accelerates neither f16 nor bf16",
        )
    }
}

fn usage_text(usage: DTypeUsageSet) -> String {
    if usage.is_empty() {
        return "nothing".into();
    }
    let uses: Vec<_> = usage.iter().map(|usage| format!("{usage:?}")).collect();
    uses.join(" and ")
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
            assert_eq!(auto(f16, bf16, false).0, expected, "{f16:?} {bf16:?}");
        }
    }

    #[test]
    fn auto_is_f16_on_a_gpu_that_does_not_tell() {
        let general = DTypeUsage::general();
        let none = DTypeUsageSet::empty();
        assert_eq!(auto(general, general, true).0, Precision::F16);
        assert_eq!(auto(none, general, true).0, Precision::F32);
        let told = general | DTypeUsage::Accelerated;
        assert_eq!(auto(general, told, true).0, Precision::Bf16);
    }

    #[test]
    fn support_is_read_from_the_usage() {
        assert_eq!(half_support(DTypeUsage::general()), HalfSupport::Arithmetic);
        assert_eq!(
            half_support(DTypeUsage::Storage | DTypeUsage::Accelerated),
            HalfSupport::Contractions
        );
        assert_eq!(half_support(DTypeUsage::Storage.into()), HalfSupport::None);
    }
}
