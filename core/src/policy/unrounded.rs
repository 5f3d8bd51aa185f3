//! A half tensor as FP32 computes it: what reads a half tensor in FP32 may need digits that half has rounded away, as the
//! logarithm of one minus a sigmoid does.

use super::{Class, Decision, Effect, Op, Operand, TensorFlags};
use crate::FloatDType;
use crate::dtype::is_half;

/// A function of each element: one that half rounds near a bound or in a sum, or one that may stand between two of those.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Function {
    /// A sigmoid.
    Sigmoid,
    /// A hyperbolic tangent.
    Tanh,
    /// The sum with a scalar.
    Plus(f64),
    /// The product with a scalar.
    Times(f64),
    /// The quotient by a scalar. A product with its reciprocal would be another number.
    Over(f64),
    /// The negative.
    Neg,
    /// At least a bound that half holds exactly.
    AtLeast(f64),
    /// At most a bound that half holds exactly.
    AtMost(f64),
}

impl Function {
    /// The most functions that are computed again.
    pub const MOST: usize = 8;

    /// A scalar up to this is an epsilon: beside it, no digits of a number are lost that matter.
    const EPSILON: f64 = 1e-3;

    /// Whether half may round away what is left of a small number.
    pub fn rounds(self) -> bool {
        match self {
            Self::Sigmoid | Self::Tanh => true,
            Self::Plus(scalar) => scalar.abs() > Self::EPSILON,
            Self::Times(_) | Self::Over(_) | Self::Neg | Self::AtLeast(_) | Self::AtMost(_) => {
                false
            }
        }
    }
}

/// Functions of a half tensor, in the order in which they were computed in half.
#[derive(Debug, Clone, Copy)]
pub struct Functions<I>(pub I);

impl<'a, I: Iterator<Item = &'a Function> + Clone> Functions<I> {
    fn any(&self, is: impl Fn(&Function) -> bool) -> bool {
        self.0.clone().any(is)
    }

    /// Whether a scalar was added: nothing may be left of a small number.
    pub fn is_sum(&self) -> bool {
        self.any(|function| matches!(function, Function::Plus(_)))
    }

    /// Whether a sigmoid is computed again.
    pub fn is_sigmoid(&self) -> bool {
        self.any(|function| *function == Function::Sigmoid)
    }

    /// The flags of the FP32 values of a half tensor beside another sigmoid: those of a gate, if the values are not much larger
    /// than 1.
    pub fn flags<D: FloatDType>(&self, half: D) -> TensorFlags {
        match self.is_gate() {
            true => TensorFlags::fits(half) | TensorFlags::GATE,
            false => TensorFlags::empty(),
        }
    }

    /// Whether it is computed to a number that is not much larger than 1.
    fn is_gate(&self) -> bool {
        let leaves = |function: &Function| match *function {
            Function::Plus(scalar) | Function::Times(scalar) => scalar.abs() > 1.0,
            Function::Over(scalar) => scalar.abs() < 1.0,
            _ => false,
        };
        self.is_sigmoid() && !self.any(leaves)
    }
}

/// Whether two tensors are sigmoids, of which half rounds one: `true` says that FP32 computes a half sigmoid again. Half would
/// keep nothing of a small difference or product.
pub fn are_sigmoids<D: FloatDType>(tensors: [(bool, Operand<D>); 2]) -> bool {
    let is_gate = |of: &Operand<D>| of.dtype == D::F32 && of.has(TensorFlags::GATE);
    tensors.iter().any(|(is_half, _)| *is_half)
        && tensors.iter().all(|(is_half, of)| *is_half || is_gate(of))
}

/// A [`Function`] of a tensor on a backend, in the tensor's dtype.
#[doc(hidden)]
#[macro_export]
macro_rules! computed {
    ($backend:ty, $function:expr, $tensor:expr) => {
        match *$function {
            $crate::policy::Function::Sigmoid => <$backend>::sigmoid($tensor),
            $crate::policy::Function::Tanh => <$backend>::float_tanh($tensor),
            $crate::policy::Function::Plus(scalar) => {
                <$backend>::float_add_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Times(scalar) => {
                <$backend>::float_mul_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Over(scalar) => {
                <$backend>::float_div_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Neg => <$backend>::float_neg($tensor),
            // With one bound, Flex 0.21 makes a number of NaN.
            $crate::policy::Function::AtLeast(bound) => {
                <$backend>::float_clamp($tensor, bound.into(), f64::INFINITY.into())
            }
            $crate::policy::Function::AtMost(bound) => {
                <$backend>::float_clamp($tensor, f64::NEG_INFINITY.into(), bound.into())
            }
        }
    };
}

impl<D: FloatDType> Decision<D> {
    /// The decision on an operation whose first operand, of this dtype, FP32 computes again: `first` are the functions. `all` is
    /// whether it computes each operand again.
    pub fn reading<'a>(
        mut self,
        op: &Op,
        dtype: D,
        first: Functions<impl Iterator<Item = &'a Function> + Clone>,
        all: bool,
    ) -> Self {
        let is_inside = op.class() == Class::Fp32Inside;
        let reads = match op.effect {
            // Values that differ in FP32 may be equal in half. Beside a half tensor, half is compared with half.
            Effect::Ranks => all,
            Effect::Reads | Effect::Reduces | Effect::FindsLargest => true,
            // A root may be that of a small number.
            _ => is_inside && first.is_sum(),
        };
        // A configuration may ask for half.
        let is_asked = self.rounded.or(self.operands).is_some_and(is_half);
        if reads && self.is_in_half && !is_asked {
            self.operands = Some(D::F32);
            self.result = is_inside.then_some(dtype);
        }
        self
    }

    /// The decision on a quotient in the half dtype `half` whose divisor FP32 computes again: it may be 0 in half.
    pub fn dividing(mut self, half: D) -> Self {
        if self.is_in_half && self.rounded.or(self.operands).is_none() {
            self.operands = Some(D::F32);
            self.result = Some(half);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_functions() {
        let functions = [Function::Sigmoid, Function::Plus(1.0)];
        assert!(Functions(functions.iter()).is_sum() && Functions(functions.iter()).is_sigmoid());
        assert!(!Functions([Function::Tanh].iter()).is_sigmoid());
        assert!(Functions(functions.iter()).is_gate());
        for large in [
            Function::Times(640.0),
            Function::Over(0.01),
            Function::Plus(-3.0),
        ] {
            assert!(!Functions([Function::Sigmoid, large].iter()).is_gate());
        }
        let functions = [Function::Sigmoid, Function::Tanh, Function::Plus(-0.25)];
        assert!(functions.into_iter().all(Function::rounds));
        // An epsilon, a factor, a change of sign and a bound lose nothing that half held.
        let others = [
            Function::Plus(1e-6),
            Function::Times(2.0),
            Function::Over(3.0),
            Function::Neg,
            Function::AtLeast(0.0),
            Function::AtMost(1.0),
        ];
        assert!(!others.into_iter().any(Function::rounds));
    }
}
