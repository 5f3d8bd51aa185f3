//! The float dtypes that the policy distinguishes, of any version of Burn.

use std::fmt::Debug;

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

#[cfg(test)]
pub(crate) mod tests {
    use super::FloatDType;

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

    #[cfg(any(feature = "burn-0-21", feature = "burn-0-22", feature = "burn-0-23"))]
    macro_rules! held_as_burn_says {
        ($($name:ident: $dtype:ty;)*) => {$(
            #[test]
            fn $name() {
                for half in <$dtype>::HALVES {
                    let info = half.finfo().expect("a float dtype");
                    for bound in [info.min_positive, info.max] {
                        assert!(crate::policy::holds(half, bound), "{half:?}: {bound}");
                    }
                    for beyond in [info.min_positive.next_down(), info.max.next_up()] {
                        assert!(!crate::policy::holds(half, beyond), "{half:?}: {beyond}");
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
