//! Layer norm over the last dimension in FP32, without the shift.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    /// With u the normalized tensor, d the deviation and h = gamma g, the gradients are
    /// (h - mean(h) - u mean(h u)) / d for the tensor, and the sum of g u for gamma.
    pub(super) fn record_layer_norm(
        operands: [TapeTensor<B>; 2],
        epsilon: f64,
        kept: DType,
    ) -> TapeTensor<B> {
        type A<B> = Amp<B>;
        let [dtype, gamma_dtype] = operands.each_ref().map(|operand| operand.dtype());
        Self::record(
            operands,
            move |[tensor, gamma]| scaled(normalized(tensor, epsilon).0, gamma),
            |[tensor, gamma]| {
                let (unit, deviation) = normalized(tensor, epsilon);
                let state = [cast(unit.clone(), kept), deviation, gamma.clone()];
                (state, scaled(unit, gamma))
            },
            Some(move |[tensor, gamma]: [_; 2]| {
                let (unit, deviation) = normalized(tensor, epsilon);
                [unit, deviation, gamma]
            }),
            move |ops, grads| {
                let [unit, deviation, gamma] = ops.state;
                let [to_tensor, to_gamma] = ops.parents;
                let last = unit.rank() - 1;
                let grad = grads.consume::<A<B>>(&ops.node);
                // Gamma's gradient first: fusion then joins its operations to one sum.
                if let Some(node) = to_gamma {
                    let product = |[grad, unit]: [_; 2]| A::<B>::float_mul(grad, unit);
                    let shape = gamma.shape();
                    let grad = operand_grad(grad.clone(), gamma_dtype, |grad| {
                        if reduces_fused(&grad) {
                            return fused_row_sum([&grad, &unit], product, shape);
                        }
                        let grad =
                            A::<B>::float_sum_dim(product([grad, unit.clone()].map(rows)), 0);
                        A::<B>::float_reshape(grad, shape)
                    });
                    grads.register::<A<B>>(node.id, grad);
                }
                if let Some(node) = to_tensor {
                    let grad = operand_grad(grad, dtype, |grad| {
                        let grad = scaled(grad, gamma);
                        let mean = A::<B>::float_mean_dim(grad.clone(), last);
                        let product = A::<B>::float_mul(grad.clone(), unit.clone());
                        let slope = A::<B>::float_mean_dim(product, last);
                        let grad = A::<B>::float_sub(grad, mean);
                        let grad = A::<B>::float_sub(grad, A::<B>::float_mul(unit, slope));
                        A::<B>::float_div(grad, deviation)
                    });
                    grads.register::<A<B>>(node.id, grad);
                }
            },
        )
    }
}

/// A tensor normalized to mean 0 and variance 1 over its last dimension, and the deviation that
/// divided it. Both are in FP32 or wider.
fn normalized<B: Backend>(tensor: AmpTensor<B>, epsilon: f64) -> (AmpTensor<B>, AmpTensor<B>) {
    type A<B> = Amp<B>;
    let last = tensor.rank() - 1;
    let tensor = widened(tensor);
    let mean = A::<B>::float_mean_dim(tensor.clone(), last);
    let centered = A::<B>::float_sub(tensor, mean);
    let squares = A::<B>::float_mul(centered.clone(), centered.clone());
    let variance = A::<B>::float_mean_dim(squares, last);
    let deviation = A::<B>::float_sqrt(A::<B>::float_add_scalar(variance, epsilon.into()));
    (A::<B>::float_div(centered, deviation.clone()), deviation)
}

/// A normalized tensor times gamma, which has the length of the last dimension.
fn scaled<B: Backend>(unit: AmpTensor<B>, gamma: AmpTensor<B>) -> AmpTensor<B> {
    let shape = along_last(&gamma, unit.rank());
    Amp::<B>::float_mul(unit, Amp::<B>::float_reshape(gamma, shape))
}

/// The shape in which gamma broadcasts along the last of `rank` dimensions.
fn along_last<B: Backend>(gamma: &AmpTensor<B>, rank: usize) -> Shape {
    let mut shape = vec![1; rank];
    shape[rank - 1] = gamma.shape().num_elements();
    Shape::from(shape)
}
