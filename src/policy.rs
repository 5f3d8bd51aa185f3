//! The op policy: the table that says which precision each operation runs in. To change an
//! operation's precision, change its line in the table of `burn-amp-core`.
//!
//! The choices follow the lists of PyTorch's autocast for CUDA; the guide's
//! [reference](crate::guide::ops) compares the two. Where they follow from measurements,
//! [`burn_amp_core::policy`] has the figures.

use burn_backend::DType;

use burn_amp_core::FloatDType;
#[doc(inline)]
pub use burn_amp_core::policy::{Class, Row, rows};
pub(crate) use burn_amp_core::policy::{
    HalfSupport, Support, class, class_when, holds, is_half, is_recorded, plan,
};

/// How the policy is applied.
pub(crate) type Mode = burn_amp_core::policy::Mode<DType>;

/// The float dtypes among an operation's operands.
pub(crate) type Operands = burn_amp_core::policy::Operands<DType>;

/// The casts of an operation's operands and result.
pub(crate) type Plan = burn_amp_core::policy::Plan<DType>;

/// The half dtypes.
pub(crate) const HALVES: [DType; 2] = <DType as FloatDType>::HALVES;
