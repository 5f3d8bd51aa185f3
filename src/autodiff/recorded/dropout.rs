//! A product with zeros and ones.

use burn_backend::ops::IntTensorOps;
use burn_backend::{DTypeUsage, IntDType};

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_dropout(
        tensor: &TapeTensor<B>,
        noise: &TapeTensor<B>,
    ) -> Option<TapeTensor<B>> {
        let bytes = B::dtype_usage(&tensor.primitive.device(), DType::U8);
        let has_bytes = bytes.is_superset(DTypeUsage::Storage | DTypeUsage::Arithmetic);
        if !has_bytes || tensor.shape() != noise.shape() || !tensor.is_tracked() {
            return None;
        }
        let noise = noise.primitive.clone();
        let bytes = Amp::<B>::float_into_int(noise.clone(), IntDType::U8);
        let out = Amp::<B>::float_mul(tensor.primitive.clone(), noise);
        let (dtype, out_dtype) = (tensor.dtype(), out.dtype());
        let again = bytes.clone();
        Some(Self::record(
            [tensor.clone()],
            move |[tensor]| {
                let noise = Amp::<B>::int_into_float(again.clone(), tensor.dtype().into());
                cast(Amp::<B>::float_mul(tensor, noise), out_dtype)
            },
            |_| (bytes, out),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    operand_grad(grad, dtype, |grad| {
                        let noise = Amp::<B>::int_into_float(ops.state, grad.dtype().into());
                        Amp::<B>::float_mul(grad, noise)
                    })
                });
            },
        ))
    }
}
