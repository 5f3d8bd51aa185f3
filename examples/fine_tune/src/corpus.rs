//! The text as words: verses to classify, and the running text to pretrain on. It names nothing of
//! Burn: the example for Burn 0.22 and 0.23 has it too.

use std::collections::{BTreeMap, HashMap};

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Words that the model sees at once; the longest verse has no more.
pub const LENGTH: usize = 64;
/// The tokens that are no words.
pub const PADDING: usize = 0;
const UNKNOWN: usize = 1;
pub const MASK: usize = 2;

#[derive(Clone, Debug)]
pub struct Verse {
    pub tokens: Vec<usize>,
    /// 0 or 1.
    pub half: i64,
}

pub struct Corpus {
    /// The verses that are not for the test, one after the other.
    pub text: Vec<usize>,
    /// The few verses that the classifier is trained on.
    pub labelled: Vec<Verse>,
    pub test: Vec<Verse>,
    /// The word of each token.
    pub vocabulary: Vec<String>,
}

impl Corpus {
    /// The Book of Genesis. `seed` draws the verses that have a label.
    pub fn load(labels: usize, seed: u64) -> Self {
        let text = include_str!("../genesis.txt");
        let count = text.lines().count();
        let (test, train): (Vec<_>, Vec<_>) =
            text.lines().enumerate().partition(|(i, _)| i % 5 == 4);

        // A word that occurs only once identifies its verse rather than the half.
        let mut occurrences = BTreeMap::new();
        for word in train.iter().flat_map(|(_, line)| words(line)) {
            *occurrences.entry(word).or_insert(0) += 1;
        }
        let known = occurrences.into_iter().filter(|(_, n)| *n > 1);
        let mut vocabulary = ["padding", "unknown", "mask"]
            .map(|name| format!("[{name}]"))
            .to_vec();
        vocabulary.extend(known.map(|(word, _)| word));
        let tokens: HashMap<_, _> = vocabulary.iter().cloned().zip(0..).collect();

        let verse = |(i, line)| Verse {
            tokens: words(line)
                .map(|word| tokens.get(&word).copied().unwrap_or(UNKNOWN))
                .collect(),
            half: i64::from(i >= count / 2),
        };
        let mut labelled: Vec<_> = train.into_iter().map(verse).collect();
        let text = labelled.iter().flat_map(|verse| verse.tokens.clone());
        let text = text.collect();
        labelled.shuffle(&mut StdRng::seed_from_u64(seed));
        labelled.truncate(labels);
        Self {
            text,
            labelled,
            test: test.into_iter().map(verse).collect(),
            vocabulary,
        }
    }
}

fn words(line: &str) -> impl Iterator<Item = String> {
    line.split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}
