//! A linear layer. Its backward pass computes the gradients in an order that fusion can join: the
//! weight's, the bias's, and last the operand's, which the previous layer needs.

use burn_backend::ops::ModuleOps;

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_linear(
        x: &TapeTensor<B>,
        weight: &TapeTensor<B>,
        bias: Option<&TapeTensor<B>>,
    ) -> TapeTensor<B> {
        // A frozen operand has no gradient, so the other operand is not kept.
        let [keeps_weight, keeps_x] = [x, weight].map(|operand| operand.is_tracked());
        let linear = move |[x, weight]: [AmpTensor<B>; 2], bias| {
            let shape = x.shape();
            let x = rows(x);
            let kept = [
                keeps_x.then(|| x.clone()),
                keeps_weight.then(|| weight.clone()),
            ];
            (kept, of_rows(Amp::<B>::linear(x, weight, bias), shape))
        };
        let [x, weight] = [x, weight].map(TapeTensor::<B>::clone);
        match bias {
            Some(bias) => Self::record(
                [x, weight, bias.clone()],
                |[x, weight, bias]| Amp::<B>::linear(x, weight, Some(bias)),
                |[x, weight, bias]| linear([x, weight], Some(bias)),
                None::<fn(_) -> _>,
                |ops, grads| {
                    let grad = grads.consume::<Amp<B>>(&ops.node);
                    let to = ops.parents.map(|node| node.map(|node| node.id));
                    gradients(to, ops.state, grad, grads);
                },
            ),
            None => Self::record(
                [x, weight],
                |[x, weight]| Amp::<B>::linear(x, weight, None),
                |operands| linear(operands, None),
                None::<fn(_) -> _>,
                |ops, grads| {
                    let grad = grads.consume::<Amp<B>>(&ops.node);
                    let [to_x, to_weight] = ops.parents.map(|node| node.map(|node| node.id));
                    gradients([to_x, to_weight, None], ops.state, grad, grads);
                },
            ),
        }
    }
}

fn gradients<B: Backend>(
    [to_x, to_weight, to_bias]: [Option<NodeId>; 3],
    // As rows.
    [x, weight]: [Option<AmpTensor<B>>; 2],
    grad: AmpTensor<B>,
    grads: &mut Gradients,
) {
    type A<B> = Amp<B>;
    let sums_a_cast = is_half(grad.dtype()) && grad.wide().is_none() && reduces_fused(&grad);
    let shape = grad.shape();
    let grad_rows = rows(grad.clone());
    let of_bias = |grads: &mut Gradients| {
        let Some(node) = to_bias else { return };
        let grad = match sums_a_cast {
            true => {
                let features = shape[shape.num_dims() - 1];
                fused_row_sum([&grad], |[grad]| grad, Shape::new([features]))
            }
            // One sum over all rows.
            false => A::<B>::linear_bias_backward(grad_rows.clone()),
        };
        grads.register::<A<B>>(node, grad);
    };
    let of_weight = |grads: &mut Gradients| {
        if let (Some(node), Some(x)) = (to_weight, x) {
            let grad = A::<B>::linear_weight_backward(x, grad_rows.clone());
            grads.register::<A<B>>(node, grad);
        }
    };
    // The cast of a matrix would end up in the product's block, and be a kernel of its own.
    if sums_a_cast && shape.num_dims() == 2 {
        of_bias(grads);
        of_weight(grads);
    } else {
        of_weight(grads);
        of_bias(grads);
    }
    if let (Some(node), Some(weight)) = (to_x, weight) {
        let grad = A::<B>::linear_x_backward(weight, grad_rows);
        grads.register::<A<B>>(node, of_rows(grad, shape));
    }
}

/// Rows in place of those of a tensor of this shape.
fn of_rows<B: Backend>(rows: AmpTensor<B>, mut shape: Shape) -> AmpTensor<B> {
    let last = shape.num_dims() - 1;
    if last == 1 {
        return rows;
    }
    shape[last] = rows.shape()[1];
    Amp::<B>::float_reshape(rows, shape)
}
