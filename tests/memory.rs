//! Nothing leaks: all memory is freed, whether a graph is used or dropped.
//!
//! One test, in a process of its own: the allocator counts the bytes of all threads.

#[path = "common/live.rs"]
mod live;

use std::sync::atomic::Ordering;

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};
use shared as _; // with what it instantiates

use live::LIVE;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: Vec<Linear<B>>,
}

const WIDTH: usize = 16;
/// The bytes that may be left over: Burn's and our tables may be growing. A leak of 17 bytes a round is
/// more.
const TABLES: isize = 16 * 1024;
/// The most rounds until one leaves memory where it was.
const ROUNDS: usize = 10;

impl<B: Backend> Model<B> {
    fn new() -> Self {
        let layer = || LinearConfig::new(WIDTH, WIDTH).init(&Default::default());
        Self {
            layers: vec![layer(), layer()],
        }
    }

    fn loss(&self) -> Tensor<B, 1> {
        let x = Tensor::<B, 2>::ones([4, WIDTH], &Default::default());
        let x = self.layers.iter().fold(x, |x, layer| {
            activation::softmax(activation::gelu(layer.forward(x)), 1)
        });
        (x.powi_scalar(2).mean_dim(1) * 10.0).mean()
    }
}

fn train<B: AutodiffBackend>(steps: usize) {
    let mut model = Model::<B>::new();
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..steps {
        let grads = GradientsParams::from_grads(model.loss().backward(), &model);
        model = optimizer.step(1e-3, model, grads);
    }
}

/// Makes models, runs each forward under autodiff and drops it without a backward pass.
fn make_and_drop<B: AutodiffBackend>(models: usize) {
    for _ in 0..models {
        let loss = Model::<B>::new().loss();
        assert!(loss.into_scalar().elem::<f32>().is_finite());
    }
}

/// Runs rounds until one leaves memory where it was.
///
/// A leak grows in every round. A table grows in a few: Burn's tables of hashes grow with many removed
/// entries too, which depends on the random seeds of the process.
fn stays(what: &str, round: impl Fn()) {
    // This round may free what others left.
    round();
    let live = || LIVE.load(Ordering::Relaxed) as isize;
    let mut before = live();
    let mut grown = Vec::new();
    while grown.last().is_none_or(|grown| *grown >= TABLES) {
        assert!(
            grown.len() < ROUNDS,
            "{what}: each round left so many bytes: {grown:?}"
        );
        round();
        let after = live();
        grown.push(after - std::mem::replace(&mut before, after));
    }
}

fn nothing_leaks<B: AutodiffBackend>(what: &str) {
    stays(what, || {
        make_and_drop::<B>(1000);
        // Burn frees what was dropped without a backward pass at the next one.
        train::<B>(2);
    });
    stays(what, || train::<B>(1000));
}

/// A loop that scales its losses and never calls step or update.
fn losses_are_not_kept<B: AutodiffBackend>(what: &str) {
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    let model = Model::<B>::new();
    stays(what, || {
        (0..1000).for_each(|_| drop(scaler.scale(model.loss()).backward()))
    });
}

/// Backward passes without an optimizer, as of a model of which only the head is trained.
fn passes_are_not_kept(what: &str) {
    let model = Model::<AmpAutodiff<Flex>>::new();
    // In all, fewer passes than nodes are kept in any case.
    stays(what, || {
        (0..100).for_each(|_| drop(model.loss().backward()))
    });
}

#[test]
fn a_thousand_models_and_a_thousand_steps_leave_memory_where_it_was() {
    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        with_precision(precision, || {
            nothing_leaks::<AmpAutodiff<Flex>>(&precision.to_string());
            nothing_leaks::<AmpAutodiff<Flex, BalancedCheckpointing>>(&format!(
                "{precision}, checkpointed"
            ));
        });
    }
    losses_are_not_kept::<Autodiff<Flex>>("losses");
    with_precision(Precision::F16, || {
        losses_are_not_kept::<AmpAutodiff<Flex>>("losses in half")
    });
    for precision in [Precision::F16, Precision::Bf16] {
        with_precision(precision, || {
            passes_are_not_kept(&format!("{precision}, passes"))
        });
    }
}
