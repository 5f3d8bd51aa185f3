//! Parses and checks the precisions that a configuration gives to single operations, by name.

use crate::error::AmpError;
use crate::policy::{Op, OpPrecision, OpPrecisions, allowed, operations, short};

impl OpPrecisions {
    /// Adds a change of one operation. `burn` is the version of Burn, such as `"0.21"`. `op` is the name of
    /// the backend's method, with or without `float_`. A second change of the same operation replaces the
    /// first.
    ///
    /// # Errors
    ///
    /// - [`AmpError::UnknownOperation`] if this Burn has no such operation,
    /// - [`AmpError::OperationPrecision`] if the operation cannot have the precision.
    pub fn with(mut self, burn: &str, op: &str, precision: OpPrecision) -> Result<Self, AmpError> {
        let op = known(burn, op)?;
        checked(op, precision.to_string(), Some(precision))?;
        self.set(op, precision);
        Ok(self)
    }

    /// Reads changes in the form that serde writes: operation names with precisions.
    ///
    /// # Errors
    ///
    /// As [`with`](OpPrecisions::with).
    pub fn parsed<O: AsRef<str>, P: AsRef<str>>(
        burn: &str,
        named: impl IntoIterator<Item = (O, P)>,
    ) -> Result<Self, AmpError> {
        let mut all = Self::default();
        for (op, given) in named {
            let op = known(burn, op.as_ref())?;
            let given = given.as_ref();
            let precision = checked(op, given.into(), OpPrecision::named(given))?;
            all.set(op, precision);
        }
        Ok(all)
    }
}

/// Returns the precision if the operation can have it.
fn checked(
    op: &Op,
    given: String,
    precision: Option<OpPrecision>,
) -> Result<OpPrecision, AmpError> {
    let (allowed, why) = allowed(op);
    precision
        .filter(|precision| allowed.contains(precision))
        .ok_or_else(|| {
            let names: Vec<_> = allowed.iter().map(OpPrecision::to_string).collect();
            AmpError::OperationPrecision {
                op: short(op.name).into(),
                given,
                expected: if names.is_empty() {
                    "none".into()
                } else {
                    names.join(" or ")
                },
                why,
            }
        })
}

fn known(burn: &str, given: &str) -> Result<&'static Op, AmpError> {
    let name = given.trim();
    let found = operations(burn).find(|op| op.name == name || short(op.name) == name);
    found.ok_or_else(|| AmpError::UnknownOperation {
        given: given.into(),
        near: near(burn, name),
    })
}

/// The operations with the names most similar to `name`, as text for an error.
fn near(burn: &str, name: &str) -> String {
    let name = name.to_ascii_lowercase();
    let names = operations(burn).map(|op| short(op.name));
    let distances = names.map(|op| (distance(&name, op), op));
    let mut near: Vec<_> = distances
        .filter(|(distance, op)| {
            *distance * 3 <= op.len() || !name.is_empty() && op.contains(&name)
        })
        .collect();
    near.sort_by_key(|(distance, _)| *distance);
    let near: Vec<_> = near.into_iter().take(NEAR).map(|(_, op)| op).collect();
    match near.as_slice() {
        [] => String::new(),
        _ => format!(", such as {}", near.join(", ")),
    }
}

/// How many names an error lists.
const NEAR: usize = 5;

/// The number of letters inserted, deleted or replaced between two words (Levenshtein distance).
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::policy::{Class, rows};
    use OpPrecision::{F32, Half};

    #[test]
    fn a_name_has_one_operation_with_and_without_its_prefix() {
        let mut names = HashSet::new();
        for row in rows("0.23") {
            for name in HashSet::from([row.op, short(row.op)]) {
                assert!(names.insert(name), "{name} is two operations");
            }
        }
    }

    #[test]
    fn an_operation_of_the_table_can_have_what_its_row_allows() {
        for row in rows("0.23") {
            let with = |precision| OpPrecisions::default().with("0.23", row.op, precision);
            let changed = |precision| with(precision).ok().map(|all| all.iter().next());
            let name = short(row.op);
            let expected = match row.class {
                _ if row.op.ends_with("_backward") => [None, None],
                _ if ["quantize", "quantize_dynamic", "q_matmul"].contains(&row.op) => {
                    [None, Some(None)]
                }
                _ if row.may_be(Class::Move) => [None, None],
                Class::LowerPrecision => [Some(None), Some(Some((name, F32)))],
                Class::Fp32 => [Some(Some((name, Half))), Some(None)],
                Class::Keep => [None, Some(Some((name, F32)))],
                _ => [Some(Some((name, Half))), Some(Some((name, F32)))],
            };
            assert_eq!([Half, F32].map(changed), expected, "{}", row.op);
        }
    }

    #[test]
    fn the_last_change_of_an_operation_holds_and_the_tables_own_takes_it_back() {
        let with = |all: OpPrecisions, op, precision| all.with("0.21", op, precision).unwrap();
        let none = OpPrecisions::default();
        let both = with(with(none, "softmax", Half), "float_matmul", F32);
        let listed: Vec<_> = both.iter().collect();
        assert_eq!(listed, [("matmul", F32), ("softmax", Half)]);
        assert_eq!(both.of(&Op::named("softmax")), Some(Half));
        assert_eq!(both.of(&Op::named("float_exp")), None);
        let custom = Op::custom("softmax", Class::Fp32, crate::policy::Role::Forward);
        assert_eq!(both.of(&custom), None);
        let back = with(with(both, "softmax", F32), "matmul", Half);
        assert_eq!(back, none);
        let relu = with(with(none, "relu", F32), "relu", Half);
        assert_eq!(relu.iter().collect::<Vec<_>>(), [("relu", Half)]);
    }

    #[test]
    fn what_serde_writes_is_read_again() {
        let named = [("exp", "half"), ("float_log", "Half"), ("conv2d", " fp32 ")];
        let all = OpPrecisions::parsed("0.21", named).unwrap();
        let json = serde_json::to_string(&all).unwrap();
        assert_eq!(json, r#"{"conv2d":"f32","exp":"half","log":"half"}"#);
        let map: std::collections::BTreeMap<String, String> = serde_json::from_str(&json).unwrap();
        assert_eq!(OpPrecisions::parsed("0.21", map), Ok(all));
    }

    #[test]
    fn a_version_of_burn_has_its_own_operations() {
        let hypot = |burn| OpPrecisions::default().with(burn, "hypot", Half);
        assert!(hypot("0.21").is_err());
        assert!(hypot("0.22").is_ok());
    }

    #[test]
    fn letters_between_words() {
        for (one, other, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("sofmax", "softmax", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(one, other), expected);
            assert_eq!(distance(other, one), expected);
        }
    }
}
