//! The leaves whose gradients a backward pass has to look at, remembered weakly where they are
//! made.

use std::sync::{Mutex, PoisonError};

use burn_backend::{Backend, DType, TensorMetadata};

use super::tape::{self, Node, WeakNode};
use crate::AmpTensor;
use crate::tensor::Marks;

/// Of all backends: a leaf's node is on one tape only.
static LEAVES: Mutex<Remembered> = Mutex::new(Remembered {
    leaves: Vec::new(),
    sweep_at: 0,
});

struct Remembered {
    leaves: Vec<(WeakNode, Of)>,
    /// The length at which dead leaves are let go next.
    sweep_at: usize,
}

/// What a leaf's gradient is made like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Of {
    pub dtype: DType,
    pub marks: Marks,
}

/// Remembers a leaf for as long as it is on a tape or somebody holds its tensor.
pub(crate) fn remember<B: Backend>(leaf: &AmpTensor<B>) {
    let Some(node) = tape::node::<B>(&leaf.primitive) else {
        return;
    };
    let (dtype, marks) = (leaf.dtype(), leaf.marks());
    let mut remembered = LEAVES.lock().unwrap_or_else(PoisonError::into_inner);
    if remembered.leaves.len() >= remembered.sweep_at {
        remembered.let_go();
        remembered.sweep_at = (2 * remembered.leaves.len()).max(64);
    }
    remembered.leaves.push((node, Of { dtype, marks }));
}

/// The nodes of the leaves that are alive.
pub(crate) fn alive() -> Vec<(Node, Of)> {
    let mut remembered = LEAVES.lock().unwrap_or_else(PoisonError::into_inner);
    remembered.let_go();
    let alive = remembered.leaves.iter();
    alive
        .filter_map(|(node, of)| Some((node.upgrade()?, *of)))
        .collect()
}

impl Remembered {
    fn let_go(&mut self) {
        self.leaves.retain(|(node, _)| node.is_alive());
    }
}
