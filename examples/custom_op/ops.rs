//! Two operations with gradients of their own: the trait, and what it is on each layer.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::TensorPrimitive;
use burn::tensor::ops::FloatTensor;
use burn_amp::Amp;
use burn_amp::policy::Class;

/// The operations on any backend, composed of its own. One that has kernels for them overrides
/// these.
pub trait MyOps: Backend {
    /// tanh(x w) of `[n, k]` and `[k, m]`.
    fn tanh_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_tanh(Self::float_matmul(x, w))
    }

    /// The gradients of x and w, given the result and its gradient.
    fn tanh_linear_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        y: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let square = Self::float_mul(y.clone(), y);
        let slope = Self::float_add_scalar(Self::float_neg(square), 1.0.into());
        let grad = Self::float_mul(grad, slope);
        let of_x = Self::float_matmul(grad.clone(), Self::float_transpose(w));
        let of_w = Self::float_matmul(Self::float_transpose(x), grad);
        [of_x, of_w]
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

/// In mixed precision: what has a matrix product computes in half, what has an exponential in FP32.
/// The kernels are those of the backend below.
impl<B: MyOps> MyOps for Amp<B> {
    fn tanh_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        let [y] = Amp::custom_op("tanh_linear", Class::LowerPrecision, [x, w], |[x, w]| {
            [B::tanh_linear(x, w)]
        });
        y
    }

    fn tanh_linear_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        y: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let name = "tanh_linear_backward";
        Amp::custom_backward_op(
            name,
            Class::LowerPrecision,
            [x, w, y, grad],
            |[x, w, y, grad]| B::tanh_linear_backward(x, w, y, grad),
        )
    }

    fn log_cosh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [y] = Amp::custom_op("log_cosh", Class::Fp32, [x], |[x]| [B::log_cosh(x)]);
        y
    }

    fn log_cosh_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let name = "log_cosh_backward";
        let [of_x] = Amp::custom_backward_op(name, Class::Fp32, [x, grad], |[x, grad]| {
            [B::log_cosh_backward(x, grad)]
        });
        of_x
    }
}

/// On the tape: plain Burn, without any mixed-precision code.
impl<B: MyOps, C: CheckpointStrategy> MyOps for Autodiff<B, C> {
    fn tanh_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        let step = TanhLinear.prepare::<C>([x.node.clone(), w.node.clone()]);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(mut step) => {
                let kept = (step.checkpoint(&x), step.checkpoint(&w));
                let y = B::tanh_linear(x.primitive, w.primitive);
                step.finish((kept.0, kept.1, y.clone()), y)
            }
            OpsKind::UnTracked(step) => step.finish(B::tanh_linear(x.primitive, w.primitive)),
        }
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
struct TanhLinear;

impl<B: MyOps> Backward<B, 2> for TanhLinear {
    type State = (NodeId, NodeId, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let (x, w, y) = ops.state;
        let x = checkpointer.retrieve_node_output(x);
        let w = checkpointer.retrieve_node_output(w);
        let grad = grads.consume::<B>(&ops.node);
        let of_parents = B::tanh_linear_backward(x, w, y, grad);
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

/// tanh(x w) of `[n, k]` and `[k, m]`.
pub fn tanh_linear<B: MyOps>(x: Tensor<B, 2>, w: Tensor<B, 2>) -> Tensor<B, 2> {
    tensor(B::tanh_linear(primitive(x), primitive(w)))
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
