//! The errors a user can cause, each naming the value given, what was expected and the likely fix.
//! Knows nothing of tensors or backends.

use crate::Precision;

/// What can be wrong with a configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AmpError {
    /// A precision string that is not one of [`Precision`]'s names.
    #[error(
        "unknown precision {given:?}: expected one of {}. Use \"auto\" to let the device decide",
        Precision::NAMES.join(", ")
    )]
    UnknownPrecision {
        /// The string as it was given.
        given: String,
    },

    /// A half precision that the device can neither compute nor multiply matrices in.
    #[error(
        "{precision} is not possible with {device}: the backend reports {reported} for it, and AMP \
         needs storage with arithmetic, or storage with accelerated matrix multiplication. \
         Possible here: {possible}. Choose one of these, or \"auto\"{hint}"
    )]
    UnsupportedPrecision {
        /// The precision that was asked for.
        precision: Precision,
        /// The backend and its device.
        device: String,
        /// The uses of the dtype that the backend reports, for example `Storage`.
        reported: String,
        /// The precisions that this device can do.
        possible: String,
        /// What else may help, empty or starting with a comma.
        hint: &'static str,
    },

    /// A loss scaling setting outside its range.
    #[error("loss scaling: {field} is {given}, expected {expected}")]
    InvalidLossScale {
        /// The setting.
        field: &'static str,
        /// The value as it was given.
        given: String,
        /// The range it must lie in.
        expected: &'static str,
    },

    /// Loss scaling was configured together with a precision that does not scale.
    #[error(
        "a loss scale was configured together with {precision}, which has the exponent range of \
         FP32 and never scales the loss. Remove the loss scale, or choose f16"
    )]
    LossScaleWithoutF16 {
        /// The precision that was asked for.
        precision: Precision,
    },
}
