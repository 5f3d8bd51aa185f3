//! The result of a step, and the findings of its passes. Independent of tensors.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Anomaly, StepOutcome};

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastStep {
    /// The scale that the loss was multiplied by.
    pub scale: f32,
    /// How the step ended.
    pub outcome: StepOutcome,
    /// How many parameters had a non-finite gradient; 0 if only another replica had one.
    pub non_finite_gradients: usize,
    /// The paths of these parameters in their module, for example `encoder.layers.2.weight`, in
    /// reverse module order. This is the order of the backward pass if the module declares its
    /// parts in order of use. The explicit protocol, a trainer and a `Learner` with `.with_amp()` fill in the
    /// paths; otherwise `GradScaler::explain` finds them. Of several modules, each has its own paths, in the
    /// order in which they were given. Burn's `ExecutionStrategy::MultiDevice` trains copies, which have no paths.
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
    /// The anomalies that were found, if anomaly detection is on.
    pub anomalies: Vec<Anomaly>,
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

impl LastStep {
    pub(super) fn of(scale: f32, outcome: StepOutcome, findings: &Findings) -> Self {
        let mut step = LastStep {
            scale,
            outcome,
            non_finite_gradients: findings.non_finite_gradients(),
            parameters: Vec::new(),
            last_finite: None,
            anomalies: findings.anomalies.clone(),
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
