//! The loops of an `AmpTraining` in FP32 report what Burn's own loops report, event by event.

use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{LearningRateMetric, LossMetric, MetricDefinition};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{
    EarlyStoppingStrategy, ExecutionStrategy, Interrupter, Learner, LearnerSummary,
    MultiDeviceOptim, TrainingStrategy,
};
use burn_amp::{AmpAutodiff, AmpTrainingExt, Precision};

use crate::common::assert_close;
use crate::common::mlp::parameters;
use crate::harness::{
    AdamOf, Model, Training, adam, alone, checkpoints, folder, recorder, samples, training,
};
use crate::resume::Before;
use shared::checked::{Checked, CheckedDevice};

type B = AmpAutodiff<Checked>;

const EPOCHS: usize = 3;
/// Two windows of three micro-batches, and a rest.
const BATCHES: usize = 8;

/// A part of a loop.
#[derive(Debug, Clone, Copy)]
enum Case {
    OneDevice,
    Accumulation,
    Devices(MultiDeviceOptim),
    DevicesAndAccumulation(MultiDeviceOptim),
    EarlyStopping,
    Interrupted,
    Resumed,
}

/// Notes all that a renderer is told.
#[derive(Clone, Default)]
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
}

impl Log {
    fn note(&self, line: String) {
        self.lines.lock().unwrap().push(line);
    }
}

fn of(split: &str, state: &MetricState) -> String {
    let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
    format!("{split} {}", entry.serialized_entry.serialized)
}

impl MetricsRendererTraining for Log {
    fn update_train(&mut self, state: MetricState) {
        self.note(of("train", &state));
    }

    fn update_valid(&mut self, state: MetricState) {
        self.note(of("valid", &state));
    }

    fn render_train(&mut self, item: TrainingProgress, all: Vec<ProgressType>) {
        self.note(format!("train {item:?} {}", all.len()));
    }

    fn render_valid(&mut self, item: TrainingProgress, all: Vec<ProgressType>) {
        self.note(format!("valid {item:?} {}", all.len()));
    }

    fn on_train_end(
        &mut self,
        summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn core::error::Error>> {
        self.note(format!("end, with a summary: {}", summary.is_some()));
        Ok(())
    }
}

impl MetricsRendererEvaluation for Log {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Log {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// Stops after the second epoch.
#[derive(Clone)]
struct AfterTwo;

impl EarlyStoppingStrategy for AfterTwo {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let (mean, lowest) = (Aggregate::Mean, Direction::Lowest);
        let _ = store.find_epoch("Loss", mean, lowest, &Split::Valid);
        epoch == 2
    }
}

/// The events, the checkpoints and the parameters of a training, by Burn's loop or by ours.
fn train(case: Case, ours: bool) -> (Vec<String>, Vec<usize>, Vec<f32>) {
    let devices = [CheckedDevice::new(), CheckedDevice::new()];
    let interrupter = Interrupter::new();
    let log = Log::default();
    let folder = folder("events");
    let launch = |epochs: usize, from: Option<usize>, log: Log| {
        let stop = interrupter.clone();
        let optimizer = Before::new(adam(), move |step| {
            if matches!(case, Case::Interrupted) && step == BATCHES + 2 {
                stop.stop(Some("enough"));
            }
        });
        let training: Training<B, LinearLrScheduler, Before<AdamOf<B>>> =
            training(&folder, samples(2 * BATCHES, &[]));
        let mut training = training
            .metric_train_numeric(LearningRateMetric::new())
            .renderer(log)
            .with_interrupter(interrupter.clone())
            .with_file_checkpointer(recorder())
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(EPOCHS))
            .summary()
            .num_epochs(epochs);
        if let Case::Accumulation | Case::DevicesAndAccumulation(_) = case {
            training = training.grads_accumulation(3);
        }
        // Burn adds up several gradients in the order in which its devices are done.
        if !matches!(case, Case::DevicesAndAccumulation(_)) {
            training = training
                .metric_train_numeric(LossMetric::<Flex>::new())
                .metric_valid_numeric(LossMetric::<Flex>::new());
        }
        if let Case::EarlyStopping = case {
            training = training.early_stopping(AfterTwo);
        }
        if let Some(epoch) = from {
            training = training.checkpoint(epoch);
        }
        let strategy = match case {
            Case::Devices(optim) | Case::DevicesAndAccumulation(optim) => {
                ExecutionStrategy::MultiDevice(devices.to_vec(), optim)
            }
            _ => ExecutionStrategy::SingleDevice(devices[0]),
        };
        let linear = LinearLrSchedulerConfig::new(0.01, 0.001, 40).init();
        let learner = Learner::new(Model::new(), optimizer, linear.unwrap());
        let result = match ours {
            true => training
                .to_fp32()
                .with_training_strategy(strategy)
                .launch(learner)
                .unwrap(),
            false => {
                let of_training = TrainingStrategy::Default(strategy);
                training.with_training_strategy(of_training).launch(learner)
            }
        };
        parameters(&result.model)
    };
    let trained = match case {
        Case::Resumed => {
            launch(2, None, Log::default());
            launch(EPOCHS, Some(2), log.clone())
        }
        _ => launch(EPOCHS, None, log.clone()),
    };
    let lines = log.lines.lock().unwrap().clone();
    (lines, checkpoints(&folder), trained)
}

#[test]
fn they_are_those_of_burns_loops() {
    let _alone = alone();
    let optims = [
        MultiDeviceOptim::OptimMainDevice,
        MultiDeviceOptim::OptimSharded,
    ];
    let mut cases = vec![
        Case::OneDevice,
        Case::Accumulation,
        Case::EarlyStopping,
        Case::Interrupted,
        Case::Resumed,
    ];
    cases.extend(optims.map(Case::Devices));
    cases.extend(optims.map(Case::DevicesAndAccumulation));
    for case in cases {
        let several = matches!(case, Case::Devices(_) | Case::DevicesAndAccumulation(_));
        let [burns, ours] = [false, true].map(|ours| {
            let (mut lines, checkpoints, parameters) = train(case, ours);
            if several {
                // Burn reports the items of a step in the order in which its devices are done.
                lines.sort();
            }
            // Ours has the metric of the precision, too.
            lines.retain(|line| !line.contains("f32"));
            (lines, checkpoints, parameters)
        });
        assert!(burns.0.len() > 2 * BATCHES, "{case:?}");
        assert_eq!(ours.0, burns.0, "{case:?}");
        assert_eq!(ours.1, burns.1, "{case:?}");
        if let Case::DevicesAndAccumulation(_) = case {
            assert_close("parameters", Precision::F32, &ours.2, &burns.2, 16.0);
        } else {
            assert_eq!(ours.2, burns.2, "{case:?}");
        }
    }
}
