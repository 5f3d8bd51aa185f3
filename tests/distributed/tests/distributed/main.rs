//! Burn's distributed data parallel: replicas of a model step or skip together, and stay the same.
//!
//! Replicas wait for each other. A test that would wait for ever fails instead.

#[allow(dead_code, unused_imports)]
#[path = "../../../shared/src/checked/mod.rs"]
mod checked;
#[allow(dead_code)]
#[path = "../../../shared/src/close.rs"]
mod close;
#[allow(dead_code)]
#[path = "../../../learner/harness.rs"]
mod harness;
#[allow(dead_code)]
#[path = "../../../shared/src/mlp.rs"]
mod mlp;
mod reducing;
/// As the harness names it. The package `shared` itself instantiates Burn's autodiff for backends that it does not take here.
mod common {
    pub(crate) use crate::mlp;
}

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ExecutionStrategy, Learner};
use burn_amp::policy::{Exception, Reason};
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpTrainingExt, DynamicLossScale, GradScaler, LossScaleConfig,
    LossScaler, Precision, StepOutcome, exceptions,
};
use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParamId, ReduceOperation,
};

use checked::{Checked, CheckedDevice};
use close::{HALVES, assert_close};
use harness::{By, Given, Model, Spy, Training, Watch, alone, folder, samples, training};
use mlp::{Mlp, parameters, values};

type B = AmpAutodiff<Checked>;

const LR: f64 = 0.1;

/// A replica's index and device.
#[derive(Debug, Clone, Copy)]
struct Replica {
    index: usize,
    device: CheckedDevice,
}

/// Runs the replicas of a training, each on its own thread, and returns their results or panics.
fn outcomes<T: Send + 'static>(
    op: ReduceOperation,
    devices: &[CheckedDevice],
    replica: impl Fn(Replica) -> T + Send + Sync + 'static,
) -> Vec<Result<T, Box<dyn Any + Send>>> {
    // Burn has one server for a backend.
    let _alone = alone();
    let (done, all_done) = channel();
    let devices = devices.to_vec();
    thread::spawn(move || {
        let config = DistributedConfig { all_reduce_op: op };
        B::start_communication_server(&devices, config);
        let replica = &replica;
        let outcomes = thread::scope(|scope| {
            let run = |(index, device): (usize, &CheckedDevice)| {
                let device = *device;
                let run = move || replica(Replica { index, device });
                scope.spawn(move || catch_unwind(AssertUnwindSafe(run)))
            };
            let running: Vec<_> = devices.iter().enumerate().map(run).collect();
            running
                .into_iter()
                .map(|replica| replica.join().unwrap())
                .collect()
        });
        B::close_communication_server(&devices[0]);
        let _ = done.send(outcomes);
    });
    match all_done.recv_timeout(Duration::from_secs(120)) {
        Ok(outcomes) => outcomes,
        Err(RecvTimeoutError::Timeout) => panic!("the replicas wait for ever"),
        Err(RecvTimeoutError::Disconnected) => panic!("the replicas failed"),
    }
}

fn replicas<T: Send + 'static>(
    op: ReduceOperation,
    devices: &[CheckedDevice],
    replica: impl Fn(Replica) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let outcomes = outcomes(op, devices, replica).into_iter();
    outcomes
        .map(|outcome| outcome.expect("a replica that does not panic"))
        .collect()
}

const INIT_SCALE: f32 = 1024.0;

fn devices(count: usize, precision: Precision) -> Vec<CheckedDevice> {
    let mut config = AmpConfig::new().with_precision(precision);
    if precision == Precision::F16 {
        config = config.with_loss_scale(LossScaleConfig::Dynamic(DynamicLossScale {
            init_scale: INIT_SCALE,
            growth_interval: 4,
            ..DynamicLossScale::default()
        }));
    }
    let device = |_| {
        let device = CheckedDevice::new();
        config.apply::<Checked>(&device).unwrap();
        device
    };
    (0..count).map(device).collect()
}

/// Marks each parameter, as Burn's `Learner` does.
struct Distribute;

impl<B: AutodiffBackend> ModuleMapper<B> for Distribute {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = tensor.set_distributed(DistributedParamId::from(id.val()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}

impl Replica {
    fn model(&self, model: &Mlp<B>) -> Mlp<B> {
        model.clone().fork(&self.device).map(&mut Distribute)
    }

    /// The loss on a batch of the replica's own.
    fn loss(&self, model: &Mlp<B>, step: usize) -> Tensor<B, 1> {
        loss(model, self.index, step, &self.device)
    }

    fn scaler(&self) -> GradScaler {
        GradScaler::of::<B>(&self.device)
    }
}

fn loss<A: Backend>(model: &Mlp<A>, replica: usize, step: usize, at: &A::Device) -> Tensor<A, 1> {
    let seed = 2 * (10 * step + replica) as u64;
    let x = values::<A, 2>([8, 8], seed).to_device(at);
    let y = values::<A, 2>([8, 4], seed + 1).to_device(at);
    model.loss_on(x, y)
}

/// A loss whose value is 0, and whose gradients are not finite.
fn overflow<A: Backend>(model: &Mlp<A>) -> Tensor<A, 1> {
    (model.first.weight.val().sum() * 0.0).sqrt()
}

/// A step with the gradients of a loss.
fn step<A: AutodiffBackend>(
    optimizer: &mut impl Optimizer<Mlp<A>, A>,
    model: Mlp<A>,
    loss: Tensor<A, 1>,
) -> Mlp<A> {
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(LR, model, grads)
}

/// The same training on one device in FP32, with the sum or mean of the replicas' losses, without
/// the steps that are skipped.
fn on_one_device(op: ReduceOperation, count: usize, steps: &[usize]) -> Vec<f32> {
    let device = CheckedDevice::new();
    AmpConfig::new()
        .with_precision(Precision::F32)
        .apply::<Checked>(&device)
        .unwrap();
    let mut model = Mlp::<B>::new().fork(&device);
    let mut optimizer = SgdConfig::new().init();
    for i in steps {
        let losses = (0..count).map(|replica| loss(&model, replica, *i, &device));
        let sum = losses.reduce(|a, b| a + b).unwrap();
        let loss = match op {
            ReduceOperation::Sum => sum,
            ReduceOperation::Mean => sum / count as f64,
        };
        model = step(&mut optimizer, model, loss);
    }
    parameters(&model)
}

fn assert_same<T: PartialEq + std::fmt::Debug>(of_replicas: &[T]) {
    for replica in of_replicas {
        assert_eq!(replica, &of_replicas[0]);
    }
}

/// Roundings of so few steps in half.
const ROUNDOFFS: f64 = 8.0;

#[test]
fn replicas_train_as_one() {
    for op in [ReduceOperation::Sum, ReduceOperation::Mean] {
        for count in [2, 3] {
            let expected = on_one_device(op, count, &[0, 1, 2, 3, 4]);
            for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
                let model = Mlp::<B>::new();
                let trained = replicas(op, &devices(count, precision), move |replica| {
                    let mut model = replica.model(&model);
                    let mut optimizer = SgdConfig::new().init();
                    for i in 0..5 {
                        let loss = replica.loss(&model, i);
                        model = step(&mut optimizer, model, loss);
                    }
                    parameters(&model)
                });
                assert_same(&trained);
                assert_close("replicas", precision, &trained[0], &expected, ROUNDOFFS);
            }
        }
    }
}

/// The final scaler of a training in f16 on two replicas, of which the first does something odd in
/// three steps. Both replicas end alike, and like a training without these steps.
fn with_odd_steps(
    odd: impl Fn(&Mlp<B>, Tensor<B, 1>) -> Tensor<B, 1> + Send + Sync + 'static,
) -> LossScaler {
    let model = Mlp::<B>::new();
    let devices = devices(2, Precision::F16);
    let ended = replicas(ReduceOperation::Mean, &devices, move |replica| {
        let mut model = replica.model(&model);
        let mut optimizer = SgdConfig::new().init();
        for i in 0..8 {
            let mut loss = replica.loss(&model, i);
            if replica.index == 0 && [1, 2, 5].contains(&i) {
                loss = odd(&model, loss);
            }
            model = step(&mut optimizer, model, loss);
        }
        (parameters(&model), replica.scaler().state())
    });
    assert_same(&ended);
    let (parameters, scaler) = &ended[0];
    let expected = on_one_device(ReduceOperation::Mean, 2, &[0, 3, 4, 6, 7]);
    assert_close("replicas", Precision::F16, parameters, &expected, ROUNDOFFS);
    *scaler
}

/// After a step that was skipped, gradients are still reduced: the replicas stay the same.
#[test]
fn an_overflow_on_one_replica_skips_the_step_of_all() {
    let scaler = with_odd_steps(|model, loss| loss + overflow(model));
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (5, 3));
    assert_eq!(scaler.scale(), INIT_SCALE / 8.0);
}

/// Only that replica detects it: the gradients are finite.
#[test]
fn a_loss_that_is_not_finite_on_one_replica_skips_the_step_of_all() {
    let scaler = with_odd_steps(|_, loss| {
        let device = loss.device();
        loss + Tensor::<B, 1>::full([1], f32::INFINITY, &device)
    });
    assert_eq!((scaler.taken_steps(), scaler.non_finite_losses()), (5, 3));
    // A fourth good step in a row has grown it.
    assert!(scaler.scale() >= INIT_SCALE);
}

/// A gradient that only one replica has is not reduced.
#[test]
fn an_overflow_of_what_one_replica_alone_has_skips_the_step_of_all() {
    let held = Mutex::new(Vec::new());
    let scaler = with_odd_steps(move |_, loss| {
        let own = Tensor::<B, 1>::zeros([1], &loss.device()).require_grad();
        held.lock().unwrap().push(own.clone());
        loss + own.sqrt()
    });
    assert_eq!(scaler.skipped_steps(), 3);
}

/// Gradients of different dtypes are never reduced together: what overflows on one replica computes in FP32 on all, from
/// the same step on.
#[test]
fn what_overflows_on_one_replica_is_an_exception_on_all() {
    let model = Mlp::<B>::new();
    let devices = devices(2, Precision::F16);
    let ended = replicas(ReduceOperation::Mean, &devices, move |replica| {
        let mut model = replica.model(&model);
        let mut optimizer = SgdConfig::new().init();
        let mut found = Vec::new();
        for i in 0..8 {
            let mut loss = replica.loss(&model, i);
            if replica.index == 1 && i > 0 {
                let x = values::<B, 2>([8, 8], 1).to_device(&replica.device);
                let large = model.first.forward(x) * 900.0;
                loss = loss + (large.clone() * large).mean() * 1e-7;
            }
            model = step(&mut optimizer, model, loss);
            found.push(exceptions::<B>(&replica.device).list());
        }
        (parameters(&model), replica.scaler().state(), found)
    });
    assert_same(&ended);
    let (_, scaler, found) = &ended[0];
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (6, 2));
    // A trial may have found that the device sums in half.
    let is_overflow = |e: &&Exception| e.reason == Reason::Overflowed;
    let counts: Vec<_> = found
        .iter()
        .map(|list| list.iter().filter(is_overflow).count())
        .collect();
    assert_eq!(counts, [0, 0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(
        found[7].iter().find(is_overflow).unwrap().to_string(),
        "mul over 16"
    );
}

#[test]
fn all_start_with_the_scaler_of_the_first() {
    let devices = devices(3, Precision::F16);
    let first = GradScaler::of::<B>(&devices[0]);
    first.set_scale(64.0).unwrap();
    let scales = replicas(ReduceOperation::Sum, &devices, |replica| {
        replica.scaler().state()
    });
    assert_same(&scales);
    assert_eq!(scales[0].scale(), 64.0);
}

#[test]
fn different_scales_are_an_error_on_every_replica() {
    let model = Mlp::<B>::new();
    let devices = devices(2, Precision::F16);
    let ended = outcomes(ReduceOperation::Sum, &devices, move |replica| {
        let model = replica.model(&model);
        if replica.index == 1 {
            replica.scaler().set_scale(16.0).unwrap();
        }
        replica.loss(&model, 0).backward();
    });
    for ended in ended {
        let panic = ended.unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(
            message.contains("same precision and loss scale"),
            "{message}"
        );
        assert!(
            message.contains("1024") && message.contains("16"),
            "{message}"
        );
    }
}

#[test]
fn different_precisions_are_an_error_on_every_replica() {
    let model = Mlp::<B>::new();
    let mixed = [devices(1, Precision::F16), devices(1, Precision::Bf16)].concat();
    let ended = outcomes(ReduceOperation::Sum, &mixed, move |replica| {
        let model = replica.model(&model);
        replica.loss(&model, 0).backward();
    });
    assert!(ended.iter().all(Result::is_err));
}

/// A replica that panics before it votes wakes the others, with an error that names it: they would
/// wait for it for ever.
#[test]
fn a_replica_that_panics_is_an_error_on_every_replica() {
    let model = Mlp::<B>::new();
    let devices = devices(3, Precision::F16);
    // Its gradients are reduced, and their check cannot be read.
    devices[1].before_each(|op, _| assert!(op != "float_into_data", "the device is lost"));
    let name = format!("{:?}", devices[1]);
    let ended = outcomes(ReduceOperation::Sum, &devices, move |replica| {
        let model = replica.model(&model);
        replica.loss(&model, 0).backward();
    });
    for (i, ended) in ended.into_iter().enumerate() {
        let panic = ended.unwrap_err();
        let text = match panic.downcast_ref::<String>() {
            Some(text) => text.as_str(),
            None => panic.downcast_ref::<&str>().unwrap(),
        };
        match i {
            1 => assert_eq!(text, "the device is lost"),
            _ => assert!(
                text.contains(&format!("the replica on checked on {name}")),
                "{text}"
            ),
        }
    }
}

/// A scale of 1 is a scale: its replica may skip a step.
#[test]
fn a_scale_of_one_beside_none_is_an_error() {
    let model = Mlp::<B>::new();
    let mixed = [devices(1, Precision::F16), devices(1, Precision::Bf16)].concat();
    let ended = outcomes(ReduceOperation::Sum, &mixed, move |replica| {
        let model = replica.model(&model);
        if replica.index == 0 {
            replica.scaler().set_scale(1.0).unwrap();
        }
        replica.loss(&model, 0).backward();
    });
    assert!(ended.iter().all(Result::is_err));
}

#[test]
fn what_is_not_scaled_is_not_read_back() {
    for precision in [Precision::Bf16, Precision::F32] {
        let devices = devices(2, precision);
        let model = Mlp::<B>::new();
        replicas(ReduceOperation::Sum, &devices, move |replica| {
            let mut optimizer = SgdConfig::new().init();
            let model = replica.model(&model);
            // The first step runs trials, which read.
            let loss = replica.loss(&model, 0);
            let model = step(&mut optimizer, model, loss);
            let loss = replica.loss(&model, 1);
            replica.device.reset();
            step(&mut optimizer, model, loss);
            assert_eq!(replica.device.counts().reads.total(), 0);
        });
    }
}

/// Burn's own accumulator, each of whose passes is reduced.
#[test]
fn accumulated_passes_are_all_reduced() {
    let expected = {
        let device = CheckedDevice::new();
        AmpConfig::new()
            .with_precision(Precision::F32)
            .apply::<Checked>(&device)
            .unwrap();
        let model = Mlp::<B>::new().fork(&device);
        // The third pass is skipped.
        let losses = [0, 1, 3].map(|i| loss(&model, 0, i, &device) + loss(&model, 1, i, &device));
        let [a, b, c] = losses;
        parameters(&step(&mut SgdConfig::new().init(), model, a + b + c))
    };
    for precision in HALVES {
        let model = Mlp::<B>::new();
        let trained = replicas(
            ReduceOperation::Sum,
            &devices(2, precision),
            move |replica| {
                let model = replica.model(&model);
                let mut accumulator = GradientsAccumulator::new();
                for i in 0..4 {
                    let mut loss = replica.loss(&model, i);
                    if i == 2 {
                        if precision == Precision::Bf16 {
                            continue;
                        }
                        loss = loss + overflow(&model);
                    }
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    accumulator.accumulate(&model, grads);
                }
                let mut optimizer = SgdConfig::new().init();
                parameters(&optimizer.step(LR, model, accumulator.grads()))
            },
        );
        assert_same(&trained);
        assert_close("accumulated", precision, &trained[0], &expected, ROUNDOFFS);
    }
}

/// Scale, step, update: on every replica with its own scaler.
#[test]
fn the_explicit_protocol_decides_together() {
    for odd in [StepOutcome::Overflow, StepOutcome::NonFiniteLoss] {
        let model = Mlp::<B>::new();
        let devices = devices(2, Precision::F16);
        let ended = replicas(ReduceOperation::Mean, &devices, move |replica| {
            let scaler = replica.scaler();
            let mut model = replica.model(&model);
            let mut optimizer = AdamConfig::new().init();
            let mut taken = Vec::new();
            for i in 0..6 {
                let mut loss = replica.loss(&model, i);
                if replica.index == 1 && i % 3 == 1 {
                    loss = match odd {
                        // Of a gradient that only this replica has.
                        StepOutcome::Overflow => loss + overflow(&model),
                        _ => loss.clone() + Tensor::full([1], f32::NAN, &loss.device()),
                    };
                }
                let grads = scaler.backward(loss, &model);
                let (stepped, was_taken) = scaler.step(&mut optimizer, LR, model, grads);
                let was_taken = was_taken.unwrap();
                scaler.update().unwrap();
                assert_eq!(scaler.last_step().unwrap().stepped(), was_taken);
                model = stepped;
                taken.push(was_taken);
            }
            (parameters(&model), scaler.state(), taken)
        });
        assert_same(&ended);
        assert_eq!(ended[0].2, [true, false, true, true, false, true]);
        let non_finite = ended[0].1.non_finite_losses();
        assert_eq!(non_finite > 0, odd == StepOutcome::NonFiniteLoss);
    }
}

/// Where no loss is scaled, with the check.
#[test]
fn the_check_decides_for_all_replicas() {
    for precision in [Precision::Bf16, Precision::F32] {
        let model = Mlp::<B>::new();
        let devices = devices(2, precision);
        for device in &devices {
            let config = AmpConfig::new().with_precision(precision);
            let config = config.with_finite_check(true);
            config.apply::<B>(device).unwrap();
        }
        let ended = replicas(ReduceOperation::Mean, &devices, move |replica| {
            let scaler = GradScaler::of::<B>(&replica.device);
            let mut model = replica.model(&model);
            let mut optimizer = AdamConfig::new().init();
            for i in 0..6 {
                let mut loss = replica.loss(&model, i);
                if replica.index == 1 && i % 3 == 1 {
                    // Of a gradient that only this replica has.
                    loss = loss + overflow(&model);
                }
                model = step(&mut optimizer, model, loss);
            }
            (
                parameters(&model),
                scaler.taken_steps(),
                scaler.skipped_steps(),
            )
        });
        assert_same(&ended);
        assert_eq!((ended[0].1, ended[0].2), (4, 2), "{precision}");
        assert!(ended[0].0.iter().all(|value| value.is_finite()));
    }
}

/// Replicas that are faster than others must not end up in the next step's reduction.
#[test]
fn many_small_steps() {
    for precision in [Precision::F16, Precision::F32] {
        let model = Mlp::<B>::new();
        let trained = replicas(
            ReduceOperation::Mean,
            &devices(3, precision),
            move |replica| {
                let mut model = replica.model(&model);
                let mut optimizer = SgdConfig::new().init();
                for i in 0..300 {
                    let mut loss = replica.loss(&model, i);
                    if precision == Precision::F16 && i % 37 == replica.index {
                        loss = loss + overflow(&model);
                    }
                    model = step(&mut optimizer, model, loss);
                }
                parameters(&model)
            },
        );
        assert_same(&trained);
    }
}

/// The learning rates and skips that each replica's optimizer was given, step by step.
fn learned(accumulation: usize, overflowing: &[usize]) -> Vec<Given> {
    let _alone = alone();
    let devices = devices(2, Precision::F16);
    let scalers = || devices.iter().map(GradScaler::of::<B>);
    let linear = LinearLrSchedulerConfig::new(0.1, 0.01, 4 * STEPS)
        .init()
        .unwrap();
    let spy = Spy::new(harness::sgd());
    let steps = spy.steps();
    // Burn gives the first half of them to the first device.
    let training: Training<B, _, _> =
        training(&folder("distributed"), samples(2 * STEPS, overflowing));
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let watch = Watch::default();
    training
        .renderer(watch.clone())
        .grads_accumulation(accumulation)
        .num_epochs(2)
        .to_fp16()
        .with_training_strategy(ExecutionStrategy::ddp(devices.clone(), config))
        .launch(Learner::new(Model::new(), spy, linear))
        .unwrap();

    let states: Vec<_> = scalers().map(|scaler| scaler.state()).collect();
    assert_same(&states);
    let skipped = states[0].skipped_steps();
    let all = 2 * STEPS / accumulation;
    assert_eq!(skipped + states[0].taken_steps(), all as u64);
    let shown = watch.shown("Skipped Steps");
    assert_eq!(shown.last().unwrap().parse::<u64>().unwrap(), skipped);
    assert!(scalers().all(|scaler| scaler.last_step().is_some()));
    let steps = steps.all();
    let pairs = steps.as_chunks::<2>().0;
    // No replica is a step ahead of another.
    pairs.iter().for_each(|pair| assert_eq!(pair[0], pair[1]));
    pairs.iter().map(|pair| pair[0]).collect()
}

/// Batches of a replica in an epoch.
const STEPS: usize = 6;

/// Before each replica's pass, Burn requests one learning rate for each replica, and uses the last.
fn lrs(passes: impl IntoIterator<Item = usize>) -> Vec<f64> {
    let mut linear = LinearLrSchedulerConfig::new(0.1, 0.01, 4 * STEPS)
        .init()
        .unwrap();
    let all: Vec<f64> = (0..4 * STEPS).map(|_| linear.step()).collect();
    passes.into_iter().map(|pass| all[2 * pass + 1]).collect()
}

#[test]
fn a_learner_trains_replicas() {
    // The second batch of the first replica, and the fifth of the second, in both epochs.
    let given = learned(1, &[1, STEPS + 4]);
    let taken: Vec<f64> = given.iter().map(|given| given.lr).collect();
    assert_eq!(taken, lrs(0..2 * (STEPS - 2)));
    assert!(given.iter().all(|given| given.gradients));
}

#[test]
fn a_learner_skips_the_whole_batch_of_all_replicas() {
    // The first two of three batches of two passes.
    let given = learned(2, &[1, STEPS + 2]);
    let taken: Vec<f64> = given.iter().map(|given| given.lr).collect();
    assert_eq!(taken, lrs([1, 3]));
}

const PANICS: &str = "BURN_AMP_TEST_PANICS";

/// Not a test by itself: the process that `a_replica_that_panics_ends_the_training` starts.
#[test]
fn a_training_whose_second_replica_panics() {
    if std::env::var(PANICS).is_err() {
        return;
    }
    let devices = devices(2, Precision::F16);
    let second = format!("{:?}", devices[1]);
    let training: Training<B, f64, _> =
        training(&folder("distributed-panic"), samples(2 * STEPS, &[]));
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let model = Model::by(By::Panic(second));
    training
        .to_fp16()
        .with_training_strategy(ExecutionStrategy::ddp(devices, config))
        .launch(Learner::new(model, harness::sgd(), 0.1))
        .ok();
}

/// The first replica waits for the gradients of the second, which do not come.
#[test]
fn a_replica_that_panics_ends_the_training() {
    let this = std::env::current_exe().unwrap();
    let mut process = std::process::Command::new(this)
        .args(["a_training_whose_second_replica_panics", "--exact"])
        .env(PANICS, "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    let status = loop {
        match process.try_wait().unwrap() {
            Some(status) => break status,
            None if std::time::Instant::now() > end => {
                process.kill().unwrap();
                panic!("it hangs");
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(!status.success());
}
