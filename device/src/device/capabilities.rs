//! A device's capabilities as its backend reports them.

use burn_amp_core::policy::{HalfSupport, Support};
use burn_amp_core::{AmpError, Precision};
use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet};

use super::name;

pub(super) fn support<B: Backend>(device: &B::Device) -> Support {
    Support {
        f16: half_support(B::dtype_usage(device, DType::F16)),
        bf16: half_support(B::dtype_usage(device, DType::BF16)),
    }
}

/// The precision, if the device supports it.
pub(super) fn check<B: Backend>(
    support: Support,
    precision: Precision,
    device: &B::Device,
) -> Result<Precision, AmpError> {
    let dtype = |precision: Precision| precision.compute_dtype().unwrap_or(DType::F32);
    let is_possible = |precision: &Precision| support.of(dtype(*precision)) != HalfSupport::None;
    if is_possible(&precision) {
        return Ok(precision);
    }
    let all = [Precision::F16, Precision::Bf16, Precision::F32].into_iter();
    let possible: Vec<_> = all.filter(is_possible).map(|p| p.to_string()).collect();
    Err(AmpError::UnsupportedPrecision {
        precision,
        device: name::<B>(device),
        reported: usage_text(B::dtype_usage(device, dtype(precision))),
        possible: possible.join(", "),
        hint: "",
    })
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
        let contracts = DTypeUsage::Storage | DTypeUsage::Accelerated;
        assert_eq!(half_support(contracts), HalfSupport::Contractions);
        assert_eq!(half_support(DTypeUsage::Storage.into()), HalfSupport::None);
    }

    #[test]
    fn an_unsupported_precision_is_an_error_that_names_what_is_possible() {
        use burn_flex::{Flex, FlexDevice};

        let support = Support {
            f16: HalfSupport::Contractions,
            bf16: HalfSupport::None,
        };
        let checked = |precision| check::<Flex>(support, precision, &FlexDevice);
        assert_eq!(checked(Precision::F16), Ok(Precision::F16));
        assert_eq!(checked(Precision::F32), Ok(Precision::F32));
        let error = checked(Precision::Bf16).unwrap_err().to_string();
        assert!(
            error.starts_with("flex on Cpu does not support bf16"),
            "{error}"
        );
        assert!(error.contains("Supported here: f16, f32."), "{error}");
    }
}
