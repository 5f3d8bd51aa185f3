//! Programs that are right in FP32 and overflow f16 at any loss scale. PyTorch skips each of their steps, for ever.

mod common;

use std::fs;

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::{AutodiffModule, Module};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::{relu, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn_amp::policy::Reason;
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpReport, GradScaler, LossScaleConfig,
    MixedPrecisionTrainerConfig, Precision, exceptions, full_precision,
};

use common::mlp::{Fill, values};
use shared::checked::{Checked, CheckedDevice};

type A = AmpAutodiff<Checked>;
type Recomputing = AmpAutodiff<Checked, BalancedCheckpointing>;

const STEPS: u64 = 300;

fn configured(config: AmpConfig, precision: Precision) -> CheckedDevice {
    let device = CheckedDevice::new();
    // Trials find kernels that sum in half, which is another matter.
    let config = config.with_trials(false).with_precision(precision);
    config.apply::<A>(&device).unwrap();
    device
}

/// Three layers. Each program uses them in its way.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    third: Linear<B>,
    norm: LayerNorm<B>,
}

const WIDTH: usize = 16;

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        let own = Default::default();
        let linear = |outputs| {
            LinearConfig::new(WIDTH, outputs)
                .with_bias(false)
                .init(&own)
        };
        let net = Self {
            first: linear(WIDTH),
            second: linear(WIDTH),
            third: linear(2),
            norm: LayerNormConfig::new(WIDTH).with_epsilon(1e-12).init(&own),
        };
        let norm = net.norm.clone();
        let net = Self {
            norm,
            ..net.map(&mut Fill(0))
        };
        net.fork(device)
    }
}

/// The loss of a step, on a batch of so many rows or a sequence of so many tokens.
type Loss<B> = fn(
    &Net<B>,
    step: u64,
    length: usize,
    device: &<B as burn_backend::backend::BackendTypes>::Device,
) -> Tensor<B, 1>;

/// What a layer cannot learn, so that a loss has a floor.
fn noise<B: Backend, const D: usize>(of: &Tensor<B, D>, step: u64) -> Tensor<B, D> {
    batch::<B, D>(of.dims(), step + 1000, &of.device()) * 0.8
}

/// What a program is to learn of its input: the first two columns, in noise.
fn target<B: Backend, const D: usize>(x: Tensor<B, D>, step: u64) -> Tensor<B, D> {
    let columns = x.narrow(D - 1, 0, 2);
    columns.clone() + noise(&columns, step)
}

/// Reproducible numbers on a device.
fn batch<B: Backend, const D: usize>(
    shape: [usize; D],
    step: u64,
    device: &B::Device,
) -> Tensor<B, D> {
    values::<B, D>(shape, step).to_device(device)
}

/// Queries and keys, so many times as large as usual.
fn heads<B: Backend>(net: &Net<B>, x: &Tensor<B, 3>, times: f64) -> [Tensor<B, 3>; 2] {
    [&net.first, &net.second].map(|layer| layer.forward(x.clone()) * times)
}

/// Queries times keys, before the scale.
fn attention<B: Backend>(
    net: &Net<B>,
    step: u64,
    length: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let x = batch::<B, 3>([2, length, WIDTH], step, device);
    // The scores of such heads are up to 100,000.
    let [q, k] = heads(net, &x, 60.0);
    let scores = q.matmul(k.swap_dims(1, 2)) / 40_000.0;
    let mixed = softmax(scores, 2).matmul(x.clone());
    let target = target(x, step);
    (net.third.forward(mixed) - target).powi_scalar(2).mean()
}

/// The areas of boxes of up to 340 pixels.
fn boxes<B: Backend>(net: &Net<B>, step: u64, length: usize, device: &B::Device) -> Tensor<B, 1> {
    let x = batch::<B, 2>([length, WIDTH], step, device);
    let sides = net.third.forward(relu(net.first.forward(x.clone()))).tanh() * 170.0 + 370.0;
    let [width, height] = [0, 1].map(|side| sides.clone().narrow(1, side, 1));
    let seen = x.clone() + noise(&x, step);
    let [true_width, true_height] =
        [0, 1].map(|side| seen.clone().narrow(1, side, 1) * 70.0 + 380.0);
    let [area, true_area] = [
        width.clone() * height.clone(),
        true_width.clone() * true_height.clone(),
    ];
    let smaller = |a: Tensor<B, 2>, b: Tensor<B, 2>| a.clone().mask_where(a.greater(b.clone()), b);
    let both = smaller(width, true_width) * smaller(height, true_height);
    let iou = both.clone() / (area + true_area - both);
    iou.neg().add_scalar(1.0).mean()
}

/// Padded rows with a huge value, which the loss never reads.
fn padded<B: Backend>(net: &Net<B>, step: u64, length: usize, device: &B::Device) -> Tensor<B, 1> {
    let x = batch::<B, 2>([length, WIDTH], step, device);
    let padding = Tensor::full([4, WIDTH], 4e4, device);
    let hidden = net.first.forward(Tensor::cat(vec![x.clone(), padding], 0));
    let out = net.third.forward(relu(net.second.forward(relu(hidden))));
    let target = target(x, step);
    (out.slice([0..length, 0..2]) - target)
        .powi_scalar(2)
        .mean()
}

/// A row of zeros before a layer norm whose epsilon is 1e-12: its gradient is a million times as large.
fn zero_row<B: Backend>(
    net: &Net<B>,
    step: u64,
    length: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let x = batch::<B, 2>([length, WIDTH], step, device);
    let zeros = Tensor::zeros([1, WIDTH], device);
    let x = Tensor::cat(vec![zeros, x], 0);
    // In heads, and back: what moves data is not to blame.
    let heads = net
        .first
        .forward(x.clone())
        .reshape([length + 1, 2, WIDTH / 2]);
    let rows = heads
        .swap_dims(0, 1)
        .swap_dims(0, 1)
        .reshape([length + 1, WIDTH]);
    let out = net.third.forward(net.norm.forward(rows));
    let target = target(x, step);
    (out - target).powi_scalar(2).sum()
}

/// A norm by hand of vectors whose values are near 300.
fn norm_by_hand<B: Backend>(
    net: &Net<B>,
    step: u64,
    length: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let x = batch::<B, 2>([length, WIDTH], step, device);
    let hidden = net.second.forward(relu(net.first.forward(x.clone()))) * 300.0;
    let norm = (hidden.clone() * hidden.clone()).sum_dim(1).sqrt() + 1.0;
    let target = target(x, step);
    (net.third.forward(hidden / norm) - target)
        .powi_scalar(2)
        .mean()
}

/// Linear attention: keys times values, summed over all tokens.
fn linear_attention<B: Backend>(
    net: &Net<B>,
    step: u64,
    length: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let tokens = 16 * length;
    let x = batch::<B, 2>([tokens, WIDTH], step, device);
    let [q, k] = [&net.first, &net.second].map(|layer| relu(layer.forward(x.clone())) + 5.0);
    let values = net.first.forward(x.clone()) + 9.0;
    let sums = k.clone().transpose().matmul(values);
    let weights = q.clone().matmul(k.sum_dim(0).transpose());
    let mixed = q.matmul(sums) / weights;
    let target = target(x, step);
    (net.third.forward(mixed) - target).powi_scalar(2).mean()
}

/// The programs, each with the exceptions that mend it.
fn programs<B: Backend>() -> [(&'static str, Loss<B>, &'static str); 6] {
    [
        ("attention", attention::<B>, "matmul over 16"),
        // Found although no step is skipped: what is divided by infinity is 0.
        ("boxes", boxes::<B>, "mul over 1"),
        ("norm by hand", norm_by_hand::<B>, "mul over 16"),
        ("padded", padded::<B>, "linear over 16"),
        ("zero row", zero_row::<B>, "linear over 16"),
        // Over tokens and over a width.
        ("linear attention", linear_attention::<B>, "matmul"),
    ]
}

/// The loss of a trained model over the batches of the training.
fn train<B>(loss: Loss<B>, device: &CheckedDevice, length: impl Fn(u64) -> usize) -> f32
where
    B: AutodiffBackend<Device = CheckedDevice>,
{
    let mut net = Net::<B>::new(device);
    let mut optimizer = AdamConfig::new().init();
    for step in 0..STEPS {
        let grads = loss(&net, step % 8, length(step), device).backward();
        let grads = GradientsParams::from_grads(grads, &net);
        net = optimizer.step(5e-3, net, grads);
    }
    mean_loss(&net, loss, device, length)
}

/// In FP32: the models are compared, and not the precision of a loss.
fn mean_loss<B: Backend<Device = CheckedDevice>>(
    net: &Net<B>,
    loss: Loss<B>,
    device: &CheckedDevice,
    length: impl Fn(u64) -> usize,
) -> f32 {
    let loss = |step| {
        loss(net, step, length(step), device)
            .into_scalar()
            .elem::<f32>()
    };
    full_precision(|| (0..8).map(loss).sum::<f32>() / 8.0)
}

fn f16(config: AmpConfig) -> CheckedDevice {
    configured(config, Precision::F16)
}

fn fp32() -> CheckedDevice {
    configured(AmpConfig::new(), Precision::F32)
}

/// The exceptions of the device: all of them overflowed.
fn listed(device: &CheckedDevice) -> Vec<String> {
    let list = exceptions::<A>(device).list();
    let overflowed = |e: &burn_amp::policy::Exception| e.reason == Reason::Overflowed;
    assert!(list.iter().all(overflowed), "{list:?}");
    list.iter().map(ToString::to_string).collect()
}

fn skipped(device: &CheckedDevice) -> u64 {
    GradScaler::of::<A>(device).skipped_steps()
}

const ROWS: usize = 96;

#[test]
fn programs_that_overflow_train_as_in_fp32() {
    for (name, loss, exception) in programs::<A>() {
        let exact = train(loss, &fp32(), |_| ROWS);
        let device = f16(AmpConfig::new());
        let ratio = train(loss, &device, |_| ROWS) / exact;
        println!(
            "{name}: {ratio} of FP32's loss, {} skipped, {:?}",
            skipped(&device),
            listed(&device)
        );
        assert!((ratio - 1.0).abs() < 0.01, "{name}: {ratio}");
        assert_eq!(listed(&device), [exception], "{name}");
        assert!(skipped(&device) <= 16, "{name}: {}", skipped(&device));
        let report = AmpReport::of::<A>(&device).unwrap().to_string();
        let line = format!("overflowed  {exception}: in FP32 now: no loss scale mends it");
        assert!(report.contains(&line), "{report}");

        let without = f16(AmpConfig::new().with_overflow_fallback(false));
        let ratio = train(loss, &without, |_| ROWS) / exact;
        assert!(ratio > 1.15, "{name}: {ratio} without the fallback");
        assert!(listed(&without).is_empty());
    }
}

#[test]
fn lengths_that_vary_make_few_exceptions() {
    let length = |step: u64| 64 + (step as usize * 37) % 64;
    for (name, loss, _) in programs::<A>() {
        let exact = train(loss, &fp32(), length);
        let device = f16(AmpConfig::new());
        let ratio = train(loss, &device, length) / exact;
        println!(
            "{name}: {ratio} of FP32's loss, {} skipped, {:?}",
            skipped(&device),
            listed(&device)
        );
        assert!((ratio - 1.0).abs() < 0.02, "{name}: {ratio}");
        let exceptions = listed(&device).len();
        assert!((1..=3).contains(&exceptions), "{name}: {exceptions}");
    }
}

#[test]
fn with_gradient_checkpointing_too() {
    for (name, loss, exception) in programs::<Recomputing>() {
        let exact = train(loss, &fp32(), |_| ROWS);
        let device = f16(AmpConfig::new());
        let ratio = train(loss, &device, |_| ROWS) / exact;
        assert!((ratio - 1.0).abs() < 0.01, "{name}: {ratio}");
        assert_eq!(listed(&device), [exception], "{name}");
    }
}

#[test]
fn in_a_window_of_a_trainer_and_in_the_explicit_protocol() {
    for (name, loss, exception) in programs::<A>() {
        let device = f16(AmpConfig::new());
        let config = MixedPrecisionTrainerConfig::new().with_precision(Precision::F16);
        let mut trainer = config
            .with_grads_accumulation(2)
            .init(Net::<A>::new(&device), AdamConfig::new().init(), 5e-3)
            .unwrap();
        for step in 0..400 {
            let forward =
                |net: &Net<A>, step: u64, device: CheckedDevice| loss(net, step % 8, ROWS, &device);
            trainer.train_step(step, device, forward).unwrap();
        }
        assert_eq!(listed(&device), [exception], "{name}, with a trainer");

        // A scaler of the program's own.
        let device = f16(AmpConfig::new());
        let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
        let mut net = Net::<A>::new(&device);
        let mut optimizer = AdamConfig::new().init();
        for step in 0..200 {
            let grads = scaler.scale(loss(&net, step % 8, ROWS, &device)).backward();
            let grads = GradientsParams::from_grads(grads, &net);
            (net, _) = scaler.step(&mut optimizer, 5e-3, net, grads);
            scaler.update().unwrap();
        }
        assert_eq!(
            listed(&device),
            [exception],
            "{name}, with the explicit protocol"
        );
    }
}

#[test]
fn a_resumed_run_skips_nothing_that_is_known() {
    let folder = tempfile::tempdir().unwrap();
    for (name, loss, exception) in programs::<A>() {
        let file = folder.path().join(name);
        let first = f16(AmpConfig::new());
        exceptions::<A>(&first).keep_in(&file).unwrap();
        train(loss, &first, |_| ROWS);
        assert!(fs::read_to_string(&file).unwrap().contains("overflowed"));

        let resumed = f16(AmpConfig::new());
        exceptions::<A>(&resumed).keep_in(&file).unwrap();
        assert_eq!(listed(&resumed), [exception], "{name}");
        let net = Net::<A>::new(&resumed);
        for step in 0..8 {
            loss(&net, step, ROWS, &resumed).backward();
        }
        // At its first scale, the gradients of these overflow.
        let usual = if name == "linear attention" { 8 } else { 0 };
        assert!(skipped(&resumed) <= usual, "{name}: {}", skipped(&resumed));
        // What overflowed in training would overflow in inference.
        let valid = net.valid();
        let loss: Loss<Amp<Checked>> = programs()
            .into_iter()
            .find(|program| program.0 == name)
            .unwrap()
            .1;
        assert!(
            loss(&valid, 0, ROWS, &resumed).into_scalar().is_finite(),
            "{name}"
        );
    }
}

/// An infinity of the program's own is no exception, and what is done about it is what was done before.
#[test]
fn what_is_not_finite_in_fp32_either_is_no_exception() {
    let divided = |net: &Net<A>, step: u64, device: &CheckedDevice| {
        let x = batch::<A, 2>([8, WIDTH], step, device);
        let y = net.first.forward(x);
        // In f16, and later in FP32: 0 / 0.
        let nothing = y.clone() - y.clone();
        (y / nothing).mean()
    };
    for fallback in [true, false] {
        let device = f16(AmpConfig::new().with_overflow_fallback(fallback));
        let (net, scaler) = (Net::<A>::new(&device), GradScaler::of::<A>(&device));
        for step in 0..30 {
            divided(&net, step, &device).backward();
        }
        let last = scaler.last_step().unwrap();
        assert_eq!(
            (last.stepped(), scaler.loss_scale(), skipped(&device)),
            (false, 65536.0, 30)
        );
        assert!(listed(&device).is_empty(), "{:?}", listed(&device));
    }
}

/// The gradient of a root at 0 is infinite in FP32, too: the exception that was made for it is withdrawn, and no other
/// operation is blamed.
#[test]
fn a_gradient_that_is_not_finite_in_fp32_either_is_no_exception() {
    let device = f16(AmpConfig::new());
    let (net, scaler) = (Net::<A>::new(&device), GradScaler::of::<A>(&device));
    let mut made = 0;
    for step in 0..40 {
        let x = Tensor::cat(
            vec![
                Tensor::zeros([1, WIDTH], &device),
                batch::<A, 2>([8, WIDTH], step, &device),
            ],
            0,
        );
        let hidden = net.second.forward(relu(net.first.forward(x)));
        let norm = hidden.powi_scalar(2).sum_dim(1).sqrt();
        drop(norm.mean().backward());
        made = made.max(listed(&device).len());
    }
    assert_eq!(
        (scaler.skipped_steps(), scaler.loss_scale(), made),
        (40, 1.0, 1)
    );
    assert!(listed(&device).is_empty(), "{:?}", listed(&device));
}

/// A softmax in FP32 that the program casts to half itself: behind the exception, a gradient in f16 still overflows at the
/// first loss scales.
#[test]
fn an_exception_stays_while_the_loss_scale_falls() {
    let attention = |net: &Net<A>, step: u64, length: usize, device: &CheckedDevice| {
        let x = batch::<A, 3>([2, length, WIDTH], step, device);
        let [q, k] = heads(net, &x, 120.0);
        let half = q.dtype();
        let scores = q.matmul(k.swap_dims(1, 2));
        let weights = softmax(scores.cast(DType::F32) / 160_000.0, 2).cast(half);
        let mixed = weights.matmul(x.clone() * 1000.0);
        let out = mixed.narrow(2, 0, 2) - target(x, step) * 1000.0;
        out.powi_scalar(2).sum() * 1e-5
    };
    let exact = train(attention, &fp32(), |_| ROWS);
    let device = f16(AmpConfig::new());
    let ratio = train(attention, &device, |_| ROWS) / exact;
    assert_eq!(listed(&device), ["matmul over 16"]);
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
    let skipped = skipped(&device);
    assert!((3..=16).contains(&skipped), "{skipped}");
}

/// What was never in f16 says nothing of an exception: an infinity in FP32 that a mask takes away.
#[test]
fn an_infinity_in_fp32_elsewhere_leaves_an_exception() {
    let device = f16(AmpConfig::new());
    let masked = |net: &Net<A>, step: u64, length: usize, device: &CheckedDevice| {
        let huge = Tensor::<A, 2>::full([length, 1], 3e38, device);
        let infinite = huge.clone() * huge;
        let none = infinite.clone().is_inf();
        boxes(net, step, length, device) + infinite.mask_fill(none, 0.0).mean()
    };
    train(masked, &device, |_| ROWS);
    assert_eq!(listed(&device), ["mul over 1"]);
}

#[test]
fn a_fixed_scale_and_frozen_exceptions_watch_nothing() {
    for (name, loss, _) in programs::<A>() {
        let fixed = f16(AmpConfig::new().with_loss_scale(LossScaleConfig::Fixed(1024.0)));
        let frozen = f16(AmpConfig::new());
        exceptions::<A>(&frozen).freeze(true);
        for device in [fixed, frozen] {
            let net = Net::<A>::new(&device);
            for step in 0..24 {
                loss(&net, step, ROWS, &device).backward();
            }
            assert!(listed(&device).is_empty(), "{name}: {:?}", listed(&device));
        }
    }
}

/// In a run that needs none, no exception is made, also where the first scale is too large.
#[test]
fn a_run_that_needs_no_exception_makes_none() {
    let usual = |net: &Net<A>, step: u64, length: usize, device: &CheckedDevice| {
        let x = batch::<A, 2>([length, WIDTH], step, device);
        let out = net.third.forward(relu(net.first.forward(x.clone()))) * 2.0;
        (out - x.slice([0..length, 0..2])).powi_scalar(2).sum()
    };
    let device = f16(AmpConfig::new());
    train(usual, &device, |_| ROWS);
    assert!(listed(&device).is_empty(), "{:?}", listed(&device));
    let skipped = skipped(&device);
    assert!((3..=12).contains(&skipped), "{skipped}");
}

/// A recurrent layer makes thousands of calls. A pass that no skipped step asked for looks at the first ones of each operation.
#[test]
fn a_pass_that_is_only_looked_at_reads_as_much_for_any_number_of_calls() {
    let reads = |calls: usize| {
        let device = configured(AmpConfig::new(), Precision::F16);
        let layer: Linear<A> = LinearConfig::new(WIDTH, WIDTH).init(&device);
        let step = || {
            device.reset();
            let x = Tensor::<A, 2>::ones([2, WIDTH], &device);
            let out = (0..calls).fold(x, |x, _| layer.forward(x).tanh());
            out.mean().backward();
            device.counts().reads.float
        };
        let before: Vec<_> = (0..8).map(|_| step()).collect();
        (before, step())
    };
    let (usual, looked_at) = reads(100);
    assert!(usual.iter().all(|reads| *reads == usual[0]), "{usual:?}");
    assert!(looked_at > usual[0] + 32, "{looked_at}");
    assert_eq!(reads(300), (usual, looked_at));
}
