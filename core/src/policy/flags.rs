//! The policy's record of a tensor, besides its dtype.

use bitflags::bitflags;

use crate::FloatDType;

bitflags! {
    /// The policy's record of a tensor, besides its dtype.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct TensorFlags: u32 {
        /// Half by the policy's decision; meaningless for other dtypes.
        const DEMOTED = 1;
        /// A gradient, or computed from one: never demoted, so optimizers stay FP32.
        const GRADIENT = 1 << 1;
        /// The policy computed the tensor, or a tensor that it depends on, in f16. A backward pass
        /// must scale the loss, even after the f16 region has ended.
        const FROM_F16 = 1 << 2;
        /// FP32, but computed from F16 tensors by steps that stay in the F16 range, such as the
        /// arithmetic of a composed norm: the values fit in F16.
        const FITS_F16 = 1 << 3;
        /// As `FITS_F16`, for BF16. The values need not fit in F16.
        const FITS_BF16 = 1 << 4;
        /// FP32 that fits in a half dtype.
        const FITS = Self::FITS_F16.bits() | Self::FITS_BF16.bits();
        /// A constant from -1 to 1 that both half dtypes hold exactly, such as the row of a mask, or an infinite one: it
        /// follows a half operand beside it.
        const CONSTANT = 1 << 5;
        /// Random zeros and ones: the noise of a dropout.
        const BINARY = 1 << 6;
        /// FP32 that the user cast from F16: casting back to F16 loses nothing.
        const EXACT_F16 = 1 << 7;
        /// As `EXACT_F16`, for BF16.
        const EXACT_BF16 = 1 << 8;
        /// A gradient of the running backward pass. An operation on a gradient returns the gradient's dtype,
        /// so that each gradient has the dtype of its tensor.
        const BACKWARD = 1 << 9;
        /// A parameter that an operation cast to half, or a tensor that the optimizer computed from such a
        /// parameter: the new parameter will be cast, too.
        const USED_IN_HALF = 1 << 10;
        /// FP32 that fits in half: a sigmoid, a sum of its multiple by -1 and a scalar, or the sum or product of two. The
        /// difference of two may need FP32's digits, but a factor follows a half operand beside it.
        const GATE = 1 << 11;
        /// A constant that is one: a product with it may be the first of many, and leave f16's range at its lower end.
        const ONES = 1 << 12;
        /// FP32, and computed from FP32 data of the user's, such as a mask of -1e9: of any size, even if a gradient
        /// flows to it.
        const UNBOUNDED = 1 << 13;
        /// A half weight for inference, in place of an FP32 one. Its data stays half; what is computed from it is half
        /// by the policy's decision.
        const WEIGHT = 1 << 14;
        /// Half, and filled in places with a scalar that was rounded to half, as a mask of -1e4 in bf16: a
        /// comparison with this scalar has to round it, too.
        const FILLED = 1 << 15;
        /// A parameter, frozen or not, a leaf that requires a gradient, or computed from one. Anything else is data,
        /// which a contraction keeps in FP32.
        const LEARNED = 1 << 16;
        /// FP32 zeros, or infinities, which are the zeros of logarithms; or the state of a recurrence that begins with them: a half
        /// factor or a gate times a state, its sum with a half tensor, or a table whose rows are written. What half rounds at
        /// each step would add up.
        const STATE = 1 << 17;
        /// Random numbers in half, beside the FP32 numbers that were drawn: the half ones are not their exact values.
        const DRAWN = 1 << 18;
        /// A half product with the noise of a dropout, in training: the factor that follows may be rounded.
        const DROPPED = 1 << 19;
        /// What a cast keeps.
        const CAST = Self::GRADIENT.bits()
            | Self::FROM_F16.bits()
            | Self::BACKWARD.bits()
            | Self::LEARNED.bits();
    }
}

impl TensorFlags {
    /// The flag of FP32 that fits in this half dtype.
    pub fn fits<D: FloatDType>(half: D) -> Self {
        if half == D::F16 {
            Self::FITS_F16
        } else {
            Self::FITS_BF16
        }
    }

    /// The flag of FP32 that was cast from this half dtype.
    pub fn exact<D: FloatDType>(half: D) -> Self {
        if half == D::F16 {
            Self::EXACT_F16
        } else {
            Self::EXACT_BF16
        }
    }
}
