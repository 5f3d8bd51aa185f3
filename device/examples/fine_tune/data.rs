//! Verses in batches.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::nn::attention::{SeqLengthOption, generate_padding_mask};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::corpus::{LENGTH, PADDING, Verse};

/// Verses in a batch.
pub const BATCH: usize = 32;

/// Verses of one batch, padded to the same length.
#[derive(Clone, Debug)]
pub struct Labelled {
    /// `[batch, length]`
    pub tokens: Tensor<2, Int>,
    /// Where a token is padding, `[batch, length]`.
    pub padding: Tensor<2, Bool>,
    /// `[batch]`
    pub halves: Tensor<1, Int>,
}

impl Labelled {
    pub fn new(verses: &[Verse], device: &Device) -> Self {
        let tokens = verses.iter().map(|verse| verse.tokens.clone()).collect();
        let padded = generate_padding_mask(PADDING, tokens, SeqLengthOption::Max(LENGTH), device);
        let halves: Vec<_> = verses.iter().map(|verse| verse.half).collect();
        Self {
            tokens: padded.tensor,
            padding: padded.mask,
            halves: Tensor::from_data(halves.as_slice(), device),
        }
    }
}

#[derive(Clone)]
struct Verses;

impl Batcher<Verse, Labelled> for Verses {
    fn batch(&self, verses: Vec<Verse>, device: &Device) -> Labelled {
        Labelled::new(&verses, device)
    }
}

/// In another order for each epoch, if there is a seed for it.
pub fn loader(verses: &[Verse], seed: Option<u64>) -> Arc<dyn DataLoader<Labelled>> {
    let builder = DataLoaderBuilder::new(Verses).batch_size(BATCH);
    let builder = match seed {
        Some(seed) => builder.shuffle(seed),
        None => builder,
    };
    builder.build(InMemDataset::new(verses.to_vec()))
}
