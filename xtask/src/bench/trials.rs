//! Which operations a device computes exactly in half, each printed as soon as it is known. A trial may
//! compile many kernels: those of a transformer and a CNN come first.

use burn_amp::{AmpConfig, is_exact};
use burn_amp_core::policy::trials::TriedOp;
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
    let mut ops: Vec<_> = TriedOp::all().collect();
    ops.sort_by_key(|op| {
        FIRST
            .iter()
            .position(|first| op.name() == *first)
            .unwrap_or(FIRST.len())
    });
    let halves = || options.precisions::<B>().into_iter().skip(1);
    let mut rows = Vec::new();
    for (op, precision) in ops
        .into_iter()
        .flat_map(|op| halves().map(move |half| (op, half)))
    {
        let config = AmpConfig::new().with_precision(precision);
        config.apply::<B>(&device).expect("a possible precision");
        let Some(exact) = is_exact::<B>(&device, op) else {
            continue;
        };
        let op = op.to_string();
        println!("{op:<50} {precision:<6} {exact}");
        rows.push(json!({"model": op, "precision": precision, "exact": exact}));
    }
    rows
}
