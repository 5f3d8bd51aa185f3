//! The digits for a `Learner`: shifted at random for training, unchanged for validation.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::digits::{Digit, Digits, SIDE};

/// Images `[batch, 1, 8, 8]` from 0 to 1, and labels `[batch]`.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    pub images: Tensor<B, 4>,
    pub labels: Tensor<B, 1, Int>,
}

/// An epoch's training digits. The order and the shifts depend only on `seed`.
pub fn training<B: Backend>(
    digits: &Arc<Digits>,
    batch_size: usize,
    seed: u64,
) -> Arc<dyn DataLoader<B, Batch<B>>> {
    let all = (0..digits.train.len()).collect();
    let batcher = Shifted {
        digits: digits.clone(),
        seed,
    };
    DataLoaderBuilder::new(batcher)
        .batch_size(batch_size)
        .shuffle(seed)
        .build(InMemDataset::new(all))
}

pub fn validation<B: Backend>(
    digits: &Arc<Digits>,
    batch_size: usize,
) -> Arc<dyn DataLoader<B, Batch<B>>> {
    let all = (0..digits.test.len()).collect();
    DataLoaderBuilder::new(AsTheyAre(digits.clone()))
        .batch_size(batch_size)
        .build(InMemDataset::new(all))
}

#[derive(Clone)]
struct Shifted {
    digits: Arc<Digits>,
    seed: u64,
}

impl<B: Backend> Batcher<B, usize, Batch<B>> for Shifted {
    fn batch(&self, indices: Vec<usize>, device: &B::Device) -> Batch<B> {
        let digits = indices.iter().map(|i| {
            let mut rng = StdRng::seed_from_u64(self.seed ^ ((*i as u64) << 32));
            let [right, down] = [(); 2].map(|()| rng.random_range(-1..=1_i32) as isize);
            let digit = &self.digits.train[*i];
            Digit {
                pixels: shift(digit, right, down),
                label: digit.label,
            }
        });
        batch(
            &digits.collect::<Vec<_>>().iter().collect::<Vec<_>>(),
            device,
        )
    }
}

#[derive(Clone)]
struct AsTheyAre(Arc<Digits>);

impl<B: Backend> Batcher<B, usize, Batch<B>> for AsTheyAre {
    fn batch(&self, indices: Vec<usize>, device: &B::Device) -> Batch<B> {
        let digits: Vec<_> = indices.iter().map(|i| &self.0.test[*i]).collect();
        batch(&digits, device)
    }
}

fn batch<B: Backend>(digits: &[&Digit], device: &B::Device) -> Batch<B> {
    let (images, labels) = crate::digits::batch(digits, device);
    Batch { images, labels }
}

/// Pixels that come in at the edge are 0, like the background.
fn shift(digit: &Digit, right: isize, down: isize) -> [f32; SIDE * SIDE] {
    std::array::from_fn(|i| {
        let (x, y) = ((i % SIDE) as isize - right, (i / SIDE) as isize - down);
        let inside = |at: isize| (0..SIDE as isize).contains(&at);
        match inside(x) && inside(y) {
            true => digit.pixels[y as usize * SIDE + x as usize],
            false => 0.0,
        }
    })
}
