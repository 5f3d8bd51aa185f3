//! The op policy: one table and one pure function that decide which precision each operation runs
//! in. Depends on dtypes, but not on tensors, devices or backends.
//!
//! To change an operation's precision, change its line in [`TABLE`], or in [`TABLE_0_22`] if Burn
//! 0.21 does not have it. The choice between FP32 and half follows the lists of PyTorch's autocast
//! for CUDA (`aten/src/ATen/autocast_mode.h`); the op reference in the guide of burn-amp compares
//! the two.
//!
//! # Decisions from measurements
//!
//! Each figure is the bytes kept for the backward pass, as a share of what Burn keeps in FP32,
//! measured by `cargo xtask bench memory`:
//!
//! - **Small operands beside a half tensor**, such as the statistics of a composed norm, promote it
//!   to FP32: rounding the result would cost a network its accuracy. The backward pass still keeps
//!   half. The result is flagged as FP32 that fits in half, arithmetic keeps half copies of it, and
//!   the next activation or contraction casts it back to half. A CNN with batch norm keeps 0.40
//!   instead of 0.91, and 0.30 since a quotient keeps its result instead of its dividend. An operand
//!   is small if autodiff tracks it (a statistic or a parameter) and the other operand has 16 times
//!   its elements. Any other operand that was never half, such as an additive mask, makes the result
//!   FP32 for good. So does a product of two large operands, because its values may be of any size.
//! - **Constants** in FP32 (zeros, ones or another value that fits in both half dtypes) follow a
//!   half tensor in products and concatenations instead of promoting it. An LSTM keeps 0.52 instead
//!   of 0.70: otherwise the initial state makes every later state FP32. Constants do not follow in
//!   a sum, where an accumulator would stop at 2,048.
//! - **Softmax, layer norm, dropout, relu, sigmoid and tanh** are recorded with backward formulas of
//!   their own. These keep one tensor instead of three, in half if the operand was half. Dropout
//!   keeps its noise as bytes; relu, sigmoid and tanh keep their result, which the next operation
//!   keeps anyway. A transformer keeps 0.36 instead of 0.68, an MLP 0.20 instead of 0.45, an LSTM
//!   0.32 instead of 0.50.
//! - FP32 that was never half keeps FP32 copies: the gradient of an operation that the policy does
//!   not demote equals Burn's gradient, up to FP32 rounding.

mod decision;
mod table;
mod table_0_22;
pub mod trials;

use serde::Serialize;

pub use decision::{HalfSupport, Mode, Operands, Plan, Support, holds, is_half, plan};
pub use table::TABLE;
pub use table_0_22::TABLE_0_22;

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
    /// Operands of different dtypes are cast to the widest dtype, except that FP32 constants follow
    /// a half tensor.
    Promote,
    /// As `Promote`, but constants count as FP32: a sum that starts from FP32 zeros stays FP32.
    PromoteSum,
    /// Computed in the operand's dtype.
    Keep,
    /// As `Keep`, but an FP32 operand that fits in half, such as the result of a composed norm, is
    /// cast to half. The next layer would do the same.
    Activation,
    /// Moves or creates data and computes nothing.
    Move,
}

/// Operations that share a class and the reason for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Rows {
    /// How the operations treat their operands.
    pub class: Class,
    /// The reason for the class.
    pub why: &'static str,
    /// The case in which the operations have another class: the class and when it applies.
    pub otherwise: Option<(Class, &'static str)>,
    /// The form in which the policy itself records the operations for the backward pass. Without
    /// this text, an operation is recorded as Burn records it.
    pub recorded: Option<&'static str>,
    /// The methods of Burn's backend traits.
    pub ops: &'static [&'static str],
}

impl Rows {
    const fn otherwise(mut self, class: Class, when: &'static str) -> Self {
        self.otherwise = Some((class, when));
        self
    }

    const fn recorded(mut self, form: &'static str) -> Self {
        self.recorded = Some(form);
        self
    }
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
    /// The case in which the operation has another class: the class and when it applies.
    pub otherwise: Option<(Class, &'static str)>,
    /// The form in which the policy itself records the operation for the backward pass.
    pub recorded: Option<&'static str>,
}

/// The operations of Burn 0.21, those of [`TABLE`], in the table's order.
pub fn rows() -> impl Iterator<Item = Row> {
    single(TABLE)
}

/// The operations of [`TABLE`], and then those that Burn 0.22 adds. A few of the former are no
/// longer in Burn 0.22.
pub fn rows_0_22() -> impl Iterator<Item = Row> {
    rows().chain(single(TABLE_0_22))
}

fn single(table: &'static [Rows]) -> impl Iterator<Item = Row> {
    table.iter().flat_map(|rows| {
        rows.ops.iter().map(|op| Row {
            op,
            class: rows.class,
            why: rows.why,
            otherwise: rows.otherwise,
            recorded: rows.recorded,
        })
    })
}

/// The class of an operation. The forwarding code evaluates it at compile time: an operation
/// without a row does not compile.
///
/// # Panics
///
/// If `op` has no row.
pub const fn class(op: &str) -> Class {
    rows_of(op).class
}

/// The class of an operation in the case that its row names.
///
/// # Panics
///
/// If `op` has no row, or its row does not name the case `when`.
pub const fn class_when(op: &str, when: &str) -> Class {
    match rows_of(op).otherwise {
        Some((class, case)) if same(case, when) => class,
        _ => panic!("this operation's row names no such case"),
    }
}

/// Whether the policy records an operation in a form of its own.
///
/// # Panics
///
/// If `op` has no row.
pub const fn is_recorded(op: &str) -> bool {
    rows_of(op).recorded.is_some()
}

const fn rows_of(op: &str) -> Rows {
    if let Some(rows) = found(TABLE, op) {
        return rows;
    }
    match found(TABLE_0_22, op) {
        Some(rows) => rows,
        None => panic!("this operation has no row in the policy table"),
    }
}

const fn found(table: &[Rows], op: &str) -> Option<Rows> {
    let mut i = 0;
    while i < table.len() {
        let mut j = 0;
        while j < table[i].ops.len() {
            if same(table[i].ops[j], op) {
                return Some(table[i]);
            }
            j += 1;
        }
        i += 1;
    }
    None
}

/// Whether two names are equal, at compile time.
pub const fn same(a: &str, b: &str) -> bool {
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
    use super::*;

    #[test]
    fn every_operation_has_one_row_and_a_reason() {
        let mut seen = std::collections::HashSet::new();
        for row in rows_0_22() {
            assert_eq!(class(row.op), row.class, "{} has two classes", row.op);
            assert!(seen.insert(row.op), "{} has two rows", row.op);
            assert!(!row.why.is_empty());
        }
    }

    #[test]
    fn a_reason_stands_once_for_a_class() {
        for table in [TABLE, TABLE_0_22] {
            let mut seen = std::collections::HashSet::new();
            for rows in table {
                let row = (rows.class, rows.why, rows.otherwise, rows.recorded);
                assert!(seen.insert(row), "{} stands twice", rows.why);
            }
        }
    }
}
