//! Which operations a device computes exactly in half, each printed as soon as it is known. A trial may
//! compile many kernels: those of a transformer and a CNN come first.

use burn_amp::{AmpConfig, is_exact};
use burn_amp_core::policy::trials::{TRIED, TriedOp};
use serde_json::{Value, json};

use super::Options;
use super::backend::Measured;

/// The operations to try first, in this order.
const FIRST: &[&str] = &[
    "conv2d",
    "conv2d_x_backward",
    "conv2d_weight_backward",
    "float_matmul",
    "linear",
    "linear_x_backward",
    "linear_weight_backward",
];

pub fn trials<B: Measured>(options: &Options) -> Vec<Value> {
    let device = B::Device::default();
    println!("\nwhether {} is exact in an operation", B::name(&device));
    let others = TRIED.iter().filter(|op| !FIRST.contains(op));
    let ops = FIRST.iter().chain(others);
    let halves = || options.precisions::<B>().into_iter().skip(1);
    let mut rows = Vec::new();
    for (op, precision) in ops.flat_map(|op| halves().map(move |precision| (*op, precision))) {
        let config = AmpConfig::new().with_precision(precision);
        config.apply::<B>(&device).expect("a possible precision");
        let tried = TriedOp::named(op).expect("an operation of the list");
        let exact = is_exact::<B>(&device, tried);
        println!("{op:<34} {precision:<6} {exact:?}");
        rows.push(json!({"model": op, "precision": precision, "exact": exact}));
    }
    rows
}
