//! Burn's `Learner` does the same on `AmpAutodiff<Flex>` as on `Autodiff<Flex>`: only the type changes.

use std::path::Path;
use std::sync::Arc;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::Progress;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::AutodiffModule;
use burn::optim::SgdConfig;
use burn::tensor::backend::AutodiffBackend;
use burn::train::checkpoint::{
    CheckpointingAction, CheckpointingStrategy, ComposedCheckpointingStrategy,
    KeepLastNCheckpoints, MetricCheckpointingStrategy,
};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::{
    EarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Learner, LearnerEvent,
    LearningComponentsTypes, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents,
    TrainingItem, TrainingModel, TrainingStrategy, ValidLoader,
};
use burn_amp::{AmpConfig, GradScaler, Precision};

use crate::common::mlp::parameters;
use crate::common::{assert_close, roundoff};
use crate::harness::{
    A, Model, SgdOf, Training, Watch, alone, checkpoints, folder, loss_of, recorder, samples, sgd,
    training,
};

const EPOCHS: usize = 4;
const BATCHES: usize = 8;
const LR: f64 = 0.1;

/// The features of a `Learner`.
#[derive(Clone, Copy, PartialEq)]
enum Offer {
    Nothing,
    EarlyStopping,
    Accumulation,
    Clipping,
    KeepsTheLast,
    KeepsTheBest,
    Strategy,
}

/// The results of a training.
struct Trained {
    parameters: Vec<f32>,
    loss: f32,
    checkpoints: Vec<usize>,
    /// Items of training and of validation that its renderer was given.
    rendered: usize,
}

fn train<B: AutodiffBackend>(offer: Offer, folder: &Path) -> Trained {
    let watch = Watch::default();
    let training: Training<B, f64, SgdOf<B>> = training(folder, samples(BATCHES, &[]));
    let training = training
        .metric_train_numeric(LossMetric::<Flex>::new())
        .metric_valid_numeric(LossMetric::<Flex>::new())
        .renderer(watch.clone())
        // Burn reads the files of its file logger before they are written.
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_file_checkpointer(recorder())
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(EPOCHS))
        .num_epochs(EPOCHS);
    let (loss, mean, lowest) = (
        LossMetric::<Flex>::new(),
        Aggregate::Mean,
        Direction::Lowest,
    );
    let no_better = StoppingCondition::NoImprovementSince { n_epochs: 1 };
    let shown = watch.clone();
    let training = match offer {
        Offer::Nothing | Offer::Clipping => training,
        Offer::EarlyStopping => training.early_stopping(OnceShown {
            watch,
            strategy: MetricEarlyStoppingStrategy::new(
                &loss,
                mean,
                lowest,
                Split::Valid,
                no_better,
            ),
        }),
        Offer::Accumulation => training.grads_accumulation(4),
        Offer::KeepsTheLast => training.with_checkpointing_strategy(KeepLastNCheckpoints::new(2)),
        Offer::KeepsTheBest => {
            let best = MetricCheckpointingStrategy::new(&loss, mean, lowest, Split::Valid);
            let strategy = ComposedCheckpointingStrategy::builder()
                .add(KeepLastNCheckpoints::new(1))
                .add(best)
                .build();
            training.with_checkpointing_strategy(OnceShown { watch, strategy })
        }
        Offer::Strategy => {
            training.with_training_strategy(TrainingStrategy::Custom(Arc::new(EachBatchTwice)))
        }
    };
    let optimizer = match offer {
        Offer::Clipping => SgdConfig::new()
            .with_gradient_clipping(Some(GradientClippingConfig::Norm(0.05)))
            .init(),
        _ => sgd(),
    };
    // A learning rate that makes nothing better, so that there is a reason to stop.
    let lr = match offer {
        Offer::EarlyStopping => 0.0,
        Offer::KeepsTheBest => -LR / 10.0,
        Offer::Accumulation => LR / 4.0,
        _ => LR,
    };
    let result = training.launch(Learner::new(Model::new(), optimizer, lr));
    drop(result.renderer);
    Trained {
        parameters: parameters(&result.model),
        loss: loss_of(&result.model),
        checkpoints: checkpoints(folder),
        rendered: shown.rendered(),
    }
}

/// A training on `AmpAutodiff` ends like that on `Autodiff`, except for the roundings of its precision.
fn is_unchanged(name: &str, offer: Offer) -> Trained {
    let _alone = alone();
    let plain = train::<Autodiff<Flex>>(offer, &folder(name));
    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        let config = AmpConfig::new().with_precision(precision);
        config.apply::<A>(&Default::default()).unwrap();
        let amp = train::<A>(offer, &folder(name));
        // Some forty steps, each of which moves parameters by less than their size.
        assert_close(name, precision, &amp.parameters, &plain.parameters, 4.0);
        assert!((amp.loss - plain.loss).abs() < 16.0 * roundoff(precision) as f32 * plain.loss);
        let same = amp.parameters == plain.parameters;
        assert_eq!(
            same,
            precision == Precision::F32 || offer == Offer::EarlyStopping
        );
        let scaled = GradScaler::of::<A>(&Default::default())
            .state()
            .taken_steps();
        assert_eq!(scaled > 0, precision == Precision::F16);
        assert_eq!(amp.checkpoints, plain.checkpoints, "{name} in {precision}");
        assert_eq!(amp.rendered, plain.rendered, "{name} in {precision}");
    }
    plain
}

#[test]
fn parameters_and_checkpoints() {
    let untrained = loss_of(&Model::<Flex>::new());
    let plain = is_unchanged("plain", Offer::Nothing);
    assert!(
        plain.loss < 0.9 * untrained,
        "{} of {untrained}",
        plain.loss
    );
    assert_eq!(plain.checkpoints, [1, 2, 3, 4]);
    assert_eq!(plain.rendered, EPOCHS * (BATCHES + 2));
}

#[test]
fn early_stopping() {
    let plain = is_unchanged("early-stopping", Offer::EarlyStopping);
    assert_eq!(plain.checkpoints, [1, 2]);
}

#[test]
fn accumulation_of_gradients() {
    let plain = is_unchanged("accumulation", Offer::Accumulation);
    let (all, quarter) = (EPOCHS * BATCHES, plain.parameters);
    let each = is_unchanged("accumulation-each", Offer::Nothing).parameters;
    assert_ne!(quarter, each, "a step of {all} micro-batches each");
}

#[test]
fn clipping_of_gradients() {
    let clipped = is_unchanged("clipping", Offer::Clipping);
    let whole = is_unchanged("clipping-none", Offer::Nothing);
    assert!(clipped.loss > whole.loss);
}

#[test]
fn checkpoints_of_the_last_epochs() {
    let plain = is_unchanged("last", Offer::KeepsTheLast);
    assert_eq!(plain.checkpoints, [3, 4]);
}

#[test]
fn checkpoints_of_the_best_epoch() {
    // The model gets worse all the time: the first is the best.
    let plain = is_unchanged("best", Offer::KeepsTheBest);
    assert_eq!(plain.checkpoints, [1, 4]);
}

#[test]
fn a_strategy_of_ones_own() {
    let twice = is_unchanged("strategy", Offer::Strategy);
    let once = is_unchanged("strategy-none", Offer::Nothing);
    assert_ne!(twice.parameters, once.parameters);
    assert_eq!(twice.rendered, EPOCHS * BATCHES);
}

/// Burn calls its strategies as soon as an epoch is over, and computes metrics on another thread. This
/// strategy decides once the metrics exist.
#[derive(Clone)]
struct OnceShown<S> {
    watch: Watch,
    strategy: S,
}

impl<S> OnceShown<S> {
    fn wait(&self, epoch: usize) {
        while self.watch.rendered() < epoch * (BATCHES + 2) {
            std::thread::yield_now();
        }
    }
}

impl<S: EarlyStoppingStrategy> EarlyStoppingStrategy for OnceShown<S> {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        self.wait(epoch);
        self.strategy.should_stop(epoch, store)
    }
}

impl<S: CheckpointingStrategy> CheckpointingStrategy for OnceShown<S> {
    fn checkpointing(
        &mut self,
        epoch: usize,
        store: &EventStoreClient,
    ) -> Vec<CheckpointingAction> {
        self.wait(epoch);
        self.strategy.checkpointing(epoch, store)
    }
}

/// Takes two steps with each batch, and validates only after the last epoch.
pub struct EachBatchTwice;

impl<LC: LearningComponentsTypes> SupervisedLearningStrategy<LC> for EachBatchTwice
where
    <TrainingModel<LC> as burn::train::TrainStep>::Input: Clone,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let mut processor = components.event_processor;
        let mut checkpointer = components.checkpointer;
        for epoch in starting_epoch..=components.num_epochs {
            let epochs = Progress::new(epoch, components.num_epochs);
            let mut batches = train.iter();
            while let Some(batch) = batches.next() {
                let progress = batches.progress();
                learner.lr_step();
                let first = learner.train_step(batch.clone());
                learner.optimizer_step(first.grads);
                let second = learner.train_step(batch);
                learner.optimizer_step(second.grads);
                let lr = Some(learner.lr_current());
                let item = TrainingItem::new(second.item, progress, epochs.clone(), None, lr);
                processor.process_train(LearnerEvent::ProcessedItem(item));
            }
            processor.process_train(LearnerEvent::EndEpoch(epoch));
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(&learner, epoch, &components.event_store);
            }
        }
        let model = learner.model().valid();
        valid.iter().for_each(|batch| drop(model.step(batch)));
        (learner.model(), processor)
    }
}
