//! What is known of an operation on a device, beside the policy's table.

use super::OpPrecision;
use super::trials::Kind;
use crate::FloatDType;

/// What the table of a device says of an operation: two bits for the configuration, two for each [`Kind`] of its
/// calls in each half dtype, and one for calls that overflowed f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Known(pub(crate) u32);

/// The result of a trial: the calls, the half precision, and whether the device is exact.
pub(crate) type Tried = (Kind, Half, bool);

/// The place of a half dtype: 0 for f16, 1 for bf16.
pub(crate) type Half = u32;

/// The place of a half dtype.
pub(crate) fn half_of<D: FloatDType>(half: D) -> Half {
    u32::from(half == D::BF16)
}

/// The answers in two bits.
const NO: u32 = 1;
const YES: u32 = 2;

impl Known {
    pub(crate) const CONFIGURED: u32 = 0b11;
    /// Calls of the operation overflowed f16.
    pub(crate) const OVERFLOWED: u32 = 1 << first_bit(Kind::ALL.len() as u32);

    /// The same, without what was tried.
    pub fn without_trials(self) -> Self {
        Self(self.0 & (Self::CONFIGURED | Self::OVERFLOWED))
    }

    /// Whether the call overflowed f16: no loss scale mends it.
    #[inline]
    pub(crate) fn overflowed(self) -> bool {
        self.0 & Self::OVERFLOWED != 0
    }

    /// The same for a call that did not overflow.
    pub fn without_overflow(self) -> Self {
        Self(self.0 & !Self::OVERFLOWED)
    }

    /// The same for calls in which the device is not exact in `half`.
    pub fn inexact<D: FloatDType>(self, calls: Kind, half: D) -> Self {
        let bits = bits(calls, half_of(half));
        Self(self.0 & !(0b11 << bits) | NO << bits)
    }

    /// The precision that the configuration gives the operation, in the place of the table's.
    #[inline]
    pub fn configured(self) -> Option<OpPrecision> {
        match self.0 & Self::CONFIGURED {
            NO => Some(OpPrecision::F32),
            YES => Some(OpPrecision::Half),
            _ => None,
        }
    }

    /// The same, with the precision of a configuration.
    pub fn with_configured(self, precision: Option<OpPrecision>) -> Self {
        let bits = match precision {
            None => 0,
            Some(OpPrecision::F32) => NO,
            Some(OpPrecision::Half) => YES,
        };
        Self(self.0 & !Self::CONFIGURED | bits)
    }

    /// Whether the device is exact in these calls in `half`; `None` before a trial.
    #[inline]
    pub fn is_exact<D: FloatDType>(self, calls: Kind, half: D) -> Option<bool> {
        self.answer(calls, half_of(half))
    }

    pub(crate) fn answer(self, calls: Kind, half: Half) -> Option<bool> {
        match self.0 >> bits(calls, half) & 0b11 {
            NO => Some(false),
            YES => Some(true),
            _ => None,
        }
    }

    /// The same, with the result of a trial; `None` if there is one already.
    pub(crate) fn with(self, (calls, half, exact): &Tried) -> Option<Self> {
        let answer = if *exact { YES } else { NO };
        let is_new = self.answer(*calls, *half).is_none();
        is_new.then(|| Self(self.0 | answer << bits(*calls, *half)))
    }
}

/// Where the answer for these calls begins.
pub(crate) fn bits(calls: Kind, half: Half) -> u32 {
    first_bit(calls as u32) + 2 * half
}

/// Where the answers for the kind at this place begin. After the last kind, where they end.
const fn first_bit(kind: u32) -> u32 {
    2 + 4 * kind
}
