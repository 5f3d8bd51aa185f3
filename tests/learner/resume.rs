//! A training that is killed goes on from its last checkpoint as if nothing had happened, and
//! wherever it is interrupted, there is a checkpoint that loads.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig};
use burn::module::{AutodiffModule, Module};
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer};
use burn::record::{BinFileRecorder, FileRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn::train::checkpoint::{CheckpointingAction, CheckpointingStrategy, KeepLastNCheckpoints};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner};
use burn_amp::{
    AmpConfig, AmpTrainingExt, DynamicLossScale, GradScaler, LossScaleConfig, LossScaler,
    LrSchedulerWithScaler, Precision,
};

use crate::common::mlp::parameters;
use crate::harness::{
    A, AdamOf, Model, Training, Watch, adam, alone, checkpoints, folder, recorder, samples,
    training,
};

const BATCHES: usize = 8;
const EPOCHS: usize = 5;
const STEPS: usize = BATCHES * EPOCHS;
const OVERFLOWS: [usize; 2] = [2, 5];
/// The steps of an epoch that are taken, and of a training.
const TAKEN: usize = BATCHES - OVERFLOWS.len();
const ALL_TAKEN: usize = TAKEN * EPOCHS;

type Scheduler = LrSchedulerWithScaler<CosineAnnealingLrScheduler>;

fn scaler() -> GradScaler {
    GradScaler::of::<A>(&Default::default())
}

fn scheduler() -> Scheduler {
    let cosine = CosineAnnealingLrSchedulerConfig::new(0.02, STEPS).init();
    scaler().checkpoint_with(cosine.unwrap())
}

fn config() -> AmpConfig {
    AmpConfig::new()
        .with_precision(Precision::F16)
        .with_loss_scale(LossScaleConfig::Dynamic(DynamicLossScale {
            init_scale: 256.0,
            growth_interval: 5,
            ..DynamicLossScale::default()
        }))
}

/// The final state of a training.
#[derive(Debug, PartialEq)]
struct Ended {
    parameters: Vec<f32>,
    scaler: LossScaler,
    next_lr: f64,
}

fn train<O, R>(folder: &Path, from: Option<usize>, optimizer: O, recorder: R) -> Ended
where
    O: Optimizer<Model<A>, A> + 'static,
    R: FileRecorder<A> + FileRecorder<burn_amp::Amp<burn::backend::Flex>> + 'static,
{
    let training: Training<A, Scheduler, O> = training(folder, samples(BATCHES, &OVERFLOWS));
    let mut training = training
        .with_file_checkpointer(recorder.clone())
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .num_epochs(EPOCHS);
    if let Some(epoch) = from {
        training = training.checkpoint(epoch);
    }
    let learner = Learner::new(Model::new(), optimizer, scheduler());
    let result = training.with_amp(config()).launch(learner).unwrap();
    let scaler = scaler().state();
    // Loads the scaler's state, too, which is why it is read above.
    let path = folder.join(format!("checkpoint/scheduler-{EPOCHS}"));
    let record = Recorder::<A>::load(&recorder, path, &Default::default()).unwrap();
    Ended {
        parameters: parameters(&result.model),
        scaler,
        next_lr: self::scheduler().load_record::<A>(record).step(),
    }
}

/// The newest epoch of which every file loads.
fn last_checkpoint(folder: &Path) -> Option<usize> {
    let device = Default::default();
    let loads = |epoch: &usize| {
        let path = |name: &str| folder.join(format!("checkpoint/{name}-{epoch}"));
        let model: Result<<Model<A> as Module<A>>::Record, _> =
            Recorder::<A>::load(&recorder(), path("model"), &device);
        let optim: Result<<AdamOf<A> as Optimizer<Model<A>, A>>::Record, _> =
            Recorder::<A>::load(&recorder(), path("optim"), &device);
        let scheduler: Result<<Scheduler as LrScheduler>::Record<A>, _> =
            Recorder::<A>::load(&recorder(), path("scheduler"), &device);
        model.is_ok() && optim.is_ok() && scheduler.is_ok()
    };
    let epochs = checkpoints(folder);
    epochs.into_iter().rev().find(loads)
}

/// An optimizer before whose steps something happens.
#[derive(Clone)]
pub struct Before<O> {
    inner: O,
    steps: Arc<AtomicUsize>,
    happens: Arc<dyn Fn(usize) + Send + Sync>,
}

impl<O> Before<O> {
    pub fn new(inner: O, happens: impl Fn(usize) + Send + Sync + 'static) -> Self {
        Self {
            inner,
            steps: Arc::default(),
            happens: Arc::new(happens),
        }
    }
}

impl<O, M, B> Optimizer<M, B> for Before<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = O::Record;

    fn step(&mut self, lr: f64, module: M, grads: GradientsParams) -> M {
        (self.happens)(self.steps.fetch_add(1, Ordering::Relaxed));
        self.inner.step(lr, module, grads)
    }

    fn step_multi(&mut self, lr: f64, module: M, grads: MultiGradientsParams) -> M {
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

const FOLDER: &str = "BURN_AMP_TEST_FOLDER";
const DIES_AT: &str = "BURN_AMP_TEST_DIES_AT";

/// Not a test by itself: the process that `a_killed_training_resumes` kills.
#[test]
fn a_training_that_dies() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let folder = PathBuf::from(folder);
    let at: usize = std::env::var(DIES_AT).unwrap().parse().unwrap();
    let optimizer = Before::new(adam(), move |step| {
        if step == at {
            // Nothing is tidied up, as after SIGKILL.
            std::process::abort();
        }
    });
    let last = last_checkpoint(&folder);
    train(&folder, last, optimizer, recorder());
}

/// Lets a training die at a step that is taken, counted from its start or its last checkpoint.
fn dies(folder: &Path, at: usize) {
    let this = std::env::current_exe().unwrap();
    let status = Command::new(&this)
        .args(["resume::a_training_that_dies", "--exact"])
        .env(FOLDER, folder)
        .env(DIES_AT, at.to_string())
        .output()
        .unwrap_or_else(|error| panic!("cannot start {}: {error}", this.display()))
        .status;
    assert!(!status.success(), "it died at step {at}");
}

#[test]
fn a_killed_training_resumes() {
    let _alone = alone();
    let expected = train(&folder("resume-whole"), None, adam(), recorder());
    assert!(expected.scaler.skipped_steps() == 2 * EPOCHS as u64);
    assert!(expected.scaler.taken_steps() == (STEPS - 2 * EPOCHS) as u64);

    // In the first epoch, at the first and the last step of one, and somewhere.
    let mut seed = 11usize;
    let mut somewhere = || {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        TAKEN + (seed >> 33) % (ALL_TAKEN - TAKEN)
    };
    for at in [
        3,
        TAKEN,
        2 * TAKEN - 1,
        ALL_TAKEN - 1,
        somewhere(),
        somewhere(),
    ] {
        let folder = folder("resume-killed");
        dies(&folder, at);
        let last = last_checkpoint(&folder);
        assert!(last.unwrap_or(0) <= at / TAKEN, "killed at step {at}");
        let ended = train(&folder, last, adam(), recorder());
        assert_eq!(
            ended, expected,
            "killed at step {at}, resumed from {last:?}"
        );
    }
}

#[test]
fn a_training_killed_twice_resumes() {
    let _alone = alone();
    let expected = train(&folder("resume-whole"), None, adam(), recorder());
    let folder = folder("resume-twice");
    dies(&folder, 2 * TAKEN + 3);
    let first = last_checkpoint(&folder);
    dies(&folder, TAKEN + 2);
    let last = last_checkpoint(&folder);
    // Burn writes a checkpoint on a thread of its own: the second may be cut off.
    assert!(last >= first, "{last:?} after {first:?}");
    assert_eq!(train(&folder, last, adam(), recorder()), expected);
}

#[test]
fn binary_checkpoints_resume() {
    let _alone = alone();
    let recorder = BinFileRecorder::<FullPrecisionSettings>::new();
    let folder = folder("resume-bin");
    let expected = train(&folder, None, adam(), recorder.clone());
    let ended = train(&folder, Some(4), adam(), recorder);
    assert_eq!(ended, expected);
}

/// A kill during a write leaves a truncated file: the previous checkpoint is whole.
#[test]
fn a_checkpoint_that_is_cut_short_is_known() {
    let _alone = alone();
    let whole = folder("resume-cut");
    let expected = train(&whole, None, adam(), recorder());
    for name in ["model", "optim", "scheduler"] {
        let file = whole.join(format!("checkpoint/{name}-5.mpk"));
        let bytes = std::fs::read(&file).unwrap();
        for length in [0, bytes.len() / 2, bytes.len() - 1] {
            std::fs::write(&file, &bytes[..length]).unwrap();
            assert_eq!(last_checkpoint(&whole), Some(4), "{name}, {length} bytes");
        }
        std::fs::write(&file, &bytes).unwrap();
    }
    assert_eq!(last_checkpoint(&whole), Some(5));
    std::fs::write(whole.join("checkpoint/optim-5.mpk"), []).unwrap();
    assert_eq!(train(&whole, Some(4), adam(), recorder()), expected);
}

/// The parts of an epoch in which a training can be interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Training,
    Validation,
    Checkpointing,
}

/// Keeps all checkpoints, and interrupts while it saves the third.
struct KeepAll(Option<Interrupter>);

impl CheckpointingStrategy for KeepAll {
    fn checkpointing(&mut self, epoch: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        if let Some(interrupter) = self.0.as_ref().filter(|_| epoch == 3) {
            interrupter.stop(None);
        }
        vec![CheckpointingAction::Save]
    }
}

/// Interrupts a training in its third epoch.
fn interrupted_in(phase: Phase, folder: &Path) {
    let interrupter = Interrupter::new();
    let when = |this| Some(interrupter.clone()).filter(|_| phase == this);
    let in_training = when(Phase::Training);
    let optimizer = Before::new(adam(), move |step| {
        if let Some(interrupter) = in_training.as_ref().filter(|_| step == 2 * TAKEN + 3) {
            interrupter.stop(None);
        }
    });
    let in_validation = when(Phase::Validation);
    let watch = Watch::calling(move |epoch| {
        if let Some(interrupter) = in_validation.as_ref().filter(|_| epoch == 3) {
            interrupter.stop(None);
        }
    });
    let training: Training<A, Scheduler, _> = training(folder, samples(BATCHES, &OVERFLOWS));
    training
        .with_interrupter(interrupter.clone())
        .renderer(watch)
        .with_file_checkpointer(recorder())
        .with_checkpointing_strategy(KeepAll(when(Phase::Checkpointing)))
        .num_epochs(EPOCHS)
        .with_amp(config())
        .launch(Learner::new(Model::new(), optimizer, scheduler()))
        .unwrap();
    assert!(interrupter.should_stop());
}

#[test]
fn interrupted_in_any_phase_it_resumes() {
    let _alone = alone();
    let expected = train(&folder("resume-whole"), None, adam(), recorder());
    for phase in [Phase::Training, Phase::Validation, Phase::Checkpointing] {
        let folder = folder("resume-interrupted");
        interrupted_in(phase, &folder);
        // Burn validates and saves an epoch once all its batches were trained on.
        let saved = match phase {
            Phase::Training => 2,
            Phase::Validation | Phase::Checkpointing => 3,
        };
        let last = last_checkpoint(&folder);
        assert_eq!(last, Some(saved), "{phase:?}");
        let ended = train(&folder, last, adam(), recorder());
        assert_eq!(ended, expected, "{phase:?}");
    }
}
