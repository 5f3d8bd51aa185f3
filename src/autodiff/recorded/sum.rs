//! A sum or difference with a broadcast operand, and the sums that its gradient takes.

use super::*;

/// A sum of operands in one dtype, one of which is broadcast, or their difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    Plus,
    Minus,
}

impl<B: Backend> Step<B, 2> for Sum {
    /// The shapes of the operands.
    type Kept = [Shape; 2];

    const CHECKPOINT: Checkpoint = Checkpoint::Kept;

    fn forward(&self, [lhs, rhs]: Operands<B, 2>) -> AmpTensor<B> {
        match self {
            Self::Plus => add(lhs, rhs),
            Self::Minus => sub(lhs, rhs),
        }
    }

    fn keep(&self, operands: Operands<B, 2>, _: [bool; 2]) -> (Self::Kept, AmpTensor<B>) {
        let shapes = operands.each_ref().map(|operand| operand.shape());
        (shapes, self.forward(operands))
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let [left, right] = ops.state;
        let mut grad = grads.consume::<Amp<B>>(&ops.node);
        let [to_left, to_right] = ops.parents;
        // Only a sum of rows is one kernel with its cast.
        let from = grad.shape();
        let sums_rows = [&left, &right].iter().any(|shape| is_row(shape, &from));
        if grad.is_cast_later() && !sums_rows {
            let flags = grad.flags();
            grad = AmpTensor::new(grad.into_primitive(), flags);
        }
        if let Some(node) = to_left {
            grads.register::<Amp<B>>(node.id, reduced(grad.clone(), &left));
        }
        if let Some(node) = to_right {
            // The sign comes last: the sum is the smaller tensor.
            let grad = match self {
                Self::Plus => reduced(grad, &right),
                Self::Minus => neg(reduced(grad, &right)),
            };
            grads.register::<Amp<B>>(node.id, grad);
        }
    }
}

/// Whether a tensor of `shape` was broadcast as one row of a tensor of the shape `to`.
fn is_row(shape: &Shape, to: &Shape) -> bool {
    let last = shape.num_dims() - 1;
    shape != to && shape[last] == to[last] && shape.num_elements() == shape[last]
}

/// The gradient of an operand that was broadcast from `shape`. Neighbouring dimensions are summed
/// together; autodiff sums each one by itself.
pub(super) fn reduced<B: Backend>(grad: AmpTensor<B>, shape: &Shape) -> AmpTensor<B> {
    let from = grad.shape();
    if from == *shape {
        return grad;
    }
    if grad.is_cast_later() && is_row(shape, &from) && reduces_fused(&grad) {
        return fused_row_sum([&grad], |[grad]| grad, shape.clone());
    }
    let mut folded: Vec<(usize, bool)> = Vec::new();
    for dim in 0..from.num_dims() {
        let (size, is_summed) = (from[dim], shape[dim] != from[dim]);
        if size == 1 {
            continue;
        }
        match folded.last_mut() {
            Some((last, summed)) if *summed == is_summed => *last *= size,
            _ => folded.push((size, is_summed)),
        }
    }
    let sizes: Vec<_> = folded.iter().map(|(size, _)| *size).collect();
    let grad = reshape(grad, sizes.into());
    // The innermost first: in most cases its sum leaves the smallest tensor.
    let summed = (0..folded.len()).rev().filter(|dim| folded[*dim].1);
    reshape(summed.fold(grad, sum_dim), shape.clone())
}
