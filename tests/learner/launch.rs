//! `SupervisedTraining` with a precision: its configuration, and the errors before the first step.

use std::sync::Arc;

use burn::backend::NdArray;
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::Optimizer;
use burn::prelude::Backend;
use burn::tensor::{DType, Tensor};
use burn::train::{ExecutionStrategy, Interrupter, Learner, MultiDeviceOptim, TrainingStrategy};
use burn_amp::policy::Reason;
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpError, AmpTrainingExt, DynamicLossScale, GradScaler,
    LossScaleConfig, Precision, WhenStuck, exceptions, full_precision, precision_of,
    with_precision,
};
use burn_backend::DTypeUsageSet;

use crate::common::mlp::parameters;
use crate::harness::{
    A, By, Model, SgdOf, Spy, Training, Watch, alone, folder, loss_of, samples, sgd, training,
};
use crate::unchanged::EachBatchTwice;
use shared::checked::{Checked, CheckedDevice};

type Sgd = SgdOf<A>;
type CheckedA = AmpAutodiff<Checked>;

fn default_training(name: &str) -> Training<A, f64, Sgd> {
    training(&folder(name), samples(3, &[]))
}

fn learner() -> Learner<crate::harness::Components<A, f64, Sgd>> {
    Learner::new(Model::new(), sgd(), 0.1)
}

#[test]
fn the_precision_is_in_force_when_training_is_launched() {
    let _alone = alone();
    let device = Default::default();
    let launches: [(fn(_) -> _, _); 3] = [
        (|t: Training<A, f64, Sgd>| t.to_fp16(), Precision::F16),
        (|t| t.to_bf16(), Precision::Bf16),
        (|t| t.to_fp32(), Precision::F32),
    ];
    for (to, precision) in launches {
        let before = precision_of::<A>(&device).unwrap();
        let training = to(default_training("launch"));
        assert_eq!(precision_of::<A>(&device).unwrap(), before);
        training.launch(learner()).unwrap();
        assert_eq!(precision_of::<A>(&device).unwrap(), precision);
        let taken = GradScaler::of::<A>(&device).state().taken_steps();
        assert_eq!(taken, if precision == Precision::F16 { 3 } else { 0 });
    }
}

#[test]
fn auto_is_what_the_device_can() {
    let _alone = alone();
    default_training("launch-auto")
        .with_amp(AmpConfig::new())
        .launch(learner())
        .unwrap();
    let precision = precision_of::<A>(&Default::default()).unwrap();
    assert_ne!(precision, Precision::Auto);
}

#[test]
fn a_loss_scale_without_effect_is_an_error_before_the_first_step() {
    let _alone = alone();
    let device = Default::default();
    AmpConfig::new()
        .with_precision(Precision::F32)
        .apply::<A>(&device)
        .unwrap();
    let watch = Watch::default();
    let config = AmpConfig::new()
        .with_precision(Precision::Bf16)
        .with_loss_scale(LossScaleConfig::Fixed(128.0));
    let training = default_training("launch-idle").renderer(watch.clone());
    let error = training.with_amp(config).launch(learner()).err().unwrap();
    let precision = Precision::Bf16;
    assert_eq!(error, AmpError::LossScaleWithoutF16 { precision });
    assert_eq!(watch.rendered(), 0);
    assert_eq!(precision_of::<A>(&device).unwrap(), Precision::F32);
}

#[test]
fn an_impossible_precision_is_an_error_before_the_first_step() {
    let _alone = alone();
    type B = AmpAutodiff<NdArray>;
    let watch = Watch::default();
    let training: Training<B, f64, SgdOf<B>> =
        training(&folder("launch-impossible"), samples(3, &[]));
    let training = training.renderer(watch.clone()).to_fp16();
    let error = training
        .launch(Learner::new(Model::new(), sgd(), 0.1))
        .err()
        .unwrap();
    assert!(
        matches!(error, AmpError::UnsupportedPrecision { .. }),
        "{error}"
    );
    assert_eq!(watch.rendered(), 0);
}

fn over<O: Optimizer<Model<CheckedA>, CheckedA> + 'static>(
    devices: &[CheckedDevice],
    optimizer: O,
    config: AmpConfig,
) -> Result<(), AmpError> {
    let training: Training<CheckedA, f64, O> = training(&folder("launch-devices"), samples(4, &[]));
    let strategy =
        ExecutionStrategy::MultiDevice(devices.to_vec(), MultiDeviceOptim::OptimMainDevice);
    let training = training.with_amp(config).with_training_strategy(strategy);
    training
        .launch(Learner::new(Model::new(), optimizer, 0.1))
        .map(|_| ())
}

fn in_precision(precision: Precision) -> AmpConfig {
    AmpConfig::new().with_precision(precision)
}

#[test]
fn if_one_device_cannot_do_it_all_are_as_they_were() {
    let _alone = alone();
    let able = CheckedDevice::new();
    let none = DTypeUsageSet::empty();
    let unable = CheckedDevice::with_support(none, none);
    in_precision(Precision::Bf16)
        .apply::<Checked>(&able)
        .unwrap();
    let error = over(&[able, unable], sgd(), in_precision(Precision::F16)).unwrap_err();
    assert!(
        matches!(error, AmpError::UnsupportedPrecision { .. }),
        "{error}"
    );
    assert_eq!(precision_of::<Checked>(&able).unwrap(), Precision::Bf16);
}

/// The strategy applies what it has of a window.
#[test]
fn a_strategy_of_ones_own_does_not_accumulate_in_f16() {
    let _alone = alone();
    let launch = |config: AmpConfig, micro_batches| {
        let training = default_training("launch-own").grads_accumulation(micro_batches);
        let strategy = TrainingStrategy::Custom(Arc::new(EachBatchTwice));
        let training = training.with_amp(config).with_training_strategy(strategy);
        let before = GradScaler::of::<A>(&Default::default()).taken_steps();
        let result = training.launch(learner()).map(|_| ());
        let after = GradScaler::of::<A>(&Default::default()).taken_steps();
        result.map(|()| after - before.min(after))
    };
    let f16 = in_precision(Precision::F16);
    let micro_batches = 3;
    let error = launch(f16, micro_batches).unwrap_err();
    assert_eq!(error, AmpError::PartialBatch { micro_batches });
    assert_eq!(launch(f16, 1), Ok(2 * 3));
    launch(in_precision(Precision::Bf16), 3).unwrap();
    let checked = in_precision(Precision::Bf16).with_finite_check(true);
    assert_eq!(launch(checked, micro_batches), Err(error));
    launch(f16.with_loss_scale(LossScaleConfig::Disabled), 3).unwrap();
}

/// One pass of each window overflows, and the optimizer is given nothing of it.
#[test]
fn a_window_is_taken_whole_or_not_at_all() {
    let _alone = alone();
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let training: Training<A, f64, Spy<Sgd>> =
        training(&folder("launch-accumulation"), samples(9, &[4]));
    let training = training.grads_accumulation(3).to_fp16();
    training
        .launch(Learner::new(Model::new(), spy, 0.1))
        .unwrap();
    assert_eq!(steps.all().len(), 2, "of three windows");
    let scaler = GradScaler::of::<A>(&Default::default());
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (2, 1));
    let history = scaler.history();
    let (_, skipped) = history.skipped().next().unwrap();
    assert_eq!(skipped.first_parameter.as_deref(), Some("mlp.first.weight"));
}

/// A pass that a `TrainStep` runs in its own way is part of the step, too.
#[test]
fn a_step_is_whole_however_its_passes_scale_their_losses() {
    let _alone = alone();
    let mine = || GradScaler::new(LossScaleConfig::default()).unwrap();
    let [first, second] = [mine(), mine()];
    for (by, own) in [
        (By::Scaled, None),
        (By::Scope(first.clone()), Some((first, (8, 1)))),
        (By::Own(second.clone()), Some((second, (0, 0)))),
    ] {
        let case = format!("{by:?}");
        let spy = Spy::new(sgd());
        let steps = spy.steps();
        let training: Training<A, f64, Spy<Sgd>> = training(&folder("launch-by"), samples(9, &[4]));
        training
            .grads_accumulation(3)
            .to_fp16()
            .launch(Learner::new(Model::by(by), spy, 0.1))
            .unwrap();
        assert_eq!(steps.all().len(), 2, "of three windows, {case}");
        let devices = GradScaler::of::<A>(&Default::default());
        let counts = |scaler: &GradScaler| (scaler.taken_steps(), scaler.skipped_steps());
        // A scaler of the step's own decides pass by pass, if it is in force.
        match own {
            Some(own) => assert_eq!(
                [counts(&devices), counts(&own.0)],
                [(0, 0), own.1],
                "{case}"
            ),
            None => assert_eq!(counts(&devices), (2, 1), "{case}"),
        }
    }
}

/// The scaler of the device is then not the training's, but means it.
#[test]
fn a_step_that_scales_with_its_device_is_checked_in_a_scope_too() {
    let _alone = alone();
    let mine = GradScaler::new(LossScaleConfig::default()).unwrap();
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let training: Training<A, f64, Spy<Sgd>> = training(&folder("launch-two"), samples(5, &[2]));
    let learner = Learner::new(Model::by(By::Scaled), spy, 0.1);
    mine.scope(|| training.to_fp16().launch(learner)).unwrap();
    assert_eq!(steps.all().len(), 4, "of five");
    assert_eq!((mine.taken_steps(), mine.skipped_steps()), (4, 1));
}

/// As that of a critic: the steps of both are apart.
#[test]
fn a_step_may_take_a_whole_step_of_another_model() {
    let _alone = alone();
    let mine = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let training: Training<A, f64, Spy<Sgd>> = training(&folder("launch-critic"), samples(5, &[2]));
    let learner = Learner::new(Model::by(By::After(mine.clone())), spy, 0.1);
    training.to_fp16().launch(learner).unwrap();
    assert_eq!((mine.taken_steps(), mine.skipped_steps()), (5, 0));
    assert_eq!(steps.all().len(), 4, "of five");
}

/// The lines of the explicit protocol in a `TrainStep`: the loop has scaled, and checks.
#[test]
fn a_step_may_clip_as_a_loop_of_its_own_does() {
    let _alone = alone();
    for skipped in [&[][..], &[2]] {
        let spy = Spy::new(sgd());
        let steps = spy.steps();
        let training: Training<A, f64, Spy<Sgd>> =
            training(&folder("launch-clip"), samples(5, skipped));
        let learner = Learner::new(Model::by(By::Clipped(1e-3)), spy, 0.1);
        let before = with_precision(Precision::F32, || loss_of(&learner.model()));
        let learned = training.to_fp16().launch(learner).unwrap();
        assert_eq!(steps.all().len(), 5 - skipped.len());
        // So little as the norm allows.
        let after = with_precision(Precision::F32, || loss_of(&learned.model));
        let change = (after / before - 1.0).abs();
        assert!(change > 0.0 && change < 1e-2, "{change}");
    }
}

/// A scaler that the program has in force around the training is the training's.
#[test]
fn a_scope_around_a_launch_gives_the_training_its_scaler() {
    let _alone = alone();
    let mine = GradScaler::new(LossScaleConfig::default()).unwrap();
    let first: Training<A, f64, Sgd> = training(&folder("launch-scope"), samples(5, &[2]));
    let learner = Learner::new(Model::new(), sgd(), 0.1);
    mine.scope(|| first.to_fp16().launch(learner)).unwrap();
    assert_eq!((mine.taken_steps(), mine.skipped_steps()), (4, 1));
    let devices = GradScaler::of::<A>(&Default::default());
    assert_eq!(devices.state().steps(), 0);

    // And it stops the training that is stuck.
    let mine = GradScaler::new(LossScaleConfig::Fixed(4.0)).unwrap();
    let all: Vec<usize> = (0..30).collect();
    let training: Training<A, f64, Sgd> = training(&folder("launch-scope"), samples(30, &all));
    let config = in_precision(Precision::F16).with_when_stuck(WhenStuck::Stop);
    let learner = Learner::new(Model::new(), sgd(), 0.1);
    mine.scope(|| training.with_amp(config).launch(learner))
        .unwrap();
    assert_eq!(mine.skipped_steps(), 20);
}

/// Where only the step's own region is f16.
#[test]
fn a_skipped_step_in_a_region_takes_its_learning_rate_back() {
    let _alone = alone();
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let training: Training<A, _, Spy<Sgd>> =
        training(&folder("launch-region"), samples(6, &[1, 2]));
    let linear = || LinearLrSchedulerConfig::new(0.1, 0.01, 6).init().unwrap();
    let learner = Learner::new(Model::new(), spy, linear());
    let launch = || training.to_fp32().launch(learner);
    with_precision(Precision::F16, launch).unwrap();
    let mut expected = linear();
    let expected: Vec<f64> = (0..4).map(|_| expected.step()).collect();
    assert_eq!(steps.lrs_taken(), expected);
}

#[test]
fn devices_share_a_batch_without_more_ado() {
    let _alone = alone();
    let devices = [CheckedDevice::new(), CheckedDevice::new()];
    for config in [
        in_precision(Precision::F16),
        in_precision(Precision::Bf16),
        in_precision(Precision::F16).with_loss_scale(LossScaleConfig::Disabled),
    ] {
        over(&devices, sgd(), config).unwrap();
        over(&devices[..1], sgd(), config).unwrap();
    }
}

#[test]
fn a_training_that_is_stuck_goes_on_or_stops_as_configured() {
    let _alone = alone();
    let all: Vec<usize> = (4..40).collect();
    let dynamic = LossScaleConfig::Dynamic(DynamicLossScale {
        init_scale: 4.0,
        min_scale: 1.0,
        stuck_after: 3,
        ..DynamicLossScale::default()
    });
    let fixed = LossScaleConfig::Fixed(4.0);
    for (when_stuck, loss_scale, steps, reason) in [
        (WhenStuck::Log, dynamic, 40, None),
        (WhenStuck::Log, fixed, 40, None),
        (
            WhenStuck::Stop,
            dynamic,
            4 + 2 + 3,
            Some("minimum loss scale 1:"),
        ),
        (WhenStuck::Stop, fixed, 4 + 20, Some("fixed loss scale 4:")),
    ] {
        let config = in_precision(Precision::F16)
            .with_loss_scale(loss_scale)
            .with_when_stuck(when_stuck);
        let spy = Spy::new(sgd());
        let seen = spy.steps();
        let interrupter = Interrupter::new();
        let training: Training<A, f64, Spy<Sgd>> =
            training(&folder("launch-stuck"), samples(40, &all));
        training
            .with_interrupter(interrupter.clone())
            .with_amp(config)
            .launch(Learner::new(Model::new(), spy, 0.1))
            .unwrap();
        let scaler = GradScaler::of::<A>(&Default::default());
        let seen = seen.all().len();
        assert_eq!(seen as u64, scaler.taken_steps());
        assert_eq!(seen + scaler.skipped_steps() as usize, steps);
        let message = interrupter.get_message();
        assert_eq!(message.is_some(), reason.is_some(), "{message:?}");
        let message = message.unwrap_or_default();
        assert!(message.contains(reason.unwrap_or_default()), "{message}");
    }
}

/// In each window one micro-batch overflows at any scale, and the other is good.
#[test]
fn a_training_whose_windows_are_all_skipped_is_stuck() {
    let _alone = alone();
    let device = Default::default();
    let even: Vec<usize> = (0..20).map(|window| 2 * window).collect();
    let loss_scale = DynamicLossScale::new()
        .with_init_scale(4.0)
        .with_stuck_after(3);
    let config = in_precision(Precision::F16)
        .with_loss_scale(loss_scale.into())
        .with_when_stuck(WhenStuck::Stop);
    let spy = Spy::new(sgd());
    let seen = spy.steps();
    let scaler = GradScaler::of::<A>(&device);
    let interrupter = Interrupter::new();
    let training: Training<A, f64, Spy<Sgd>> =
        training(&folder("launch-stuck-windows"), samples(40, &even));
    training
        .with_interrupter(interrupter.clone())
        .grads_accumulation(2)
        .with_amp(config)
        .launch(Learner::new(Model::new(), spy, 0.1))
        .unwrap();
    assert_eq!(seen.all().len(), 0);
    // Two windows lower the scale to 1.
    let windows = (scaler.taken_steps(), scaler.skipped_steps());
    assert_eq!(windows, (0, 2 + 3));
    let message = interrupter.get_message().unwrap();
    let expected = "5 steps in a row were skipped, the last one at the minimum loss scale 1";
    assert!(message.contains(expected), "{message}");
    assert!(!scaler.last_step().unwrap().stepped());
}

#[test]
fn it_can_be_stopped_from_elsewhere() {
    let _alone = alone();
    let spy = Spy::new(sgd());
    let seen = spy.steps();
    let training: Training<A, f64, Spy<Sgd>> = training(&folder("launch-stop"), samples(9, &[]));
    let training = training.to_bf16();
    training.interrupter().stop(Some("enough"));
    training
        .launch(Learner::new(Model::new(), spy, 0.1))
        .unwrap();
    assert_eq!(seen.all().len(), 1);
}

#[test]
fn a_model_in_half_is_trained_in_fp32() {
    struct Cast(DType);
    impl<B: Backend> ModuleMapper<B> for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|tensor| {
                let cast = tensor.set_require_grad(false).cast(self.0);
                cast.set_require_grad(true)
            })
        }
    }
    let _alone = alone();
    for precision in [Precision::F16, Precision::Bf16] {
        let half = full_precision(|| {
            let dtype = precision.compute_dtype().unwrap();
            Model::<A>::new().map(&mut Cast(dtype))
        });
        let widened = full_precision(|| half.clone().map(&mut Cast(DType::F32)));
        let [half, widened] = [half, widened].map(|model| {
            let training: Training<A, f64, Sgd> = training(&folder("launch-half"), samples(5, &[]));
            let result = training
                .with_amp(in_precision(precision))
                .launch(Learner::new(model, sgd(), 0.1))
                .unwrap();
            parameters(&result.model)
        });
        assert_eq!(half, widened, "{precision}");
    }
}

/// In bf16 and FP32, with the check: the step is skipped, and shown.
#[test]
fn a_step_that_is_not_finite_is_skipped_without_a_loss_scale() {
    let _alone = alone();
    for precision in [Precision::Bf16, Precision::F32] {
        let spy = Spy::new(sgd());
        let steps = spy.steps();
        let watch = Watch::default();
        let training: Training<A, _, Spy<Sgd>> =
            training(&folder("launch-check"), samples(6, &[1, 2]));
        let linear = || LinearLrSchedulerConfig::new(0.1, 0.01, 6).init().unwrap();
        training
            .renderer(watch.clone())
            .with_amp(in_precision(precision).with_finite_check(true))
            .launch(Learner::new(Model::new(), spy, linear()))
            .unwrap();
        let mut expected = linear();
        let expected: Vec<f64> = (0..4).map(|_| expected.step()).collect();
        assert_eq!(steps.lrs_taken(), expected);
        assert_eq!(watch.metrics(), ["Precision", "Skipped Steps"]);
        assert_eq!(watch.shown("Skipped Steps"), ["0", "1", "2", "2", "2", "2"]);
    }
}

/// A loss that f16 does not hold, and FP32 does: the operation becomes an exception after a skipped step.
#[test]
fn an_overflow_that_no_loss_scale_mends_is_mended() {
    let _alone = alone();
    let device = Default::default();
    let train = |precision| {
        let training: Training<A, f64, SgdOf<A>> =
            training(&folder("launch-overflow"), samples(40, &[]));
        let learner = Learner::new(Model::by(By::Beyond), sgd(), 0.1);
        let trained = training.with_amp(in_precision(precision)).launch(learner);
        loss_of(&trained.unwrap().model)
    };
    let exact = train(Precision::F32);
    let loss = train(Precision::F16);
    assert!((loss / exact - 1.0).abs() < 0.01, "{loss} for {exact}");
    let scaler = GradScaler::of::<A>(&device);
    assert!(scaler.skipped_steps() <= 3, "{}", scaler.skipped_steps());
    let list = exceptions::<A>(&device).list();
    let found: Vec<_> = list
        .iter()
        .filter(|e| e.reason == Reason::Overflowed)
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].to_string(), "mul over 4");
    exceptions::<A>(&device).clear();
}
