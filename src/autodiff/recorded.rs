//! Operations that the upper layer records itself, as custom backward steps of Burn's autodiff.
//!
//! The operations run on the lower [`Amp`], whose policy keeps each formula in FP32. With gradient
//! checkpointing, an operation keeps its operands' nodes instead of tensors, and recomputes.

use std::any::TypeId;
use std::fmt::{self, Debug};
use std::marker::PhantomData;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, binary, broadcast_shape, unary};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{
    Backend, BoolDType, DType, FloatDType, Shape, TensorMetadata, get_device_settings,
};

use super::tape::{Arithmetic, Softmax, TapeExtension};
use crate::policy::is_half;
use crate::tensor::converted;
use crate::{Amp, AmpTensor};

/// The tape of `Autodiff<Amp<B>, C>`.
pub(super) struct Recorded<B, C>(pub(super) PhantomData<fn() -> (B, C)>);

/// What a forward step keeps for its backward step.
#[derive(Debug, Clone)]
enum Kept<T, const N: usize> {
    Here(T),
    /// Recomputed from the outputs of these nodes.
    Parents([NodeId; N]),
}

/// Whether the checkpointing strategy recomputes what it can.
fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() != TypeId::of::<NoCheckpointing>()
}

impl<B: Backend, C: CheckpointStrategy> TapeExtension<Autodiff<Amp<B>, C>> for Recorded<B, C> {
    fn is_tracked(&self, tensor: &FloatTensor<Autodiff<Amp<B>, C>>) -> bool {
        !tensor.node.requirement.is_none()
    }

    fn cast(
        &self,
        tensor: FloatTensor<Autodiff<Amp<B>, C>>,
        dtype: DType,
    ) -> FloatTensor<Autodiff<Amp<B>, C>> {
        let recompute = Recompute::new([tensor.node.id], move |[tensor]: [AmpTensor<B>; 1]| {
            cast(tensor, dtype)
        });
        let prep = CastStep
            .prepare::<C>([tensor.node.clone()])
            .memory_bound()
            .retro_forward(recompute)
            .parents([&tensor])
            .stateful();
        match prep {
            OpsKind::Tracked(prep) => prep.finish(tensor.dtype(), cast(tensor.primitive, dtype)),
            OpsKind::UnTracked(prep) => prep.finish(cast(tensor.primitive, dtype)),
        }
    }

    fn arithmetic(
        &self,
        op: Arithmetic,
        [lhs, rhs]: [FloatTensor<Autodiff<Amp<B>, C>>; 2],
        [keep_lhs, keep_rhs]: [DType; 2],
    ) -> Option<FloatTensor<Autodiff<Amp<B>, C>>> {
        if recomputes::<C>() {
            return None;
        }
        let (left, right) = (lhs.primitive, rhs.primitive);
        let out = arithmetic(op, left.clone(), right.clone());
        let prep = ArithmeticStep
            .prepare::<C>([lhs.node.clone(), rhs.node.clone()])
            .compute_bound()
            .stateful();
        Some(match prep {
            OpsKind::Tracked(prep) => {
                let [lhs_tracked, rhs_tracked] =
                    [lhs.node, rhs.node].map(|node| !node.requirement.is_none());
                let divides = op == Arithmetic::Div;
                let state = ArithmeticState {
                    op,
                    shapes: [left.shape(), right.shape()],
                    dtypes: [left.dtype(), right.dtype()],
                    lhs: rhs_tracked.then(|| cast(left, keep_lhs)),
                    rhs: (lhs_tracked || divides).then(|| cast(right, keep_rhs)),
                };
                prep.finish(state, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
        })
    }

    fn square(
        &self,
        tensor: FloatTensor<Autodiff<Amp<B>, C>>,
        kept: DType,
    ) -> Option<FloatTensor<Autodiff<Amp<B>, C>>> {
        if recomputes::<C>() {
            return None;
        }
        let operand = tensor.primitive;
        let out = arithmetic(Arithmetic::Mul, operand.clone(), operand.clone());
        let prep = SquareStep
            .prepare::<C>([tensor.node.clone()])
            .compute_bound()
            .stateful();
        Some(match prep {
            OpsKind::Tracked(prep) => {
                let dtype = operand.dtype();
                prep.finish((cast(operand, kept), dtype), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
        })
    }

    fn dropout(
        &self,
        tensor: &FloatTensor<Autodiff<Amp<B>, C>>,
        noise: &FloatTensor<Autodiff<Amp<B>, C>>,
    ) -> Option<FloatTensor<Autodiff<Amp<B>, C>>> {
        let bool_dtype = get_device_settings::<B>(&tensor.primitive.device()).bool_dtype;
        let fits = tensor.primitive.shape() == noise.primitive.shape();
        let tracked = !tensor.node.requirement.is_none();
        if bool_dtype == BoolDType::U32 || !fits || !tracked {
            return None;
        }
        let noise = noise.primitive.clone();
        let dropped = Amp::<B>::float_equal_elem(noise.clone(), 0.into(), bool_dtype);
        let out = Amp::<B>::float_mul(tensor.primitive.clone(), noise);
        let (dtype, out_dtype) = (tensor.dtype(), out.dtype());
        let mask = dropped.clone();
        let recompute = Recompute::new([tensor.node.id], move |[tensor]: [AmpTensor<B>; 1]| {
            let out = Amp::<B>::float_mask_fill(tensor, mask.clone(), 0.into());
            cast(out, out_dtype)
        });
        let prep = DropoutStep
            .prepare::<C>([tensor.node.clone()])
            .memory_bound()
            .retro_forward(recompute)
            .parents([tensor])
            .stateful();
        Some(match prep {
            OpsKind::Tracked(prep) => prep.finish((dropped, dtype), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        })
    }

    fn relu(&self, tensor: FloatTensor<Autodiff<Amp<B>, C>>) -> FloatTensor<Autodiff<Amp<B>, C>> {
        let recompute = Recompute::new([tensor.node.id], |[tensor]: [AmpTensor<B>; 1]| {
            Amp::<B>::relu(tensor)
        });
        let prep = ReluStep
            .prepare::<C>([tensor.node.clone()])
            .memory_bound()
            .retro_forward(recompute)
            .parents([&tensor])
            .stateful();
        match prep {
            OpsKind::Tracked(mut prep) => {
                let nodes = recomputes::<C>().then(|| [prep.checkpoint(&tensor)]);
                let out = Amp::<B>::relu(tensor.primitive);
                let kept = match nodes {
                    Some(nodes) => Kept::Parents(nodes),
                    None => Kept::Here(out.clone()),
                };
                prep.finish(kept, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(Amp::<B>::relu(tensor.primitive)),
        }
    }

    fn softmax(
        &self,
        kind: Softmax,
        tensor: FloatTensor<Autodiff<Amp<B>, C>>,
        dim: usize,
        kept: DType,
    ) -> FloatTensor<Autodiff<Amp<B>, C>> {
        let recompute = Recompute::new([tensor.node.id], move |[tensor]: [AmpTensor<B>; 1]| {
            softmax(kind, tensor, dim)
        });
        let prep = SoftmaxStep
            .prepare::<C>([tensor.node.clone()])
            .memory_bound()
            .retro_forward(recompute)
            .parents([&tensor])
            .stateful();
        match prep {
            OpsKind::Tracked(mut prep) => {
                let dtype = tensor.dtype();
                let nodes = recomputes::<C>().then(|| [prep.checkpoint(&tensor)]);
                let out = softmax(kind, tensor.primitive, dim);
                let state = match nodes {
                    Some(nodes) => Kept::Parents(nodes),
                    None => Kept::Here(cast(probabilities(kind, out.clone()), kept)),
                };
                prep.finish((state, kind, dim, dtype), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(softmax(kind, tensor.primitive, dim)),
        }
    }

    fn layer_norm(
        &self,
        tensor: FloatTensor<Autodiff<Amp<B>, C>>,
        gamma: FloatTensor<Autodiff<Amp<B>, C>>,
        epsilon: f64,
        kept: DType,
    ) -> FloatTensor<Autodiff<Amp<B>, C>> {
        let recompute = Recompute::new(
            [tensor.node.id, gamma.node.id],
            move |[tensor, gamma]: [AmpTensor<B>; 2]| scaled(normalized(tensor, epsilon).0, gamma),
        );
        let prep = LayerNormStep
            .prepare::<C>([tensor.node.clone(), gamma.node.clone()])
            .memory_bound()
            .retro_forward(recompute)
            .parents([&tensor, &gamma])
            .stateful();
        match prep {
            OpsKind::Tracked(mut prep) => {
                let dtypes = [tensor.dtype(), gamma.dtype()];
                let nodes =
                    recomputes::<C>().then(|| [prep.checkpoint(&tensor), prep.checkpoint(&gamma)]);
                let (unit, deviation) = normalized(tensor.primitive, epsilon);
                let state = match nodes {
                    Some(nodes) => Kept::Parents(nodes),
                    None => {
                        let unit = cast(unit.clone(), kept);
                        Kept::Here([unit, deviation, gamma.primitive.clone()])
                    }
                };
                prep.finish((state, epsilon, dtypes), scaled(unit, gamma.primitive))
            }
            OpsKind::UnTracked(prep) => {
                let (unit, _) = normalized(tensor.primitive, epsilon);
                prep.finish(scaled(unit, gamma.primitive))
            }
        }
    }
}

/// Recomputes an operation with `N` operands.
struct Recompute<B, F, const N: usize> {
    parents: [NodeId; N],
    forward: F,
    backend: PhantomData<fn(B)>,
}

impl<B: Backend, F, const N: usize> Recompute<B, F, N>
where
    F: Fn([AmpTensor<B>; N]) -> AmpTensor<B>,
{
    fn new(parents: [NodeId; N], forward: F) -> Self {
        Self {
            parents,
            forward,
            backend: PhantomData,
        }
    }
}

impl<B: Backend, F, const N: usize> RetroForward for Recompute<B, F, N>
where
    F: Fn([AmpTensor<B>; N]) -> AmpTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let operands = self.parents.map(|parent| states.get_state(&parent));
        states.save(out_node, (self.forward)(operands));
    }
}

impl<B, F, const N: usize> Debug for Recompute<B, F, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Recompute").field(&self.parents).finish()
    }
}

fn cast<B: Backend>(tensor: AmpTensor<B>, dtype: DType) -> AmpTensor<B> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => Amp::<B>::float_cast(tensor, dtype.into()),
    }
}

#[derive(Debug)]
struct CastStep;

impl<B: Backend> Backward<Amp<B>, 1> for CastStep {
    type State = DType;

    fn backward(self, ops: Ops<DType, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dtype = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| cast(grad, dtype));
    }
}

fn arithmetic<B: Backend>(op: Arithmetic, lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    let lhs = match is_half(lhs.dtype()) {
        true => cast(lhs, DType::F32),
        false => lhs,
    };
    match op {
        Arithmetic::Mul => Amp::<B>::float_mul(lhs, rhs),
        Arithmetic::Div => Amp::<B>::float_div(lhs, rhs),
    }
}

#[derive(Debug)]
struct ArithmeticStep;

#[derive(Debug, Clone)]
struct ArithmeticState<T> {
    op: Arithmetic,
    shapes: [Shape; 2],
    dtypes: [DType; 2],
    /// Kept if `rhs` needs a gradient.
    lhs: Option<T>,
    /// Kept if `lhs` needs a gradient. A quotient needs `rhs` for both gradients.
    rhs: Option<T>,
}

impl<B: Backend> Backward<Amp<B>, 2> for ArithmeticStep {
    type State = ArithmeticState<AmpTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        type A<B> = Amp<B>;
        let state = ops.state;
        let [left, right] = state.shapes;
        let [lhs_dtype, rhs_dtype] = state.dtypes;
        let (lhs, rhs) = (state.lhs, state.rhs);
        let divisor = rhs.clone();
        let kept = "kept where the other gradient is wanted";
        binary::<Amp<B>, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                let grad = arithmetic(state.op, grad, rhs.expect(kept));
                cast(broadcast_shape::<Amp<B>>(grad, &left), lhs_dtype)
            },
            |grad| {
                let lhs = lhs.expect(kept);
                let grad = match state.op {
                    Arithmetic::Mul => A::<B>::float_mul(grad, lhs),
                    // -lhs / rhs², ordered so that no square or product overflows.
                    Arithmetic::Div => {
                        let divisor = divisor.expect(kept);
                        let out = arithmetic(state.op, lhs, divisor.clone());
                        let grad = A::<B>::float_mul(A::<B>::float_div(grad, divisor), out);
                        A::<B>::float_neg(grad)
                    }
                };
                let grad = broadcast_shape::<Amp<B>>(grad, &right);
                cast(grad, rhs_dtype)
            },
        );
    }
}

#[derive(Debug)]
struct SquareStep;

impl<B: Backend> Backward<Amp<B>, 1> for SquareStep {
    type State = (AmpTensor<B>, DType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (operand, dtype) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            let slope = Amp::<B>::float_mul_scalar(cast(operand, DType::F32), 2.into());
            cast(Amp::<B>::float_mul(grad, slope), dtype)
        });
    }
}

#[derive(Debug)]
struct DropoutStep;

impl<B: Backend> Backward<Amp<B>, 1> for DropoutStep {
    type State = (BoolTensor<B>, DType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (dropped, dtype) = ops.state;
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            cast(Amp::<B>::float_mask_fill(grad, dropped, 0.into()), dtype)
        });
    }
}

#[derive(Debug)]
struct ReluStep;

impl<B: Backend> Backward<Amp<B>, 1> for ReluStep {
    type State = Kept<AmpTensor<B>, 1>;

    /// `kept` is the result or the operand: both are positive where the gradient passes.
    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let kept = match ops.state {
            Kept::Here(out) => out,
            Kept::Parents([node]) => checkpointer.retrieve_node_output(node),
        };
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            Amp::<B>::relu_backward(kept, grad)
        });
    }
}

/// A softmax in FP32.
fn softmax<B: Backend>(kind: Softmax, tensor: AmpTensor<B>, dim: usize) -> AmpTensor<B> {
    match kind {
        Softmax::Plain => Amp::<B>::softmax(tensor, dim),
        Softmax::Log => Amp::<B>::log_softmax(tensor, dim),
        Softmax::Masked => masked_softmax::<Amp<B>>(tensor, dim),
    }
}

/// The softmax over a dimension, in FP32. A row of minus infinities gives zeros.
pub(crate) fn masked_softmax<B: Backend>(scores: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    let scores = match is_half(scores.dtype()) {
        true => converted::<B>(scores, FloatDType::F32),
        false => scores,
    };
    let info = scores.dtype().finfo().expect("a float dtype");
    let largest = B::float_max_dim(B::float_detach(scores.clone()), dim);
    let largest = B::float_clamp_min(largest, info.min.into());
    let exps = B::float_exp(B::float_sub(scores, largest));
    let sums = B::float_sum_dim(exps.clone(), dim);
    // A row sums to at least 1, because its largest score contributes 1. A masked row sums to 0. A
    // bound of 0.5 leaves room for rounding and, unlike the smallest positive number, can be
    // squared in the backward pass.
    B::float_div(exps, B::float_clamp_min(sums, 0.5.into()))
}

/// The probabilities from which the gradient of a softmax is computed.
fn probabilities<B: Backend>(kind: Softmax, out: AmpTensor<B>) -> AmpTensor<B> {
    match kind {
        Softmax::Plain | Softmax::Masked => out,
        Softmax::Log => Amp::<B>::float_exp(out),
    }
}

#[derive(Debug)]
struct SoftmaxStep;

impl<B: Backend> Backward<Amp<B>, 1> for SoftmaxStep {
    type State = (Kept<AmpTensor<B>, 1>, Softmax, usize, DType);

    /// With p the probabilities and s their sum: p (s g - sum(p g)), or s g - p sum(g) for the
    /// logarithm. Rounded probabilities do not sum to exactly 1. Using s cancels the rounding error
    /// of the p nearest to 1, so a confident prediction keeps its small gradient.
    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        type A<B> = Amp<B>;
        let (kept, kind, dim, dtype) = ops.state;
        let p = match kept {
            Kept::Here(p) => p,
            Kept::Parents([node]) => {
                let tensor = checkpointer.retrieve_node_output(node);
                probabilities(kind, softmax::<B>(kind, tensor, dim))
            }
        };
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            let total = A::<B>::float_sum_dim(p.clone(), dim);
            let whole = A::<B>::float_mul(grad.clone(), total);
            let grad = match kind {
                Softmax::Log => {
                    let sum = A::<B>::float_sum_dim(grad, dim);
                    A::<B>::float_sub(whole, A::<B>::float_mul(p, sum))
                }
                Softmax::Plain | Softmax::Masked => {
                    let sum = A::<B>::float_sum_dim(A::<B>::float_mul(grad, p.clone()), dim);
                    A::<B>::float_mul(A::<B>::float_sub(whole, sum), p)
                }
            };
            cast(grad, dtype)
        });
    }
}

/// A tensor normalized to mean 0 and variance 1 over its last dimension, and the deviation that
/// divided it. Both are in FP32 or wider.
fn normalized<B: Backend>(tensor: AmpTensor<B>, epsilon: f64) -> (AmpTensor<B>, AmpTensor<B>) {
    type A<B> = Amp<B>;
    let last = tensor.rank() - 1;
    let tensor = match is_half(tensor.dtype()) {
        true => cast(tensor, DType::F32),
        false => tensor,
    };
    let mean = A::<B>::float_mean_dim(tensor.clone(), last);
    let centered = A::<B>::float_sub(tensor, mean);
    let squares = A::<B>::float_mul(centered.clone(), centered.clone());
    let variance = A::<B>::float_mean_dim(squares, last);
    let deviation = A::<B>::float_sqrt(A::<B>::float_add_scalar(variance, epsilon.into()));
    (A::<B>::float_div(centered, deviation.clone()), deviation)
}

/// A normalized tensor times gamma, which has the length of the last dimension.
fn scaled<B: Backend>(unit: AmpTensor<B>, gamma: AmpTensor<B>) -> AmpTensor<B> {
    let gamma = along_last(gamma, unit.rank());
    Amp::<B>::float_mul(unit, gamma)
}

fn along_last<B: Backend>(vector: AmpTensor<B>, rank: usize) -> AmpTensor<B> {
    let mut shape = vec![1; rank];
    shape[rank - 1] = vector.shape().num_elements();
    Amp::<B>::float_reshape(vector, Shape::from(shape))
}

#[derive(Debug)]
struct LayerNormStep;

impl<B: Backend> Backward<Amp<B>, 2> for LayerNormStep {
    /// The normalized tensor, the deviation and gamma, or the nodes of the tensor and gamma.
    type State = (Kept<[AmpTensor<B>; 3], 2>, f64, [DType; 2]);

    /// With u the normalized tensor, d the deviation and h = gamma g:
    /// (h - mean(h) - u mean(h u)) / d for the tensor, and the sum of g u for gamma.
    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        type A<B> = Amp<B>;
        let (kept, epsilon, [dtype, gamma_dtype]) = ops.state;
        let [unit, deviation, gamma] = match kept {
            Kept::Here(kept) => kept,
            Kept::Parents([tensor, gamma]) => {
                let tensor = checkpointer.retrieve_node_output(tensor);
                let (unit, deviation) = normalized::<B>(tensor, epsilon);
                [unit, deviation, checkpointer.retrieve_node_output(gamma)]
            }
        };
        let (rank, shape) = (unit.rank(), gamma.shape());
        let for_gamma = unit.clone();
        binary::<Amp<B>, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                let grad = A::<B>::float_mul(grad, along_last(gamma, rank));
                let mean = A::<B>::float_mean_dim(grad.clone(), rank - 1);
                let product = A::<B>::float_mul(grad.clone(), unit.clone());
                let slope = A::<B>::float_mean_dim(product, rank - 1);
                let grad = A::<B>::float_sub(grad, mean);
                let grad = A::<B>::float_sub(grad, A::<B>::float_mul(unit, slope));
                cast(A::<B>::float_div(grad, deviation), dtype)
            },
            |grad| {
                let grad = A::<B>::float_mul(grad, for_gamma);
                let mut broadcast = vec![1; rank];
                broadcast[rank - 1] = shape.num_elements();
                let grad = broadcast_shape::<Amp<B>>(grad, &Shape::from(broadcast));
                cast(A::<B>::float_reshape(grad, shape), gamma_dtype)
            },
        );
    }
}
