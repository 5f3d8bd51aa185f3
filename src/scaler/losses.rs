//! The checks and the replicas of a step's losses, in the explicit protocol. Independent of tensors:
//! the layers above choose the types they store here.

use std::any::Any;
use std::sync::Arc;

/// A check of losses on one backend, not read back yet.
pub(crate) trait LossCheck: Any + Send {
    /// Reads back whether all losses are finite.
    fn read(self: Box<Self>) -> bool;
}

/// The losses of a step until its `unscale`.
#[derive(Default)]
pub(crate) struct Losses {
    /// The finite checks, one for each backend, until they are read back.
    pub checks: Vec<Box<dyn LossCheck>>,
    /// The replicas that the gradients were reduced with. They decide on the step together.
    pub replicas: Option<Arc<dyn Any + Send + Sync>>,
}
