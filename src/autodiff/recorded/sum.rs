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
    let mut folded = from.clone();
    let mut into = None;
    for dim in (0..from.num_dims()).filter(|dim| from[*dim] != 1) {
        if shape[dim] == from[dim] {
            into = None;
        } else if let Some(into) = into {
            folded[into] *= from[dim];
            folded[dim] = 1;
        } else {
            into = Some(dim);
        }
    }
    let summed = (0..from.num_dims()).filter(|dim| folded[*dim] != shape[*dim]);
    let grad = if folded == from {
        grad
    } else {
        reshape(grad, folded.clone())
    };
    // The innermost first: in most cases its sum leaves the smallest tensor.
    summed.rev().fold(grad, sum_dim)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;

    use super::*;

    #[test]
    fn dimensions_that_are_summed_together_give_the_sums_of_each() {
        for (from, to) in [
            (vec![4], vec![1]),
            (vec![2, 3], vec![1, 3]),
            (vec![2, 3], vec![2, 1]),
            (vec![2, 1, 3, 4], vec![1, 1, 1, 4]),
            (vec![2, 1, 3, 4], vec![1, 1, 3, 1]),
            (vec![2, 3, 4, 5], vec![1, 3, 1, 1]),
            (vec![2, 3, 4, 5], vec![2, 1, 4, 1]),
            (vec![2, 3, 4, 5], vec![1, 1, 1, 1]),
        ] {
            // Small integers: every sum is exact.
            let elements = from.iter().product::<usize>();
            let values: Vec<f32> = (0..elements).map(|i| (i * 7 % 11) as f32).collect();
            let data = TensorData::new(values, from.clone());
            let grad = Flex::float_from_data(data, &Default::default());
            let summed = (0..from.len()).filter(|dim| from[*dim] != to[*dim]);
            let expected = summed.fold(grad.clone(), Flex::float_sum_dim);
            let sum = reduced(AmpTensor::<Flex>::plain(grad), &Shape::from(to.clone()));
            let [sum, expected] = [sum.into_primitive(), expected]
                .map(|tensor| burn_backend::read_sync(Flex::float_into_data(tensor)).unwrap());
            assert_eq!(sum, expected, "{from:?} to {to:?}");
        }
    }
}
