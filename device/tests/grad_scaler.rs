//! Loss scaling in the client.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_amp_device::{
    AmpError, DynamicLossScale, Error, GradScaler, LossScaleConfig, Precision, StepOutcome,
    Transition, clip_grad_norm, flex,
};

use client::read;

/// The gradient of its loss is its input.
#[derive(Module, Debug)]
struct Weight {
    weight: Param<Tensor<2>>,
}

impl Weight {
    fn new(device: &Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::ones([1, 4], device)),
        }
    }

    fn loss(&self, input: f32) -> Tensor<1> {
        let weight = self.weight.val();
        // Not a scalar times a tensor, whose gradient would be f16 times a scalar.
        let input = Tensor::<2>::full([1, 4], input, &weight.device());
        (weight * input).sum()
    }

    fn values(&self) -> Vec<f32> {
        read(self.weight.val().inner())
    }
}

fn plain() -> Device {
    Device::flex().autodiff()
}

fn scaler(dynamic: DynamicLossScale) -> GradScaler {
    GradScaler::new(dynamic.into()).unwrap()
}

/// Runs a step with a gradient of `input`. Returns whether the step was taken, and the change of the scale.
fn step(scaler: &GradScaler, model: &mut Weight, input: f32) -> (bool, Transition) {
    let grads = scaler.backward(model.loss(input), model);
    let mut sgd = SgdConfig::new().init();
    let (stepped_model, stepped) = scaler.step(&mut sgd, 1.0, model.clone(), grads);
    *model = stepped_model;
    (stepped.unwrap(), scaler.update().unwrap())
}

/// A finite loss with an infinite gradient at any scale above 1: four times this is finite.
const OVERFLOW: f32 = f32::MAX / 8.0;

#[test]
fn every_transition() {
    use Transition::{BackedOff, Grown, Kept, Stuck};
    let scaler = scaler(
        DynamicLossScale::new()
            .with_init_scale(16.0)
            .with_growth_interval(2)
            .with_min_scale(16.0)
            .with_max_scale(32.0)
            .with_stuck_after(2),
    );
    let mut model = Weight::new(&plain());
    assert_eq!(step(&scaler, &mut model, 0.25), (true, Kept));
    assert_eq!(model.values(), [0.75; 4]);
    assert_eq!(step(&scaler, &mut model, 0.25), (true, Grown));
    assert_eq!((model.values(), scaler.loss_scale()), (vec![0.5; 4], 32.0));
    assert_eq!(step(&scaler, &mut model, f32::NAN), (false, Kept));
    assert_eq!(
        scaler.last_step().unwrap().outcome,
        StepOutcome::NonFiniteLoss
    );
    assert_eq!(step(&scaler, &mut model, OVERFLOW), (false, BackedOff));
    let last = scaler.last_step().unwrap();
    assert_eq!(last.outcome, StepOutcome::Overflow);
    assert_eq!((last.scale, last.parameters), (32.0, vec!["weight".into()]));
    assert_eq!(scaler.loss_scale(), 16.0);
    // The non-finite loss counts as well.
    let stuck = Stuck(burn_amp_device::StuckReason::MinimumScale);
    assert_eq!(step(&scaler, &mut model, OVERFLOW), (false, stuck));
    assert_eq!(step(&scaler, &mut model, OVERFLOW), (false, Kept));
    assert_eq!(model.values(), [0.5; 4]);
    assert_eq!(step(&scaler, &mut model, 0.25), (true, Kept));
    assert_eq!(model.values(), [0.25; 4]);

    let state = scaler.state();
    assert_eq!((state.taken_steps(), scaler.skipped_steps()), (3, 4));
    assert_eq!(state.non_finite_losses(), 1);
    let history = scaler.history();
    let skipped: Vec<_> = history.skipped().map(|(step, _)| step).collect();
    assert_eq!(skipped, [3, 4, 5, 6]);
    let scales: Vec<_> = history.scales().collect();
    assert_eq!(scales, [16.0, 32.0, 32.0, 16.0, 16.0, 16.0]);
}

#[test]
fn gradients_too_small_for_f16_survive() {
    let device = flex(Precision::F16).unwrap().autodiff();
    // dL/dw = 2^-26 everywhere, a quarter of f16's smallest value.
    let scaler = scaler(DynamicLossScale::new().with_init_scale(1024.0));
    let weight = Param::from_tensor(Tensor::<2>::ones([4, 4], &device));
    let model = Weight { weight };
    let x = Tensor::<2>::ones([1, 4], &device);
    let small = Tensor::<2>::from_data(TensorData::from([[2f32.powi(-26)]]), &device);
    let loss = (x.matmul(model.weight.val()) * small).sum();
    let mut grads = scaler.backward(loss, &model);
    scaler.unscale(&model, &mut grads).unwrap();
    let grad = grads.get::<2>(model.weight.id).unwrap();
    assert_eq!(grad.dtype(), DType::F32);
    assert_eq!(read(grad), [2f32.powi(-26); 16]);
}

#[test]
fn an_overflow_of_f16_is_a_skipped_step() {
    let device = flex(Precision::F16).unwrap().autodiff();
    let scaler = scaler(DynamicLossScale::new().with_init_scale(65536.0));
    let weight = Param::from_tensor(Tensor::<2>::ones([4, 4], &device));
    let model = Weight { weight };
    let x = Tensor::<2>::ones([2, 4], &device);
    let loss = (x.matmul(model.weight.val()) * 8.0).sum();
    let grads = scaler.backward(loss, &model);
    let (model, stepped) = scaler.step(&mut SgdConfig::new().init(), 1.0, model, grads);
    assert!(!stepped.unwrap());
    assert_eq!(scaler.update().unwrap(), Transition::BackedOff);
    assert_eq!(model.values(), [1.0; 16]);
    assert_eq!((scaler.loss_scale(), scaler.skipped_steps()), (32768.0, 1));
}

#[test]
fn a_large_finite_loss_on_an_f16_device_is_finite() {
    let device = flex(Precision::F16).unwrap().autodiff();
    let scaler = scaler(DynamicLossScale::new().with_init_scale(1024.0));
    let weight = Param::from_tensor(Tensor::<2>::full([1, 4], 1e6, &device));
    let model = Weight { weight };
    let grads = scaler.backward(model.loss(1e-3), &model);
    let mut optimizer = SgdConfig::new().init();
    let (_, stepped) = scaler.step(&mut optimizer, 1.0, model, grads);
    assert!(stepped.unwrap());
}

#[test]
fn finite_gradients_whose_sum_overflows_are_finite() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(1.0));
    for (input, finite) in [(f32::MAX / 2.0, true), (f32::INFINITY, false)] {
        // The products cancel in the loss.
        let weight = Tensor::from_data([[1.0, -1.0, 1.0, -1.0]], &plain());
        let mut model = Weight {
            weight: Param::from_tensor(weight),
        };
        let (stepped, _) = step(&scaler, &mut model, input);
        assert_eq!(stepped, finite, "{input}");
    }
}

#[test]
fn a_skipped_step_leaves_parameters_and_optimizer_bit_for_bit() {
    for device in [plain(), flex(Precision::F16).unwrap().autodiff()] {
        let scaler = scaler(DynamicLossScale::new().with_init_scale(1024.0));
        let mut optimizer = AdamConfig::new().init();
        let model = LinearConfig::new(4, 2).init(&device);
        let loss = |model: &Linear, factor: f32| {
            let input = Tensor::<2>::full([8, 4], factor, &device);
            model.forward(input).mean()
        };
        let take = |optimizer: &mut ModuleOptimizer, model: Linear, factor| {
            let grads = scaler.backward(loss(&model, factor), &model);
            let (model, stepped) = scaler.step(optimizer, 1e-2, model, grads);
            scaler.update().unwrap();
            (model, stepped.unwrap())
        };
        let parameters = |model: &Linear| {
            let bias = model.bias.as_ref().unwrap().val().inner();
            (read(model.weight.val().inner()), read(bias))
        };
        let state = |optimizer: &ModuleOptimizer| optimizer.into_bytes().unwrap().to_vec();

        let (model, stepped) = take(&mut optimizer, model, 1.0);
        assert!(stepped);
        let (before, state_before) = (parameters(&model), state(&optimizer));
        for factor in [f32::INFINITY, f32::NAN, 1e36] {
            let (unchanged, stepped) = take(&mut optimizer, model.clone(), factor);
            assert!(!stepped, "{factor}");
            assert_eq!(parameters(&unchanged), before);
            assert_eq!(state(&optimizer), state_before);
        }
        // The next step is taken.
        let (after, stepped) = take(&mut optimizer, model, 1.0);
        assert!(stepped);
        assert_ne!(parameters(&after), before);
        assert_ne!(state(&optimizer), state_before);
    }
}

#[test]
fn micro_batches_share_a_scale_and_one_non_finite_loss_skips_them_all() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
    let mut model = Weight::new(&plain());
    let mut sum = |inputs: [f32; 2]| {
        let mut losses = inputs.into_iter().map(|input| {
            let loss = scaler.scale(model.loss(input));
            // This has no effect within the step.
            scaler.set_scale(64.0).unwrap();
            loss
        });
        let loss = losses.next().unwrap() + losses.next().unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let mut sgd = SgdConfig::new().init();
        let (stepped_model, stepped) = scaler.step(&mut sgd, 1.0, model.clone(), grads);
        model = stepped_model;
        scaler.update().unwrap();
        (stepped.unwrap(), model.values())
    };
    assert_eq!(sum([0.25, 0.5]), (true, vec![0.25; 4]));
    assert_eq!(sum([0.25, f32::INFINITY]), (false, vec![0.25; 4]));
    assert_eq!(
        scaler.last_step().unwrap().outcome,
        StepOutcome::NonFiniteLoss
    );
}

#[test]
fn a_batch_that_the_loop_leaves_out_is_no_part_of_the_next_step() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
    let mut model = Weight::new(&plain());
    for discarded in [true, false] {
        scaler.backward(model.loss(f32::INFINITY), &model);
        if discarded {
            scaler.discard_step();
        }
        assert_eq!(step(&scaler, &mut model, 0.25).0, discarded);
    }
    assert_eq!(scaler.state().taken_steps(), 1);
}

#[test]
fn gradients_that_are_added_after_unscale_are_checked_again() {
    let taken_with = |second: f32| {
        let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
        let model = Weight::new(&plain());
        let mut window = GradientsAccumulator::new();
        let mut grads = scaler.backward(model.loss(0.25), &model);
        scaler.unscale(&model, &mut grads).unwrap();
        window.accumulate(&model, grads);
        window.accumulate(&model, scaler.backward(model.loss(second), &model));
        let mut sgd = SgdConfig::new().init();
        let (model, stepped) = scaler.step(&mut sgd, 1.0, model, window.grads());
        scaler.update().unwrap();
        let taken = stepped.unwrap();
        assert_eq!(model.values() != [1.0; 4], taken);
        taken
    };
    assert!(taken_with(0.25));
    assert!(!taken_with(OVERFLOW));
    assert!(!taken_with(f32::NAN));
}

#[test]
fn several_optimizers_and_one_update() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
    let models = [Weight::new(&plain()), Weight::new(&plain())];
    let grads = [0.25, OVERFLOW]
        .into_iter()
        .zip(&models)
        .map(|(input, model)| scaler.backward(model.loss(input), model));
    let grads: Vec<_> = grads.collect();
    let mut optimizer = SgdConfig::new().init();
    let stepped: Vec<_> = models
        .into_iter()
        .zip(grads)
        .map(|(model, grads)| scaler.step(&mut optimizer, 1.0, model, grads).1.unwrap())
        .collect();
    assert_eq!(stepped, [true, false]);
    assert_eq!(scaler.update().unwrap(), Transition::BackedOff);
    assert_eq!((scaler.state().steps(), scaler.skipped_steps()), (1, 1));
}

#[test]
fn misuse_is_an_error_and_changes_nothing() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
    let model = Weight::new(&plain());
    let mut optimizer = SgdConfig::new().init();
    let amp = |error: Error| match error {
        Error::Amp(error) => error,
        error => panic!("{error}"),
    };

    assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
    let grads = || GradientsParams::from_grads(model.loss(1.0).backward(), &model);
    // Refused gradients are unchanged.
    let refused = |of: &Weight, mut grads: GradientsParams| {
        let values = |grads: &GradientsParams| read(grads.get::<2>(of.weight.id).unwrap());
        let before = values(&grads);
        let error = scaler.unscale(&model, &mut grads).unwrap_err();
        assert_eq!((grads.len(), values(&grads)), (1, before));
        amp(error)
    };
    let error = refused(&model, grads());
    assert_eq!(error, AmpError::NothingScaled { call: "unscale" });
    let (_, error) = scaler.step(&mut optimizer, 1.0, model.clone(), grads());
    let nothing_scaled = AmpError::NothingScaled { call: "step" };
    assert_eq!(amp(error.unwrap_err()), nothing_scaled);

    let other = Weight::new(&plain());
    let foreign = scaler.backward(other.loss(1.0), &other);
    let error = refused(&other, foreign);
    let (call, given, of_model) = ("unscale", 1, 0);
    assert_eq!(
        error,
        AmpError::ForeignGradients {
            call,
            given,
            of_model
        }
    );
    let none = GradientsParams::new();
    let (_, error) = scaler.step(&mut optimizer, 1.0, model.clone(), none);
    let (call, given, of_model) = ("step", 0, 0);
    assert_eq!(
        amp(error.unwrap_err()),
        AmpError::ForeignGradients {
            call,
            given,
            of_model
        }
    );
    assert_eq!(scaler.update(), Err(AmpError::NothingStepped));

    let mut unscaled = scaler.backward(model.loss(0.5), &model);
    scaler.unscale(&model, &mut unscaled).unwrap();
    assert_eq!(read(unscaled.get::<2>(model.weight.id).unwrap()), [0.5; 4]);
    let parameter = "weight".to_string();
    let twice = refused(&model, grads());
    let already = AmpError::AlreadyUnscaled {
        parameter: parameter.clone(),
    };
    assert_eq!(twice, already);
    // The step does not unscale gradients again.
    let (stepped, taken) = scaler.step(&mut optimizer, 1.0, model.clone(), unscaled);
    assert!(taken.unwrap());
    assert_eq!(stepped.values(), [0.5; 4]);
    let (_, twice) = scaler.step(&mut optimizer, 1.0, model.clone(), grads());
    assert_eq!(
        amp(twice.unwrap_err()),
        AmpError::AlreadyStepped { parameter }
    );
    assert_eq!(scaler.update(), Ok(Transition::Kept));
    assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
    assert_eq!((scaler.state().steps(), scaler.skipped_steps()), (1, 0));

    assert!(matches!(
        scaler.set_scale(f32::NAN),
        Err(AmpError::InvalidLossScale { .. })
    ));
    let bad = LossScaleConfig::Fixed(0.0);
    assert!(GradScaler::new(bad).is_err() && scaler.configure(bad).is_err());
    assert_eq!(scaler.state().steps(), 1);
}

/// The steps of a training are too small for a parameter in half, whether a loss is scaled or not.
#[test]
fn the_gradients_of_a_parameter_in_half_are_refused() {
    let scaled = LossScaleConfig::from(DynamicLossScale::new().with_init_scale(16.0));
    for (dtype, precision) in [
        (FloatDType::F16, Precision::F16),
        (FloatDType::BF16, Precision::Bf16),
    ] {
        for config in [scaled, LossScaleConfig::Disabled] {
            a_half_parameter_is_refused(dtype, precision, config);
        }
    }
}

fn a_half_parameter_is_refused(dtype: FloatDType, half: Precision, config: LossScaleConfig) {
    let mut model = Weight::new(&plain());
    let weight = model.weight.val().cast(dtype).detach();
    model.weight = Param::from_tensor(weight.require_grad());
    let scaler = GradScaler::new(config).unwrap();
    let loss = |model: &Weight| (model.weight.val() * 0.5).sum();
    let refused = |error: Error, call| match error {
        Error::Amp(AmpError::HalfParameter {
            call: of,
            parameter,
            precision,
        }) => {
            assert_eq!((of, parameter.as_str(), precision), (call, "weight", half));
        }
        error => panic!("{error}"),
    };
    let mut grads = scaler.backward(loss(&model), &model);
    let values = |grads: &GradientsParams| read(grads.get::<2>(model.weight.id).unwrap());
    let before = values(&grads);
    let error = scaler.unscale(&model, &mut grads).unwrap_err();
    assert!(error.to_string().contains("FP32"), "{error}");
    refused(error, "unscale");
    assert_eq!(values(&grads), before);
    let mut optimizer = SgdConfig::new().init();
    let (_, stepped) = scaler.step(&mut optimizer, 1.0, model, grads);
    refused(stepped.unwrap_err(), "step");
    assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
}

/// A finite loss whose gradient is not finite.
fn overflowing(model: &Weight) -> Tensor<1> {
    (model.loss(1.0) * 0.0).sqrt()
}

#[test]
fn the_last_step_is_known_before_its_update() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(4.0));
    let mut model = Weight::new(&plain());
    let mut sgd = SgdConfig::new().init();
    let mut before = None;
    type Loss = fn(&Weight) -> Tensor<1>;

    let losses: [(Loss, _); 4] = [
        (|model| model.loss(1.0), StepOutcome::Finite),
        (
            |model| model.loss(f32::INFINITY),
            StepOutcome::NonFiniteLoss,
        ),
        (overflowing, StepOutcome::Overflow),
        (|model| model.loss(1.0), StepOutcome::Finite),
    ];
    for (loss, outcome) in losses {
        let grads = scaler.backward(loss(&model), &model);
        assert_eq!(scaler.last_step(), before);
        let stepped;
        (model, stepped) = scaler.step(&mut sgd, 1.0, model, grads);
        stepped.unwrap();
        let now = scaler.last_step();
        assert_eq!(now.as_ref().map(|step| step.outcome), Some(outcome));
        scaler.update().unwrap();
        assert_eq!(scaler.last_step(), now);
        before = now;
    }
}

/// Trainings that run at once on one device, as tests do.
mod at_once {
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::thread;

    use super::*;

    /// The scale of a device is that of the process.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on() -> Device {
        let device = flex(Precision::F16).unwrap().autodiff();
        let config = DynamicLossScale::new().with_init_scale(8.0);
        GradScaler::of(&device).configure(config.into()).unwrap();
        device
    }

    fn stepped(scaler: &GradScaler, model: Weight, grads: GradientsParams) -> (bool, Vec<f32>) {
        let (model, stepped) = scaler.step(&mut SgdConfig::new().init(), 0.5, model, grads);
        (stepped.unwrap(), model.values())
    }

    const TAKEN: (bool, [f32; 4]) = (true, [0.5; 4]);
    const SKIPPED: (bool, [f32; 4]) = (false, [1.0; 4]);

    #[test]
    fn each_steps_with_its_own_scale_and_its_own_losses() {
        let _alone = alone();
        let device = on();
        let (a, b) = (GradScaler::of(&device), GradScaler::of(&device));
        let model = Weight::new(&device);
        let of_a = a.backward(model.loss(1.0), &model);
        // Another training skips a step, halves the scale and goes on.
        let of_b = b.backward(overflowing(&model), &model);
        assert_eq!(
            stepped(&b, model.clone(), of_b),
            (SKIPPED.0, SKIPPED.1.to_vec())
        );
        assert_eq!(b.update().unwrap(), Transition::BackedOff);
        let of_b = b.backward(model.loss(1.0), &model);
        assert_eq!((a.loss_scale(), b.loss_scale()), (4.0, 4.0));
        assert_eq!(
            stepped(&a, model.clone(), of_a),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        a.update().unwrap();
        assert_eq!(
            stepped(&b, model.clone(), of_b),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        b.update().unwrap();
        assert_eq!((a.taken_steps(), a.skipped_steps()), (2, 1));
        assert!(a.update().is_err() && b.update().is_err());
    }

    #[test]
    fn what_a_clone_or_a_dropped_scaler_began_goes_on() {
        let _alone = alone();
        let device = on();
        let model = Weight::new(&device);
        let began = |loss: Tensor<1>| {
            let grads = GradScaler::of(&device).scale(loss).backward();
            GradientsParams::from_grads(grads, &model)
        };
        // Two batches of a window, and each call with a scaler of its own.
        let mut sum = GradientsAccumulator::new();
        sum.accumulate(&model, began(model.loss(0.5)));
        GradScaler::of(&device).set_scale(2.0).unwrap();
        sum.accumulate(&model, began(model.loss(0.5)));
        assert_eq!(
            stepped(&GradScaler::of(&device), model.clone(), sum.grads()),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        assert_eq!(GradScaler::of(&device).update().unwrap(), Transition::Kept);
        // On a thread of its own, which has ended.
        let on_thread = thread::scope(|scope| scope.spawn(|| began(model.loss(1.0))).join());
        let scaler = GradScaler::of(&device);
        assert_eq!(
            stepped(&scaler, model.clone(), on_thread.unwrap()),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        let clone = scaler.clone();
        thread::scope(|scope| scope.spawn(|| clone.update().unwrap()).join().unwrap());
        assert_eq!(scaler.taken_steps(), 2);
    }

    #[test]
    fn steps_that_cannot_be_told_apart_are_an_error() {
        let _alone = alone();
        let device = on();
        let model = Weight::new(&device);
        let began = || GradScaler::of(&device).backward(model.loss(1.0), &model);
        // Each thread steps with what it began.
        let both = thread::scope(|scope| {
            [(), ()]
                .map(|()| {
                    scope.spawn(|| {
                        let grads = began();
                        let taken = stepped(&GradScaler::of(&device), model.clone(), grads);
                        GradScaler::of(&device).update().unwrap();
                        taken
                    })
                })
                .map(|thread| thread.join().unwrap())
        });
        assert_eq!(both, [(); 2].map(|()| (TAKEN.0, TAKEN.1.to_vec())));
        // Another thread cannot know which of two.
        let both = [(); 2].map(|()| thread::scope(|scope| scope.spawn(began).join().unwrap()));
        let scaler = GradScaler::of(&device);
        let [grads, _] = both;
        let (_, error) = scaler.step(&mut SgdConfig::new().init(), 0.5, model.clone(), grads);
        let several = AmpError::SeveralSteps {
            call: "step",
            steps: 2,
        };
        assert!(
            matches!(&error, Err(Error::Amp(found)) if *found == several),
            "{error:?}"
        );
        assert_eq!(
            scaler.update(),
            Err(AmpError::SeveralSteps {
                call: "update",
                steps: 2
            })
        );
        // A scaler that starts over discards them.
        scaler.reset();
        assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
        // A step of which a part was given to another scaler.
        let kept = scaler.backward(model.loss(1.0), &model);
        drop(began());
        let (_, error) = scaler.step(&mut SgdConfig::new().init(), 0.5, model.clone(), kept);
        assert!(
            matches!(&error, Err(Error::Amp(found)) if *found == several),
            "{error:?}"
        );
        GradScaler::of(&device).discard_step();
        assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
        scaler.reset();
    }

    #[test]
    fn a_call_that_is_refused_takes_no_other_threads_step() {
        let _alone = alone();
        let device = on();
        let (model, other) = (Weight::new(&device), Weight::new(&device));
        let began = || GradScaler::of(&device).backward(model.loss(1.0), &model);
        let grads = thread::scope(|scope| scope.spawn(began).join().unwrap());
        let scaler = GradScaler::of(&device);
        let foreign = scaler.unscale(&other, &mut GradientsParams::new());
        assert!(matches!(
            foreign,
            Err(Error::Amp(AmpError::ForeignGradients { .. }))
        ));
        scaler.discard_step();
        assert_eq!(scaler.update(), Err(AmpError::NothingStepped));
        assert_eq!(
            stepped(&scaler, model.clone(), grads),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        scaler.update().unwrap();
    }

    #[test]
    fn a_training_that_ends_within_a_step_leaves_nothing_to_the_next() {
        let _alone = alone();
        let device = on();
        let model = Weight::new(&device);
        {
            let scaler = GradScaler::of(&device);
            let grads = scaler.backward(model.loss(1.0), &model);
            stepped(&scaler, model.clone(), grads);
            scaler.update().unwrap();
            scaler.backward(model.loss(f32::INFINITY), &model);
        }
        let scaler = GradScaler::of(&device);
        let grads = scaler.backward(model.loss(1.0), &model);
        assert_eq!(
            stepped(&scaler, model.clone(), grads),
            (TAKEN.0, TAKEN.1.to_vec())
        );
        scaler.update().unwrap();
    }
}

#[test]
fn a_step_that_is_refused_gives_the_model_back() {
    let scaler = scaler(DynamicLossScale::new().with_init_scale(16.0));
    let mut optimizer = SgdConfig::new().init();
    let mut model = Weight::new(&plain());
    let id = model.weight.id;
    let grads = |model: &Weight| GradientsParams::from_grads(model.loss(0.5).backward(), model);
    let mut refused = |model: Weight, grads, values: [f32; 4]| {
        let (model, stepped) = scaler.step(&mut optimizer, 1.0, model, grads);
        assert_eq!((model.weight.id, model.values()), (id, values.to_vec()));
        (model, stepped)
    };
    let mut error;
    // Without a scaled loss, without gradients, and a second time in the same step.
    let unscaled = grads(&model);
    (model, error) = refused(model, unscaled, [1.0; 4]);
    assert!(matches!(
        error,
        Err(Error::Amp(AmpError::NothingScaled { .. }))
    ));
    let scaled = scaler.backward(model.loss(0.5), &model);
    (model, error) = refused(model, GradientsParams::new(), [1.0; 4]);
    assert!(matches!(
        error,
        Err(Error::Amp(AmpError::ForeignGradients { .. }))
    ));
    let stepped;
    (model, stepped) = scaler.step(&mut SgdConfig::new().init(), 1.0, model, scaled);
    assert!(stepped.unwrap());
    let again = grads(&model);
    (_, error) = refused(model, again, [0.5; 4]);
    assert!(matches!(
        error,
        Err(Error::Amp(AmpError::AlreadyStepped { .. }))
    ));
}

#[test]
fn disabled_it_does_nothing_but_step() {
    let scaler = GradScaler::new(LossScaleConfig::Disabled).unwrap();
    let mut model = Weight::new(&plain());
    assert_eq!(step(&scaler, &mut model, 0.25), (true, Transition::Kept));
    assert_eq!(model.values(), [0.75; 4]);
    let mut grads = scaler.backward(model.loss(1.0), &model);
    scaler.unscale(&model, &mut grads).unwrap();
    assert_eq!(read(grads.get::<2>(model.weight.id).unwrap()), [1.0; 4]);
    let mut optimizer = SgdConfig::new().init();
    let again = GradientsParams::from_grads(model.loss(1.0).backward(), &model);
    let (stepped, first) = scaler.step(&mut optimizer, 1.0, model.clone(), grads);
    assert!(first.unwrap());
    let (_, second) = scaler.step(&mut optimizer, 1.0, stepped, again);
    assert!(second.is_err());
    assert_eq!(scaler.state().steps(), 0);
}

#[test]
fn a_fixed_scale_skips_and_never_moves() {
    let scaler = GradScaler::new(LossScaleConfig::Fixed(16.0)).unwrap();
    let mut model = Weight::new(&plain());
    let (taken, skipped) = ((true, Transition::Kept), (false, Transition::Kept));
    assert_eq!(step(&scaler, &mut model, 0.25), taken);
    assert_eq!(step(&scaler, &mut model, OVERFLOW), skipped);
    assert_eq!((model.values(), scaler.loss_scale()), (vec![0.75; 4], 16.0));
}

#[test]
fn a_half_precision_loss_is_scaled_in_fp32() {
    let scaler = scaler(DynamicLossScale::new());
    let model = Weight::new(&plain());
    let loss = model.loss(0.5).cast(FloatDType::F16);
    let scaled = scaler.scale(loss);
    assert_eq!(scaled.dtype(), DType::F32);
    assert_eq!(read(scaled.inner()), [131072.0]);
}

#[test]
fn the_state_is_saved_and_restored_whole() {
    let scaler = scaler(
        DynamicLossScale::new()
            .with_init_scale(64.0)
            .with_growth_interval(3),
    );
    let mut model = Weight::new(&plain());
    for input in [0.25, OVERFLOW, f32::NAN, 0.25] {
        step(&scaler, &mut model, input);
    }
    let file = std::env::temp_dir().join(format!("burn-amp-device-{}.json", std::process::id()));
    scaler.save_file(&file).unwrap();
    let restored = GradScaler::default();
    restored.load_file(&file).unwrap();
    assert_eq!(restored.state(), scaler.state());
    // Both scalers continue in the same way.
    let mut copy = model.clone();
    for input in [0.25, 0.25, OVERFLOW] {
        assert_eq!(
            step(&scaler, &mut model, input),
            step(&restored, &mut copy, input)
        );
    }
    assert_eq!(restored.state(), scaler.state());

    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let before = restored.state();
    for damaged in [
        text.replace("\"hysteresis_left\": ", "\"hysteresis_left\": 1"),
        text.replace("\"version\": 2", "\"version\": 3"),
        text[..text.len() / 2].to_string(),
    ] {
        assert_ne!(damaged, text);
        let error = restored.read_state(damaged.as_bytes()).unwrap_err();
        assert!(matches!(error, AmpError::State { .. }), "{error}");
    }
    assert!(restored.load_file(&file).is_err());
    assert_eq!(restored.state(), before);
    let mut written = Vec::new();
    scaler.load_state(before);
    scaler.write_state(&mut written).unwrap();
    restored.read_state(written.as_slice()).unwrap();
    assert_eq!(restored.state(), before);
}

/// A state that burn-amp 0.1 wrote on Burn 0.21.
const SAVED_ON_BURN_0_21: &str = r#"{
  "version": 1,
  "config": {
    "Dynamic": {
      "init_scale": 65536.0,
      "growth_factor": 2.0,
      "backoff_factor": 0.5,
      "growth_interval": 2000,
      "min_scale": 1.0,
      "max_scale": 16777216.0,
      "hysteresis": 1,
      "stuck_after": 20
    }
  },
  "scale": 32768.0,
  "growth_tracker": 0,
  "hysteresis_left": 0,
  "taken_steps": 1,
  "skipped_steps": 2,
  "skipped_in_a_row": 2,
  "stuck": 0,
  "non_finite_losses": 1,
  "checksum": 2377440263
}"#;

#[test]
fn a_state_saved_on_burn_0_21_goes_on() {
    let scaler = GradScaler::default();
    scaler.read_state(SAVED_ON_BURN_0_21.as_bytes()).unwrap();
    assert_eq!(scaler.loss_scale(), 32768.0);
    assert_eq!(
        (scaler.state().taken_steps(), scaler.skipped_steps()),
        (1, 2)
    );
}

/// Gradients of 3 and 4 times `by`, in a model with a two-dimensional and a one-dimensional parameter.
fn three_and_four(device: &Device, by: f32) -> (Linear, GradientsParams) {
    let model = LinearConfig::new(1, 1).init(device);
    let input = Tensor::<2>::full([1, 1], 0.75, device);
    let loss = model.forward(input).sum() * (4.0 * by);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    (model, grads)
}

fn gradients(model: &Linear, grads: &GradientsParams) -> [f32; 2] {
    let bias = model.bias.as_ref().unwrap();
    let weight = grads.get::<2>(model.weight.id).unwrap();
    [
        weight.into_scalar(),
        grads.get::<1>(bias.id).unwrap().into_scalar(),
    ]
}

#[test]
fn gradients_are_clipped_by_their_total_norm() {
    for device in [plain(), flex(Precision::Bf16).unwrap().autodiff()] {
        let (model, mut grads) = three_and_four(&device, 1.0);
        let norm = clip_grad_norm(&model, &mut grads, 10.0).unwrap();
        assert_eq!(norm.into_scalar::<f32>(), 5.0);
        assert_eq!(gradients(&model, &grads), [3.0, 4.0]);

        let norm = clip_grad_norm(&model, &mut grads, 1.0).unwrap();
        assert_eq!(norm.dtype(), DType::F32);
        let clipped = gradients(&model, &grads);
        for (clipped, expected) in clipped.into_iter().zip([0.6, 0.8]) {
            // FP32's rounding, and 1e-6 of the formula.
            assert!((clipped - expected).abs() < 1e-6, "{clipped} {expected}");
        }
    }
}

#[test]
fn the_norm_of_gradients_in_half_is_that_in_fp32() {
    // The squares are beyond f16.
    let (model, mut grads) = three_and_four(&flex(Precision::F16).unwrap().autodiff(), 1024.0);
    let norm = clip_grad_norm(&model, &mut grads, 1.0).unwrap();
    assert_eq!(norm.into_scalar::<f32>(), 5120.0);
}

#[test]
fn gradients_of_another_model_are_not_clipped() {
    let (model, mut grads) = three_and_four(&plain(), 1.0);
    let (other, _) = three_and_four(&plain(), 1.0);
    let error = clip_grad_norm(&other, &mut grads, 1.0).unwrap_err();
    assert!(
        matches!(
            error,
            AmpError::ForeignGradients {
                given: 2,
                of_model: 0,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(gradients(&model, &grads), [3.0, 4.0]);
    let norm = clip_grad_norm(&other, &mut GradientsParams::new(), 1.0).unwrap();
    assert_eq!(norm.into_scalar::<f32>(), 0.0);
}

/// A program that trains in any precision saves the scaler in each.
#[test]
fn a_file_of_another_precision_does_not_turn_loss_scaling_on_or_off() {
    let name = format!("burn-amp-precisions-{}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let scaled = || scaler(DynamicLossScale::new().with_init_scale(128.0));
    let disabled = || GradScaler::new(LossScaleConfig::Disabled).unwrap();
    disabled().save_file(&file).unwrap();
    let resumed = scaled();
    resumed.set_scale(2.0).unwrap();
    resumed.load_file(&file).unwrap();
    assert_eq!(resumed.state(), scaled().state());
    scaled().save_file(&file).unwrap();
    let resumed = disabled();
    resumed.load_file(&file).unwrap();
    assert_eq!(resumed.state(), disabled().state());
    std::fs::remove_file(file).unwrap();
}
