//! The anomalies that anomaly detection records for a step. Independent of tensors.

use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// The first operation of a pass that turned finite operands into a non-finite result. Detected if
/// `AmpConfig::with_anomaly_detection` is on.
///
/// An infinity that the user writes into a tensor, such as a mask of minus infinity, is not an anomaly. An
/// operation that only moves values is not an anomaly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Anomaly {
    /// The backend's name for the operation, for example `linear`.
    pub op: String,
    /// The pass of the operation.
    pub pass: AnomalyPass,
    /// The dtype of the result, for example `F16`.
    pub dtype: String,
    /// The shape of the result.
    pub shape: Vec<usize>,
    /// The largest magnitude among the operands' values, read in FP32, and the scalars.
    pub largest_operand: f32,
    /// In the backward pass, the operation of the forward pass whose gradient was computed, for example `log` for a
    /// cast of the gradient of its operand. `None` for a gradient that Burn's autodiff computes itself: there
    /// `op` tells.
    #[serde(default)]
    pub step: Option<String>,
    /// In the forward pass, the module path of the operation's parameter, or of the last parameter
    /// used before the operation. Set if the module was available, as for
    /// [`LastStep::parameters`](crate::LastStep::parameters).
    pub parameter: Option<String>,
    /// The node of that parameter.
    #[doc(hidden)]
    #[serde(skip)]
    pub leaf: Option<u64>,
}

impl Anomaly {
    /// Sets the parameter's path, given the nodes of the module's parameters.
    #[doc(hidden)]
    pub fn place(&mut self, nodes: &[(u64, String)]) {
        if let Some((_, path)) = nodes.iter().find(|(node, _)| Some(*node) == self.leaf) {
            self.parameter = Some(path.clone());
        }
    }
}

/// The two passes of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnomalyPass {
    /// From the inputs to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            AnomalyPass::Forward => "forward",
            AnomalyPass::Backward => "backward",
        };
        write!(
            f,
            "{pass}: {} {:?} in {}, operands up to {:e}",
            self.op, self.shape, self.dtype, self.largest_operand
        )?;
        if let Some(step) = &self.step {
            write!(f, ", for the gradient of {step}")?;
        }
        match &self.parameter {
            Some(parameter) => write!(f, ", at {parameter}"),
            None => Ok(()),
        }
    }
}

/// Whether the environment turns anomaly detection on, by `BURN_AMP_DETECT_ANOMALY=1`. Read once per
/// process.
pub fn is_watched_by_environment() -> bool {
    static ASKED: LazyLock<bool> = LazyLock::new(|| {
        let value = std::env::var("BURN_AMP_DETECT_ANOMALY");
        value.is_ok_and(|value| !matches!(value.trim(), "" | "0" | "false"))
    });
    *ASKED
}
