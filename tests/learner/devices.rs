//! A batch that several devices share is taken whole or not at all.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::Optimizer;
use burn::train::{ExecutionStrategy, Learner, MultiDeviceOptim};
use burn_amp::{AmpAutodiff, AmpTrainingExt, GradScaler, Precision};

use crate::common::assert_close;
use crate::common::mlp::parameters;
use crate::harness::{
    AdamOf, BATCH, By, Model, Sample, Spy, Training, Watch, adam, alone, folder, recorder, samples,
    training,
};
use shared::checked::{Checked, CheckedDevice};

type B = AmpAutodiff<Checked>;

/// Steps, each of one batch on either device.
const STEPS: usize = 12;
/// In these steps the batch overflows on the first device, or on the second, or on both.
const FIRST: [usize; 3] = [1, 2, 7];
const SECOND: [usize; 2] = [7, 9];
const SKIPPED: [usize; 4] = [1, 2, 7, 9];

const OPTIMS: [MultiDeviceOptim; 2] = [
    MultiDeviceOptim::OptimMainDevice,
    MultiDeviceOptim::OptimSharded,
];

fn devices() -> [CheckedDevice; 2] {
    [CheckedDevice::new(), CheckedDevice::new()]
}

fn scalers(devices: &[CheckedDevice]) -> Vec<GradScaler> {
    devices.iter().map(GradScaler::of::<Checked>).collect()
}

fn linear() -> impl LrScheduler {
    LinearLrSchedulerConfig::new(0.01, 0.001, STEPS)
        .init()
        .unwrap()
}

/// Burn gives the first half of the samples to the first device. Each step's samples are the same
/// with and without overflow.
fn shared(first: &[usize], second: &[usize], left_out: &[usize]) -> Vec<Sample> {
    let all = samples(2 * STEPS, &[]);
    let (a, b) = all.split_at(STEPS * BATCH);
    let half = |samples: &[Sample], overflowing: &[usize]| -> Vec<Sample> {
        let steps = samples.chunks(BATCH).enumerate();
        steps
            .filter(|(step, _)| !left_out.contains(step))
            .flat_map(|(step, samples)| {
                samples
                    .iter()
                    .map(move |sample| (overflowing.contains(&step), *sample))
            })
            .map(|(overflows, sample)| Sample {
                overflows,
                ..sample
            })
            .collect()
    };
    [half(a, first), half(b, second)].concat()
}

/// The parameters that a training ends with.
fn train<S, O>(
    devices: &[CheckedDevice],
    optim: MultiDeviceOptim,
    samples: Vec<Sample>,
    accumulation: usize,
    scheduler: S,
    optimizer: O,
) -> Vec<f32>
where
    S: LrScheduler + 'static,
    O: Optimizer<Model<B>, B> + 'static,
{
    let watch = Watch::default();
    let items = samples.len() / BATCH;
    let training: Training<B, S, O> = training(&folder("devices"), samples);
    let result = training
        .renderer(watch.clone())
        .grads_accumulation(accumulation)
        .to_fp16()
        .with_training_strategy(ExecutionStrategy::MultiDevice(devices.to_vec(), optim))
        .launch(Learner::new(Model::new(), optimizer, scheduler))
        .unwrap();
    // Each item shows a step of one of the devices.
    assert_eq!(watch.shown("Loss Scale").len(), items);
    assert_eq!(
        watch
            .shown("Skipped Steps")
            .last()
            .unwrap()
            .parse::<u64>()
            .unwrap(),
        {
            scalers(devices)
                .iter()
                .map(GradScaler::skipped_steps)
                .max()
                .unwrap()
        }
    );
    parameters(&result.model)
}

fn spied() -> (Spy<AdamOf<B>>, crate::harness::Steps) {
    let spy = Spy::new(adam());
    let steps = spy.steps();
    (spy, steps)
}

/// A training with overflows ends where one ends that never saw their batches.
#[test]
fn an_overflow_on_one_device_skips_the_batch_of_all() {
    let _alone = alone();
    for optim in OPTIMS {
        let (with, without) = (devices(), devices());
        let (optimizer, steps) = spied();
        let data = shared(&FIRST, &SECOND, &[]);
        let overflowed = train(&with, optim, data, 1, linear(), optimizer);
        // The same loss scales, so that f16 rounds the same: powers of two do not round at all.
        let (optimizer, expected) = spied();
        let data = shared(&[], &[], &SKIPPED);
        let calm = train(&without, optim, data, 1, linear(), optimizer);

        assert_eq!(steps.lrs_taken(), expected.lrs_taken(), "{optim:?}");
        assert_eq!(steps.all().len(), STEPS - SKIPPED.len(), "{optim:?}");
        assert_eq!(overflowed, calm, "{optim:?}");
        let skipped = scalers(&with)
            .iter()
            .map(GradScaler::skipped_steps)
            .collect::<Vec<_>>();
        // As in PyTorch, the scale of each device backs off.
        assert_eq!(skipped, [SKIPPED.len() as u64; 2], "{optim:?}");
    }
}

#[test]
fn it_skips_the_whole_of_an_accumulation() {
    let _alone = alone();
    for optim in OPTIMS {
        let (with, without) = (devices(), devices());
        let (optimizer, steps) = spied();
        // Of the batches of steps 0 to 3, 4 to 7 and 8 to 11, only the second is whole.
        let data = shared(&[1], &[1, 10], &[]);
        let overflowed = train(&with, optim, data, 4, linear(), optimizer);
        let (optimizer, expected) = spied();
        let data = shared(&[], &[], &[0, 1, 2, 3, 8, 9, 10, 11]);
        let calm = train(&without, optim, data, 4, linear(), optimizer);

        assert_eq!(steps.lrs_taken(), expected.lrs_taken(), "{optim:?}");
        assert_eq!(steps.all().len(), 1, "{optim:?}");
        // Devices add up their gradients in the order in which they are done.
        assert_close("parameters", Precision::F32, &overflowed, &calm, 16.0);
    }
}

/// Two workers on one device share a step, and its scaler.
#[test]
fn workers_may_share_a_device() {
    let _alone = alone();
    for optim in OPTIMS {
        let device = [CheckedDevice::new()];
        let (optimizer, steps) = spied();
        let data = shared(&FIRST, &SECOND, &[]);
        let both = [device[0], device[0]];
        train(&both, optim, data, 1, linear(), optimizer);
        assert_eq!(steps.all().len(), STEPS - SKIPPED.len(), "{optim:?}");
        let scaler = GradScaler::of::<Checked>(&device[0]);
        assert_eq!(scaler.skipped_steps(), SKIPPED.len() as u64, "{optim:?}");
    }
}

/// A checkpoint with the scaler of one device restores the scalers of all.
#[test]
fn all_devices_resume_with_the_scale_of_the_checkpoint() {
    let _alone = alone();
    let devices = devices();
    let folder = folder("devices-resume");
    for epoch in 1..=2 {
        let schedule = GradScaler::of::<Checked>(&devices[0]).checkpoint_with(linear());
        let training: Training<B, _, _> = training(&folder, shared(&FIRST, &SECOND, &[]));
        let mut training = training
            .with_file_checkpointer(recorder())
            .num_epochs(epoch);
        if epoch > 1 {
            training = training.checkpoint(epoch - 1);
        }
        let optim = MultiDeviceOptim::OptimMainDevice;
        training
            .to_fp16()
            .with_training_strategy(ExecutionStrategy::MultiDevice(devices.to_vec(), optim))
            .launch(Learner::new(Model::new(), adam::<B>(), schedule))
            .unwrap();
        let [one, other] = scalers(&devices).try_into().unwrap();
        assert_eq!(one.state(), other.state());
        assert_eq!(one.skipped_steps(), (epoch * SKIPPED.len()) as u64);
    }
}

/// As in Burn, where the training does not wait for a worker that has panicked.
#[test]
fn a_worker_that_panics_ends_the_training() {
    let _alone = alone();
    let devices = devices();
    let model = Model::by(By::Panic(format!("{:?}", devices[1])));
    let training: Training<B, f64, AdamOf<B>> =
        training(&folder("devices-panic"), shared(&[], &[], &[]));
    let optim = MultiDeviceOptim::OptimMainDevice;
    let training = training
        .to_fp16()
        .with_training_strategy(ExecutionStrategy::MultiDevice(devices.to_vec(), optim));
    let launch = || training.launch(Learner::new(model, adam(), 0.1)).is_ok();
    assert!(catch_unwind(AssertUnwindSafe(launch)).is_err());
}
