//! What the policy knows about a tensor.

use crate::policy::HALVES;
use bitflags::bitflags;
use burn_backend::DType;

bitflags! {
    /// What the policy knows about a tensor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct TensorFlags: u16 {
        /// Half by the policy's decision; meaningless for other dtypes.
        const DEMOTED = 1;
        /// A gradient, or computed from one: never demoted, so optimizers stay FP32.
        const GRADIENT = 1 << 1;
        /// The policy computed the tensor, or a tensor that it depends on, in f16. A backward pass
        /// must scale the loss, even after the f16 region has ended.
        const FROM_F16 = 1 << 2;
        /// FP32, but computed from F16 tensors by steps that stay in the F16 range, such as the
        /// arithmetic of a composed norm: the values fit in F16.
        const WIDENED_F16 = 1 << 3;
        /// As `WIDENED_F16`, for BF16. The values need not fit in F16.
        const WIDENED_BF16 = 1 << 4;
        const WIDENED = Self::WIDENED_F16.bits() | Self::WIDENED_BF16.bits();
        /// A constant that fits in both half dtypes, such as an RNN's initial state: the constant
        /// follows a half operand beside it.
        const CONSTANT = 1 << 5;
        /// Random zeros and ones: the noise of a dropout.
        const BINARY = 1 << 6;
        /// FP32 that the user cast from F16: casting back to F16 loses nothing.
        const EXACT_F16 = 1 << 7;
        /// As `EXACT_F16`, for BF16.
        const EXACT_BF16 = 1 << 8;
        /// A gradient of the running backward pass. An operation on it gives its dtype, so that a
        /// gradient arrives in the dtype of the tensor it belongs to.
        const BACKWARD = 1 << 9;
        /// How many gradients a half gradient is the sum of, less one.
        const TERMS = 0b1_1111 << 10;
    }
}

impl TensorFlags {
    /// How many gradients a half gradient is the sum of.
    pub(crate) fn terms(self) -> u8 {
        ((self & Self::TERMS).bits() >> 10) as u8 + 1
    }

    /// The flags of a sum of so many gradients.
    pub(crate) fn with_terms(self, terms: u8) -> Self {
        let bits = Self::from_bits_truncate(u16::from(terms - 1) << 10);
        (self - Self::TERMS) | (bits & Self::TERMS)
    }

    /// The flag for FP32 that fits in this half dtype.
    pub(crate) fn widened(half: DType) -> Self {
        match half {
            DType::F16 => Self::WIDENED_F16,
            _ => Self::WIDENED_BF16,
        }
    }

    /// The flags for FP32 that fits in each half dtype of which `fits` is true.
    pub(crate) fn widened_where(fits: impl Fn(DType) -> bool) -> Self {
        let halves = HALVES.into_iter().filter(|half| fits(*half));
        halves.map(Self::widened).collect()
    }

    /// The flag for FP32 that was cast from this half dtype.
    pub(crate) fn exact(half: DType) -> Self {
        match half {
            DType::F16 => Self::EXACT_F16,
            _ => Self::EXACT_BF16,
        }
    }
}
