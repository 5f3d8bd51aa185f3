//! The leaves whose gradients a backward pass has to look at, remembered weakly where they are
//! made.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use burn_backend::Backend;

use crate::tensor::Leaf;

type AnyLeaf = Weak<dyn Any + Send + Sync>;

/// By backend: a graph may span the devices of one, but never two backends.
static LEAVES: LazyLock<Mutex<HashMap<TypeId, Remembered>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Remembered {
    leaves: Vec<AnyLeaf>,
    /// The length at which dead leaves are let go next.
    sweep_at: usize,
}

/// Remembers a leaf for as long as somebody holds its tensor.
pub(crate) fn remember<B: Backend>(leaf: Weak<Leaf<B>>) {
    let mut all = LEAVES.lock().unwrap_or_else(PoisonError::into_inner);
    let remembered = all.entry(TypeId::of::<B>()).or_default();
    if remembered.leaves.len() >= remembered.sweep_at {
        remembered.leaves.retain(|leaf| leaf.strong_count() > 0);
        remembered.sweep_at = (2 * remembered.leaves.len()).max(64);
    }
    remembered.leaves.push(leaf);
}

/// The leaves of a backend that are alive.
pub(crate) fn alive<B: Backend>() -> Vec<Arc<Leaf<B>>> {
    let mut all = LEAVES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(remembered) = all.get_mut(&TypeId::of::<B>()) else {
        return Vec::new();
    };
    remembered.leaves.retain(|leaf| leaf.strong_count() > 0);
    remembered
        .leaves
        .iter()
        .filter_map(Weak::upgrade)
        .filter_map(|leaf| leaf.downcast::<Leaf<B>>().ok())
        .collect()
}
