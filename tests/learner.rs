//! Burn's `Learner` trains on `AmpAutodiff` as on any backend: by type alone, with a word on the
//! device's precision.
//!
//! One test, in a process of its own: it configures the device for every thread.

use std::path::Path;

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::CompactRecorder;
use burn::tensor::activation;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::LossMetric;
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{
    InferenceStep, Interrupter, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_amp::{AmpAutodiff, AmpConfig, GradScaler, Precision};

type A = AmpAutodiff<Flex>;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(2, 16).init(device),
            second: LinearConfig::new(16, 1).init(device),
        }
    }

    fn regress(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let hidden = activation::tanh(self.first.forward(batch.inputs));
        let output = self.second.forward(hidden);
        let loss = MseLoss::new().forward(output.clone(), batch.targets.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.regress(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> RegressionOutput<B> {
        self.regress(batch)
    }
}

/// Inputs `[batch, 2]` and targets `[batch, 1]`.
#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
}

#[derive(Clone)]
struct Points;

impl<B: Backend> Batcher<B, [f32; 2], Batch<B>> for Points {
    fn batch(&self, points: Vec<[f32; 2]>, device: &B::Device) -> Batch<B> {
        let count = points.len();
        let targets: Vec<f32> = points.iter().map(|[x, y]| x * y + 0.5 * x).collect();
        Batch {
            inputs: Tensor::from_data(TensorData::new(points.concat(), [count, 2]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count, 1]), device),
        }
    }
}

fn points() -> Vec<[f32; 2]> {
    let side = || (-8..8).map(|i| i as f32 / 8.0);
    side().flat_map(|x| side().map(move |y| [x, y])).collect()
}

fn trained(precision: Precision) -> f32 {
    let device = Default::default();
    AmpConfig::new()
        .with_precision(precision)
        .apply::<A>(&device)
        .unwrap();
    <A as Backend>::seed(&device, 5);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("learner-{precision}"));
    let _ = std::fs::remove_dir_all(&folder);
    let train = DataLoaderBuilder::<A, _, _>::new(Points)
        .batch_size(32)
        .shuffle(3)
        .num_workers(1)
        .build(InMemDataset::new(points()));
    let valid = DataLoaderBuilder::new(Points)
        .batch_size(256)
        .build(InMemDataset::new(points()));
    let result = SupervisedTraining::new(&folder, train, valid)
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .with_file_checkpointer(CompactRecorder::new())
        .with_interrupter(Interrupter::new())
        .renderer(Silent)
        .num_epochs(10)
        .launch(Learner::new(
            Model::new(&device),
            AdamConfig::new().init::<A, Model<A>>(),
            1e-2,
        ));
    assert!(folder.join("checkpoint/model-10.mpk").exists());
    let batch = Points.batch(points(), &device);
    result.model.regress(batch).loss.into_scalar()
}

/// Shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

#[test]
fn a_learner_trains_in_every_precision() {
    let untrained = {
        <A as Backend>::seed(&Default::default(), 5);
        let model = Model::<A>::new(&Default::default()).valid();
        let batch = Points.batch(points(), &Default::default());
        model.regress(batch).loss.into_scalar()
    };
    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        let loss = trained(precision);
        assert!(loss < 0.2 * untrained, "{precision}: {loss} of {untrained}");
        let scaler = GradScaler::of::<A>(&Default::default());
        let steps = scaler.state().taken_steps() + scaler.skipped_steps();
        assert_eq!(steps, if precision == Precision::F16 { 80 } else { 0 });
    }
}
