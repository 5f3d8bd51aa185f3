//! A trainer's settings, and the metrics of a batch. Independent of tensors.

use serde::{Deserialize, Serialize};

use crate::{AmpError, Precision};

/// What to do when a run is stuck ([`Transition::Stuck`](crate::Transition)), whatever the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenStuck {
    /// Only log an error.
    #[default]
    Log,
    /// Log the error. A `Learner` stops after the step, and a `MixedPrecisionTrainer` returns the
    /// error. Elsewhere the same as `Log`.
    Stop,
}

/// Checks the settings of a trainer that both packages have.
///
/// # Errors
///
/// [`AmpError::InvalidTrainer`] when one is out of its range.
pub fn check_trainer(
    grads_accumulation: usize,
    grad_clipping_norm: Option<f32>,
) -> Result<(), AmpError> {
    let invalid = |field, given, expected| {
        Err(AmpError::InvalidTrainer {
            field,
            given,
            expected,
        })
    };
    if grads_accumulation == 0 {
        return invalid(
            "grads_accumulation",
            "0".into(),
            "at least 1 batch for a step",
        );
    }
    match grad_clipping_norm {
        Some(norm) if norm.is_nan() || norm <= 0.0 => invalid(
            "grad_clipping_norm",
            norm.to_string(),
            "a number greater than 0, or None for no clipping",
        ),
        _ => Ok(()),
    }
}

/// Whether the window of a trainer's record, of `micro_batches` of `recorded` batches, can go on in
/// a trainer that takes a step every `own` batches. The gradients are means over `recorded` batches,
/// so the window of another number is dropped, with a warning.
pub fn continues_window(micro_batches: usize, recorded: usize, own: usize) -> bool {
    let continues = micro_batches == 0 || recorded == own;
    if !continues {
        log::warn!(
            "burn-amp: {micro_batches} of {recorded} micro-batches in the trainer's record are dropped: \
             this trainer takes a step every {own}"
        );
    }
    continues
}

/// What happened to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepProgress {
    /// The gradients wait for the rest of the accumulation window.
    Accumulated,
    /// The optimizer's step was taken.
    Stepped,
    /// The step was skipped, with its whole window.
    Skipped,
}

/// The metrics of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The loss of this batch as `loss_fn` returned it: not scaled, and not divided by the number
    /// of batches in a window. Reading the loss waits for the device once per batch.
    pub loss: f64,
    /// The scale of the losses of the batch's window; 1 if none was scaled, as in bf16 and FP32.
    pub scale: f32,
    /// What happened to the batch.
    pub progress: StepProgress,
    /// Steps skipped so far.
    pub skipped_steps: u64,
    /// The precision of the trainer, possibly [`Auto`](Precision::Auto).
    pub precision: Precision,
}

impl StepMetrics {
    /// Whether the optimizer's step was taken.
    pub fn stepped(&self) -> bool {
        self.progress == StepProgress::Stepped
    }
}
