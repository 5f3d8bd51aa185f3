//! The dashboard shows the values of each item's own step, however late Burn reads them.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use burn::train::Learner;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{Metric, MetricDefinition, MetricId, Numeric, NumericEntry};
use burn_amp::{
    AmpConfig, AmpTrainingExt, DynamicLossScale, GradScaler, LossScaleConfig, LossScaleMetric,
    Precision, PrecisionMetric, SkippedStepsMetric,
};

use crate::harness::{A, Model, SgdOf, Training, Watch, alone, folder, samples, sgd, training};

const BATCHES: usize = 30;
const OVERFLOWS: [usize; 5] = [0, 7, 8, 20, 29];
const GROWTH_INTERVAL: usize = 6;

fn config() -> AmpConfig {
    AmpConfig::new()
        .with_precision(Precision::F16)
        .with_loss_scale(LossScaleConfig::Dynamic(DynamicLossScale {
            init_scale: 1024.0,
            growth_interval: GROWTH_INTERVAL as u32,
            ..DynamicLossScale::default()
        }))
}

/// The scale and the number of skipped steps that each step is to show: PyTorch's rule.
fn expected(epochs: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut scale, mut good, mut skipped) = (1024.0, 0, 0.0);
    let step = |i: usize| {
        let of_step = scale;
        match OVERFLOWS.contains(&(i % BATCHES)) {
            true => (scale, good, skipped) = (scale / 2.0, 0, skipped + 1.0),
            false => good += 1,
        }
        if good == GROWTH_INTERVAL {
            (scale, good) = (scale * 2.0, 0);
        }
        (of_step, skipped)
    };
    (0..epochs * BATCHES).map(step).unzip()
}

fn numbers(shown: Vec<String>) -> Vec<f64> {
    shown.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn each_step_shows_its_own_scale_and_count() {
    let _alone = alone();
    // Much slower than training, so that training is as far ahead as Burn allows.
    for takes in [Duration::ZERO, Duration::from_millis(8)] {
        let watch = Watch::slow(takes);
        let training: Training<A, f64, SgdOf<A>> =
            training(&folder("metrics"), samples(BATCHES, &OVERFLOWS));
        let learner = Learner::new(Model::new(), sgd(), 0.1);
        training
            .renderer(watch.clone())
            .num_epochs(2)
            .with_amp(config())
            .launch(learner)
            .unwrap();
        let (scales, skipped) = expected(2);
        assert_eq!(
            watch.metrics(),
            ["Loss Scale", "Precision", "Skipped Steps"]
        );
        assert_eq!(numbers(watch.shown("Loss Scale")), scales);
        assert_eq!(numbers(watch.shown("Skipped Steps")), skipped);
        let text = |(scale, skipped)| format!("f16, scale {scale}, {skipped} skipped");
        let texts: Vec<_> = scales.into_iter().zip(skipped).map(text).collect();
        assert_eq!(watch.shown("Precision"), texts);
    }
}

#[test]
fn without_a_loss_scale_there_is_nothing_to_show_of_it() {
    let _alone = alone();
    for precision in [Precision::Bf16, Precision::F32] {
        let watch = Watch::default();
        let training: Training<A, f64, SgdOf<A>> =
            training(&folder("metrics-unscaled"), samples(3, &[]));
        let training = training.renderer(watch.clone());
        let learner = Learner::new(Model::new(), sgd(), 0.1);
        let config = AmpConfig::new().with_precision(precision);
        training.with_amp(config).launch(learner).unwrap();
        assert_eq!(watch.metrics(), ["Precision"]);
        assert_eq!(watch.shown("Precision"), vec![precision.to_string(); 3]);
    }
}

/// `SupervisedTraining` takes these metrics itself, like any metric.
#[test]
fn they_can_be_registered_by_hand() {
    let _alone = alone();
    config().apply::<A>(&Default::default()).unwrap();
    let scaler = GradScaler::of::<A>(&Default::default());
    let watch = Watch::default();
    let training: Training<A, f64, SgdOf<A>> =
        training(&folder("metrics-by-hand"), samples(BATCHES, &OVERFLOWS));
    training
        .renderer(watch.clone())
        .metric_train_numeric(LossScaleMetric::new([scaler.clone()]))
        .metric_train_numeric(SkippedStepsMetric::new([scaler.clone()]))
        .metric_train(PrecisionMetric::new::<A>(&Default::default(), [scaler]))
        .launch(Learner::new(Model::new(), sgd(), 0.1));
    assert_eq!(numbers(watch.shown("Loss Scale")), expected(1).0);
    assert_eq!(numbers(watch.shown("Skipped Steps")), expected(1).1);
}

#[test]
fn they_say_what_they_are() {
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    let scale = LossScaleMetric::new([scaler.clone()]);
    let skipped = SkippedStepsMetric::new([scaler.clone()]);
    assert!(scale.description().is_some() && skipped.description().is_some());
    // Before the first step.
    assert_eq!(scale.value().current(), 1.0);
    assert_eq!(skipped.running_value().current(), 0.0);
    let precision = PrecisionMetric::new::<A>(&Default::default(), [scaler]);
    assert!(format!("{precision:?}").starts_with("PrecisionMetric"));
}

/// One CSV file of all numbers: split, epoch, step, metric and value.
struct Csv {
    file: fs::File,
    names: HashMap<MetricId, String>,
    steps: usize,
}

impl Csv {
    fn new(path: &Path) -> Self {
        Self {
            file: fs::File::create(path).unwrap(),
            names: HashMap::new(),
            steps: 0,
        }
    }
}

impl MetricLogger for Csv {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        self.steps += usize::from(*split == Split::Train);
        for metric in update.entries_numeric {
            let name = &self.names[&metric.entry.metric_id];
            let value = metric.numeric_entry.current();
            let steps = self.steps;
            writeln!(self.file, "{split},{epoch},{steps},{name},{value}").unwrap();
        }
    }

    fn read_numeric(
        &mut self,
        _name: &str,
        _epoch: usize,
        _split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

/// In the files of Burn's own logger, one for each metric and epoch, and in a logger of the user's.
#[test]
fn loggers_get_the_number_of_each_step() {
    let _alone = alone();
    let folder = folder("metrics-logged");
    let csv = folder.join("metrics.csv");
    let training: Training<A, f64, SgdOf<A>> = training(&folder, samples(BATCHES, &OVERFLOWS));
    training
        .num_epochs(2)
        .with_metric_logger(FileMetricLogger::new(&folder))
        .with_metric_logger(Csv::new(&csv))
        .with_amp(config())
        .launch(Learner::new(Model::new(), sgd(), 0.1))
        .unwrap();
    let (scales, skipped) = expected(2);
    for (file, metric, expected) in [
        ("Loss_Scale.log", "Loss Scale", scales),
        ("Skipped_Steps.log", "Skipped Steps", skipped),
    ] {
        let of_epoch = |epoch: usize| {
            let path = folder.join(format!("train/epoch-{epoch}")).join(file);
            let text = fs::read_to_string(path).unwrap();
            numbers(text.lines().map(str::to_string).collect())
        };
        assert_eq!([of_epoch(1), of_epoch(2)].concat(), expected);

        let text = fs::read_to_string(&csv).unwrap();
        let rows = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let rows: Vec<_> = rows.filter(|row| row[3] == metric).collect();
        let values = rows.iter().map(|row| row[4].to_string()).collect();
        assert_eq!(numbers(values), expected);
        let steps = rows.iter().map(|row| row[2].parse::<usize>().unwrap());
        assert!(steps.eq(1..=2 * BATCHES));
        assert!(rows.iter().all(|row| row[0] == "train"));
    }
}
