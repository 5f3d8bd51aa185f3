//! What the figures have to be at most, or at least.

use serde_json::Value;

/// A figure of a row, found by what the row says of itself.
struct Bound {
    bench: &'static str,
    model: &'static str,
    precision: Option<&'static str>,
    figure: &'static str,
    limit: Limit,
}

#[derive(Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

const fn kept(model: &'static str, precision: &'static str, at_most: f64) -> Bound {
    Bound {
        bench: "memory",
        model,
        precision: Some(precision),
        figure: "ratio",
        limit: Limit::AtMost(at_most),
    }
}

const fn convergence(precision: &'static str, figure: &'static str, at_most: f64) -> Bound {
    Bound {
        bench: "convergence",
        model: "characters",
        precision: Some(precision),
        figure,
        limit: Limit::AtMost(at_most),
    }
}

const fn on_libtorch(
    bench: &'static str,
    model: &'static str,
    figure: &'static str,
    limit: Limit,
) -> Bound {
    Bound {
        bench,
        model,
        precision: Some("bf16"),
        figure,
        limit,
    }
}

/// How often a step casts in bf16 on LibTorch. PyTorch's autocast: 160, 19, 31 and 399.
const fn casts(model: &'static str, at_most: f64) -> Bound {
    on_libtorch("casts", model, "casts", Limit::AtMost(at_most))
}

/// The kernels of a step in bf16 on LibTorch, as a share of those in FP32.
const fn kernels(model: &'static str, at_most: f64) -> Bound {
    on_libtorch("casts", model, "launch_ratio", Limit::AtMost(at_most))
}

/// How many times as fast a step is in bf16 as in FP32, on LibTorch.
const fn speedup(model: &'static str, at_least: f64) -> Bound {
    on_libtorch("speed", model, "speedup", Limit::AtLeast(at_least))
}

const BOUNDS: &[Bound] = &[
    Bound {
        bench: "overhead",
        model: "small_ops",
        precision: None,
        // Nanoseconds: a ratio on small operations says little about a GPU.
        figure: "recorded_ns_per_op",
        limit: Limit::AtMost(40.0),
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
    casts("transformer", 160.0),
    casts("cnn", 60.0),
    casts("mlp", 31.0),
    casts("lstm", 800.0),
    kernels("transformer", 0.95),
    kernels("cnn", 1.05),
    kernels("mlp", 1.2),
    kernels("lstm", 1.1),
    speedup("transformer", 1.5),
    speedup("cnn", 1.45),
    speedup("mlp", 2.2),
    speedup("lstm", 1.0),
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
        .filter(|(bound, figure)| !bound.limit.holds(*figure));
    (
        measured.len(),
        missed
            .map(|(bound, figure)| bound.missed(*figure))
            .collect(),
    )
}

impl Limit {
    fn holds(self, figure: f64) -> bool {
        match self {
            Self::AtMost(limit) => figure <= limit,
            Self::AtLeast(limit) => figure >= limit,
        }
    }
}

impl Bound {
    fn figure(&self, report: &Value) -> Option<f64> {
        let rows = report.get(self.bench)?.as_array()?;
        // Those of speed and of casts are LibTorch's.
        let is_bound = |backend: &Value| backend.as_str().is_none_or(|b| b == "libtorch<cpu>");
        let row = rows.iter().find(|row| {
            row["model"] == self.model
                && self.precision.is_none_or(|p| row["precision"] == p)
                && is_bound(&row["backend"])
                && row["emulated"] != true
        })?;
        Some(row[self.figure].as_f64().unwrap_or(f64::NAN))
    }

    fn missed(&self, figure: f64) -> String {
        let precision = self
            .precision
            .map(|p| format!(" in {p}"))
            .unwrap_or_default();
        let limit = match self.limit {
            Limit::AtMost(limit) => format!("above {limit}"),
            Limit::AtLeast(limit) => format!("below {limit}"),
        };
        format!(
            "{}: {} of {}{precision} is {figure}, {limit}",
            self.bench, self.figure, self.model
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
    fn speed_is_bounded_from_below_and_on_libtorch_alone() {
        let report = |backend: &str| {
            json!({"speed": [
                {"backend": backend, "model": "lstm", "precision": "burn", "speedup": 1.0},
                {"backend": backend, "model": "lstm", "precision": "bf16", "speedup": 0.9},
            ]})
        };
        assert_eq!(check(&report("flex")), (0, vec![]));
        let (measured, missed) = check(&report("libtorch<cpu>"));
        assert_eq!(measured, 1);
        assert_eq!(missed, ["speed: speedup of lstm in bf16 is 0.9, below 1"]);
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
