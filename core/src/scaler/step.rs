//! The result of a step, and what its checks found. Independent of tensors.

use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::{Overflow, StepOutcome};

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastStep {
    /// The scale that the loss was multiplied by; 1 if it was not scaled.
    pub scale: f32,
    /// How the step ended.
    pub outcome: StepOutcome,
    /// How many parameters had a non-finite gradient; 0 if only another replica had one.
    pub non_finite_gradients: usize,
    /// The paths of these parameters in their module, for example `encoder.layers.2.weight`, in
    /// reverse module order. This is the order of the backward pass if the module declares its
    /// parts in order of use. The explicit protocol, a trainer and a `Learner` with `.with_amp()` fill in the
    /// paths; otherwise `GradScaler::explain` finds them. Of several modules, each has its own paths, in the
    /// order in which they were given. With `ExecutionStrategy::MultiDevice` Burn 0.21 trains copies, which have no paths.
    pub parameters: Vec<String>,
    /// The parameter with a finite gradient just before the first of `parameters`. The backward pass
    /// overflowed between the two. `None` if there is no such parameter, or without the module.
    pub last_finite: Option<String>,
    /// With anomaly detection on, the first operation with a non-finite result in the forward pass
    /// and in the backward pass.
    pub anomalies: Vec<Anomaly>,
}

/// The findings of a step's checks.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// If the module is known: its parameters in module order, each with whether its gradient is
    /// finite.
    pub parameters: Vec<(String, bool)>,
    /// If the module is not known: the parameters' nodes, each with whether its gradient is finite.
    pub leaves: HashMap<u64, bool>,
    /// What was found in watched passes.
    pub watched: Watched,
}

/// What was found in the watched passes of a step.
#[derive(Debug, Clone, Default)]
pub struct Watched {
    /// The first anomaly of each pass.
    pub anomalies: Vec<Anomaly>,
    /// The operations that overflowed.
    pub overflows: Vec<Overflow>,
}

impl Watched {
    /// Adds what was found in another pass.
    pub fn extend(&mut self, other: Self) {
        self.anomalies.extend(other.anomalies);
        self.overflows.extend(other.overflows);
    }
}

impl Findings {
    /// How many gradients are not finite.
    pub(super) fn non_finite_gradients(&self) -> usize {
        let named = self.parameters.iter().map(|(_, finite)| finite);
        named
            .chain(self.leaves.values())
            .filter(|finite| !**finite)
            .count()
    }
}

impl Findings {
    /// Names the parameters that are a module's, and places the anomalies at them. `nodes` holds the module's nodes
    /// and paths, in module order.
    pub fn name(&mut self, nodes: &[(u64, String)]) {
        self.parameters.extend(named(&mut self.leaves, nodes));
        let anomalies = &mut self.watched.anomalies;
        anomalies.iter_mut().for_each(|a| a.place(nodes));
    }
}

/// Takes a module's parameters out of `leaves`: the path of each, and whether its gradient is finite.
pub(super) fn named(
    leaves: &mut HashMap<u64, bool>,
    nodes: &[(u64, String)],
) -> Vec<(String, bool)> {
    let of = |(node, path): &(u64, String)| Some((path.clone(), leaves.remove(node)?));
    nodes.iter().filter_map(of).collect()
}

impl LastStep {
    pub(super) fn of(scale: f32, outcome: StepOutcome, findings: &Findings) -> Self {
        let mut step = LastStep {
            scale,
            outcome,
            non_finite_gradients: findings.non_finite_gradients(),
            parameters: Vec::new(),
            last_finite: None,
            anomalies: findings.watched.anomalies.clone(),
        };
        step.name(&findings.parameters);
        step
    }

    /// Whether the optimizer's step was taken.
    pub fn stepped(&self) -> bool {
        self.outcome == StepOutcome::Finite
    }

    /// The first parameters with non-finite gradients, and how many more there are. Empty if none is
    /// known.
    pub(crate) fn listed(&self) -> String {
        const LISTED: usize = 8;
        let first = &self.parameters[..self.parameters.len().min(LISTED)];
        match self.parameters.len() - first.len() {
            0 => first.join(", "),
            more => format!("{} and {more} more", first.join(", ")),
        }
    }

    /// Names the parameters of a module, given in module order, each with whether its gradient is finite. They
    /// follow those of the modules before.
    pub(super) fn name(&mut self, parameters: &[(String, bool)]) {
        let backward = || parameters.iter().rev();
        let is_first = self.parameters.is_empty();
        let bad = backward().filter(|(_, finite)| !finite);
        self.parameters.extend(bad.map(|(path, _)| path.clone()));
        if is_first && !self.parameters.is_empty() {
            let before = backward().take_while(|(_, finite)| *finite).last();
            self.last_finite = before.map(|(path, _)| path.clone());
        }
    }
}

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
