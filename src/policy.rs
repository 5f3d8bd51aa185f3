//! The op policy: the table of the precision that each operation runs in. To change an
//! operation's precision, change its line in the table of `burn-amp-core`.
//!
//! The choices follow the lists of PyTorch's autocast for CUDA; the guide's
//! [reference](crate::guide::ops) compares the two. Where they follow from measurements,
//! [`burn_amp_core::policy`] has the figures.

use burn_backend::DType;

#[doc(inline)]
pub use burn_amp_core::policy::trials::Kind;
#[doc(inline)]
pub use burn_amp_core::policy::{Case, Class, Convolution, OpPrecision, Row};
pub(crate) use burn_amp_core::policy::{
    Effect, HalfSupport, Known, Op, OpPrecisions, SMALL, Site, Support, TERMS, are_sigmoids,
    follows_half, fp32_alone, holds, holds_exactly, is_half, largest_within, nearest, short,
};
#[doc(inline)]
pub use burn_amp_core::{Exception, Exceptions, Reason};

/// How the policy is applied.
pub(crate) type Mode = burn_amp_core::policy::Mode<DType>;

/// A float operand of an operation.
pub(crate) type Operand = burn_amp_core::policy::Operand<DType>;

/// Everything that happens to an operation.
pub(crate) type Decision = burn_amp_core::policy::Decision<DType>;

/// The operations of this Burn, in the table's order.
pub fn rows() -> impl Iterator<Item = Row> {
    burn_amp_core::policy::rows("0.21")
}
