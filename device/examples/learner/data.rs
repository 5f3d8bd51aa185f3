//! The text: cut into windows of characters, split into training and validation set, and batched.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator};
use burn::data::dataset::InMemDataset;
use burn::tensor::{Device, Int, Tensor, TensorData};

/// The number of characters in the model's context.
pub const CONTEXT: usize = 64;
/// One window in ten is for validation.
const VALID: usize = 10;

/// The context and one more character: each character predicts the next one.
pub type Window = [u8; CONTEXT + 1];

pub struct Corpus {
    /// Every character of the text; a token is an index into it.
    pub characters: Vec<char>,
    pub train: Vec<Window>,
    pub valid: Vec<Window>,
}

impl Corpus {
    /// The Book of Genesis.
    pub fn load() -> Self {
        let text = include_str!("../../../examples/fine_tune/genesis.txt");
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let token = |character| characters.binary_search(&character).map(|i| i as u8);
        let tokens: Result<Vec<u8>, _> = text.chars().map(token).collect();
        let tokens = tokens.expect("every character of the text");
        let windows = tokens.windows(CONTEXT + 1).step_by(CONTEXT);
        let windows = windows.map(|window| window.try_into().expect("a window's length"));
        let (valid, train): (Vec<_>, Vec<_>) = windows
            .enumerate()
            .partition(|(i, _)| i % VALID == VALID - 1);
        let windows = |set: Vec<(usize, Window)>| set.into_iter().map(|(_, window)| window);
        Self {
            train: windows(train).collect(),
            valid: windows(valid).collect(),
            characters,
        }
    }
}

/// Tokens `[batch, context]` and the token after each of them.
#[derive(Clone, Debug)]
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub targets: Tensor<2, Int>,
}

#[derive(Clone)]
struct Windows;

impl Batcher<Window, Batch> for Windows {
    fn batch(&self, windows: Vec<Window>, device: &Device) -> Batch {
        let tokens = windows.iter().flatten().map(|token| i64::from(*token));
        let tokens = TensorData::new(tokens.collect(), [windows.len(), CONTEXT + 1]);
        let tokens = Tensor::<2, Int>::from_data(tokens, device);
        Batch {
            tokens: tokens.clone().narrow(1, 0, CONTEXT),
            targets: tokens.narrow(1, 1, CONTEXT),
        }
    }
}

pub fn loader(windows: Vec<Window>, batch_size: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Windows)
        .batch_size(batch_size)
        .build(InMemDataset::new(windows))
}

/// A data loader with a new order for each epoch, which only depends on the seed and the epoch: a resumed run
/// gets the same batches as an uninterrupted run. Burn's own loader has a random state that restarts with the
/// process.
pub struct Epochs {
    loaders: Vec<Arc<dyn DataLoader<Batch>>>,
    next: AtomicUsize,
}

impl Epochs {
    pub fn new(windows: Vec<Window>, batch_size: usize, seed: u64, epochs: Range<usize>) -> Self {
        let windows = Arc::new(InMemDataset::new(windows));
        let loader = |epoch| {
            DataLoaderBuilder::new(Windows)
                .batch_size(batch_size)
                .shuffle(seed.wrapping_add(epoch as u64))
                .build(windows.clone())
        };
        Self::of(epochs.map(loader))
    }

    fn of(loaders: impl Iterator<Item = Arc<dyn DataLoader<Batch>>>) -> Self {
        Self {
            loaders: loaders.collect(),
            next: AtomicUsize::new(0),
        }
    }
}

impl DataLoader<Batch> for Epochs {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let epoch = self.next.fetch_add(1, Ordering::Relaxed);
        self.loaders[epoch].iter()
    }

    fn num_items(&self) -> usize {
        self.loaders.first().map_or(0, |loader| loader.num_items())
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        let loaders = self.loaders.iter();
        Arc::new(Self::of(loaders.map(|loader| loader.to_device(device))))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let loaders = self.loaders.iter();
        Arc::new(Self::of(loaders.map(|loader| loader.slice(start, end))))
    }
}
