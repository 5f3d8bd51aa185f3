//! A sum or difference with a broadcast operand, and the sums that its gradient takes.

use super::*;

impl<B: Backend, C: CheckpointStrategy> Recorded<B, C> {
    pub(super) fn record_sum(sign: Sign, operands: [TapeTensor<B>; 2]) -> TapeTensor<B> {
        let [left, right] = operands.each_ref().map(|operand| operand.shape());
        Self::record(
            operands,
            move |[lhs, rhs]| sum(sign, lhs, rhs),
            move |[lhs, rhs]| ((), sum(sign, lhs, rhs)),
            None::<fn(_) -> _>,
            move |ops, grads| {
                binary::<Amp<B>, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| reduced(grad, &left),
                    // The sign comes last: the sum is the smaller tensor.
                    |grad| match sign {
                        Sign::Plus => reduced(grad, &right),
                        Sign::Minus => Amp::<B>::float_neg(reduced(grad, &right)),
                    },
                );
            },
        )
    }
}

fn sum<B: Backend>(sign: Sign, lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    match sign {
        Sign::Plus => Amp::<B>::float_add(lhs, rhs),
        Sign::Minus => Amp::<B>::float_sub(lhs, rhs),
    }
}

/// The gradient of an operand that was broadcast from `shape`. Neighbouring dimensions are summed
/// together; autodiff sums each one by itself.
pub(super) fn reduced<B: Backend>(grad: AmpTensor<B>, shape: &Shape) -> AmpTensor<B> {
    let from = grad.shape();
    if from == *shape {
        return grad;
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
    let grad = Amp::<B>::float_reshape(grad, sizes.into());
    // The innermost first: in most cases its sum leaves the smallest tensor.
    let summed = (0..folded.len()).rev().filter(|dim| folded[*dim].1);
    let grad = summed.fold(grad, Amp::<B>::float_sum_dim);
    Amp::<B>::float_reshape(grad, shape.clone())
}
