//! A sum or a mean in FP32.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    /// All values have the same gradient: it is computed once and expanded. Autodiff multiplies a
    /// tensor of ones instead.
    pub(super) fn record_reduction(
        kind: Reduction,
        tensor: TapeTensor<B>,
        dim: Option<usize>,
    ) -> TapeTensor<B> {
        type A<B> = Amp<B>;
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        Self::record(
            [tensor],
            move |[tensor]| reduction(kind, tensor, dim),
            move |[tensor]| ((), reduction(kind, tensor, dim)),
            None::<fn(_) -> _>,
            move |ops, grads| {
                unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
                    let count = dim.map_or(shape.num_elements(), |dim| shape[dim]);
                    let grad = operand_grad(grad, dtype, |grad| match kind {
                        Reduction::Sum => grad,
                        Reduction::Mean => {
                            A::<B>::float_mul_scalar(grad, (1.0 / count as f64).into())
                        }
                    });
                    let grad = match dim {
                        Some(_) => grad,
                        None => A::<B>::float_reshape(grad, vec![1; shape.num_dims()].into()),
                    };
                    A::<B>::float_expand(grad, shape)
                });
            },
        )
    }
}

fn reduction<B: Backend>(
    kind: Reduction,
    tensor: AmpTensor<B>,
    dim: Option<usize>,
) -> AmpTensor<B> {
    match (kind, dim) {
        (Reduction::Sum, Some(dim)) => Amp::<B>::float_sum_dim(tensor, dim),
        (Reduction::Sum, None) => Amp::<B>::float_sum(tensor),
        (Reduction::Mean, Some(dim)) => Amp::<B>::float_mean_dim(tensor, dim),
        (Reduction::Mean, None) => Amp::<B>::float_mean(tensor),
    }
}
