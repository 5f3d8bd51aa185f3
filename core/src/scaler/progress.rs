//! A trainer's result for a batch. Independent of tensors.

use serde::{Deserialize, Serialize};

use crate::Precision;

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
    /// The scale that the loss was multiplied by; 1 in bf16 and FP32.
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
