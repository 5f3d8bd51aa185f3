//! Activations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::{Call, float_ops, op, own_ops};
use crate::{Amp, AmpTensor};

impl<B: Backend> ActivationOps<Self> for Amp<B> {
    own_ops! {
        prelu([tensor], [alpha]) -> FloatTensor => prelu(tensor, alpha);
    }

    float_ops! { Forward;
        relu([tensor]) -> FloatTensor;
        leaky_relu([tensor], {negative_slope}) -> FloatTensor;
        gelu([tensor]) -> FloatTensor;
        sigmoid([tensor]) -> FloatTensor;
        hard_sigmoid([tensor], {alpha}, {beta}) -> FloatTensor;
        log_sigmoid([tensor]) -> FloatTensor;
        softmax([tensor], dim: usize) -> FloatTensor;
        log_softmax([tensor], dim: usize) -> FloatTensor;
        softmin([tensor], dim: usize) -> FloatTensor;
    }

    float_ops! { Backward;
        relu_backward([output], [grad]) -> FloatTensor;
        gelu_backward([x], [grad]) -> FloatTensor;
        sigmoid_backward([output], [grad]) -> FloatTensor;
        log_sigmoid_backward([x], [grad]) -> FloatTensor;
    }
}

/// Not a contraction: a device that only multiplies matrices in half runs `prelu` in FP32.
fn prelu<B: Backend>(tensor: AmpTensor<B>, alpha: AmpTensor<B>) -> AmpTensor<B> {
    let operands = [&tensor, &alpha];
    let mut call = Call::new(op!(prelu), &operands);
    if call.is_bare_contraction() {
        call = Call::new(
            op!(prelu, "on a device that only contracts in half"),
            &operands,
        );
    }
    let (tensor, alpha) = (call.operand(tensor), call.operand(alpha));
    call.result(B::prelu(tensor, alpha))
}
