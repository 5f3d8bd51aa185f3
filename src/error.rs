//! The errors a user can cause, each naming the value given, what was expected and the likely fix.
//! Knows nothing of tensors or backends.

use crate::Precision;

/// What can be wrong, with what was given, what was expected and what to do.
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

    /// A scaler's state that cannot be written, or cannot be read as it is.
    #[error(
        "cannot {action} the state, {place}: {reason}. What was there before is as it was{}",
        remedy(action)
    )]
    State {
        /// "read" or "write".
        action: &'static str,
        /// The file.
        place: String,
        /// What is wrong.
        reason: String,
    },

    /// A picture that cannot be drawn or written.
    #[error("cannot draw the loss scale to {place}: {reason}. What was there before is as it was")]
    Plot {
        /// The file.
        place: String,
        /// What is wrong.
        reason: String,
    },

    /// The loss scale is at its minimum, and steps are skipped one after the other.
    #[error(
        "{steps} steps in a row were skipped, the last of them at the minimum loss scale {scale}: the \
         model is not training. Not finite whatever the scale: {parameters}. Try bf16, or full_precision \
         around the layers that overflow"
    )]
    StuckAtMinimum {
        /// Steps skipped in a row.
        steps: u64,
        /// The minimum scale.
        scale: f32,
        /// The paths of the parameters with gradients that are not finite.
        parameters: String,
    },

    /// A step of the explicit protocol before there was a scaled loss.
    #[error(
        "{call} was called, but no loss was scaled since the last update. Call \
         scaler.scale(loss).backward(), or scaler.backward(loss, &model), first. A training loop on \
         AmpAutodiff that calls loss.backward() needs none of these calls: it skips by itself"
    )]
    NothingScaled {
        /// The method that was called.
        call: &'static str,
    },

    /// `update` before `step`.
    #[error(
        "update was called, but there was no step since the last update. Call scaler.step(..) first, \
         once for each optimizer, and update once after all of them"
    )]
    NothingStepped,

    /// `unscale` twice for the same parameters.
    #[error(
        "unscale was called twice since the last update, for the parameter {parameter} among others: \
         its gradient would be divided by the scale twice. With accumulation, unscale once, after the \
         last micro-batch"
    )]
    AlreadyUnscaled {
        /// The path of a parameter in its module.
        parameter: String,
    },

    /// `step` twice for the same parameters.
    #[error(
        "step was called twice since the last update, for the parameter {parameter} among others. Call \
         update once after the steps of all optimizers; with accumulation, step once, after the last \
         micro-batch"
    )]
    AlreadyStepped {
        /// The path of a parameter in its module.
        parameter: String,
    },

    /// Gradients that are not of the model they are given with.
    #[error(
        "{call} was given {given} gradients, of which {of_model} are of this model's parameters. \
         Either they were computed with another model (GradientsParams::from_grads takes the one that \
         is stepped), or the loss reaches none of its parameters: are they frozen or detached?"
    )]
    ForeignGradients {
        /// The method that was called.
        call: &'static str,
        /// How many gradients there were.
        given: usize,
        /// How many of them are of the model.
        of_model: usize,
    },

    /// A batch that several devices share, of which a part could be applied alone.
    #[error(
        "a batch is spread over {devices} devices, and when the gradients of one overflow, those of \
         the others would be applied as if they were the batch. Give the Learner \
         AmpOptimizer::new(optimizer, scalers) with GradScaler::of each device, or choose bf16, which \
         needs no loss scale"
    )]
    PartialBatch {
        /// How many devices share a batch.
        devices: usize,
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

/// What helps against a state that cannot be read.
fn remedy(action: &str) -> &'static str {
    match action {
        "read" => {
            "; an older file may be whole, and a fresh scaler finds its scale again within some steps"
        }
        _ => "",
    }
}

impl AmpError {
    pub(crate) fn state(action: &'static str, place: impl ToString, reason: impl ToString) -> Self {
        AmpError::State {
            action,
            place: place.to_string(),
            reason: reason.to_string(),
        }
    }
}
