//! Casts the float tensors of inputs and outputs of any structure to one dtype.

use burn_core::tensor::backend::Backend;
use burn_core::tensor::{Bool, FloatDType, Int, Tensor};

/// Values whose float tensors can be cast to one dtype, however nested: tensors of any shape, and
/// tuples of up to four, arrays, vectors and options of such values. Integer and boolean tensors
/// are unchanged.
///
/// For a batch type of your own, convert its fields.
pub trait ConvertFloat {
    /// Casts every float tensor to `dtype`, on its device, with [`Tensor::cast`], which autodiff
    /// tracks.
    fn convert_float(self, dtype: FloatDType) -> Self;
}

impl<B: Backend, const D: usize> ConvertFloat for Tensor<B, D> {
    fn convert_float(self, dtype: FloatDType) -> Self {
        self.cast(dtype)
    }
}

impl<B: Backend, const D: usize> ConvertFloat for Tensor<B, D, Int> {
    fn convert_float(self, _dtype: FloatDType) -> Self {
        self
    }
}

impl<B: Backend, const D: usize> ConvertFloat for Tensor<B, D, Bool> {
    fn convert_float(self, _dtype: FloatDType) -> Self {
        self
    }
}

impl<T: ConvertFloat> ConvertFloat for Vec<T> {
    fn convert_float(self, dtype: FloatDType) -> Self {
        self.into_iter().map(|t| t.convert_float(dtype)).collect()
    }
}

impl<T: ConvertFloat> ConvertFloat for Option<T> {
    fn convert_float(self, dtype: FloatDType) -> Self {
        self.map(|t| t.convert_float(dtype))
    }
}

impl<T: ConvertFloat, const N: usize> ConvertFloat for [T; N] {
    fn convert_float(self, dtype: FloatDType) -> Self {
        self.map(|t| t.convert_float(dtype))
    }
}

macro_rules! tuples {
    ($(($($t:ident $i:tt),+))*) => {$(
        impl<$($t: ConvertFloat),+> ConvertFloat for ($($t,)+) {
            fn convert_float(self, dtype: FloatDType) -> Self {
                ($(self.$i.convert_float(dtype),)+)
            }
        }
    )*};
}

tuples! {
    (T0 0)
    (T0 0, T1 1)
    (T0 0, T1 1, T2 2)
    (T0 0, T1 1, T2 2, T3 3)
}
