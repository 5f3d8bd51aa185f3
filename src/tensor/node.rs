//! References to the nodes of autodiff, for code that cannot name their backend.

use std::any::Any;
use std::sync::{Arc, Weak};

use burn_autodiff::Autodiff;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Burn's type of a node has no public name.
type Anything = dyn Any + Send + Sync;

/// A weak reference to a node of autodiff.
#[derive(Debug)]
pub struct WeakNode {
    /// The node's id: unique in the process.
    pub(crate) id: u64,
    node: Weak<Anything>,
    /// Autodiff's reference count of the node's tensors.
    #[cfg(feature = "distributed")]
    held: Weak<Anything>,
}

/// A [`WeakNode`] that is alive.
pub(crate) struct Node {
    pub node: Arc<Anything>,
    #[cfg(feature = "distributed")]
    pub held: Option<Arc<Anything>>,
}

impl WeakNode {
    /// The node of a tensor on the tape of `Autodiff<B>`.
    pub(crate) fn of<B: Backend>(tensor: &FloatTensor<Autodiff<B>>) -> Self {
        Self {
            id: tensor.node.id.value,
            node: Arc::downgrade(&tensor.node) as Weak<Anything>,
            #[cfg(feature = "distributed")]
            held: Arc::downgrade(&tensor.rc) as Weak<Anything>,
        }
    }

    pub(crate) fn upgrade(&self) -> Option<Node> {
        Some(Node {
            node: self.node.upgrade()?,
            #[cfg(feature = "distributed")]
            held: self.held.upgrade(),
        })
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.node.strong_count() > 0
    }

    /// Whether anything holds the node besides one tensor.
    pub(crate) fn is_held(&self) -> bool {
        self.node.strong_count() > 1
    }
}
