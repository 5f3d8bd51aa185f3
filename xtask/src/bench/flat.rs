//! What unscaling and checking gradients in one flat buffer would gain against one by one, as the
//! library does, for a model of many small parameters.

use std::time::Duration;

use burn::tensor::{Distribution, ElementConversion, Tensor};
use serde_json::{Value, json};

use super::backend::Measured;
use super::time::{in_turn, timed};

const ROUNDS: usize = 21;
const ROUND: Duration = Duration::from_millis(20);
const PARAMETERS: usize = 400;
/// In turn, the elements of the parameters.
const ELEMENTS: [usize; 7] = [64, 128, 256, 512, 1024, 2048, 4096];
const UNSCALE: f64 = 1.0 / 65536.0;

pub fn flat<B: Measured>() -> Vec<Value> {
    let device = B::Device::default();
    // As in training, where larger buffers have been freed: glibc then maps no pages anew for each
    // one of this size.
    drop(Tensor::<B, 1>::ones([4 << 20], &device));
    let sizes = ELEMENTS.into_iter().cycle().take(PARAMETERS);
    let gradient = |n| Tensor::<B, 1>::random([n], Distribution::Normal(0.0, 1.0), &device);
    let gradients: Vec<_> = sizes.map(gradient).collect();
    let buffer = Tensor::cat(gradients.clone(), 0);
    let [elements] = buffer.dims();

    let sync = || B::sync(&device).expect("a device that answers");
    let rounds = in_turn(
        ROUNDS,
        ROUND,
        vec![
            timed(|| drop(one_by_one(&gradients)), sync),
            timed(|| drop(concatenated(&gradients)), sync),
            timed(|| drop(unscaled(buffer.clone())), sync),
        ],
    );
    println!(
        "\nunscaling and checking {PARAMETERS} gradients of {elements} elements on {}",
        B::name(&device)
    );
    let names = ["one by one", "concatenated and split", "already flat"];
    let row = |(of, name): (usize, &str)| {
        let (time, ratio) = (rounds.seconds(of).times(1e6), rounds.ratio(of, 0));
        println!(
            "{name:<24} {:>9.1} us, ratio {:.3} ({:.3} to {:.3})",
            time.median, ratio.median, ratio.low, ratio.high
        );
        json!({
            "way": name,
            "us": time.median,
            "ratio": ratio.median,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
        })
    };
    names.into_iter().enumerate().map(row).collect()
}

fn one_by_one<B: Measured>(gradients: &[Tensor<B, 1>]) -> (Vec<Tensor<B, 1>>, bool) {
    let (unscaled, rests): (Vec<_>, Vec<_>) = gradients
        .iter()
        .map(|gradient| {
            let unscaled = gradient.clone() * UNSCALE;
            (unscaled.clone(), rest(unscaled))
        })
        .unzip();
    let rest = rests.into_iter().reduce(Tensor::add).expect("gradients");
    (unscaled, rest.into_scalar().elem::<f32>() == 0.0)
}

fn concatenated<B: Measured>(gradients: &[Tensor<B, 1>]) -> (Vec<Tensor<B, 1>>, bool) {
    let (buffer, finite) = unscaled(Tensor::cat(gradients.to_vec(), 0));
    let sizes = gradients
        .iter()
        .map(|gradient| gradient.dims()[0])
        .collect();
    (buffer.split_with_sizes(sizes, 0), finite)
}

/// A buffer without the scale, and whether it is finite.
fn unscaled<B: Measured>(buffer: Tensor<B, 1>) -> (Tensor<B, 1>, bool) {
    let unscaled = buffer * UNSCALE;
    let rest = rest(unscaled.clone()).into_scalar().elem::<f32>();
    (unscaled, rest == 0.0)
}

/// What is not finite, added up as `src/finite.rs` does it.
fn rest<B: Measured>(tensor: Tensor<B, 1>) -> Tensor<B, 1> {
    let finite = tensor.clone().abs().lower_equal_elem(f32::MAX);
    tensor.mask_fill(finite, 0.0).sum()
}
