//! `AmpConfig::with_finite_check`: steps are checked where no loss is scaled, too.

mod common;

use burn::backend::{Autodiff, Flex};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpError, AmpReport, GradScaler, LossScaleConfig,
    MixedPrecisionTrainerConfig, Precision, StepOutcome, StuckReason, Transition, WhenStuck,
    with_precision,
};

use common::mlp::{Mlp, parameters, values};
use shared::checked::{Checked, CheckedDevice};

type A = AmpAutodiff<Checked>;

/// The precisions that scale no loss, and f16 whose scaling is off.
const UNSCALED: [(Precision, LossScaleConfig); 3] = [
    (Precision::F32, LossScaleConfig::Disabled),
    (Precision::Bf16, LossScaleConfig::Disabled),
    (Precision::F16, LossScaleConfig::Disabled),
];

fn device(precision: Precision, loss_scale: LossScaleConfig, check: bool) -> CheckedDevice {
    let device = CheckedDevice::new();
    let config = AmpConfig::new()
        .with_precision(precision)
        .with_loss_scale(loss_scale)
        .with_finite_check(check);
    config.apply::<A>(&device).unwrap();
    device
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The loss is NaN.
    Loss,
    /// The loss is finite, and a gradient is not.
    Gradient,
}

fn batch_loss(model: &Mlp<A>, step: u64) -> Tensor<A, 1> {
    let device = model.first.weight.device();
    let [x, y] = [8, 4].map(|width| values::<A, 2>([32, width], step).to_device(&device));
    model.loss_on(x, y)
}

fn loss(model: &Mlp<A>, step: u64, fault: Fault) -> Tensor<A, 1> {
    let loss = batch_loss(model, step);
    match fault {
        Fault::None => loss,
        Fault::Loss => loss * f32::NAN,
        Fault::Gradient => loss + (model.first.weight.val().sum() * 0.0).sqrt(),
    }
}

#[test]
fn a_step_that_is_not_finite_is_skipped_named_and_counted() {
    for (precision, loss_scale) in UNSCALED {
        let device = device(precision, loss_scale, true);
        let mut model = Mlp::<A>::new().fork(&device);
        let mut optimizer = AdamConfig::new().init();
        let scaler = GradScaler::of::<A>(&device);
        for (step, fault) in [Fault::None, Fault::Loss, Fault::Gradient, Fault::None]
            .into_iter()
            .enumerate()
        {
            let before = parameters(&model);
            let grads = loss(&model, step as u64, fault).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            let last = scaler.explain(&model).unwrap();
            model = optimizer.step(1e-2, model, grads);
            let after = parameters(&model);
            assert_eq!(
                before == after,
                fault != Fault::None,
                "{precision}, {fault:?}"
            );
            let (outcome, named) = match fault {
                Fault::None => (StepOutcome::Finite, false),
                Fault::Loss => (StepOutcome::NonFiniteLoss, true),
                Fault::Gradient => (StepOutcome::Overflow, true),
            };
            assert_eq!(last.outcome, outcome, "{precision}");
            assert_eq!(last.scale, 1.0, "{precision}");
            let first = last.parameters.contains(&"first.weight".to_string());
            assert_eq!(
                first, named,
                "{precision}, {fault:?}: {:?}",
                last.parameters
            );
        }
        assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (2, 2));
        let report = AmpReport::of::<A>(&device).unwrap().to_string();
        let steps = "steps       2 taken, 2 skipped: 1 overflow, 1 loss not finite";
        assert!(report.contains(steps), "{report}");
        let none = format!("loss scale  none: {precision} needs none");
        assert_eq!(
            report.contains(&none),
            precision != Precision::F16,
            "{report}"
        );
    }
}

#[test]
fn without_the_check_nothing_is_checked() {
    for (precision, loss_scale) in UNSCALED {
        let device = device(precision, loss_scale, false);
        let model = Mlp::<A>::new().fork(&device);
        let scaler = GradScaler::of::<A>(&device);
        let grads = loss(&model, 0, Fault::Loss).backward();
        assert!(!GradientsParams::from_grads(grads, &model).is_empty());
        assert_eq!(scaler.state().steps(), 0);
    }
}

/// The scale of f16 is neither used nor moved in another precision.
#[test]
fn the_scale_stays_as_it_is() {
    let device = CheckedDevice::new();
    let config = AmpConfig::new()
        .with_precision(Precision::Bf16)
        .with_finite_check(true);
    config.apply::<A>(&device).unwrap();
    let model = Mlp::<A>::new().fork(&device);
    let scaler = GradScaler::of::<A>(&device);
    let before = scaler.state();
    for _ in 0..3 {
        let _ = loss(&model, 0, Fault::Gradient).backward();
    }
    assert_eq!(scaler.state().scale(), before.scale());
    assert_eq!((scaler.loss_scale(), scaler.skipped_steps()), (1.0, 3));
}

/// The gradients are those of a run without the check, bit for bit, and in FP32 Burn's.
#[test]
fn a_finite_step_is_the_same_with_the_check() {
    for precision in [Precision::F32, Precision::Bf16] {
        let [with, without] = [true, false].map(|check| {
            let device = device(precision, LossScaleConfig::Disabled, check);
            let mut model = Mlp::<A>::new().fork(&device);
            let mut optimizer = AdamConfig::new().init();
            for step in 0..5 {
                let grads = loss(&model, step, Fault::None).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = optimizer.step(1e-2, model, grads);
            }
            parameters(&model)
        });
        assert_eq!(with, without, "{precision}");
        if precision == Precision::F32 {
            let mut model = Mlp::<Autodiff<Flex>>::new();
            let mut optimizer = AdamConfig::new().init();
            for step in 0..5 {
                let [x, y] = [8, 4].map(|width| values([32, width], step));
                let grads = model.loss_on(x, y).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = optimizer.step(1e-2, model, grads);
            }
            assert_eq!(with, parameters(&model));
        }
    }
}

#[test]
fn the_explicit_protocol_skips_such_a_step() {
    for (precision, loss_scale) in UNSCALED {
        let device = device(precision, loss_scale, true);
        for scaler in [
            GradScaler::of::<A>(&device),
            GradScaler::new(LossScaleConfig::Disabled).unwrap(),
        ] {
            let mut model = Mlp::<A>::new().fork(&device);
            let mut optimizer = SgdConfig::new().init();
            let mut taken = Vec::new();
            for fault in [Fault::None, Fault::Loss, Fault::Gradient, Fault::None] {
                let grads = scaler.scale(loss(&model, 1, fault)).backward();
                let mut grads = GradientsParams::from_grads(grads, &model);
                scaler.unscale(&model, &mut grads).unwrap();
                let stepped;
                (model, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
                taken.push(stepped.unwrap());
                let transition = scaler.update().unwrap();
                assert_eq!(transition, Transition::Kept);
                let last = scaler.last_step().unwrap();
                assert_eq!(last.stepped(), fault == Fault::None);
                let names_it = last.parameters.contains(&"first.weight".to_string());
                assert_eq!(names_it, fault != Fault::None, "{:?}", last.parameters);
            }
            assert_eq!(taken, [true, false, false, true], "{precision}");
            assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (2, 2));
        }
    }
}

/// Unless its own configuration says how.
#[test]
fn a_trainer_scales_as_its_device_does() {
    let device = device(Precision::F16, LossScaleConfig::Fixed(32.0), false);
    for (own, expected) in [
        (None, 32.0),
        (Some(LossScaleConfig::Fixed(8.0)), 8.0),
        (Some(LossScaleConfig::Disabled), 1.0),
    ] {
        let trainer = MixedPrecisionTrainerConfig::new()
            .with_loss_scale(own)
            .init(Mlp::<A>::new().fork(&device), SgdConfig::new().init(), 0.1)
            .unwrap();
        assert_eq!(trainer.loss_scale(), expected, "{own:?}");
    }
}

/// A trainer skips the whole window, and says so when its run cannot go on.
#[test]
fn a_trainer_skips_such_a_window() {
    let device = device(Precision::Bf16, LossScaleConfig::Disabled, true);
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .with_grads_accumulation(2)
        .with_when_stuck(WhenStuck::Stop)
        .init(Mlp::<A>::new().fork(&device), SgdConfig::new().init(), 0.1)
        .unwrap();
    let mut train = |factor: f32| {
        let [x, y] = [8, 4].map(|width| values::<A, 2>([8, width], 1).to_device(&device));
        trainer.train_step(x, y, |model, x, y| model.loss_on(x, y) * factor)
    };
    let mut windows = |factors: [f32; 2]| factors.map(&mut train)[1].clone();
    assert!(windows([1.0, 1.0]).unwrap().stepped());
    assert!(!windows([f32::NAN, 1.0]).unwrap().stepped());
    assert!(windows([1.0, 1.0]).unwrap().stepped());
    let ends = (0..20).map(|_| windows([1.0, f32::NAN])).last().unwrap();
    let reason = StuckReason::Unscaled;
    assert!(
        matches!(ends, Err(AmpError::Stuck { reason: of, .. }) if of == reason),
        "{ends:?}"
    );
}

#[test]
fn a_run_whose_gradients_are_never_finite_says_so() {
    let device = device(Precision::Bf16, LossScaleConfig::Disabled, true);
    let scaler = GradScaler::of::<A>(&device);
    let model = Mlp::<A>::new().fork(&device);
    let mut optimizer = SgdConfig::new().init();
    let mut transitions = (0..21).map(|_| {
        let grads = scaler.backward(loss(&model, 0, Fault::Gradient), &model);
        let (_, stepped) = scaler.step(&mut optimizer, 0.1, model.clone(), grads);
        assert!(!stepped.unwrap());
        scaler.update().unwrap()
    });
    let stuck = transitions.position(|t| t == Transition::Stuck(StuckReason::Unscaled));
    assert_eq!(stuck, Some(19));
}

#[test]
fn the_report_shows_a_scale_once_a_step_was_scaled() {
    let device = device(Precision::Bf16, LossScaleConfig::Disabled, true);
    let model = Mlp::<A>::new().fork(&device);
    let report = || AmpReport::of::<A>(&device).unwrap().to_string();
    drop(loss(&model, 0, Fault::Gradient).backward());
    assert!(report().contains("loss scale  none"), "{}", report());
    assert!(report().contains("0 taken, 1 skipped"), "{}", report());
    let scaler = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    with_precision(Precision::F16, || {
        scaler.scope(|| drop(batch_loss(&model, 0).backward()))
    });
    let own = AmpReport::of::<A>(&device)
        .unwrap()
        .with_scaler(&scaler)
        .to_string();
    assert!(own.contains("loss scale  8: fixed"), "{own}");
}

/// The checks of many losses are read and freed, as those of scaled losses.
#[test]
fn a_long_window_frees_its_checks() {
    let device = device(Precision::Bf16, LossScaleConfig::Disabled, true);
    let scaler = GradScaler::of::<A>(&device);
    let leaf = Tensor::<A, 1>::ones([1], &device).require_grad();
    let reads = || AmpReport::of::<A>(&device).unwrap().read_backs;
    let before = reads();
    for _ in 0..1000 {
        drop(scaler.scale(leaf.clone().sum()).backward());
    }
    assert_eq!(reads() - before, 1);
}
