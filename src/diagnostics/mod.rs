//! Diagnostics: the search for non-finite values, and the report of a training run.

pub(crate) mod anomaly;
pub(crate) mod compare;
mod finite;
#[cfg(feature = "plot")]
mod plot;
mod report;

use burn_backend::Backend;

pub(crate) use finite::FiniteCheck;
pub use report::AmpReport;

use crate::tensor::{AmpTensor, Side};

/// The node of the first parameter among the operands of a call.
fn leaf_of<'a, B: Backend, S: Side<B>>(
    mut tensors: impl Iterator<Item = &'a AmpTensor<B, S>>,
) -> Option<u64> {
    let leaf = tensors.find_map(|tensor| {
        let is_leaf = B::float_is_require_grad(&tensor.primitive);
        is_leaf.then(|| S::node(&tensor.primitive)).flatten()
    });
    leaf.map(|node| node.id)
}
