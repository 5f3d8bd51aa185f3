//! A half tensor as FP32 computes it: what reads a half tensor in FP32 may need digits that half has rounded away, as the
//! logarithm of one minus a sigmoid does.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};

use super::Side;

/// The most functions that are computed again.
const MOST: usize = 8;

/// Functions of a half tensor, in the order in which they were computed in half.
#[derive(Debug, Clone)]
pub(crate) struct Unrounded<T> {
    operand: T,
    functions: Vec<Function>,
}

/// A function of each element: one that half rounds near a bound or in a sum, or one that may stand between two of those.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Function {
    Sigmoid,
    Tanh,
    Plus(f64),
    Times(f64),
    Neg,
}

impl<T> Unrounded<T> {
    /// A function of a half tensor.
    pub fn of(operand: T, function: Function) -> Self {
        Self {
            operand,
            functions: vec![function],
        }
    }

    /// This function of the result. `None` if there are too many.
    pub fn then(mut self, function: Function) -> Option<Self> {
        self.functions.push(function);
        (self.functions.len() <= MOST).then_some(self)
    }

    /// The same functions of the operand in another place.
    pub fn map<U>(&self, operand: impl FnOnce(T) -> U) -> Unrounded<U>
    where
        T: Clone,
    {
        Unrounded {
            operand: operand(self.operand.clone()),
            functions: self.functions.clone(),
        }
    }

    /// Whether a scalar was added: nothing may be left of a small number.
    pub fn is_sum(&self) -> bool {
        let is_sum = |function: &Function| matches!(function, Function::Plus(_));
        self.functions.iter().any(is_sum)
    }

    /// Whether a sigmoid is computed again.
    pub fn is_sigmoid(&self) -> bool {
        self.functions.contains(&Function::Sigmoid)
    }
}

/// The values in a wide dtype. FP64 gets FP32's.
pub(super) fn wide<B: Backend, S: Side<B>>(
    of: &Unrounded<FloatTensor<B>>,
    dtype: DType,
) -> FloatTensor<B> {
    let values = S::computed(of.operand.clone(), &of.functions);
    match dtype {
        DType::F32 => values,
        _ => S::cast(values, dtype),
    }
}

impl Function {
    /// The function on a backend, in the tensor's dtype.
    pub(crate) fn of<B: Backend>(tensor: FloatTensor<B>, function: &Self) -> FloatTensor<B> {
        match function {
            Self::Sigmoid => B::sigmoid(tensor),
            Self::Tanh => B::float_tanh(tensor),
            Self::Plus(scalar) => B::float_add_scalar(tensor, (*scalar).into()),
            Self::Times(scalar) => B::float_mul_scalar(tensor, (*scalar).into()),
            Self::Neg => B::float_neg(tensor),
        }
    }

    /// Whether half may round away what is left of a small number.
    pub fn rounds(self) -> bool {
        match self {
            Self::Sigmoid | Self::Tanh | Self::Plus(_) => true,
            Self::Times(_) | Self::Neg => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_functions_are_computed_again() {
        let mut unrounded = Unrounded::of((), Function::Sigmoid);
        for _ in 1..MOST {
            assert!(!unrounded.is_sum());
            unrounded = unrounded.then(Function::Neg).expect("few functions");
        }
        assert!(unrounded.then(Function::Plus(1.0)).is_none());
    }

    #[test]
    fn what_is_known_of_functions() {
        let sum = Unrounded::of((), Function::Sigmoid).then(Function::Plus(1.0));
        let sum = sum.expect("few functions").map(|()| 'x');
        assert!(sum.is_sum() && sum.is_sigmoid());
        assert!(!Unrounded::of((), Function::Tanh).is_sigmoid());
        // A factor and a change of sign lose nothing that half held.
        let functions = [Function::Sigmoid, Function::Tanh, Function::Plus(1.0)];
        assert!(functions.into_iter().all(Function::rounds));
        assert!(!Function::Times(2.0).rounds() && !Function::Neg.rounds());
    }
}
