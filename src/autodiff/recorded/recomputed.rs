//! Functions that FP32 computes of a tensor that is kept in half.

use burn_backend::ops::FloatTensorOps;

use super::activation::tanh_gradient;
use super::cast::operand_grad;
use super::sum::reduced;
use super::*;
use crate::Precision;
use crate::call::{div_scalar, is_greater, is_lower, mask_fill, sigmoid_backward};
use crate::tensor::{Function, computed};

/// Functions of each element, in FP32. The operand is kept in the dtype `kept`, and the functions are computed again for the
/// backward pass: near 1, half would round a sigmoid to 1, which has no gradient.
#[derive(Debug, Clone)]
pub(crate) struct Recomputed {
    pub functions: Vec<Function>,
    pub kept: DType,
}

impl Recomputed {
    /// The functions up to the last one whose gradient follows from its operand or its result.
    fn needed(&self) -> &[Function] {
        let needs = |function: &Function| match function {
            Function::Sigmoid | Function::Tanh | Function::AtLeast(_) | Function::AtMost(_) => true,
            Function::Plus(_) | Function::Times(_) | Function::Over(_) | Function::Neg => false,
        };
        let needed = self.functions.iter().rposition(needs);
        &self.functions[..needed.map_or(0, |last| last + 1)]
    }
}

/// The result of functions of an operand.
fn result<B: Backend>(functions: &[Function], operand: AmpTensor<B>) -> AmpTensor<B> {
    functions.iter().fold(widened(operand), computed::<Amp<B>>)
}

/// The operand of functions, and their results.
fn values<B: Backend>(functions: &[Function], operand: AmpTensor<B>) -> Vec<AmpTensor<B>> {
    let mut values = vec![widened(operand)];
    for (i, function) in functions.iter().enumerate() {
        values.push(computed::<Amp<B>>(values[i].clone(), function));
    }
    values
}

impl<B: Backend> Step<B, 1> for Recomputed {
    /// The dtype of the operand, and the operand if it is needed.
    type Kept = (DType, Option<AmpTensor<B>>);

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        result(&self.functions, tensor)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        let out = self.forward([tensor.clone()]);
        let dtype = tensor.dtype();
        let kept = (!self.needed().is_empty()).then(|| cast(tensor, self.kept));
        ((dtype, kept), out)
    }

    fn retrieve(&self, [tensor]: Operands<B, 1>) -> Self::Kept {
        (tensor.dtype(), Some(tensor))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        let (dtype, kept) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, dtype, |grad| {
                let values: Vec<_> = kept
                    .into_iter()
                    .flat_map(|kept| values(self.needed(), kept))
                    .collect();
                gradient(&self.functions, &values, widened(grad))
            })
        });
    }
}

/// The gradient of the operand of functions, from the operand and the results of those that need them.
fn gradient<B: Backend>(
    functions: &[Function],
    values: &[AmpTensor<B>],
    mut grad: AmpTensor<B>,
) -> AmpTensor<B> {
    for (i, function) in functions.iter().enumerate().rev() {
        grad = match function {
            Function::Sigmoid => sigmoid_backward(values[i + 1].clone(), grad),
            Function::Tanh => tanh_gradient(values[i + 1].clone(), grad),
            Function::AtLeast(bound) => {
                let below = is_lower(values[i].clone(), *bound);
                mask_fill(grad, below, 0.into())
            }
            Function::AtMost(bound) => {
                let above = is_greater(values[i].clone(), *bound);
                mask_fill(grad, above, 0.into())
            }
            Function::Plus(_) => grad,
            Function::Times(scalar) => mul_scalar(grad, *scalar),
            Function::Over(scalar) => div_scalar(grad, *scalar),
            Function::Neg => neg(grad),
        };
    }
    grad
}

/// A gate, which is functions of a half tensor, times the state of a recurrence, in FP32. The operand of the gate is kept in
/// half, and the state rounded to `kept`: no later state depends on this rounding. The gradient of the state is multiplied by
/// the gate of FP32, at each step.
#[derive(Debug, Clone)]
pub(crate) struct Gated {
    pub functions: Vec<Function>,
    pub kept: DType,
}

/// What both gradients need: shapes of the operands, and the operands that are kept.
#[derive(Debug, Clone)]
pub(crate) struct GateAndState<B: Backend> {
    shapes: [Shape; 2],
    /// The dtype of the gate's operand.
    dtype: DType,
    operand: Option<AmpTensor<B>>,
    state: Option<AmpTensor<B>>,
}

impl<B: Backend> Step<B, 2> for Gated {
    type Kept = GateAndState<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Operands;

    fn forward(&self, [operand, state]: Operands<B, 2>) -> AmpTensor<B> {
        mul(result(&self.functions, operand), state)
    }

    fn keep(
        &self,
        [operand, state]: Operands<B, 2>,
        [gate_tracked, state_tracked]: [bool; 2],
    ) -> (Self::Kept, AmpTensor<B>) {
        let is_needed = state_tracked || !self.functions.is_empty();
        let kept = GateAndState {
            shapes: [operand.shape(), state.shape()],
            dtype: operand.dtype(),
            operand: is_needed.then(|| operand.clone()),
            state: gate_tracked.then(|| cast(state.clone(), self.kept)),
        };
        (kept, self.forward([operand, state]))
    }

    fn retrieve(&self, [operand, state]: Operands<B, 2>) -> Self::Kept {
        GateAndState {
            shapes: [operand.shape(), state.shape()],
            dtype: operand.dtype(),
            operand: Some(operand),
            state: Some(state),
        }
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let GateAndState {
            shapes: [of_gate, of_state],
            dtype,
            operand,
            state,
        } = ops.state;
        let functions = self.functions;
        let values = operand.map(|operand| values(&functions, operand));
        let values = values.unwrap_or_default();
        let gate = values.last().cloned();
        let kept = "kept where this gradient is wanted";
        binary::<Amp<B>, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                operand_grad(grad, dtype, |grad| {
                    let state = finite(state.expect(kept));
                    let grad = reduced(mul(widened(grad), state), &of_gate);
                    gradient(&functions, &values, grad)
                })
            },
            |grad| {
                operand_grad(grad, DType::F32, |grad| {
                    reduced(mul(widened(grad), gate.expect(kept)), &of_state)
                })
            },
        );
    }
}

/// The state in FP32. One that was beyond f16 is infinite where it was kept.
fn finite<B: Backend>(state: AmpTensor<B>) -> AmpTensor<B> {
    let is_f16 = state.dtype() == DType::F16;
    let state = widened(state);
    match is_f16 {
        true => {
            let largest = Precision::F16.largest();
            Amp::<B>::float_clamp(state, (-largest).into(), largest.into())
        }
        false => state,
    }
}
