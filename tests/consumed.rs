//! A second backward pass over a graph that was consumed panics as in Burn: with the same text at
//! the same place. The graphs are those of Burn's own tests of its memory management.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};
use shared as _; // with what it instantiates

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Text and place of the panic of `f`, if it panics.
fn panic_of(f: impl FnOnce()) -> Option<String> {
    set_hook(Box::new(|info| {
        PANIC.set(Some(info.to_string()));
    }));
    PANIC.set(None);
    let _ = catch_unwind(AssertUnwindSafe(f));
    PANIC.take()
}

fn leaf<B: AutodiffBackend>(values: [[f32; 2]; 2]) -> Tensor<B, 2> {
    Tensor::from_data(values, &Default::default()).require_grad()
}

fn leaves<B: AutodiffBackend>() -> [Tensor<B, 2>; 2] {
    [
        leaf([[1.0, 2.0], [3.0, 4.0]]),
        leaf([[0.5, 0.25], [1.0, 2.0]]),
    ]
}

/// The same loss twice.
fn twice<B: AutodiffBackend>() {
    let [a, b] = leaves::<B>();
    let loss = a.matmul(b).sum();
    loss.backward();
    loss.backward();
}

/// A loss further along a chain of which the beginning is consumed.
fn deletables_propagate_well<B: AutodiffBackend>() {
    let [a, b] = leaves::<B>();
    let product = a * b;
    let exp = product.clone().exp();
    let _log = exp.clone().log();
    product.backward();
    exp.backward();
}

/// Two trees that cross: the backward pass of the first root also consumes the second.
fn crossover_trees_root_unavailable<B: AutodiffBackend>() {
    let [a, b] = leaves::<B>();
    let product = a.clone().matmul(b.clone());
    let exp = product.clone().exp();
    let shared = product.clone() + b;
    let first = shared.clone() * a;
    first.backward();
    let _ = exp;
    shared.backward();
}

/// Three trees that cross: the backward pass of the first also consumes the middle one.
fn three_crossover_trees_middle_one_unavailable<B: AutodiffBackend>() {
    let [a, b] = leaves::<B>();
    let c = leaf::<B>([[1.0, -1.0], [2.0, 0.5]]);
    let left = a.clone() * b.clone();
    let middle = left.clone() + c.clone();
    let right = b * c;
    let first = left.exp();
    let third = right.exp();
    first.backward();
    third.backward();
    middle.backward();
}

/// A loss that is a parameter.
fn a_leaf<B: AutodiffBackend>() {
    let [a, _] = leaves::<B>();
    a.backward();
    a.backward();
}

fn panics_as_in_burn(plain: fn(), amp: [fn(); 2]) {
    let expected = panic_of(plain);
    let text = expected.as_ref().expect("Burn panics");
    assert!(
        text.contains("Node should have a step registered"),
        "{text}"
    );
    let scaler = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    for precision in [Precision::F16, Precision::Bf16, Precision::F32] {
        for amp in amp {
            let run = || with_precision(precision, || scaler.scope(amp));
            assert_eq!(panic_of(run), expected, "{precision}");
        }
    }
}

macro_rules! graphs {
    ($($graph:ident),*) => {$(
        mod $graph {
            use super::*;

            #[test]
            fn panics() {
                type Balanced = AmpAutodiff<Flex, BalancedCheckpointing>;
                panics_as_in_burn(
                    super::$graph::<Autodiff<Flex>>,
                    [super::$graph::<AmpAutodiff<Flex>>, super::$graph::<Balanced>],
                );
            }
        }
    )*};
}

graphs! {
    twice,
    deletables_propagate_well,
    crossover_trees_root_unavailable,
    three_crossover_trees_middle_one_unavailable,
    a_leaf
}

/// A backward pass that panics is not a step.
#[test]
fn a_refused_pass_is_not_counted() {
    let scaler = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    let run = || with_precision(Precision::F16, || scaler.scope(twice::<AmpAutodiff<Flex>>));
    assert!(panic_of(run).is_some());
    assert_eq!(
        (scaler.state().taken_steps(), scaler.skipped_steps()),
        (1, 0)
    );
}
