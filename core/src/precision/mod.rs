//! The precision: the names that users write, and the precisions that a device supports. Depends on dtypes,
//! but not on tensors or backends.

mod device;
mod operations;
mod registry;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::FloatDType;
use crate::error::AmpError;

pub use device::{Capabilities, Chosen, DTypeUses};
pub use registry::Registry;

/// The precision that matrix multiplications and convolutions compute in.
///
/// Parsed from these names; case and surrounding spaces do not matter. Any other string is
/// [`AmpError::UnknownPrecision`]. `float16` and `bfloat16` are
/// PyTorch's names, `16-mixed` and `bf16-mixed` are PyTorch Lightning's:
///
/// | precision | names |
/// |---|---|
/// | `Auto` | `auto` |
/// | `F16` | `f16`, `fp16`, `float16`, `16-mixed` |
/// | `Bf16` | `bf16`, `bfloat16`, `bf16-mixed` |
/// | `F32` | `f32`, `fp32`, `float32`, `32` |
///
/// ```
/// # use burn_amp_core::Precision;
/// assert_eq!("bf16-mixed".parse(), Ok(Precision::Bf16));
/// assert!("fp8".parse::<Precision>().is_err());
/// ```
/// serde writes the name that `Display` gives, and reads every name in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Precision {
    /// bf16 if the device accelerates bf16, else f16 if it accelerates f16, else FP32. LibTorch does not
    /// report acceleration: burn-amp times matrix products on it once, and a half dtype has to be at least
    /// 1.3 times as fast as FP32. burn-amp-device never selects f16, because it does not scale the loss of a
    /// program that does not call `GradScaler`.
    #[default]
    Auto,
    /// IEEE half: 11 bits of significand, largest value 65504. Trains with loss scaling.
    F16,
    /// bfloat16: 8 bits of significand, the range of FP32. Needs no loss scaling.
    Bf16,
    /// No half precision: every operation on FP32 and F64 tensors gives the backend's own result, bit for
    /// bit.
    F32,
}

impl Precision {
    /// Every name that parses.
    pub(crate) const NAMES: [&'static str; 12] = [
        "auto",
        "f16",
        "fp16",
        "float16",
        "16-mixed",
        "bf16",
        "bfloat16",
        "bf16-mixed",
        "f32",
        "fp32",
        "float32",
        "32",
    ];

    /// The half dtype that matrix multiplications compute in. `None` for `F32`, and for `Auto`,
    /// which has no dtype until a device resolves it.
    pub fn compute_dtype<D: FloatDType>(self) -> Option<D> {
        match self {
            Precision::F16 => Some(D::F16),
            Precision::Bf16 => Some(D::BF16),
            Precision::F32 | Precision::Auto => None,
        }
    }

    /// Whether matrix multiplications compute in half. False for `Auto`, which no device has resolved yet.
    pub fn is_half(self) -> bool {
        matches!(self, Precision::F16 | Precision::Bf16)
    }

    /// The largest finite value: 65504 in f16, about 3.39e38 in bf16 and 3.40e38 in FP32, which `Auto` counts
    /// as.
    pub fn largest(self) -> f32 {
        match self {
            Precision::F16 => 65504.0,
            // The upper 16 bits of the largest FP32 value.
            Precision::Bf16 => f32::from_bits(0x7f7f_0000),
            Precision::F32 | Precision::Auto => f32::MAX,
        }
    }

    /// Whether the loss is scaled by default: only f16 has too small an exponent range.
    pub fn scales_loss(self) -> bool {
        self == Precision::F16
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Precision::Auto => "auto",
            Precision::F16 => "f16",
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        })
    }
}

impl From<Precision> for String {
    fn from(precision: Precision) -> Self {
        precision.to_string()
    }
}

impl TryFrom<String> for Precision {
    type Error = AmpError;

    fn try_from(given: String) -> Result<Self, AmpError> {
        given.parse()
    }
}

impl FromStr for Precision {
    type Err = AmpError;

    fn from_str(given: &str) -> Result<Self, AmpError> {
        match given.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Precision::Auto),
            "f16" | "fp16" | "float16" | "16-mixed" => Ok(Precision::F16),
            "bf16" | "bfloat16" | "bf16-mixed" => Ok(Precision::Bf16),
            "f32" | "fp32" | "float32" | "32" => Ok(Precision::F32),
            _ => Err(AmpError::UnknownPrecision {
                given: given.to_string(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;

    #[test]
    fn a_half_precision_has_a_half_dtype() {
        for precision in Precision::NAMES.map(|name| name.parse::<Precision>().unwrap()) {
            let dtype = precision.compute_dtype::<DType>();
            assert_eq!(
                dtype.is_some_and(crate::policy::is_half),
                precision.is_half()
            );
        }
    }

    #[test]
    fn every_name_parses_in_any_case_and_displays_as_a_name() {
        for name in Precision::NAMES {
            let precision: Precision = name.parse().unwrap();
            assert_eq!(name.to_uppercase().parse(), Ok(precision));
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_names() {
        for given in ["", "half", "fp8", "16", "tf32", "bf16 mixed"] {
            let error = given.parse::<Precision>().unwrap_err();
            assert_eq!(
                error,
                AmpError::UnknownPrecision {
                    given: given.into()
                }
            );
            let text = error.to_string();
            assert!(text.contains(&format!("{given:?}")), "{text}");
            assert!(text.contains("bf16-mixed"), "{text}");
        }
    }
}
