//! Two operations with gradients of their own: the trait, and its implementation on each layer.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::TensorPrimitive;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn_amp::policy::Class;
use burn_amp::{Amp, Side};

/// The operations on any backend, composed of its own. A backend with kernels for them overrides these.
pub trait MyOps: Backend {
    /// A gated linear unit: (x w) σ(x v) of `[n, k]`, `[k, m]` and `[k, m]`. Returns the unit, x w
    /// and σ(x v).
    fn gated_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        let value = Self::float_matmul(x.clone(), w);
        let gate = Self::sigmoid(Self::float_matmul(x, v));
        let y = Self::float_mul(value.clone(), gate.clone());
        [y, value, gate]
    }

    /// The gradients of x, w and v, given x w, σ(x v) and the gradient of the result.
    fn gated_linear_backward(
        [x, w, v, value, gate, grad]: [FloatTensor<Self>; 6],
    ) -> [FloatTensor<Self>; 3] {
        let of_value = Self::float_mul(grad.clone(), gate.clone());
        // σ' = σ (1 - σ)
        let rest = Self::float_add_scalar(Self::float_neg(gate), 1.0.into());
        let of_gate = Self::float_mul(Self::float_mul(of_value.clone(), value), rest);
        let x = Self::float_transpose(x);
        let of_x = Self::float_add(
            Self::float_matmul(of_value.clone(), Self::float_transpose(w)),
            Self::float_matmul(of_gate.clone(), Self::float_transpose(v)),
        );
        let of_w = Self::float_matmul(x.clone(), of_value);
        [of_x, of_w, Self::float_matmul(x, of_gate)]
    }

    /// ln((eˣ + e⁻ˣ) / 2), whose exponential leaves f16 at 12.
    fn log_cosh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let sum = Self::float_add(
            Self::float_exp(x.clone()),
            Self::float_exp(Self::float_neg(x)),
        );
        Self::float_log(Self::float_mul_scalar(sum, 0.5.into()))
    }

    /// The gradient of x, given that of the result.
    fn log_cosh_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_mul(grad, Self::float_tanh(x))
    }
}

impl MyOps for Flex {}

/// In mixed precision, above autodiff and below it: the operations with matrix products run in half,
/// those with an exponential in FP32. The kernels are those of the backend below.
impl<B: MyOps, S: Side<B>> MyOps for Amp<B, S> {
    fn gated_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        let class = Class::LowerPrecision;
        Self::custom_op("gated_linear", class, [x, w, v], |[x, w, v]| {
            B::gated_linear(x, w, v)
        })
    }

    fn gated_linear_backward(tensors: [FloatTensor<Self>; 6]) -> [FloatTensor<Self>; 3] {
        let class = Class::LowerPrecision;
        Self::custom_backward_op("gated_linear_backward", class, tensors, |tensors| {
            B::gated_linear_backward(tensors)
        })
    }

    fn log_cosh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [y] = Self::custom_op("log_cosh", Class::Fp32, [x], |[x]| [B::log_cosh(x)]);
        y
    }

    fn log_cosh_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let name = "log_cosh_backward";
        let [of_x] = Self::custom_backward_op(name, Class::Fp32, [x, grad], |[x, grad]| {
            [B::log_cosh_backward(x, grad)]
        });
        of_x
    }
}

/// On the tape: plain Burn, without any mixed-precision code.
impl<B: MyOps, C: CheckpointStrategy> MyOps for Autodiff<B, C> {
    fn gated_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        let parents = [&x, &w, &v].map(|tensor| tensor.node.clone());
        let step = GatedLinear.prepare::<C>(parents);
        let (y, value, gate) = match step.compute_bound().stateful() {
            OpsKind::Tracked(mut step) => {
                let kept = [&x, &w, &v].map(|tensor| step.checkpoint(tensor));
                let [y, value, gate] = B::gated_linear(x.primitive, w.primitive, v.primitive);
                let state = (kept, value.clone(), gate.clone());
                (step.finish(state, y), value, gate)
            }
            OpsKind::UnTracked(step) => {
                let [y, value, gate] = B::gated_linear(x.primitive, w.primitive, v.primitive);
                (step.finish(y), value, gate)
            }
        };
        // Only the result has a gradient.
        [y, Self::from_inner(value), Self::from_inner(gate)]
    }

    fn log_cosh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let step = LogCosh.prepare::<C>([x.node.clone()]);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(mut step) => {
                let kept = step.checkpoint(&x);
                step.finish(kept, B::log_cosh(x.primitive))
            }
            OpsKind::UnTracked(step) => step.finish(B::log_cosh(x.primitive)),
        }
    }
}

#[derive(Debug)]
struct GatedLinear;

impl<B: MyOps> Backward<B, 3> for GatedLinear {
    type State = ([NodeId; 3], FloatTensor<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let (kept, value, gate) = ops.state;
        let [x, w, v] = kept.map(|node| checkpointer.retrieve_node_output(node));
        let grad = grads.consume::<B>(&ops.node);
        let of_parents = B::gated_linear_backward([x, w, v, value, gate, grad]);
        for (parent, grad) in ops.parents.into_iter().zip(of_parents) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct LogCosh;

impl<B: MyOps> Backward<B, 1> for LogCosh {
    type State = NodeId;

    fn backward(self, ops: Ops<NodeId, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let x = checkpointer.retrieve_node_output(ops.state);
        let grad = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::log_cosh_backward(x, grad));
        }
    }
}

/// A gated linear unit: (x w) σ(x v) of `[n, k]`, `[k, m]` and `[k, m]`.
pub fn gated_linear<B: MyOps>(x: Tensor<B, 2>, w: Tensor<B, 2>, v: Tensor<B, 2>) -> Tensor<B, 2> {
    let [y, ..] = B::gated_linear(primitive(x), primitive(w), primitive(v));
    tensor(y)
}

/// ln cosh x, element by element.
pub fn log_cosh<B: MyOps, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::log_cosh(primitive(x)))
}

fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}
