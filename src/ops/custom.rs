//! The user's own operations.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use burn_amp_core::policy::Role;

use crate::Amp;
use crate::call::checked;
use crate::policy::{Class, Op};
use crate::tensor::Side;

impl<B: Backend, S: Side<B>> Amp<B, S> {
    /// Runs your own operation on the backend below, under the policy of its `class`. Use it where
    /// `Amp<B, S>` implements a backend trait of yours through `B`, on both sides of autodiff. The casts are on the
    /// tape.
    ///
    /// [`Class::LowerPrecision`] is PyTorch's `custom_fwd(cast_inputs=torch.float16)` with the half
    /// dtype in force; [`Class::Fp32`] is `custom_fwd(cast_inputs=torch.float32)`. On
    /// [`AmpAutodiff`](crate::AmpAutodiff), a [`Fp32Inside`](Class::Fp32Inside) operation must be
    /// one step of the tape. If autodiff composes the operation of others, use `Fp32`.
    ///
    /// `op` gets the operands, of any shape, in the given order and in the dtype of the class, and
    /// returns its results. `op` captures int and bool tensors. Anomaly detection reports the
    /// operation as `name`.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::prelude::*;
    /// use burn::tensor::ops::{FloatTensor, FloatTensorOps};
    /// use burn_amp::{Amp, Side, policy::Class};
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
    /// impl<B: MyOps, S: Side<B>> MyOps for Amp<B, S> {
    ///     fn softplus(x: FloatTensor<Self>) -> FloatTensor<Self> {
    ///         // eˣ leaves f16 at 12.
    ///         let [y] = Self::custom_op("softplus", Class::Fp32, [x], |[x]| [B::softplus(x)]);
    ///         y
    ///     }
    /// }
    /// ```
    ///
    /// `examples/custom_op` shows an operation with a gradient of its own.
    ///
    /// # Panics
    ///
    /// If a region requests a precision that the device does not support, as for every operation. A
    /// call without operands does not compile.
    pub fn custom_op<const N: usize, const M: usize>(
        name: &'static str,
        class: Class,
        operands: [FloatTensor<Self>; N],
        op: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
    ) -> [FloatTensor<Self>; M] {
        checked(Op::custom(name, class, Role::Forward), operands, op)
    }

    /// As [`custom_op`](Amp::custom_op), for the backward function of such an operation, which
    /// takes a gradient and the tensors kept for it. The pass follows the forward pass:
    /// `LowerPrecision` runs in half if an operand is half, and `Fp32Inside` returns the widest
    /// operand dtype.
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
        checked(Op::custom(name, class, Role::Backward), operands, op)
    }
}
