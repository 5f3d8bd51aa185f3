//! A half tensor as FP32 computes it, on a side of autodiff.

use burn_amp_core::policy;
use burn_amp_core::policy::{Function, Step};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType};

use super::Side;
use crate::precision::{in_kernel, keep_dtypes};

/// How FP32 computes a half tensor.
pub(crate) type Unrounded<B> = policy::Unrounded<FloatTensor<B>, BoolTensor<B>>;

/// The values in a wide dtype. FP64 gets FP32's.
pub(super) fn wide<B: Backend, S: Side<B>>(of: &Unrounded<B>, dtype: DType) -> FloatTensor<B> {
    let values = of.values(
        |operand, functions| S::computed(operand, &functions),
        |values, step| {
            in_its_dtype::<B, S, _>(|| match step {
                Step::Function(function) => computed::<B>(values, function),
                Step::Fill(mask, value) => {
                    B::float_mask_fill(values, mask.clone(), (*value).into())
                }
                Step::Mask(mask) => B::float_mul(values, mask.clone()),
            })
        },
    );
    match dtype {
        DType::F32 => values,
        _ => S::cast(values, dtype),
    }
}

/// Runs a step in the dtype of its operand.
pub(crate) fn in_its_dtype<B: Backend, S: Side<B>, T>(step: impl FnOnce() -> T) -> T {
    match S::RECORDS {
        true => keep_dtypes(step),
        false => in_kernel(step),
    }
}

/// A function on a backend, in the tensor's dtype.
pub(crate) fn computed<B: Backend>(tensor: FloatTensor<B>, function: &Function) -> FloatTensor<B> {
    burn_amp_core::computed!(B, function, tensor)
}
