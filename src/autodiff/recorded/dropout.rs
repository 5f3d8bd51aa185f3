//! A product with zeros and ones.

use burn_backend::ops::IntTensorOps;
use burn_backend::{BoolDType, DTypeUsage, IntDType};

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
        if device::is_fused::<B>(&noise.device()) {
            return Some(Self::record_mask(tensor, noise));
        }
        // LibTorch makes 64 bits of the noise, whatever the dtype.
        let integers = Amp::<B>::float_into_int(noise.clone(), IntDType::U8);
        let bytes = Amp::<B>::int_cast(integers, IntDType::U8);
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

    /// Records a mask, without casts of bytes. The backward pass has zeros where a product could give NaN. The
    /// product comes first: fusion joins the comparison to it, and not to the noise.
    fn record_mask(tensor: &TapeTensor<B>, noise: AmpTensor<B>) -> TapeTensor<B> {
        let masked = |tensor, mask| Amp::<B>::float_mask_fill(tensor, mask, 0.into());
        let dtype = tensor.dtype();
        let out = Amp::<B>::float_mul(tensor.primitive.clone(), noise.clone());
        let out_dtype = out.dtype();
        let mask = Amp::<B>::float_equal_elem(noise, 0.into(), BoolDType::U8);
        let again = mask.clone();
        Self::record(
            [tensor.clone()],
            move |[tensor]| cast(masked(tensor, again.clone()), out_dtype),
            |_| (mask, out),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    operand_grad(grad, dtype, |grad| masked(grad, ops.state))
                });
            },
        )
    }
}
