//! A step of the explicit protocol, from the first scaled loss to `update`. Independent of tensors:
//! the layers above choose the types they store here.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Anomaly;

/// A check of losses on one backend, not read back yet.
pub(crate) trait LossCheck: Any + Send {
    /// Reads back whether all losses are finite.
    fn read(self: Box<Self>) -> bool;
}

/// The protocol's state between one `update` and the next.
#[derive(Default)]
pub(crate) struct PendingStep {
    /// Losses given to `scale`, over all micro-batches.
    pub losses_given: u32,
    /// The scale for these losses, where they are scaled. Set by the first loss.
    pub scale: Option<f32>,
    /// Whether any loss was scaled. If so, the gradients of the step are checked.
    pub scaled: bool,
    /// The finite checks of these losses, one for each backend, until they are read back.
    pub losses: Vec<Box<dyn LossCheck>>,
    /// Whether any loss read back so far was not finite.
    pub non_finite_loss: bool,
    /// The unscaled gradients, by parameter id.
    pub unscaled: HashMap<u64, UnscaledGradient>,
    /// Whether a gradient was not finite, here or on a replica.
    pub overflow: bool,
    /// The parameters' paths, each with whether its local gradient is finite.
    pub gradients: Vec<(String, bool)>,
    /// What anomaly detection found in the passes.
    pub anomalies: Vec<Anomaly>,
    /// Steps taken or skipped.
    pub steps: u32,
    /// The replicas that the gradients were reduced with. They decide together.
    pub replicas: Option<Arc<dyn Any + Send + Sync>>,
}

/// A parameter's gradient after unscaling.
#[derive(Debug)]
pub(crate) struct UnscaledGradient {
    pub finite: bool,
    pub stepped: bool,
}

/// The part of a [`PendingStep`] that a record saves: the losses given, and what is known about
/// them.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct PendingStepRecord {
    pub losses_given: u32,
    pub scale: Option<f32>,
    pub non_finite_loss: bool,
}

impl PendingStep {
    /// The scale of the losses, if any loss was scaled.
    pub fn scale_in_use(&self) -> Option<f32> {
        self.scale.filter(|_| self.scaled)
    }
}
