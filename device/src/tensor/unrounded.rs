//! A half tensor as FP32 computes it. Burn's autodiff keeps the operands of a sigmoid and a hyperbolic tangent in the
//! client, so that they take no more memory here.

use burn_amp_core::policy;
use burn_amp_core::policy::{Function, Step};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, TensorMetadata};

use super::converted;

/// How FP32 computes a half tensor.
pub(crate) type Unrounded<B> = policy::Unrounded<FloatTensor<B>, BoolTensor<B>>;

/// The values in a wide dtype, for the operation `op`. FP64 gets FP32's.
pub(super) fn wide<B: Backend>(
    of: &Unrounded<B>,
    dtype: DType,
    op: &'static str,
) -> FloatTensor<B> {
    let function = |function: &_, values| burn_amp_core::computed!(B, function, values);
    let computed = |operand: FloatTensor<B>, functions: Vec<Function>| {
        let wide = match operand.dtype() {
            DType::F32 => operand,
            _ => converted::<B>(operand, DType::F32, op),
        };
        let functions = functions.iter();
        functions.fold(wide, |values, of| function(of, values))
    };
    let values = of.values(computed, |values, step| match step {
        Step::Function(of) => function(of, values),
        Step::Fill(mask, value) => B::float_mask_fill(values, mask.clone(), (*value).into()),
        Step::Mask(mask) => B::float_mul(values, mask.clone()),
    });
    match dtype {
        DType::F32 => values,
        _ => converted::<B>(values, dtype, op),
    }
}
