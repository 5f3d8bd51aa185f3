//! The initial gradient of a backward pass: ones, or the loss scale.
//!
//! Multiplying the loss by the scale would add a node to the tape. If the loss's own node were
//! gone, autodiff would do nothing for the product, although it panics for the loss itself. So the
//! backward pass starts at the loss, with the scale as the initial gradient.
//!
//! Autodiff's first action is to create the initial gradient, by `float_ones` on the backend it wraps.
//! Autodiff has no argument for the scale, so a thread-local mode passes the scale to that call: Burn
//! runs a pass on the calling thread.

use crate::precision::{in_backward, take_seed};

/// Takes the scale: only the first `float_ones` of a pass gets it.
pub(crate) use crate::precision::take_seed as take;

/// Runs a backward pass that starts with the gradient `scale`, or with autodiff's own if `None`.
///
/// # Panics
///
/// If the pass did not take the scale, as with a version of Burn that the code does not expect.
pub(super) fn with_scale<T>(scale: Option<f32>, pass: impl FnOnce() -> T) -> T {
    in_backward(scale, || {
        let out = pass();
        assert_eq!(
            take_seed(),
            None,
            "burn-amp: the backward pass did not begin with float_ones, so its gradients are not \
             scaled. Use the version of Burn that burn-amp depends on"
        );
        out
    })
}
