//! Burn's `Learner` in mixed precision: its steps, its metrics and its checkpoints.
#![cfg(all(feature = "flex", feature = "train"))]

include!("../src/burn.rs");

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::{
    InferenceStep, Learner, LearningResult, MultiDeviceOptim, RegressionOutput, SupervisedTraining,
    TrainOutput, TrainStep,
};
use burn_amp_device::{
    AmpError, AmpReport, AmpTrainingExt, DynamicLossScale, Error, GradScaler, LossScaleConfig,
    Precision, flex, full_precision,
};

/// The scaler of a device is shared by the process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The gradient of its loss is the sum of the batch.
#[derive(Module, Debug)]
struct Weight {
    weight: Param<Tensor<2>>,
    /// Whether its step scales the loss.
    scales: bool,
    /// Whether the loss contains the square of the weight: the gradient then depends on the weight.
    squares: bool,
    /// Whether the loss is computed in a region in FP32.
    region: bool,
}

impl Weight {
    fn on(device: &Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::ones([1, 4], device)),
            scales: true,
            squares: false,
            region: false,
        }
    }

    fn forward(
        &self,
        Batch {
            gradient,
            overflows,
        }: Batch,
    ) -> RegressionOutput {
        let weight = self.weight.val();
        let factor = match self.squares {
            true => weight.clone() / 4.0,
            false => Tensor::ones_like(&weight),
        };
        let product = |gradient: Tensor<2>| weight.clone() * factor * gradient;
        let loss = match self.region {
            true => full_precision(gradient.clone(), product),
            false => product(gradient.clone()),
        };
        let loss = loss.sum();
        let loss = match overflows {
            // This term is 0 and its gradient is not finite, whatever the loss scale.
            true => loss + (weight.clone().sum() * 0.0).sqrt(),
            false => loss,
        };
        RegressionOutput::new(loss, weight, gradient)
    }
}

impl TrainStep for Weight {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let item = self.forward(batch);
        let scaler = GradScaler::of(&item.loss.device());
        let loss = match self.scales {
            true => scaler.scale(item.loss.clone()),
            false => item.loss.clone(),
        };
        TrainOutput::new(self, loss.backward(), item)
    }
}

impl InferenceStep for Weight {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.forward(batch)
    }
}

#[derive(Debug, Clone)]
struct Batch {
    gradient: Tensor<2>,
    overflows: bool,
}

#[derive(Clone)]
struct Gradients;

impl Batcher<f32, Batch> for Gradients {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Batch {
        let overflows = items.contains(&OVERFLOW);
        let sum = if overflows { 0.0 } else { items.iter().sum() };
        Batch {
            gradient: Tensor::full([1, 4], sum, device),
            overflows,
        }
    }
}

fn loader(gradients: &[f32]) -> Arc<dyn DataLoader<Batch>> {
    let dataset = InMemDataset::new(gradients.to_vec());
    DataLoaderBuilder::new(Gradients)
        .batch_size(1)
        .build(dataset)
}

/// Stands for a batch with a finite loss and an infinite gradient.
const OVERFLOW: f32 = f32::MAX;

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("learner")
        .join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn training(name: &str, gradients: &[f32]) -> SupervisedTraining<Weight> {
    SupervisedTraining::new(folder(name), loader(gradients), loader(&[0.5]))
        .with_application_logger(None)
}

/// 1, 0.875, 0.75, 0.625, 0.5 ...
fn schedule() -> ModuleLrScheduler {
    LinearLrSchedulerConfig::new(1.0, 0.5, 4).init().unwrap()
}

fn learner() -> Learner<Weight> {
    learner_of(Weight::on(&Device::flex().autodiff()))
}

fn learner_of(model: Weight) -> Learner<Weight> {
    Learner::new(model, SgdConfig::new().init(), schedule())
}

fn weight(result: &LearningResult<Weight>) -> f32 {
    let weight = result.model.weight.val();
    assert_eq!(weight.dtype(), DType::F32);
    let values: Vec<f32> = weight.into_data().iter().collect();
    assert_eq!(values, [values[0]; 4]);
    values[0]
}

fn scale(init: f32) -> DynamicLossScale {
    DynamicLossScale::new().with_init_scale(init)
}

/// The values that a metric of the training logged, for each item and for the epoch.
fn logged(name: &str, metric: &str) -> Vec<String> {
    let train = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("learner")
        .join(name)
        .join("train");
    let epoch = train.join("epoch-1");
    let mut files = fs::read_dir(&epoch)
        .unwrap()
        .map(|file| file.unwrap().path());
    let file = files.find(|file| file.file_stem().unwrap().to_str() == Some(metric));
    let text = file
        .map(|file| fs::read_to_string(file).unwrap())
        .unwrap_or_default();
    text.lines().map(String::from).collect()
}

#[test]
fn a_step_that_overflows_changes_neither_model_nor_learning_rate() {
    let _alone = alone();
    let result = training("skips", &[0.25, OVERFLOW, 0.25, OVERFLOW, 0.25])
        .to_fp16()
        .with_loss_scale(scale(8.0))
        .launch(learner())
        .unwrap();
    // Three learning rates of the schedule, as without the other two batches.
    assert_eq!(weight(&result), 1.0 - 0.25 * (1.0 + 0.875 + 0.75));
    let scaler = GradScaler::of(&flex(Precision::F16).unwrap());
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (3, 2));
    assert_eq!(scaler.loss_scale(), 2.0);
    assert_eq!(scaler.last_step().unwrap().non_finite_gradients, 0);
    let report = AmpReport::of_device(&result.model.weight.val().device());
    assert_eq!(report.unwrap().precision, Precision::F16);

    assert_eq!(
        logged("skips", "Loss_Scale"),
        ["8", "8", "4", "4", "2", "2,final"]
    );
    assert_eq!(
        logged("skips", "Skipped_Steps"),
        ["0", "1", "1", "2", "2", "2,final"]
    );
    let precision = logged("skips", "Precision");
    assert_eq!(precision[2], "f16, scale 4, 1 skipped");
}

/// A model whose gradient depends on it, in FP32, trained for two epochs.
fn squared(name: &str, accumulation: usize, ours: bool) -> f32 {
    let training = training(name, &[0.25, 0.5, 0.125, 0.75, 0.375])
        .num_epochs(2)
        .grads_accumulation(accumulation);
    let learner = learner_of(Weight {
        squares: true,
        ..Weight::on(&Device::flex().autodiff())
    });
    let result = match ours {
        true => training.to_fp32().launch(learner).unwrap(),
        false => training.launch(learner),
    };
    weight(&result)
}

#[test]
fn without_an_overflow_it_trains_as_burns_own_strategy_does() {
    let _alone = alone();
    for accumulation in [1, 2, 3] {
        let burns = squared("burns", accumulation, false);
        assert!(burns > 0.0 && burns < 0.5, "{burns}");
        assert_eq!(squared("ours", accumulation, true), burns);
    }
}

#[test]
fn an_overflow_in_a_batch_skips_its_whole_window() {
    let _alone = alone();
    let result = training("window", &[0.25, OVERFLOW, 0.25, 0.5, 0.125])
        .grads_accumulation(2)
        .to_fp16()
        .with_loss_scale(scale(8.0))
        .launch(learner())
        .unwrap();
    // The second window, and the rest at the end of the epoch.
    assert_eq!(weight(&result), 1.0 - (0.75 * 1.0 + 0.125 * 0.875));
    // Each batch has its own scale.
    let scales = ["8", "8", "4", "4", "4", "4,final"];
    assert_eq!(logged("window", "Loss_Scale"), scales);
    let skipped = ["0", "1", "1", "1", "1", "1,final"];
    assert_eq!(logged("window", "Skipped_Steps"), skipped);
    let scaler = GradScaler::of(&flex(Precision::F16).unwrap());
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (2, 1));
}

#[test]
fn in_bf16_and_fp32_nothing_is_scaled_and_nothing_is_checked() {
    let _alone = alone();
    let of = |name, precision| {
        let unscaled = Weight {
            scales: false,
            ..Weight::on(&Device::flex().autodiff())
        };
        let training = training(name, &[0.25, 0.5]).with_precision(precision);
        let result = training.launch(learner_of(unscaled)).unwrap();
        assert_eq!(weight(&result), 1.0 - (0.25 * 1.0 + 0.5 * 0.875));
        assert!(logged(name, "Loss_Scale").is_empty());
        logged(name, "Precision")
    };
    assert_eq!(of("bf16", Precision::Bf16), ["bf16"; 3]);
    assert_eq!(of("fp32", Precision::F32), ["f32"; 3]);
    let error = training("bf16", &[0.25])
        .to_bf16()
        .with_loss_scale(LossScaleConfig::Fixed(8.0))
        .launch(learner())
        .err();
    assert!(
        matches!(
            error,
            Some(Error::Amp(AmpError::LossScaleWithoutF16 { .. }))
        ),
        "{error:?}"
    );
}

/// A parameter that a region trained is outside of it again.
#[test]
fn a_step_takes_the_marks_off_the_gradients() {
    let _alone = alone();
    for precision in [Precision::F16, Precision::Bf16] {
        let model = Weight {
            region: true,
            ..Weight::on(&Device::flex().autodiff())
        };
        let training = training("marks", &[0.25, 0.5]).with_precision(precision);
        let result = training.launch(learner_of(model)).unwrap();
        let weight = result.model.weight.val();
        let thirds = Tensor::<2>::full([4, 1], 1.0 / 3.0, &weight.device());
        let exact = weight.clone().into_data().iter::<f32>().sum::<f32>() / 3.0;
        let product = weight.matmul(thirds).into_scalar::<f32>();
        assert!((product - exact).abs() > 1e-5, "{precision}: {product}");
    }
}

#[test]
fn a_step_that_forgets_to_scale_is_an_error_and_not_a_training() {
    let _alone = alone();
    let unscaled = Weight {
        scales: false,
        ..Weight::on(&Device::flex().autodiff())
    };
    // An unfinished step of another loop.
    let device = flex(Precision::F16).unwrap().autodiff();
    let _ = GradScaler::of(&device).scale(Tensor::<1>::ones([1], &device));
    let training = training("forgets", &[0.25]).to_fp16();
    let error = training.launch(learner_of(unscaled)).err();
    assert!(
        matches!(error, Some(Error::Amp(AmpError::NothingScaled { .. }))),
        "{error:?}"
    );
}

/// Trains on two devices, one in f16 and one in bf16, each with one half of a batch.
fn on_two(name: &str, optim: MultiDeviceOptim, halves: &[f32]) -> f32 {
    let devices = [Precision::F16, Precision::Bf16];
    let devices = devices.map(|precision| flex(precision).unwrap().autodiff());
    let result = training(name, halves)
        .with_amp()
        .with_loss_scale(scale(8.0))
        .with_devices(devices, optim)
        .launch(learner())
        .unwrap();
    weight(&result)
}

/// Both workers would scale their losses with one scaler.
#[test]
fn a_device_that_is_given_twice_is_an_error_in_f16() {
    let _alone = alone();
    for (precision, is_refused) in [(Precision::F16, true), (Precision::Bf16, false)] {
        let device = flex(precision).unwrap().autodiff();
        let launched = training("twice", &[0.25, 0.25])
            .with_amp()
            .with_devices([device.clone(), device], MultiDeviceOptim::OptimMainDevice)
            .launch(learner());
        match launched {
            Err(Error::RepeatedDevice { device }) => {
                assert!(is_refused && device.contains("in f16"), "{device}");
            }
            Err(error) => panic!("{error}"),
            Ok(_) => assert!(!is_refused),
        }
    }
}

#[test]
fn several_devices_step_together_or_not_at_all() {
    let _alone = alone();
    for (name, optim) in [
        ("main", MultiDeviceOptim::OptimMainDevice),
        ("sharded", MultiDeviceOptim::OptimSharded),
    ] {
        assert_eq!(on_two(name, optim, &[0.25, 0.5]), 0.25);
        // The second device has one batch more.
        let two_steps = 1.0 - (0.75 * 1.0 + 0.125 * 0.875);
        assert_eq!(on_two(name, optim, &[0.25, 0.5, 0.125]), two_steps);
        assert_eq!(on_two(name, optim, &[OVERFLOW, 0.5]), 1.0);
        let scaler = GradScaler::of(&flex(Precision::F16).unwrap());
        assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (0, 1));
        assert_eq!(scaler.loss_scale(), 4.0);
    }
}

/// Burn's records and stores keep the dtype of a file in half.
#[test]
fn parameters_of_a_file_in_half_are_trained_in_fp32() {
    let _alone = alone();
    for (precision, half) in [
        (Precision::Bf16, FloatDType::BF16),
        (Precision::F16, FloatDType::BF16),
        (Precision::F16, FloatDType::F16),
    ] {
        let device = Device::flex().autodiff();
        let mut model = Weight::on(&device);
        let weight_in_half = Tensor::<2>::ones([1, 4], &device).cast(half);
        model.weight = Param::from_tensor(weight_in_half.require_grad());
        // Steps of 2^-10, which a half weight of 1 rounds away.
        let steps = [2f32.powi(-10); 3];
        let training = training("half", &steps).with_precision(precision);
        let learner = Learner::new(model, SgdConfig::new().init(), 1.0);
        assert_eq!(
            weight(&training.launch(learner).unwrap()),
            1.0 - 3.0 * steps[0]
        );
    }
}

/// Two experts of one weight each, whose gradients are half on a device that computes in half.
mod experts {
    use super::*;

    #[derive(Module, Debug)]
    struct Experts {
        weight: Param<Tensor<3>>,
    }

    impl Experts {
        /// The gradient of the loss is the input.
        fn forward(&self, input: Tensor<3>) -> RegressionOutput {
            let product = input.matmul(self.weight.val());
            let loss = product.clone().sum();
            let output = product.reshape([2, 1]);
            RegressionOutput::new(loss, output.clone(), output)
        }
    }

    impl TrainStep for Experts {
        type Input = Tensor<3>;
        type Output = RegressionOutput;

        fn step(&self, input: Tensor<3>) -> TrainOutput<RegressionOutput> {
            let item = self.forward(input);
            TrainOutput::new(self, item.loss.clone().backward(), item)
        }
    }

    impl InferenceStep for Experts {
        type Input = Tensor<3>;
        type Output = RegressionOutput;

        fn step(&self, input: Tensor<3>) -> RegressionOutput {
            self.forward(input)
        }
    }

    #[derive(Clone)]
    struct Inputs;

    impl Batcher<f32, Tensor<3>> for Inputs {
        fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<3> {
            Tensor::full([2, 1, 1], items[0], device)
        }
    }

    fn loader(items: &[f32]) -> Arc<dyn DataLoader<Tensor<3>>> {
        DataLoaderBuilder::new(Inputs)
            .batch_size(1)
            .build(InMemDataset::new(items.to_vec()))
    }

    /// The sum of the gradients, in a step of 1/1000.
    fn sum(items: &[f32], accumulation: usize, devices: Vec<Device>) -> f32 {
        let device = flex(Precision::Bf16).unwrap().autodiff();
        let weight = Param::from_tensor(Tensor::ones([2, 1, 1], &device));
        let training = SupervisedTraining::new(folder("experts"), loader(items), loader(&[1.0]))
            .with_application_logger(None)
            .grads_accumulation(accumulation)
            .with_amp()
            .with_devices(devices, MultiDeviceOptim::OptimMainDevice);
        let learner = Learner::new(Experts { weight }, SgdConfig::new().init(), 1e-3);
        let result = training.launch(learner).unwrap();
        let weight = result.model.weight.val().into_data();
        (1.0 - weight.iter::<f32>().next().unwrap()) * 1e3
    }

    #[test]
    fn gradients_are_added_up_in_fp32() {
        let _alone = alone();
        let items = [256.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5];
        let one = sum(&items, items.len(), Vec::new());
        assert!((one - 259.5).abs() < 0.1, "{one}");
        let devices = [Precision::Bf16, Precision::F32];
        let devices = devices.map(|precision| flex(precision).unwrap().autodiff());
        let two = sum(&[256.0, 0.5], 1, devices.to_vec());
        assert!((two - 256.5).abs() < 0.1, "{two}");
    }
}

#[test]
fn stops_when_no_scale_helps() {
    let _alone = alone();
    let stuck = scale(2.0).with_min_scale(2.0).with_stuck_after(2);
    let launch = |config: Option<DynamicLossScale>| {
        let training = training("stuck", &[0.25, OVERFLOW, OVERFLOW, 0.25])
            .to_fp16()
            .stop_when_stuck();
        let training = match config {
            Some(config) => training.with_loss_scale(config),
            None => training,
        };
        training.launch(learner()).unwrap()
    };
    // The second run continues with the state of the first run, which has already reported.
    for config in [Some(stuck), None] {
        let result = launch(config);
        assert_eq!(weight(&result), 0.75);
        let reason = result.interrupted.unwrap().reason.unwrap();
        assert!(reason.starts_with("2 steps in a row"), "{reason}");
    }
}

/// Trains an epoch from this checkpoint on. The scale grows with each step.
fn epoch(name: &str, from: Option<usize>, config: DynamicLossScale) -> (f32, GradScaler) {
    let device = flex(Precision::F16).unwrap();
    let scaler = GradScaler::of(&device);
    let schedule = scaler.checkpoint_with(schedule());
    let model = Weight::on(&Device::flex().autodiff());
    let learner = Learner::new(model, SgdConfig::new().init(), schedule);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("learner")
        .join(name);
    let mut training = SupervisedTraining::new(folder, loader(&[0.25, 0.25]), loader(&[0.5]))
        .with_application_logger(None)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .with_default_checkpointers()
        .num_epochs(from.unwrap_or(0) + 1);
    if let Some(from) = from {
        training = training.checkpoint(from);
    }
    let result = training.to_fp16().with_loss_scale(config).launch(learner);
    (weight(&result.unwrap()), scaler)
}

#[test]
fn a_checkpoint_has_the_loss_scale_and_the_learning_rate() {
    let _alone = alone();
    folder("resumes");
    let grows = scale(8.0).with_growth_interval(1);
    let (after, scaler) = epoch("resumes", None, grows);
    assert_eq!(after, 1.0 - 0.25 * (1.0 + 0.875));
    assert_eq!((scaler.loss_scale(), scaler.taken_steps()), (32.0, 2));

    let (after, scaler) = epoch("resumes", Some(1), grows);
    assert_eq!(after, 1.0 - 0.25 * (1.0 + 0.875 + 0.75 + 0.625));
    assert_eq!((scaler.loss_scale(), scaler.taken_steps()), (128.0, 4));

    // Another configuration applies, and its scale starts over.
    let (_, scaler) = epoch("resumes", Some(1), scale(64.0));
    assert_eq!((scaler.loss_scale(), scaler.taken_steps()), (64.0, 2));
}

#[test]
fn a_checkpoint_without_a_loss_scale_loads() {
    let _alone = alone();
    folder("without");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("learner")
        .join("without");
    let fp32 = SupervisedTraining::new(path, loader(&[0.25]), loader(&[0.5]))
        .with_application_logger(None)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .with_default_checkpointers()
        .launch(learner());
    assert_eq!(weight(&fp32), 0.75);
    let (after, scaler) = epoch("without", Some(1), scale(8.0));
    assert_eq!(after, 0.75 - 0.25 * (0.875 + 0.75));
    assert_eq!((scaler.loss_scale(), scaler.taken_steps()), (8.0, 2));
}

#[test]
fn loaders_of_a_loop_take_the_device_and_for_validation_the_one_without_autodiff() {
    let _alone = alone();
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let loader = |device: Device| {
        DataLoaderBuilder::new(Gradients)
            .batch_size(1)
            .set_device(device)
            .build(InMemDataset::new(vec![2.0]))
    };
    let model = Weight::on(&device);
    let training: Vec<_> = loader(device.clone()).iter().map(Result::unwrap).collect();
    let validation: Vec<_> = loader(device.inner()).iter().map(Result::unwrap).collect();
    assert_eq!((training.len(), validation.len()), (1, 1));
    for batch in training {
        let loss = TrainStep::step(&model, batch).item.loss;
        assert_eq!(loss.into_scalar::<f32>(), 8.0);
    }
    for batch in validation {
        let loss = model.valid().forward(batch).loss;
        assert_eq!(loss.into_scalar::<f32>(), 8.0);
    }
}
