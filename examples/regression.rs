//! Regression with Burn's `Learner`: how far does a throw go, by its speed, angle and height?
//!
//! The data, the model and its steps are as for any backend. Two lines make it mixed precision:
//! `AmpAutodiff<Flex>` instead of `Autodiff<Flex>`, and `with_amp`. Half precision is emulated on a
//! CPU: this shows the results, not the speed.
//!
//! ```sh
//! cargo run --release --example regression
//! cargo run --release --example regression -- --precision bf16
//! ```
//!
//! Each epoch prints a line. Burn's dashboard is in the example `learner`.

mod epoch_lines;

use std::error::Error;

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Gelu, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_amp::{AmpAutodiff, AmpConfig, AmpTrainingExt, Precision};
use clap::Parser;
use epoch_lines::EpochLines;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SEED: u64 = 42;
const TRAIN: usize = 4096;
const VALID: usize = 1024;
const EPOCHS: usize = 60;
const BATCH: usize = 64;
const LEARNING_RATE: f64 = 2e-2;
const WIDTH: usize = 32;
/// What the network calls 1, in metres.
const UNIT: f32 = 30.0;

#[derive(Parser)]
#[command(about = "Learns how far a throw goes, with Burn's Learner")]
struct Args {
    /// What to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
}

/// In metres, seconds and radians.
#[derive(Clone, Debug)]
struct Throw {
    speed: f32,
    angle: f32,
    height: f32,
    distance: f32,
}

impl Throw {
    /// The distance is measured to within half a metre: no model can foretell it with an error of
    /// less than 0.29 m.
    fn random(rng: &mut StdRng) -> Self {
        let speed = rng.random_range(5.0..30.0_f32);
        let angle = rng.random_range(0.2..1.2_f32);
        let height = rng.random_range(0.0..10.0_f32);
        let (up, along) = (speed * angle.sin(), speed * angle.cos());
        let seconds = (up + (up * up + 2.0 * 9.81 * height).sqrt()) / 9.81;
        Self {
            speed,
            angle,
            height,
            distance: along * seconds + rng.random_range(-0.5..0.5),
        }
    }
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    /// `[batch, 3]`
    inputs: Tensor<B, 2>,
    /// `[batch, 1]`
    distances: Tensor<B, 2>,
}

#[derive(Clone)]
struct ThrowBatcher;

impl<B: Backend> Batcher<B, Throw, Batch<B>> for ThrowBatcher {
    fn batch(&self, throws: Vec<Throw>, device: &B::Device) -> Batch<B> {
        let count = throws.len();
        // Each from -1 to 1.
        let input = |t: &Throw| {
            [
                t.speed / 12.5 - 1.4,
                2.0 * t.angle - 1.4,
                t.height / 5.0 - 1.0,
            ]
        };
        let inputs: Vec<_> = throws.iter().flat_map(input).collect();
        let distances: Vec<_> = throws.iter().map(|t| t.distance / UNIT).collect();
        Batch {
            inputs: Tensor::from_data(TensorData::new(inputs, [count, 3]), device),
            distances: Tensor::from_data(TensorData::new(distances, [count, 1]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    hidden1: Linear<B>,
    hidden2: Linear<B>,
    output: Linear<B>,
    activation: Gelu,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden1: LinearConfig::new(3, WIDTH).init(device),
            hidden2: LinearConfig::new(WIDTH, WIDTH).init(device),
            output: LinearConfig::new(WIDTH, 1).init(device),
            activation: Gelu::new(),
        }
    }

    fn forward(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let x = self.activation.forward(self.hidden1.forward(batch.inputs));
        let x = self.activation.forward(self.hidden2.forward(x));
        let output = self.output.forward(x);
        let loss = MseLoss::new().forward(output.clone(), batch.distances.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, batch.distances)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> RegressionOutput<B> {
        self.forward(batch)
    }
}

// The first of the two lines: it was Autodiff<Flex>.
type B = AmpAutodiff<Flex>;

fn main() -> Result<(), Box<dyn Error>> {
    let Args { precision } = Args::parse();
    let device = Default::default();
    B::seed(&device, SEED);
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut throws = |count| -> Vec<_> { (0..count).map(|_| Throw::random(&mut rng)).collect() };
    let (train, valid) = (throws(TRAIN), throws(VALID));

    let train = DataLoaderBuilder::new(ThrowBatcher)
        .batch_size(BATCH)
        .shuffle(SEED)
        .build(InMemDataset::new(train));
    let valid_loader = DataLoaderBuilder::new(ThrowBatcher)
        .batch_size(BATCH)
        .build(InMemDataset::new(valid.clone()));
    let schedule =
        CosineAnnealingLrSchedulerConfig::new(LEARNING_RATE, EPOCHS * TRAIN / BATCH).init()?;

    let model = Model::<B>::new(&device);
    let model = SupervisedTraining::new("target/regression", train, valid_loader)
        .metrics((LossMetric::<Flex>::new(),))
        .renderer(EpochLines::new())
        .num_epochs(EPOCHS)
        // The second.
        .with_amp(AmpConfig::new().with_precision(precision))
        .launch(Learner::new(model, AdamConfig::new().init(), schedule))?
        .model;

    let loss = model.forward(ThrowBatcher.batch(valid, &device)).loss;
    let error = UNIT * loss.into_scalar().sqrt();
    println!("validation error: {error:.3} m");
    Ok(())
}
