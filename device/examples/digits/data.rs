//! The digits: parsed, split into training and test set, and batched.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

pub const SIDE: usize = 8;
pub const CLASSES: usize = 10;
const PIXELS: usize = SIDE * SIDE;
/// A quarter of the set.
const TEST: usize = 449;

pub struct Digit {
    pixels: [f32; PIXELS],
    label: u8,
}

pub struct Digits {
    pub train: Vec<Digit>,
    pub test: Vec<Digit>,
}

impl Digits {
    /// The set of burn-amp's example. The split into training and test set does not depend on the seed of a
    /// run.
    pub fn load() -> Self {
        let lines = include_str!("../../../examples/digits/optdigits.csv").lines();
        let mut all: Vec<_> = lines.map(parse).collect();
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
pub fn batch(digits: &[&Digit], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let labels: Vec<i64> = digits.iter().map(|digit| i64::from(digit.label)).collect();
    let images = TensorData::new(pixels, [digits.len(), 1, SIDE, SIDE]);
    (
        Tensor::from_data(images, device),
        Tensor::from_data(TensorData::new(labels, [digits.len()]), device),
    )
}
