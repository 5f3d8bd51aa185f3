//! A half tensor as FP32 computes it, on a side of autodiff.

use std::slice::Iter;

use burn_amp_core::policy::{Function, Functions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};

use super::Side;

/// Functions of a half tensor, in the order in which they were computed in half.
#[derive(Debug, Clone)]
pub(crate) struct Unrounded<T> {
    operand: T,
    functions: Vec<Function>,
}

impl<T> Unrounded<T> {
    /// Functions of a half tensor.
    pub fn of(operand: T, functions: &[Function]) -> Self {
        Self {
            operand,
            functions: functions.to_vec(),
        }
    }

    /// These functions of the result. `None` if there are too many.
    pub fn then(mut self, functions: &[Function]) -> Option<Self> {
        self.functions.extend_from_slice(functions);
        (self.functions.len() <= Function::MOST).then_some(self)
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

    pub fn functions(&self) -> Functions<Iter<'_, Function>> {
        Functions(self.functions.iter())
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

/// A function on a backend, in the tensor's dtype.
pub(crate) fn computed<B: Backend>(tensor: FloatTensor<B>, function: &Function) -> FloatTensor<B> {
    burn_amp_core::computed!(B, function, tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_functions_are_computed_again() {
        let mut unrounded = Unrounded::of((), &[Function::Sigmoid]);
        for _ in 1..Function::MOST {
            assert!(!unrounded.functions().is_sum());
            unrounded = unrounded.then(&[Function::Neg]).expect("few functions");
        }
        let moved = unrounded.map(|()| 'x');
        assert!(moved.functions().is_sigmoid());
        assert!(moved.then(&[Function::Plus(1.0)]).is_none());
    }
}
