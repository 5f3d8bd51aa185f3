//! An operation as input of the decision: a row of the table, looked up at compile time.

use super::table::OPS;
use super::trials::{Kind, TriedOp};
use super::{Case, Class, Convolution, Effect, Fits, Role, Row, same};

/// An operation and its row.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// The method of Burn's backend traits, or the name of the user's own operation.
    pub name: &'static str,
    pub(crate) class: Class,
    /// The reason for the class.
    pub(super) why: &'static str,
    /// The first version of Burn that has the operation, from 0.21 on.
    pub(super) since: &'static str,
    /// The cases in which the operation has another class.
    pub(super) otherwise: &'static [(Class, Case)],
    /// The form in which the policy itself records the operation for the backward pass. Without this text, the
    /// operation is recorded as Burn records it.
    pub(super) recorded: Option<&'static str>,
    pub(super) role: Role,
    /// What the operation does to values.
    pub effect: Effect,
    /// Which results fit in half, if the class does not say it.
    pub(super) fits: Option<Fits>,
    /// How many roundings may lie between an exact device's result in bf16 and the FP32 result.
    pub(super) roundings: u8,
    /// Whether configurations cannot change the class.
    pub(super) is_fixed: bool,
    /// The operation in the trials of devices, if it is tried.
    pub(super) tried: Option<TriedOp>,
    /// Its place among the operations of the table; `None` for the user's own operation.
    pub(crate) place: Option<u16>,
    /// The options of a convolution.
    pub(crate) convolution: Option<Convolution>,
}

impl Op {
    /// An operation of the table. Evaluate it at compile time: an operation without a row does not
    /// compile then.
    ///
    /// # Panics
    ///
    /// If `name` has no row.
    pub const fn named(name: &str) -> Self {
        let mut i = 0;
        while i < OPS.len() {
            if same(OPS[i].name, name) {
                return OPS[i];
            }
            i += 1;
        }
        panic!("this operation has no row in the policy table")
    }

    /// The user's own operation.
    pub const fn custom(name: &'static str, class: Class, role: Role) -> Self {
        Self {
            name,
            class,
            why: "",
            since: "0.21",
            otherwise: &[],
            recorded: None,
            role,
            effect: Effect::Other,
            fits: None,
            roundings: 1,
            is_fixed: false,
            tried: None,
            place: None,
            convolution: None,
        }
    }

    /// The operation in a call that adds to or multiplies the values that it writes over.
    ///
    /// # Panics
    ///
    /// If the operation's row has no class for this case.
    pub const fn that_accumulates(mut self) -> Self {
        match self.otherwise {
            [(class, Case::Accumulates)] => {
                self.class = *class;
                self
            }
            _ => panic!("this operation's row has no class for a call that accumulates"),
        }
    }

    /// The operation in a call with a first operand and a weight of these shapes, and with these options.
    pub fn convolving(self, first: &[usize], weight: &[usize], options: Convolution) -> Self {
        // Transposed, or for the gradient of an input, each value is spread over the result.
        let spreads = if self.name.starts_with("conv_transpose") {
            !self.is_backward()
        } else {
            self.name.ends_with("_x_backward")
        };
        let summed = self.name.ends_with("_weight_backward").then(|| first[0]);
        let tried = match Kind::of_convolution(weight, &options, spreads, summed) {
            Kind::Usual => self.tried,
            kind => self.tried.map(|op| op.of_kind(kind)),
        };
        Self {
            tried,
            convolution: Some(options),
            ..self
        }
    }

    /// Which of its calls are tried.
    #[doc(hidden)]
    pub fn kind(&self) -> Kind {
        self.tried.map_or(Kind::Usual, TriedOp::kind)
    }

    /// Whether the operation is a contraction of two operands, as a kernel computes one.
    #[doc(hidden)]
    pub fn is_contraction(&self) -> bool {
        self.class == Class::LowerPrecision && self.tried.is_some()
    }

    /// Whether the policy runs the operation, or some of its calls, in FP32 unless the device is exact. Other operations run
    /// in half unless the device is not exact.
    pub(crate) fn is_widened(&self) -> bool {
        self.row().may_be(Class::Fp32Inside)
    }

    /// Whether the operation is a function of the backward pass.
    pub const fn is_backward(&self) -> bool {
        matches!(self.role, Role::Backward | Role::ParameterGradient)
    }

    /// What tells the calls of the operation apart, whatever the batch, from the shapes of the first two operands: how
    /// many products a convolution sums, else the last dimension of the first operand, as a product of matrices sums it.
    pub fn length(&self, first: &[usize], second: &[usize]) -> usize {
        if !self.name.starts_with("conv") {
            return first.last().copied().unwrap_or(1);
        }
        // The weight is `[out, in, ..]`, or `[in, out, ..]` if transposed.
        let out = usize::from(self.name.starts_with("conv_transpose"));
        let summed = second.iter().enumerate().filter(|(i, _)| *i != out);
        summed.map(|(_, size)| size).product()
    }

    /// How the operation treats its operands.
    pub const fn class(&self) -> Class {
        self.class
    }

    /// Which results fit in half.
    pub(super) fn fits(&self) -> Fits {
        self.fits.unwrap_or(match self.class {
            Class::LowerPrecision | Class::Fp32 | Class::Fp32Inside => Fits::Never,
            Class::PromoteSum => Fits::Sum,
            Class::Promote | Class::Keep | Class::Activation | Class::Move => Fits::WithOperands,
        })
    }

    pub(super) fn row(&self) -> Row {
        Row {
            op: self.name,
            class: self.class,
            why: self.why,
            otherwise: self.otherwise,
            recorded: self.recorded,
        }
    }
}
