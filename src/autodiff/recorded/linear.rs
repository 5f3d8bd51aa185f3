//! A linear layer. Its backward pass computes the gradients in an order that fusion can join: the
//! weight's, the bias's, and last the operand's, which the previous layer needs.

use burn_autodiff::NodeId;

use super::*;
use crate::call::{linear, linear_bias_backward, linear_weight_backward, linear_x_backward};

/// A linear layer, with or without a bias.
#[derive(Debug, Clone)]
pub(crate) struct Linear;

/// The rows of x and the weight. A frozen operand has no gradient, so the other operand is not kept.
type Kept<B> = [Option<AmpTensor<B>>; 2];

impl<B: Backend> Step<B, 2> for Linear {
    type Kept = Kept<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [x, weight]: Operands<B, 2>) -> AmpTensor<B> {
        linear(x, weight, None)
    }

    fn keep(&self, [x, weight]: Operands<B, 2>, tracked: [bool; 2]) -> (Self::Kept, AmpTensor<B>) {
        keep(x, weight, None, tracked)
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let grad = grads.consume::<Amp<B>>(&ops.node);
        let [to_x, to_weight] = ops.parents.map(|node| node.map(|node| node.id));
        gradients([to_x, to_weight, None], ops.state, grad, grads);
    }
}

impl<B: Backend> Step<B, 3> for Linear {
    type Kept = Kept<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [x, weight, bias]: Operands<B, 3>) -> AmpTensor<B> {
        linear(x, weight, Some(bias))
    }

    fn keep(
        &self,
        [x, weight, bias]: Operands<B, 3>,
        [tracked_x, tracked_weight, _]: [bool; 3],
    ) -> (Self::Kept, AmpTensor<B>) {
        keep(x, weight, Some(bias), [tracked_x, tracked_weight])
    }

    fn backward(self, ops: Ops<Self::Kept, 3>, grads: &mut Gradients) {
        let grad = grads.consume::<Amp<B>>(&ops.node);
        let to = ops.parents.map(|node| node.map(|node| node.id));
        gradients(to, ops.state, grad, grads);
    }
}

fn keep<B: Backend>(
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
    [keeps_weight, keeps_x]: [bool; 2],
) -> (Kept<B>, AmpTensor<B>) {
    let shape = x.shape();
    let x = rows(x);
    let kept = [
        keeps_x.then(|| x.clone()),
        keeps_weight.then(|| weight.clone()),
    ];
    (kept, of_rows(linear(x, weight, bias), shape))
}

fn gradients<B: Backend>(
    [to_x, to_weight, to_bias]: [Option<NodeId>; 3],
    [x, weight]: Kept<B>,
    grad: AmpTensor<B>,
    grads: &mut Gradients,
) {
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
            false => linear_bias_backward(grad_rows.clone()),
        };
        grads.register::<Amp<B>>(node, grad);
    };
    let of_weight = |grads: &mut Gradients| {
        if let (Some(node), Some(x)) = (to_weight, x) {
            let grad = linear_weight_backward(x, grad_rows.clone());
            grads.register::<Amp<B>>(node, grad);
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
        let grad = linear_x_backward(weight, grad_rows);
        grads.register::<Amp<B>>(node, of_rows(grad, shape));
    }
}

/// Rows in place of those of a tensor of this shape.
fn of_rows<B: Backend>(rows: AmpTensor<B>, mut shape: Shape) -> AmpTensor<B> {
    let last = shape.num_dims() - 1;
    if last == 1 {
        return rows;
    }
    shape[last] = rows.shape()[1];
    reshape(rows, shape)
}
