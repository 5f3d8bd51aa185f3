//! Inference in half precision, with its memory: the pretrained model of `fine_tune` guesses masked
//! words in verses that it was not trained on.
//!
//! On `Amp<B>` the weights stay FP32, and each parameter keeps a half copy once a product has used it.
//! After `half_weights` only the half copies are left. Flex emulates half precision: there the peak
//! memory of a batch is no smaller.
//!
//! ```sh
//! cargo run --release -p fine_tune --bin half_inference
//! cargo run --release -p fine_tune --bin half_inference -- --batch 128
//! ```

// Half of each module is for training.
#[allow(dead_code)]
#[path = "../corpus.rs"]
mod corpus;
#[allow(dead_code)]
#[path = "../data.rs"]
mod data;
#[allow(dead_code)]
#[path = "../model.rs"]
mod model;
#[allow(dead_code)]
#[path = "../weights.rs"]
mod weights;

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::Flex;
use burn::prelude::*;
use burn_amp::{Amp, AmpConfig, AmpError, Precision, half_weights};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;

use corpus::Corpus;
use data::Masked;
use model::WordGuesser;

/// Batches in which words are counted.
const BATCHES: usize = 8;

#[derive(Parser)]
#[command(about = "Inference in half precision, with its memory")]
struct Args {
    /// Pieces of text of 64 words in a batch.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    /// Seed of the pieces and of the words that are masked.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// The system's allocator, with counts of the live bytes and of their peak.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// Safety: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let corpus = Corpus::load(0, args.seed);
    println!("precision  weights in  model KiB  batch KiB  words guessed");
    let row = |precision: Precision, weights: Precision, measured: Measured| {
        let [model, batch] = [measured.model, measured.batch].map(|bytes| bytes.div_ceil(1024));
        let percent = 100.0 * measured.guessed;
        println!("{precision:<9}  {weights:<10} {model:>10} {batch:>10} {percent:>12.2} %");
    };
    let f32 = Precision::F32;
    row(f32, f32, measure::<Flex>(&corpus, &args, Ok)?);
    for precision in [Precision::F16, Precision::Bf16] {
        AmpConfig::new()
            .with_precision(precision)
            .apply::<Amp<Flex>>(&Default::default())?;
        row(precision, f32, measure::<Amp<Flex>>(&corpus, &args, Ok)?);
        let halved = measure::<Amp<Flex>>(&corpus, &args, |model| half_weights(model, precision))?;
        row(precision, precision, halved);
    }
    Ok(())
}

struct Measured {
    /// The bytes of the model after its first use.
    model: usize,
    /// The bytes of a batch beside the model, at the peak.
    batch: usize,
    /// The share of the masked words.
    guessed: f64,
}

fn measure<B: Backend>(
    corpus: &Corpus,
    args: &Args,
    adapted: impl FnOnce(WordGuesser<B>) -> Result<WordGuesser<B>, AmpError>,
) -> Result<Measured, Box<dyn Error>> {
    // Memory that a process sets up once, such as a thread's buffers, does not belong to the model.
    measure_cold::<B>(corpus, args, Ok)?;
    measure_cold(corpus, args, adapted)
}

fn measure_cold<B: Backend>(
    corpus: &Corpus,
    args: &Args,
    adapted: impl FnOnce(WordGuesser<B>) -> Result<WordGuesser<B>, AmpError>,
) -> Result<Measured, Box<dyn Error>> {
    let device = Default::default();
    let text: Vec<_> = corpus
        .test
        .iter()
        .flat_map(|verse| verse.tokens.clone())
        .collect();
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mut next = || Masked::<B>::random(&text, args.batch.into(), &mut rng, &device);

    let before = LIVE.load(Relaxed);
    let mut model = WordGuesser::new(corpus.vocabulary.len(), &device);
    weights::load(&mut model, &weights::shipped(), None)?;
    let model = adapted(model)?;
    // The first use makes the copies that the model keeps.
    guessed(&model, next());
    let live = LIVE.load(Relaxed);

    let batch = next();
    let without = LIVE.load(Relaxed);
    PEAK.store(without, Relaxed);
    let mut shares = vec![guessed(&model, batch)];
    let peak = PEAK.load(Relaxed);
    shares.extend((1..BATCHES).map(|_| guessed(&model, next())));
    Ok(Measured {
        model: live - before,
        batch: peak - without,
        guessed: shares.iter().sum::<f64>() / BATCHES as f64,
    })
}

/// The share of the masked words that the model guesses.
fn guessed<B: Backend>(model: &WordGuesser<B>, batch: Masked<B>) -> f64 {
    let [count] = batch.words.dims();
    let guesses = model.forward(batch.tokens, batch.places).argmax(1);
    let right = guesses.squeeze_dim::<1>(1).equal(batch.words).int().sum();
    right.into_scalar().elem::<f64>() / count as f64
}
