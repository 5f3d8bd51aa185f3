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

macro_rules! values {
    ($([$($generic:tt)+] $value:ty: |$this:ident, $dtype:ident| $converted:expr;)*) => {$(
        impl<$($generic)+> ConvertFloat for $value {
            fn convert_float(self, $dtype: FloatDType) -> Self {
                let $this = self;
                $converted
            }
        }
    )*};
}

values! {
    [B: Backend, const D: usize] Tensor<B, D>: |tensor, dtype| tensor.cast(dtype);
    [B: Backend, const D: usize] Tensor<B, D, Int>: |tensor, _dtype| tensor;
    [B: Backend, const D: usize] Tensor<B, D, Bool>: |tensor, _dtype| tensor;
    [T: ConvertFloat] Vec<T>: |all, dtype| all.into_iter().map(|t| t.convert_float(dtype)).collect();
    [T: ConvertFloat] Option<T>: |maybe, dtype| maybe.map(|t| t.convert_float(dtype));
    [T: ConvertFloat, const N: usize] [T; N]: |all, dtype| all.map(|t| t.convert_float(dtype));
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
