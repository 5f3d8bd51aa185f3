//! What the policy knows about a tensor's values.

use bitflags::bitflags;
use burn_amp_core::FloatDType as _;
use burn_backend::DType;

bitflags! {
    /// What the policy knows about a tensor's values. That a tensor is half by the policy's decision
    /// needs no flag: its dtype is not the one that the client knows.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct TensorFlags: u8 {
        /// FP32, but computed from F16 tensors by steps that stay in the F16 range, such as a mean:
        /// the values fit in F16.
        const WIDENED_F16 = 1;
        /// As `WIDENED_F16`, for BF16. The values need not fit in F16.
        const WIDENED_BF16 = 1 << 1;
        const WIDENED = Self::WIDENED_F16.bits() | Self::WIDENED_BF16.bits();
        /// Constants that both half dtypes hold, such as an RNN's initial state or the noise of a
        /// dropout: in FP32, they follow a half operand beside them.
        const CONSTANT = 1 << 2;
    }
}

impl TensorFlags {
    /// The flag for FP32 that fits in this half dtype.
    pub(crate) fn widened(half: DType) -> Self {
        match half {
            DType::F16 => Self::WIDENED_F16,
            _ => Self::WIDENED_BF16,
        }
    }

    /// The flags for FP32 that fits in each half dtype of which `fits` is true.
    pub(crate) fn widened_where(fits: impl Fn(DType) -> bool) -> Self {
        let halves = DType::HALVES.into_iter().filter(|half| fits(*half));
        halves.map(Self::widened).collect()
    }
}
