//! The memory of a frozen base while adapters of low rank (LoRA) train beside it.
//!
//! One test, in a process of its own: the allocator counts the bytes of all threads.

#[path = "common/live.rs"]
mod live;

use std::sync::atomic::Ordering;

use burn::backend::Flex;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_amp::{AmpAutodiff, Precision, half_weights, with_precision};
use shared as _; // with what it instantiates

use live::LIVE;

type B = AmpAutodiff<Flex>;

const WIDTH: usize = 512;

#[derive(Module, Debug)]
struct Adapter<B: Backend> {
    a: Linear<B>,
    b: Linear<B>,
}

fn linear(from: usize, to: usize) -> Linear<B> {
    let config = LinearConfig::new(from, to).with_bias(false);
    config.init(&Default::default())
}

/// The bytes of a base for each of its weights, after two steps of its adapter, and those of a clone.
fn bytes(frozen: impl Fn(Linear<B>) -> Linear<B>) -> [f64; 2] {
    let live = || LIVE.load(Ordering::Relaxed);
    let x = || Tensor::<B, 2>::ones([4, WIDTH], &Default::default());
    let mut adapter = Adapter {
        a: linear(WIDTH, 4),
        b: linear(4, WIDTH),
    };
    let mut optimizer = SgdConfig::new().init();
    // The adapter is in memory before.
    drop(adapter.b.forward(adapter.a.forward(x())));
    let before = live();
    let base = frozen(linear(WIDTH, WIDTH).no_grad());
    for _ in 0..2 {
        // The backward pass needs the weight of the base.
        let output = base.forward(adapter.b.forward(adapter.a.forward(x())));
        let grads = GradientsParams::from_grads(output.mean().backward(), &adapter);
        adapter = optimizer.step(1e-3, adapter, grads);
    }
    let with_base = live();
    let clone = base.clone();
    let cloned = live() - with_base;
    drop(clone);
    [with_base - before, cloned].map(|bytes| bytes as f64 / (WIDTH * WIDTH) as f64)
}

#[test]
fn a_half_base_takes_two_bytes_for_each_weight_and_clones_share_them() {
    for precision in [Precision::F16, Precision::Bf16] {
        with_precision(precision, || {
            let half = |base: Linear<B>| -> Linear<B> {
                Linear::from_inner(half_weights(base.valid(), precision).unwrap())
            };
            // The first run sets up memory for good, such as the buffers of threads.
            bytes(half);
            let [base, clone] = bytes(half);
            assert!((1.9..2.2).contains(&base), "{precision}: {base}");
            assert!(clone < 0.05, "{precision}: {clone}");
            // An FP32 base keeps a half copy beside it.
            let [base, _] = bytes(|base| base);
            assert!((5.9..6.2).contains(&base), "{precision}: {base}");
        });
    }
}
