// The programs, independent of the release of Burn. A module that includes this file has `Tensor`, `device`, `data`,
// `full_precision` and `assert_in_force`.

use std::f64::consts::TAU;

use burn::module::Param;
use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::{Linear, PaddingConfig2d, RmsNormConfig};
use burn::tensor::activation::{relu, sigmoid, softmax, softmin};
use burn::tensor::module::{conv_transpose1d, conv1d, conv2d, conv3d, linear};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{Bool, DType, Distribution, IndexingUpdateOp, Int, TensorData};

/// A program whose values are those of FP32 bit for bit.
type OfData = (&'static str, fn() -> Vec<f32>);
/// A function of half values.
type OfHalf = (&'static str, fn(Tensor<2>) -> Tensor<2>);
/// A program with its exact values.
type OfBounds = (&'static str, fn() -> (Vec<f32>, Vec<f64>));

/// The programs and their names.
macro_rules! table {
    ($($program:ident)*) => {
        vec![$((stringify!($program), $program as fn() -> _)),*]
    };
}

/// Programs of data that nothing learns.
pub fn of_data() -> Vec<OfData> {
    table![odometer rotary_angles shuffled_ids row_totals counted covariance mel_bank prefix_sums
        confusion smoothed_times window_variances structural_similarity moved_boxes
        normal_equations spectrum map_distances paths invoice net_worth luma interpolated calibrated
        neighbours histogram]
}

/// The products of these have an inner dimension of 1.
pub const OF_ONE_TERM: [&str; 2] = ["odometer", "rotary_angles"];

/// Programs of values that a model computes.
pub fn of_bounds() -> Vec<OfBounds> {
    table![guarded_log confident masked_places masked_softmax padded_places peaks survival
        ones_like running_total running_total_like normalized floored_log wide_range fisher_z
        centred norm_by_hand norm_in_full_precision ordinal divergence unbroken logarithms
        cross_entropy likelihoods squashed entropy straight_through cumulative leaving_a_region
        shifted_scores ranked corners roots inverse_sigmoid moved
        filled ignored odds bins kept_largest floored_twice halves capped
        guarded quotients thresholds box_areas ordinal_likelihood
        parts guarded_quotients peaks_of_data joined gated_twice remembered
        by_hand masked perturbed denormalized nearly_one]
}

/// The values that are further from the exact ones than half precision with this roundoff allows.
pub fn wrong(found: &[f32], exact: &[f64], roundoff: f64) -> Vec<String> {
    assert_eq!(found.len(), exact.len());
    // FP32 itself loses digits in 1 - p.
    let tolerance = 4.0 * roundoff.max(2f64.powi(-13));
    let values = found.iter().zip(exact);
    let wrong = values.filter(|(found, exact)| {
        let error = (f64::from(**found) - **exact).abs();
        let is_right = error <= tolerance * exact.abs();
        !is_right
    });
    wrong.map(|(found, exact)| format!("{found} for {exact}")).collect()
}

/// A tensor with a value for each index.
fn tensor<const D: usize>(shape: [usize; D], value: impl Fn(usize) -> f64) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| value(i) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

fn ones<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::ones(shape, &device())
}

fn one_hot(classes: impl Iterator<Item = usize>, n: usize) -> Tensor<2> {
    let classes: Vec<i64> = classes.map(|class| class as i64).collect();
    let classes = Tensor::<1, Int>::from_ints(&classes[..], &device());
    classes.one_hot::<2>(n).float()
}

/// These rows through a learned layer that changes no value: half, where half is in force.
pub fn learned(rows: Tensor<2>) -> Tensor<2> {
    let [_, n] = rows.dims();
    let weight = Param::from_tensor(Tensor::eye(n, &rows.device()));
    let out = Linear { weight, bias: None }.forward(rows);
    assert_in_force(&out);
    out
}

// Data.

/// Positions times one.
fn odometer() -> Vec<f32> {
    let positions = tensor::<2>([24, 1], |i| (250_007 + 13 * i) as f64);
    data(positions.matmul(ones([1, 1])))
}

/// The angles of a rotary encoding.
fn rotary_angles() -> Vec<f32> {
    let positions = tensor::<2>([16, 1], |i| (5_021 + i) as f64);
    let frequencies = tensor([1, 8], |i| 10_000f64.powf(-(i as f64) / 8.0));
    data(positions.matmul(frequencies).cos())
}

/// Ids in another order, by a permutation matrix.
fn shuffled_ids() -> Vec<f32> {
    let order = one_hot((0..24).map(|i| (5 * i + 3) % 24), 24);
    data(order.matmul(tensor([24, 1], |i| (40_009 + 7 * i) as f64)))
}

/// A sum by a product with ones.
fn row_totals() -> Vec<f32> {
    let amounts = tensor::<2>([6, 50], |i| (i * 7_919 % 100_003) as f64 * 0.01);
    data(amounts.matmul(ones([50, 1])))
}

/// A count by a product with ones.
fn counted() -> Vec<f32> {
    let chosen = tensor::<2>([4, 5_000], |i| (i * 37 % 101) as f64).greater_elem(19.5);
    data(chosen.float().matmul(ones([5_000, 1])))
}

/// Air pressures of three places.
fn covariance() -> Vec<f32> {
    let pressures = tensor::<2>([40, 3], |i| 1_013.0 + (i * 29 % 61) as f64 * 0.13);
    data(pressures.cov(0, 1))
}

/// A triangular filter bank in a batcher, before a learned layer.
fn mel_bank() -> Vec<f32> {
    let power = tensor::<2>([10, 65], |i| 4e4 * (1.0 + (0.7 * i as f64).sin()));
    let bank = tensor([65, 8], |i| {
        let distance = (i / 8) as f64 - (7 * (i % 8 + 1)) as f64;
        (1.0 - distance.abs() / 7.0).max(0.0)
    });
    let energies = power.matmul(bank);
    learned(energies.clone().log());
    data(energies)
}

/// Prefix sums by a triangular matrix.
fn prefix_sums() -> Vec<f32> {
    let triangle = ones::<2>([64, 64]).tril(0);
    data(triangle.matmul(tensor([64, 1], |i| (900 + i * 37 % 101) as f64)))
}

/// A confusion matrix, of the predictions of a learned layer.
fn confusion() -> Vec<f32> {
    let label = |i: usize| i / 7 % 3;
    let score = |i: usize| (label(i) + usize::from(i.is_multiple_of(11))) % 3;
    let predictions = learned(one_hot((0..12_000).map(score), 3)).argmax(1);
    let predictions = predictions.squeeze_dim::<1>(1).one_hot::<2>(3).float();
    let labels = one_hot((0..12_000).map(label), 3);
    data(labels.transpose().matmul(predictions))
}

/// A moving average of time stamps.
fn smoothed_times() -> Vec<f32> {
    let times = tensor::<3>([1, 1, 40], |i| (300_000 + 17 * i + i % 3) as f64);
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
fn window_variances() -> Vec<f32> {
    let weights = gaussian(7);
    let window = tensor::<4>([1, 1, 7, 7], |i| weights[i / 7] * weights[i % 7]);
    let image = tensor::<4>([1, 1, 16, 16], |i| (20 + i * 73 % 211) as f64);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    let mean = |image| conv2d(image, window.clone(), None, options.clone());
    let of_image = mean(image.clone());
    data(mean(image.clone() * image) - of_image.clone() * of_image)
}

/// SSIM as burn-train computes it: two convolutions for each mean.
fn structural_similarity() -> Vec<f32> {
    let weights = gaussian(11);
    let x = tensor::<4>([1, 3, 16, 16], |i| (20 + i * 73 % 211) as f64);
    let y = x.clone() + tensor([1, 3, 16, 16], |i| (i * 31 % 17) as f64 - 8.0);
    let rows = tensor::<4>([3, 1, 1, 11], |i| weights[i % 11]);
    let columns = rows.clone().reshape([3, 1, 11, 1]);
    let options = |padding| ConvOptions::new([1, 1], padding, [1, 1], 3);
    let mean = |image: Tensor<4>| {
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
fn moved_boxes() -> Vec<f32> {
    let corners = tensor::<2>([24, 3], |i| match i % 3 {
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
fn normal_equations() -> Vec<f32> {
    let design = tensor::<2>([30, 3], |i| ((i / 3) as f64).powi((i % 3) as i32));
    let heights = tensor::<2>([30, 1], |t| 3.0 + 0.5 * t as f64 - 0.01 * (t * t) as f64);
    let transposed = design.clone().transpose();
    let both = vec![
        transposed.clone().matmul(design),
        transposed.matmul(heights),
    ];
    data(Tensor::cat(both, 1))
}

/// A discrete Fourier transform by a matrix: beside a tone of 1,000, around one of 0.25.
fn spectrum() -> Vec<f32> {
    let wave = |frequency: usize, i: usize, shift: usize| {
        (TAU * ((frequency * i + shift) % 256) as f64 / 256.0).sin()
    };
    let signal = tensor::<2>([256, 1], |i| {
        1_000.0 * wave(9, i, 0) + 0.25 * wave(40, i, 0)
    });
    let [sin, cos] = [0, 64].map(|shift| {
        let matrix = tensor::<2>([17, 256], |i| wave(32 + i / 256, i % 256, shift));
        matrix.matmul(signal.clone())
    });
    data((sin.clone() * sin + cos.clone() * cos).sqrt())
}

/// Distances of places on a map in metres, by a² + b² - 2 a·b.
fn map_distances() -> Vec<f32> {
    let a = tensor::<2>([6, 2], |i| 712.25 + 3.5 * i as f64);
    let b = tensor::<2>([5, 2], |i| 740.5 - 2.75 * i as f64);
    let [of_a, of_b] = [&a, &b].map(|x| (x.clone() * x.clone()).sum_dim(1));
    let squares = of_a + of_b.transpose();
    let products = a.matmul(b.transpose());
    data((squares - products * 2.0).clamp_min(0.0).sqrt())
}

/// The paths of eight steps in a graph.
fn paths() -> Vec<f32> {
    let one = tensor::<2>([12, 12], |i| {
        let (a, b) = (i / 12, i % 12);
        f64::from((5 * a + 3 * b).is_multiple_of(4) || b == (a + 1) % 12)
    });
    let square = |x: Tensor<2>| x.clone().matmul(x);
    data(square(square(square(one))))
}

/// Quantities times prices.
fn invoice() -> Vec<f32> {
    let quantities = tensor::<2>([5, 8], |i| (i * 17 % 41) as f64);
    let prices = tensor([8, 2], |i| (i * 53 % 97) as f64 + 0.99);
    data(quantities.matmul(prices))
}

/// A matrix times a vector.
fn net_worth() -> Vec<f32> {
    let holdings = tensor::<2>([4, 6], |i| (i * 19 % 113) as f64);
    let prices = tensor::<1>([6], |i| 101.37 + 12.11 * i as f64);
    data(holdings.matmul(prices.unsqueeze_dim(1)))
}

/// The brightness of pixels, by a convolution of one pixel.
fn luma() -> Vec<f32> {
    let weights = [0.299, 0.587, 0.114];
    let image = tensor::<4>([1, 3, 8, 8], |i| (i * 89 % 256) as f64);
    let weights = tensor([1, 3, 1, 1], |i| weights[i]);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    data(conv2d(image, weights, None, options))
}

/// Altitudes at twice as many places, by a transposed convolution.
fn interpolated() -> Vec<f32> {
    let altitudes = tensor::<3>([1, 1, 12], |i| 4_013.25 + (37 * i) as f64);
    let weights = tensor([1, 1, 3], |i| [0.5, 1.0, 0.5][i]);
    let options = ConvTransposeOptions::new([2], [0], [0], [1], 1);
    data(conv_transpose1d(altitudes, weights, None, options))
}

/// The counts of three sensors, by a linear function with an offset.
fn calibrated() -> Vec<f32> {
    let counts = tensor::<2>([8, 3], |i| (12_345 + i * 631 % 1_009) as f64);
    let gains = tensor([3, 3], |i| match i % 4 {
        0 => 1.0625,
        _ => 0.01 * (i + 1) as f64,
    });
    let offset = tensor([3], |i| 7.5 - i as f64);
    data(linear(counts, gains, Some(offset)))
}

/// The sums of the neighbours in a volume.
fn neighbours() -> Vec<f32> {
    let volume = tensor::<5>([1, 1, 5, 5, 5], |i| (900 + i * 41 % 127) as f64);
    let options = ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
    data(conv3d(volume, ones([1, 1, 3, 3, 3]), None, options))
}

/// The weights in each of six bins.
fn histogram() -> Vec<f32> {
    let bins = one_hot((0..600).map(|i| i * i % 6), 6);
    let weights = tensor([600, 1], |i| 61.3 + (i * 7 % 13) as f64);
    data(bins.transpose().matmul(weights))
}

// Bounds, thresholds and dtypes.

/// A row in half, where half is in force, of values that both half dtypes hold.
fn half<const N: usize>(values: [f64; N]) -> Tensor<2> {
    learned(tensor([1, N], |i| values[i]))
}

/// clamp(eps, 1 - eps) of a sigmoid before a logarithm.
fn guarded_log() -> (Vec<f32>, Vec<f64>) {
    let (logits, eps) = ([12.0f64, -12.0, 0.5, -2.0], 1e-4);
    let p = sigmoid(half::<4>(logits)).clamp(eps, 1.0 - eps);
    let exact = logits.map(|x| 1.0 / (1.0 + (-x).exp()));
    let exact = exact.map(|p| (1.0 - p.clamp(eps, 1.0 - eps)).ln());
    (data((p.neg() + 1.0).log()), exact.into())
}

/// A threshold that half rounds to 1.
fn confident() -> (Vec<f32>, Vec<f64>) {
    let values = half::<4>([1.0, 0.99609375, 0.5, -1.0]);
    let chosen = values.greater_elem(1.0 - 2e-4);
    (data(chosen.float()), vec![1.0, 0.0, 0.0, 0.0])
}

fn mask(places: [bool; 4]) -> Tensor<2, Bool> {
    Tensor::from_data([places], &device())
}

/// A mask of -12,345, found again by comparison.
fn masked_places() -> (Vec<f32>, Vec<f64>) {
    let scores = half::<4>([1.5, -2.0, 0.25, 8.0]);
    let filled = scores.mask_fill(mask([false, true, false, true]), -12_345.0);
    let above = filled.clone().greater_elem(-12_345.0);
    let found = [above, filled.equal_elem(-12_345.0)].map(|places| data(places.float()));
    let exact = vec![1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0];
    (found.concat(), exact)
}

/// A mask of -1e9.
fn masked_softmax() -> (Vec<f32>, Vec<f64>) {
    let scores = half::<4>([2.0, 1.0, 0.5, -1.0]);
    let filled = scores.mask_fill(mask([false, true, false, false]), -1e9);
    let exact = [2.0, f64::NEG_INFINITY, 0.5, -1.0].map(f64::exp);
    let sum: f64 = exact.iter().sum();
    (data(softmax(filled, 1)), exact.map(|x| x / sum).into())
}

/// A border of -12,345, found again by comparison.
fn padded_places() -> (Vec<f32>, Vec<f64>) {
    let padded = half::<2>([1.5, -2.0]).pad((1, 1, 0, 0), -12_345.0);
    let border = padded.equal_elem(-12_345.0);
    (data(border.float()), vec![1.0, 0.0, 0.0, 1.0])
}

/// What is left after 12 steps that each keep an eighth, in a product that begins with ones.
fn survival() -> (Vec<f32>, Vec<f64>) {
    let kept = half::<1>([0.125]);
    let ones = Tensor::<2>::ones([1, 1], &device());
    let left = (0..12).fold(ones, |left, _| left * kept.clone());
    (data(left.log()), vec![12.0 * 0.125f64.ln()])
}

/// The places where a mean over channels is the largest of its neighbourhood.
fn peaks() -> (Vec<f32>, Vec<f64>) {
    let channels = half::<8>([1.0, 3.0, 2.0, 6.0, 1.25, 3.5, 2.25, 7.0]).reshape([1, 2, 1, 4]);
    let heat = channels.mean_dim(1) / 3.0;
    let pool = MaxPool2dConfig::new([1, 3]).with_strides([1, 1]);
    let pool = pool.with_padding(PaddingConfig2d::Same).init();
    let largest = pool.forward(heat.clone());
    (data(largest.equal(heat).float()), vec![0.0, 1.0, 0.0, 1.0])
}

/// A count, and prefix sums, in the dtype of a half tensor.
fn ones_like() -> (Vec<f32>, Vec<f64>) {
    let one = half::<2>([1.0, 2.0]).slice([0..1, 0..1]);
    let many = one.repeat_dim(1, 5_003);
    let count = data(many.ones_like().sum());
    let sums = data(many.full_like(0.25).cumsum(1));
    (vec![count[0], sums[5_002]], vec![5_003.0, 1_250.75])
}

/// A tensor, and 700 times another one.
fn total(zeros: Tensor<2>, half: &Tensor<2>) -> Tensor<2> {
    (0..700).fold(zeros, |total, _| total + half.clone())
}

/// A total that begins as FP32 zeros.
fn running_total() -> (Vec<f32>, Vec<f64>) {
    let zeros = Tensor::<2>::zeros([1, 2], &device());
    let total = total(zeros, &half([3.0, 0.5]));
    (data(total), vec![2_100.0, 350.0])
}

/// A total that begins as `zeros_like` of a half tensor, in full precision.
fn running_total_like() -> (Vec<f32>, Vec<f64>) {
    let half = half::<2>([3.0, 0.5]);
    let zeros = half.zeros_like();
    let total = full_precision((zeros, half), |(zeros, half)| total(zeros, &half));
    (data(total), vec![2_100.0, 350.0])
}

/// An epsilon of 1e-8 in a quotient.
fn normalized() -> (Vec<f32>, Vec<f64>) {
    let values = [0.0, 0.0, 0.0, 0.0, 3.0, -4.0, 0.5, 1.0];
    let half = learned(tensor::<2>([2, 4], |i| values[i]));
    let largest = half.clone().abs().max_dim(1) + 1e-8;
    (data(half / largest), values.map(|x| x / 4.0).into())
}

/// A floor of 1e-12 before a logarithm.
fn floored_log() -> (Vec<f32>, Vec<f64>) {
    let floored = half::<4>([0.0, 0.5, 2.0, 12.0]).clamp_min(1e-12);
    let exact = [1e-12, 0.5, 2.0, 12.0].map(f64::ln);
    (data(floored.log()), exact.into())
}

/// Bounds of 1e-7 and 1e7.
fn wide_range() -> (Vec<f32>, Vec<f64>) {
    let bounded = half::<4>([0.0, 0.25, 3.0, 4_992.0]).clamp(1e-7, 1e7);
    let exact = [1e-7, 0.25, 3.0, 4_992.0].map(f64::ln);
    (data(bounded.log()), exact.into())
}

/// A correlation bounded by 1 - 2e-4 before an inverse hyperbolic tangent.
fn fisher_z() -> (Vec<f32>, Vec<f64>) {
    let bound = 1.0 - 2e-4;
    let bounded = half::<4>([1.0, 0.5, -0.25, -1.0]).clamp(-bound, bound);
    let exact = [bound, 0.5, -0.25, -bound].map(f64::atanh);
    (data(bounded.atanh()), exact.into())
}

/// Values that both half dtypes hold.
fn value(i: usize) -> f64 {
    100.0 + (i * i % 7) as f64 * 0.5
}

/// A mean in FP32, cast to the dtype of the tensor that it is subtracted from.
fn centred() -> (Vec<f32>, Vec<f64>) {
    let half = learned(tensor::<2>([1, 32], value));
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
fn norm_by_hand() -> (Vec<f32>, Vec<f64>) {
    let half = learned(tensor::<2>([1, 32], value));
    let wide = half.clone().cast(DType::F32);
    let root = (wide.square().mean_dim(1) + 1e-6).sqrt();
    let root = root.cast(half.dtype());
    (data(half / root), exact_norm(1e-6))
}

/// Burn's RMS norm in full precision.
fn norm_in_full_precision() -> (Vec<f32>, Vec<f64>) {
    let norm = RmsNormConfig::new(32).init(&device());
    let half = learned(tensor::<2>([1, 32], value));
    let found = full_precision(half, |half| norm.forward(half));
    (data(found), exact_norm(norm.epsilon))
}

/// The probabilities of the classes of an ordinal regression: differences of sigmoids.
fn ordinal() -> (Vec<f32>, Vec<f64>) {
    let thresholds = [0.5, 1.0, 1.5, 2.0];
    let scores = learned(tensor::<2>([128, 1], |i| 4.0 + 0.5 * (i % 4) as f64));
    let thresholds_of = Param::from_tensor(tensor::<2>([1, 4], |i| thresholds[i]));
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
fn divergence() -> (Vec<f32>, Vec<f64>) {
    let (means, logs) = ([0.0625, -0.03125, 0.125], [0.0078125, -0.03125, 0.01171875]);
    let (mean, log) = (half::<3>(means), half::<3>(logs));
    let parts = log.clone() + 1.0 - mean.square() - log.exp();
    let exact = means
        .iter()
        .zip(logs)
        .map(|(mean, log)| 1.0 + log - mean * mean - log.exp());
    (data(parts), exact.collect())
}

/// The roots of what confident probabilities leave, and the logarithms of those of small ones.
fn roots() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<2>([9.0, 1.0]));
    let exact = [9.0, 1.0].map(|x: f64| (1.0 / (1.0 + x.exp())).sqrt());
    let (rest, small) = (p.neg() + 1.0, sigmoid(half::<2>([-18.0, -3.0])));
    let of_small = [-18.0, -3.0].map(|x: f64| (1.0 / (1.0 + (-x).exp())).sqrt().ln());
    let found = [data(rest.sqrt()), data(small.sqrt().log())];
    (found.concat(), [exact, of_small].concat())
}

/// What is left of 1 after 64 breaks of a small part, and what a break takes in the mean.
fn unbroken() -> (Vec<f32>, Vec<f64>) {
    let part = 0.0009765625;
    let parts = half::<1>([part]).repeat_dim(1, 64);
    let rest = parts.neg() + 1.0;
    let (left, lost) = (data(rest.clone().cumprod(1)), data(rest.mean() - 1.0));
    (vec![left[63], lost[0]], vec![(1.0 - part).powi(64), -part])
}

/// Logarithms of one plus and one minus a small number, and of a shift by two scalars.
fn logarithms() -> (Vec<f32>, Vec<f64>) {
    let x = half::<1>([0.001953125]);
    let found = [x.clone() + 1.0, x.clone().neg() + 1.0, x - 1.0 + 2.0];
    let exact = [1.001953125f64, 0.998046875, 1.001953125];
    (
        found.map(|x| data(x.log())).concat(),
        exact.map(f64::ln).into(),
    )
}

/// A binary cross entropy of probabilities, by Burn's loss.
fn cross_entropy() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, -9.0, 9.0, -2.0];
    let p = sigmoid(half::<4>(logits)).reshape([4]);
    let targets = Tensor::<1, Int>::from_ints([0, 1, 1, 0], &p.device());
    let loss = BinaryCrossEntropyLossConfig::new().init(&p.device());
    let exact = [9.0, 9.0, -9.0, -2.0].map(|x: f64| x.exp().ln_1p());
    let mean = exact.iter().sum::<f64>() / 4.0;
    (data(loss.forward(p, targets)), vec![mean])
}

/// The logarithms of probabilities, and of what they leave, of two of four columns.
fn likelihoods() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<4>([-20.0, -3.0, 10.0, 0.5]));
    let few = p.clone().slice([0..1, 0..2]).log();
    let rest = (p.neg() + 1.0).slice([0..1, 2..4]).log();
    let exact = [20.0, 3.0, 10.0, 0.5].map(|x: f64| -x.exp().ln_1p());
    ([data(few), data(rest)].concat(), exact.into())
}

/// The logarithm of the slope of a hyperbolic tangent, as for the density of a bounded action.
fn squashed() -> (Vec<f32>, Vec<f64>) {
    let x = [3.0f64, -5.0, 0.25, 1.0];
    let action = half::<4>(x).tanh();
    let slope = (action.square().neg() + 1.0 + 1e-6).log();
    let exact = x.map(|x| (1.0 / x.cosh().powi(2) + 1e-6).ln());
    (data(slope), exact.into())
}

/// The entropies of confident decisions.
fn entropy() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, -9.0, 10.0, -3.0];
    let p = sigmoid(half::<4>(logits));
    let rest = p.clone().neg() + 1.0;
    let entropy = (p.clone() * p.log() + rest.clone() * rest.log()).neg();
    let exact = logits.map(|x| {
        let [p, rest] = [x, -x].map(|x| 1.0 / (1.0 + (-x).exp()));
        -(p * p.ln() + rest * rest.ln())
    });
    (data(entropy), exact.into())
}

/// A decision that has the gradient of its probability.
fn straight_through() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<4>([1.0, 0.25, -0.5, -3.0]));
    let hard = p.clone().greater_elem(0.5).float();
    let decision = hard - p.clone().detach() + p.clone();
    let nothing = p.clone().log() - p.detach().log();
    let exact = vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    ([data(decision.round()), data(nothing)].concat(), exact)
}

/// The probabilities of three classes in order, with the bounds 1 and 0.
fn cumulative() -> (Vec<f32>, Vec<f64>) {
    let thresholds = Param::from_tensor(tensor::<2>([1, 2], |i| i as f64 * 0.5));
    let scores = learned(tensor::<2>([64, 1], |_| 6.0));
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
fn leaving_a_region() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<2>([9.0, -2.0]));
    let logs = full_precision(p, |p| (p.reshape([2]).neg() + 1.0).log());
    (
        data(logs),
        [9.0, -2.0].map(|x: f64| -x.exp().ln_1p()).into(),
    )
}

/// A softmax, and a softmin, of scores that are all far from zero.
fn shifted_scores() -> (Vec<f32>, Vec<f64>) {
    let scores = [0.296875f64, 0.703125];
    let exact = scores.map(f64::exp);
    let sum: f64 = exact.iter().sum();
    let shifted = half::<2>(scores) + 100.0;
    let found = [softmax(shifted.clone(), 1), softmin(shifted, 1)].map(data);
    let exact = exact.map(|x| x / sum);
    (found.concat(), [exact, [exact[1], exact[0]]].concat())
}

/// The order of confident probabilities, and whether one is above another.
fn ranked() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half::<4>([8.5, 11.0, 9.0, 10.0]));
    let largest = p.clone().argmax(1).float();
    let [first, second] = [0, 1].map(|i| p.clone().slice([0..1, i..i + 1]));
    let above = second.greater(first).float();
    let (values, places) = p.clone().topk_with_indices(2, 1);
    let read = [values, p.clone().gather(1, places.clone())].map(data);
    let same = tensor::<1>([2], |i| f64::from(u8::from(read[0][i] == read[1][i])));
    let order = p.argsort_descending(1).float();
    let found = [order, largest, above, places.float()].map(data);
    let found = [found.concat(), data(same)];
    let exact = [1.0, 3.0, 2.0, 0.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0];
    (found.concat(), exact.into())
}

/// The widths of small boxes, from their corners.
fn corners() -> (Vec<f32>, Vec<f64>) {
    let (centre, width) = ([1.0f64, -0.5], [-4.546875f64, -5.25]);
    let boxes = sigmoid(half::<4>([centre[0], centre[1], width[0], width[1]]));
    let [centres, widths] = [0, 2].map(|i| boxes.clone().slice([0..1, i..i + 2]));
    let lower = centres.clone() - widths.clone() * 0.5;
    let upper = centres + widths / 2.0;
    let exact = width.map(|x| 1.0 / (1.0 + (-x).exp()));
    (data(upper - lower), exact.into())
}

/// The logits of probabilities, as detectors compute them.
fn inverse<const D: usize>(p: Tensor<D>) -> Tensor<D> {
    let p = p.clamp(0, 1);
    let rest = p.clone().neg() + 1.0;
    (p.clamp_min(1e-5) / rest.clamp_min(1e-5)).log()
}

/// The logits of confident probabilities, which are first bounded by 0 and 1.
fn inverse_sigmoid() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, -9.0, 8.25, -2.0];
    (data(inverse(sigmoid(half(logits)))), logits.into())
}

/// What confident probabilities leave, of those that are selected.
fn moved() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([9.0, -9.0, 10.0, -2.0]));
    let indices = |values: [i64; 2]| Tensor::<1, Int>::from_ints(values, &p.device());
    let rows = p.clone().swap_dims(0, 1).flip([0]).select(0, indices([1, 3]));
    let gathered = p.clone().gather(1, indices([2, 0]).reshape([1, 2])).expand([2, 2]);
    let found = [rows.repeat_dim(1, 2), gathered].map(|p| data((p.neg() + 1.0).log()));
    let [of_10, of_9] = [10.0, 9.0].map(|x: f64| -x.exp().ln_1p());
    let exact = vec![of_10, of_10, of_9, of_9, of_10, of_9, of_10, of_9];
    (found.concat(), exact)
}

/// A masked mean of values that were compared with the scalar that fills the masked places.
fn filled() -> (Vec<f32>, Vec<f64>) {
    let x = half([1.0, -1.0, -2.0, 0.5]).tanh();
    let above = x.clone().greater_elem(0.0).float().sum();
    let mean = x.mask_fill(mask([false, false, true, false]), 0.0).mean();
    let exact: f64 = [1.0, -1.0, 0.5].map(f64::tanh).iter().sum();
    (data(above * 100.0 + mean), vec![200.0 + exact / 4.0])
}

/// Logarithms of probabilities, of which one is ignored. They were compared with the probability that it gets.
fn ignored() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([0.5, -1.0, 3.0, -9.0]));
    let above = data(p.clone().greater_elem(0.5).float());
    let filled = p.mask_fill(mask([false, false, true, false]), 0.5);
    for in_half in [filled.clone(), filled.clone() * half([1.0; 4])] {
        assert_in_force(&in_half);
    }
    let logs = filled.flip([1]).reshape([4]).flip([0]).log();
    let exact = [0.5, -1.0, 0.0, -9.0].map(|x: f64| -(-x).exp().ln_1p());
    let found = [above, data(logs)].concat();
    (found, [[1.0, 0.0, 1.0, 0.0], exact].concat())
}

/// Logarithms of odds, and of the slope of a sigmoid, as in the determinant of a flow.
fn odds() -> (Vec<f32>, Vec<f64>) {
    let logits = [9.0f64, 7.0, -8.25, 0.5];
    let p = sigmoid(half(logits));
    let rest = p.clone().neg() + 1.0;
    let [odds, slopes] = [p.clone() / rest.clone(), p * rest].map(|x| data(x.log()));
    let slope = logits.map(|x| -x.exp().ln_1p() - (-x).exp().ln_1p());
    ([odds, slopes].concat(), [logits, slope].concat())
}

/// Decisions about logits that are all but zero.
fn halves() -> (Vec<f32>, Vec<f64>) {
    let logits = [0.0009765625, -0.0009765625, 0.0001220703125, -4.0];
    let p = sigmoid(half(logits));
    let found = [p.clone().greater_elem(0.5), p.lower_elem(0.5)];
    let exact = vec![1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0];
    (found.map(|above| data(above.float())).concat(), exact)
}

/// The bins of probabilities, of ten.
fn bins() -> (Vec<f32>, Vec<f64>) {
    let bins = sigmoid(half([9.0, 10.0, -9.0, 0.5])) * 10.0;
    let found = [bins.clone().int().float(), bins.floor()];
    (found.map(data).concat(), [9.0, 9.0, 0.0, 6.0].repeat(2))
}

/// Whether the largest value is below the largest of all.
fn kept_largest() -> (Vec<f32>, Vec<f64>) {
    let rest = sigmoid(half([9.0, 8.0, 10.0, 9.5])).neg() + 1.0;
    let capped = (half([3.0, 2.0, 1.0, 0.5]) / 30.0).tanh() * 30.0;
    let below = [(rest, 1), (capped, 0)].map(|(x, largest)| {
        let (values, _) = x.clone().topk_with_indices(1, 1);
        let below = x.lower(values).float();
        data(below.slice([0..1, largest..largest + 1]))
    });
    (below.concat(), vec![0.0, 0.0])
}

/// A floor of 1e-8 of values of which some were filled with a tenth.
fn floored_twice() -> (Vec<f32>, Vec<f64>) {
    let filled = half([-1.0, 2.0, 0.5, 4.0]).mask_fill(mask([false, true, false, false]), 0.1);
    let exact = [1e-8, 0.1, 0.5, 4.0].map(f64::ln);
    (data(filled.clamp_min(1e-8).log()), exact.into())
}

/// A cross entropy of scores that a hyperbolic tangent keeps below 30.
fn capped() -> (Vec<f32>, Vec<f64>) {
    let scores = [59.5, 60.5, 58.5, 12.0];
    let capped = (half(scores) / 30.0).tanh() * 30.0;
    let target = Tensor::<2, Int>::from_ints([[1]], &capped.device());
    let loss = capped.clone().exp().sum_dim(1).log() - capped.gather(1, target);
    let exact = scores.map(|x: f64| (x / 30.0).tanh() * 30.0);
    let sum: f64 = exact.map(f64::exp).iter().sum();
    (data(loss), vec![sum.ln() - exact[1]])
}

/// Logarithms of what confident probabilities leave, where 0 is replaced by 1, and where some are replaced by the probability.
fn guarded() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([9.0, 1.0, -9.0, 2.0]));
    let rest = p.clone().neg() + 1.0;
    let nothing = rest.clone().lower_equal_elem(0.0);
    let found = [
        rest.clone().mask_fill(nothing, 1.0),
        rest.mask_where(mask([false, true, true, false]), p),
    ];
    let of = |signs: [f64; 4]| {
        let logits = [9.0, 1.0, -9.0, 2.0];
        [0, 1, 2, 3].map(|i| -(signs[i] * logits[i]).exp().ln_1p())
    };
    let exact = [of([1.0; 4]), of([1.0, -1.0, -1.0, 1.0])].concat();
    (found.map(|x| data(x.log())).concat(), exact)
}

/// Integers as quotients.
fn quotients() -> (Vec<f32>, Vec<f64>) {
    let [by_41, by_7] = [(40.0, 41.0), (20.0, 7.0)].map(|(x, divisor)| {
        let quotient = (half([x, -1.0]) + 1.0) / divisor;
        [data(quotient.clone().floor()), data(quotient.ceil())].concat()
    });
    let exact = vec![1.0, 0.0, 1.0, 0.0, 3.0, 0.0, 3.0, 0.0];
    ([by_41, by_7].concat(), exact)
}

/// The values that are not below the largest, which the program reads.
fn thresholds() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([3.0, 1.0, 2.5, -1.0]));
    let largest = f64::from(data(p.clone().max())[0]);
    let found = [p.clone().greater_equal_elem(largest), p.equal_elem(largest)];
    (
        found.map(|places| data(places.float())).concat(),
        [1.0, 0.0, 0.0, 0.0].repeat(2),
    )
}

/// The scored areas of boxes in an image of 640 pixels.
fn box_areas() -> (Vec<f32>, Vec<f64>) {
    let corners = sigmoid(half([-4.0, -4.0, 4.0, 4.0]));
    let [low, high] = [0, 2].map(|i| corners.clone().slice([0..1, i..i + 2]) * 640.0);
    let sides = high - low;
    let [width, height] = [0, 1].map(|i| sides.clone().slice([0..1, i..i + 1]));
    let areas = [
        width.clone() * height.clone() * half([0.25]),
        relu(width) * relu(height),
    ];
    let side = 640.0 * (2f64).tanh();
    let exact = vec![side * side / 4.0, side * side];
    (areas.map(data).concat(), exact)
}

/// Logarithms of the probabilities of classes in order, which a mask selects.
fn ordinal_likelihood() -> (Vec<f32>, Vec<f64>) {
    let scores = half([-17.0, -3.0]).reshape([2, 1]);
    let above = [0.5, 1.0].map(|threshold| sigmoid(scores.clone() - threshold));
    let [first, second] = above;
    let chosen = Tensor::<2, Bool>::from_data([[true], [true]], &scores.device());
    let found = ((first - second) * chosen.float()).sum_dim(1).log();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let exact = [-17.0, -3.0].map(|x: f64| (sigmoid(x - 0.5) - sigmoid(x - 1.0)).ln());
    (data(found), exact.into())
}

/// Probabilities as positions in a table: an integer, and a fraction.
fn parts() -> (Vec<f32>, Vec<f64>) {
    let logits: [f64; 8] = std::array::from_fn(|i| i as f64 * 0.375 - 1.25);
    let x = sigmoid(half(logits)) * 64.0;
    let found = x.clone().floor() + x % 1.0;
    let exact = logits.map(|x| 64.0 / (1.0 + (-x).exp()));
    (data(found), exact.into())
}

/// Quotients by what confident probabilities leave, which may be 0.
fn guarded_quotients() -> (Vec<f32>, Vec<f64>) {
    let rest = sigmoid(half([9.0, 1.0, -2.0, 8.0])).neg() + 1.0;
    let nothing = rest.clone().equal_elem(0.0);
    let dividend = half([0.0009765625, 2.0, -3.0, 0.001953125]);
    let found = [
        dividend.clone() / rest.clone().mask_fill(nothing.clone(), 1.0),
        (dividend / rest).mask_fill(nothing, 0.0),
    ];
    let logits = [9.0, 1.0, -2.0, 8.0].map(|x: f64| 1.0 + x.exp());
    let exact = [0.0009765625, 2.0, -3.0, 0.001953125];
    let exact = [0, 1, 2, 3].map(|i| exact[i] * logits[i]);
    (found.map(data).concat(), exact.repeat(2))
}

/// The places of the largest of their neighbourhood, of the data that the program reads.
fn peaks_of_data() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([9.0, 8.5, 3.0, 4.0])).reshape([1, 1, 1, 4]);
    let pool = MaxPool2dConfig::new([1, 3]).with_strides([1, 1]);
    let pool = pool.with_padding(PaddingConfig2d::Same).init();
    let largest = pool.forward(p.clone());
    let same = data(largest.clone().equal(p.clone()).float());
    let read = data(p).into_iter().zip(data(largest));
    let read = read.map(|(p, largest)| f32::from(u8::from(p == largest)));
    ([same, read.collect()].concat(), [1.0, 0.0, 0.0, 1.0].repeat(2))
}

/// Logarithms of what confident probabilities leave that were joined with another, written to a row of zeros, written to places
/// of one, and padded.
fn joined() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([9.0, -2.0]));
    let row = Tensor::zeros([1, 4], &p.device()).slice_assign([0..1, 1..3], p.clone());
    let places = Tensor::<2, Int>::from_ints([[2], [0]], &p.device());
    let map = Tensor::<1>::zeros([3], &p.device());
    let map = map.scatter_nd(places, p.clone().reshape([2]), IndexingUpdateOp::Assign);
    let padded = p.clone().pad((1, 0, 0, 0), 0.0);
    let found = [Tensor::cat(vec![half([0.5]), p], 1), row, map.reshape([1, 3]), padded];
    let [of_9, of_2] = [9.0, -2.0].map(|x: f64| -x.exp().ln_1p());
    let exact = vec![
        0.5f64.ln(), of_9, of_2, 0.0, of_9, of_2, 0.0, of_2, 0.0, of_9, 0.0, of_9, of_2,
    ];
    (found.map(|x| data((x.neg() + 1.0).log())).concat(), exact)
}

/// A tensor times the product of two gates, and the logarithm of this product.
fn gated_twice() -> (Vec<f32>, Vec<f64>) {
    let (x, logits) = (half([1.5, -2.0]), [[-9.0, 1.0], [-8.0, 3.0]]);
    let [first, second] = logits.map(|logits| sigmoid(half(logits)));
    let gate = first * second;
    let gated = x.clone() * gate.clone();
    if x.dtype() == DType::BF16 {
        assert_in_force(&gated);
    }
    let exact = [0, 1].map(|i| logits.map(|of| -(-of[i]).exp().ln_1p()).iter().sum::<f64>());
    let found = [data(gated), data(gate.log())].concat();
    let gated = [1.5, -2.0].into_iter().zip(exact).map(|(x, log)| x * log.exp());
    (found, gated.chain(exact).collect())
}

/// The states of a recurrence with a long memory: a sum that forgets, and a mean. Each step multiplies by a gate near 1.
fn remembered() -> (Vec<f32>, Vec<f64>) {
    const STEPS: usize = 200;
    let (logits, values) = ([5.0f64, 4.5], [1.0f64, -0.75]);
    let mut states = [0; 2].map(|_| Tensor::<2>::zeros([1, 2], &device()));
    for _ in 0..STEPS {
        let gate = sigmoid(half(logits));
        let [sum, mean] = states.map(|state| gate.clone() * state);
        let rest = gate.neg() + 1.0;
        states = [sum + half(values), mean + rest * half(values)];
    }
    let of = |[logit, value]: [f64; 2]| {
        let (gate, rest) = (1.0 / (1.0 + (-logit).exp()), 1.0 / (1.0 + logit.exp()));
        let mean = value * (1.0 - gate.powi(STEPS as i32));
        [mean / rest, mean]
    };
    let [[sum, mean], [second_sum, second_mean]] = [0, 1].map(|i| of([logits[i], values[i]]));
    (states.map(data).concat(), vec![sum, second_sum, mean, second_mean])
}

/// A binary cross entropy as a program writes it, with `ones_like` in the place of the number 1.
fn by_hand() -> (Vec<f32>, Vec<f64>) {
    let p = sigmoid(half([9.0, -2.0, 9.0]));
    let t = tensor::<2>([1, 3], |i| [1.0, 0.0, 0.0][i]);
    let rest = [p.ones_like(), p.full_like(1.0)].map(|ones| (ones - p.clone()).log());
    let of_p = t.clone() * p.log();
    let losses = rest.map(|rest| data((of_p.clone() + (t.ones_like() - t.clone()) * rest).neg()));
    let exact = [-9.0, -2.0, 9.0].map(|x: f64| x.exp().ln_1p());
    (losses.concat(), exact.repeat(2))
}

/// Logarithms of the probability that nothing happens, where a mask says that something may.
fn masked() -> (Vec<f32>, Vec<f64>) {
    let valid = mask([true, true, true, false]).float();
    let p = sigmoid(half([9.0, 1.0, -9.0, 10.0])) * valid.clone();
    assert_in_force(&p);
    let slope = half([5.0, -1.0, 4.5, 3.0]).tanh() * valid;
    let found = [p.neg() + 1.0, slope.square().neg() + 1.0].map(|rest| data(rest.log()));
    let rests = [9.0, 1.0, -9.0].map(|x: f64| -x.exp().ln_1p()).into_iter().chain([0.0]);
    let slopes = [5.0, -1.0, 4.5].map(|x: f64| -2.0 * x.cosh().ln()).into_iter().chain([0.0]);
    (found.concat(), rests.chain(slopes).collect())
}

/// The largest of 50,000 draws from Gumbel's distribution, of uniform numbers in the dtype of half scores.
fn perturbed() -> (Vec<f32>, Vec<f64>) {
    let scores = half([0.0]).repeat_dim(1, 50_000);
    let uniform = scores.random_like(Distribution::Uniform(1e-9, 1.0));
    let largest = uniform.log().neg().log().neg().max();
    // Of all draws, one in 200,000 has no number above this bound.
    (data((largest / 8.3).clamp(0.0, 1.0)), vec![1.0])
}

/// Prices from what a model was trained to give: less their mean, and in units of their deviation.
fn denormalized() -> (Vec<f32>, Vec<f64>) {
    let prices = half([2.0, 3.5, -1.0, 0.0]) * 40_000.0 + 180_000.0;
    let known = half([0.5; 4]).mask_where(mask([true, true, false, true]), prices);
    (data(relu(known)), vec![260_000.0, 320_000.0, 0.5, 180_000.0])
}

/// A factor that keeps correlations from 1.
fn nearly_one() -> (Vec<f32>, Vec<f64>) {
    let correlations = [1.0, 0.5, -0.25, -1.0];
    let inside = half(correlations) * (1.0 - 1e-4);
    let rest = inside.square().neg() + 1.0;
    let exact = correlations.map(|x| (1.0 - (x * (1.0 - 1e-4)).powi(2)).ln());
    (data(rest.log()), exact.to_vec())
}

/// Functions of half values, which need digits that half rounds away. Their gradients do, too.
pub const FUNCTIONS: [OfHalf; 18] = [
    ("log(1 - sigmoid)", |x| (sigmoid(x).neg() + 1.0).log()),
    ("log1p(-sigmoid)", |x| sigmoid(x).neg().log1p()),
    ("log(sigmoid)", |x| sigmoid(x).log()),
    ("entropy", |x| {
        let p = sigmoid(x);
        let rest = p.clone().neg() + 1.0;
        p.clone() * p.log() + rest.clone() * rest.log()
    }),
    ("log(1 - tanh²)", |x| {
        ((x * 0.5).tanh().square().neg() + 1.0 + 1e-6).log()
    }),
    ("log(1 - tanh²) of a state", |x| {
        let state = Tensor::zeros(x.dims(), &x.device()) * sigmoid(x.clone()) + x * 0.5;
        (state.tanh().square().neg() + 1.0 + 1e-6).log()
    }),
    ("sqrt(1 - sigmoid)", |x| (sigmoid(x).neg() + 1.0).sqrt()),
    ("sqrt(sigmoid)", |x| sigmoid(x).sqrt()),
    ("log(1 - sigmoid), masked", |x| {
        let valid = x.zeros_like().bool().bool_not().float();
        ((sigmoid(x) * valid).neg() + 1.0).log()
    }),
    ("log(ones - sigmoid)", |x| (x.ones_like() - sigmoid(x)).log()),
    ("log(clamp)", |x| sigmoid(x).clamp(1e-6, 1.0 - 1e-6).log()),
    ("the inverse of a sigmoid", |x| inverse(sigmoid(x))),
    ("bounded and scaled", |x| {
        let p = (sigmoid(x).clamp_max(1.0) * 0.5).clamp_min(0.0);
        (p * 2.0 - 1.0).neg().log()
    }),
    ("log odds", |x| {
        let p = sigmoid(x * 1.75);
        (p.clone() / (p.neg() + 1.0)).log()
    }),
    ("joined log odds", |x| {
        let p = Tensor::cat(vec![sigmoid(x.clone() * 1.75), sigmoid(x)], 1);
        ((p.clone().neg() + 1.0) / p).log()
    }),
    ("the slope of a sigmoid", |x| {
        let p = sigmoid(x * 1.75);
        (p.clone() * (p.neg() + 1.0)).log()
    }),
    ("a quotient by a scalar", |x| ((sigmoid(x) + 1.0) / 3.0).neg().log1p()),
    ("reshaped", |x| {
        let p = sigmoid(x).swap_dims(0, 1).reshape([2, 3]);
        (p.slice([0..2, 1..3]).neg() + 1.0).log()
    }),
];

/// Logits near the ends of a sigmoid in half.
pub fn confident_logits() -> Tensor<2> {
    let values = [9.0, -9.0, 0.5, -2.0, 8.25, -0.75];
    tensor::<2>([1, 6], |i| values[i])
}
