//! An operation as input of the decision: a row of the table, looked up at compile time.

use super::table::{place_of, rows_of};
use super::trials::{Kind, TriedOp};
use super::{Case, Class, Fits, Role, Rows};

/// An operation's name and row.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// The method of Burn's backend traits, or the name of the user's own operation.
    pub name: &'static str,
    pub(super) row: Rows,
    /// The operation in the trials of devices, if it is tried.
    pub(super) tried: Option<TriedOp>,
    /// Its place among the operations of the table; `None` for the user's own operation.
    pub(super) place: Option<u16>,
}

impl Op {
    /// An operation of the table. Evaluate it at compile time: an operation without a row does not
    /// compile then.
    ///
    /// # Panics
    ///
    /// If `name` has no row.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            row: rows_of(name),
            tried: TriedOp::named(name),
            place: match place_of(name) {
                Some(place) => Some(place as u16),
                None => None,
            },
        }
    }

    /// The user's own operation.
    pub const fn custom(name: &'static str, class: Class, role: Role) -> Self {
        let row = Rows::of(class, "", &[]).of_role(role);
        Self {
            name,
            row,
            tried: None,
            place: None,
        }
    }

    /// The operation in a call that adds to or multiplies the values that it writes over.
    ///
    /// # Panics
    ///
    /// If the operation's row has no class for this case.
    pub const fn that_accumulates(mut self) -> Self {
        match self.row.otherwise {
            Some((class, Case::Accumulates)) => {
                self.row.class = class;
                self.row.fits = Fits::Never;
                self
            }
            _ => panic!("this operation's row has no class for a call that accumulates"),
        }
    }

    /// The operation in a call of this kind.
    pub fn of_kind(self, kind: Kind) -> Self {
        let tried = match kind {
            Kind::Usual => self.tried,
            kind => self.tried.map(|op| op.of_kind(kind)),
        };
        Self { tried, ..self }
    }

    /// Whether the operation is a function of the backward pass.
    pub const fn is_backward(&self) -> bool {
        matches!(self.row.role, Role::Backward | Role::ParameterGradient)
    }

    /// How the operation treats its operands.
    pub const fn class(&self) -> Class {
        self.row.class
    }
}
