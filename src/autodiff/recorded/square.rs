//! A square in FP32.

use super::arithmetic::arithmetic;
use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_square(tensor: TapeTensor<B>, kept: DType) -> TapeTensor<B> {
        let dtype = tensor.dtype();
        let square = |tensor: AmpTensor<B>| arithmetic(Arithmetic::Mul, tensor.clone(), tensor);
        Self::record(
            [tensor],
            move |[tensor]| square(tensor),
            |[tensor]| {
                let out = square(tensor.clone());
                (cast(tensor, kept), out)
            },
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    operand_grad(grad, dtype, |grad| {
                        let slope = cast(ops.state, DType::F32);
                        Amp::<B>::float_mul(grad, Amp::<B>::float_mul_scalar(slope, 2.into()))
                    })
                });
            },
        )
    }
}
