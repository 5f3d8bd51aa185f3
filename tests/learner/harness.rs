//! A training of a small model, with steps that overflow where the data is marked, and what it shows,
//! saves and passes to its optimizer.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{
    Adam, AdamConfig, GradientsParams, MultiGradientsParams, Optimizer, Sgd, SgdConfig,
};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{
    InferenceStep, LearningComponentsMarker, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_amp::{AmpAutodiff, GradScaler, clip_grad_norm};

use crate::common::mlp::{Mlp, numbers};

pub type A = AmpAutodiff<Flex>;

/// Samples in a batch.
pub const BATCH: usize = 4;

/// The configuration and the loss scaler of a device are the process's: one test at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 8 numbers to regress 4 on.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub seed: u64,
    pub overflows: bool,
}

/// So many batches, of which these overflow.
pub fn samples(batches: usize, overflowing: &[usize]) -> Vec<Sample> {
    samples_of(batches, BATCH, overflowing)
}

pub fn samples_of(batches: usize, batch: usize, overflowing: &[usize]) -> Vec<Sample> {
    let sample = |i| Sample {
        seed: 100 + i as u64,
        overflows: overflowing.contains(&(i / batch)),
    };
    (0..batches * batch).map(sample).collect()
}

#[derive(Debug, Clone)]
pub struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
    overflows: bool,
}

#[derive(Clone)]
pub struct Samples;

impl<B: Backend> Batcher<B, Sample, Batch<B>> for Samples {
    fn batch(&self, samples: Vec<Sample>, device: &B::Device) -> Batch<B> {
        let count = samples.len();
        let rows = |width: usize, salt: u64| {
            let row = |s: &Sample| numbers(width, 2 * s.seed + salt);
            let rows: Vec<f32> = samples.iter().flat_map(row).collect();
            Tensor::from_data(TensorData::new(rows, [count, width]), device)
        };
        Batch {
            inputs: rows(8, 0),
            targets: rows(4, 1),
            overflows: samples.iter().any(|sample| sample.overflows),
        }
    }
}

pub fn loader<B: Backend>(samples: Vec<Sample>, batch: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Samples)
        .batch_size(batch)
        .build(InMemDataset::new(samples))
}

#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    pub mlp: Mlp<B>,
    #[module(skip)]
    pub by: By,
}

/// How a step runs its backward pass.
#[derive(Debug, Clone, Default)]
pub enum By {
    #[default]
    Backward,
    /// With the scaler of its device, as burn-amp-device wants it.
    Scaled,
    /// With a scaler of its own, as the explicit protocol has it.
    Own(GradScaler),
    /// With a scaler of its own in force.
    Scope(GradScaler),
    /// After a whole step of another model, with a scaler of its own.
    After(GradScaler),
    /// With a term of the loss that is beyond f16, and small.
    Beyond,
    /// Clips to this norm, with the scaler of its device, as a loop of its own does.
    Clipped(f32),
    /// Panics on the device of this name.
    Panic(String),
}

impl<B: Backend> Model<B> {
    pub fn new() -> Self {
        Self::by(By::Backward)
    }

    pub fn by(by: By) -> Self {
        Self {
            mlp: Mlp::new(),
            by,
        }
    }

    fn backward(&self, loss: Tensor<B, 1>) -> B::Gradients
    where
        B: AutodiffBackend,
    {
        match &self.by {
            By::Backward | By::Beyond | By::Clipped(_) => loss.backward(),
            By::Scaled => {
                let scaler = GradScaler::of::<B>(&loss.device());
                scaler.scale(loss).backward()
            }
            By::Own(scaler) => scaler.scale(loss).backward(),
            By::After(scaler) => {
                let (critic, mut optimizer) = (Mlp::<B>::new(), SgdConfig::new().init());
                let grads = scaler.backward(critic.loss(1), &critic);
                assert!(scaler.step(&mut optimizer, 0.1, critic, grads).1.unwrap());
                scaler.update().unwrap();
                loss.backward()
            }
            By::Scope(scaler) => scaler.scope(|| loss.backward()),
            By::Panic(on) => {
                assert_ne!(format!("{:?}", loss.device()), *on, "planted");
                loss.backward()
            }
        }
    }

    fn regress(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let output = self.mlp.forward(batch.inputs);
        let error = output.clone() - batch.targets.clone();
        let loss = error.powi_scalar(2).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        let overflows = batch.overflows;
        let output = self.regress(batch);
        let loss = match overflows {
            // Its value is 0 and its gradient is not finite, whatever the loss scale.
            true => output.loss.clone() + (self.mlp.first.weight.val().sum() * 0.0).sqrt(),
            false => output.loss.clone(),
        };
        let loss = match self.by {
            By::Beyond => {
                let wide = output.output.clone() * 3e4;
                loss + (wide.clone() * wide).mean() * 1e-12
            }
            _ => loss,
        };
        if let By::Clipped(norm) = self.by {
            let scaler = GradScaler::of::<B>(&loss.device());
            let mut grads = GradientsParams::from_grads(scaler.scale(loss).backward(), self);
            scaler.unscale(self, &mut grads).unwrap();
            clip_grad_norm(self, &mut grads, norm).unwrap();
            return TrainOutput {
                grads,
                item: output,
            };
        }
        TrainOutput::new(self, self.backward(loss), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> RegressionOutput<B> {
        self.regress(batch)
    }
}

/// The loss on samples that no test trains on.
pub fn loss_of<B: Backend>(model: &Model<B>) -> f32 {
    let held_out = (0..64).map(|i| Sample {
        seed: 9000 + i,
        overflows: false,
    });
    let batch = Samples.batch(held_out.collect(), &model.devices()[0]);
    model.regress(batch).loss.into_scalar().elem()
}

pub type SgdOf<B> = OptimizerAdaptor<Sgd<<B as AutodiffBackend>::InnerBackend>, Model<B>, B>;
pub type AdamOf<B> = OptimizerAdaptor<Adam, Model<B>, B>;

pub fn sgd<B: AutodiffBackend>() -> SgdOf<B> {
    SgdConfig::new().init()
}

pub fn adam<B: AutodiffBackend>() -> AdamOf<B> {
    AdamConfig::new().init()
}

pub type Components<B, S, O> = LearningComponentsMarker<B, S, Model<B>, O>;
pub type Training<B, S, O> = SupervisedTraining<Components<B, S, O>>;

/// A folder of a test's own, empty.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("learner")
        .join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Records FP32 parameters in full.
pub fn recorder() -> NamedMpkFileRecorder<FullPrecisionSettings> {
    NamedMpkFileRecorder::new()
}

/// A training without a display, in the settings that the tests share.
pub fn training<B, S, O>(folder: &Path, train: Vec<Sample>) -> Training<B, S, O>
where
    B: AutodiffBackend,
    S: LrScheduler + 'static,
    O: Optimizer<Model<B>, B> + 'static,
{
    training_of(folder, train, BATCH)
}

pub fn training_of<B, S, O>(folder: &Path, train: Vec<Sample>, batch: usize) -> Training<B, S, O>
where
    B: AutodiffBackend,
    S: LrScheduler + 'static,
    O: Optimizer<Model<B>, B> + 'static,
{
    let valid = samples(2, &[]);
    SupervisedTraining::new(folder, loader(train, batch), loader(valid, BATCH))
        .with_application_logger(None)
        .renderer(Watch::default())
}

/// The epochs that a folder has checkpoints of.
pub fn checkpoints(folder: &Path) -> Vec<usize> {
    let Ok(files) = std::fs::read_dir(folder.join("checkpoint")) else {
        return Vec::new();
    };
    let mut epochs: Vec<usize> = files
        .filter_map(|file| {
            let name = file.unwrap().file_name().into_string().unwrap();
            let epoch = name.strip_prefix("scheduler-")?.strip_suffix(".mpk")?;
            epoch.parse().ok()
        })
        .collect();
    epochs.sort_unstable();
    epochs
}

/// An optimizer that records its calls.
#[derive(Clone)]
pub struct Spy<O> {
    inner: O,
    steps: Arc<Mutex<Vec<Given>>>,
}

/// The learning rate of an optimizer's step, and whether there were gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Given {
    pub lr: f64,
    pub gradients: bool,
}

impl<O> Spy<O> {
    pub fn new(inner: O) -> Self {
        Self {
            inner,
            steps: Arc::default(),
        }
    }

    /// The calls that are recorded.
    pub fn steps(&self) -> Steps {
        Steps(self.steps.clone())
    }

    fn saw(&self, lr: f64, gradients: bool) {
        self.steps.lock().unwrap().push(Given { lr, gradients });
    }
}

pub struct Steps(Arc<Mutex<Vec<Given>>>);

impl Steps {
    pub fn all(&self) -> Vec<Given> {
        self.0.lock().unwrap().clone()
    }

    /// The learning rates of the steps that had gradients.
    pub fn lrs_taken(&self) -> Vec<f64> {
        let steps = self.all();
        let taken = steps.iter().filter(|step| step.gradients);
        taken.map(|step| step.lr).collect()
    }
}

impl<O, M, B> Optimizer<M, B> for Spy<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = O::Record;

    fn step(&mut self, lr: f64, module: M, grads: GradientsParams) -> M {
        self.saw(lr, !grads.is_empty());
        self.inner.step(lr, module, grads)
    }

    fn step_multi(&mut self, lr: f64, module: M, grads: MultiGradientsParams) -> M {
        self.saw(lr, grads.grads.iter().any(|(grads, _)| !grads.is_empty()));
        self.inner.step_multi(lr, module, grads)
    }

    fn to_record(&self) -> O::Record {
        self.inner.to_record()
    }

    fn load_record(self, record: O::Record) -> Self {
        Self {
            inner: self.inner.load_record(record),
            ..self
        }
    }
}

/// A renderer that shows nothing and remembers what it should have shown in training.
#[derive(Clone, Default)]
pub struct Watch {
    names: Arc<Mutex<HashMap<MetricId, String>>>,
    shown: Arc<Mutex<Vec<(String, String)>>>,
    rendered: Arc<Mutex<usize>>,
    takes: Duration,
    in_validation: Option<Arc<dyn Fn(usize) + Send + Sync>>,
}

impl Watch {
    /// A watch that is slow to show an item.
    pub fn slow(takes: Duration) -> Self {
        Self {
            takes,
            ..Self::default()
        }
    }

    /// A watch that calls `in_validation` with the epoch whenever an item of validation is shown.
    pub fn calling(in_validation: impl Fn(usize) + Send + Sync + 'static) -> Self {
        Self {
            in_validation: Some(Arc::new(in_validation)),
            ..Self::default()
        }
    }

    /// The values that a metric showed, item by item.
    pub fn shown(&self, metric: &str) -> Vec<String> {
        let shown = self.shown.lock().unwrap();
        let of_metric = shown.iter().filter(|(name, _)| name == metric);
        of_metric.map(|(_, text)| text.clone()).collect()
    }

    /// The names of the metrics.
    pub fn metrics(&self) -> Vec<String> {
        let mut names: Vec<_> = self.names.lock().unwrap().values().cloned().collect();
        names.sort();
        names
    }

    /// How many items of training and validation were shown.
    pub fn rendered(&self) -> usize {
        *self.rendered.lock().unwrap()
    }
}

impl MetricsRendererTraining for Watch {
    fn update_train(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let name = self.names.lock().unwrap()[&entry.metric_id].clone();
        let text = entry.serialized_entry.formatted;
        self.shown.lock().unwrap().push((name, text));
    }

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {
        std::thread::sleep(self.takes);
        *self.rendered.lock().unwrap() += 1;
    }

    fn render_valid(&mut self, progress: TrainingProgress, _: Vec<ProgressType>) {
        if let Some(in_validation) = &self.in_validation {
            in_validation(progress.global_progress.items_processed);
        }
        *self.rendered.lock().unwrap() += 1;
    }
}

impl MetricsRendererEvaluation for Watch {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Watch {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        let mut names = self.names.lock().unwrap();
        names.insert(definition.metric_id, definition.name);
    }
}
