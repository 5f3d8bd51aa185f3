//! The explicit protocol of `GradScaler`, on `AmpAutodiff` and on plain `Autodiff`: its values, skipped
//! steps, reports and errors. Also `MixedPrecision` and `ConvertFloat`, which are made for it.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex, NdArray};
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, FloatDType};
use burn_amp::{
    AmpAutodiff, AmpError, ConvertFloat, GradScaler, LastStep, LossScaleConfig, LossScaler,
    MixedPrecision, Precision, StepOutcome, Transition, clip_grad_norm, full_precision,
    with_precision,
};

use common::mlp::{self, Fill, Mlp, data, in_scope, parameters, scaler, state, values};
use common::{assert_close, relative_error};
use shared::checked::{self, Checked, CheckedDevice};

type A = AmpAutodiff<Flex>;
type Plain = Autodiff<Flex>;

type Training<B, M> = OptimizerAdaptor<Adam, M, B>;

fn adam<B: AutodiffBackend, M: AutodiffModule<B>>() -> Training<B, M> {
    AdamConfig::new().init()
}

/// Parameters and optimizer state.
type All = (Vec<f32>, Vec<(usize, Vec<u8>)>);

fn all<B: AutodiffBackend, M: AutodiffModule<B>>(optimizer: &Training<B, M>, model: &M) -> All {
    (parameters(model), state(optimizer, model))
}

/// A step without an error: the model, and whether the step was taken.
fn unwrapped<M>((model, stepped): (M, Result<bool, AmpError>)) -> (M, bool) {
    (model, stepped.unwrap())
}

/// One whole step of the protocol: the model, whether the step was taken, and the transition of the
/// scale.
fn step<B: AutodiffBackend, M: AutodiffModule<B>>(
    scaler: &GradScaler,
    optimizer: &mut Training<B, M>,
    model: M,
    loss: Tensor<B, 1>,
) -> (M, bool, Transition) {
    let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    let (model, stepped) = unwrapped(scaler.step(optimizer, 1e-2, model, grads));
    (model, stepped, scaler.update().unwrap())
}

#[derive(Module, Debug)]
struct Encoder<B: Backend> {
    layers: Vec<Linear<B>>,
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    encoder: Encoder<B>,
    head: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = Default::default();
        let layer = |input, output| LinearConfig::new(input, output).init(&device);
        let net = Self {
            encoder: Encoder {
                layers: vec![layer(8, 8), layer(8, 8)],
            },
            head: layer(8, 4),
        };
        net.map(&mut Fill(0))
    }

    fn loss(&self) -> Tensor<B, 1> {
        let layers = self.encoder.layers.iter();
        let hidden = layers.fold(values([16, 8], 5), |x, layer| layer.forward(x).tanh());
        self.head.forward(hidden).powi_scalar(2).mean()
    }
}

impl<B: AutodiffBackend> Net<B> {
    /// A finite loss, the gradient of which is NaN for one parameter and infinite for another.
    fn planted_loss(&self) -> Tensor<B, 1> {
        let weight = self.encoder.layers[1].weight.val();
        let nan = (weight * 0.0).sqrt().sum();
        let bias = self.head.bias.as_ref().unwrap().val();
        let infinite = (bias.clone() - Tensor::from_inner(bias.inner()))
            .sqrt()
            .sum();
        self.loss() + nan + infinite
    }
}

#[test]
fn the_explicit_and_the_implicit_protocol_train_to_the_same_bits() {
    let factor = |i| match i {
        7 | 20 | 33 => 1e7,
        _ => 1.0,
    };
    let implicit = scaler(1024.0);
    let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
    in_scope(Precision::F16, &implicit, || {
        for i in 0..50 {
            let grads = (model.loss(i) * factor(i)).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-2, model.clone(), grads);
        }
    });
    let expected = all(&optimizer, &model);
    assert_eq!(implicit.skipped_steps(), 3);

    // Unscaling by hand in between changes nothing.
    for unscale in [false, true] {
        let explicit = scaler(1024.0);
        let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
        with_precision(Precision::F16, || {
            for i in 0..50 {
                let loss = model.loss(i) * factor(i);
                let mut grads = explicit.backward(loss, &model);
                if unscale {
                    explicit.unscale(&model, &mut grads).unwrap();
                }
                let before = model.clone();
                let (next, stepped) =
                    unwrapped(explicit.step(&mut optimizer, 1e-2, model.clone(), grads));
                assert_eq!(stepped, factor(i) == 1.0);
                assert_eq!(stepped, parameters(&next) != parameters(&before));
                model = next;
                let backed_off = explicit.update().unwrap() == Transition::BackedOff;
                assert_eq!(backed_off, !stepped);
            }
        });
        assert_eq!(all(&optimizer, &model), expected);
        assert_eq!(explicit.state(), implicit.state());
        assert_eq!(explicit.loss_scale(), 128.0);
    }
}

#[test]
fn on_plain_autodiff_the_loss_is_scaled_and_the_gradients_are_as_without() {
    let model = Mlp::<Plain>::new();
    let expected = GradientsParams::from_grads(model.loss(7).backward(), &model);
    let expected = mlp::gradients(&model, &expected);
    for (scale, exactly) in [(65536.0, true), (3000.0, false)] {
        let scaler = GradScaler::new(LossScaleConfig::Fixed(scale)).unwrap();
        let loss = model.loss(7);
        let scaled = scaler.scale(loss.clone());
        assert_eq!(data(scaled.clone()), [data(loss)[0] * scale]);
        let mut grads = GradientsParams::from_grads(scaled.backward(), &model);
        assert_close(
            "scaled",
            Precision::F32,
            &mlp::gradients(&model, &grads),
            &times(&expected, scale),
            8.0,
        );
        scaler.unscale(&model, &mut grads).unwrap();
        let unscaled = mlp::gradients(&model, &grads);
        // A power of two changes no rounding.
        assert_eq!(unscaled == expected, exactly);
        assert_close("unscaled", Precision::F32, &unscaled, &expected, 8.0);
    }
}

#[test]
fn a_scale_that_is_set_within_a_step_holds_from_the_next_on() {
    let model = Mlp::<Plain>::new();
    let expected = GradientsParams::from_grads(model.loss(7).backward(), &model);
    let scaler = scaler(1024.0);
    for scale in [1024.0, 8.0] {
        let loss = model.loss(7);
        let scaled = scaler.scale(loss.clone());
        assert_eq!(data(scaled.clone()), [data(loss)[0] * scale]);
        scaler.set_scale(8.0).unwrap();
        let mut grads = GradientsParams::from_grads(scaled.backward(), &model);
        scaler.unscale(&model, &mut grads).unwrap();
        let [actual, expected] = [&grads, &expected].map(|grads| mlp::gradients(&model, grads));
        assert_eq!(actual, expected);
        unwrapped(scaler.step(&mut adam(), 1e-2, model.clone(), grads));
        scaler.update().unwrap();
    }
}

fn times(values: &[f32], factor: f32) -> Vec<f32> {
    values.iter().map(|v| v * factor).collect()
}

#[test]
fn on_plain_autodiff_the_protocol_trains_as_the_plain_loop() {
    fn plain_loop() -> All {
        let (mut optimizer, mut model) = (adam(), Mlp::<Plain>::new());
        for i in 0..20 {
            let grads = GradientsParams::from_grads(model.loss(i).backward(), &model);
            model = optimizer.step(1e-2, model, grads);
        }
        all(&optimizer, &model)
    }
    let scaler = scaler(65536.0);
    let (mut optimizer, mut model) = (adam(), Mlp::<Plain>::new());
    for i in 0..20 {
        let loss = model.loss(i);
        model = step(&scaler, &mut optimizer, model, loss).0;
    }
    assert_eq!(all(&optimizer, &model), plain_loop());
    assert_eq!(scaler.state().taken_steps(), 20);
}

#[test]
fn a_half_or_double_loss_is_scaled_as_well() {
    for (dtype, expected) in [
        (FloatDType::F16, DType::F32),
        (FloatDType::BF16, DType::F32),
        (FloatDType::F32, DType::F32),
        (FloatDType::F64, DType::F64),
    ] {
        let scaler = scaler(65536.0);
        let leaf = values::<Plain, 1>([1], 3).cast(dtype).require_grad();
        // 65536 is beyond the range of f16.
        let scaled = scaler.scale(leaf.clone() * 2.0);
        assert_eq!(scaled.dtype(), expected);
        let value = data(leaf.cast(FloatDType::F32))[0];
        assert_eq!(data(scaled.cast(FloatDType::F32)), [value * 131072.0]);
    }
}

/// Without the scale, the gradient of a parameter in f16 would be rounded to 0 again.
#[test]
fn an_f16_gradient_is_refused_where_it_carries_the_scale() {
    let device = Default::default();
    let mut model = LinearConfig::new(4, 4)
        .with_bias(false)
        .init::<Plain>(&device);
    let weight = Tensor::from_inner(model.weight.val().inner().cast(FloatDType::F16));
    model.weight = Param::from_tensor(weight);
    let expected = |call| AmpError::HalfParameter {
        call,
        parameter: "weight".into(),
        precision: Precision::F16,
    };
    let before = data(model.weight.val().cast(FloatDType::F32));
    let scaled = |scaler: &GradScaler| {
        let x = values::<Plain, 2>([4, 4], 1).cast(FloatDType::F16);
        let loss = scaler.scale(model.forward(x).mean() * 1e-6);
        GradientsParams::from_grads(loss.backward(), &model)
    };

    let active = scaler(65536.0);
    let mut grads = scaled(&active);
    let refused = active.unscale(&model, &mut grads);
    assert_eq!(refused, Err(expected("unscale")));
    let (stepped, refused) = active.step(&mut adam(), 1e-2, model.clone(), grads);
    assert_eq!(refused, Err(expected("step")));
    assert_eq!(data(stepped.weight.val().cast(FloatDType::F32)), before);

    let off = GradScaler::new(LossScaleConfig::Disabled).unwrap();
    let grads = scaled(&off);
    let (_, stepped) = off.step(&mut adam(), 1e-2, model.clone(), grads);
    assert_eq!(stepped, Ok(true));
}

/// A gradient that is not finite although the loss is: the step is skipped, the scale backs off,
/// and the parameters are named.
fn planted_overflow<B: AutodiffBackend>() {
    let scaler = scaler(1024.0);
    let (mut optimizer, mut model) = (adam(), Net::<B>::new());
    let mut train = |loss: fn(&Net<B>) -> Tensor<B, 1>| {
        let before = all(&optimizer, &model);
        let loss = loss(&model);
        assert!(data(loss.clone().inner())[0].is_finite());
        let (next, stepped, transition) = step(&scaler, &mut optimizer, model.clone(), loss);
        model = next;
        assert_eq!(all(&optimizer, &model) != before, stepped);
        (stepped, transition)
    };
    assert_eq!(scaler.last_step(), None);
    assert_eq!(train(Net::loss), (true, Transition::Kept));
    let mut expected = LastStep {
        scale: 1024.0,
        outcome: StepOutcome::Finite,
        non_finite_gradients: 0,
        parameters: Vec::new(),
        last_finite: None,
        anomalies: Vec::new(),
    };
    assert!(expected.stepped());
    assert_eq!(scaler.last_step().as_ref(), Some(&expected));

    assert_eq!(train(Net::planted_loss), (false, Transition::BackedOff));
    expected.outcome = StepOutcome::Overflow;
    expected.non_finite_gradients = 2;
    expected.parameters = vec!["head.bias".into(), "encoder.layers.1.weight".into()];
    assert!(!expected.stepped());
    assert_eq!(scaler.last_step(), Some(expected));
    assert_eq!(scaler.loss_scale(), 512.0);

    assert_eq!(train(Net::loss), (true, Transition::Kept));
    assert_eq!(scaler.last_step().unwrap().scale, 512.0);
    assert_eq!(scaler.last_step().unwrap().parameters, [""; 0]);
    let state = scaler.state();
    assert_eq!((state.taken_steps(), state.skipped_steps()), (2, 1));
    assert_eq!(state.non_finite_losses(), 0);
}

#[test]
fn an_overflow_is_skipped_and_its_parameters_are_named() {
    planted_overflow::<Plain>();
    with_precision(Precision::F16, planted_overflow::<A>);
}

fn clipped_overflow<B: AutodiffBackend>() {
    let scaler = scaler(1024.0);
    let (mut optimizer, model) = (adam(), Net::<B>::new());
    let before = all(&optimizer, &model);
    let mut grads = scaler.backward(model.planted_loss(), &model);
    scaler.unscale(&model, &mut grads).unwrap();
    let norm = clip_grad_norm(&model, &mut grads, 1.0).unwrap();
    assert!(!data(norm)[0].is_finite());
    let (model, stepped) = scaler.step(&mut optimizer, 1e-2, model, grads);
    assert_eq!(stepped, Ok(false));
    assert_eq!(scaler.update(), Ok(Transition::BackedOff));
    assert_eq!(all(&optimizer, &model), before);
}

#[test]
fn after_an_overflow_clipping_gives_a_norm_that_is_not_finite() {
    clipped_overflow::<Plain>();
    with_precision(Precision::F16, clipped_overflow::<A>);
}

#[test]
fn a_gradient_beyond_fp32_is_an_overflow() {
    let scaler = scaler(65536.0);
    let (mut optimizer, model) = (adam(), Net::<Plain>::new());
    let before = all(&optimizer, &model);
    let loss = model.loss() * 1e38;
    assert!(data(loss.clone())[0].is_finite());
    let (model, stepped, transition) = step(&scaler, &mut optimizer, model, loss);
    assert_eq!((stepped, transition), (false, Transition::BackedOff));
    assert_eq!(all(&optimizer, &model), before);
    let last = scaler.last_step().unwrap();
    assert_eq!(last.outcome, StepOutcome::Overflow);
    assert!(
        last.parameters.contains(&"head.weight".to_string()),
        "{last:?}"
    );
    assert_eq!(last.parameters.len(), last.non_finite_gradients);

    // At a scale of 1 the same loss trains.
    scaler.set_scale(1.0).unwrap();
    let loss = model.loss() * 1e38;
    assert!(step(&scaler, &mut optimizer, model, loss).1);
}

fn non_finite_loss<B: AutodiffBackend>() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let scaler = scaler(1024.0);
        let (mut optimizer, mut model) = (adam(), Net::<B>::new());
        let before = all(&optimizer, &model);
        for _ in 0..3 {
            // The gradients of the sum are finite: only the loss is not.
            let loss = model.loss() + bad;
            let (next, stepped, transition) = step(&scaler, &mut optimizer, model, loss);
            assert_eq!((stepped, transition), (false, Transition::Kept));
            model = next;
        }
        assert_eq!(all(&optimizer, &model), before);
        let last = scaler.last_step().unwrap();
        assert_eq!(
            (last.outcome, last.scale),
            (StepOutcome::NonFiniteLoss, 1024.0)
        );
        assert_eq!(scaler.loss_scale(), 1024.0);
        assert_eq!(scaler.state().non_finite_losses(), 3);

        let loss = model.loss();
        assert!(step(&scaler, &mut optimizer, model, loss).1);
    }
}

#[test]
fn a_loss_that_is_not_finite_is_skipped_and_keeps_the_scale() {
    non_finite_loss::<Plain>();
    with_precision(Precision::F16, non_finite_loss::<A>);
}

#[test]
fn a_batch_that_the_loop_leaves_out_is_no_part_of_the_next_step() {
    fn left_out<B: AutodiffBackend>() {
        let scaler = scaler(1024.0);
        let (mut optimizer, mut model) = (adam(), Net::<B>::new());
        for discarded in [true, false] {
            scaler.scale(model.loss() + f32::NAN).backward();
            if discarded {
                scaler.discard_step();
            }
            let (loss, stepped) = (model.loss(), discarded);
            let taken;
            (model, taken, _) = step(&scaler, &mut optimizer, model, loss);
            assert_eq!(taken, stepped);
        }
        assert_eq!(
            (scaler.state().taken_steps(), scaler.loss_scale()),
            (1, 1024.0)
        );
    }
    left_out::<Plain>();
    with_precision(Precision::F16, left_out::<A>);
}

#[test]
fn one_bad_micro_batch_skips_the_accumulated_step() {
    fn accumulated<B: AutodiffBackend>(factors: [f32; 3]) -> (StepOutcome, f32) {
        let scaler = scaler(1024.0);
        let (mut optimizer, model) = (adam(), Mlp::<B>::new());
        let mut accumulator = burn::optim::GradientsAccumulator::new();
        for factor in factors {
            let grads = scaler.backward(model.loss(7) * factor, &model);
            accumulator.accumulate(&model, grads);
        }
        let grads = accumulator.grads();
        let before = parameters(&model);
        let (model, stepped) = unwrapped(scaler.step(&mut optimizer, 1e-2, model, grads));
        scaler.update().unwrap();
        assert_eq!(stepped, parameters(&model) != before);
        (scaler.last_step().unwrap().outcome, scaler.loss_scale())
    }
    for (factors, expected) in [
        ([1.0, 1.0, 1.0], (StepOutcome::Finite, 1024.0)),
        ([1e7, 1.0, 1.0], (StepOutcome::Overflow, 512.0)),
        ([1.0, 1e7, 1e7], (StepOutcome::Overflow, 512.0)),
        ([1.0, f32::NAN, 1.0], (StepOutcome::NonFiniteLoss, 1024.0)),
    ] {
        let actual = with_precision(Precision::F16, || accumulated::<A>(factors));
        assert_eq!(actual, expected, "{factors:?}");
        if factors.iter().all(|factor| *factor != 1e7) {
            assert_eq!(accumulated::<Plain>(factors), expected, "{factors:?}");
        }
    }
}

#[test]
fn in_bf16_and_fp32_the_protocol_does_nothing() {
    for precision in [Precision::Bf16, Precision::F32] {
        with_precision(precision, || {
            let plain_loop = {
                let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
                for i in 0..20 {
                    let grads = GradientsParams::from_grads(model.loss(i).backward(), &model);
                    model = optimizer.step(1e-2, model, grads);
                }
                all(&optimizer, &model)
            };
            let scaler = scaler(2f32.powi(24));
            let untouched = scaler.state();
            let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
            for i in 0..20 {
                let loss = model.loss(i);
                let (next, stepped, transition) = step(&scaler, &mut optimizer, model, loss);
                assert_eq!((stepped, transition), (true, Transition::Kept));
                model = next;
            }
            assert_eq!(all(&optimizer, &model), plain_loop, "{precision}");

            // A loss that is not finite is not checked either, as in plain Burn.
            let loss = model.loss(1) * f32::NAN;
            let mut grads = scaler.backward(loss, &model);
            scaler.unscale(&model, &mut grads).unwrap();
            assert!(mlp::gradients(&model, &grads).iter().any(|v| v.is_nan()));
            assert!(scaler.step(&mut optimizer, 1e-2, model, grads).1.unwrap());
            assert_eq!(scaler.update(), Ok(Transition::Kept));
            assert_eq!((scaler.state(), scaler.last_step()), (untouched, None));
        });
    }
}

#[test]
fn a_disabled_scaler_does_nothing() {
    fn trained<B: AutodiffBackend>() {
        let scaler = GradScaler::new(LossScaleConfig::Disabled).unwrap();
        let model = Mlp::<B>::new();
        let loss = model.loss(7);
        assert_eq!(data(scaler.scale(loss.clone())), data(loss));
        let loss = model.loss(7) * f32::NAN;
        let (_, stepped, transition) = step(&scaler, &mut adam(), model, loss);
        assert_eq!((stepped, transition), (true, Transition::Kept));
        assert_eq!(
            (scaler.last_step(), scaler.state().taken_steps()),
            (None, 0)
        );
    }
    trained::<Plain>();
    with_precision(Precision::F16, trained::<A>);
}

#[test]
fn the_check_does_not_depend_on_where_the_step_is_taken() {
    // Forward and backward pass in a region, as PyTorch's users write it, and the step outside of
    // it.
    let scaler = scaler(1024.0);
    let (mut optimizer, model) = (adam(), Net::<A>::new());
    let before = all(&optimizer, &model);
    let mut grads = with_precision(Precision::F16, || {
        scaler.backward(model.planted_loss(), &model)
    });
    scaler.unscale(&model, &mut grads).unwrap();
    let (model, stepped) = unwrapped(scaler.step(&mut optimizer, 1e-2, model, grads));
    assert!(!stepped);
    assert_eq!(all(&optimizer, &model), before);
    assert_eq!(scaler.update(), Ok(Transition::BackedOff));

    let grads = with_precision(Precision::F16, || scaler.backward(model.loss(), &model));
    assert!(scaler.step(&mut optimizer, 1e-2, model, grads).1.unwrap());
    assert_eq!(scaler.update(), Ok(Transition::Kept));
    assert_eq!(scaler.state().taken_steps(), 1);
}

/// As for a peer whose gradients are finite: it must hear of the loss.
#[test]
fn a_loss_that_is_not_finite_marks_a_gradient_that_has_elements() {
    #[derive(Module, Debug)]
    struct Parts<B: Backend> {
        empty: Linear<B>,
        layer: Linear<B>,
    }
    let layer = |inputs| {
        LinearConfig::new(inputs, 4)
            .with_bias(false)
            .init(&Default::default())
    };
    let model = Parts::<A> {
        empty: layer(0),
        layer: layer(8),
    };
    let scaler = scaler(1024.0);
    let grads = with_precision(Precision::F16, || {
        let of_none = model.empty.forward(values([16, 0], 1));
        let loss = (model.layer.forward(values([16, 8], 2)) + of_none).sum();
        scaler.backward(loss + f32::INFINITY, &model)
    });
    let grad = |layer: &Linear<A>| {
        let grad = grads.get::<burn_amp::Amp<Flex>, 2>(layer.weight.id);
        data(grad.expect("a gradient"))
    };
    assert!(grad(&model.empty).is_empty());
    assert!(grad(&model.layer).iter().all(|value| value.is_nan()));
}

/// Runs `misuse`, which must fail and leave the scaler and the optimizer as they were.
#[track_caller]
fn refused<B: AutodiffBackend, T>(
    scaler: &GradScaler,
    optimizer: &mut Training<B, Net<B>>,
    model: &Net<B>,
    misuse: impl FnOnce(&mut Training<B, Net<B>>) -> Result<T, AmpError>,
) -> AmpError {
    let before = (scaler.state(), scaler.last_step(), all(optimizer, model));
    let error = misuse(optimizer).err().expect("an error");
    assert_eq!(
        before,
        (scaler.state(), scaler.last_step(), all(optimizer, model))
    );
    error
}

/// A step that is refused gives back the model as it was.
fn refused_step<B: AutodiffBackend>(
    scaler: &GradScaler,
    optimizer: &mut Training<B, Net<B>>,
    model: &Net<B>,
    grads: GradientsParams,
) -> Result<(), AmpError> {
    let (same, stepped) = scaler.step(optimizer, 1e-2, model.clone(), grads);
    assert_eq!(parameters(&same), parameters(model));
    stepped.map(|_| ())
}

/// Gradients that are refused are still there, as they were.
fn refused_unscale<B: AutodiffBackend>(
    scaler: &GradScaler,
    model: &Net<B>,
    mut grads: GradientsParams,
) -> Result<(), AmpError> {
    let given = (grads.len(), mlp::gradients(model, &grads));
    let unscaled = scaler.unscale(model, &mut grads);
    assert_eq!((grads.len(), mlp::gradients(model, &grads)), given);
    unscaled
}

const NOTHING_SCALED: &str = " was called, but no loss was scaled since the last update. Call \
     scaler.scale(loss).backward(), or scaler.backward(loss, &model), first, on this scaler or a clone of it";
const NOTHING_STEPPED: &str = "update was called, but there was no step since the last update. Call \
     scaler.step(..) first, once for each optimizer, and update once after all of them";
const ALREADY_UNSCALED: &str = "unscale was called again, or after step, before update: the gradient of \
        encoder.layers.0.weight, for example, would be divided by the scale twice. Unscale once, \
        after the last micro-batch and before step";
const ALREADY_STEPPED: &str = "step was called again before update: the gradient of \
     encoder.layers.0.weight, for example, would be applied twice. Call update once after the steps \
     of all optimizers; with accumulation, step once, after the last micro-batch";

fn foreign(call: &str, given: usize, of_model: usize) -> String {
    if given == 0 {
        return format!(
            "{call} was given no gradients of this model: the loss does not depend on its \
             parameters. Are they frozen or detached?"
        );
    }
    format!(
        "{call} was given {given} gradients, but only {of_model} of them belong to this model. \
         Either they were computed with another model (GradientsParams::from_grads takes the model to \
         step), or the loss does not depend on its parameters. Are they frozen or detached?"
    )
}

/// Every misuse in turn; the step that it belongs to can be finished each time.
fn misused<B: AutodiffBackend>(scales: bool) {
    let s = scaler(1024.0);
    let (mut optimizer, model, other) = (adam(), Net::<B>::new(), Net::<B>::new());
    let unscaled = |model: &Net<B>| {
        GradientsParams::from_grads(full_precision(|| model.loss().backward()), model)
    };
    let taken = |steps| assert_eq!(s.state().taken_steps(), if scales { steps } else { 0 });

    let error = refused(&s, &mut optimizer, &model, |o| {
        refused_step(&s, o, &model, unscaled(&model))
    });
    assert!(matches!(error, AmpError::NothingScaled { call: "step" }));
    assert_eq!(error.to_string(), format!("step{NOTHING_SCALED}"));
    let error = refused(&s, &mut optimizer, &model, |_| {
        refused_unscale(&s, &model, unscaled(&model))
    });
    assert!(matches!(error, AmpError::NothingScaled { call: "unscale" }));
    assert_eq!(error.to_string(), format!("unscale{NOTHING_SCALED}"));
    let error = refused(&s, &mut optimizer, &model, |_| s.update());
    assert!(matches!(error, AmpError::NothingStepped));
    assert_eq!(error.to_string(), NOTHING_STEPPED);

    let (model, stepped, _) = step(&s, &mut optimizer, model.clone(), model.loss());
    assert!(stepped);
    taken(1);
    let error = refused(&s, &mut optimizer, &model, |_| s.update());
    assert!(matches!(error, AmpError::NothingStepped), "a second update");
    let error = refused(&s, &mut optimizer, &model, |_| {
        refused_unscale(&s, &model, unscaled(&model))
    });
    assert!(
        matches!(error, AmpError::NothingScaled { .. }),
        "after an update"
    );

    let mut grads = s.backward(model.loss(), &model);
    let error = refused(&s, &mut optimizer, &model, |_| s.update());
    assert!(matches!(error, AmpError::NothingStepped), "without a step");

    // Gradients of another model, none, and some of both.
    for call in ["step", "unscale"] {
        let misuse = |grads: GradientsParams, o: &mut Training<B, Net<B>>| match call {
            "step" => refused_step(&s, o, &model, grads),
            _ => refused_unscale(&s, &model, grads),
        };
        let error = refused(&s, &mut optimizer, &model, |o| misuse(unscaled(&other), o));
        assert!(matches!(
            error,
            AmpError::ForeignGradients {
                given: 6,
                of_model: 0,
                ..
            }
        ));
        assert_eq!(error.to_string(), foreign(call, 6, 0));
        let error = refused(&s, &mut optimizer, &model, |o| {
            misuse(GradientsParams::new(), o)
        });
        assert!(matches!(
            error,
            AmpError::ForeignGradients {
                given: 0,
                of_model: 0,
                ..
            }
        ));
        assert_eq!(error.to_string(), foreign(call, 0, 0));
        let mut mixed = unscaled(&model);
        mixed.register(other.head.weight.id, other.head.weight.val().inner());
        let error = refused(&s, &mut optimizer, &model, |o| misuse(mixed, o));
        assert_eq!(error.to_string(), foreign(call, 7, 6));
    }

    s.unscale(&model, &mut grads).unwrap();
    let error = refused(&s, &mut optimizer, &model, |_| {
        refused_unscale(&s, &model, unscaled(&model))
    });
    assert!(matches!(error, AmpError::AlreadyUnscaled { .. }));
    assert_eq!(error.to_string(), ALREADY_UNSCALED);
    let (model, stepped) = unwrapped(s.step(&mut optimizer, 1e-2, model, grads));
    assert!(stepped);
    // Scaled gradients would go to the optimizer. In bf16 too: the same loop fails in f16.
    let grads = s.backward(model.loss(), &model);
    let error = refused(&s, &mut optimizer, &model, |o| {
        refused_step(&s, o, &model, grads)
    });
    assert!(matches!(error, AmpError::AlreadyStepped { .. }));
    assert_eq!(error.to_string(), ALREADY_STEPPED);
    s.update().unwrap();
    taken(2);

    let before = parameters(&model);
    let (model, stepped, _) = step(&s, &mut optimizer, model.clone(), model.loss());
    assert!(stepped && parameters(&model) != before);
    taken(3);
    assert_eq!(s.skipped_steps(), 0);
}

#[test]
fn misuse_is_refused_and_training_goes_on() {
    misused::<Plain>(true);
    with_precision(Precision::F16, || misused::<A>(true));
    // A wrong loop gets the same errors where nothing is scaled.
    with_precision(Precision::Bf16, || misused::<A>(false));
}

#[test]
fn a_part_of_the_gradients_may_be_unscaled_before_the_step() {
    let expected = {
        let (mut optimizer, model) = (adam(), Net::<Plain>::new());
        let grads = GradientsParams::from_grads(model.loss().backward(), &model);
        let model = optimizer.step(1e-2, model, grads);
        all(&optimizer, &model)
    };
    let scaler = scaler(65536.0);
    let (mut optimizer, model) = (adam(), Net::<Plain>::new());
    let mut tape = scaler.scale(model.loss()).backward();
    let mut head = GradientsParams::from_module(&mut tape, &model.head);
    scaler.unscale(&model.head, &mut head).unwrap();
    let mut grads = GradientsParams::from_grads(tape, &model);
    let weight = head.remove::<Flex, 2>(model.head.weight.id).unwrap();
    grads.register(model.head.weight.id, weight);
    let bias = model.head.bias.as_ref().unwrap().id;
    grads.register(bias, head.remove::<Flex, 1>(bias).unwrap());
    let (model, stepped) = unwrapped(scaler.step(&mut optimizer, 1e-2, model, grads));
    assert!(stepped);
    scaler.update().unwrap();
    assert_eq!(all(&optimizer, &model), expected);
}

/// Whether a step is taken with the gradients of a first loss, which are unscaled, and of a second, which is scaled
/// before them or after.
fn is_taken_with<B: AutodiffBackend>(
    scaled_before: bool,
    second: impl Fn(&Net<B>) -> Tensor<B, 1>,
) -> bool {
    let (scaler, mut optimizer, model) = (scaler(1024.0), adam(), Net::<B>::new());
    let before = all(&optimizer, &model);
    let mut window = GradientsAccumulator::new();
    let backward = |loss: Tensor<B, 1>| GradientsParams::from_grads(loss.backward(), &model);
    let scaled = || scaler.scale(second(&model));
    let before_them = scaled_before.then(scaled);
    let mut grads = backward(scaler.scale(model.loss()));
    scaler.unscale(&model, &mut grads).unwrap();
    window.accumulate(&model, grads);
    window.accumulate(&model, backward(before_them.unwrap_or_else(scaled)));
    let (model, taken) = unwrapped(scaler.step(&mut optimizer, 1e-2, model, window.grads()));
    scaler.update().unwrap();
    assert_eq!(all(&optimizer, &model) != before, taken);
    let counted = (scaler.state().taken_steps(), scaler.skipped_steps());
    assert_eq!(counted, if taken { (1, 0) } else { (0, 1) });
    taken
}

#[test]
fn gradients_that_are_added_after_unscale_are_checked_again() {
    with_precision(Precision::F16, || {
        for before in [false, true] {
            assert!(is_taken_with::<A>(before, Net::loss));
            assert!(!is_taken_with::<A>(before, Net::planted_loss));
            assert!(!is_taken_with::<A>(before, |model| model.loss() * 1e7));
            assert!(!is_taken_with::<A>(before, |model| model.loss() * f32::NAN));
        }
    });
    assert!(is_taken_with::<Plain>(false, Net::loss));
    assert!(!is_taken_with::<Plain>(false, Net::planted_loss));
    assert!(!is_taken_with::<Plain>(false, |model| model.loss() * f32::NAN));
}

/// A pass in FP32 scales nothing, and checks nothing by itself.
#[test]
fn gradients_of_fp32_that_are_added_after_unscale_are_checked_too() {
    for factor in [1.0, f32::NAN] {
        let (scaler, mut optimizer, model) = (scaler(1024.0), adam(), Net::<A>::new());
        let mut window = GradientsAccumulator::new();
        let taken = with_precision(Precision::F16, || {
            let mut grads = scaler.backward(model.loss(), &model);
            scaler.unscale(&model, &mut grads).unwrap();
            window.accumulate(&model, grads);
            let in_fp32 = || scaler.scale(model.loss() * factor).backward();
            let grads = GradientsParams::from_grads(full_precision(in_fp32), &model);
            window.accumulate(&model, grads);
            scaler.step(&mut optimizer, 1e-2, model, window.grads()).1
        });
        assert_eq!(taken, Ok(factor == 1.0));
    }
}

/// A generator and a discriminator, each with an optimizer and a scaler. `overflows` selects, for each
/// step, the losses that are multiplied so that their gradients overflow. Returns which models changed.
fn gan(overflows: &[[bool; 2]]) -> (Vec<[bool; 2]>, [LossScaler; 2]) {
    let scalers = [scaler(1024.0), scaler(2048.0)];
    let mut generator = Mlp::<A>::new();
    let mut discriminator: Linear<A> = LinearConfig::new(4, 1)
        .init(&Default::default())
        .map(&mut Fill(9));
    let (mut of_generator, mut of_discriminator) = (adam(), adam());
    let mut changed = Vec::new();
    for (i, [generator_overflows, discriminator_overflows]) in overflows.iter().enumerate() {
        let factor = |overflows: &bool| if *overflows { 1e7 } else { 1.0 };
        let before = (parameters(&generator), parameters(&discriminator));
        let distance = |x: Tensor<A, 2>, to: f32| (x - to).powi_scalar(2).mean();

        let fake = generator.forward(values([16, 8], i as u64));
        let loss = distance(discriminator.forward(values([16, 4], 100 + i as u64)), 1.0)
            + distance(discriminator.forward(fake.clone().detach()), 0.0);
        let loss = loss * factor(discriminator_overflows);
        discriminator = step(&scalers[1], &mut of_discriminator, discriminator, loss).0;

        let loss = distance(discriminator.forward(fake), 1.0) * factor(generator_overflows);
        generator = step(&scalers[0], &mut of_generator, generator, loss).0;
        changed.push([
            parameters(&generator) != before.0,
            parameters(&discriminator) != before.1,
        ]);
    }
    (changed, scalers.map(|scaler| scaler.state()))
}

#[test]
fn of_two_models_with_a_scaler_each_only_the_one_that_overflows_is_skipped() {
    let mut overflows = [[false; 2]; 8];
    overflows[2] = [true, false];
    overflows[4] = [false, true];
    overflows[6] = [true, true];
    let (changed, [generator, discriminator]) = with_precision(Precision::F16, || gan(&overflows));
    let expected: Vec<_> = overflows
        .iter()
        .map(|o| o.map(|overflow| !overflow))
        .collect();
    assert_eq!(changed, expected);
    for (scaler, scale) in [(generator, 256.0), (discriminator, 512.0)] {
        assert_eq!(scaler.scale(), scale);
        assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (6, 2));
    }
}

/// Two models with an optimizer each and one scaler, by a loss each or by the sum of both; the
/// gradients of those that `overflows` names are not finite.
fn multi_task<B: AutodiffBackend>(overflows: [bool; 2], sum: bool) -> ([bool; 2], GradScaler) {
    let scaler = scaler(1024.0);
    let models = [Net::<B>::new(), Net::<B>::new()];
    let mut optimizers = [adam(), adam()];
    let loss = |i: usize| match overflows[i] {
        true => models[i].planted_loss(),
        false => models[i].loss(),
    };
    let grads = match sum {
        true => {
            let mut grads = scaler.scale(loss(0) + loss(1)).backward();
            [0, 1].map(|i| GradientsParams::from_module(&mut grads, &models[i]))
        }
        false => [0, 1].map(|i| scaler.backward(loss(i), &models[i])),
    };
    let [first, second] = grads;
    let mut stepped = [false; 2];
    for (i, grads) in [(0, first), (1, second)] {
        let model = models[i].clone();
        let before = all(&optimizers[i], &model);
        let (model, took) = unwrapped(scaler.step(&mut optimizers[i], 1e-2, model, grads));
        assert_eq!(all(&optimizers[i], &model) != before, took);
        stepped[i] = took;
    }
    scaler.update().unwrap();
    (stepped, scaler)
}

#[test]
fn of_two_optimizers_on_one_scaler_only_the_one_that_overflows_is_skipped() {
    fn check<B: AutodiffBackend>() {
        for sum in [false, true] {
            for overflows in [[false, false], [true, false], [false, true], [true, true]] {
                let (stepped, scaler) = multi_task::<B>(overflows, sum);
                assert_eq!(stepped, overflows.map(|overflow| !overflow));
                let count = overflows.iter().filter(|overflow| **overflow).count();
                let last = scaler.last_step().unwrap();
                assert_eq!(last.non_finite_gradients, 2 * count);
                let (state, any) = (scaler.state(), count > 0);
                assert_eq!(state.scale(), if any { 512.0 } else { 1024.0 }, "once");
                assert_eq!(state.skipped_steps(), u64::from(any));
                assert_eq!(state.taken_steps(), u64::from(!any));
            }
        }
    }
    check::<Plain>();
    with_precision(Precision::F16, check::<A>);
}

#[test]
fn small_gradients_train_with_scaling_and_are_lost_without() {
    /// How far the parameters move in 20 steps on a tiny loss at a huge learning rate.
    fn moved<B: AutodiffBackend>(config: LossScaleConfig) -> Vec<f32> {
        let scaler = GradScaler::new(config).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut model = Mlp::<B>::new();
        let start = parameters(&model);
        for i in 0..20 {
            let grads = scaler.backward(model.loss(i) * 1e-6, &model);
            model = scaler.step(&mut optimizer, 1e5, model, grads).0;
            scaler.update().unwrap();
        }
        let end = parameters(&model);
        end.iter()
            .zip(start)
            .map(|(end, start)| end - start)
            .collect()
    }
    let expected = moved::<Plain>(LossScaleConfig::Disabled);
    let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
    assert!(norm(&expected) > 0.1, "it trains");
    with_precision(Precision::F16, || {
        let scaled = moved::<A>(LossScaleConfig::default());
        assert_close("scaled", Precision::F16, &scaled, &expected, 8.0);
        let lost = relative_error(&moved::<A>(LossScaleConfig::Disabled), &expected);
        assert!(lost > 0.5, "without scaling the error is {lost}");
    });
}

/// An implicit step on a gradient that is not finite, which has to be checked by the scaler in
/// scope.
#[track_caller]
fn assert_implicit_is_checked() {
    let other = scaler(256.0);
    in_scope(Precision::F16, &other, || {
        let model = Net::<A>::new();
        let grads = model.planted_loss().backward();
        assert!(GradientsParams::from_grads(grads, &model).is_empty());
    });
    assert_eq!(other.skipped_steps(), 1);
}

#[test]
fn a_loss_that_was_scaled_in_vain_leaves_other_backward_passes_alone() {
    with_precision(Precision::F16, || {
        let scaler = scaler(1024.0);
        let model = Net::<A>::new();
        let train = |dropped: bool| {
            let grads = scaler.backward(model.loss(), &model);
            if dropped {
                let _ = scaler.scale(model.loss());
            }
            unwrapped(scaler.step(&mut adam(), 1e-2, model.clone(), grads));
        };
        train(true);
        scaler.update().unwrap();
        assert_implicit_is_checked();

        let _ = scaler.scale(model.loss());
        scaler.load_state(scaler.state());
        assert_implicit_is_checked();

        // Burn panics for an untracked loss.
        let panic = catch_unwind(AssertUnwindSafe(|| {
            scaler.backward(values::<A, 1>([1], 3), &model)
        }));
        assert!(panic.is_err());
        assert_implicit_is_checked();

        // Another pass in its place, in FP32, ends the waiting.
        let _ = scaler.scale(model.loss());
        full_precision(|| model.loss().backward());
        assert_implicit_is_checked();

        // Where the pass runs in FP32 it scales nothing.
        let loss = scaler.scale(model.loss());
        full_precision(|| loss.backward());
        train(false);
        scaler.update().unwrap();
        assert_implicit_is_checked();
    });
}

#[test]
fn another_scalers_update_leaves_a_scaled_loss_alone() {
    with_precision(Precision::F16, || {
        let (ours, other) = (scaler(1024.0), scaler(2048.0));
        let (model, others) = (Net::<A>::new(), Net::<A>::new());
        let grads = other.backward(others.loss(), &others);
        let loss = ours.scale(model.planted_loss());
        unwrapped(other.step(&mut adam(), 1e-2, others, grads));
        other.update().unwrap();
        // The loss still belongs to the explicit protocol: it has gradients, although they are not
        // finite.
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        assert_eq!(grads.len(), 6);
        assert!(!ours.step(&mut adam(), 1e-2, model, grads).1.unwrap());
        assert_eq!(ours.update(), Ok(Transition::BackedOff));
    });
}

#[test]
fn a_scaled_loss_is_a_matter_of_its_own_thread() {
    with_precision(Precision::F16, || {
        let scaler = scaler(1024.0);
        let model = Net::<A>::new();
        let loss = scaler.scale(model.planted_loss());
        std::thread::scope(|threads| {
            threads.spawn(assert_implicit_is_checked).join().unwrap();
        });
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        assert_eq!(grads.len(), 6);
        assert!(!scaler.step(&mut adam(), 1e-2, model, grads).1.unwrap());
        scaler.update().unwrap();
        assert_eq!(scaler.skipped_steps(), 1);
    });
}

fn mixed_precision(precision: &str, scaler: Option<GradScaler>) -> MixedPrecision {
    MixedPrecision::new(precision.parse().unwrap(), scaler).unwrap()
}

#[test]
fn mixed_precision_is_made_from_strings() {
    for (given, precision, enabled) in [
        ("16-mixed", Precision::F16, true),
        ("fp16", Precision::F16, true),
        ("bf16-mixed", Precision::Bf16, false),
        ("BF16", Precision::Bf16, false),
        ("32", Precision::F32, false),
        ("auto", Precision::Auto, true),
    ] {
        let mixed = mixed_precision(given, None);
        assert_eq!(mixed.precision(), precision);
        assert_eq!(mixed.scaler().state().is_enabled(), enabled, "{given}");
        let scale = if enabled { 65536.0 } else { 1.0 };
        assert_eq!(mixed.scaler().loss_scale(), scale);
    }
    let given = scaler(256.0);
    let mixed = MixedPrecision::new(Precision::F16, Some(given.clone())).unwrap();
    given.set_scale(128.0).unwrap();
    assert_eq!(
        mixed.scaler().loss_scale(),
        128.0,
        "it is the scaler that was given"
    );

    for precision in [Precision::Bf16, Precision::F32] {
        let error = MixedPrecision::new(precision, Some(scaler(256.0))).unwrap_err();
        assert!(matches!(error, AmpError::LossScaleWithoutF16 { precision: p } if p == precision));
        let disabled = GradScaler::new(LossScaleConfig::Disabled).unwrap();
        assert!(MixedPrecision::new(precision, Some(disabled)).is_ok());
    }
}

#[test]
fn mixed_precision_does_the_steps_of_the_protocol() {
    // One scale for both, and an overflow in the middle.
    let factor = |i| if i == 4 { 1e7 } else { 1.0 };
    let by_hand = scaler(1024.0);
    let expected = with_precision(Precision::F16, || {
        let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
        for i in 0..10 {
            let loss = model.loss(i) * factor(i);
            model = step(&by_hand, &mut optimizer, model, loss).0;
        }
        all(&optimizer, &model)
    });

    let mixed = mixed_precision("16-mixed", Some(scaler(1024.0)));
    let (mut optimizer, mut model) = (adam(), Mlp::<A>::new());
    for i in 0..10 {
        // The precision is the plugin's, and not the region's or the device's.
        assert_eq!(forward_dtype(&mixed), DType::F16);
        let loss = mixed.forward_context(|| model.loss(i) * factor(i));
        let mut grads = mixed.backward(loss, &model);
        if i % 2 == 0 {
            mixed.unscale(&model, &mut grads).unwrap();
        }
        let (next, stepped) = unwrapped(mixed.optimizer_step(&mut optimizer, 1e-2, model, grads));
        assert_eq!(stepped, factor(i) == 1.0);
        model = next;
    }
    assert_eq!(all(&optimizer, &model), expected);
    assert_eq!(mixed.state(), by_hand.state());

    let none = &mut GradientsParams::new();
    let error = mixed.unscale(&model, none).unwrap_err();
    assert!(matches!(error, AmpError::NothingScaled { call: "unscale" }));
    let (same, refused) =
        mixed.optimizer_step(&mut optimizer, 1e-2, model.clone(), GradientsParams::new());
    assert_eq!(parameters(&same), parameters(&model));
    let error = refused.unwrap_err();
    assert!(matches!(error, AmpError::NothingScaled { call: "step" }));

    let restored = mixed_precision("16-mixed", None);
    assert_ne!(restored.state(), mixed.state());
    restored.load_state(mixed.state());
    assert_eq!(restored.state(), mixed.state());
    assert_eq!(restored.state().skipped_steps(), 1);
}

fn forward_dtype(mixed: &MixedPrecision) -> DType {
    let x = values::<A, 2>([4, 4], 1);
    mixed.forward_context(|| x.clone().matmul(x.require_grad()).dtype())
}

#[test]
fn mixed_precision_runs_the_forward_pass_in_its_precision() {
    for (given, dtype) in [
        ("16-mixed", DType::F16),
        ("bf16-mixed", DType::BF16),
        ("32", DType::F32),
    ] {
        let mixed = mixed_precision(given, None);
        assert_eq!(forward_dtype(&mixed), dtype);
        full_precision(|| assert_eq!(forward_dtype(&mixed), dtype));
        assert_eq!(mixed.forward_context(|| full_precision(|| 5)), 5);
        // `Auto` keeps the precision that the program has set.
        let auto = mixed_precision("auto", None);
        assert_eq!(mixed.forward_context(|| forward_dtype(&auto)), dtype);
        // A tensor that the policy made half is returned in FP32, with its values.
        let x = values::<A, 2>([4, 4], 1);
        let product = mixed.forward_context(|| x.clone().matmul(x.require_grad()));
        let output = mixed.convert_output(product.clone());
        assert_eq!(output.dtype(), DType::F32);
        assert_eq!(data(output), data(product));
    }
}

#[test]
fn floats_are_converted_however_nested_and_nothing_else_is() {
    fn check<B: Backend>() {
        let device = Default::default();
        let float = |dtype| values::<B, 2>([2, 3], 7).cast(FloatDType::from(dtype));
        let int = || Tensor::<B, 1, Int>::from_ints([1, -2, 3], &device);
        let bool = || Tensor::<B, 1, Bool>::from_bool(TensorData::from([true, false]), &device);
        let batch = || {
            (
                float(DType::F16),
                vec![
                    Some((float(DType::F64), int())),
                    None,
                    Some((float(DType::BF16), int())),
                ],
                [(float(DType::F32),), (float(DType::F16),)],
                (int(), bool(), Some(bool()), Vec::<Tensor<B, 2>>::new()),
            )
        };
        let mixed = mixed_precision("16-mixed", None);
        for (converted, dtype) in [
            (mixed.convert_input(batch()), DType::F32),
            (mixed.convert_output(batch()), DType::F32),
            (batch().convert_float(FloatDType::F16), DType::F16),
            (batch().convert_float(FloatDType::F64), DType::F64),
        ] {
            let (first, list, array, (ints, bools, some, empty)) = converted;
            let [one, none, other] = &list[..] else {
                panic!("three entries");
            };
            assert!(none.is_none() && empty.is_empty());
            let (one, other) = (one.as_ref().unwrap(), other.as_ref().unwrap());
            let floats = [&first, &one.0, &other.0, &array[0].0, &array[1].0];
            for (tensor, from) in floats.into_iter().zip([
                DType::F16,
                DType::F64,
                DType::BF16,
                DType::F32,
                DType::F16,
            ]) {
                assert_eq!(tensor.dtype(), dtype, "from {from:?}");
                let values = |t: Tensor<B, 2>| t.cast(FloatDType::F64).into_data();
                let expected = float(from).cast(FloatDType::from(dtype));
                assert_eq!(values(tensor.clone()), values(expected), "from {from:?}");
            }
            for tensor in [&ints, &one.1, &other.1] {
                assert_eq!(tensor.to_data(), int().into_data());
            }
            for tensor in [&bools, some.as_ref().unwrap()] {
                assert_eq!(tensor.to_data(), bool().into_data());
            }
        }
    }
    check::<Plain>();
    check::<Flex>();
    for precision in [Precision::F16, Precision::F32] {
        with_precision(precision, check::<A>);
    }
}

#[test]
fn the_backward_pass_may_come_after_the_region() {
    let expected = with_precision(Precision::F16, || {
        let model = Mlp::<A>::new();
        scaler(1024.0).scope(|| {
            let grads = (model.loss(7) * 1e-6).backward();
            mlp::gradients(&model, &GradientsParams::from_grads(grads, &model))
        })
    });
    let forward =
        |model: &Mlp<A>, factor: f32| with_precision(Precision::F16, || model.loss(7) * factor);
    let model = Mlp::<A>::new();

    // Implicit: scaled, checked and counted all the same.
    let implicit = scaler(1024.0);
    implicit.scope(|| {
        let grads = forward(&model, 1e-6).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        assert_eq!(mlp::gradients(&model, &grads), expected);
        let grads = forward(&model, 1e9).backward();
        assert!(GradientsParams::from_grads(grads, &model).is_empty());
    });
    let state = implicit.state();
    assert_eq!((state.taken_steps(), state.skipped_steps()), (1, 1));

    // Explicit: the loss is given to the scaler after the region.
    let explicit = scaler(1024.0);
    for (factor, taken) in [(1e-6, true), (1e9, false)] {
        let mut grads = explicit.backward(forward(&model, factor), &model);
        explicit.unscale(&model, &mut grads).unwrap();
        if taken {
            assert_eq!(mlp::gradients(&model, &grads), expected);
        }
        let stepped = explicit
            .step(&mut adam(), 1e-2, model.clone(), grads)
            .1
            .unwrap();
        assert_eq!(stepped, taken);
        explicit.update().unwrap();
    }
    assert_eq!(explicit.state(), state);

    // A loss that the policy did not compute in f16 is not scaled.
    for precision in [Precision::Bf16, Precision::F32] {
        let idle = scaler(1024.0);
        idle.scope(|| {
            let loss = with_precision(precision, || model.loss(7));
            loss.backward();
        });
        assert_eq!(idle.last_step(), None);
    }
}

#[test]
fn two_losses_may_be_scaled_before_their_backward_passes() {
    with_precision(Precision::F16, || {
        let (ours, others) = (scaler(1024.0), scaler(64.0));
        let (model, other) = (Mlp::<A>::new(), Mlp::<A>::new());
        let alone = |scaler: &GradScaler, factor: f32| {
            let grads = scaler.backward(model.loss(7) * factor, &model);
            unwrapped(scaler.step(&mut adam(), 1e-2, model.clone(), grads));
            scaler.update().unwrap();
        };
        let [first, second] = [1.0, 1e9].map(|factor| ours.scale(model.loss(7) * factor));
        let third = others.scale(other.loss(7));
        let first = GradientsParams::from_grads(first.backward(), &model);
        let mut second = GradientsParams::from_grads(second.backward(), &model);
        let third = GradientsParams::from_grads(third.backward(), &other);
        assert_eq!((first.len(), second.len(), third.len()), (4, 4, 4));
        assert!(others.step(&mut adam(), 1e-2, other, third).1.unwrap());
        others.update().unwrap();
        // The second loss overflows, so its step is skipped, although the first loss did not.
        ours.unscale(&model, &mut second).unwrap();
        assert!(
            !ours
                .step(&mut adam(), 1e-2, model.clone(), second)
                .1
                .unwrap()
        );
        ours.update().unwrap();
        assert_eq!((ours.loss_scale(), others.loss_scale()), (512.0, 64.0));
        alone(&ours, 1.0);
        assert_eq!(ours.state().taken_steps(), 1);
        drop(first);
    });
}

/// A scaled loss keeps its scaler, in whatever order the backward passes run.
#[test]
fn scaled_losses_may_be_run_back_in_any_order() {
    with_precision(Precision::F16, || {
        let (ours, others) = (scaler(1024.0), scaler(64.0));
        let (model, other) = (Net::<A>::new(), Net::<A>::new());
        let bad = ours.scale(model.planted_loss());
        let good = others.scale(other.loss());
        let mut good = GradientsParams::from_grads(good.backward(), &other);
        let bad = GradientsParams::from_grads(bad.backward(), &model);
        others.unscale(&other, &mut good).unwrap();
        assert!(others.step(&mut adam(), 1e-2, other, good).1.unwrap());
        assert!(!ours.step(&mut adam(), 1e-2, model, bad).1.unwrap());
        assert_eq!(others.update(), Ok(Transition::Kept));
        assert_eq!(ours.update(), Ok(Transition::BackedOff));
        let counts = |scaler: &GradScaler| {
            let state = scaler.state();
            (state.scale(), state.taken_steps(), state.skipped_steps())
        };
        assert_eq!(counts(&ours), (512.0, 0, 1));
        assert_eq!(counts(&others), (64.0, 1, 0));
    });
}

/// A scaled loss affects only its own backward pass: no other pass that comes before it, and none when
/// the loss is dropped.
#[test]
fn a_scaled_loss_has_no_claim_on_other_backward_passes() {
    with_precision(Precision::F16, || {
        let scaler = scaler(1024.0);
        let model = Net::<A>::new();
        drop(scaler.scale(model.loss()));
        assert_implicit_is_checked();

        let held = scaler.scale(model.planted_loss());
        assert_implicit_is_checked();
        // The loss still belongs to the explicit protocol: it has gradients, although they are not
        // finite.
        let grads = GradientsParams::from_grads(held.backward(), &model);
        assert_eq!(grads.len(), 6);
        assert!(!scaler.step(&mut adam(), 1e-2, model, grads).1.unwrap());
        assert_eq!(scaler.update(), Ok(Transition::BackedOff));
    });
}

/// The backward pass of a loss may run on another thread than the loss was scaled on.
#[test]
fn a_scaled_loss_takes_its_scaler_to_another_thread() {
    let scaler = scaler(1024.0);
    let model = Net::<A>::new();
    let loss = with_precision(Precision::F16, || scaler.scale(model.planted_loss()));
    let grads = std::thread::scope(|threads| {
        let run = || GradientsParams::from_grads(loss.backward(), &model);
        threads.spawn(run).join().unwrap()
    });
    assert_eq!(grads.len(), 6);
    assert!(!scaler.step(&mut adam(), 1e-2, model, grads).1.unwrap());
    assert_eq!(scaler.update(), Ok(Transition::BackedOff));
}

/// A tensor computed from a scaled loss is scaled like the loss.
#[test]
fn arithmetic_on_a_scaled_loss_keeps_its_scaler() {
    with_precision(Precision::F16, || {
        let model = Net::<A>::new();
        let gradients = |loss: &dyn Fn(&GradScaler) -> Tensor<A, 1>| {
            let scaler = scaler(1024.0);
            let mut grads = GradientsParams::from_grads(loss(&scaler).backward(), &model);
            scaler.unscale(&model, &mut grads).unwrap();
            let none = GradientsParams::new();
            let (_, refused) = scaler.step(&mut adam(), 1e-2, model.clone(), none);
            refused.unwrap_err();
            mlp::gradients(&model, &grads)
        };
        let expected = gradients(&|scaler| scaler.scale(model.loss() / 4.0));
        assert_eq!(
            gradients(&|scaler| scaler.scale(model.loss()) / 4.0),
            expected
        );
        assert_eq!(
            gradients(&|scaler| scaler.scale(model.loss()).reshape([1, 1]).reshape([1]) * 0.25),
            expected
        );
        let twice = gradients(&|scaler| scaler.scale(model.loss()) + scaler.scale(model.loss()));
        assert_close("twice", Precision::F16, &twice, &times(&expected, 8.0), 4.0);
    });
}

/// A sum of losses of two scalers has no single scale.
#[test]
fn losses_of_two_scalers_do_not_add_up() {
    with_precision(Precision::F16, || {
        let (ours, others) = (scaler(1024.0), scaler(64.0));
        let model = Net::<A>::new();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            ours.scale(model.loss()) + others.scale(model.loss())
        }));
        let panic = panic.unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        for part in ["two scalers", "scale the sum"] {
            assert!(text.contains(part), "{text}");
        }
    });
}

/// A module that calls the scaler while it is visited, as a user's own visitor may.
#[derive(Debug, Clone)]
struct Asking<B: Backend> {
    inner: Linear<B>,
    scaler: GradScaler,
}

impl<B: Backend> Module<B> for Asking<B> {
    type Record = <Linear<B> as Module<B>>::Record;

    fn collect_devices(&self, devices: burn::module::Devices<B>) -> burn::module::Devices<B> {
        self.inner.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self {
            inner: self.inner.fork(device),
            ..self
        }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self {
            inner: self.inner.to_device(device),
            ..self
        }
    }

    fn visit<V: burn::module::ModuleVisitor<B>>(&self, visitor: &mut V) {
        assert!(self.scaler.loss_scale() > 0.0);
        self.inner.visit(visitor);
    }

    fn map<M: burn::module::ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        Self {
            inner: self.inner.map(mapper),
            ..self
        }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self {
            inner: self.inner.load_record(record),
            ..self
        }
    }

    fn into_record(self) -> Self::Record {
        self.inner.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Asking<B> {
    type InnerModule = Asking<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        Asking {
            inner: self.inner.valid(),
            scaler: self.scaler.clone(),
        }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self {
            inner: Linear::from_inner(module.inner),
            scaler: module.scaler,
        }
    }
}

/// A device in f16 with anomaly detection.
fn watched() -> CheckedDevice {
    let device = CheckedDevice::new();
    let config = checked::config()
        .with_precision(Precision::F16)
        .with_anomaly_detection(true);
    config.apply::<Checked>(&device).unwrap();
    device
}

/// No lock of the scaler is held while a module is visited. Fails after a while instead of waiting
/// for ever.
#[test]
fn a_module_may_ask_the_scaler_while_it_is_visited() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let device = watched();
        type C = AmpAutodiff<Checked>;
        let scaler = scaler(1024.0);
        let model = Asking {
            inner: LinearConfig::new(4, 4).init::<C>(&device),
            scaler: scaler.clone(),
        };
        // An anomaly is placed at its parameter by visiting the module.
        let x = Tensor::<C, 2>::full([4, 4], 60000.0, &device);
        let loss = (model.inner.forward(x.clone()).matmul(x) * 1000.0).mean();
        let mut grads = scaler.backward(loss, &model);
        scaler.unscale(&model, &mut grads).unwrap();
        let stepped = scaler.step(&mut SgdConfig::new().init(), 0.1, model, grads);
        assert!(!stepped.1.unwrap());
        scaler.update().unwrap();
        assert!(!scaler.last_step().unwrap().anomalies.is_empty());
        done.send(()).unwrap();
    });
    let waited = is_done.recv_timeout(std::time::Duration::from_secs(60));
    assert!(waited.is_ok(), "{waited:?}");
}

#[test]
fn the_anomalies_of_a_discarded_step_are_no_part_of_the_next_one() {
    let device = watched();
    type C = AmpAutodiff<Checked>;
    let scaler = scaler(1024.0);
    let model: Linear<C> = LinearConfig::new(4, 4).init(&device);
    // Discarded before its backward pass.
    let x = Tensor::<C, 2>::full([4, 4], 60000.0, &device);
    let _large = x.clone().matmul(x);
    scaler.discard_step();

    let x = Tensor::<C, 2>::full([4, 4], 1.0, &device);
    let grads = scaler.backward(model.forward(x).mean(), &model);
    let (_, stepped) = scaler.step(&mut SgdConfig::new().init(), 0.1, model, grads);
    assert!(stepped.unwrap());
    scaler.update().unwrap();
    assert_eq!(scaler.last_step().unwrap().anomalies, []);
}

/// Two threads share a scaler: a pass is recorded with the scale that it was computed with, and
/// overflows at one scale back off once.
#[test]
fn passes_side_by_side_are_recorded_with_their_own_scale() {
    let device = CheckedDevice::new();
    checked::config()
        .with_precision(Precision::F16)
        .apply::<Checked>(&device)
        .unwrap();
    type C = AmpAutodiff<Checked>;
    let scaler = scaler(1024.0);
    let overflow = move |scaler: &GradScaler| {
        scaler.scope(|| {
            let w = Tensor::<C, 1>::zeros([1], &device).require_grad();
            w.clone().sqrt().backward();
        });
    };
    // Between the first pass and its outcome, another thread's pass overflows at the same scale.
    let (other, once) = (scaler.clone(), std::sync::Once::new());
    device.before_each(move |op, _| {
        if op == "float_into_data" {
            once.call_once(|| {
                device.without_hook();
                std::thread::scope(|threads| {
                    threads.spawn(|| overflow(&other)).join().unwrap();
                });
            });
        }
    });
    overflow(&scaler);
    let step = scaler.last_step().unwrap();
    assert_eq!((step.outcome, step.scale), (StepOutcome::Overflow, 1024.0));
    assert_eq!(scaler.skipped_steps(), 2, "both passes overflowed");
    assert_eq!(scaler.loss_scale(), 512.0);
    let scales: Vec<f32> = scaler.history().skipped().map(|(_, s)| s.scale).collect();
    assert_eq!(scales, [1024.0, 1024.0]);
    // The next overflow is at the new scale.
    overflow(&scaler);
    assert_eq!(scaler.loss_scale(), 256.0);
}

#[test]
fn clipping_gives_the_norm_and_refuses_the_gradients_of_another_model() {
    fn check<B: AutodiffBackend>() {
        let [model, other] = [(); 2].map(|()| Net::<B>::new());
        let grads =
            || full_precision(|| GradientsParams::from_grads(model.loss().backward(), &model));
        let values = |grads: &GradientsParams| mlp::gradients(&model, grads);
        let expected = values(&grads()).iter().map(|v| v * v).sum::<f32>().sqrt();
        for (max_norm, factor) in [(2.0 * expected, 1.0), (0.5 * expected, 0.5)] {
            let mut clipped = grads();
            let norm = clip_grad_norm(&model, &mut clipped, max_norm).unwrap();
            assert_eq!((norm.dtype(), norm.dims()), (DType::F32, [1]));
            let norm = data(norm)[0];
            assert!(
                (norm / expected - 1.0).abs() < 1e-5,
                "{norm} for {expected}"
            );
            let unclipped = times(&values(&grads()), factor);
            assert!(relative_error(&values(&clipped), &unclipped) < 1e-4);
        }

        // As after an overflow.
        let none = clip_grad_norm(&model, &mut GradientsParams::new(), 1.0).unwrap();
        assert_eq!(data(none), [0.0]);

        let mut mixed = grads();
        mixed.register(other.head.weight.id, other.head.weight.val().inner());
        for (mut foreign, of, text) in [
            (grads(), &other, foreign("clip_grad_norm", 6, 0)),
            (mixed, &model, foreign("clip_grad_norm", 7, 6)),
        ] {
            let before = (foreign.len(), values(&foreign));
            let error = clip_grad_norm(of, &mut foreign, 1e-3).unwrap_err();
            assert_eq!(error.to_string(), text);
            assert_eq!((foreign.len(), values(&foreign)), before);
        }
    }
    check::<Plain>();
    check::<A>();
    with_precision(Precision::F16, check::<A>);
}

/// One scaler for two models on two backends: the losses of both backends are checked.
#[test]
fn losses_on_two_backends_are_each_checked() {
    type Other = Autodiff<NdArray>;
    for bad in [None, Some(0), Some(1)] {
        let scaler = scaler(1024.0);
        let (model, other) = (Net::<Plain>::new(), Net::<Other>::new());
        // The gradients of such a sum are finite: only the loss is not.
        let plus = |loss| if bad == Some(loss) { f32::NAN } else { 0.0 };
        let first = scaler.scale(model.loss() + plus(0)).backward();
        let second = scaler.scale(other.loss() + plus(1)).backward();
        let first = GradientsParams::from_grads(first, &model);
        let second = GradientsParams::from_grads(second, &other);
        let stepped = [
            scaler.step(&mut adam(), 1e-2, model, first).1,
            scaler.step(&mut adam(), 1e-2, other, second).1,
        ];
        assert_eq!(stepped, [Ok(bad.is_none()), Ok(bad.is_none())], "{bad:?}");
        scaler.update().unwrap();
        assert_eq!(scaler.state().non_finite_losses(), u64::from(bad.is_some()));
    }
}
