//! The steps taken have the same learning rates as in a training that skips no step.

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::composed::ComposedLrSchedulerConfig;
use burn::lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::optim::Optimizer;
use burn::prelude::*;
use burn::record::{
    BinFileRecorder, FileRecorder, FullPrecisionSettings, HalfPrecisionSettings,
    NamedMpkFileRecorder, PrettyJsonFileRecorder, Recorder,
};
use burn::train::Learner;
use burn_amp::{
    AmpTrainingExt, GradScaler, LossScaleConfig, LossScaler, LrSchedulerWithScaler, Precision,
    StepOutcome, with_precision,
};

use crate::harness::{A, Model, Spy, Training, alone, folder, samples, sgd, training};

const BATCHES: usize = 24;
/// The first and the last, a single one, and two in a row.
const OVERFLOWS: [usize; 5] = [0, 5, 12, 13, 23];

/// The learning rates that an optimizer is given in a training without AMP.
fn lrs_in_fp32<S: LrScheduler + 'static>(scheduler: S, accumulation: usize) -> Vec<f64> {
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let training: Training<Autodiff<Flex>, S, _> =
        training(&folder("schedule-fp32"), samples(BATCHES, &[]));
    let training = training.grads_accumulation(accumulation);
    training.launch(Learner::new(Model::new(), spy, scheduler));
    steps.lrs_taken()
}

/// The same in f16, of the steps that are taken.
fn launch<S, O>(folder: &Path, accumulation: usize, scheduler: S, optimizer: O)
where
    S: LrScheduler + 'static,
    O: Optimizer<Model<A>, A> + 'static,
{
    let training: Training<A, S, O> = training(folder, samples(BATCHES, &OVERFLOWS));
    let training = training.grads_accumulation(accumulation);
    let learner = Learner::new(Model::new(), optimizer, scheduler);
    training.to_fp16().launch(learner).unwrap();
}

fn scaler() -> GradScaler {
    GradScaler::of::<A>(&Default::default())
}

fn waits_for_taken_steps<S: LrScheduler + 'static>(scheduler: S) {
    let _alone = alone();
    let expected = lrs_in_fp32(scheduler.clone(), 1);
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    launch(&folder("schedule-f16"), 1, scheduler, spy);

    let taken = steps.lrs_taken();
    assert_eq!(steps.all().len(), BATCHES - OVERFLOWS.len());
    assert_eq!(taken, expected[..BATCHES - OVERFLOWS.len()]);
    assert_eq!(scaler().skipped_steps(), OVERFLOWS.len() as u64);
}

fn cosine() -> CosineAnnealingLrScheduler {
    let config = CosineAnnealingLrSchedulerConfig::new(0.1, BATCHES);
    config.with_min_lr(0.01).init().unwrap()
}

/// Another learning rate each time.
fn linear() -> LinearLrScheduler {
    let config = LinearLrSchedulerConfig::new(0.1, 0.01, BATCHES);
    config.init().unwrap()
}

#[test]
fn a_constant() {
    waits_for_taken_steps(0.1);
}

#[test]
fn a_cosine() {
    waits_for_taken_steps(cosine());
}

#[test]
fn a_line() {
    waits_for_taken_steps(linear());
}

#[test]
fn an_exponential() {
    waits_for_taken_steps(ExponentialLrSchedulerConfig::new(0.1, 0.9).init().unwrap());
}

#[test]
fn noam() {
    let config = NoamLrSchedulerConfig::new(0.1).with_warmup_steps(10);
    waits_for_taken_steps(config.init().unwrap());
}

#[test]
fn steps() {
    waits_for_taken_steps(StepLrSchedulerConfig::new(0.1, 4).init().unwrap());
}

#[test]
fn a_composition() {
    let composed = ComposedLrSchedulerConfig::new()
        .cosine(CosineAnnealingLrSchedulerConfig::new(0.1, BATCHES))
        .linear(LinearLrSchedulerConfig::new(1e-3, 1.0, 6));
    waits_for_taken_steps(composed.init().unwrap());
}

/// Burn requests a learning rate before each micro-batch, and takes a step with the last of them.
#[test]
fn accumulation() {
    let _alone = alone();
    let expected = lrs_in_fp32(linear(), 4);
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    launch(&folder("schedule-batches"), 4, linear(), spy);
    // Of 6 batches, those of the micro-batches 0, 5, 12 and 13, and 23 are skipped.
    assert_eq!(steps.lrs_taken(), expected[..2]);
    assert_eq!(steps.all().len(), 2);
}

#[test]
fn in_bf16_and_fp32_every_step_is_taken() {
    let _alone = alone();
    let expected = lrs_in_fp32(linear(), 1);
    for bf16 in [true, false] {
        let spy = Spy::new(sgd());
        let steps = spy.steps();
        let training: Training<A, _, _> =
            training(&folder("schedule-unscaled"), samples(BATCHES, &[]));
        let learner = Learner::new(Model::new(), spy, linear());
        match bf16 {
            true => training.to_bf16().launch(learner).unwrap(),
            false => training.to_fp32().launch(learner).unwrap(),
        };
        assert_eq!(steps.lrs_taken(), expected);
    }
}

/// A scaler of the test's own, some steps old.
fn used_scaler() -> GradScaler {
    let mut state = LossScaler::new(LossScaleConfig::default()).unwrap();
    for outcome in [
        StepOutcome::Finite,
        StepOutcome::Overflow,
        StepOutcome::Finite,
    ] {
        state.update(outcome);
    }
    GradScaler::from(state)
}

fn fresh() -> GradScaler {
    GradScaler::new(LossScaleConfig::default()).unwrap()
}

type Scheduler = LrSchedulerWithScaler<LinearLrScheduler>;

fn with_all<const N: usize>(scalers: [GradScaler; N]) -> Scheduler {
    let mut scalers = scalers.into_iter();
    let first = scalers.next().unwrap().checkpoint_with(linear());
    scalers.fold(first, |schedule, scaler| schedule.and(scaler))
}

fn saved_and_loaded<R: FileRecorder<Flex>>(recorder: R, name: &str) {
    let path = folder("schedule-records").join(name);
    let saved = used_scaler();
    let mut scheduler = saved.checkpoint_with(linear());
    let mut expected = linear();
    for _ in 0..7 {
        assert_eq!(scheduler.step(), expected.step());
    }
    recorder
        .record(scheduler.to_record::<Flex>(), path.clone())
        .unwrap();

    let loaded = fresh();
    let record = recorder.load(path, &Default::default()).unwrap();
    let mut scheduler = loaded.checkpoint_with(linear()).load_record::<Flex>(record);
    assert_eq!(loaded.state(), saved.state());
    for _ in 0..7 {
        assert_eq!(scheduler.step(), expected.step());
    }
}

#[test]
fn its_record_holds_the_scheduler_and_the_scaler() {
    saved_and_loaded(NamedMpkFileRecorder::<FullPrecisionSettings>::new(), "mpk");
    saved_and_loaded(NamedMpkFileRecorder::<HalfPrecisionSettings>::new(), "half");
    saved_and_loaded(
        PrettyJsonFileRecorder::<FullPrecisionSettings>::new(),
        "json",
    );
    saved_and_loaded(BinFileRecorder::<FullPrecisionSettings>::new(), "bin");
}

fn plain_one_loads<S: LrScheduler, R: FileRecorder<Flex>>(plain: S, recorder: R, name: &str) {
    let path = folder("schedule-plain").join(name);
    let mut saved = plain.clone();
    for _ in 0..7 {
        saved.step();
    }
    recorder
        .record(saved.to_record::<Flex>(), path.clone())
        .unwrap();

    let untouched = used_scaler();
    let record = recorder.load(path, &Default::default()).unwrap();
    let scheduler = untouched.checkpoint_with(plain);
    let mut scheduler = scheduler.load_record::<Flex>(record);
    assert_eq!(untouched.state(), used_scaler().state());
    for _ in 0..7 {
        assert_eq!(scheduler.step(), saved.step());
    }
}

#[test]
fn a_record_from_before_there_was_amp_is_read() {
    let mpk = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    let json = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let noam = || NoamLrSchedulerConfig::new(0.1).init().unwrap();
    let steps = || StepLrSchedulerConfig::new(0.1, 4).init().unwrap();
    let exponential = || ExponentialLrSchedulerConfig::new(0.1, 0.9).init().unwrap();
    let composed = || {
        let config = ComposedLrSchedulerConfig::new();
        let config = config.cosine(CosineAnnealingLrSchedulerConfig::new(0.1, BATCHES));
        config
            .linear(LinearLrSchedulerConfig::new(1e-3, 1.0, 6))
            .init()
            .unwrap()
    };
    plain_one_loads(0.1, mpk.clone(), "constant");
    plain_one_loads(0.1, json.clone(), "constant");
    plain_one_loads(cosine(), mpk.clone(), "cosine");
    plain_one_loads(cosine(), json.clone(), "cosine");
    plain_one_loads(linear(), mpk.clone(), "linear");
    plain_one_loads(linear(), json.clone(), "linear");
    plain_one_loads(noam(), mpk.clone(), "noam");
    plain_one_loads(noam(), json.clone(), "noam");
    plain_one_loads(steps(), mpk.clone(), "steps");
    plain_one_loads(steps(), json.clone(), "steps");
    plain_one_loads(exponential(), mpk.clone(), "exponential");
    plain_one_loads(exponential(), json.clone(), "exponential");
    plain_one_loads(composed(), mpk, "composed");
    plain_one_loads(composed(), json, "composed");
}

#[test]
fn states_of_another_number_of_devices_are_dealt_out_in_turn() {
    let saved = [used_scaler(), fresh()];
    let record = with_all(saved.clone()).to_record::<Flex>();
    let loaded = [fresh(), fresh(), fresh()];
    with_all(loaded.clone()).load_record::<Flex>(record.clone());
    for (i, scaler) in loaded.iter().enumerate() {
        assert_eq!(scaler.state(), saved[i % 2].state());
    }
    let one = fresh();
    one.checkpoint_with(linear()).load_record::<Flex>(record);
    assert_eq!(one.state(), saved[0].state());
}

#[test]
fn a_damaged_record_is_refused() {
    let path = folder("schedule-damaged").join("record");
    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let scheduler = used_scaler().checkpoint_with(linear());
    Recorder::<Flex>::record(&recorder, scheduler.to_record::<Flex>(), path.clone()).unwrap();
    let file = path.with_extension("json");
    let text = std::fs::read_to_string(&file).unwrap();
    let load = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let record: Result<<Scheduler as LrScheduler>::Record<Flex>, _> =
            Recorder::<Flex>::load(&recorder, path.clone(), &Default::default());
        record.map(|_| ()).map_err(|error| error.to_string())
    };
    load(&text).unwrap();
    let damaged = text.replace("\"growth_tracker\": 1", "\"growth_tracker\": 2000");
    assert_ne!(damaged, text, "{text}");
    load(&damaged).unwrap_err();
    let cut = text.replace("\"scheduler\"", "\"schedule\"");
    assert!(load(&cut).unwrap_err().contains("scheduler"));
}

/// The current configuration holds, and not that of the checkpoint.
#[test]
fn a_scaler_that_is_configured_otherwise_keeps_its_configuration() {
    let record = used_scaler().checkpoint_with(linear()).to_record::<Flex>();
    for config in [LossScaleConfig::Fixed(64.0), LossScaleConfig::Disabled] {
        let scaler = GradScaler::new(config).unwrap();
        let mut scheduler = scaler.checkpoint_with(linear());
        scheduler = scheduler.load_record::<Flex>(record.clone());
        assert_eq!(scaler.state(), LossScaler::new(config).unwrap());
        assert_eq!(scheduler.step(), linear().step());
    }
}

/// In a hand-written loop the program moves its schedule, where its step was taken.
#[test]
fn a_loop_sees_which_steps_were_taken() {
    let scaler = fresh();
    let mut scheduler = linear();
    let mut lrs = Vec::new();
    let mut lr = scheduler.step();
    for overflows in [true, false, false, true, true, false] {
        with_precision(Precision::F16, || {
            scaler.scope(|| {
                let w = Tensor::<A, 1>::full([1], f32::from(!overflows), &Default::default());
                w.require_grad().sqrt().backward();
            });
        });
        lrs.push(lr);
        if scaler.last_step().is_none_or(|step| step.stepped()) {
            lr = scheduler.step();
        }
    }
    let mut expected = linear();
    let expected: Vec<f64> = (0..3).map(|_| expected.step()).collect();
    assert_eq!(lrs, [0, 0, 1, 2, 2, 2].map(|i: usize| expected[i]));
}
