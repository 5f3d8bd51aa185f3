//! What the figures have to be at most.

use serde_json::Value;

/// A figure of a row, found by what the row says of itself.
struct Bound {
    bench: &'static str,
    model: &'static str,
    precision: Option<&'static str>,
    figure: &'static str,
    at_most: f64,
}

const fn kept(model: &'static str, precision: &'static str, at_most: f64) -> Bound {
    Bound {
        bench: "memory",
        model,
        precision: Some(precision),
        figure: "ratio",
        at_most,
    }
}

const fn convergence(precision: &'static str, figure: &'static str, at_most: f64) -> Bound {
    Bound {
        bench: "convergence",
        model: "characters",
        precision: Some(precision),
        figure,
        at_most,
    }
}

const BOUNDS: [Bound; 11] = [
    Bound {
        bench: "overhead",
        model: "small_ops",
        precision: None,
        // Nanoseconds: a ratio on small operations says little about a GPU.
        figure: "recorded_ns_per_op",
        at_most: 40.0,
    },
    kept("transformer", "f16", 0.38),
    kept("transformer", "bf16", 0.38),
    kept("cnn", "f16", 0.42),
    kept("cnn", "bf16", 0.42),
    kept("mlp", "f16", 0.22),
    kept("mlp", "bf16", 0.22),
    kept("lstm", "f16", 0.54),
    kept("lstm", "bf16", 0.54),
    // Otherwise the two frameworks do not train the same model.
    convergence("PyTorch fp32", "first_difference", 1e-4),
    convergence("PyTorch bf16", "distance_ratio", 1.1),
];

/// The bounds that a report has figures for: how many there are, and which are missed, in words.
pub fn check(report: &Value) -> (usize, Vec<String>) {
    let measured: Vec<_> = BOUNDS
        .iter()
        .filter_map(|b| Some((b, b.figure(report)?)))
        .collect();
    // A figure that is not a number is within no bound.
    let missed = measured
        .iter()
        .filter(|(bound, figure)| figure.is_nan() || *figure > bound.at_most);
    (
        measured.len(),
        missed
            .map(|(bound, figure)| bound.missed(*figure))
            .collect(),
    )
}

impl Bound {
    fn figure(&self, report: &Value) -> Option<f64> {
        let rows = report.get(self.bench)?.as_array()?;
        let row = rows.iter().find(|row| {
            row["model"] == self.model && self.precision.is_none_or(|p| row["precision"] == p)
        })?;
        Some(row[self.figure].as_f64().unwrap_or(f64::NAN))
    }

    fn missed(&self, figure: f64) -> String {
        let precision = self
            .precision
            .map(|p| format!(" in {p}"))
            .unwrap_or_default();
        format!(
            "{}: {} of {}{precision} is {figure}, above {}",
            self.bench, self.figure, self.model, self.at_most
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_not_measured_misses_nothing() {
        assert_eq!(check(&json!({})), (0, vec![]));
        assert_eq!(check(&json!({"speed": []})), (0, vec![]));
    }

    #[test]
    fn a_bound_is_met_by_its_own_value() {
        let report = json!({
            "memory": [{"model": "cnn", "precision": "burn", "ratio": 1.0},
                       {"model": "cnn", "precision": "f16", "ratio": 0.42}],
            "overhead": [{"model": "small_ops", "recorded_ns_per_op": 40.0}],
        });
        assert_eq!(check(&report), (2, vec![]));
    }

    #[test]
    fn a_bound_that_is_missed_is_named() {
        let report = json!({
            "memory": [{"model": "transformer", "precision": "bf16", "ratio": 0.3801}],
            "overhead": [{"model": "small_ops", "recorded_ns_per_op": null}],
        });
        let (measured, missed) = check(&report);
        assert_eq!(measured, 2);
        assert_eq!(
            missed,
            [
                "overhead: recorded_ns_per_op of small_ops is NaN, above 40",
                "memory: ratio of transformer in bf16 is 0.3801, above 0.38",
            ]
        );
    }
}
