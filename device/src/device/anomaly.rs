//! The first operations of a step with a non-finite result, if anomaly detection is on.

use std::sync::{Mutex, PoisonError};

use burn_amp_core::{Anomaly, AnomalyPass};

/// The anomalies of a device, from any thread.
#[derive(Debug, Default)]
pub(crate) struct Anomalies(Mutex<Found>);

#[derive(Debug, Default)]
struct Found {
    /// The pass of the last operation, and whether an anomaly of it is in the log.
    pass: Option<(AnomalyPass, bool)>,
    /// The first anomaly of each pass, until [`Anomalies::take`].
    untaken: Vec<Anomaly>,
}

impl Anomalies {
    /// Whether the pass has no anomaly yet. Called for each operation, in order.
    pub(crate) fn is_first(&self, pass: AnomalyPass) -> bool {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match found.pass {
            Some((last, known)) => last == pass && known,
            None => false,
        };
        found.pass = Some((pass, known));
        !known
    }

    /// Adds the first anomaly of a pass, and logs it: for a client on another machine, the server's log is
    /// the only way to it.
    pub(crate) fn add(&self, anomaly: Anomaly) {
        log::warn!("burn-amp-device: the first non-finite result of a pass: {anomaly}");
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.pass = Some((anomaly.pass, true));
        if !found.untaken.iter().any(|known| known.pass == anomaly.pass) {
            found.untaken.push(anomaly);
        }
    }

    /// The anomalies of the step that ends.
    pub(crate) fn take(&self) -> Vec<Anomaly> {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *found).untaken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_each_pass_is_kept_until_the_step_ends() {
        let anomalies = Anomalies::default();
        let of = |op: &str, pass| Anomaly {
            op: op.into(),
            pass,
            dtype: "F16".into(),
            shape: vec![1],
            largest_operand: 1.0,
            step: None,
            parameter: None,
            leaf: None,
        };
        use AnomalyPass::{Backward, Forward};
        assert!(anomalies.is_first(Forward));
        anomalies.add(of("exp", Forward));
        assert!(!anomalies.is_first(Forward));
        assert!(anomalies.is_first(Backward));
        anomalies.add(of("matmul", Backward));
        // A server's client never calls `take`: the next step is logged, too.
        assert!(anomalies.is_first(Forward));
        anomalies.add(of("log", Forward));
        let taken = anomalies.take();
        let ops: Vec<_> = taken.iter().map(|anomaly| anomaly.op.as_str()).collect();
        assert_eq!(ops, ["exp", "matmul"]);
        assert!(anomalies.is_first(Backward) && anomalies.take().is_empty());
    }
}
