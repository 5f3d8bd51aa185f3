//! The nodes that serve the uses of a parameter in half. Independent of tensors and of autodiff.
//!
//! Autodiff adds up the gradients of a node in the node's dtype, and a sum of many half numbers
//! stops growing: a sum of ones in bf16 at 256. So one node serves a few uses, and the next uses get
//! another node. The gradients of all nodes are added up in FP32.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::policy::TERMS;

/// The nodes that are kept.
const KEPT: usize = 1024;
/// With more nodes, those that no tape holds go after a backward pass.
const FEW: usize = 16;

/// Counts the uses between two backward passes, and keeps the nodes that serve them.
#[derive(Debug)]
pub(crate) struct HalfCopies<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    /// The backward passes of the device before these uses. A pass consumes nodes.
    passes: u64,
    count: u32,
    /// The last nodes. If nothing held a node that two losses share, the backward pass of one loss
    /// would free the other.
    nodes: VecDeque<T>,
    /// The first node since the last pass. All later nodes come from it, so it is kept as long as they are
    /// made.
    root: Option<T>,
}

/// The node that serves a use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NextCopy<T> {
    /// The node of the previous use.
    Again(T),
    /// A new node. The first node since the last pass comes with it, if there is one.
    New(Option<T>),
}

impl<T> Default for HalfCopies<T> {
    fn default() -> Self {
        Self(Mutex::new(State {
            passes: 0,
            count: 0,
            nodes: VecDeque::new(),
            root: None,
        }))
    }
}

impl<T: Clone> HalfCopies<T> {
    /// Counts a use after so many backward passes. The caller makes a new node, and gives it to
    /// [`keep`](HalfCopies::keep). `is_held` tells whether a tape holds a node.
    pub fn next(&self, passes: u64, is_held: impl Fn(&T) -> bool) -> NextCopy<T> {
        let state = &mut *self.0.lock();
        if state.passes != passes {
            (state.passes, state.count) = (passes, 0);
            state.root = None;
            // A parameter that no optimizer replaces gets a node in each pass.
            if state.nodes.len() > FEW {
                state.nodes.retain(is_held);
            }
        }
        let nth = state.count;
        state.count = nth.wrapping_add(1);
        match state.nodes.back() {
            Some(node) if state.root.is_some() && !nth.is_multiple_of(TERMS.into()) => {
                NextCopy::Again(node.clone())
            }
            _ => NextCopy::New(state.root.clone()),
        }
    }

    /// Keeps a new node for the next uses.
    pub fn keep(&self, node: &T) {
        let state = &mut *self.0.lock();
        match state.nodes.len() {
            // Most parameters have one node.
            0 => state.nodes.reserve_exact(1),
            KEPT => drop(state.nodes.pop_front()),
            _ => {}
        }
        state.nodes.push_back(node.clone());
        state.root.get_or_insert_with(|| node.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_serves_sixteen_uses() {
        let uses = HalfCopies::default();
        for nth in 0..100 {
            match uses.next(0, |_| true) {
                NextCopy::Again(node) => assert_eq!(node, nth / 16 * 16),
                NextCopy::New(root) => {
                    assert_eq!(nth % 16, 0, "{nth}");
                    assert_eq!(root, (nth > 0).then_some(0));
                    uses.keep(&nth);
                }
            }
        }
    }

    #[test]
    fn a_backward_pass_consumes_the_nodes() {
        let uses = HalfCopies::default();
        assert_eq!(uses.next(3, |_| true), NextCopy::New(None));
        uses.keep(&7);
        assert_eq!(uses.next(3, |_| true), NextCopy::Again(7));
        assert_eq!(uses.next(4, |_| true), NextCopy::New(None));
    }

    #[test]
    fn a_parameter_that_is_never_replaced_keeps_the_nodes_that_a_tape_holds() {
        let uses = HalfCopies::default();
        for pass in 0..1000 {
            assert_eq!(uses.next(pass, |node| node % 100 == 0), NextCopy::New(None));
            uses.keep(&pass);
        }
        let nodes = uses.0.lock().nodes.clone();
        assert!(nodes.len() < 2 * FEW);
        assert!((0..10).all(|held| nodes.contains(&(100 * held))));
    }

    #[test]
    fn uses_without_a_backward_pass_keep_so_many_nodes_and_the_first() {
        let uses = HalfCopies::default();
        for nth in 0..20 * KEPT {
            if let NextCopy::New(root) = uses.next(0, |_| true) {
                assert_eq!(root, (nth > 0).then_some(0));
                uses.keep(&nth);
            }
        }
        assert_eq!(uses.0.lock().nodes.len(), KEPT);
    }

    #[test]
    fn the_count_starts_over_with_a_new_node() {
        let uses = HalfCopies::default();
        uses.keep(&5);
        uses.0.lock().count = u32::MAX;
        assert_eq!(uses.next(0, |_| true), NextCopy::Again(5));
        assert_eq!(uses.next(0, |_| true), NextCopy::New(Some(5)));
    }
}
