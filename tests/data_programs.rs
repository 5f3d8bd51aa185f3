//! Small programs that half precision would make wrong. Data that nothing learns keeps its FP32 values, also where it
//! stands beside a model. Bounds, thresholds and dtypes that a program asks for mean what they mean in FP32.
//!
//! `xtask/pytorch/data.py` has the same programs, with the same numbers, in PyTorch.

mod common;

use std::f64::consts::TAU;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Flex;
use burn::module::Param;
use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::nn::{Linear, RmsNormConfig};
use burn::prelude::*;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::module::{conv_transpose1d, conv1d, conv2d, conv3d, linear, max_pool2d};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{DType, linalg};
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, Precision, full_precision, precision_of, with_precision,
};

use common::mlp::data;
use common::{HALVES, roundoff};

type A = AmpAutodiff<Flex>;
type I = Amp<Flex>;

/// A program whose values are those of FP32 bit for bit.
type OfData = (&'static str, fn() -> Vec<f32>);
/// A program with its exact values.
type OfBounds = (&'static str, fn() -> (Vec<f32>, Vec<f64>));

macro_rules! table {
    ($backend:ident: $($program:ident)*) => {
        vec![$((stringify!($program), $program::<$backend> as fn() -> _)),*]
    };
}

fn of_data<B: Backend>() -> Vec<OfData> {
    table![B: odometer rotary_angles shuffled_ids row_totals counted covariance mel_bank prefix_sums
        confusion smoothed_times window_variances structural_similarity moved_boxes
        normal_equations spectrum map_distances paths invoice net_worth luma interpolated calibrated
        neighbours histogram]
}

fn of_bounds<B: Backend>() -> Vec<OfBounds> {
    table![B: guarded_log confident masked_places masked_softmax padded_places peaks survival
        ones_like running_total running_total_like normalized floored_log wide_range fisher_z
        centred norm_by_hand norm_in_full_precision ordinal divergence unbroken logarithms
        cross_entropy likelihoods squashed entropy straight_through cumulative leaving_a_region
        shifted_scores ranked corners roots]
}

/// The products of these have an inner dimension of 1.
const OF_ONE_TERM: [&str; 2] = ["odometer", "rotary_angles"];

/// The device's configuration is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn data_that_nothing_learns_is_that_of_fp32() {
    let _alone = alone();
    for (name, program) in [of_data::<A>(), of_data::<I>()].concat() {
        let expected = with_precision(Precision::F32, program);
        assert!(
            expected.iter().all(|x| x.is_finite()),
            "{name}: {expected:?}"
        );
        for precision in HALVES {
            let found = with_precision(precision, program);
            assert_eq!(found, expected, "{name} in {precision}");
        }
    }
}

/// A contraction of the same data in half rounds it, unless it sums nothing.
#[test]
fn in_half_the_data_is_rounded() {
    let _alone = alone();
    let configure = |data_in_half| {
        let config = AmpConfig::new().with_precision(Precision::F32);
        let config = config.with_data_in_half(data_in_half);
        config.apply::<I>(&Default::default()).unwrap();
    };
    for (name, program) in of_data::<I>() {
        let expected = with_precision(Precision::F32, program);
        configure(true);
        let in_half = HALVES.map(|precision| with_precision(precision, program));
        configure(false);
        for (precision, found) in HALVES.into_iter().zip(in_half) {
            let is_exact = OF_ONE_TERM.contains(&name);
            assert_eq!(found == expected, is_exact, "{name} in {precision}");
        }
    }
}

#[test]
fn bounds_thresholds_and_dtypes_are_those_asked_for() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for (name, program) in [of_bounds::<A>(), of_bounds::<I>()].concat() {
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let (found, exact) = with_precision(precision, program);
            assert_eq!(found.len(), exact.len(), "{name}");
            // FP32 itself loses digits in 1 - p.
            let tolerance = 4.0 * roundoff(precision).max(2f64.powi(-13));
            wrong.extend(found.into_iter().zip(exact).filter_map(|(found, exact)| {
                let error = (f64::from(found) - exact).abs();
                let is_right = error <= tolerance * exact.abs();
                (!is_right).then(|| format!("{name} in {precision}: {found} for {exact}"))
            }));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A tensor with a value for each index.
fn tensor<B: Backend, const D: usize>(
    shape: [usize; D],
    value: impl Fn(usize) -> f64,
) -> Tensor<B, D> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| value(i) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn ones<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    Tensor::ones(shape, &Default::default())
}

fn one_hot<B: Backend>(classes: impl Iterator<Item = usize>, n: usize) -> Tensor<B, 2> {
    let classes: Vec<i64> = classes.map(|class| class as i64).collect();
    let classes = Tensor::<B, 1, Int>::from_ints(&classes[..], &Default::default());
    classes.one_hot::<2>(n).float()
}

/// These rows through a learned layer that changes no value: half, where half is in force.
fn learned<B: Backend>(rows: Tensor<B, 2>) -> Tensor<B, 2> {
    let [_, n] = rows.dims();
    let weight = Param::from_tensor(Tensor::eye(n, &rows.device()));
    let out = Linear { weight, bias: None }.forward(rows);
    let precision = precision_of::<Flex>(&Default::default()).unwrap();
    assert_eq!(out.dtype(), precision.compute_dtype().unwrap_or(DType::F32));
    out
}

// Data.

/// Positions times one.
fn odometer<B: Backend>() -> Vec<f32> {
    let positions = tensor::<B, 2>([24, 1], |i| (250_007 + 13 * i) as f64);
    data(positions.matmul(ones([1, 1])))
}

/// The angles of a rotary encoding.
fn rotary_angles<B: Backend>() -> Vec<f32> {
    let positions = tensor::<B, 2>([16, 1], |i| (5_021 + i) as f64);
    let frequencies = tensor([1, 8], |i| 10_000f64.powf(-(i as f64) / 8.0));
    data(positions.matmul(frequencies).cos())
}

/// Ids in another order, by a permutation matrix.
fn shuffled_ids<B: Backend>() -> Vec<f32> {
    let order = one_hot::<B>((0..24).map(|i| (5 * i + 3) % 24), 24);
    data(order.matmul(tensor([24, 1], |i| (40_009 + 7 * i) as f64)))
}

/// A sum by a product with ones.
fn row_totals<B: Backend>() -> Vec<f32> {
    let amounts = tensor::<B, 2>([6, 50], |i| (i * 7_919 % 100_003) as f64 * 0.01);
    data(amounts.matmul(ones([50, 1])))
}

/// A count by a product with ones.
fn counted<B: Backend>() -> Vec<f32> {
    let chosen = tensor::<B, 2>([4, 5_000], |i| (i * 37 % 101) as f64).greater_elem(19.5);
    data(chosen.float().matmul(ones([5_000, 1])))
}

/// Air pressures of three places.
fn covariance<B: Backend>() -> Vec<f32> {
    let pressures = tensor::<B, 2>([40, 3], |i| 1_013.0 + (i * 29 % 61) as f64 * 0.13);
    data(pressures.cov(0, 1))
}

/// A triangular filter bank in a batcher, before a learned layer.
fn mel_bank<B: Backend>() -> Vec<f32> {
    let power = tensor::<B, 2>([10, 65], |i| 4e4 * (1.0 + (0.7 * i as f64).sin()));
    let bank = tensor([65, 8], |i| {
        let distance = (i / 8) as f64 - (7 * (i % 8 + 1)) as f64;
        (1.0 - distance.abs() / 7.0).max(0.0)
    });
    let energies = power.matmul(bank);
    learned(energies.clone().log());
    data(energies)
}

/// Prefix sums by a triangular matrix.
fn prefix_sums<B: Backend>() -> Vec<f32> {
    let triangle = ones::<B, 2>([64, 64]).tril(0);
    data(triangle.matmul(tensor([64, 1], |i| (900 + i * 37 % 101) as f64)))
}

/// A confusion matrix, of the predictions of a learned layer.
fn confusion<B: Backend>() -> Vec<f32> {
    let label = |i: usize| i / 7 % 3;
    let score = |i: usize| (label(i) + usize::from(i.is_multiple_of(11))) % 3;
    let predictions = learned(one_hot::<B>((0..12_000).map(score), 3)).argmax(1);
    let predictions = predictions.squeeze_dim::<1>(1).one_hot::<2>(3).float();
    let labels = one_hot::<B>((0..12_000).map(label), 3);
    data(labels.transpose().matmul(predictions))
}

/// A moving average of time stamps.
fn smoothed_times<B: Backend>() -> Vec<f32> {
    let times = tensor::<B, 3>([1, 1, 40], |i| (300_000 + 17 * i + i % 3) as f64);
    let options = ConvOptions::new([1], [0], [1], 1);
    data(conv1d(times, tensor([1, 1, 5], |_| 0.2), None, options))
}

/// Weights of a window with a standard deviation of 1.5.
fn gaussian(size: usize) -> Vec<f64> {
    let weight = |i: usize| (-(i as f64 - (size / 2) as f64).powi(2) / 4.5).exp();
    let sum: f64 = (0..size).map(weight).sum();
    (0..size).map(|i| weight(i) / sum).collect()
}

/// The variances of the windows of an image: a mean of squares less the square of a mean.
fn window_variances<B: Backend>() -> Vec<f32> {
    let weights = gaussian(7);
    let window = tensor::<B, 4>([1, 1, 7, 7], |i| weights[i / 7] * weights[i % 7]);
    let image = tensor::<B, 4>([1, 1, 16, 16], |i| (20 + i * 73 % 211) as f64);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    let mean = |image| conv2d(image, window.clone(), None, options.clone());
    let of_image = mean(image.clone());
    data(mean(image.clone() * image) - of_image.clone() * of_image)
}

/// SSIM as burn-train computes it: two convolutions for each mean.
fn structural_similarity<B: Backend>() -> Vec<f32> {
    let weights = gaussian(11);
    let x = tensor::<B, 4>([1, 3, 16, 16], |i| (20 + i * 73 % 211) as f64);
    let y = x.clone() + tensor([1, 3, 16, 16], |i| (i * 31 % 17) as f64 - 8.0);
    let rows = tensor::<B, 4>([3, 1, 1, 11], |i| weights[i % 11]);
    let columns = rows.clone().reshape([3, 1, 11, 1]);
    let options = |padding| ConvOptions::new([1, 1], padding, [1, 1], 3);
    let mean = |image: Tensor<B, 4>| {
        let image = conv2d(image, rows.clone(), None, options([0, 5]));
        conv2d(image, columns.clone(), None, options([5, 0]))
    };
    let (mean_x, mean_y) = (mean(x.clone()), mean(y.clone()));
    let both = mean_x.clone() * mean_y.clone();
    let [square_x, square_y] = [mean_x, mean_y].map(|m| m.clone() * m);
    let var_x = (mean(x.clone() * x.clone()) - square_x.clone()).clamp_min(0.0);
    let var_y = (mean(y.clone() * y.clone()) - square_y.clone()).clamp_min(0.0);
    let (c1, c2) = (2.55f64.powi(2), 7.65f64.powi(2));
    let numerator = (both.clone() * 2.0 + c1) * ((mean(x * y) - both) * 2.0 + c2);
    let denominator = (square_x + square_y + c1) * (var_x + var_y + c2);
    data((numerator / denominator).mean())
}

/// The corners of boxes in an image of 3,840 pixels, by an affine matrix, before a learned layer.
fn moved_boxes<B: Backend>() -> Vec<f32> {
    let corners = tensor::<B, 2>([24, 3], |i| match i % 3 {
        0 => (i / 3 * 331 % 3_840) as f64 + 0.5,
        1 => (i / 3 * 197 % 2_160) as f64 + 0.25,
        _ => 1.0,
    });
    let (sin, cos) = 0.1f64.sin_cos();
    let affine = [cos, sin, 0.0, -sin, cos, 0.0, 120.25, 64.75, 1.0];
    let moved = corners.matmul(tensor([3, 3], |i| affine[i]));
    learned(moved.clone() / 3_840.0);
    data(moved)
}

/// The normal equations of a parabola through 30 points.
fn normal_equations<B: Backend>() -> Vec<f32> {
    let design = tensor::<B, 2>([30, 3], |i| ((i / 3) as f64).powi((i % 3) as i32));
    let heights = tensor::<B, 2>([30, 1], |t| 3.0 + 0.5 * t as f64 - 0.01 * (t * t) as f64);
    let transposed = design.clone().transpose();
    let both = vec![
        transposed.clone().matmul(design),
        transposed.matmul(heights),
    ];
    data(Tensor::cat(both, 1))
}

/// A discrete Fourier transform by a matrix: beside a tone of 1,000, around one of 0.25.
fn spectrum<B: Backend>() -> Vec<f32> {
    let wave = |frequency: usize, i: usize, shift: usize| {
        (TAU * ((frequency * i + shift) % 256) as f64 / 256.0).sin()
    };
    let signal = tensor::<B, 2>([256, 1], |i| {
        1_000.0 * wave(9, i, 0) + 0.25 * wave(40, i, 0)
    });
    let [sin, cos] = [0, 64].map(|shift| {
        let matrix = tensor::<B, 2>([17, 256], |i| wave(32 + i / 256, i % 256, shift));
        matrix.matmul(signal.clone())
    });
    data((sin.clone() * sin + cos.clone() * cos).sqrt())
}

/// Distances of places on a map in metres, by a² + b² - 2 a·b.
fn map_distances<B: Backend>() -> Vec<f32> {
    let a = tensor::<B, 2>([6, 2], |i| 712.25 + 3.5 * i as f64);
    let b = tensor::<B, 2>([5, 2], |i| 740.5 - 2.75 * i as f64);
    let [of_a, of_b] = [&a, &b].map(|x| (x.clone() * x.clone()).sum_dim(1));
    let squares = of_a + of_b.transpose();
    let products = a.matmul(b.transpose());
    data((squares - products * 2.0).clamp_min(0.0).sqrt())
}

/// The paths of eight steps in a graph.
fn paths<B: Backend>() -> Vec<f32> {
    let one = tensor::<B, 2>([12, 12], |i| {
        let (a, b) = (i / 12, i % 12);
        f64::from((5 * a + 3 * b).is_multiple_of(4) || b == (a + 1) % 12)
    });
    let square = |x: Tensor<B, 2>| x.clone().matmul(x);
    data(square(square(square(one))))
}

/// Quantities times prices.
fn invoice<B: Backend>() -> Vec<f32> {
    let quantities = tensor::<B, 2>([5, 8], |i| (i * 17 % 41) as f64);
    let prices = tensor([8, 2], |i| (i * 53 % 97) as f64 + 0.99);
    data(quantities.matmul(prices))
}

/// A matrix times a vector.
fn net_worth<B: Backend>() -> Vec<f32> {
    let holdings = tensor::<B, 2>([4, 6], |i| (i * 19 % 113) as f64);
    let prices = tensor::<B, 1>([6], |i| 101.37 + 12.11 * i as f64);
    data(linalg::matvec::<B, 2, 1, _>(holdings, prices))
}

/// The brightness of pixels, by a convolution of one pixel.
fn luma<B: Backend>() -> Vec<f32> {
    let weights = [0.299, 0.587, 0.114];
    let image = tensor::<B, 4>([1, 3, 8, 8], |i| (i * 89 % 256) as f64);
    let weights = tensor([1, 3, 1, 1], |i| weights[i]);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    data(conv2d(image, weights, None, options))
}

/// Altitudes at twice as many places, by a transposed convolution.
fn interpolated<B: Backend>() -> Vec<f32> {
    let altitudes = tensor::<B, 3>([1, 1, 12], |i| 4_013.25 + (37 * i) as f64);
    let weights = tensor([1, 1, 3], |i| [0.5, 1.0, 0.5][i]);
    let options = ConvTransposeOptions::new([2], [0], [0], [1], 1);
    data(conv_transpose1d(altitudes, weights, None, options))
}

/// The counts of three sensors, by a linear function with an offset.
fn calibrated<B: Backend>() -> Vec<f32> {
    let counts = tensor::<B, 2>([8, 3], |i| (12_345 + i * 631 % 1_009) as f64);
    let gains = tensor([3, 3], |i| match i % 4 {
        0 => 1.0625,
        _ => 0.01 * (i + 1) as f64,
    });
    let offset = tensor([3], |i| 7.5 - i as f64);
    data(linear(counts, gains, Some(offset)))
}

/// The sums of the neighbours in a volume.
fn neighbours<B: Backend>() -> Vec<f32> {
    let volume = tensor::<B, 5>([1, 1, 5, 5, 5], |i| (900 + i * 41 % 127) as f64);
    let options = ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
    data(conv3d(volume, ones([1, 1, 3, 3, 3]), None, options))
}

/// The weights in each of six bins.
fn histogram<B: Backend>() -> Vec<f32> {
    let bins = one_hot::<B>((0..600).map(|i| i * i % 6), 6);
    let weights = tensor([600, 1], |i| 61.3 + (i * 7 % 13) as f64);
    data(bins.transpose().matmul(weights))
}

// Bounds, thresholds and dtypes.

/// A row in half, where half is in force, of values that both half dtypes hold.
fn half<B: Backend, const N: usize>(values: [f64; N]) -> Tensor<B, 2> {
    learned(tensor([1, N], |i| values[i]))
}

/// clamp(eps, 1 - eps) of a sigmoid before a logarithm.
fn guarded_log<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let (logits, eps) = ([12.0f64, -12.0, 0.5, -2.0], 1e-4);
    let p = sigmoid(half::<B, 4>(logits)).clamp(eps, 1.0 - eps);
    let exact = logits.map(|x| 1.0 / (1.0 + (-x).exp()));
    let exact = exact.map(|p| (1.0 - p.clamp(eps, 1.0 - eps)).ln());
    (data((p.neg() + 1.0).log()), exact.into())
}

/// A threshold that half rounds to 1.
fn confident<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let values = half::<B, 4>([1.0, 0.99609375, 0.5, -1.0]);
    let chosen = values.greater_elem(1.0 - 2e-4);
    (data(chosen.float()), vec![1.0, 0.0, 0.0, 0.0])
}

fn mask<B: Backend>(places: [bool; 4]) -> Tensor<B, 2, Bool> {
    Tensor::from_data([places], &Default::default())
}

/// A mask of -12,345, found again by comparison.
fn masked_places<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let scores = half::<B, 4>([1.5, -2.0, 0.25, 8.0]);
    let filled = scores.mask_fill(mask([false, true, false, true]), -12_345.0);
    let above = filled.clone().greater_elem(-12_345.0);
    let found = [above, filled.equal_elem(-12_345.0)].map(|places| data(places.float()));
    let exact = vec![1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0];
    (found.concat(), exact)
}

/// A mask of -1e9.
fn masked_softmax<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let scores = half::<B, 4>([2.0, 1.0, 0.5, -1.0]);
    let filled = scores.mask_fill(mask([false, true, false, false]), -1e9);
    let exact = [2.0, f64::NEG_INFINITY, 0.5, -1.0].map(f64::exp);
    let sum: f64 = exact.iter().sum();
    (data(softmax(filled, 1)), exact.map(|x| x / sum).into())
}

/// A border of -12,345, found again by comparison.
fn padded_places<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let padded = half::<B, 2>([1.5, -2.0]).pad((1, 1, 0, 0), -12_345.0);
    let border = padded.equal_elem(-12_345.0);
    (data(border.float()), vec![1.0, 0.0, 0.0, 1.0])
}

/// What is left after 12 steps that each keep an eighth, in a product that begins with ones.
fn survival<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let kept = half::<B, 1>([0.125]);
    let ones = Tensor::<B, 2>::ones([1, 1], &Default::default());
    let left = (0..12).fold(ones, |left, _| left * kept.clone());
    (data(left.log()), vec![12.0 * 0.125f64.ln()])
}

/// The places where a mean over channels is the largest of its neighbourhood.
fn peaks<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let channels = half::<B, 8>([1.0, 3.0, 2.0, 6.0, 1.25, 3.5, 2.25, 7.0]).reshape([1, 2, 1, 4]);
    let heat = channels.mean_dim(1) / 3.0;
    let largest = max_pool2d(heat.clone(), [1, 3], [1, 1], [0, 1], [1, 1], false);
    (data(largest.equal(heat).float()), vec![0.0, 1.0, 0.0, 1.0])
}

/// A count, and prefix sums, in the dtype of a half tensor.
fn ones_like<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let one = half::<B, 2>([1.0, 2.0]).slice([0..1, 0..1]);
    let many = one.repeat_dim(1, 5_003);
    let count = data(many.ones_like().sum());
    let sums = data(many.full_like(0.25).cumsum(1));
    (vec![count[0], sums[5_002]], vec![5_003.0, 1_250.75])
}

/// Zeros, and 700 times a tensor.
fn total<B: Backend>(zeros: Tensor<B, 2>, half: &Tensor<B, 2>) -> (Vec<f32>, Vec<f64>) {
    let total = (0..700).fold(zeros, |total, _| total + half.clone());
    (data(total), vec![2_100.0, 350.0])
}

/// A total that begins as FP32 zeros.
fn running_total<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let zeros = Tensor::<B, 2>::zeros([1, 2], &Default::default());
    total(zeros, &half::<B, 2>([3.0, 0.5]))
}

/// A total that begins as `zeros_like` of a half tensor, in full precision.
fn running_total_like<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let half = half::<B, 2>([3.0, 0.5]);
    full_precision(|| total(half.zeros_like(), &half))
}

/// An epsilon of 1e-8 in a quotient.
fn normalized<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let values = [0.0, 0.0, 0.0, 0.0, 3.0, -4.0, 0.5, 1.0];
    let half = learned(tensor::<B, 2>([2, 4], |i| values[i]));
    let largest = half.clone().abs().max_dim(1) + 1e-8;
    (data(half / largest), values.map(|x| x / 4.0).into())
}

/// A floor of 1e-12 before a logarithm.
fn floored_log<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let floored = half::<B, 4>([0.0, 0.5, 2.0, 12.0]).clamp_min(1e-12);
    let exact = [1e-12, 0.5, 2.0, 12.0].map(f64::ln);
    (data(floored.log()), exact.into())
}

/// Bounds of 1e-7 and 1e7.
fn wide_range<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let bounded = half::<B, 4>([0.0, 0.25, 3.0, 4_992.0]).clamp(1e-7, 1e7);
    let exact = [1e-7, 0.25, 3.0, 4_992.0].map(f64::ln);
    (data(bounded.log()), exact.into())
}

/// A correlation bounded by 1 - 2e-4 before an inverse hyperbolic tangent.
fn fisher_z<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let bound = 1.0 - 2e-4;
    let bounded = half::<B, 4>([1.0, 0.5, -0.25, -1.0]).clamp(-bound, bound);
    let exact = [bound, 0.5, -0.25, -bound].map(f64::atanh);
    (data(bounded.atanh()), exact.into())
}

/// Values that both half dtypes hold.
fn value(i: usize) -> f64 {
    100.0 + (i * i % 7) as f64 * 0.5
}

/// A mean in FP32, cast to the dtype of the tensor that it is subtracted from.
fn centred<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let half = learned(tensor::<B, 2>([1, 32], value));
    let mean = half.clone().cast(DType::F32).mean_dim(1);
    let mean = mean.cast(half.dtype());
    let exact = (0..32).map(value).sum::<f64>() / 32.0;
    let exact = (0..32).map(|i| value(i) - exact).collect();
    (data(half - mean), exact)
}

/// The values over their root mean square.
fn exact_norm(epsilon: f64) -> Vec<f64> {
    let square: f64 = (0..32).map(|i| value(i).powi(2)).sum();
    let root = (square / 32.0 + epsilon).sqrt();
    (0..32).map(|i| value(i) / root).collect()
}

/// A root mean square in FP32, cast to the dtype of the tensor.
fn norm_by_hand<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let half = learned(tensor::<B, 2>([1, 32], value));
    let wide = half.clone().cast(DType::F32);
    let root = (wide.square().mean_dim(1) + 1e-6).sqrt();
    let root = root.cast(half.dtype());
    (data(half / root), exact_norm(1e-6))
}

/// Burn's RMS norm in full precision.
fn norm_in_full_precision<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let norm = RmsNormConfig::new(32).init::<B>(&Default::default());
    let half = learned(tensor::<B, 2>([1, 32], value));
    let found = full_precision(|| data(norm.forward(half)));
    (found, exact_norm(norm.epsilon))
}

/// The probabilities of the classes of an ordinal regression: differences of sigmoids.
fn ordinal<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let thresholds = [0.5, 1.0, 1.5, 2.0];
    let scores = learned(tensor::<B, 2>([128, 1], |i| 4.0 + 0.5 * (i % 4) as f64));
    let thresholds_of = Param::from_tensor(tensor::<B, 2>([1, 4], |i| thresholds[i]));
    let below = sigmoid(scores - thresholds_of.val());
    let classes = below.clone().slice([0..128, 0..3]) - below.slice([0..128, 1..4]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let exact = (0..128).flat_map(|i| {
        let score = 4.0 + 0.5 * (i % 4) as f64;
        (0..3).map(move |k| sigmoid(score - thresholds[k]) - sigmoid(score - thresholds[k + 1]))
    });
    (data(classes), exact.collect())
}

/// The divergence of a normal distribution from the standard one.
fn divergence<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let (means, logs) = ([0.0625, -0.03125, 0.125], [0.0078125, -0.03125, 0.01171875]);
    let (mean, log) = (half::<B, 3>(means), half::<B, 3>(logs));
    let parts = log.clone() + 1.0 - mean.square() - log.exp();
    let exact = means
        .iter()
        .zip(logs)
        .map(|(mean, log)| 1.0 + log - mean * mean - log.exp());
    (data(parts), exact.collect())
}

/// The roots of what confident probabilities leave.
fn roots<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<B, 2>([9.0, 1.0]));
    let exact = [9.0, 1.0].map(|x: f64| (1.0 / (1.0 + x.exp())).sqrt());
    (data((p.neg() + 1.0).sqrt()), exact.into())
}

/// What is left of 1 after 64 breaks of a small part, and what a break takes in the mean.
fn unbroken<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let part = 0.0009765625;
    let parts = half::<B, 1>([part]).repeat_dim(1, 64);
    let rest = parts.neg() + 1.0;
    let (left, lost) = (data(rest.clone().cumprod(1)), data(rest.mean() - 1.0));
    (vec![left[63], lost[0]], vec![(1.0 - part).powi(64), -part])
}

/// Logarithms of one plus and one minus a small number, and of a shift by two scalars.
fn logarithms<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let x = half::<B, 1>([0.001953125]);
    let found = [x.clone() + 1.0, x.clone().neg() + 1.0, x - 1.0 + 2.0];
    let exact = [1.001953125f64, 0.998046875, 1.001953125];
    (
        found.map(|x| data(x.log())).concat(),
        exact.map(f64::ln).into(),
    )
}

/// A binary cross entropy of probabilities, by Burn's loss.
fn cross_entropy<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, -9.0, 9.0, -2.0];
    let p = sigmoid(half::<B, 4>(logits)).reshape([4]);
    let targets = Tensor::<B, 1, Int>::from_ints([0, 1, 1, 0], &p.device());
    let loss = BinaryCrossEntropyLossConfig::new().init(&p.device());
    let exact = [9.0, 9.0, -9.0, -2.0].map(|x: f64| x.exp().ln_1p());
    let mean = exact.iter().sum::<f64>() / 4.0;
    (data(loss.forward(p, targets)), vec![mean])
}

/// The logarithms of probabilities, and of what they leave, of two of four columns.
fn likelihoods<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<B, 4>([-20.0, -3.0, 10.0, 0.5]));
    let few = p.clone().slice([0..1, 0..2]).log();
    let rest = (p.neg() + 1.0).slice([0..1, 2..4]).log();
    let exact = [20.0, 3.0, 10.0, 0.5].map(|x: f64| -x.exp().ln_1p());
    ([data(few), data(rest)].concat(), exact.into())
}

/// The logarithm of the slope of a hyperbolic tangent, as for the density of a bounded action.
fn squashed<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let x = [3.0f64, -5.0, 0.25, 1.0];
    let action = half::<B, 4>(x).tanh();
    let slope = (action.square().neg() + 1.0 + 1e-6).log();
    let exact = x.map(|x| (1.0 / x.cosh().powi(2) + 1e-6).ln());
    (data(slope), exact.into())
}

/// The entropies of confident decisions.
fn entropy<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, -9.0, 10.0, -3.0];
    let p = sigmoid(half::<B, 4>(logits));
    let rest = p.clone().neg() + 1.0;
    let entropy = (p.clone() * p.log() + rest.clone() * rest.log()).neg();
    let exact = logits.map(|x| {
        let [p, rest] = [x, -x].map(|x| 1.0 / (1.0 + (-x).exp()));
        -(p * p.ln() + rest * rest.ln())
    });
    (data(entropy), exact.into())
}

/// A decision that has the gradient of its probability.
fn straight_through<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<B, 4>([1.0, 0.25, -0.5, -3.0]));
    let hard = p.clone().greater_elem(0.5).float();
    let decision = hard - p.clone().detach() + p.clone();
    let nothing = p.clone().log() - p.detach().log();
    let exact = vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    ([data(decision.round()), data(nothing)].concat(), exact)
}

/// The probabilities of three classes in order, with the bounds 1 and 0.
fn cumulative<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let thresholds = Param::from_tensor(tensor::<B, 2>([1, 2], |i| i as f64 * 0.5));
    let scores = learned(tensor::<B, 2>([64, 1], |_| 6.0));
    let above = sigmoid(scores - thresholds.val());
    let zeros = Tensor::zeros([64, 1], &above.device());
    let upper = Tensor::cat(vec![ones([64, 1]), above.clone()], 1);
    let classes = upper - Tensor::cat(vec![above, zeros], 1);
    let [first, second] = [6.0f64, 5.5].map(|x| 1.0 / (1.0 + (-x).exp()));
    (
        data(classes),
        [1.0 - first, first - second, second].repeat(64),
    )
}

/// Probabilities whose logarithms are taken where half precision has ended.
fn leaving_a_region<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<B, 2>([9.0, -2.0]));
    let logs = full_precision(|| data((p.reshape([2]).neg() + 1.0).log()));
    (logs, [9.0, -2.0].map(|x: f64| -x.exp().ln_1p()).into())
}

/// A softmax of scores that are all far from zero.
fn shifted_scores<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let scores = [0.296875f64, 0.703125];
    let exact = scores.map(f64::exp);
    let sum: f64 = exact.iter().sum();
    (
        data(softmax(half::<B, 2>(scores) + 100.0, 1)),
        exact.map(|x| x / sum).into(),
    )
}

/// The order of confident probabilities, and whether one is above another.
fn ranked<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<B, 4>([8.5, 11.0, 9.0, 10.0]));
    let largest = p.clone().argmax(1).float();
    let [first, second] = [0, 1].map(|i| p.clone().slice([0..1, i..i + 1]));
    let above = second.greater(first).float();
    // The values are those of the half tensor.
    let (values, places) = p.clone().topk_with_indices(2, 1);
    let same = values.equal(p.clone().gather(1, places.clone())).float();
    let order = p.argsort_descending(1).float();
    let found = [order, largest, above, places.float(), same].map(data);
    let exact = [1.0, 3.0, 2.0, 0.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0];
    (found.concat(), exact.into())
}

/// The widths of small boxes, from their corners.
fn corners<B: Backend>() -> (Vec<f32>, Vec<f64>) {
    let (centre, width) = ([1.0f64, -0.5], [-4.546875f64, -5.25]);
    let boxes = sigmoid(half::<B, 4>([centre[0], centre[1], width[0], width[1]]));
    let [centres, widths] = [0, 2].map(|i| boxes.clone().slice([0..1, i..i + 2]));
    let lower = centres.clone() - widths.clone() * 0.5;
    let upper = centres + widths / 2.0;
    let exact = width.map(|x| 1.0 / (1.0 + (-x).exp()));
    (data(upper - lower), exact.into())
}
