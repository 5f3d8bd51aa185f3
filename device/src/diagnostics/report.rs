//! The report of mixed precision on a device, to print or to store.

use std::collections::BTreeMap;
use std::fmt;

use burn_amp_core::{Casts, Chosen, Exception, Precision, report_lines};
use burn_backend::Backend;
use serde::{Deserialize, Serialize};

use crate::device::{self, DeviceState, OpCasts};

/// A snapshot of a device's precision, casts and trials: see [`of_device`](Self::of_device). `Display` prints a short
/// table; serde keeps every field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AmpReport {
    /// The backend and its device.
    pub device: String,
    /// The precision in force, never `Auto`.
    pub precision: Precision,
    /// Why this precision is in force.
    pub reason: String,
    /// Operations that this device computes in another precision than the policy's table says, as trials found. Contains
    /// only operations that have run on the device so far. Empty where FP32 is in force.
    pub exceptions: Vec<Exception>,
    /// The casts that the policy made since the device was configured, by operation.
    pub casts: BTreeMap<String, OpCasts>,
}

/// How many operations the text shows.
const SHOWN: usize = 8;

impl AmpReport {
    /// The report of a device of `B`, the backend inside [`Amp<B>`](crate::Amp).
    #[doc(hidden)]
    pub fn of<B: Backend>(device: &B::Device) -> Self {
        let in_force = DeviceState::of::<B>(device).in_force::<B>(device);
        Self::in_force::<B>(device, in_force)
    }

    /// The report of a device, or of a session on the device with its own precision.
    pub(crate) fn in_force<B: Backend>(device: &B::Device, in_force: Chosen) -> Self {
        let state = DeviceState::of::<B>(device);
        let statistics = state.statistics();
        let casts = statistics.by_op().into_iter();
        Self {
            device: device::name::<B>(device),
            precision: in_force.precision,
            reason: in_force.why.into(),
            exceptions: state.exceptions().in_force(in_force.precision),
            casts: casts.map(|(op, casts)| (op.into(), casts)).collect(),
        }
    }

    /// The casts of all operations together.
    pub fn all_casts(&self) -> OpCasts {
        let mut all = OpCasts::default();
        for casts in self.casts.values() {
            all.to_half += casts.to_half;
            all.from_half += casts.from_half;
        }
        all
    }
}

impl fmt::Display for AmpReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = self.precision;
        writeln!(f, "device      {}", self.device)?;
        writeln!(f, "precision   {precision}: {}", self.reason)?;
        f.write_str(&report_lines(precision, &self.exceptions))?;
        let all = self.all_casts();
        let (to, from) = (all.to_half, all.from_half);
        write!(
            f,
            "casts       {to} to f16 or bf16, {from} to FP32 or wider"
        )?;
        let mut by_op: Vec<_> = self
            .casts
            .iter()
            .map(|(op, casts)| (op, made(casts)))
            .collect();
        by_op.retain(|(_, made)| made.count > 0);
        by_op.sort_by_key(|(_, made)| std::cmp::Reverse(made.bytes));
        for (op, made) in by_op.iter().take(SHOWN) {
            write!(f, "\n            {op} {made}")?;
        }
        if by_op.len() > SHOWN {
            write!(
                f,
                "\n            and {} operations more",
                by_op.len() - SHOWN
            )?;
        }
        Ok(())
    }
}

fn made(casts: &OpCasts) -> Casts {
    let mut made = casts.to_half;
    made += casts.from_half;
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXCEPTIONS: &str = r#"[
        {"op": "conv2d", "calls": "usual", "half": "f16", "precision": "f32", "reason": "tried"},
        {"op": "tanh", "calls": "usual", "half": "f16", "precision": "f32", "reason": "tried"},
        {"op": "sqrt", "calls": "usual", "half": "f16", "precision": "half", "reason": "tried"}
    ]"#;

    fn report() -> AmpReport {
        let casts = |count, bytes| Casts { count, bytes };
        let linear = OpCasts {
            to_half: casts(1_200, 1_536),
            ..OpCasts::default()
        };
        let exp = OpCasts {
            from_half: casts(2, 600),
            ..OpCasts::default()
        };
        AmpReport {
            device: "flex on Cpu".into(),
            precision: Precision::F16,
            reason: "asked for".into(),
            exceptions: serde_json::from_str(EXCEPTIONS).unwrap(),
            casts: [("linear".into(), linear), ("float_exp".into(), exp)].into(),
        }
    }

    #[test]
    fn a_report_prints_what_is_done_and_why() {
        let expected = "\
device      flex on Cpu
precision   f16: asked for
FP32 here   conv2d, tanh: computed in FP32, then rounded to f16
half here   sqrt: as exact in f16 as in FP32, so without casts
casts       1,200 (1.5 KiB) to f16 or bf16, 2 (600 B) to FP32 or wider
            linear 1,200 (1.5 KiB)
            float_exp 2 (600 B)";
        assert_eq!(report().to_string(), expected);
    }

    #[test]
    fn serde_keeps_a_report() {
        let json = serde_json::to_string(&report()).unwrap();
        assert_eq!(serde_json::from_str::<AmpReport>(&json).unwrap(), report());
    }
}
