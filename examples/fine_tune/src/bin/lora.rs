//! LoRA on the pretrained transformer of `fine_tune` (Hu et al., "LoRA: Low-Rank Adaptation of Large
//! Language Models", 2021): is a verse from the first or from the second half of the book?
//!
//! The base is frozen, and its weights are in memory in half. What is trained is FP32: two matrices of low
//! rank beside the query and the value of each attention, and the output layer. All ranks of a precision
//! are trained on one base. FP32, to compare, is plain Burn with a frozen base in FP32.
//!
//! At the end, the low-rank matrices are merged into the weights of the base. The last column has the
//! largest change of a logit by that, as a share of the largest logit.
//!
//! ```sh
//! cargo run --release -p fine_tune --bin lora
//! cargo run --release -p fine_tune --bin lora -- --precision f32,bf16 --rank 8 --labels 200 --seed 7
//! cargo run --release -p fine_tune --bin lora --features cuda,fusion,autotune -- --backend cuda
//! ```

#[path = "../../../backends/mod.rs"]
mod backends;
// Half of each module is for the pretraining.
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
#[path = "../train.rs"]
mod train;
#[allow(dead_code)]
#[path = "../weights.rs"]
mod weights;

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::nn::attention::MultiHeadAttention;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::TransformerEncoderLayer;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpError, GradScaler, LossScaleConfig, Precision, full_precision,
    half_weights, precision_of,
};
use clap::Parser;

use backends::{Choice, ended, on_backend};
use corpus::{Corpus, Verse};
use data::Labelled;
use model::{Classifier, Encoder, WordGuesser, mean};
use train::{Plan, accuracy, classify};

#[derive(Parser)]
#[command(about = "Fine-tunes a frozen transformer in half with FP32 adapters of low rank")]
struct Args {
    /// The backend to train on.
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// The precisions to train in: auto, f32, f16, bf16 or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16, Precision::Bf16])]
    precision: Vec<Precision>,
    /// The ranks of the adapters, or a list of them.
    #[arg(long, value_delimiter = ',', default_values_t = [4_u16, 8], value_parser = clap::value_parser!(u16).range(1..=64))]
    rank: Vec<u16>,
    /// The adapters' output is scaled by alpha / rank.
    #[arg(long, default_value_t = 8.0)]
    alpha: f64,
    /// Verses that have a label.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(32..=1200))]
    labels: u16,
    /// Seed of the adapters, of dropout, of the order and of which verses have a label.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// What is trained beside a linear layer: a matrix to few features, and one back.
#[derive(Module, Debug)]
struct Lora<B: Backend> {
    a: Linear<B>,
    b: Linear<B>,
    scale: f64,
}

impl<B: Backend> Lora<B> {
    fn new(width: usize, rank: usize, alpha: f64, device: &B::Device) -> Self {
        // B is zero, so that the first output is the base's. A is random: with two zeros, neither would
        // ever get a gradient.
        let b = LinearConfig::new(rank, width).with_initializer(Initializer::Zeros);
        Self {
            a: LinearConfig::new(width, rank).with_bias(false).init(device),
            b: b.with_bias(false).init(device),
            scale: alpha / rank as f64,
        }
    }

    fn forward(&self, base: &Linear<B>, x: Tensor<B, 3>) -> Tensor<B, 3> {
        base.forward(x.clone()) + self.b.forward(self.a.forward(x)) * self.scale
    }

    /// Adds the product of the two matrices to the weight of the base, which becomes FP32: in half,
    /// `W` would swallow a small `A B`.
    fn merge_into(&self, base: &mut Linear<B>) {
        let product = || self.a.weight.val().matmul(self.b.weight.val()) * self.scale;
        let merged = |weight: Tensor<B, 2>| full_precision(|| weight + product());
        base.weight = base.weight.clone().map(merged);
    }
}

/// The adapters of a layer.
#[derive(Module, Debug)]
struct LayerAdapters<B: Backend> {
    query: Lora<B>,
    value: Lora<B>,
}

impl<B: Backend> LayerAdapters<B> {
    /// The layer with the adapters. It is Burn's, with the normalization first.
    fn forward(
        &self,
        base: &TransformerEncoderLayer<B>,
        x: Tensor<B, 3>,
        padding: Tensor<B, 2, Bool>,
    ) -> Tensor<B, 3> {
        let attended = self.attend(&base.mha, base.norm_2.forward(x.clone()), padding);
        let x = x + base.dropout.forward(attended);
        let fed_forward = base.pwff.forward(base.norm_1.forward(x.clone()));
        x + base.dropout.forward(fed_forward)
    }

    fn attend(
        &self,
        base: &MultiHeadAttention<B>,
        x: Tensor<B, 3>,
        padding: Tensor<B, 2, Bool>,
    ) -> Tensor<B, 3> {
        let [batch, length, width] = x.dims();
        let heads = |x: Tensor<B, 3>| -> Tensor<B, 4> {
            x.reshape([batch, length, base.n_heads, base.d_k])
                .swap_dims(1, 2)
        };
        let query = heads(self.query.forward(&base.query, x.clone()));
        let key = heads(base.key.forward(x.clone()));
        let value = heads(self.value.forward(&base.value, x));
        let scores = query
            .matmul(key.transpose())
            .div_scalar((base.d_k as f32).sqrt());
        let padding = padding.reshape([batch, 1, 1, length]);
        let scores = base.dropout.forward(scores);
        let weights = softmax(scores.mask_fill(padding, base.min_float), 3);
        let context = weights.matmul(value).swap_dims(1, 2);
        base.output.forward(context.reshape([batch, length, width]))
    }
}

/// All that is trained. The base is an argument: other adapters can use it as well.
#[derive(Module, Debug)]
struct Adapters<B: Backend> {
    layers: Vec<LayerAdapters<B>>,
    output: Linear<B>,
}

impl<B: Backend> Adapters<B> {
    fn new(base: &Encoder<B>, rank: usize, alpha: f64, device: &B::Device) -> Self {
        let width = base.layers.d_model;
        let lora = || Lora::new(width, rank, alpha, device);
        let layers = base.layers.layers.iter().map(|_| LayerAdapters {
            query: lora(),
            value: lora(),
        });
        Self {
            layers: layers.collect(),
            output: LinearConfig::new(width, 2).init(device),
        }
    }

    /// The logits of the two halves, `[batch, 2]`.
    fn forward(
        &self,
        base: &Encoder<B>,
        tokens: Tensor<B, 2, Int>,
        padding: Tensor<B, 2, Bool>,
    ) -> Tensor<B, 2> {
        let mut x = base.embed(tokens);
        for (layer, adapters) in base.layers.layers.iter().zip(&self.layers) {
            x = adapters.forward(layer, x, padding.clone());
        }
        self.output.forward(mean(base.norm.forward(x), padding))
    }

    fn loss(&self, base: &Encoder<B>, batch: Labelled<B>) -> Tensor<B, 1> {
        let logits = self.forward(base, batch.tokens, batch.padding);
        let device = logits.device();
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits, batch.halves)
    }

    /// The base with the adapters in its weights. These weights are FP32.
    fn merged(&self, mut base: Encoder<B>) -> Encoder<B> {
        for (layer, adapters) in base.layers.layers.iter_mut().zip(&self.layers) {
            adapters.query.merge_into(&mut layer.mha.query);
            adapters.value.merge_into(&mut layer.mha.value);
        }
        base
    }
}

/// The system's allocator, with a count of the live bytes.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);

// Safety: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    ended(on_backend!(
        args.backend,
        "-p fine_tune --bin lora",
        run(&args)
    ))
}

fn run<B: Backend>(args: &Args) -> Result<(), Box<dyn Error>> {
    let corpus = Corpus::load(args.labels.into(), args.seed);
    println!(
        "precision  rank           trained  base KiB  adapters KiB  kept KiB  last loss  test accuracy  \
         skipped   merged"
    );
    let device = Default::default();
    for precision in &args.precision {
        AmpConfig::new()
            .with_precision(*precision)
            .apply::<AmpAutodiff<B>>(&device)?;
        match precision_of::<AmpAutodiff<B>>(&device)? {
            Precision::F32 => rows::<Autodiff<B>>(Precision::F32, &corpus, args, Ok)?,
            half => {
                let halved = |encoder: Encoder<Amp<B>>| half_weights(encoder, half);
                rows::<AmpAutodiff<B>>(half, &corpus, args, halved)?;
            }
        }
    }
    Ok(())
}

/// Trains adapters of each rank on one base. `halved` casts the weights of an encoder to half.
fn rows<B: AutodiffBackend>(
    precision: Precision,
    corpus: &Corpus,
    args: &Args,
    halved: impl Fn(Encoder<B::InnerBackend>) -> Result<Encoder<B::InnerBackend>, AmpError>,
) -> Result<(), Box<dyn Error>> {
    let mut pretrained = WordGuesser::<B>::new(corpus.vocabulary.len(), &Default::default());
    weights::load(&mut pretrained, &weights::shipped(), None)?;
    // Frozen first: the backend without autodiff keeps that for the way back.
    let base = Encoder::<B>::from_inner(halved(pretrained.encoder.no_grad().valid())?);
    for rank in &args.rank {
        // Each training has a loss scale of its own.
        let scaler = GradScaler::new(LossScaleConfig::default())?;
        let tuned = scaler.scope(|| tune(&base, (*rank).into(), corpus, args, &halved))?;
        let kept = match args.backend {
            Choice::Flex => kib(tuned.kept),
            // The allocator does not see a device's memory.
            _ => "-".into(),
        };
        println!(
            "{precision:<9}  {rank:>4}  {:>6} ({:>5.2} %)  {:>8}  {:>12}  {kept:>8}  {:>9.4}  {:>11.2} %  \
             {:>7}  {:>7.1e}",
            tuned.trained,
            100.0 * tuned.trained as f64 / (base.num_params() + tuned.trained) as f64,
            kib(bytes(&base)),
            kib(tuned.bytes),
            tuned.loss,
            100.0 * tuned.accuracy,
            scaler.skipped_steps(),
            tuned.changed,
        );
    }
    Ok(())
}

struct Tuned {
    /// The number of trained parameters, and their bytes.
    trained: usize,
    bytes: usize,
    /// The bytes that a loss keeps for its backward pass.
    kept: usize,
    /// The mean loss of the last tenth of the steps.
    loss: f64,
    accuracy: f64,
    /// The largest change of a logit by the merging, as a share of the largest logit.
    changed: f64,
}

fn tune<B: AutodiffBackend>(
    base: &Encoder<B>,
    rank: usize,
    corpus: &Corpus,
    args: &Args,
    halved: impl Fn(Encoder<B::InnerBackend>) -> Result<Encoder<B::InnerBackend>, AmpError>,
) -> Result<Tuned, AmpError> {
    let device = Default::default();
    B::seed(&device, args.seed);
    let plan = Plan {
        steps: 200,
        batch: 32,
        learning_rate: 5e-3,
        seed: args.seed,
    };
    let adapters = Adapters::new(base, rank, args.alpha, &device);
    let loss = |adapters: &Adapters<B>, batch| adapters.loss(base, batch);
    let mut losses = Vec::new();
    let after_step = |loss| losses.push(loss);
    let adapters = classify::<B, _>(adapters, corpus, &plan, &device, loss, after_step);
    let last = &losses[plan.steps - plan.steps / 10..];
    let verses = &corpus.labelled[..plan.batch];
    let kept = kept(|| loss(&adapters, Labelled::new(verses, &device)));

    let (base, adapters) = (base.valid(), adapters.valid());
    let merged = Classifier {
        encoder: halved(adapters.merged(base.clone()))?,
        output: adapters.output.clone(),
    };
    let beside = |tokens, padding| adapters.forward(&base, tokens, padding);
    let inside = |tokens, padding| merged.forward(tokens, padding);
    Ok(Tuned {
        trained: adapters.num_params(),
        bytes: bytes(&adapters),
        kept,
        loss: last.iter().sum::<f64>() / last.len() as f64,
        accuracy: accuracy::<B::InnerBackend>(&corpus.test, &device, beside),
        changed: changed::<B::InnerBackend>(&corpus.test, &device, beside, inside),
    })
}

/// The live bytes that a loss adds. It is dropped without a backward pass, which would count as a step.
fn kept<B: Backend>(loss: impl FnOnce() -> Tensor<B, 1>) -> usize {
    let before = LIVE.load(Relaxed);
    let loss = loss();
    let after = LIVE.load(Relaxed);
    drop(loss);
    after.saturating_sub(before)
}

/// The largest difference of the logits, as a share of the largest logit.
fn changed<B: Backend>(
    verses: &[Verse],
    device: &B::Device,
    one: impl Fn(Tensor<B, 2, Int>, Tensor<B, 2, Bool>) -> Tensor<B, 2>,
    other: impl Fn(Tensor<B, 2, Int>, Tensor<B, 2, Bool>) -> Tensor<B, 2>,
) -> f64 {
    let (mut difference, mut largest) = (0.0_f64, 0.0_f64);
    for verses in verses.chunks(32) {
        let batch = Labelled::<B>::new(verses, device);
        let one = one(batch.tokens.clone(), batch.padding.clone()).into_data();
        let other = other(batch.tokens, batch.padding).into_data();
        for (one, other) in one.iter::<f64>().zip(other.iter::<f64>()) {
            difference = difference.max((one - other).abs());
            largest = largest.max(one.abs());
        }
    }
    difference / largest
}

/// The bytes of a module's parameters.
fn bytes<B: Backend>(module: &impl Module<B>) -> usize {
    struct Bytes(usize);
    impl<B: Backend> ModuleVisitor<B> for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            self.0 += value.shape().num_elements() * value.dtype().size();
        }
    }
    let mut bytes = Bytes(0);
    module.visit(&mut bytes);
    bytes.0
}

fn kib(bytes: usize) -> String {
    bytes.div_ceil(1024).to_string()
}
