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
use burn::optim::{GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::{
    BinFileRecorder, FileRecorder, FullPrecisionSettings, HalfPrecisionSettings,
    NamedMpkFileRecorder, PrettyJsonFileRecorder, Recorder,
};
use burn::train::Learner;
use burn_amp::{
    AmpLrScheduler, AmpOptimizer, AmpTrainingExt, GradScaler, LossScaleConfig, LossScaler,
    Precision, StepOutcome, with_precision,
};

use crate::harness::{
    A, Model, SgdOf, Spy, Steps, Training, alone, folder, samples, sgd, training,
};

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
    let scheduler = AmpLrScheduler::new(scheduler, [scaler()]);
    launch(&folder("schedule-f16"), 1, scheduler, spy);

    let taken = steps.lrs_taken();
    assert_eq!(steps.all().len(), BATCHES);
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
fn accumulation_with_an_amp_optimizer() {
    let _alone = alone();
    let expected = lrs_in_fp32(linear(), 4);
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let optimizer = AmpOptimizer::new(spy, [scaler()]);
    let scheduler = AmpLrScheduler::new(linear(), [scaler()]);
    launch(&folder("schedule-batches"), 4, scheduler, optimizer);
    // Of 6 batches, those of the micro-batches 0, 5, 12 and 13, and 23 are skipped.
    assert_eq!(steps.lrs_taken(), expected[..2]);
    assert_eq!(steps.all().len(), 2);
}

/// A partly applied batch is a step. Its skipped micro-batches are no steps.
#[test]
fn accumulation_without_an_amp_optimizer() {
    let _alone = alone();
    let each = lrs_in_fp32(linear(), 1);
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    let scheduler = AmpLrScheduler::new(linear(), [scaler()]);
    launch(&folder("schedule-parts"), 4, scheduler, spy);
    let lr_of = |micro_batch: usize| {
        let before = OVERFLOWS.iter().filter(|o| **o < micro_batch).count();
        each[micro_batch - before]
    };
    let expected: Vec<f64> = (0..6).map(|batch| lr_of(4 * batch + 3)).collect();
    assert_eq!(steps.lrs_taken(), expected);
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
        let scheduler = AmpLrScheduler::new(linear(), [scaler()]);
        let learner = Learner::new(Model::new(), spy, scheduler);
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

type Scheduler = AmpLrScheduler<LinearLrScheduler>;

fn saved_and_loaded<R: FileRecorder<Flex>>(recorder: R, name: &str) {
    let path = folder("schedule-records").join(name);
    let saved = used_scaler();
    let mut scheduler = Scheduler::new(linear(), [saved.clone()]);
    let mut expected = linear();
    for _ in 0..7 {
        assert_eq!(scheduler.step(), expected.step());
    }
    recorder
        .record(scheduler.to_record::<Flex>(), path.clone())
        .unwrap();

    let loaded = fresh();
    let record = recorder.load(path, &Default::default()).unwrap();
    let mut scheduler = Scheduler::new(linear(), [loaded.clone()]).load_record::<Flex>(record);
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
    let scheduler = AmpLrScheduler::new(plain, [untouched.clone()]);
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
    let record = Scheduler::new(linear(), saved.clone()).to_record::<Flex>();
    let loaded = [fresh(), fresh(), fresh()];
    Scheduler::new(linear(), loaded.clone()).load_record::<Flex>(record.clone());
    for (i, scaler) in loaded.iter().enumerate() {
        assert_eq!(scaler.state(), saved[i % 2].state());
    }
    let one = fresh();
    Scheduler::new(linear(), [one.clone()]).load_record::<Flex>(record);
    assert_eq!(one.state(), saved[0].state());
}

#[test]
fn a_damaged_record_is_refused() {
    let path = folder("schedule-damaged").join("record");
    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let scheduler = Scheduler::new(linear(), [used_scaler()]);
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
    let damaged = text.replace("\"taken_steps\": 2", "\"taken_steps\": 3");
    assert_ne!(damaged, text, "{text}");
    load(&damaged).unwrap_err();
    let cut = text.replace("\"scheduler\"", "\"schedule\"");
    assert!(load(&cut).unwrap_err().contains("scheduler"));
}

/// The current configuration holds, and not that of the checkpoint.
#[test]
fn a_scaler_that_is_configured_otherwise_keeps_its_configuration() {
    let record = Scheduler::new(linear(), [used_scaler()]).to_record::<Flex>();
    for config in [LossScaleConfig::Fixed(64.0), LossScaleConfig::Disabled] {
        let scaler = GradScaler::new(config).unwrap();
        let mut scheduler = Scheduler::new(linear(), [scaler.clone()]);
        scheduler = scheduler.load_record::<Flex>(record.clone());
        assert_eq!(scaler.state(), LossScaler::new(config).unwrap());
        assert_eq!(scheduler.step(), linear().step());
    }
}

/// An overflow in a backward pass of this thread.
fn overflow(scaler: &GradScaler) {
    with_precision(Precision::F16, || {
        scaler.scope(|| {
            let w = Tensor::<A, 1>::zeros([1], &Default::default()).require_grad();
            w.clone().sqrt().backward();
        });
    });
}

/// A backward pass of this thread that is taken.
fn finite(scaler: &GradScaler) {
    with_precision(Precision::F16, || {
        scaler.scope(|| {
            let w = Tensor::<A, 1>::ones([1], &Default::default()).require_grad();
            w.clone().sqrt().backward();
        });
    });
}

#[test]
fn clones_each_hear_of_a_skipped_step() {
    let scaler = fresh();
    let mut schedulers = [
        Scheduler::new(linear(), [scaler.clone()]),
        Scheduler::new(linear(), []),
    ];
    schedulers[1] = schedulers[0].clone();
    let first = linear().step();
    for scheduler in &mut schedulers {
        assert_eq!(scheduler.step(), first);
    }
    overflow(&scaler);
    for scheduler in &mut schedulers {
        assert_eq!(scheduler.step(), first);
    }
    for scheduler in &mut schedulers {
        assert_ne!(scheduler.step(), first);
    }
}

/// One device whose passes run on other threads than the one that requests learning rates.
#[test]
fn a_pass_on_a_worker_thread_belongs_to_the_step_before_it() {
    let overflows = [true, false, false, true, true, false];
    let mut expected = linear();
    let expected: Vec<f64> = (0..3).map(|_| expected.step()).collect();
    let scaler = fresh();
    let mut scheduler = Scheduler::new(linear(), [scaler.clone()]);
    let mut taken = Vec::new();
    for overflows in overflows {
        let lr = scheduler.step();
        std::thread::scope(|threads| {
            let pass = || match overflows {
                true => overflow(&scaler),
                false => finite(&scaler),
            };
            threads.spawn(pass).join().unwrap();
        });
        if !overflows {
            taken.push(lr);
        }
    }
    assert_eq!(taken, expected);
}

/// Several devices that share a batch, as Burn's `MultiDevice`, but on the thread that requests
/// learning rates: passes come before the first learning rate, and before each later one.
#[test]
fn a_loop_over_devices_may_ask_after_their_passes() {
    let mut expected = linear();
    let expected: Vec<f64> = (0..2).map(|_| expected.step()).collect();
    let scalers = [fresh(), fresh()];
    let mut scheduler = Scheduler::new(linear(), scalers.clone());
    let mut taken = Vec::new();
    for overflows in [[true, true], [true, false], [true, true], [false, false]] {
        for (scaler, overflows) in scalers.iter().zip(overflows) {
            if overflows {
                overflow(scaler);
            } else {
                finite(scaler);
            }
        }
        let lr = scheduler.step();
        if overflows != [true, true] {
            taken.push(lr);
        }
    }
    assert_eq!(taken, expected);
}

/// An optimizer that follows the scaler, and the steps that it takes.
fn spied(scaler: &GradScaler) -> (AmpOptimizer<Spy<SgdOf<A>>>, Steps) {
    let spy = Spy::new(sgd());
    let steps = spy.steps();
    (AmpOptimizer::new(spy, [scaler.clone()]), steps)
}

#[test]
fn optimizers_each_skip_a_batch() {
    let scaler = fresh();
    let (mut optimizer, steps) = spied(&scaler);
    let mut clone = optimizer.clone();
    let step = |optimizer: &mut AmpOptimizer<_>| {
        let _: Model<A> = optimizer.step(0.1, Model::new(), GradientsParams::new());
        steps.all().len()
    };
    overflow(&scaler);
    assert_eq!((step(&mut optimizer), step(&mut clone)), (0, 0));
    // Another part of the same batch, at its own learning rate.
    assert_eq!((step(&mut optimizer), step(&mut clone)), (0, 0));
    finite(&scaler);
    assert_eq!((step(&mut optimizer), step(&mut clone)), (1, 2));
    assert_eq!(step(&mut optimizer), 3);
    // A loaded record drops earlier outcomes.
    overflow(&scaler);
    let record = Optimizer::<Model<A>, A>::to_record(&optimizer);
    optimizer = Optimizer::<Model<A>, A>::load_record(optimizer, record);
    assert_eq!((step(&mut optimizer), step(&mut clone)), (4, 4));
    // A new training drops earlier outcomes.
    overflow(&scaler);
    scaler.reset();
    assert_eq!((step(&mut optimizer), step(&mut clone)), (5, 6));
}

#[test]
fn a_skipped_batch_ends_with_any_pass() {
    let scaler = fresh();
    let (mut optimizer, steps) = spied(&scaler);
    let mut step = || {
        let _: Model<A> = optimizer.step(0.1, Model::new(), GradientsParams::new());
        steps.all().len()
    };
    let mut taken = 0;
    let mut after = |what: &str, pass: &dyn Fn()| {
        overflow(&scaler);
        assert_eq!((step(), step()), (taken, taken), "{what}");
        pass();
        assert_eq!(step(), taken + 1, "{what}");
        taken += 1;
    };
    // As of a trainer, which has a scaler of its own.
    after("another scaler", &|| finite(&fresh()));
    after("another precision", &|| {
        scaler.configure(LossScaleConfig::Disabled).unwrap();
        finite(&scaler);
        scaler.configure(LossScaleConfig::default()).unwrap();
    });
    // As on several devices. Without loss scaling the pass has no outcome.
    after("another thread", &|| {
        std::thread::scope(|scope| {
            let pass = || {
                let full = || {
                    scaler.scope(|| {
                        let w = Tensor::<A, 1>::ones([1], &Default::default()).require_grad();
                        w.sqrt().backward();
                    })
                };
                with_precision(Precision::F32, full)
            };
            scope.spawn(pass).join().unwrap();
        });
    });
}

/// The explicit protocol skips by itself, and takes the step after.
#[test]
fn the_explicit_protocol_is_not_skipped_twice() {
    let scaler = fresh();
    let mut model = Model::<A>::new();
    let (mut optimizer, steps) = spied(&scaler);
    let taken: Vec<bool> = (0..4)
        .map(|i| {
            with_precision(Precision::F16, || {
                let mut loss = model.mlp.loss(i);
                if i == 1 {
                    loss = loss + (model.mlp.first.weight.val().sum() * 0.0).sqrt();
                }
                let grads = scaler.backward(loss, &model);
                let (next, taken) = scaler.step(&mut optimizer, 0.1, model.clone(), grads);
                scaler.update().unwrap();
                model = next;
                taken.unwrap()
            })
        })
        .collect();
    assert_eq!(taken, [true, false, true, true]);
    assert_eq!(steps.all().len(), 3);
}

/// A step of the explicit protocol decides by itself, on whatever thread, for each micro-batch or
/// for a window of them, and also while an `AmpOptimizer` follows the same scaler.
#[test]
fn the_explicit_protocol_decides_on_the_rate_by_itself() {
    let mut expected = linear();
    let expected: Vec<f64> = (0..3).map(|_| expected.step()).collect();
    for (follows, elsewhere) in [(false, false), (false, true), (true, false), (true, true)] {
        let scaler = fresh();
        let model = Model::<A>::new();
        let mut optimizer = sgd::<A>();
        let _other = follows.then(|| AmpOptimizer::new(sgd::<A>(), [scaler.clone()]));
        let mut scheduler = Scheduler::new(linear(), [scaler.clone()]);
        let mut step = |overflows: bool| {
            let lr = scheduler.step();
            let mut window = || {
                let mut grads = GradientsParams::new();
                for i in 0..2 {
                    let mut loss = model.mlp.loss(i);
                    if overflows {
                        loss = loss + (model.mlp.first.weight.val().sum() * 0.0).sqrt();
                    }
                    grads = scaler.backward(loss, &model);
                }
                let (_, taken) = scaler.step(&mut optimizer, lr, model.clone(), grads);
                scaler.update().unwrap();
                assert_eq!(taken.unwrap(), !overflows);
            };
            let mut run = || with_precision(Precision::F16, &mut window);
            match elsewhere {
                true => std::thread::scope(|threads| threads.spawn(run).join().unwrap()),
                false => run(),
            }
            lr
        };
        let rates = [true, true, true, false, true, false, false].map(&mut step);
        let wanted = [0, 0, 0, 0, 1, 1, 2].map(|i: usize| expected[i]);
        assert_eq!(rates, wanted, "follows: {follows}, elsewhere: {elsewhere}");
    }
}
