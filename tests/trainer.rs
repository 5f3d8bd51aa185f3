//! `MixedPrecisionTrainer` does the same as a hand-written loop, and a run that is stopped anywhere
//! goes on as if it had not been.

mod common;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex, NdArray};
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{
    Adam, AdamConfig, GradientsParams, LearningRate, MultiGradientsParams, Muon, MuonConfig,
    Optimizer, Sgd, SgdConfig, SimpleOptimizer,
};
use burn::prelude::*;
use burn::record::{
    BinBytesRecorder, FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder,
    NamedMpkGzFileRecorder, Recorder, RecorderError,
};
use burn::tensor::FloatDType;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{
    AmpAutodiff, AmpError, DynamicLossScale, GradScaler, LossScaleConfig, LossScaler,
    MixedPrecisionTrainer, MixedPrecisionTrainerConfig, Precision, StepMetrics, StepOutcome,
    StepProgress, StuckReason, WhenStuck, with_precision,
};

use serde::Serialize;
use serde::de::DeserializeOwned;

use common::mlp::{self, Fill, Mlp, data, in_scope, parameters, state, values};
use common::{assert_close, relative_error};

use StepProgress::{Accumulated, Skipped, Stepped};

type A = AmpAutodiff<Flex>;
type Plain = Autodiff<Flex>;

type ByAdam<B> = OptimizerAdaptor<Adam, Mlp<B>, B>;
type BySgd<B> = OptimizerAdaptor<Sgd<<B as AutodiffBackend>::InnerBackend>, Mlp<B>, B>;
type Trainer<B, O, S = LearningRate> = MixedPrecisionTrainer<B, Mlp<B>, O, S>;

fn dynamic(init_scale: f32) -> LossScaleConfig {
    DynamicLossScale::new().with_init_scale(init_scale).into()
}

fn config(precision: Precision, loss_scale: LossScaleConfig) -> MixedPrecisionTrainerConfig {
    MixedPrecisionTrainerConfig::new()
        .with_precision(precision)
        .with_loss_scale(Some(loss_scale))
}

/// In f16, with a dynamic loss scale that starts at `init_scale`.
fn f16(init_scale: f32) -> MixedPrecisionTrainerConfig {
    config(Precision::F16, dynamic(init_scale))
}

fn adam<B: AutodiffBackend, S: LrScheduler>(
    config: MixedPrecisionTrainerConfig,
    lr_scheduler: S,
) -> Trainer<B, ByAdam<B>, S> {
    let optimizer = AdamConfig::new().init();
    config.init(Mlp::new(), optimizer, lr_scheduler).unwrap()
}

fn sgd<B: AutodiffBackend, S: LrScheduler>(
    config: MixedPrecisionTrainerConfig,
    lr_scheduler: S,
) -> Trainer<B, BySgd<B>, S> {
    let optimizer = SgdConfig::new().init();
    config.init(Mlp::new(), optimizer, lr_scheduler).unwrap()
}

/// Trains on batch `i`, on its loss times `factor`.
fn train<B, O, S>(trainer: &mut Trainer<B, O, S>, i: u64, factor: f32) -> StepMetrics
where
    B: AutodiffBackend,
    O: Optimizer<Mlp<B>, B>,
    S: LrScheduler,
{
    let loss = |model: &Mlp<B>, x, y| model.loss_on(x, y) * factor;
    trainer
        .train_step(values([32, 8], i), values([32, 4], i + 1), loss)
        .unwrap()
}

/// Gradients that overflow f16, though the loss is finite.
const OVERFLOW: f32 = 1e7;

#[test]
fn the_trainer_and_both_protocols_train_to_the_same_bits() {
    let factor = |i| match i {
        7 | 20 | 33 => OVERFLOW,
        _ => 1.0,
    };
    // Growth in between, too.
    let config = DynamicLossScale::new()
        .with_init_scale(1024.0)
        .with_growth_interval(14);
    let new = || GradScaler::new(config.into()).unwrap();

    let implicit = new();
    let (mut optimizer, mut model): (ByAdam<A>, _) = (AdamConfig::new().init(), Mlp::<A>::new());
    in_scope(Precision::F16, &implicit, || {
        for i in 0..50 {
            let grads = (model.loss(i) * factor(i)).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-2, model.clone(), grads);
        }
    });
    let expected = (
        parameters(&model),
        state(&optimizer, &model),
        implicit.state(),
    );
    assert_eq!(implicit.skipped_steps(), 3);
    assert_eq!(implicit.loss_scale(), 256.0, "three back-offs, one growth");

    let explicit = new();
    let (mut optimizer, mut model): (ByAdam<A>, _) = (AdamConfig::new().init(), Mlp::<A>::new());
    with_precision(Precision::F16, || {
        for i in 0..50 {
            let grads = explicit.backward(model.loss(i) * factor(i), &model);
            model = explicit.step(&mut optimizer, 1e-2, model.clone(), grads).0;
            explicit.update().unwrap();
        }
    });
    let actual = (
        parameters(&model),
        state(&optimizer, &model),
        explicit.state(),
    );
    assert_eq!(actual, expected);

    let mut trainer = adam::<A, _>(self::config(Precision::F16, config.into()), 1e-2);
    for i in 0..50 {
        assert_eq!(
            train(&mut trainer, i, factor(i)).stepped(),
            factor(i) == 1.0
        );
    }
    assert_eq!(all(&mut trainer), expected);
    assert_eq!(trainer.scaler().last_step(), explicit.last_step());
}

/// Parameters, optimizer state and scaler.
type All = (Vec<f32>, Vec<(usize, Vec<u8>)>, LossScaler);

fn all<B, M, O, S>(trainer: &mut MixedPrecisionTrainer<B, M, OptimizerAdaptor<O, M, B>, S>) -> All
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<B::InnerBackend>,
    S: LrScheduler,
{
    let model = trainer.model();
    (
        parameters(model),
        state(trainer.optimizer(), model),
        trainer.scaler().state(),
    )
}

#[test]
fn micro_batches_train_as_one_batch() {
    fn rows<B: Backend>(i: u64, from: usize, to: usize) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let (x, y) = (values([32, 8], i), values::<B, 2>([32, 4], i + 1));
        (x.slice_dim(0, from..to), y.slice_dim(0, from..to))
    }
    fn trained<B: AutodiffBackend>(precision: Precision, batches: usize) -> (Vec<f32>, Vec<f64>) {
        let config = config(precision, LossScaleConfig::default());
        let mut trainer = sgd::<B, _>(config.with_grads_accumulation(batches), 0.5);
        let size = 32 / batches;
        let mut losses = Vec::new();
        for i in 0..5 {
            for batch in 0..batches {
                let before = parameters(trainer.model());
                let (x, y) = rows(i, batch * size, (batch + 1) * size);
                let metrics = trainer.train_step(x, y, Mlp::loss_on).unwrap();
                let last = batch + 1 == batches;
                assert_eq!(metrics.progress, if last { Stepped } else { Accumulated });
                assert_eq!(parameters(trainer.model()) != before, last);
                losses.push(metrics.loss);
            }
        }
        (parameters(trainer.model()), losses)
    }
    let (expected, losses) = trained::<Plain>(Precision::F32, 1);
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        for batches in [1, 2, 4] {
            let (actual, by_batch) = trained::<A>(precision, batches);
            assert_close("accumulated", precision, &actual, &expected, 8.0);
            // The figures are those of the batches, not parts of their mean.
            for (means, expected) in by_batch.chunks(batches).zip(&losses) {
                let mean = means.iter().sum::<f64>() / means.len() as f64;
                let tolerance = 4.0 * common::roundoff(precision) * expected;
                assert!(
                    (mean - expected).abs() <= tolerance,
                    "{precision}: {mean} for {expected}"
                );
            }
        }
    }
}

#[test]
fn an_overflow_anywhere_skips_its_whole_window() {
    for bad in [
        vec![0],
        vec![1],
        vec![2],
        vec![3],
        vec![0, 1, 3],
        vec![2, 3],
    ] {
        let mut trainer = adam::<A, _>(f16(1024.0).with_grads_accumulation(4), 1e-3);
        let mut window = |bad: &[u64]| {
            let before = all(&mut trainer);
            let progress: Vec<_> = (0..4)
                .map(|i| {
                    let factor = if bad.contains(&i) { OVERFLOW } else { 1.0 };
                    let metrics = train(&mut trainer, i, factor);
                    assert_eq!(metrics.scale, before.2.scale(), "one scale for a window");
                    metrics.progress
                })
                .collect();
            (
                before,
                progress,
                all(&mut trainer),
                trainer.scaler().last_step(),
            )
        };
        let (before, progress, after, last) = window(&bad);
        assert_eq!(
            progress,
            [Accumulated, Accumulated, Accumulated, Skipped],
            "{bad:?}"
        );
        assert_eq!((before.0, before.1), (after.0, after.1));
        assert_eq!(
            (after.2.scale(), after.2.skipped_steps()),
            (512.0, 1),
            "once"
        );
        assert_eq!(last.unwrap().outcome, StepOutcome::Overflow);

        let (before, progress, after, _) = window(&[]);
        assert_eq!(progress, [Accumulated, Accumulated, Accumulated, Stepped]);
        assert_ne!(before.0, after.0);
        assert_eq!((after.2.scale(), after.2.taken_steps()), (512.0, 1));

        let (before, progress, after, _) = {
            let loss = |model: &Mlp<A>, x, y| model.loss_on(x, y) * f32::NAN;
            let (x, y) = (values([32, 8], 1), values([32, 4], 2));
            let before = all(&mut trainer);
            let first = trainer.train_step(x, y, loss).unwrap().progress;
            let rest = [1, 2, 3].map(|i| train(&mut trainer, i, 1.0).progress);
            (
                before,
                [vec![first], rest.to_vec()].concat(),
                all(&mut trainer),
                (),
            )
        };
        assert_eq!(progress, [Accumulated, Accumulated, Accumulated, Skipped]);
        assert_eq!((before.0, before.1), (after.0, after.1));
        assert_eq!((after.2.scale(), after.2.non_finite_losses()), (512.0, 1));
    }
}

/// At this learning rate the parameters are small against their update, so that the update is as exact
/// as a gradient.
const RATE: f32 = 1024.0;

/// The update of one step, divided by the learning rate.
fn taken_off<B: AutodiffBackend>(
    precision: Precision,
    loss_scale: LossScaleConfig,
    max_norm: Option<f32>,
) -> Vec<f32> {
    let config = config(precision, loss_scale).with_grad_clipping_norm(max_norm);
    let mut trainer = sgd::<B, _>(config, f64::from(RATE));
    let before = parameters(trainer.model());
    assert!(train(&mut trainer, 3, 1.0).stepped());
    difference(&before, &parameters(trainer.model()))
}

fn difference(before: &[f32], after: &[f32]) -> Vec<f32> {
    let pairs = before.iter().zip(after);
    pairs
        .map(|(before, after)| (before - after) / RATE)
        .collect()
}

fn norm(values: &[f32]) -> f64 {
    values
        .iter()
        .map(|v| f64::from(*v).powi(2))
        .sum::<f64>()
        .sqrt()
}

#[test]
fn clipping_is_by_the_norm_of_all_unscaled_gradients() {
    let fixed = LossScaleConfig::Fixed;
    let model = Mlp::<Plain>::new();
    let grads = GradientsParams::from_grads(model.loss(3).backward(), &model);
    let unclipped = mlp::gradients(&model, &grads);
    let max_norm = 0.5 * norm(&unclipped) as f32;
    let factor = f64::from(max_norm) / (norm(&unclipped) + 1e-6);
    let reference: Vec<_> = unclipped
        .iter()
        .map(|g| (f64::from(*g) * factor) as f32)
        .collect();

    let close = |what: &str, precision, actual: &[f32]| {
        assert_close(what, precision, actual, &reference, 16.0);
        let error = (norm(actual) / norm(&reference) - 1.0).abs();
        assert!(
            error < 16.0 * common::roundoff(precision),
            "{what}: norm off by {error}"
        );
    };
    close(
        "FP32",
        Precision::F32,
        &taken_off::<A>(Precision::F32, dynamic(65536.0), Some(max_norm)),
    );
    for scale in [1.0, 256.0, 65536.0] {
        let actual = taken_off::<Plain>(Precision::F16, fixed(scale), Some(max_norm));
        close("plain", Precision::F32, &actual);
    }
    // The same bits at every scale.
    let first = taken_off::<A>(Precision::F16, fixed(1024.0), Some(max_norm));
    close("f16", Precision::F16, &first);
    for scale in [2048.0, 8192.0] {
        assert_eq!(
            taken_off::<A>(Precision::F16, fixed(scale), Some(max_norm)),
            first
        );
    }
    // Gradients below the norm are not touched.
    let unclipped = taken_off::<A>(Precision::F16, fixed(1024.0), None);
    let untouched = taken_off::<A>(Precision::F16, fixed(1024.0), Some(4.0 * max_norm));
    assert_eq!(untouched, unclipped);
    assert!(relative_error(&first, &unclipped) > 0.4);
}

#[test]
fn clipping_takes_the_norm_over_a_whole_window() {
    let run = |max_norm: Option<f32>, batches: &[u64]| {
        let config = config(Precision::F32, LossScaleConfig::Disabled)
            .with_grads_accumulation(batches.len())
            .with_grad_clipping_norm(max_norm);
        let mut trainer = sgd::<Plain, _>(config, f64::from(RATE));
        let before = parameters(trainer.model());
        batches
            .iter()
            .for_each(|i| _ = train(&mut trainer, *i, 1.0));
        difference(&before, &parameters(trainer.model()))
    };
    let unclipped = run(None, &[3, 9]);
    let max_norm = 0.25 * norm(&unclipped);
    let factor = max_norm / (norm(&unclipped) + 1e-6);
    let expected: Vec<_> = unclipped
        .iter()
        .map(|g| (f64::from(*g) * factor) as f32)
        .collect();
    let actual = run(Some(max_norm as f32), &[3, 9]);
    assert_close("window", Precision::F32, &actual, &expected, 32.0);
}

/// Two modules that hold one parameter.
#[derive(Module, Debug)]
struct Tied<B: Backend> {
    one: Linear<B>,
    other: Linear<B>,
}

#[test]
fn a_parameter_in_two_places_is_one_of_the_norm() {
    let one: Linear<Plain> = LinearConfig::new(4, 4)
        .with_bias(false)
        .init(&Default::default());
    let one = one.map(&mut Fill(3));
    let model = Tied {
        other: one.clone(),
        one,
    };
    let loss = |model: &Tied<Plain>, x: Tensor<Plain, 2>, _: ()| {
        model
            .other
            .forward(model.one.forward(x))
            .powi_scalar(2)
            .mean()
    };
    let x = || values::<Plain, 2>([8, 4], 1);
    let grads = loss(&model, x(), ()).backward();
    let expected = norm(&data(model.one.weight.val().grad(&grads).unwrap()));
    let before = data(model.one.weight.val());
    let mut trainer = f16(1024.0)
        .with_grad_clipping_norm(Some(0.5 * expected as f32))
        .init(model, SgdConfig::new().init(), f64::from(RATE))
        .unwrap();
    trainer.train_step(x(), (), loss).unwrap();
    let taken = difference(&before, &data(trainer.model().one.weight.val()));
    let error = (norm(&taken) / (0.5 * expected) - 1.0).abs();
    assert!(error < 1e-5, "off by {error}");
}

/// An optimizer that keeps the learning rates it is given.
#[derive(Clone)]
struct Keeping<O> {
    optimizer: O,
    rates: Arc<Mutex<Vec<LearningRate>>>,
}

impl<O> Keeping<O> {
    fn new(optimizer: O) -> Self {
        let rates = Arc::default();
        Self { optimizer, rates }
    }

    fn rates(&self) -> Vec<LearningRate> {
        self.rates.lock().unwrap().clone()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>, O: Optimizer<M, B>> Optimizer<M, B> for Keeping<O> {
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.rates.lock().unwrap().push(lr);
        self.optimizer.step(lr, module, grads)
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.rates.lock().unwrap().push(lr);
        self.optimizer.step_multi(lr, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.optimizer.to_record()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.optimizer = self.optimizer.load_record(record);
        self
    }
}

fn schedule() -> LinearLrScheduler {
    LinearLrSchedulerConfig::new(0.1, 0.001, 10).init().unwrap()
}

#[test]
fn the_schedule_advances_over_taken_steps_alone() {
    fn keeping<S: LrScheduler>(
        precision: Precision,
        batches: usize,
        lr_scheduler: S,
    ) -> Trainer<A, Keeping<BySgd<A>>, S> {
        let optimizer = Keeping::new(SgdConfig::new().init());
        config(precision, LossScaleConfig::default())
            .with_grads_accumulation(batches)
            .init(Mlp::new(), optimizer, lr_scheduler)
            .unwrap()
    }
    let mut expected = schedule();
    let expected: Vec<_> = (0..8).map(|_| expected.step()).collect();

    let mut plain = keeping(Precision::F32, 1, schedule());
    (0..8).for_each(|i| assert!(train(&mut plain, i, 1.0).stepped()));
    assert_eq!(plain.optimizer().rates(), expected);

    let mut scaled = keeping(Precision::F16, 1, schedule());
    let mut next = scaled.scheduler().clone().step();
    for i in 0..12 {
        let bad = [0, 3, 4, 9].contains(&i);
        let stepped = train(&mut scaled, i, if bad { OVERFLOW } else { 1.0 }).stepped();
        assert_eq!(stepped, !bad);
        // The scheduler is the one of the next step.
        let before = std::mem::replace(&mut next, scaled.scheduler().clone().step());
        assert_eq!(before != next, stepped);
    }
    assert_eq!(scaled.optimizer().rates(), expected);
    assert_eq!(next, plain.scheduler().clone().step());

    // A learning rate is a constant schedule.
    let mut constant = keeping(Precision::F16, 1, 0.05);
    (0..3).for_each(|i| _ = train(&mut constant, i, 1.0));
    assert_eq!(constant.optimizer().rates(), [0.05; 3]);

    // Once for a window.
    let mut windows = keeping(Precision::F16, 3, schedule());
    (0..9).for_each(|i| _ = train(&mut windows, i, 1.0));
    assert_eq!(windows.optimizer().rates(), expected[..3]);
}

#[test]
fn the_metrics_say_what_happened() {
    for precision in [
        Precision::F16,
        Precision::Bf16,
        Precision::F32,
        Precision::Auto,
    ] {
        let scales = precision == Precision::F16;
        let mut trainer = sgd::<A, _>(config(precision, LossScaleConfig::default()), 0.1);
        assert_eq!(trainer.precision(), precision);
        // On this device `Auto` is FP32, where nothing is scaled.
        let scale = if scales { 65536.0 } else { 1.0 };
        assert_eq!(trainer.loss_scale(), scale);
        let expected = with_precision(precision, || data(trainer.model().loss(3))[0]);
        let metrics = train(&mut trainer, 3, 1.0);
        let expected = StepMetrics {
            loss: expected.into(),
            scale,
            progress: Stepped,
            skipped_steps: 0,
            precision,
        };
        assert_eq!(metrics, expected);
        assert_eq!(trainer.scaler().state().taken_steps(), u64::from(scales));

        let metrics = train(&mut trainer, 3, OVERFLOW);
        assert_eq!(metrics.progress, if scales { Skipped } else { Stepped });
        assert_eq!(metrics.skipped_steps, u64::from(scales));
        assert_eq!(
            metrics.scale, scale,
            "the scale of this loss, not of the next"
        );
        assert!(metrics.loss > 1e5 && metrics.loss.is_finite());
        assert_eq!(trainer.loss_scale(), if scales { 32768.0 } else { 1.0 });
        assert_eq!(trainer.skipped_steps(), u64::from(scales));
    }
    let text = serde_json::to_string(&train(&mut adam::<A, _>(f16(8.0), 1e-3), 1, 1.0)).unwrap();
    assert!(
        text.contains(r#""progress":"Stepped""#) && text.contains(r#""scale":8.0"#),
        "{text}"
    );
}

/// On this device `Auto` is FP32, and the loss is in a region of its own.
#[test]
fn the_metrics_have_the_scale_of_a_loss_from_a_region() {
    let config = config(Precision::Auto, LossScaleConfig::default());
    let mut trainer = sgd::<A, _>(config, 0.1);
    for (precision, scale) in [(Precision::F16, 65536.0), (Precision::Bf16, 1.0)] {
        let (x, y) = (values([32, 8], 1), values([32, 4], 2));
        let loss = |model: &Mlp<A>, x, y| with_precision(precision, || model.loss_on(x, y));
        let metrics = trainer.train_step(x, y, loss).unwrap();
        assert_eq!((metrics.scale, metrics.progress), (scale, Stepped));
        assert_eq!(trainer.scaler().taken_steps(), 1);
    }
}

#[test]
fn a_loss_of_any_float_dtype_trains() {
    for dtype in [
        FloatDType::F64,
        FloatDType::F32,
        FloatDType::F16,
        FloatDType::BF16,
    ] {
        // f16 does not hold this scale as the gradient of a loss.
        let mut trainer = adam::<A, _>(f16(65_536.0), 1e-3);
        let before = parameters(trainer.model());
        let loss = |model: &Mlp<A>, x, y| model.loss_on(x, y).cast(dtype);
        let metrics = trainer
            .train_step(values([32, 8], 1), values([32, 4], 2), loss)
            .unwrap();
        let expected = f64::from(data(Mlp::<Plain>::new().loss(1))[0]);
        assert!(
            (metrics.loss / expected - 1.0).abs() < 0.01,
            "{} for {expected}",
            metrics.loss
        );
        assert!(metrics.stepped());
        assert_ne!(parameters(trainer.model()), before);
    }
}

/// A finite loss with a gradient that is not, whatever the scale.
fn hopeless(model: &Mlp<A>, x: Tensor<A, 2>, y: Tensor<A, 2>) -> Tensor<A, 1> {
    let nan = (model.first.weight.val() * 0.0).sqrt().sum();
    let bias = model.second.bias.as_ref().unwrap().val();
    model.loss_on(x, y) + nan + (bias * 0.0).sqrt().sum()
}

#[test]
fn a_scale_that_is_stuck_is_an_error_when_asked() {
    let config = DynamicLossScale::new()
        .with_init_scale(2.0)
        .with_stuck_after(3);
    let batch = || (values([32, 8], 1), values([32, 4], 2));
    for asked in [false, true] {
        let mut config = self::config(Precision::F16, config.into());
        if asked {
            config = config.with_when_stuck(WhenStuck::Stop);
        }
        let mut trainer = adam::<A, _>(config, 1e-3);
        let before = parameters(trainer.model());
        let mut results = Vec::new();
        for _ in 0..6 {
            let (x, y) = batch();
            let result = trainer.train_step(x, y, hopeless);
            results.push(result.map(|metrics| metrics.progress));
        }
        let expected: Vec<_> = (0..6)
            .map(|i| match asked && i == 3 {
                true => Err(AmpError::Stuck {
                    reason: StuckReason::MinimumScale,
                    steps: 4,
                    scale: 1.0,
                    parameters: "second.bias, first.weight".into(),
                }),
                false => Ok(Skipped),
            })
            .collect();
        assert_eq!(results, expected);
        assert_eq!(parameters(trainer.model()), before);
        assert_eq!(trainer.skipped_steps(), 6);
        // It can go on.
        assert!(train(&mut trainer, 1, 1.0).stepped());
        assert_ne!(parameters(trainer.model()), before);
    }
}

/// A loss that is never finite, and a fixed scale at which all gradients overflow.
#[test]
fn a_run_that_can_never_train_is_an_error_when_asked() {
    for (loss_scale, factor) in [
        (LossScaleConfig::default(), f32::NAN),
        (LossScaleConfig::Fixed(1024.0), f32::NAN),
        (LossScaleConfig::Fixed(1024.0), OVERFLOW),
    ] {
        let config = config(Precision::F16, loss_scale).with_when_stuck(WhenStuck::Stop);
        let mut trainer = sgd::<A, _>(config, 1e-3);
        let mut step = |_| {
            let batch = (values([32, 8], 1), values([32, 4], 2));
            let loss = |model: &Mlp<A>, x, y| model.loss_on(x, y) * factor;
            trainer.train_step(batch.0, batch.1, loss).is_err()
        };
        let stuck: Vec<usize> = (1..=200).filter(|i: &usize| step(*i)).collect();
        assert_eq!(stuck, [20], "{loss_scale:?} and losses times {factor}");
        assert_eq!(trainer.skipped_steps(), 200);
    }
}

#[test]
fn a_loss_that_reaches_no_parameter_is_an_error() {
    for precision in [Precision::F16, Precision::F32] {
        for batches in [1, 3] {
            let config = config(precision, LossScaleConfig::default());
            let mut trainer = adam::<A, _>(config.with_grads_accumulation(batches), 1e-3);
            let before = all(&mut trainer);
            let elsewhere = values::<A, 1>([1], 3).require_grad();
            for trained in 0..batches {
                // Drops the batches before it.
                for i in 0..trained {
                    assert_eq!(train(&mut trainer, i as u64, 1.0).progress, Accumulated);
                }
                // Also not finite: later steps must not be affected.
                let result = trainer.train_step((), (), |_, (), ()| elsewhere.clone() * f32::NAN);
                let error = result.unwrap_err();
                assert!(matches!(
                    error,
                    AmpError::ForeignGradients {
                        call: "train_step",
                        given: 0,
                        of_model: 0
                    }
                ));
                assert_eq!(
                    error.to_string(),
                    "train_step was given no gradients of this model: the loss does not depend on \
                     its parameters. Are they frozen or detached?"
                );
            }
            assert_eq!(all(&mut trainer), before);
            let progress: Vec<_> = (0..batches)
                .map(|i| train(&mut trainer, i as u64, 1.0).progress)
                .collect();
            assert_eq!(progress.last(), Some(&Stepped));
            assert_ne!(all(&mut trainer).0, before.0);
        }
    }
}

/// Its gradients may carry another scale than those of the next losses.
#[test]
fn a_window_whose_step_the_scaler_discards_is_dropped() {
    fn trains_from_anew<B: AutodiffBackend>(discard: fn(&GradScaler)) {
        let new = || sgd::<B, _>(f16(1024.0).with_grads_accumulation(2), 0.5);
        let step = |trainer: &mut Trainer<B, _>| {
            assert_eq!(train(trainer, 1, 1.0).progress, Accumulated);
            assert_eq!(train(trainer, 2, 1.0).progress, Stepped);
            parameters(trainer.model())
        };
        let expected = step(&mut new());
        let (mut trainer, mut saved, mut loaded) = (new(), new(), new());
        for trainer in [&mut trainer, &mut saved] {
            assert_eq!(train(trainer, 0, 1.0).progress, Accumulated);
            discard(trainer.scaler());
        }
        let close =
            |actual: &[f32]| assert_close("parameters", Precision::F16, actual, &expected, 4.0);
        close(&step(&mut trainer));
        loaded.load_record(saved.to_record());
        close(&step(&mut loaded));
    }
    let discards: [fn(&GradScaler); 3] = [GradScaler::discard_step, GradScaler::reset, |scaler| {
        scaler.load_state(LossScaler::new(dynamic(8.0)).unwrap())
    }];
    for discard in discards {
        trains_from_anew::<A>(discard);
        trains_from_anew::<Plain>(discard);
    }
}

#[test]
fn a_window_keeps_the_scale_of_its_first_loss() {
    let mut trainer = sgd::<A, _>(f16(1024.0).with_grads_accumulation(2), 0.5);
    assert_eq!(train(&mut trainer, 0, 1.0).scale, 1024.0);
    trainer.scaler().set_scale(8.0).unwrap();
    assert_eq!(trainer.loss_scale(), 1024.0);
    assert_eq!(train(&mut trainer, 1, 1.0).scale, 1024.0);
    assert_eq!(train(&mut trainer, 2, 1.0).scale, 8.0);
}

#[test]
fn a_panic_in_the_loss_leaves_a_trainer_that_goes_on() {
    let mut trainer = adam::<A, _>(f16(1024.0), 1e-3);
    let before = all(&mut trainer);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        trainer.train_step((), (), |_, (), ()| panic!("in the loss"))
    }));
    assert!(panic.is_err());
    // Burn panics for a loss that it does not track.
    let panic = catch_unwind(AssertUnwindSafe(|| {
        trainer.train_step((), (), |_, (), ()| values([1], 3))
    }));
    assert!(panic.is_err());
    assert_eq!(all(&mut trainer), before);
    assert!(train(&mut trainer, 1, 1.0).stepped());
    assert_eq!(trainer.scaler().state().taken_steps(), 1);
}

#[test]
fn the_record_of_another_model_leaves_a_trainer_that_goes_on() {
    #[derive(Module, Debug)]
    struct Stack<B: Backend> {
        layers: Vec<Linear<B>>,
    }
    let trainer = |layers: usize| {
        let layer = |_| LinearConfig::new(4, 4).init::<A>(&Default::default());
        let layers = (0..layers).map(layer).collect();
        f16(4.0)
            .init(Stack { layers }, SgdConfig::new().init(), 1e-3)
            .unwrap()
    };
    let (mut one, mut two) = (trainer(1), trainer(2));
    let state = one.scaler().state();
    let caught = catch_unwind(AssertUnwindSafe(|| one.load_record(two.to_record())));
    assert!(caught.is_err());
    assert_eq!(one.model().layers.len(), 1);
    assert_eq!(one.scaler().state(), state);
    let step = one.train_step((), (), |model: &Stack<A>, _, _| {
        model.layers[0].forward(values([8, 4], 1)).mean()
    });
    assert_eq!(step.unwrap().progress, Stepped);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let new = |precision, loss_scale| {
        let optimizer: ByAdam<A> = AdamConfig::new().init();
        config(precision, loss_scale).init(Mlp::<A>::new(), optimizer, 1e-3)
    };
    for precision in [Precision::Bf16, Precision::F32] {
        for loss_scale in [dynamic(1024.0), LossScaleConfig::Fixed(2.0)] {
            let error = new(precision, loss_scale).err().unwrap();
            assert!(
                matches!(error, AmpError::LossScaleWithoutF16 { precision: p } if p == precision)
            );
        }
        for loss_scale in [LossScaleConfig::default(), LossScaleConfig::Disabled] {
            assert_eq!(new(precision, loss_scale).unwrap().loss_scale(), 1.0);
        }
    }
    for precision in [Precision::F16, Precision::Bf16, Precision::Auto] {
        let error = new(precision, LossScaleConfig::Fixed(-1.0)).err().unwrap();
        assert!(matches!(error, AmpError::InvalidLossScale { .. }));
        assert_eq!(
            error.to_string(),
            "loss scaling: fixed scale is -1, expected a positive and finite number"
        );
    }
}

#[test]
fn a_disabled_scale_trains_without_a_check() {
    let mut trainer = sgd::<A, _>(config(Precision::F16, LossScaleConfig::Disabled), 0.1);
    let metrics = train(&mut trainer, 1, 1.0);
    assert_eq!((metrics.scale, metrics.progress), (1.0, Stepped));
    let metrics = train(&mut trainer, 1, OVERFLOW);
    assert_eq!((metrics.scale, metrics.progress), (1.0, Stepped));
    assert!(parameters(trainer.model()).iter().any(|v| !v.is_finite()));
    assert_eq!(trainer.scaler().state().taken_steps(), 0);
}

#[test]
fn on_plain_autodiff_the_trainer_trains_as_the_plain_loop() {
    let (mut optimizer, mut model): (ByAdam<Plain>, _) = (AdamConfig::new().init(), Mlp::new());
    for i in 0..10 {
        let grads = GradientsParams::from_grads(model.loss(i).backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    let expected = (parameters(&model), state(&optimizer, &model));
    let mut trainer = adam::<Plain, _>(f16(65536.0), 1e-2);
    for i in 0..10 {
        // In between, gradients beyond FP32 at this scale.
        assert_eq!(train(&mut trainer, i, 1.0).progress, Stepped);
        assert_eq!(train(&mut trainer, i, 1e38).progress, Skipped);
    }
    let (parameters, state, scaler) = all(&mut trainer);
    assert_eq!((parameters, state), expected);
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (10, 10));
}

#[test]
fn the_model_may_be_changed_and_taken_out() {
    let mut trainer = sgd::<A, _>(f16(1024.0), 0.1);
    train(&mut trainer, 1, 1.0);
    let zeros = Tensor::<A, 2>::zeros([8, 16], &Default::default());
    let id = trainer.model().first.weight.id;
    trainer.model_mut().first.weight = Param::initialized(id, zeros.require_grad());
    assert_eq!(data(trainer.model().first.weight.val()), [0.0; 128]);
    assert!(train(&mut trainer, 2, 1.0).stepped());
    assert_ne!(
        data(trainer.model().first.weight.val()),
        [0.0; 128],
        "it is trained on"
    );
    let expected = parameters(trainer.model());
    let model: Mlp<A> = trainer.into_model();
    assert_eq!(parameters(&model), expected);
}

/// The run that is stopped and goes on: three micro-batches to a step, a scale that grows every
/// third step, gradients that overflow, a loss that is not finite, clipping and a schedule.
fn run() -> Trainer<A, ByAdam<A>, LinearLrScheduler> {
    let config = DynamicLossScale::new()
        .with_init_scale(512.0)
        .with_growth_interval(3)
        .with_hysteresis(2);
    let config = self::config(Precision::F16, config.into())
        .with_grads_accumulation(3)
        .with_grad_clipping_norm(Some(0.2));
    let schedule = LinearLrSchedulerConfig::new(0.1, 0.001, 12).init();
    adam(config, schedule.unwrap())
}

const BATCHES: u64 = 60;

/// The factor on a batch's loss: overflows at every place of a window, also twice in a row, and losses
/// that are not finite at the first, second and third.
fn factor(batch: u64) -> f32 {
    match batch {
        4 | 12 | 15 | 29 | 44 => OVERFLOW,
        18 | 37 | 50 => f32::NAN,
        _ => 1.0,
    }
}

type Run = (
    Vec<StepProgress>,
    All,
    LearningRate,
    Option<burn_amp::LastStep>,
);

fn go_on(trainer: &mut Trainer<A, ByAdam<A>, LinearLrScheduler>, from: u64) -> Run {
    let progress = (from..BATCHES)
        .map(|i| train(trainer, i, factor(i)).progress)
        .collect();
    let next_rate = trainer.scheduler().clone().step();
    (
        progress,
        all(trainer),
        next_rate,
        trainer.scaler().last_step(),
    )
}

#[test]
fn a_run_that_is_stopped_after_any_batch_goes_on_to_the_same_bits() {
    let mut whole = run();
    let expected = go_on(&mut whole, 0);
    let scaler = expected.1.2;
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (12, 8));
    assert_eq!(scaler.non_finite_losses(), 3);
    assert!(scaler.growth_tracker() > 0, "in the middle of an interval");

    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let mut stopped = run();
    for batch in 0..BATCHES {
        // Recording changes nothing: the run that was recorded goes on.
        let record = stopped.to_record();
        let bytes = Recorder::<A>::record(&recorder, record, ()).unwrap();
        let record = Recorder::<A>::load(&recorder, bytes, &Default::default()).unwrap();
        let mut resumed = run();
        resumed.load_record(record);
        assert_eq!(
            all(&mut resumed),
            all(&mut stopped),
            "after {batch} batches"
        );
        let actual = go_on(&mut resumed, batch);
        assert_eq!(
            actual.0,
            expected.0[batch as usize..],
            "after {batch} batches"
        );
        assert_eq!(
            (actual.1, actual.2, actual.3),
            (expected.1.clone(), expected.2, expected.3.clone())
        );
        train(&mut stopped, batch, factor(batch));
    }
    assert_eq!(all(&mut stopped), expected.1);
}

fn files(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("trainer-{name}"))
}

fn assert_unwritten(error: &AmpError) {
    let is_write = matches!(error, AmpError::State { action, .. } if *action == "write");
    assert!(is_write, "{error}");
}

/// A recorder on a disk that is full before the last byte, which Burn's recorders do not report.
#[derive(Debug, Default, Clone)]
struct OnFullDisk(NamedMpkFileRecorder<FullPrecisionSettings>);

impl Recorder<A> for OnFullDisk {
    type Settings = FullPrecisionSettings;
    type RecordArgs = PathBuf;
    type RecordOutput = ();
    type LoadArgs = PathBuf;

    fn save_item<I: Serialize>(&self, item: I, path: PathBuf) -> Result<(), RecorderError> {
        Recorder::<A>::save_item(&self.0, item, path.clone())?;
        let path = path.with_extension("mpk");
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        Ok(())
    }

    fn load_item<I: DeserializeOwned>(&self, path: &mut PathBuf) -> Result<I, RecorderError> {
        Recorder::<A>::load_item(&self.0, path)
    }
}

impl FileRecorder<A> for OnFullDisk {
    fn file_extension() -> &'static str {
        "mpk"
    }
}

#[test]
fn a_file_that_is_not_whole_does_not_replace_the_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trainer.mpk");
    let mut trainer = adam::<A, _>(f16(1024.0), 1e-3);
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    trainer.save_file(&path, &recorder).unwrap();
    let before = fs::read(&path).unwrap();
    train(&mut trainer, 0, 1.0);
    let error = trainer
        .save_file(&path, &OnFullDisk::default())
        .unwrap_err();
    assert_unwritten(&error);
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn running_statistics_are_those_of_the_record() {
    fn train<O: Optimizer<BatchNorm<A>, A>>(
        trainer: &mut MixedPrecisionTrainer<A, BatchNorm<A>, O, LearningRate>,
        i: u64,
    ) {
        let x = values::<A, 2>([32, 8], i) + i as f64;
        let loss = |norm: &BatchNorm<A>, x: Tensor<A, 2>, ()| norm.forward(x).powi_scalar(2).mean();
        trainer.train_step(x, (), loss).unwrap();
    }
    /// As validation reads it.
    fn mean(norm: &BatchNorm<A>) -> Vec<f32> {
        let mean = norm.valid().running_mean.value();
        mean.into_data().to_vec().unwrap()
    }
    let new = || {
        let norm = BatchNormConfig::new(8).init::<A>(&Default::default());
        let optimizer = SgdConfig::new().init();
        f16(1024.0).init(norm, optimizer, 0.1).unwrap()
    };
    let mut trainer = new();
    train(&mut trainer, 0);
    let record = trainer.to_record();
    let saved = mean(trainer.model());
    train(&mut trainer, 1);
    // The statistics of batch 1 wait for the next forward pass.
    trainer.load_record(record);
    assert_eq!(mean(trainer.model()), saved);
    let mut other = new();
    (0..2).for_each(|i| train(&mut other, i));
    train(&mut trainer, 1);
    assert_eq!(mean(trainer.model()), mean(other.model()));
}

/// Stops in the middle of a window, right after a loss that was not finite, and goes on from a
/// file; then the file is damaged.
fn through_a_file<R: FileRecorder<A>>(recorder: &R, name: &str) {
    let path = files(name);
    let device = Default::default();
    let file = path.with_extension(R::file_extension());
    let _ = std::fs::remove_file(&file);

    let refused = |path: &Path| {
        let mut trainer = run();
        train(&mut trainer, 0, 1.0);
        let before = all(&mut trainer);
        let error = trainer.load_file(path, recorder, &device).unwrap_err();
        assert_eq!(all(&mut trainer), before, "the trainer is as it was");
        assert!(
            matches!(error, AmpError::State { action: "read", .. }),
            "{error}"
        );
        let text = error.to_string();
        let file = path.with_extension(R::file_extension());
        assert!(
            text.contains(&format!("from {}: ", file.display())),
            "{text}"
        );
        text
    };
    refused(&path);

    let expected = go_on(&mut run(), 0);
    let stop = 38;
    assert!(factor(stop - 1).is_nan() && stop % 3 != 0);
    let mut stopped = run();
    (0..stop).for_each(|i| _ = train(&mut stopped, i, factor(i)));
    stopped.save_file(&path, recorder).unwrap();
    let mut resumed = run();
    resumed.load_file(&path, recorder, &device).unwrap();
    let actual = go_on(&mut resumed, stop);
    assert_eq!(actual.0, expected.0[stop as usize..]);
    assert_eq!(
        (actual.1, actual.2, actual.3),
        (expected.1, expected.2, expected.3)
    );

    let bytes = std::fs::read(&file).unwrap();
    let cut = |eighths| &bytes[..bytes.len() * eighths / 8];
    for damaged in [cut(1), cut(4), cut(7), b"", b"{\"no\": 1}"] {
        std::fs::write(&file, damaged).unwrap();
        refused(&path);
    }
    // A figure of the scaler, where the format is one to be edited.
    let key = b"hysteresis_left";
    if let Some(at) = bytes.windows(key.len()).position(|window| window == key) {
        let mut damaged = bytes.clone();
        damaged[at + key.len()] = 127;
        std::fs::write(&file, damaged).unwrap();
        let error = refused(&path);
        assert!(error.contains("hysteresis_left is"), "{error}");
    } else {
        assert!(name == "gz", "{name} names its fields");
    }
    std::fs::remove_file(&file).unwrap();
    refused(&path);

    // A file where a folder has to be.
    std::fs::write(&file, b"").unwrap();
    let error = resumed.save_file(file.join("below"), recorder).unwrap_err();
    assert_unwritten(&error);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_run_goes_on_from_a_file_and_a_damaged_file_is_refused() {
    through_a_file(&NamedMpkFileRecorder::<FullPrecisionSettings>::new(), "mpk");
    through_a_file(
        &NamedMpkGzFileRecorder::<FullPrecisionSettings>::new(),
        "gz",
    );
}

/// Two runs may share a path by mistake: each file is whole, and the last one stays.
#[test]
fn two_trainers_may_save_one_file_at_once() {
    let folder = files("shared");
    let _ = std::fs::remove_dir_all(&folder);
    let path = folder.join("new/state");
    let save = |seed: u64| {
        let mut trainer = run();
        train(&mut trainer, seed, 1.0);
        for _ in 0..50 {
            let recorder = NamedMpkGzFileRecorder::<FullPrecisionSettings>::new();
            trainer.save_file(&path, &recorder).unwrap();
            run()
                .load_file(&path, &recorder, &Default::default())
                .unwrap();
        }
    };
    std::thread::scope(|threads| {
        [1, 2]
            .map(|seed| threads.spawn(move || save(seed)))
            .map(|t| t.join().unwrap())
    });
    let names = std::fs::read_dir(folder.join("new")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["state.mpk.gz"]);
}

#[test]
fn a_record_of_another_trainer_takes_over_its_window() {
    // Half a window that overflowed: it is skipped whoever finishes it.
    let mut overflowed = adam::<A, _>(f16(1024.0).with_grads_accumulation(2), 1e-3);
    train(&mut overflowed, 0, OVERFLOW);
    let record = overflowed.to_record();
    let mut trainer = adam::<A, _>(f16(8.0).with_grads_accumulation(2), 1e-3);
    train(&mut trainer, 3, 1.0);
    trainer.load_record(record);
    assert_eq!(train(&mut trainer, 1, 1.0).progress, Skipped);
    assert_eq!(trainer.loss_scale(), 512.0);

    // A trainer in the middle of a window that loads one between windows begins a new one.
    let mut fresh = adam::<A, _>(f16(1024.0).with_grads_accumulation(2), 1e-3);
    let record = fresh.to_record();
    let mut trainer = adam::<A, _>(f16(1024.0).with_grads_accumulation(2), 1e-3);
    train(&mut trainer, 0, f32::NAN);
    trainer.load_record(record);
    let progress = [1, 2].map(|i| train(&mut trainer, i, 1.0).progress);
    assert_eq!(progress, [Accumulated, Stepped]);
}

/// On a plain `Autodiff` the gradients carry the scale, in a record too.
#[test]
fn a_window_of_one_precision_is_finished_in_another() {
    fn finished<B: AutodiffBackend>(
        (first, first_scale): (Precision, LossScaleConfig),
        (second, second_scale): (Precision, LossScaleConfig),
        factor: f32,
    ) -> (StepProgress, Vec<f32>) {
        let new = |precision, loss_scale| {
            let config = config(precision, loss_scale).with_grads_accumulation(2);
            sgd::<B, _>(config, f64::from(RATE))
        };
        let mut begun = new(first, first_scale);
        train(&mut begun, 3, factor);
        let mut resumed = new(second, second_scale);
        resumed.load_record(begun.to_record());
        let before = parameters(resumed.model());
        let progress = train(&mut resumed, 9, 1.0).progress;
        (progress, difference(&before, &parameters(resumed.model())))
    }
    let f32 = (Precision::F32, LossScaleConfig::default());
    let expected = finished::<Plain>(f32, f32, 1.0).1;
    let all = [
        f32,
        (Precision::Bf16, LossScaleConfig::default()),
        (Precision::F16, dynamic(1024.0)),
        (Precision::F16, dynamic(65536.0)),
        (Precision::F16, LossScaleConfig::Fixed(3000.0)),
        (Precision::F16, LossScaleConfig::Disabled),
    ];
    for first in all {
        for second in all {
            let what = format!("{first:?}, then {second:?}");
            let (progress, actual) = finished::<Plain>(first, second, 1.0);
            assert_eq!(progress, Stepped, "{what}");
            assert_close(&what, Precision::F32, &actual, &expected, 32.0);
            let (progress, actual) = finished::<A>(first, second, 1.0);
            assert_eq!(progress, Stepped, "{what}");
            assert_close(&what, Precision::Bf16, &actual, &expected, 32.0);
            // The record keeps that a loss was not finite.
            if first.0 == Precision::F16 && first.1 != LossScaleConfig::Disabled {
                assert_eq!(
                    finished::<Plain>(first, second, f32::NAN).0,
                    Skipped,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn gradients_from_a_record_reach_the_optimizer_in_fp32() {
    // Muon multiplies matrices; one of these gradients is only in the record.
    #[derive(Module, Debug)]
    struct Two<B: Backend> {
        one: Linear<B>,
        other: Linear<B>,
    }
    type ByMuon = OptimizerAdaptor<Muon<<A as AutodiffBackend>::InnerBackend>, Two<A>, A>;
    let new = || {
        let layer = || {
            LinearConfig::new(8, 8)
                .with_bias(false)
                .init(&Default::default())
        };
        let model: Two<A> = Two {
            one: layer(),
            other: layer(),
        };
        let optimizer: ByMuon = MuonConfig::new().init();
        f16(1024.0)
            .with_grads_accumulation(2)
            .init(model.map(&mut Fill(0)), optimizer, 0.1)
            .unwrap()
    };
    let x = || values::<A, 2>([16, 8], 1);
    let first = |model: &Two<A>, x, ()| model.one.forward(x).powi_scalar(2).mean();
    let second = |model: &Two<A>, x, ()| model.other.forward(x).powi_scalar(2).mean();

    let mut whole = new();
    whole.train_step(x(), (), first).unwrap();
    let mut resumed = new();
    resumed.load_record(whole.to_record());
    for trainer in [&mut whole, &mut resumed] {
        assert!(trainer.train_step(x(), (), second).unwrap().stepped());
    }
    assert_eq!(all(&mut resumed), all(&mut whole));
}

#[test]
fn a_record_of_another_precision_leaves_the_scaler_fresh() {
    let default = LossScaleConfig::default();
    for (from, to) in [
        (Precision::Bf16, Precision::F16),
        (Precision::F16, Precision::Bf16),
    ] {
        let mut before = sgd::<A, _>(config(from, default), 1e-3);
        train(&mut before, 0, 1.0);
        let mut after = sgd::<A, _>(config(to, default), 1e-3);
        let own = after.scaler().state();
        train(&mut after, 0, OVERFLOW);
        after.load_record(before.to_record());
        assert_eq!(parameters(after.model()), parameters(before.model()));
        assert_eq!(after.scaler().state(), own, "from {from} to {to}");
        assert!(train(&mut after, 1, 1.0).stepped());
        assert_eq!(
            after.scaler().state().taken_steps(),
            u64::from(to == Precision::F16)
        );
    }
}

#[test]
fn a_precision_that_the_device_cannot_do_is_an_error_before_the_first_step() {
    type Cpu = AmpAutodiff<NdArray>;
    let model = LinearConfig::new(2, 2).init::<Cpu>(&Default::default());
    let optimizer = SgdConfig::new().init::<Cpu, Linear<Cpu>>();
    let error = MixedPrecisionTrainerConfig::new()
        .with_precision(Precision::F16)
        .init(model, optimizer, 1e-3)
        .err();
    assert!(
        matches!(error, Some(AmpError::UnsupportedPrecision { .. })),
        "{error:?}"
    );
}

/// The gradients of a window are parts of a mean over its batches.
#[test]
fn a_window_of_another_accumulation_is_dropped() {
    let new = |batches| adam::<A, _>(f16(1024.0).with_grads_accumulation(batches), 1e-3);
    for (recorded, own, progress) in [(3, 2, [Accumulated, Stepped]), (2, 1, [Stepped, Stepped])] {
        let mut saved = new(recorded);
        train(&mut saved, 0, OVERFLOW);
        let mut resumed = new(own);
        resumed.load_record(saved.to_record());
        let before = parameters(resumed.model());
        assert_eq!(
            [1, 2].map(|i| train(&mut resumed, i, 1.0).progress),
            progress
        );
        assert_ne!(parameters(resumed.model()), before);
        assert_eq!(resumed.loss_scale(), 1024.0);
    }
}
