//! The float dtypes that the policy distinguishes, of any version of Burn.

use std::fmt::Debug;

use bitflags::bitflags;
use half::{bf16, f16};

/// Burn's dtype. Every dtype other than these five is treated as [`F32`](FloatDType::F32).
///
/// Each version of Burn has its own dtype type.
pub trait FloatDType: Copy + Eq + Debug {
    /// IEEE double.
    const F64: Self;
    /// IEEE single.
    const F32: Self;
    /// Stored as F32, computed in a precision that the device chooses.
    const FLEX32: Self;
    /// IEEE half.
    const F16: Self;
    /// bfloat16.
    const BF16: Self;

    /// The half dtypes.
    const HALVES: [Self; 2] = [Self::F16, Self::BF16];
}

#[cfg(any(feature = "burn-0-21", feature = "burn-0-22", feature = "burn-0-23"))]
macro_rules! burns {
    ($dtype:ty) => {
        impl FloatDType for $dtype {
            const F64: Self = Self::F64;
            const F32: Self = Self::F32;
            const FLEX32: Self = Self::Flex32;
            const F16: Self = Self::F16;
            const BF16: Self = Self::BF16;
        }
    };
}

#[cfg(feature = "burn-0-21")]
burns!(burn_std_0_21::DType);
#[cfg(feature = "burn-0-22")]
burns!(burn_std_0_22::DType);
#[cfg(feature = "burn-0-23")]
burns!(burn_std_0_23::DType);

/// Whether a dtype is one of [`HALVES`](FloatDType::HALVES).
#[inline(always)]
pub fn is_half<D: FloatDType>(dtype: D) -> bool {
    dtype == D::F16 || dtype == D::BF16
}

bitflags! {
    /// A set of dtypes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct DTypes: u8 {
        const F64 = 1;
        const F32 = 1 << 1;
        const FLEX32 = 1 << 2;
        const F16 = 1 << 3;
        const BF16 = 1 << 4;
        const HALVES = Self::F16.bits() | Self::BF16.bits();
    }
}

impl DTypes {
    pub(crate) fn of<D: FloatDType>(dtype: D) -> Self {
        match dtype {
            _ if dtype == D::F64 => Self::F64,
            _ if dtype == D::FLEX32 => Self::FLEX32,
            _ if dtype == D::F16 => Self::F16,
            _ if dtype == D::BF16 => Self::BF16,
            _ => Self::F32,
        }
    }

    /// See [`widest`].
    pub(crate) fn widest<D: FloatDType>(self) -> D {
        match self {
            _ if self.contains(Self::F64) => D::F64,
            _ if self.contains(Self::F32) => D::F32,
            _ if self.contains(Self::FLEX32) => D::FLEX32,
            _ => self.half().unwrap_or(D::F32),
        }
    }

    /// The half dtype among these; `None` if there are none or both.
    pub(crate) fn half<D: FloatDType>(self) -> Option<D> {
        match self & Self::HALVES {
            Self::F16 => Some(D::F16),
            Self::BF16 => Some(D::BF16),
            _ => None,
        }
    }

    /// The half dtype, if there is no other dtype.
    pub(crate) fn only_half<D: FloatDType>(self) -> Option<D> {
        self.half().filter(|_| Self::HALVES.contains(self))
    }
}

/// The widest dtype: F64, then F32, Flex32, half. F16 with BF16 gives F32, which holds both.
pub fn widest<D: FloatDType>(dtypes: impl IntoIterator<Item = D>) -> D {
    let seen: DTypes = dtypes.into_iter().map(DTypes::of).collect();
    seen.widest()
}

/// Whether `dtype` holds `scalar` at its usual precision: `scalar` neither overflows nor falls
/// among the subnormals, which lose precision. Zero, infinities and NaN count as held.
///
/// Bounds of F16: 6.1e-5 to 65504; of BF16: 1.2e-38 to 3.39e38.
pub fn holds<D: FloatDType>(dtype: D, scalar: f64) -> bool {
    let range = match dtype {
        _ if dtype == D::F16 => f16::MIN_POSITIVE.to_f64_const()..=f16::MAX.to_f64_const(),
        _ if dtype == D::BF16 => bf16::MIN_POSITIVE.to_f64_const()..=bf16::MAX.to_f64_const(),
        _ => return true,
    };
    scalar == 0.0 || !scalar.is_finite() || range.contains(&scalar.abs())
}

/// Whether `dtype` holds the FP32 number `scalar` without an error, as infinities and NaN.
pub fn holds_exactly<D: FloatDType>(dtype: D, scalar: f64) -> bool {
    nearest(dtype, scalar) == scalar as f32 || scalar.is_nan()
}

/// The number of `dtype` that is nearest to the FP32 number `scalar`.
pub fn nearest<D: FloatDType>(dtype: D, scalar: f64) -> f32 {
    let scalar = scalar as f32;
    match dtype {
        _ if dtype == D::F16 => f16::from_f32(scalar).to_f32(),
        _ if dtype == D::BF16 => bf16::from_f32(scalar).to_f32(),
        _ => scalar,
    }
}

/// Whether an FP32 tensor of this one value follows half tensors: both halves hold exactly this value, and a product
/// with it stays in the range of the other factor, or is infinite in any dtype.
pub fn follows_half<D: FloatDType>(value: f64) -> bool {
    let is_held = |half| holds(half, value) && holds_exactly(half, value);
    (value.abs() <= 1.0 || !value.is_finite()) && D::HALVES.into_iter().all(is_held)
}

/// The largest number of a half dtype from `low` to below `high`, if there is one: random numbers below `high`
/// stay below it in half.
pub fn largest_within<D: FloatDType>(half: D, low: f64, high: f64) -> Option<f64> {
    let (nearest, value): (_, fn(u16) -> f64) = if half == D::F16 {
        let value = |bits| f16::from_bits(bits).to_f64();
        (f16::from_f64(high).to_bits(), value)
    } else {
        let value = |bits| bf16::from_bits(bits).to_f64();
        (bf16::from_f64(high).to_bits(), value)
    };
    // The crate `half` has no `next_down`. The bits after the sign count up from zero.
    let before = match nearest {
        0 => 0x8001,
        1..0x8000 => nearest - 1,
        _ => nearest + 1,
    };
    let mut largest = [nearest, before].map(value).into_iter();
    largest.find(|largest| (low..high).contains(largest))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A dtype for tests without Burn.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum DType {
        F64,
        F32,
        Flex32,
        F16,
        BF16,
    }

    impl FloatDType for DType {
        const F64: Self = Self::F64;
        const F32: Self = Self::F32;
        const FLEX32: Self = Self::Flex32;
        const F16: Self = Self::F16;
        const BF16: Self = Self::BF16;
    }

    #[test]
    fn the_widest_dtype_holds_all() {
        assert_eq!(widest([DType::F16, DType::F16]), DType::F16);
        assert_eq!(widest([DType::F16, DType::BF16]), DType::F32);
        assert_eq!(widest([DType::F16, DType::Flex32]), DType::Flex32);
        assert_eq!(widest([DType::Flex32, DType::F32]), DType::F32);
        assert_eq!(widest([DType::F32, DType::F64]), DType::F64);
    }

    #[test]
    fn scalars_beyond_the_half_range_are_not_held() {
        for scalar in [0.0, -0.0, 1.0, -65504.0, 6.2e-5, f64::INFINITY, f64::NAN] {
            assert!(holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
        }
        for scalar in [-1e9, 65520.0, 1e-5, 1e-8] {
            assert!(!holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
            assert!(holds(DType::F32, scalar), "{scalar}");
        }
        for scalar in [f32::MIN as f64, 1e-40, 1e300] {
            assert!(!holds(DType::BF16, scalar), "{scalar}");
        }
    }

    #[test]
    fn a_scalar_is_held_exactly_or_not() {
        for scalar in [0.0, -1.0, 0.5, 256.0, f64::INFINITY, f64::NAN] {
            for dtype in [DType::F16, DType::BF16, DType::F32] {
                assert!(holds_exactly(dtype, scalar), "{scalar}");
            }
        }
        // In FP32 every scalar is what the program gets.
        assert!(
            holds_exactly(DType::F32, 0.1)
                && !holds_exactly(DType::F16, 0.1)
                && !holds_exactly(DType::BF16, 0.1)
        );
        assert!(holds_exactly(DType::F16, 257.0) && !holds_exactly(DType::BF16, 257.0));
        assert!(!holds_exactly(DType::F16, 70_000.0) && holds_exactly(DType::BF16, 65_536.0));
        assert!(!holds_exactly(DType::F16, 1e-9) && !holds_exactly(DType::BF16, 1e-45));
    }

    #[test]
    fn the_largest_number_below_a_bound_is_the_last_before_it() {
        // Equal bounds, reversed ones, and no number of half between them.
        for (low, high) in [(0.0, 0.0), (0.5, 0.5), (1.0, -1.0), (0.9999, 1.0)] {
            assert_eq!(largest_within(DType::F16, low, high), None);
            assert_eq!(largest_within(DType::BF16, low, high), None);
        }
        for (bound, f16, bf16) in [
            (1.0, 1.0 - 2_f64.powi(-11), 1.0 - 2_f64.powi(-8)),
            (-1.0, -1.0 - 2_f64.powi(-10), -1.0 - 2_f64.powi(-7)),
            (0.999, 0.9985351562, 1.0 - 2_f64.powi(-8)),
            (1000.25, 1000.0, 1000.0),
            (1e6, 65504.0, 999424.0),
            (0.0, -2_f64.powi(-24), -2_f64.powi(-133)),
            (f64::INFINITY, 65504.0, f32::from_bits(0x7f7f_0000).into()),
        ] {
            for (half, expected) in [(DType::F16, f16), (DType::BF16, bf16)] {
                let below = largest_within(half, f64::MIN, bound).unwrap();
                assert!(
                    (below - expected).abs() <= 1e-10 * expected.abs(),
                    "{bound}: {below}"
                );
                assert!(below < bound);
            }
        }
    }

    #[cfg(any(feature = "burn-0-21", feature = "burn-0-22", feature = "burn-0-23"))]
    macro_rules! held_as_burn_says {
        ($($name:ident: $dtype:ty;)*) => {$(
            #[test]
            fn $name() {
                for half in <$dtype>::HALVES {
                    let info = half.finfo().expect("a float dtype");
                    for bound in [info.min_positive, info.max] {
                        assert!(holds(half, bound), "{half:?}: {bound}");
                    }
                    for beyond in [info.min_positive.next_down(), info.max.next_up()] {
                        assert!(!holds(half, beyond), "{half:?}: {beyond}");
                    }
                }
            }
        )*};
    }

    #[cfg(feature = "burn-0-21")]
    held_as_burn_says! { half_holds_what_burn_0_21_says: burn_std_0_21::DType; }
    #[cfg(feature = "burn-0-22")]
    held_as_burn_says! { half_holds_what_burn_0_22_says: burn_std_0_22::DType; }
    #[cfg(feature = "burn-0-23")]
    held_as_burn_says! { half_holds_what_burn_0_23_says: burn_std_0_23::DType; }
}
