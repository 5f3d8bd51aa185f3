//! The precisions of a device: the half support that its backend reports, the precisions that follow from it,
//! and the choice of [`Precision::Auto`].

use std::fmt;
use std::sync::OnceLock;

use super::Precision;
use crate::error::AmpError;
use crate::policy::{HalfSupport, Support};

/// A precision, and why a device computes in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// Never `Auto`.
    pub precision: Precision,
    /// The reason.
    pub why: &'static str,
}

impl Chosen {
    /// The choice of `Auto` on the device with this name, selected once and then logged. Nothing is locked meanwhile: a
    /// thread that waits for a kernel, or the program's logger, may call this again.
    pub fn auto(
        known: &OnceLock<Self>,
        select: impl FnOnce() -> Self,
        device: impl FnOnce() -> String,
    ) -> Self {
        known.get().copied().unwrap_or_else(|| {
            let auto = select();
            let is_first = known.set(auto).is_ok();
            let chosen = *known.get().expect("set here, or by another thread");
            if is_first {
                let (device, Self { precision, why }) = (device(), chosen);
                log::info!("burn-amp: auto on {device} is {precision}: {why}");
            }
            chosen
        })
    }
}

/// A device's uses of a dtype, as its backend reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DTypeUses {
    /// Stores tensors, and casts them.
    pub storage: bool,
    /// Computes the usual operations.
    pub arithmetic: bool,
    /// Multiplies matrices in dedicated units, such as tensor cores.
    pub accelerated: bool,
}

impl DTypeUses {
    /// The half support that follows from these uses, if the dtype is half.
    pub fn half_support(self) -> HalfSupport {
        if self.storage && self.arithmetic {
            HalfSupport::Arithmetic
        } else if self.storage && self.accelerated {
            HalfSupport::Contractions
        } else {
            HalfSupport::None
        }
    }

    fn is_accelerated_half(self) -> bool {
        self.accelerated && self.half_support() != HalfSupport::None
    }
}

/// Lists the uses by Burn's names.
impl fmt::Display for DTypeUses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uses = [
            self.storage.then_some("Storage"),
            self.arithmetic.then_some("Arithmetic"),
            self.accelerated.then_some("Accelerated"),
        ];
        let uses: Vec<_> = uses.into_iter().flatten().collect();
        if uses.is_empty() {
            f.write_str("nothing")
        } else {
            f.write_str(&uses.join(" and "))
        }
    }
}

/// A device's uses of the half dtypes, as its backend reports them. Constant for the life of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Uses of f16.
    pub f16: DTypeUses,
    /// Uses of bf16.
    pub bf16: DTypeUses,
}

/// The [`Capabilities`] of a device, as its backend reports them. A macro, for any version of Burn: expanded where `DType` and
/// `DTypeUsage` are in scope.
#[doc(hidden)]
#[macro_export]
macro_rules! capabilities {
    ($backend:ty, $device:expr) => {{
        let uses = |dtype| {
            let usage = <$backend>::dtype_usage($device, dtype);
            $crate::DTypeUses {
                storage: usage.contains(DTypeUsage::Storage),
                arithmetic: usage.contains(DTypeUsage::Arithmetic),
                accelerated: usage.contains(DTypeUsage::Accelerated),
            }
        };
        $crate::Capabilities {
            f16: uses(DType::F16),
            bf16: uses(DType::BF16),
        }
    }};
}

impl Capabilities {
    /// The half support that the policy works with.
    pub fn support(self) -> Support {
        Support {
            f16: self.f16.half_support(),
            bf16: self.bf16.half_support(),
        }
    }

    /// The choice of `Auto`, by the dtypes that the device accelerates.
    pub fn auto(self) -> Chosen {
        let (precision, why) = if self.bf16.is_accelerated_half() {
            (Precision::Bf16, "the device accelerates bf16")
        } else if self.f16.is_accelerated_half() {
            (Precision::F16, "the device accelerates f16, but not bf16")
        } else {
            let why = "the device accelerates neither f16 nor bf16";
            (Precision::F32, why)
        };
        Chosen { precision, why }
    }

    /// The choice of `Auto` where a program trains without a loss scale unless it requests one: like
    /// [`auto`](Capabilities::auto), but never f16.
    pub fn auto_without_f16(self) -> Chosen {
        match self.auto() {
            Chosen {
                precision: Precision::F16,
                ..
            } => Chosen {
                precision: Precision::F32,
                why: "the device accelerates f16, but not bf16, and f16 needs a loss scale",
            },
            chosen => chosen,
        }
    }

    /// Returns the precision if the device supports it.
    ///
    /// - `device`: returns the device's name.
    /// - `hint`: returns a further suggestion for the user. Empty, or starts with a comma.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnsupportedPrecision`].
    pub fn check(
        self,
        precision: Precision,
        device: impl FnOnce() -> String,
        hint: impl FnOnce() -> &'static str,
    ) -> Result<Precision, AmpError> {
        let uses = |precision| match precision {
            Precision::F16 => Some(self.f16),
            Precision::Bf16 => Some(self.bf16),
            Precision::F32 | Precision::Auto => None,
        };
        let is_possible = |precision: &Precision| {
            uses(*precision).is_none_or(|uses| uses.half_support() != HalfSupport::None)
        };
        if is_possible(&precision) {
            return Ok(precision);
        }
        let all = [Precision::F16, Precision::Bf16, Precision::F32].into_iter();
        let possible: Vec<_> = all.filter(is_possible).map(|p| p.to_string()).collect();
        Err(AmpError::UnsupportedPrecision {
            precision,
            device: device(),
            reported: uses(precision).unwrap_or_default().to_string(),
            possible: possible.join(", "),
            hint: hint(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn uses(storage: bool, arithmetic: bool, accelerated: bool) -> DTypeUses {
        DTypeUses {
            storage,
            arithmetic,
            accelerated,
        }
    }

    const NONE: DTypeUses = uses(false, false, false);
    const STORED: DTypeUses = uses(true, false, false);
    const GENERAL: DTypeUses = uses(true, true, false);
    const ACCELERATED: DTypeUses = uses(true, true, true);
    const CONTRACTIONS: DTypeUses = uses(true, false, true);
    /// Uses that no backend reports.
    const UNSTORED: DTypeUses = uses(false, false, true);

    #[test]
    fn support_is_read_from_the_uses() {
        for (uses, support, text) in [
            (NONE, HalfSupport::None, "nothing"),
            (STORED, HalfSupport::None, "Storage"),
            (UNSTORED, HalfSupport::None, "Accelerated"),
            (GENERAL, HalfSupport::Arithmetic, "Storage and Arithmetic"),
            (
                CONTRACTIONS,
                HalfSupport::Contractions,
                "Storage and Accelerated",
            ),
            (
                ACCELERATED,
                HalfSupport::Arithmetic,
                "Storage and Arithmetic and Accelerated",
            ),
        ] {
            assert_eq!(uses.half_support(), support, "{uses:?}");
            assert_eq!(uses.to_string(), text);
        }
    }

    #[test]
    fn auto_prefers_accelerated_bf16_then_f16_then_fp32() {
        for (f16, bf16, expected) in [
            (ACCELERATED, ACCELERATED, Precision::Bf16),
            (ACCELERATED, CONTRACTIONS, Precision::Bf16),
            (ACCELERATED, GENERAL, Precision::F16),
            (CONTRACTIONS, NONE, Precision::F16),
            (GENERAL, GENERAL, Precision::F32),
            (NONE, NONE, Precision::F32),
            (UNSTORED, NONE, Precision::F32),
        ] {
            let auto = Capabilities { f16, bf16 }.auto();
            assert_eq!(auto.precision, expected, "{f16:?} {bf16:?}");
            let without = Capabilities { f16, bf16 }.auto_without_f16();
            if expected == Precision::F16 {
                assert_eq!(without.precision, Precision::F32);
                assert!(
                    without.why.contains("needs a loss scale"),
                    "{}",
                    without.why
                );
            } else {
                assert_eq!(without, auto);
            }
        }
    }

    #[test]
    fn an_unsupported_precision_is_an_error_that_names_what_is_possible() {
        let capabilities = Capabilities {
            f16: CONTRACTIONS,
            bf16: STORED,
        };
        let check =
            |precision| capabilities.check(precision, || "flex on Cpu".into(), || ", or ..");
        assert_eq!(check(Precision::F16), Ok(Precision::F16));
        assert_eq!(check(Precision::F32), Ok(Precision::F32));
        let error = check(Precision::Bf16).unwrap_err();
        let expected = AmpError::UnsupportedPrecision {
            precision: Precision::Bf16,
            device: "flex on Cpu".into(),
            reported: "Storage".into(),
            possible: "f16, f32".into(),
            hint: ", or ..",
        };
        assert_eq!(error, expected);
    }
}
