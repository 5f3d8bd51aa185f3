//! Weak references to the leaves whose gradients a backward pass takes. Each new leaf is added.

use burn_backend::{Backend, DType, TensorMetadata};
use parking_lot::Mutex;

use crate::AmpTensor;
use crate::tensor::{Node, Side, TensorFlags, WeakNode};

/// One list for all backends: a leaf's node is on only one tape.
static LEAVES: Mutex<Remembered> = Mutex::new(Remembered {
    leaves: Vec::new(),
    sweep_at: 0,
});

struct Remembered {
    leaves: Vec<(WeakNode, LeafInfo)>,
    /// The list length at which dead leaves are next removed.
    sweep_at: usize,
}

/// The dtype and flags of a leaf and of its gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeafInfo {
    pub dtype: DType,
    pub flags: TensorFlags,
    /// If the node is a half copy: the node id of its FP32 leaf.
    pub copy_of: Option<u64>,
}

impl LeafInfo {
    pub(super) fn of<B: Backend, S: Side<B>>(leaf: &AmpTensor<B, S>) -> Self {
        Self {
            dtype: leaf.dtype(),
            flags: leaf.flags(),
            copy_of: None,
        }
    }
}

/// Remembers a leaf for as long as a tape or a tensor holds its node.
pub(super) fn add(node: WeakNode, info: LeafInfo) {
    let mut remembered = LEAVES.lock();
    if remembered.leaves.len() >= remembered.sweep_at {
        remembered.let_go();
        remembered.sweep_at = (2 * remembered.leaves.len()).max(64);
    }
    remembered.leaves.push((node, info));
}

/// The nodes of the live leaves.
pub(crate) fn alive() -> Vec<(Node, LeafInfo)> {
    let mut remembered = LEAVES.lock();
    remembered.let_go();
    let leaves = remembered.leaves.iter();
    let alive = leaves.filter_map(|(node, of)| Some((node.upgrade()?, *of)));
    alive.collect()
}

impl Remembered {
    fn let_go(&mut self) {
        self.leaves.retain(|(node, _)| node.is_alive());
    }
}
