//! Operations whose precision a configuration changes. Depends only on the table.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

use super::table::OPS;
use super::{Class, Op};

/// The precision that a configuration gives an operation, instead of the table's precision.
///
/// serde writes the name that `Display` gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OpPrecision {
    /// The half dtype in force. FP32 operands are rounded to half, and the result is half.
    ///
    /// An operation that the table computes in FP32, such as `softmax`, still computes in FP32 inside, and
    /// its result is rounded once, as on a device that accumulates in FP32. Its gradient has the dtype of the
    /// operand. Arithmetic rounds an FP32 operand to half if the other operand is half. Two FP32 operands
    /// stay FP32, so that an optimizer keeps FP32 parameters.
    Half,
    /// FP32, in both passes. Half operands are cast to FP32, and the result is FP32.
    F32,
}

impl OpPrecision {
    /// Every name that parses, with its precision.
    const NAMES: [(&'static str, Self); 4] = [
        ("half", Self::Half),
        ("f32", Self::F32),
        ("fp32", Self::F32),
        ("float32", Self::F32),
    ];

    /// The precision of this name; case and surrounding spaces do not matter.
    pub(crate) fn named(given: &str) -> Option<Self> {
        let given = given.trim().to_ascii_lowercase();
        let found = Self::NAMES.iter().find(|(name, _)| *name == given);
        found.map(|(_, precision)| *precision)
    }
}

impl fmt::Display for OpPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Half => "half",
            Self::F32 => "f32",
        })
    }
}

/// The operations whose precision a configuration changes. An operation that gets the table's own
/// precision is not among them.
///
/// serde writes a map from names to precisions. To read one, see
/// [`parsed`](OpPrecisions::parsed).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpPrecisions {
    half: Places,
    f32: Places,
}

/// A set of operations, as one bit for each place in the table.
type Places = [u64; OPS.len().div_ceil(64)];

/// The index of the word that has the bit of a place, and that bit.
fn bit(place: u16) -> (usize, u64) {
    (usize::from(place / 64), 1 << (place % 64))
}

impl OpPrecisions {
    /// The precision of an operation, if it is changed.
    #[inline]
    pub fn of(&self, op: &Op) -> Option<OpPrecision> {
        let (word, bit) = bit(op.place?);
        match (self.half[word] & bit != 0, self.f32[word] & bit != 0) {
            (true, _) => Some(OpPrecision::Half),
            (_, true) => Some(OpPrecision::F32),
            _ => None,
        }
    }

    /// The names of the changed operations in the table's order, each with its precision.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, OpPrecision)> {
        OPS.iter()
            .filter_map(|op| Some((short(op.name), self.of(op)?)))
    }

    /// Gives an operation of the table a precision that it allows. The table's own precision undoes a change.
    pub(crate) fn set(&mut self, op: &Op, precision: OpPrecision) {
        let place = op.place.expect("an operation of the table");
        let (word, bit) = bit(place);
        self.half[word] &= !bit;
        self.f32[word] &= !bit;
        match (precision, op.class) {
            (OpPrecision::Half, Class::LowerPrecision) | (OpPrecision::F32, Class::Fp32) => {}
            (OpPrecision::Half, _) => self.half[word] |= bit,
            (OpPrecision::F32, _) => self.f32[word] |= bit,
        }
    }
}

impl Serialize for OpPrecisions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Collected first: formats without field names need the map's length.
        let all: Vec<_> = self.iter().map(|(op, of)| (op, of.to_string())).collect();
        serializer.collect_map(all)
    }
}

/// An operation's name as users write it: `exp` for `float_exp`.
#[doc(hidden)]
pub fn short(op: &str) -> &str {
    op.strip_prefix("float_").unwrap_or(op)
}

/// The operations of a version of Burn.
pub(crate) fn operations(burn: &str) -> impl Iterator<Item = &'static Op> {
    OPS.iter().filter(move |op| op.since <= burn)
}

/// The precisions that a configuration may give an operation, and why other precisions are refused.
pub(crate) fn allowed(op: &Op) -> (&'static [OpPrecision], String) {
    use OpPrecision::{F32, Half};
    if let Some(forward) = forward_of(op.name) {
        let follows = "the backward pass follows the forward pass";
        let is_changed = |op: &Op| short(op.name) == forward && !allowed(op).0.is_empty();
        let why = if OPS.iter().any(is_changed) {
            format!("{follows}: set {forward} instead")
        } else {
            follows.into()
        };
        return (&[], why);
    }
    if op.row().may_be(Class::Move) {
        return (
            &[],
            "the operation moves or creates data and computes nothing".into(),
        );
    }
    match op.class {
        Class::Keep => {
            let why = "the operation computes in its operand's dtype, which may already be half";
            (&[F32], why.into())
        }
        _ if op.is_fixed => (&[F32], op.why.into()),
        _ => (&[Half, F32], String::new()),
    }
}

/// The operation of the forward pass whose gradient `op` computes, as users write it.
#[doc(hidden)]
pub fn forward_of(op: &str) -> Option<&str> {
    let op = op.strip_suffix("_backward")?;
    let of = ["_x", "_weight", "_bias"];
    let forward = of.iter().find_map(|of| op.strip_suffix(of));
    Some(short(forward.unwrap_or(op)))
}
