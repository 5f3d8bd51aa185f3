//! The formulas that the upper layer records itself, as custom backward steps of Burn's autodiff: a file each.
//!
//! A formula runs on the lower [`Amp`](crate::Amp), whose policy keeps each operation in FP32.

mod activation;
mod arithmetic;
mod cast;
mod dropout;
mod fused;
mod layer_norm;
mod linear;
mod power;
mod quotient;
mod recomputed;
mod reduction;
mod softmax;
mod sum;
mod tape;

use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Ops, binary, unary};
use burn_backend::{Backend, DType, Shape, TensorMetadata};

use crate::call::{
    add, cast, div, exp, mul, mul_scalar, neg, reshape, rows, sub, sum_dim, widened,
};
use crate::policy::is_half;
use crate::tensor::{Checkpoint, Operands, Step, TensorFlags};
use crate::{Amp, AmpTensor};
use fused::{fused_max_dim, fused_row_sum, reduces_fused};

pub(crate) use activation::Activation;
pub(crate) use arithmetic::{Arithmetic, Product};
pub(super) use cast::{Cast, alias};
pub(super) use dropout::record_dropout;
pub(crate) use layer_norm::LayerNorm;
pub(crate) use linear::Linear;
pub(crate) use power::Power;
pub(crate) use quotient::HalfQuotient;
pub(crate) use recomputed::{Gated, Recomputed};
pub(crate) use reduction::{Reduced, Reduction};
pub(crate) use softmax::{Softmax, SoftmaxKind};
pub(crate) use sum::Sum;
pub(super) use tape::{TapeTensor, record};
