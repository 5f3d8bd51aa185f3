//! The decorator's type. [`backend`](crate::backend) and [`ops`](crate::ops) make it a backend;
//! they build on the tape's formulas, which are written for this type.

use std::marker::PhantomData;

use super::Below;

/// Automatic mixed precision on a backend.
///
/// Each operation runs in the precision that the [policy](crate::policy) gives it: contractions in
/// f16 or bf16, sensitive operations in FP32. Parameters, gradients and data read back are FP32.
/// Operations on only F64 tensors, and on integer and boolean tensors, are `B`'s own, as are the
/// devices. A float tensor is an `AmpTensor`.
///
/// For inference use `Amp<B>`; for training [`AmpAutodiff<B>`](crate::AmpAutodiff), which is an `Amp` on each
/// [`Side`](crate::Side) of Burn's autodiff.
#[derive(Debug, Clone, Copy, Default)]
pub struct Amp<B, S = Below> {
    layer: PhantomData<(B, S)>,
}
