//! The digits: parsed, split into training and test set, and batched.

use burn::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

pub const SIDE: usize = 8;
pub const CLASSES: usize = 10;
const PIXELS: usize = SIDE * SIDE;
/// A quarter of the set.
const TEST: usize = 449;

pub struct Digit {
    pub pixels: [f32; PIXELS],
    pub label: u8,
}

pub struct Digits {
    pub train: Vec<Digit>,
    pub test: Vec<Digit>,
}

impl Digits {
    /// The set that stands beside this file. Which digits are for testing does not depend on the
    /// seed of a run.
    pub fn load() -> Self {
        let mut all: Vec<_> = include_str!("optdigits.csv").lines().map(parse).collect();
        all.shuffle(&mut StdRng::seed_from_u64(0));
        let train = all.split_off(TEST);
        Self { train, test: all }
    }
}

fn parse(line: &str) -> Digit {
    let values: Vec<u8> = line
        .split(',')
        .map(|value| value.parse().expect("a number from 0 to 16"))
        .collect();
    let (label, pixels) = values.split_last().expect("64 pixels and a label");
    Digit {
        pixels: std::array::from_fn(|i| f32::from(pixels[i]) / 16.0),
        label: *label,
    }
}

/// Images `[batch, 1, 8, 8]` in FP32 from 0 to 1, and labels `[batch]`.
pub fn batch<B: Backend>(
    digits: &[&Digit],
    device: &B::Device,
) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let labels: Vec<i64> = digits.iter().map(|digit| i64::from(digit.label)).collect();
    let images = TensorData::new(pixels, [digits.len(), 1, SIDE, SIDE]);
    (
        Tensor::from_data(images, device),
        Tensor::from_data(TensorData::new(labels, [digits.len()]), device),
    )
}
