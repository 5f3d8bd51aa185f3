//! Activations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::{Call, backward_ops, class, float_ops, scalar_ops};
use crate::Amp;
use crate::policy::Class;

impl<B: Backend> ActivationOps<Self> for Amp<B> {
    float_ops! {
        relu [tensor] ();
        gelu [tensor] ();
        sigmoid [tensor] ();
        log_sigmoid [tensor] ();
        softmax [tensor] (dim: usize);
        log_softmax [tensor] (dim: usize);
        softmin [tensor] (dim: usize);
    }

    backward_ops! {
        relu_backward [output, grad] ();
        gelu_backward [x, grad] ();
        sigmoid_backward [output, grad] ();
        log_sigmoid_backward [x, grad] ();
    }

    scalar_ops! {
        leaky_relu [tensor] (negative_slope) -> FloatTensor;
        hard_sigmoid [tensor] (alpha, beta) -> FloatTensor;
    }

    /// Not a contraction: on a device that only multiplies matrices in half it runs in FP32.
    fn prelu(tensor: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let call = Call::new(class!(prelu), &[&tensor, &alpha]);
        let call = match call.is_bare_contraction(&tensor) {
            true => Call::new(Class::Full, &[&tensor, &alpha]),
            false => call,
        };
        let (tensor, alpha) = (call.operand(tensor), call.operand(alpha));
        call.result(call.run(|| B::prelu(tensor, alpha)))
    }
}
