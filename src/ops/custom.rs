//! Operations of a user's own.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::{Call, Op};
use crate::policy::Class;
use crate::{Amp, AmpTensor};

impl<B: Backend> Amp<B> {
    /// Runs an operation of your own on the backend below, as the policy runs one of its `class`:
    /// for a backend trait of yours that `Amp<B>` implements by that of `B`. The casts are on the
    /// tape.
    ///
    /// [`Class::Half`] is PyTorch's `custom_fwd(cast_inputs=torch.float16)`, with the half dtype
    /// that is in force, and [`Class::Full`] its `custom_fwd(cast_inputs=torch.float32)`. A
    /// [`Wide`](Class::Wide) operation on [`AmpAutodiff`](crate::AmpAutodiff) has to be one step of
    /// the tape; one that autodiff composes of others is `Full`.
    ///
    /// `op` gets the operands of any shape in the order given, in the dtype that the class says,
    /// and gives its results; int and bool tensors it captures. `name` is what anomaly detection
    /// calls it.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::prelude::*;
    /// use burn::tensor::ops::{FloatTensor, FloatTensorOps};
    /// use burn_amp::{Amp, policy::Class};
    ///
    /// trait MyOps: Backend {
    ///     /// ln(1 + eˣ).
    ///     fn softplus(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// }
    ///
    /// impl MyOps for Flex {
    ///     fn softplus(x: FloatTensor<Self>) -> FloatTensor<Self> {
    ///         Flex::float_log1p(Flex::float_exp(x)) // or a kernel
    ///     }
    /// }
    ///
    /// impl<B: MyOps> MyOps for Amp<B> {
    ///     fn softplus(x: FloatTensor<Self>) -> FloatTensor<Self> {
    ///         // eˣ leaves f16 at 12.
    ///         let [y] = Amp::<B>::custom_op("softplus", Class::Full, [x], |[x]| [B::softplus(x)]);
    ///         y
    ///     }
    /// }
    /// ```
    ///
    /// With a gradient of your own it is `examples/custom_op.rs`.
    ///
    /// # Panics
    ///
    /// As every operation, where a region asks for a precision that the device cannot do. Does not
    /// compile without operands.
    pub fn custom_op<const N: usize, const M: usize>(
        name: &'static str,
        class: Class,
        operands: [FloatTensor<Self>; N],
        op: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
    ) -> [FloatTensor<Self>; M] {
        custom(Call::new, Op::new(name, class), operands, op)
    }

    /// As [`custom_op`](Amp::custom_op) for the backward function of such an operation, which takes
    /// a gradient and what was kept for it. A backward pass follows the forward pass: `Half` is
    /// half where one of the operands is, and `Wide` gives the widest of their dtypes.
    ///
    /// # Panics
    ///
    /// As [`custom_op`](Amp::custom_op).
    pub fn custom_backward_op<const N: usize, const M: usize>(
        name: &'static str,
        class: Class,
        operands: [FloatTensor<Self>; N],
        op: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
    ) -> [FloatTensor<Self>; M] {
        custom(Call::backward, Op::new(name, class), operands, op)
    }
}

fn custom<B: Backend, const N: usize, const M: usize>(
    decide: impl FnOnce(Op, &[&AmpTensor<B>]) -> Call,
    named: Op,
    operands: [AmpTensor<B>; N],
    op: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
) -> [AmpTensor<B>; M] {
    const { assert!(N > 0, "an operation needs an operand") };
    let call = decide(named, &operands.each_ref());
    let operands = operands.map(|operand| call.operand(operand));
    call.run(|| op(operands)).map(|result| call.result(result))
}
