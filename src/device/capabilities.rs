//! A device's capabilities as its backend reports them.

use std::any::type_name;

use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet, DeviceOps};

use super::name;
use crate::policy::{HalfSupport, Support};
use crate::{AmpError, Precision};

/// A device's capabilities, constant for the life of the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capabilities {
    pub support: Support,
}

impl Capabilities {
    pub(super) fn of<B: Backend>(device: &B::Device) -> Self {
        let usage = |dtype| B::dtype_usage(device.inner(), dtype);
        Self {
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

pub(super) fn half_support(usage: DTypeUsageSet) -> HalfSupport {
    if usage.is_superset(DTypeUsage::general()) {
        HalfSupport::Arithmetic
    } else if usage.is_superset(DTypeUsage::Storage | DTypeUsage::Accelerated) {
        HalfSupport::Contractions
    } else {
        HalfSupport::None
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
    fn support_is_read_from_the_usage() {
        assert_eq!(half_support(DTypeUsage::general()), HalfSupport::Arithmetic);
        assert_eq!(
            half_support(DTypeUsage::Storage | DTypeUsage::Accelerated),
            HalfSupport::Contractions
        );
        assert_eq!(half_support(DTypeUsage::Storage.into()), HalfSupport::None);
    }
}
