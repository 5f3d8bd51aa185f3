//! Burn's off-policy reinforcement learning: an agent learns the values of a corridor, which are
//! known, while other threads act by its policy.

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::rl::{
    Batchable, Environment, LearnerTransitionBatch, Policy, PolicyLearner, PolicyState,
    RLTrainOutput, SliceAccess, StepResult,
};
use burn::tensor::activation;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Distribution};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{OffPolicyConfig, RLStrategies, RLTraining};
use burn_amp::{
    AmpAutodiff, AmpConfig, DynamicLossScale, GradScaler, LossScaleMetric, LossScaler, Precision,
    SkippedStepsMetric, with_precision,
};

use common::roundoff;

type B = AmpAutodiff<Flex>;

const CELLS: usize = 6;
const DISCOUNT: f32 = 0.9;

/// A corridor with a reward behind its last cell. Every episode starts in another cell.
#[derive(Default)]
struct Corridor {
    cell: usize,
    steps: usize,
    episodes: usize,
}

#[derive(Clone, Copy)]
struct Cell(usize);

#[derive(Clone, Copy)]
struct Forward(bool);

impl Environment for Corridor {
    type State = Cell;
    type Action = Forward;

    const MAX_STEPS: usize = 200;

    fn state(&self) -> Cell {
        Cell(self.cell)
    }

    fn step(&mut self, Forward(forward): Forward) -> StepResult<Cell> {
        self.steps += 1;
        let done = forward && self.cell == CELLS - 1;
        if !done {
            self.cell = match forward {
                true => self.cell + 1,
                false => self.cell.saturating_sub(1),
            };
        }
        StepResult {
            next_state: self.state(),
            reward: f64::from(done),
            done,
            truncated: self.steps == Self::MAX_STEPS,
        }
    }

    fn reset(&mut self) {
        self.steps = 0;
        self.episodes += 1;
        self.cell = self.episodes % CELLS;
    }
}

/// The discounted reward of going back and of going forward in each cell, and then the fastest way.
fn values() -> Vec<f32> {
    let value = |steps: usize| DISCOUNT.powi(steps as i32);
    let of_cell = |cell: usize| {
        let behind = cell.saturating_sub(1);
        [value(CELLS - behind), value(CELLS - 1 - cell)]
    };
    (0..CELLS).flat_map(of_cell).collect()
}

/// A row for each observation, action or value.
#[derive(Clone, Debug)]
struct Rows<B: Backend>(Tensor<B, 2>);

impl<B: Backend> Batchable for Rows<B> {
    fn batch(rows: Vec<Self>) -> Self {
        Rows(Tensor::cat(rows.into_iter().map(|row| row.0).collect(), 0))
    }

    fn unbatch(self) -> Vec<Self> {
        self.0.split(1, 0).into_iter().map(Rows).collect()
    }
}

impl<B: Backend> SliceAccess<B> for Rows<B> {
    fn zeros_like(sample: &Self, capacity: usize, device: &B::Device) -> Self {
        Rows(SliceAccess::zeros_like(&sample.0, capacity, device))
    }

    fn select(self, dim: usize, indices: Tensor<B, 1, Int>) -> Self {
        Rows(self.0.select(dim, indices))
    }

    fn slice_assign_inplace(&mut self, index: usize, value: Self) {
        self.0.slice_assign_inplace(index, value.0);
    }
}

impl<B: Backend> From<Cell> for Rows<B> {
    fn from(Cell(cell): Cell) -> Self {
        let mut row = [0.0; CELLS];
        row[cell] = 1.0;
        Rows(Tensor::from_data([row], &Default::default()))
    }
}

impl<B: Backend> From<Forward> for Rows<B> {
    fn from(Forward(forward): Forward) -> Self {
        Rows(Tensor::from_data(
            [[f32::from(u8::from(forward))]],
            &Default::default(),
        ))
    }
}

impl<B: Backend> From<Rows<B>> for Forward {
    fn from(Rows(row): Rows<B>) -> Self {
        Forward(row.into_scalar().elem::<f32>() > 0.5)
    }
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(CELLS, 32).init(device),
            output: LinearConfig::new(32, 2).init(device),
        }
    }

    fn forward(&self, observation: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = activation::relu(self.hidden.forward(observation));
        self.output.forward(hidden)
    }
}

/// The network that acts: without autodiff, so that no other thread writes to the tape.
#[derive(Clone)]
struct Acting<B: AutodiffBackend>(Net<B::InnerBackend>);

impl<B: AutodiffBackend> PolicyState<B> for Acting<B> {
    type Record = <Net<B> as Module<B>>::Record;

    fn into_record(self) -> Self::Record {
        Net::<B>::from_inner(self.0).into_record()
    }

    fn load_record(&self, record: Self::Record) -> Self {
        let net = Net::<B>::from_inner(self.0.clone());
        Acting(net.load_record(record).valid())
    }
}

/// Half of its actions are random, unless it is asked for the best ones.
#[derive(Clone)]
struct Explorer<B: AutodiffBackend> {
    acting: Acting<B>,
    /// The dtypes of the values, from every thread that acted.
    dtypes: Arc<Mutex<Vec<DType>>>,
}

impl<B: AutodiffBackend> Policy<B> for Explorer<B> {
    type Observation = Rows<B>;
    type ActionDistribution = Rows<B>;
    type Action = Rows<B>;
    type ActionContext = ();
    type PolicyState = Acting<B>;

    fn forward(&mut self, Rows(observation): Rows<B>) -> Rows<B> {
        let values = self.acting.0.forward(observation.inner());
        let mut dtypes = self.dtypes.lock().unwrap();
        if !dtypes.contains(&values.dtype()) {
            dtypes.push(values.dtype());
        }
        Rows(Tensor::from_inner(values))
    }

    fn action(&mut self, observation: Rows<B>, deterministic: bool) -> (Rows<B>, Vec<()>) {
        let Rows(values) = self.forward(observation);
        let [count, _] = values.dims();
        let best = values.argmax(1).float();
        let action = match deterministic {
            true => best,
            false => {
                let uniform = || {
                    let unit = Distribution::Uniform(0.0, 1.0);
                    Tensor::<B, 2>::random([count, 1], unit, &best.device())
                };
                let any = uniform().greater_elem(0.5).float();
                best.clone().mask_where(uniform().lower_elem(0.5), any)
            }
        };
        (Rows(action), vec![(); count])
    }

    fn update(&mut self, acting: Acting<B>) {
        self.acting = acting;
    }

    fn state(&self) -> Acting<B> {
        self.acting.clone()
    }

    fn load_record(mut self, record: <Acting<B> as PolicyState<B>>::Record) -> Self {
        self.acting = self.acting.load_record(record);
        self
    }
}

/// Deep Q-learning, with a target network of its own.
struct Agent<B: AutodiffBackend> {
    net: Net<B>,
    policy: Explorer<B>,
    target: Net<B::InnerBackend>,
    optimizer: OptimizerAdaptor<Adam, Net<B>, B>,
    steps: usize,
}

impl<B: AutodiffBackend> Agent<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 42);
        let net = Net::new(&device);
        Self {
            target: net.valid(),
            policy: Explorer {
                acting: Acting(net.valid()),
                dtypes: Arc::default(),
            },
            net,
            optimizer: AdamConfig::new().init(),
            steps: 0,
        }
    }
}

impl<B: AutodiffBackend> PolicyLearner<B> for Agent<B> {
    type TrainContext = ();
    type InnerPolicy = Explorer<B>;
    type Record = (
        <OptimizerAdaptor<Adam, Net<B>, B> as Optimizer<Net<B>, B>>::Record,
        LossScaler,
    );

    fn train(
        &mut self,
        batch: LearnerTransitionBatch<B, Explorer<B>>,
    ) -> RLTrainOutput<(), Acting<B>> {
        let next = self.target.forward(batch.next_states.0.inner()).max_dim(1);
        let to_come = batch.dones.inner().neg().add_scalar(1.0) * next * DISCOUNT;
        let expected = batch.rewards + Tensor::from_inner(to_come);

        let values = self.net.forward(batch.states.0);
        let values = values.gather(1, batch.actions.0.int());
        let loss = MseLoss::new().forward(values, expected, Reduction::Mean);

        let grads = GradientsParams::from_grads(loss.backward(), &self.net);
        self.net = self.optimizer.step(3e-3, self.net.clone(), grads);
        self.policy.acting = Acting(self.net.valid());
        self.steps += 1;
        if self.steps.is_multiple_of(20) {
            self.target = self.net.valid();
        }
        RLTrainOutput {
            policy: self.policy.state(),
            item: (),
        }
    }

    fn policy(&self) -> Explorer<B> {
        self.policy.clone()
    }

    fn update_policy(&mut self, policy: Explorer<B>) {
        self.net = Net::from_inner(policy.acting.0.clone());
        self.target = self.net.valid();
        self.policy = policy;
    }

    fn record(&self) -> Self::Record {
        let scaler = GradScaler::of::<B>(&Default::default());
        (self.optimizer.to_record(), scaler.state())
    }

    fn load_record(mut self, (optimizer, scaler): Self::Record) -> Self {
        self.optimizer = self.optimizer.load_record(optimizer);
        GradScaler::of::<B>(&Default::default()).load_state(scaler);
        self
    }
}

/// What a training came to: the values of both actions in each cell, and the dtypes of those that
/// its threads acted by.
struct Learned {
    values: Vec<f32>,
    acted_in: Vec<DType>,
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rl").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Trains up to so many steps of four corridors, each in a thread of its own, with a checkpoint at
/// the last step.
fn train<B: AutodiffBackend>(folder: &Path, steps: usize, resume: Option<usize>) -> Learned {
    let strategy = OffPolicyConfig::new()
        .with_num_envs(4)
        .with_autobatch_size(4)
        .with_train_interval(4)
        .with_train_batch_size(64)
        .with_warmup_steps(256)
        .with_eval_interval(steps);
    let scalers = [GradScaler::of::<B>(&Default::default())];
    let mut training = RLTraining::new(folder, Corridor::default)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .metrics_train((
            LossScaleMetric::new(scalers.clone()),
            SkippedStepsMetric::new(scalers),
        ))
        .with_learning_strategy(RLStrategies::OffPolicyStrategy(strategy))
        .num_steps(steps);
    if let Some(step) = resume {
        training = training.checkpoint(step);
    }
    let mut policy = training.launch(Agent::<B>::new()).policy;
    let acted_in = policy.dtypes.lock().unwrap().clone();
    let cells = (0..CELLS).map(|cell| Rows::<B>::from(Cell(cell)));
    let Rows(values) = policy.forward(Rows::batch(cells.collect()));
    Learned {
        values: values.into_data().convert::<f32>().to_vec().unwrap(),
        acted_in,
    }
}

/// The largest error of the values.
fn error(learned: &Learned) -> f32 {
    let pairs = learned.values.iter().zip(values());
    let errors = pairs.map(|(learned, value)| (learned - value).abs());
    errors.fold(0.0, f32::max)
}

/// What training leaves of the error in FP32, and one rounding of each target: the discount lets the
/// targets' errors build up tenfold.
fn tolerance(precision: Precision) -> f32 {
    0.02 + roundoff(precision) as f32 / (1.0 - DISCOUNT)
}

/// The configuration and the loss scaler of a device are the process's: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn an_agent_learns_the_values_of_the_corridor_and_resumes() {
    let _alone = alone();
    let plain = train::<Autodiff<Flex>>(&folder("fp32"), 2000, None);
    assert!(
        error(&plain) < tolerance(Precision::F32),
        "{}",
        error(&plain)
    );

    let device = Default::default();
    let scaler = GradScaler::of::<B>(&device);
    for (precision, dtype) in [(Precision::Bf16, DType::BF16), (Precision::F16, DType::F16)] {
        // In f16, the first steps overflow at this scale.
        let scale = DynamicLossScale::new().with_init_scale(2f32.powi(24));
        let mut config = AmpConfig::new().with_precision(precision);
        if precision == Precision::F16 {
            config = config.with_loss_scale(scale.into());
        }
        config.clone().apply::<B>(&device).unwrap();
        let folder = folder(dtype.name());
        let learned = train::<B>(&folder, 2000, None);
        let worst = error(&learned);
        assert!(worst < tolerance(precision), "{precision:?}: {worst}");
        assert_eq!(learned.acted_in, [dtype]);
        let state = scaler.state();
        assert_eq!(state.skipped_steps() > 0, precision == Precision::F16);
        assert_eq!(state.taken_steps() > 0, precision == Precision::F16);

        config.apply::<B>(&device).unwrap();
        let resumed = train::<B>(&folder, 2000, Some(2000));
        let worst = error(&resumed);
        assert!(
            worst < tolerance(precision),
            "{precision:?}, resumed: {worst}"
        );
        assert_eq!(scaler.state(), state);
    }
}

#[test]
fn a_region_around_the_training_leaves_the_acting_threads_as_they_are() {
    let _alone = alone();
    let device = Default::default();
    let config = AmpConfig::new().with_precision(Precision::F32);
    config.apply::<B>(&device).unwrap();
    let learned = with_precision(Precision::F16, || train::<B>(&folder("region"), 400, None));
    assert_eq!(learned.acted_in, [DType::F32]);
    assert!(GradScaler::of::<B>(&device).state().taken_steps() > 0);
}
