//! The errors a user can cause, each naming the value given, what was expected and the likely fix.
//! Independent of tensors and backends.

use std::fmt::Display;

use crate::precision::Precision;

/// An error: what was given, what was expected, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AmpError {
    /// A precision string that is not one of [`Precision`]'s names.
    #[error(
        "unknown precision {given:?}: expected one of {}. Use \"auto\" to let the device decide",
        Precision::NAMES.join(", ")
    )]
    UnknownPrecision {
        /// The given string.
        given: String,
    },

    /// A half precision without arithmetic and without matrix multiplication on the device.
    #[error(
        "{device} does not support {precision}: the backend reports {reported} for it, and AMP \
         requires {precision} arithmetic, or at least {precision} matrix multiplication. Supported \
         here: {possible}. Choose one of these, or \"auto\"{hint}"
    )]
    UnsupportedPrecision {
        /// The requested precision.
        precision: Precision,
        /// The backend and its device.
        device: String,
        /// The uses of the dtype that the backend reports, for example `Storage`.
        reported: String,
        /// The precisions that the device supports.
        possible: String,
        /// A further hint, empty or starting with a comma.
        hint: &'static str,
    },

    /// A loss scaling setting outside its range.
    #[error("loss scaling: {field} is {given}, expected {expected}")]
    InvalidLossScale {
        /// The setting.
        field: &'static str,
        /// The given value.
        given: String,
        /// The valid range.
        expected: String,
    },

    /// A setting of a `MixedPrecisionTrainer` that is out of its range.
    #[error("trainer: {field} is {given}, expected {expected}")]
    InvalidTrainer {
        /// The setting.
        field: &'static str,
        /// The given value.
        given: String,
        /// The valid range.
        expected: &'static str,
    },

    /// A scaler's state that cannot be written, or cannot be read.
    #[error("cannot {action} the state {place}: {reason}. {}", remedy(action))]
    State {
        /// "read" or "write".
        action: &'static str,
        /// "from" and the source, or "to" and the target, for example `from state.json`.
        place: String,
        /// What is wrong.
        reason: String,
    },

    /// A plot that cannot be drawn or written (feature `plot`).
    #[error("cannot draw the loss scale to {place}: {reason}. An existing file there is unchanged")]
    Plot {
        /// The file.
        place: String,
        /// What is wrong.
        reason: String,
    },

    /// Steps are skipped one after the other, and the scaler cannot help by changing the loss scale. Returned
    /// only by a trainer set to return this error.
    #[error("{}", reason.explained(*steps, *scale, parameters))]
    Stuck {
        /// Why the last of these steps was skipped.
        reason: StuckReason,
        /// Steps skipped in a row.
        steps: u64,
        /// The loss scale.
        scale: f32,
        /// The paths of the first parameters with non-finite gradients, and how many more there
        /// are. Empty if none is known.
        parameters: String,
    },

    /// A loss of several values, or of none, given to a trainer.
    #[error(
        "the loss has shape {given:?}, expected [1]: the mean or the sum of the batch. Reduce it with \
         .mean() or .sum(), or pass Reduction::Mean to Burn's loss. Nothing was changed"
    )]
    LossShape {
        /// The given shape.
        given: Vec<usize>,
    },

    /// A call of the explicit protocol before a loss was scaled.
    #[error(
        "{call} was called, but no loss was scaled since the last update. Call \
         scaler.scale(loss).backward(), or scaler.backward(loss, &model), first, on this scaler or a clone of it"
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

    /// `unscale` twice for the same parameters, or after their `step`.
    #[error(
        "unscale was called again, or after step, before update: the gradient of \
         {parameter}, for example, would be divided by the scale twice. Unscale once, \
         after the last micro-batch and before step"
    )]
    AlreadyUnscaled {
        /// The path of a parameter in its module.
        parameter: String,
    },

    /// `step` twice for the same parameters.
    #[error(
        "step was called again before update: the gradient of {parameter}, for example, would be \
         applied twice. Call update once after the steps of all optimizers; with accumulation, step \
         once, after the last micro-batch"
    )]
    AlreadyStepped {
        /// The path of a parameter in its module.
        parameter: String,
    },

    /// Several steps are under way, of which one is meant. `GradScaler::reset` discards them all.
    #[error(
        "{call}: expected one step, got {steps}: some of their losses were given to scalers that were dropped, as \
         of several trainings that call GradScaler::of(&device) for each step. Call it once in each training, and \
         use that scaler, or its clones, for scale, step and update"
    )]
    SeveralSteps {
        /// The method that was called.
        call: &'static str,
        /// How many steps there are.
        steps: usize,
    },

    /// Gradients that do not belong to the given model, or no gradients at all.
    #[error("{call} was given {}", foreign(*given, *of_model))]
    ForeignGradients {
        /// The method that was called.
        call: &'static str,
        /// How many gradients there were.
        given: usize,
        /// How many of them belong to the model.
        of_model: usize,
    },

    /// A training strategy of the user's own that adds up micro-batches, of which it could apply only a part.
    #[error(
        "a training strategy of your own adds up {micro_batches} micro-batches. Where steps are checked, as in f16, a \
         micro-batch whose gradients are not finite has none, and the strategy applies those of the others as if they \
         were the whole batch. Use one of Burn's strategies, or choose bf16 without a finite check"
    )]
    PartialBatch {
        /// How many micro-batches are accumulated.
        micro_batches: usize,
    },

    /// A loss scale was configured with a precision that does not scale the loss.
    #[error(
        "a loss scale was configured with {precision}, which needs none: only f16 has a smaller \
         range than FP32. Remove the loss scale, or choose f16"
    )]
    LossScaleWithoutF16 {
        /// The requested precision.
        precision: Precision,
    },

    /// A configuration names an operation that the policy does not have.
    #[error(
        "unknown operation {given:?}: expected the name of an operation of the policy{near}. The guide's page \
         `ops` lists all names; the prefix `float_` is optional"
    )]
    UnknownOperation {
        /// The given name.
        given: String,
        /// Similar names, after ", such as "; empty if there are none.
        near: String,
    },

    /// A configuration gives an operation a precision that the operation cannot have.
    #[error(
        "the precision of the operation {op}: got {given:?}, expected {expected}{}",
        because(why)
    )]
    OperationPrecision {
        /// The operation.
        op: String,
        /// The given precision.
        given: String,
        /// The precisions that the operation can have.
        expected: String,
        /// Why the operation can have no other precision; empty if it can have any.
        why: String,
    },

    /// A trained parameter that is half in the program, as a file in half leaves it.
    #[error(
        "{call}: the parameter {parameter}, or its gradient, is {precision}, expected FP32: the steps of a \
         training are too small for {precision}. Cast the parameter to FP32 before training, or the record that it \
         is loaded from"
    )]
    HalfParameter {
        /// The method.
        call: &'static str,
        /// The path of the parameter in its module.
        parameter: String,
        /// Its precision.
        precision: Precision,
    },

    /// A precision for weights that is not a half precision.
    #[error("weights in half precision: got {precision}, expected f16 or bf16")]
    NotHalf {
        /// The given precision.
        precision: Precision,
    },

    /// A comparison of half precision with FP32 where FP32 is in force.
    #[error(
        "compare: got {precision}, expected f16 or bf16 in force on the model's device, which is an AmpAutodiff's. Apply \
         AmpConfig::with_precision, or call compare in with_precision(..)"
    )]
    NothingToCompare {
        /// The precision in force.
        precision: Precision,
    },

    /// A weight that the half precision cannot hold.
    #[error(
        "the weight {parameter} has a value of magnitude {value}, expected at most {}",
        largest_half(*value)
    )]
    WeightOverflow {
        /// The path of the parameter in its module.
        parameter: String,
        /// The largest finite magnitude in it.
        value: f32,
    },
}

/// Why a skipped step leaves the scale unchanged. An overflow at a dynamic scale that can still back off is
/// not one of these reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StuckReason {
    /// The gradients overflowed at the minimum of a dynamic scale.
    MinimumScale,
    /// The gradients overflowed at a fixed scale.
    FixedScale,
    /// The loss itself was not finite.
    NonFiniteLoss,
    /// The loss was not scaled, and the loss or its gradients were not finite.
    Unscaled,
}

/// What to look at where no scale takes part.
pub(crate) const UNSCALED: &str = "Check the inputs, the learning rate, and what divides by zero or takes a root or \
     a logarithm of it; AmpConfig::with_anomaly_detection(true) names the operation";

pub(crate) const NOT_THE_SCALE: &str = "The loss scale is not the cause: check the inputs, the learning rate, \
     and the forward pass for values beyond 65504, which f16 cannot hold. For such values try bf16, or \
     full_precision around the layers that overflow";

impl StuckReason {
    /// The problem and the remedy. `scale` is the last step's. `gradients` names the known non-finite gradients.
    pub(crate) fn explained(self, steps: u64, scale: f32, gradients: &str) -> String {
        let colon = if gradients.is_empty() { "" } else { ": " };
        let (last, help) = match self {
            StuckReason::MinimumScale => (
                format!("at the minimum loss scale {scale}"),
                format!(
                    "No loss scale makes its gradients finite{colon}{gradients}. Try bf16, or \
                     full_precision around the layers that overflow"
                ),
            ),
            StuckReason::FixedScale => (
                format!("at the fixed loss scale {scale}"),
                format!(
                    "Its gradients are not finite{colon}{gradients}. Try a smaller or a dynamic \
                     loss scale, bf16, or full_precision around the layers that overflow"
                ),
            ),
            StuckReason::Unscaled => (
                "without a loss scale".into(),
                format!("Its loss or gradients are not finite{colon}{gradients}. {UNSCALED}"),
            ),
            StuckReason::NonFiniteLoss => (
                "because its loss is not finite".into(),
                NOT_THE_SCALE.into(),
            ),
        };
        format!(
            "{steps} steps in a row were skipped, the last one {last}: the model is not training. \
             {help}"
        )
    }
}

/// The consequence of a state that could not be read or written, and the remedy.
fn remedy(action: &str) -> &'static str {
    match action {
        "read" => {
            "Nothing was changed. Was this written by the same type, such as by `GradScaler::save_file`? If it is \
             damaged, use an older copy. A scaler can also start anew, and finds its scale within a few steps"
        }
        _ => "An existing file there is unchanged",
    }
}

/// The largest values of the half precisions, and what to do with a weight that is larger.
fn largest_half(value: f32) -> &'static str {
    if value > Precision::Bf16.largest() {
        "65504 in f16 and 3.39e38 in bf16: clamp it, or keep the weights in FP32"
    } else {
        "65504, the largest of f16: use bf16"
    }
}

/// The reason at the end of a text, if there is one.
fn because(why: &str) -> String {
    if why.is_empty() {
        String::new()
    } else {
        format!(", because {why}")
    }
}

/// The problem with gradients that do not all belong to a model.
fn foreign(given: usize, of_model: usize) -> String {
    let unreached = "the loss does not depend on its parameters. Are they frozen or detached?";
    match given {
        0 => format!("no gradients of this model: {unreached}"),
        _ => format!(
            "{given} gradients, but only {of_model} of them belong to this model. Either they were \
             computed with another model (GradientsParams::from_grads takes the model to step), or \
             {unreached}"
        ),
    }
}

impl AmpError {
    /// A state that could not be read.
    #[doc(hidden)]
    pub fn unread(from: impl Display, reason: impl Display) -> Self {
        AmpError::State {
            action: "read",
            place: format!("from {from}"),
            reason: reason.to_string(),
        }
    }

    /// No gradients at all, given to `call`: the loss reaches no parameter.
    #[doc(hidden)]
    pub fn no_gradients(call: &'static str) -> Self {
        AmpError::ForeignGradients {
            call,
            given: 0,
            of_model: 0,
        }
    }

    /// A state that could not be written.
    #[doc(hidden)]
    pub fn unwritten(to: impl Display, reason: impl Display) -> Self {
        AmpError::State {
            action: "write",
            place: format!("to {to}"),
            reason: reason.to_string(),
        }
    }
}
