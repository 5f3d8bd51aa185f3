//! The op policy: one table, and one pure function, [`decide`], that determines what happens to
//! an operation. Depends on dtypes, but not on tensors, devices or backends.
//!
//! To change an operation's precision, change its line in `table.rs`. The choice between FP32 and half follows
//! the lists of PyTorch's autocast for CUDA (`aten/src/ATen/autocast_mode.h`); the op reference in the guide
//! of burn-amp compares the two.
//!
//! # Decisions from measurements
//!
//! Each figure is the memory kept for the backward pass, as a share of Burn's in FP32, measured by
//! `cargo xtask bench memory`:
//!
//! - **Small operands beside a half tensor**, such as the statistics of a composed norm, promote it to FP32:
//!   rounding the result would cost a network its accuracy. The backward pass still keeps half. The result is
//!   flagged as FP32 that [fits in half](TensorFlags::FITS), arithmetic keeps half copies of it, and the next
//!   activation or contraction casts it back to half. A CNN with batch norm keeps 0.30 instead of 0.91,
//!   and 0.40 if a quotient keeps its dividend instead of its result. An operand is small if autodiff tracks
//!   it (a statistic or a parameter), no FP32 data is in it, and the other operand has 16 times its elements. Any
//!   other operand that was never half, such as an additive mask, makes the result FP32 permanently. A product of two large
//!   operands is also FP32 permanently, because its values may be of any size.
//! - **Constants** in FP32 (a value from -1 to 1 that both half dtypes hold exactly) follow a half tensor in products and
//!   concatenations instead of promoting it. They do not follow in a sum, where an accumulator would stop at 2,048. Zeros and
//!   ones do not follow in a product: a recurrence, or a product of unknown length, may begin with them.
//! - **The state of a recurrence** that begins with FP32 zeros is FP32, and kept in half for the backward pass: no later
//!   state depends on this rounding.
//! - **Softmax, layer norm, dropout, relu, sigmoid and tanh** are recorded with backward formulas of
//!   their own. These keep one tensor instead of three, in half if the operand was half. Dropout
//!   keeps its noise as bytes; relu, sigmoid and tanh keep their result, which the next operation
//!   keeps anyway. A transformer keeps 0.36 instead of 0.68, an MLP 0.20 instead of 0.45.
//! - FP32 that was never half keeps FP32 copies: the gradient of an operation that the policy does
//!   not demote equals Burn's gradient, up to FP32 rounding.

mod casts;
mod changes;
mod convolution;
mod decision;
mod flags;
mod known;
mod op;
mod table;
pub mod trials;
mod unrounded;
mod values;

use std::fmt;

use serde::Serialize;

pub use crate::dtype::{
    follows_half, holds, holds_exactly, is_half, largest_within, nearest, widest,
};
pub use casts::{HalfSupport, Mode, Support};
pub use changes::{OpPrecision, OpPrecisions};
pub(crate) use changes::{allowed, operations};
#[doc(hidden)]
pub use changes::{forward_of, short};
pub use convolution::Convolution;
pub use decision::{Decision, Layer, Operand, Site, decide, fp32_alone};
pub use flags::TensorFlags;
pub use known::Known;
pub(crate) use known::{Half, Tried, bits, half_of};
pub use op::Op;
pub(crate) use table::OPS;
#[doc(hidden)]
pub use unrounded::{Function, Functions, Step, Unrounded, are_sigmoids};
pub use values::{SMALL, TERMS};

/// How an operation treats its F32, F16 and BF16 operands.
///
/// An operation with an F64 operand is left alone, except that mixed operands are cast to F64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Class {
    /// Operands are cast to the compute dtype, which the result keeps: the work that AMP is for.
    LowerPrecision,
    /// Operands are cast to FP32 and the result is FP32: its range or sums exceed half precision.
    Fp32,
    /// Computed in FP32, then cast back to the operand's dtype: sensitive inside, but bounded by
    /// its input. Backward functions return the widest of their operands' dtypes.
    Fp32Inside,
    /// Operands of different dtypes are cast to the widest dtype, except that FP32 constants and
    /// gates follow a half tensor, but for those of a quotient, and for zeros and ones of a product. A gate is a sigmoid
    /// of FP32 that fits in half.
    Promote,
    /// As `Promote`, but constants and gates count as FP32: a sum that starts from FP32 zeros stays FP32.
    PromoteSum,
    /// Computed in the operand's dtype.
    Keep,
    /// As `Keep`, but an FP32 operand that fits in half, such as the result of a composed norm, is
    /// cast to half. The next layer would do the same.
    Activation,
    /// Moves or creates data and computes nothing.
    Move,
}

/// A case in which an operation has another class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Case {
    /// A scalar is outside the range of the half dtype that the operation takes or computes in: see
    /// [`holds`].
    UnheldScalar,
    /// The half dtype that the operation computes in does not hold a scalar exactly, a factor: in a loop, its error would
    /// add up. In bf16, a decay of 0.9 would be 0.898. The facts of the result stay those of the row's class.
    RoundedScalar,
    /// The half dtype that the operation takes or computes in does not hold a scalar exactly: the operation
    /// compares with the scalar, or its result may be the scalar. In bf16, 1 - 1e-6 would be 1. The user's own half
    /// tensors stay half, and a tensor [filled](TensorFlags::FILLED) with a rounded scalar is compared in half. So it is
    /// bounded, unless a bound lies between -1 and 1.
    InexactScalar,
    /// The device computes only contractions in half, and the operation is not a contraction.
    OnlyContracts,
    /// No autodiff lies below the operation: nothing sums its gradient.
    WithoutAutodiff,
    /// The operation adds to or multiplies the values that it writes over. Its caller sets this:
    /// [`Op::that_accumulates`].
    Accumulates,
    /// A product of FP32 matrices whose inner dimension is 1, as the angles of a rotary encoding are: nothing is
    /// summed, and each value would only be rounded.
    OneTerm,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnheldScalar => "when the half dtype does not hold the scalar",
            Self::RoundedScalar | Self::InexactScalar => {
                "when the half dtype does not hold the scalar exactly"
            }
            Self::OnlyContracts => "on a device that only contracts in half",
            Self::WithoutAutodiff => "without autodiff",
            Self::Accumulates => "where it accumulates",
            Self::OneTerm => "of FP32 with an inner dimension of 1",
        })
    }
}

/// What an operation is to autodiff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// One step of the tape. `Fp32Inside` restores the first operand's dtype. A step that a formula
    /// of the backward pass takes on a gradient returns the gradient's dtype.
    Forward,
    /// As `Forward`, but autodiff composes the operation from other operations. `Fp32Inside` is widened above
    /// autodiff, because the other operations would run in half.
    Composed,
    /// A function of the backward pass. `Fp32Inside` returns the widest dtype of its operands.
    Backward,
    /// As `Backward`, and the result is the gradient of a parameter, which an optimizer sums up and
    /// multiplies with small factors.
    ParameterGradient,
}

/// What an operation does to values, where the policy follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// None of these.
    Other,
    /// Adds or subtracts a scalar.
    Shifts,
    /// Multiplies by a scalar.
    Scales,
    /// Divides by a scalar.
    Divides,
    /// Multiplies by -1.
    Negates,
    /// Writes a scalar in places.
    Fills,
    /// Writes a tensor in places.
    Assigns,
    /// Takes the root.
    Roots,
    /// Is a sigmoid.
    IsSigmoid,
    /// Is a hyperbolic tangent.
    Saturates,
    /// Multiplies matrices.
    MultipliesMatrices,
    /// Reduces many values to one, over all dimensions or one of them.
    Reduces,
    /// Reduces the values over a dimension to the largest.
    FindsLargest,
    /// Compares values, or orders them.
    Ranks,
    /// Compares with a scalar, or rounds to an integer.
    Reads,
    /// Finds the largest values of windows.
    Pools,
    /// Multiplies two tensors.
    Multiplies,
    /// Adds two tensors.
    Adds,
    /// Gives the values another shape, in the same order.
    Reshapes,
    /// Swaps dimensions.
    Transposes,
}

/// Which results fit in half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fits {
    /// The result may be of any size.
    Never,
    /// The result fits if all operands fit.
    WithOperands,
    /// As `WithOperands`. The result also fits if one operand fits and the other is a statistic: a tracked
    /// operand with at most 1/16 as many elements. An untracked operand may have any value, such as a mask of
    /// -1e9 or a factor of 1e-8, and so may what was computed from it.
    Sum,
    /// Only the result of an operand that fits and a statistic, as in `Sum`: a product of two large operands
    /// may be of any size.
    Product,
    /// As `Product`, with the statistic as divisor: what is divided by a small number may be of any size.
    Quotient,
    /// As `WithOperands`, but only where autodiff runs elsewhere. Where autodiff runs here, a mean that is a
    /// statistic is tracked. In inference nothing is kept, so that half would save nothing.
    Mean,
}

/// One operation of the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The method of Burn's backend traits.
    pub op: &'static str,
    /// How the operation treats its operands.
    pub class: Class,
    /// The reason for the class.
    pub why: &'static str,
    /// The cases in which the operation has another class. The first that applies decides.
    pub otherwise: &'static [(Class, Case)],
    /// The form in which the policy itself records the operation for the backward pass.
    pub recorded: Option<&'static str>,
}

impl Row {
    /// Whether some calls of the operation are of this class.
    pub fn may_be(&self, class: Class) -> bool {
        self.class == class || self.otherwise.iter().any(|(other, _)| *other == class)
    }
}

/// The operations of a version of Burn, `"0.21"` or later, in the table's order. Includes a few operations of
/// 0.21 that 0.22 no longer has.
pub fn rows(burn: &str) -> impl Iterator<Item = Row> {
    operations(burn).map(Op::row)
}

/// The class of an operation.
///
/// # Panics
///
/// If `op` has no row.
pub const fn class(op: &str) -> Class {
    Op::named(op).class
}

/// Whether two names are equal, at compile time.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_operation_has_one_row_and_a_reason() {
        let mut seen = HashSet::new();
        for row in rows("0.23") {
            assert_eq!(class(row.op), row.class, "{} has two classes", row.op);
            assert!(seen.insert(row.op), "{} has two rows", row.op);
            assert!(!row.why.is_empty());
        }
    }

    #[test]
    fn a_reason_stands_once() {
        let mut seen = HashSet::new();
        for group in table::TABLE {
            assert!(seen.insert(group[0].why), "{} stands twice", group[0].why);
        }
    }

    #[test]
    fn an_operation_of_a_later_burn_is_not_among_those_of_an_earlier() {
        let of = |burn| rows(burn).map(|row| row.op).collect::<HashSet<_>>();
        let versions = ["0.21", "0.22", "0.23"].map(of);
        for (pair, added) in versions.windows(2).zip(["float_hypot", "float_fmod"]) {
            assert!(pair[0].is_subset(&pair[1]));
            assert!(!pair[0].contains(added) && pair[1].contains(added));
        }
    }
}
