//! A product with zeros and ones.

use burn_backend::{BoolDType, get_device_settings};

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_dropout(
        tensor: &TapeTensor<B>,
        noise: &TapeTensor<B>,
    ) -> Option<TapeTensor<B>> {
        let bool_dtype = get_device_settings::<B>(&tensor.primitive.device()).bool_dtype;
        let fits = tensor.shape() == noise.shape();
        if bool_dtype == BoolDType::U32 || !fits || !tensor.is_tracked() {
            return None;
        }
        let noise = noise.primitive.clone();
        let dropped = Amp::<B>::float_equal_elem(noise.clone(), 0.into(), bool_dtype);
        let out = Amp::<B>::float_mul(tensor.primitive.clone(), noise);
        let (dtype, out_dtype) = (tensor.dtype(), out.dtype());
        let mask = dropped.clone();
        Some(Self::record(
            [tensor.clone()],
            move |[tensor]| {
                let out = Amp::<B>::float_mask_fill(tensor, mask.clone(), 0.into());
                cast(out, out_dtype)
            },
            |_| (dropped, out),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    cast(Amp::<B>::float_mask_fill(grad, ops.state, 0.into()), dtype)
                });
            },
        ))
    }
}
