//! The initial gradient of a backward pass: ones, or the loss scale.
//!
//! Multiplying the loss by the scale would add a node to the tape. If the loss's own node were
//! gone, autodiff would do nothing for the product, although it panics for the loss itself. So the
//! backward pass starts at the loss, with the scale as the initial gradient.
//!
//! Autodiff's first action is to create the initial gradient, by `float_ones` on the backend it
//! wraps. Autodiff has no argument for the scale, so a mode of the thread passes the scale to that
//! call: Burn runs a pass on the calling thread.

use crate::precision::{in_backward, take_seed};

/// Takes the scale: only the first `float_ones` of a pass gets it.
pub(crate) use crate::precision::take_seed as take;

/// Runs a backward pass, whose initial gradient is `scale`; autodiff's own without a scale.
///
/// # Panics
///
/// If the pass never took the scale: this is not the version of Burn that the code expects.
pub(super) fn with_scale<T>(scale: Option<f32>, pass: impl FnOnce() -> T) -> T {
    in_backward(scale, || {
        let out = pass();
        assert_eq!(
            take_seed(),
            None,
            "burn-amp: the backward pass did not begin with float_ones, and its gradients are not \
             scaled. Use the version of Burn that burn-amp names"
        );
        out
    })
}
