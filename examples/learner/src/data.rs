//! The text: cut into windows of characters, split into training and validation set, and batched.

use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;

/// Characters that the model sees at once.
pub const CONTEXT: usize = 64;
/// One window in so many is for validation.
const VALID: usize = 10;

/// The characters that are read and one more, because each character predicts the next.
pub type Window = [u8; CONTEXT + 1];

pub struct Corpus {
    /// Every character of the text; a token is an index into it.
    pub characters: Vec<char>,
    pub train: Vec<Window>,
    pub valid: Vec<Window>,
}

impl Corpus {
    /// The Book of Genesis. Which windows are for validation does not depend on
    /// the seed of a run.
    pub fn load() -> Self {
        let text = include_str!("../../fine_tune/genesis.txt");
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let tokens: Vec<u8> = text
            .chars()
            .map(|character| token(&characters, character).expect("a character of the text"))
            .collect();

        let (mut train, mut valid) = (Vec::new(), Vec::new());
        for (i, window) in tokens.windows(CONTEXT + 1).step_by(CONTEXT).enumerate() {
            let set = if i % VALID == VALID - 1 {
                &mut valid
            } else {
                &mut train
            };
            set.push(window.try_into().expect("a window's length"));
        }
        Self {
            characters,
            train,
            valid,
        }
    }

    /// The tokens of a text; `None` if one of its characters is not in the corpus.
    pub fn encode(&self, text: &str) -> Option<Vec<u8>> {
        text.chars()
            .map(|character| token(&self.characters, character))
            .collect()
    }

    pub fn decode(&self, tokens: &[u8]) -> String {
        tokens
            .iter()
            .map(|token| self.characters[usize::from(*token)])
            .collect()
    }
}

fn token(characters: &[char], character: char) -> Option<u8> {
    let index = characters.binary_search(&character).ok()?;
    u8::try_from(index).ok()
}

/// Tokens `[batch, context]` and what follows each of them.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    pub tokens: Tensor<B, 2, Int>,
    pub targets: Tensor<B, 2, Int>,
}

#[derive(Clone)]
pub struct WindowBatcher;

impl<B: Backend> Batcher<B, Window, Batch<B>> for WindowBatcher {
    fn batch(&self, windows: Vec<Window>, device: &B::Device) -> Batch<B> {
        let tokens: Vec<i64> = windows
            .iter()
            .flatten()
            .map(|token| (*token).into())
            .collect();
        let tokens = TensorData::new(tokens, [windows.len(), CONTEXT + 1]);
        let tokens = Tensor::<B, 2, Int>::from_data(tokens, device);
        Batch {
            tokens: tokens.clone().narrow(1, 0, CONTEXT),
            targets: tokens.narrow(1, 1, CONTEXT),
        }
    }
}
