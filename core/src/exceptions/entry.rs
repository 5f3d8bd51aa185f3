//! One exception, and the words for it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{ALL, HALVES};
use crate::Precision;
use crate::policy::trials::Kind;
use crate::policy::{Convolution, OPS, OpPrecision, short};
use crate::verified::{Calls, State};
use crate::words::line;

/// Why an operation has another precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The configuration says so: `AmpConfig::with_op`.
    Configured,
    /// A trial showed whether the device is exact in the operation in half.
    Tried,
    /// Samples of the operation's result at these shapes were compared with sums on the host:
    /// `AmpConfig::with_verification`.
    Verified,
    /// The operation overflowed f16 at any loss scale, in a step that would have been skipped for ever:
    /// `AmpConfig::with_overflow_fallback`.
    Overflowed,
}

/// An operation that a device computes in another precision than the policy's table says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Exception {
    /// The operation's name, without `float_`.
    pub op: String,
    /// Which calls of the operation, such as convolutions in groups.
    pub calls: Kind,
    /// Which of these calls: those that sum so many products, or if the operation sums none, whose last dimension is
    /// this. The batch and the length of a sequence tell no calls apart. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// What was verified: the shapes of the float operands of the first of these calls. Calls whose sizes a device tells apart
    /// in no other way are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<Vec<usize>>,
    /// The options of a convolution that was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convolution: Option<Convolution>,
    /// The half precision in force; `None`: f16 and bf16.
    pub half: Option<Precision>,
    /// The precision that the operation computes in. What was tried and is FP32 returns half: operands and result
    /// are rounded, so that the values are those of a device that is exact.
    pub precision: OpPrecision,
    /// Why.
    pub reason: Reason,
}

impl Exception {
    /// What a configuration says of all calls of a kind.
    pub(super) fn of(place: usize, calls: Kind, precision: OpPrecision) -> Self {
        Self {
            op: short(OPS[place].name).into(),
            calls,
            length: None,
            shapes: Vec::new(),
            convolution: None,
            half: None,
            precision,
            reason: Reason::Configured,
        }
    }

    /// What a comparison showed of calls.
    pub(super) fn verified(calls: Calls, state: State) -> Self {
        let precision = match state {
            State::Wrong(_) => OpPrecision::F32,
            _ => OpPrecision::Half,
        };
        Self {
            shapes: calls.shapes,
            convolution: calls.convolution,
            half: Some(HALVES[calls.half as usize]),
            reason: Reason::Verified,
            ..Self::of(calls.place, calls.kind, precision)
        }
    }

    /// That calls of this length overflowed f16.
    pub(super) fn overflowed(place: usize, length: usize) -> Self {
        Self {
            length: (length != ALL).then_some(length),
            half: Some(Precision::F16),
            reason: Reason::Overflowed,
            ..Self::of(place, Kind::Usual, OpPrecision::F32)
        }
    }
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.op, self.calls)?;
        if let Some(length) = self.length {
            write!(f, " over {length}")?;
        }
        for (i, shape) in self.shapes.iter().enumerate() {
            let word = if i == 0 { "of" } else { "and" };
            write!(f, " {word} {shape:?}")?;
        }
        if let (Some(options), [first, ..]) = (&self.convolution, &self.shapes[..]) {
            let axes = first.len().saturating_sub(2).min(3);
            for option in options.unusual(axes) {
                write!(f, ", {option}")?;
            }
        }
        Ok(())
    }
}

/// The lines of a report about the exceptions where `half` is in force, each with its newline.
#[doc(hidden)]
pub fn report_lines(half: impl fmt::Display, exceptions: &[Exception]) -> String {
    use OpPrecision::{F32, Half};
    let of = |reason, precision: OpPrecision| -> Vec<String> {
        let of = |e: &&Exception| e.reason == reason && e.precision == precision;
        let text = |e: &Exception| match reason {
            Reason::Configured => format!("{e} in {precision}"),
            Reason::Tried | Reason::Verified | Reason::Overflowed => e.to_string(),
        };
        exceptions.iter().filter(of).map(text).collect()
    };
    let configured = [of(Reason::Configured, F32), of(Reason::Configured, Half)].concat();
    let rounded = format!("computed in FP32, then rounded to {half}");
    let without_casts = format!("as exact in {half} as in FP32, so without casts");
    let lines = [
        ("operations", configured, "changed by AmpConfig::with_op"),
        ("FP32 here", of(Reason::Tried, F32), rounded.as_str()),
        ("half here", of(Reason::Tried, Half), &without_casts),
        ("wrong here", of(Reason::Verified, F32), &rounded),
        (
            "overflowed",
            of(Reason::Overflowed, F32),
            "in FP32 now: no loss scale mends it",
        ),
    ];
    let lines = lines.map(|(label, ops, why)| line(label, &ops, "exceptions", why));
    lines.concat()
}
