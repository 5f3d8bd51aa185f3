//! `MixedPrecisionTrainer`: its results in a hand-written loop, and the resumption of a run that was stopped
//! anywhere.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use std::fs;
use std::path::PathBuf;

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{
    AmpError, DynamicLossScale, Error, GradScaler, LossScaleConfig, MixedPrecisionTrainer,
    MixedPrecisionTrainerConfig, Precision, StepMetrics, StepProgress, WhenStuck, clip_grad_norm,
    flex,
};

use StepProgress::{Accumulated, Skipped, Stepped};
use client::{HALVES, read, tensor};

type Trainer = MixedPrecisionTrainer<Linear>;

fn device(precision: Precision) -> Device {
    flex(precision).unwrap().autodiff()
}

/// A layer with the same parameters at each call.
fn layer(device: &Device) -> Linear {
    use burn::module::Param;

    let mut layer = LinearConfig::new(8, 4).init(device);
    let weight = tensor([8, 4], 1, device).require_grad();
    layer.weight = Param::initialized(layer.weight.id, weight);
    let bias = tensor([4], 2, device).require_grad();
    layer.bias = layer.bias.map(|old| Param::initialized(old.id, bias));
    layer
}

fn scaler(scale: f32) -> GradScaler {
    GradScaler::new(DynamicLossScale::new().with_init_scale(scale).into()).unwrap()
}

fn config(scale: f32) -> MixedPrecisionTrainerConfig {
    let scale = DynamicLossScale::new().with_init_scale(scale);
    MixedPrecisionTrainerConfig::new().with_loss_scale(Some(scale.into()))
}

fn adam(device: &Device, config: MixedPrecisionTrainerConfig, rate: f64) -> Trainer {
    let optimizer = AdamConfig::new().init();
    config.init(layer(device), optimizer, rate).unwrap()
}

fn sgd(device: &Device, config: MixedPrecisionTrainerConfig, rate: f64) -> Trainer {
    let optimizer = SgdConfig::new().init();
    config.init(layer(device), optimizer, rate).unwrap()
}

fn loss(model: &Linear, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
    (model.forward(x) - y).powi_scalar(2).mean()
}

/// Trains on batch `i`, on its loss times `factor`.
fn train(trainer: &mut Trainer, i: u64, factor: f32) -> StepMetrics {
    let device = trainer.model().weight.val().device();
    let (x, y) = (
        tensor([32, 8], i, &device),
        tensor([32, 4], i + 100, &device),
    );
    let trained = trainer.train_step(x, y, |model, x, y| loss(model, x, y) * factor);
    trained.unwrap()
}

/// Gradients that overflow f16, though the loss is finite.
const OVERFLOW: f32 = 1e7;

fn parameters(model: &Linear) -> Vec<f32> {
    let bias = model.bias.as_ref().unwrap().val();
    [read(model.weight.val()), read(bias)].concat()
}

#[test]
fn the_trainer_trains_to_the_bits_of_the_protocol() {
    for precision in [Precision::F16, Precision::Bf16] {
        let device = device(precision);
        let config = config(1024.0).with_grad_clipping_norm(Some(0.5));
        let mut trainer = adam(&device, config, 0.01);
        let (mut model, mut optimizer) = (layer(&device), AdamConfig::new().init());
        let scaler = scaler(1024.0);
        for i in 0..6 {
            let factor = if i == 2 { OVERFLOW } else { 1.0 };
            let metrics = train(&mut trainer, i, factor);
            let (x, y) = (
                tensor([32, 8], i, &device),
                tensor([32, 4], i + 100, &device),
            );
            let loss = loss(&model, x, y) * factor;
            let value: f32 = loss.clone().inner().into_scalar();
            let mut grads = scaler.backward(loss, &model);
            scaler.unscale(&model, &mut grads).unwrap();
            clip_grad_norm(&model, &mut grads, 0.5).unwrap();
            let stepped;
            (model, stepped) = scaler.step(&mut optimizer, 0.01, model, grads);
            assert_eq!(metrics.stepped(), stepped.unwrap());
            assert_eq!(metrics.loss as f32, value);
            scaler.update().unwrap();
        }
        assert_eq!(parameters(trainer.model()), parameters(&model));
        assert_eq!(trainer.scaler().state(), scaler.state());
        assert_eq!(
            trainer.skipped_steps(),
            u64::from(precision == Precision::F16)
        );
        assert_eq!(trainer.precision(), precision);
    }
}

#[test]
fn many_micro_batches_train_as_one_batch() {
    for precision in HALVES {
        let device = device(precision);
        let trained = |batches| {
            let config = config(256.0).with_grads_accumulation(batches);
            let mut trainer = sgd(&device, config, 1.0);
            let before = parameters(trainer.model());
            let (x, y) = (tensor([8, 8], 3, &device), tensor([8, 4], 4, &device));
            for i in 1..=batches {
                let trained = trainer.train_step(x.clone(), y.clone(), loss).unwrap();
                let expected = if i < batches { Accumulated } else { Stepped };
                assert_eq!(trained.progress, expected);
            }
            let after = parameters(trainer.model());
            let steps = before
                .iter()
                .zip(after)
                .map(|(before, after)| before - after);
            steps.collect::<Vec<_>>()
        };
        // 300 gradients in bf16 would stop growing.
        let (one, many) = (trained(1), trained(300));
        let largest = one
            .iter()
            .fold(0f32, |largest, step| step.abs().max(largest));
        let error = one.iter().zip(&many).map(|(one, many)| (one - many).abs());
        let error = error.fold(0f32, f32::max) / largest;
        assert!(
            error < 4.0 * client::roundoff(precision),
            "{precision}: {error}"
        );
    }
}

#[test]
fn an_overflow_anywhere_skips_its_whole_window_and_the_schedule_waits() {
    let device = device(Precision::F16);
    let mut trainer = run(&device, 1024.0);
    let rate = |trainer: &Trainer| trainer.scheduler().clone().step().base();
    let (before, first) = (parameters(trainer.model()), rate(&trainer));
    assert_eq!(train(&mut trainer, 1, OVERFLOW).progress, Accumulated);
    let skipped = train(&mut trainer, 2, 1.0);
    assert_eq!((skipped.progress, skipped.scale), (Skipped, 1024.0));
    assert_eq!(skipped.skipped_steps, 1);
    assert_eq!(parameters(trainer.model()), before);
    assert_eq!((rate(&trainer), trainer.loss_scale()), (first, 512.0));
    train(&mut trainer, 3, 1.0);
    assert_eq!(train(&mut trainer, 4, 1.0).progress, Stepped);
    assert_ne!(parameters(trainer.model()), before);
    assert!(rate(&trainer) < first);
}

/// The rest of a run of 9 batches in windows of two, one of which overflows.
fn go_on(trainer: &mut Trainer, from: u64) -> (Vec<f64>, Vec<f32>, f32) {
    let factor = |i| if i == 4 { OVERFLOW } else { 1.0 };
    let losses = (from..9).map(|i| train(trainer, i, factor(i)).loss);
    let losses = losses.collect();
    (losses, parameters(trainer.model()), trainer.loss_scale())
}

fn run(device: &Device, scale: f32) -> Trainer {
    in_windows(device, scale, 2)
}

fn in_windows(device: &Device, scale: f32, batches: usize) -> Trainer {
    let schedule = LinearLrSchedulerConfig::new(0.1, 0.01, 10).init().unwrap();
    config(scale)
        .with_grads_accumulation(batches)
        .init(layer(device), AdamConfig::new().init(), schedule)
        .unwrap()
}

/// A file in a folder that only this process uses.
fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("burn-amp-trainer-{}-{name}", std::process::id()))
}

#[test]
fn a_run_that_is_stopped_after_any_batch_goes_on_to_the_same_bits() {
    let device = device(Precision::F16);
    let path = file("run");
    for stopped in 1..9 {
        let mut whole = run(&device, 4096.0);
        for i in 0..stopped {
            train(&mut whole, i, if i == 4 { OVERFLOW } else { 1.0 });
        }
        let mut by_record = run(&device, 4096.0);
        let record = whole.to_record().unwrap();
        by_record.load_record(record).unwrap();
        whole.save_file(&path).unwrap();
        let mut by_file = run(&device, 4096.0);
        by_file.load_file(&path).unwrap();
        let expected = go_on(&mut whole, stopped);
        assert_eq!(go_on(&mut by_record, stopped), expected, "after {stopped}");
        assert_eq!(go_on(&mut by_file, stopped), expected, "after {stopped}");
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn a_damaged_file_and_another_models_record_change_nothing() {
    let device = device(Precision::F16);
    let path = file("damaged");
    let mut trainer = run(&device, 4096.0);
    train(&mut trainer, 0, 1.0);
    let before = parameters(trainer.model());
    trainer.save_file(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = trainer.load_file(&path).unwrap_err();
    assert!(
        matches!(error, AmpError::State { action: "read", .. }),
        "{error}"
    );
    fs::remove_file(&path).unwrap();
    let error = trainer.load_file(&path).unwrap_err();
    assert!(error.to_string().contains("burn-amp-trainer-"), "{error}");
    assert!(trainer.save_file("/dev/null/file").is_err());

    let other = LinearConfig::new(3, 3).init(&device);
    let mut other = MixedPrecisionTrainerConfig::new()
        .init(other, SgdConfig::new().init(), 1e-3)
        .unwrap();
    assert!(trainer.load_record(other.to_record().unwrap()).is_err());
    // The same model with another optimizer.
    let mut other = adam(&device, config(4096.0), 1e-3);
    train(&mut other, 0, 1.0);
    let mut plain = sgd(&device, config(4096.0), 1e-3);
    let error = plain.load_record(other.to_record().unwrap()).unwrap_err();
    assert!(error.to_string().contains("does not fit"), "{error}");
    // With another schedule the run goes on, and the schedule starts over.
    plain.load_record(trainer.to_record().unwrap()).unwrap();
    assert_eq!(parameters(plain.model()), before);
    assert_eq!(train(&mut plain, 1, 1.0).progress, Stepped);
    assert_eq!(parameters(trainer.model()), before);
    assert_eq!(train(&mut trainer, 1, 1.0).progress, Stepped);
}

/// A layer behind a batch norm, whose running statistics are no parameters.
#[derive(burn::module::Module, Debug)]
struct Normed {
    norm: BatchNorm,
    layer: Linear,
}

fn normed(device: &Device, outputs: usize) -> MixedPrecisionTrainer<Normed> {
    let model = Normed {
        norm: BatchNormConfig::new(8).init(device),
        layer: match outputs {
            4 => layer(device),
            _ => LinearConfig::new(8, outputs).init(device),
        },
    };
    let optimizer = SgdConfig::new().init();
    config(1024.0).init(model, optimizer, 0.1).unwrap()
}

fn train_normed(trainer: &mut MixedPrecisionTrainer<Normed>, batches: std::ops::Range<u64>) {
    for i in batches {
        let device = trainer.model().layer.weight.val().device();
        let x = tensor([32, 8], i, &device) + i as f64;
        let loss = |model: &Normed, x: Tensor<2>, (): ()| {
            let y = model.layer.forward(model.norm.forward(x));
            y.powi_scalar(2).mean()
        };
        trainer.train_step(x, (), loss).unwrap();
    }
}

/// The running mean and variance as validation reads them.
fn statistics(trainer: &MixedPrecisionTrainer<Normed>) -> [Vec<f32>; 2] {
    let norm = trainer.model().valid().norm;
    [norm.running_mean.value(), norm.running_var.value()].map(read)
}

#[test]
fn running_statistics_are_those_of_the_record() {
    let device = device(Precision::F16);
    let path = file("normed");
    let mut trainer = normed(&device, 4);
    train_normed(&mut trainer, 0..3);
    // Saved before anything reads the statistics of the last batch.
    trainer.save_file(&path).unwrap();
    let saved = statistics(&trainer);

    let mut resumed = normed(&device, 4);
    resumed.load_file(&path).unwrap();
    assert_eq!(statistics(&resumed), saved);

    // Back to the file, in the trainer that went on.
    train_normed(&mut trainer, 3..5);
    trainer.load_file(&path).unwrap();
    assert_eq!(statistics(&trainer), saved);
    train_normed(&mut trainer, 3..5);
    train_normed(&mut resumed, 3..5);
    assert_eq!(statistics(&trainer), statistics(&resumed));

    // A refused record, whose statistics fit.
    let before = statistics(&trainer);
    let mut other = normed(&device, 5);
    train_normed(&mut other, 0..1);
    assert!(trainer.load_record(other.to_record().unwrap()).is_err());
    assert_eq!(statistics(&trainer), before);
    fs::remove_file(path).unwrap();
}

#[test]
fn a_record_of_another_precision_leaves_the_scaler_fresh_and_rescales_the_window() {
    let [f16, bf16] = HALVES.map(device);
    let trained = |from: &Device, to: &Device| {
        let config = MixedPrecisionTrainerConfig::new().with_grads_accumulation(2);
        let mut first = sgd(from, config.clone(), 1e-3);
        train(&mut first, 1, 1.0);
        let mut second = sgd(to, config, 1.0);
        second.load_record(first.to_record().unwrap()).unwrap();
        assert_eq!(train(&mut second, 2, 1.0).progress, Stepped);
        parameters(second.model())
    };
    let expected = trained(&bf16, &bf16);
    for (from, to) in [(&f16, &bf16), (&bf16, &f16), (&f16, &f16)] {
        for (parameter, expected) in trained(from, to).iter().zip(&expected) {
            assert!(
                (parameter - expected).abs() < 0.02,
                "{parameter} {expected}"
            );
        }
    }
}

#[test]
fn bad_losses_are_errors_and_the_trainer_goes_on() {
    let device = device(Precision::F16);
    let mut trainer = run(&device, 1024.0);
    let other = layer(&device);
    let x = || tensor::<2>([32, 8], 1, &device);
    let y = || tensor::<2>([32, 4], 2, &device);
    let error = trainer.train_step(x(), y(), |model, x, _| {
        model.forward(x).mean_dim(0).flatten::<1>(0, 1)
    });
    let Err(Error::Amp(AmpError::LossShape { given })) = error else {
        panic!("{error:?}")
    };
    assert_eq!(given, [4]);
    // A batch that trains nothing drops its window.
    assert_eq!(train(&mut trainer, 1, 1.0).progress, Accumulated);
    let error = trainer.train_step(x(), y(), |_, x, y| loss(&other, x, y));
    assert!(
        matches!(error, Err(Error::Amp(AmpError::ForeignGradients { .. }))),
        "{error:?}"
    );
    assert_eq!(train(&mut trainer, 1, 1.0).progress, Accumulated);
    assert_eq!(train(&mut trainer, 2, 1.0).progress, Stepped);
}

#[test]
fn a_run_that_can_never_train_is_an_error_when_asked() {
    let device = device(Precision::F16);
    for when_stuck in [WhenStuck::Log, WhenStuck::Stop] {
        let config = MixedPrecisionTrainerConfig::new()
            .with_loss_scale(Some(LossScaleConfig::Fixed(1024.0)))
            .with_when_stuck(when_stuck);
        let mut trainer = adam(&device, config, 1e-3);
        let step = |i| {
            let (x, y) = (tensor([32, 8], i, &device), tensor([32, 4], i + 1, &device));
            trainer.train_step(x, y, |model, x, y| loss(model, x, y) * OVERFLOW)
        };
        let results: Vec<_> = (0..100).map(step).collect();
        let stuck =
            |result: &Result<_, Error>| matches!(result, Err(Error::Amp(AmpError::Stuck { .. })));
        assert_eq!(results.iter().any(stuck), when_stuck == WhenStuck::Stop);
    }
}

#[test]
fn a_window_of_another_accumulation_is_dropped_and_trainers_share_no_window() {
    let device = device(Precision::F16);
    let step = |trainer: &mut Trainer, i| {
        assert_eq!(train(trainer, i, 1.0).progress, Accumulated);
        assert_eq!(train(trainer, i + 1, 1.0).progress, Stepped);
        parameters(trainer.model())
    };
    let expected = step(&mut run(&device, 4096.0), 1);
    let mut saved = in_windows(&device, 4096.0, 4);
    train(&mut saved, 0, 1.0);
    let mut loaded = run(&device, 4096.0);
    loaded.load_record(saved.to_record().unwrap()).unwrap();
    assert_eq!(step(&mut loaded, 1), expected);

    // One trainer overflows within the window of the other.
    let new = |batches| {
        let config = MixedPrecisionTrainerConfig::new().with_grads_accumulation(batches);
        sgd(&device, config, 1e-3)
    };
    let expected = step(&mut new(2), 1);
    let (mut first, mut second) = (new(2), new(1));
    assert_eq!(train(&mut first, 1, 1.0).progress, Accumulated);
    assert_eq!(train(&mut second, 1, OVERFLOW).progress, Skipped);
    assert_eq!(train(&mut first, 2, 1.0).progress, Stepped);
    assert_eq!(parameters(first.model()), expected);
}

/// Its gradients carry the old scale.
#[test]
fn a_window_whose_step_the_scaler_discards_is_dropped() {
    let device = device(Precision::F16);
    let new = || in_windows(&device, 1024.0, 2);
    let step = |trainer: &mut Trainer| {
        assert_eq!(train(trainer, 1, 1.0).progress, Accumulated);
        assert_eq!(train(trainer, 2, 1.0).progress, Stepped);
        parameters(trainer.model())
    };
    let expected = step(&mut new());
    for discard in [GradScaler::discard_step, |own: &GradScaler| {
        own.load_state(scaler(1024.0).state());
    }] {
        let (mut trainer, mut saved, mut loaded) = (new(), new(), new());
        for trainer in [&mut trainer, &mut saved] {
            assert_eq!(train(trainer, 0, 1.0).progress, Accumulated);
            discard(trainer.scaler());
        }
        assert_eq!(step(&mut trainer), expected);
        loaded.load_record(saved.to_record().unwrap()).unwrap();
        assert_eq!(step(&mut loaded), expected);
    }
}

#[test]
fn settings_that_make_no_sense_are_errors() {
    let device = device(Precision::F16);
    let optimizer = || AdamConfig::new().init();
    for config in [
        MixedPrecisionTrainerConfig::new().with_grads_accumulation(0),
        MixedPrecisionTrainerConfig::new().with_grad_clipping_norm(Some(-1.0)),
    ] {
        let error = config.init(layer(&device), optimizer(), 1e-3).err();
        assert!(
            matches!(error, Some(AmpError::InvalidTrainer { .. })),
            "{error:?}"
        );
    }
    let negative = LossScaleConfig::Fixed(-1.0);
    let config = MixedPrecisionTrainerConfig::new().with_loss_scale(Some(negative));
    let error = config.init(layer(&device), optimizer(), 1e-3).err();
    assert!(
        matches!(error, Some(AmpError::InvalidLossScale { .. })),
        "{error:?}"
    );
}

#[test]
fn in_bf16_and_on_a_plain_device_it_trains_as_the_plain_loop() {
    for device in [Device::flex().autodiff(), device(Precision::Bf16)] {
        let mut trainer = adam(&device, MixedPrecisionTrainerConfig::new(), 0.01);
        let (mut model, mut optimizer) = (layer(&device), AdamConfig::new().init());
        for i in 0..4 {
            assert_eq!(train(&mut trainer, i, 1.0).scale, 1.0);
            let (x, y) = (
                tensor([32, 8], i, &device),
                tensor([32, 4], i + 100, &device),
            );
            let grads = loss(&model, x, y).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(0.01, model, grads);
        }
        assert_eq!(parameters(trainer.model()), parameters(&model));
    }
}
