//! Sums of 4,096 ones, forward and backward: a sum in half stops at 2,048 in f16, at 256 in bf16.

use burn::module::Param;
use burn::nn::{BatchNormConfig, GroupNormConfig, LayerNormConfig, RmsNormConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{
    ConvOptions, ConvTransposeOptions, DeformConvOptions, GridSampleOptions, InterpolateMode,
    InterpolateOptions, UnfoldOptions,
};
use burn::tensor::{DType, IndexingUpdateOp as Update, Tensor, activation, linalg, module, s};
use burn_amp::{GradScaler, LossScaleConfig, full_precision, with_precision};

use crate::common::{ON_LIBTORCH, ON_WGSL, assert_close, halves};
use crate::harness::{
    Amp, Balanced, Case, Inference, Plain, Rng, activation as half_activation, cases, check, fp32,
    full, half, values, x,
};

/// How many ones are summed.
const N: usize = 4096;

/// Gradients that are sums: 4,096 to the last bit, whether their tensor is half or FP32.
#[rustfmt::skip]
fn backward() -> Vec<Case> {
    cases! {
        ":select", x(&[2, 3]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).select(0, a.int(&[0; N], [N]));
        ":gather", x(&[1, 3]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).gather(1, a.int(&[1; N], [1, N]));
        ":gather_nd", x(&[2, 3]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).gather_nd::<2, 2>(a.int(&[1; N], [N, 1]));
        ":embedding", x(&[2, 3]).summed(), half(0.0, 0.0) => |a| module::embedding(a.t(0), a.int(&[1; N], [1, N]));
        ":embedding, weight", x(&[2, 3]).fp32().summed(), full(0.0) => |a| module::embedding(a.t(0), a.int(&[1; N], [1, N]));
        ":expand", x(&[1, 3]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).expand([N, 3]);
        ":repeat", x(&[1, 3]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).repeat_dim(0, N);
        ":add", x(&[N, 2]).x(&[1, 2]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0) + a.t(1);
        ":add, weight", x(&[N, 2]).w(&[1, 2]).summed(), full(0.0) => |a| a.t::<2>(0) + a.t(1);
        ":sub", x(&[N, 2]).x(&[1, 2]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0) - a.t(1);
        ":mul", x(&[N, 2]).x(&[1, 2]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0) * a.t(1);
        ":mul, weight", x(&[N, 2]).w(&[1, 2]).summed(), full(0.0) => |a| a.t::<2>(0) * a.t(1);
        ":div", x(&[N, 2]).x(&[1, 2]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0) / a.t(1);
        ":powf", x(&[N, 2]).x(&[1, 2]).summed(), full(0.0) => |a| a.t::<2>(1).powf(a.t(0));
        ":mask_where", x(&[N, 2]).x(&[1, 2]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).mask_where(a.t::<2>(0).equal_elem(1), a.t::<2>(1).expand([N, 2]));
        ":cumsum", x(&[1, N]).summed(), full(1.0) => |a| a.t::<2>(0).cumsum(1);
        ":cummax", x(&[1, N]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).slice_fill(s![.., 0..1], 2.0).mul_scalar(0.5).add(a.t(0)).cummax(1);
        ":interpolate", x(&[1, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::interpolate(a.t(0), [64, 64], InterpolateOptions::new(InterpolateMode::Nearest));
        ":adaptive_avg_pool1d", x(&[1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::adaptive_avg_pool1d(a.t(0), N);
        ":adaptive_avg_pool2d", x(&[1, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::adaptive_avg_pool2d(a.t(0), [64, 64]);
        ":deform_conv2d", x(&[1, 1, 64, 64]).w(&[1, 1, 1, 1]).w(&[1]).summed().not_on(ON_LIBTORCH), half(0.0, 0.0) => |a| {
            let offset = a.t::<4>(0).detach().repeat_dim(1, 2) * 0.0;
            module::deform_conv2d(a.t(0), offset, a.t(1), None, Some(a.t(2)), DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1))
        };
        ":grid_sample", x(&[1, 1, 1, 1]).x(&[1, 64, 64, 2]).summed(), half(0.0, 0.0) => |a| a.t::<4>(0).grid_sample_2d(a.t(1) * 0.0, GridSampleOptions::new(InterpolateMode::Bilinear));
        ":unfold", x(&[1, 1023]).summed(), half(0.0, 1.0) => |a| a.t::<2>(0).unfold::<3, _>(1, 512, 1);
        // Burn unfolds by a convolution with as many channels: more of them would take minutes.
        ":unfold4d", x(&[1, 1, 31, 31]).summed(), half(0.0, 1.0) => |a| module::unfold4d(a.t(0), [16, 16], UnfoldOptions::new([1, 1], [0, 0], [1, 1]));
        ":prelu", x(&[1, 1, N]).w(&[1]).summed(), half(0.0, 0.0) => |a| activation::prelu(a.t::<3>(0).neg(), a.t(1));

        ":linear", x(&[N, 8]).w(&[8, 8]).w(&[8]).summed(), half(0.0, 0.0) => |a| module::linear(a.t::<2>(0), a.t(1), Some(a.t(2)));
        ":linear, batch", x(&[N, 1, 8]).w(&[8, 8]).w(&[8]).summed(), half(0.0, 0.0) => |a| module::linear(a.t::<3>(0), a.t(1), Some(a.t(2)));
        ":matmul", x(&[N, 8]).x(&[8, 8]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).matmul(a.t(1));
        ":matmul, broadcast", x(&[N, 2, 4]).w(&[1, 4, 4]).summed(), half(0.0, 0.0) => |a| a.t::<3>(0).matmul(a.t(1));
        ":conv1d, bias", x(&[2, 1, N / 2]).w(&[1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv1d(a.t(0), a.t::<3>(1).detach(), Some(a.t(2)), ConvOptions::new([1], [0], [1], 1));
        ":conv2d, bias", x(&[4, 1, 32, 32]).w(&[1, 1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv2d(a.t(0), a.t::<4>(1).detach(), Some(a.t(2)), ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        ":conv3d, bias", x(&[1, 1, 16, 16, 16]).w(&[1, 1, 1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv3d(a.t(0), a.t::<5>(1).detach(), Some(a.t(2)), ConvOptions::new([1, 1, 1], [0, 0, 0], [1, 1, 1], 1));
        ":conv_transpose1d, bias", x(&[2, 1, N / 2]).w(&[1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose1d(a.t(0), a.t::<3>(1).detach(), Some(a.t(2)), ConvTransposeOptions::new([1], [0], [0], [1], 1));
        ":conv_transpose2d, bias", x(&[4, 1, 32, 32]).w(&[1, 1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose2d(a.t(0), a.t::<4>(1).detach(), Some(a.t(2)), ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1));
        ":conv_transpose3d, bias", x(&[1, 1, 16, 16, 16]).w(&[1, 1, 1, 1, 1]).w(&[1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose3d(a.t(0), a.t::<5>(1).detach(), Some(a.t(2)), ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1));
        ":conv1d, weight", x(&[2, 8, N / 2]).w(&[8, 8, 1]).summed(), half(0.0, 0.0) => |a| module::conv1d(a.t(0), a.t(1), None, ConvOptions::new([1], [0], [1], 1));
        ":conv2d, weight", x(&[4, 8, 32, 32]).w(&[8, 8, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        ":conv1d, input", x(&[1, 4, 2]).x(&[N, 4, 1]).summed(), half(0.0, 0.0) => |a| module::conv1d(a.t(0), a.t(1), None, ConvOptions::new([1], [0], [1], 1));
        ":conv_transpose1d, weight", x(&[2, 8, N / 2]).w(&[8, 8, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose1d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1], [0], [0], [1], 1));
        ":conv_transpose1d, input", x(&[1, 4, 2]).x(&[4, N, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose1d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1], [0], [0], [1], 1));
        ":conv2d, input", x(&[1, 4, 2, 2]).x(&[N, 4, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        ":conv_transpose2d, weight", x(&[4, 8, 32, 32]).w(&[8, 8, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose2d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1));
        ":conv_transpose2d, input", x(&[1, 4, 2, 2]).x(&[4, N, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose2d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1));
        ":conv3d, weight", x(&[1, 8, 16, 16, 16]).w(&[8, 8, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv3d(a.t(0), a.t(1), None, ConvOptions::new([1, 1, 1], [0, 0, 0], [1, 1, 1], 1));
        ":conv3d, input", x(&[1, 4, 1, 2, 2]).x(&[N, 4, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv3d(a.t(0), a.t(1), None, ConvOptions::new([1, 1, 1], [0, 0, 0], [1, 1, 1], 1));
        ":conv_transpose3d, weight", x(&[1, 8, 16, 16, 16]).w(&[8, 8, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose3d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1));
        ":conv_transpose3d, input", x(&[1, 4, 1, 2, 2]).x(&[4, N, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose3d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1));
        ":matmul, one row", x(&[1, 8]).x(&[8, N]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).matmul(a.t(1));
        // An FP32 weight in 512 half operations, as in a recurrent layer: each gives its part in
        // FP32.
        ":shared weight", x(&[2, 4]).w(&[4, 4]).summed(), half(512.0, 512.0) => |a| (0..512).map(|_| a.t::<2>(0).detach().matmul(a.t(1)).sum()).reduce(|x, y| x + y).unwrap().cast(a.t::<2>(0).dtype());
    }
}

/// Results that are sums.
#[rustfmt::skip]
fn forward() -> Vec<Case> {
    cases! {
        ":sum", x(&[N]).summed(), full(0.0) => |a| a.x().sum();
        ":sum_dim", x(&[2, N]).summed(), full(0.0) => |a| a.t::<2>(0).sum_dim(1);
        ":mean", x(&[N]).summed(), full(0.0) => |a| a.x().mean();
        ":mean_dim", x(&[2, N]).summed(), full(0.0) => |a| a.t::<2>(0).mean_dim(1);
        ":cumsum", x(&[1, N]).summed(), full(1.0) => |a| a.t::<2>(0).cumsum(1);
        ":l1 norm", x(&[2, N]).summed(), full(0.0) => |a| linalg::l1_norm(a.t::<2>(0), 1);
        ":l2 norm", x(&[2, N]).summed(), full(1.0) => |a| linalg::l2_norm(a.t::<2>(0), 1);
        ":select_assign", x(&[1, 2]).x(&[N, 2]).summed(), full(0.0) => |a| a.t::<2>(0).select_assign(0, a.int(&[0; N], [N]), a.t(1), Update::Add);
        ":scatter", x(&[1, 2]).x(&[1, N]).summed(), full(0.0) => |a| a.t::<2>(0).scatter(1, a.int(&[0; N], [1, N]), a.t(1), Update::Add);
        ":scatter_nd", x(&[2]).x(&[N]).summed(), full(0.0) => |a| a.t::<1>(0).scatter_nd(a.int(&[0; N], [N, 1]), a.t::<1>(1), Update::Add);
        ":avg_pool1d", x(&[1, 1, N]).summed(), half(0.0, 0.0) => |a| module::avg_pool1d(a.t(0), N, 1, 0, true, false);
        ":avg_pool2d", x(&[1, 1, 64, 64]).summed().not_on(ON_WGSL), half(0.0, 0.0) => |a| module::avg_pool2d(a.t(0), [64, 64], [1, 1], [0, 0], true, false);
        ":adaptive_avg_pool1d", x(&[1, 1, N]).summed(), half(0.0, 0.0) => |a| module::adaptive_avg_pool1d(a.t(0), 1);
        ":adaptive_avg_pool2d", x(&[1, 1, 64, 64]).summed(), half(0.0, 0.0) => |a| module::adaptive_avg_pool2d(a.t(0), [1, 1]);
        ":softmax", x(&[2, N]).summed(), full(0.0).absolute(0.01) => |a| activation::softmax(a.t::<2>(0), 1);
        ":log_softmax", x(&[2, N]).summed(), full(0.0).absolute(0.01) => |a| activation::log_softmax(a.t::<2>(0), 1);
        ":matmul", x(&[8, N]).x(&[N, 8]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).matmul(a.t(1));
        ":matmul, one row", x(&[1, N]).x(&[N, 8]).summed(), half(0.0, 0.0) => |a| a.t::<2>(0).matmul(a.t(1));
        ":conv1d", x(&[1, N, 2]).w(&[4, N, 1]).summed(), half(0.0, 0.0) => |a| module::conv1d(a.t(0), a.t(1), None, ConvOptions::new([1], [0], [1], 1));
        ":conv_transpose1d", x(&[1, N, 2]).w(&[N, 4, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose1d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1], [0], [0], [1], 1));
        ":conv2d", x(&[1, N, 2, 2]).w(&[4, N, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        ":conv_transpose2d", x(&[1, N, 2, 2]).w(&[N, 4, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose2d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1));
        ":conv3d", x(&[1, N, 1, 2, 2]).w(&[4, N, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv3d(a.t(0), a.t(1), None, ConvOptions::new([1, 1, 1], [0, 0, 0], [1, 1, 1], 1));
        ":conv_transpose3d", x(&[1, N, 1, 2, 2]).w(&[N, 4, 1, 1, 1]).summed(), half(0.0, 0.0) => |a| module::conv_transpose3d(a.t(0), a.t(1), None, ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1));
        ":linear", x(&[8, N]).w(&[N, 8]).summed(), half(0.0, 0.0) => |a| module::linear(a.t::<2>(0), a.t(1), None);
        ":attention", x(&[1, 1, 8, 8]).x(&[1, 1, N, 8]).x(&[1, 1, N, 8]).summed(), half(0.0, 0.5).absolute(0.01) => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, Default::default());
    }
}

#[test]
fn gradients_that_are_sums_are_exact() {
    check(&backward());
}

#[test]
fn results_that_are_sums_are_exact() {
    check(&forward());
}

/// The gradients of a norm's scale and shift, over 4,096 positions.
fn norm<B: AutodiffBackend>(
    half: bool,
    norm: impl Fn(Tensor<B, 3>) -> (Tensor<B, 3>, Vec<Option<Param<Tensor<B, 1>>>>),
) -> Vec<Vec<f32>> {
    let data = Rng(5).values(N * 4, -2.0, 2.0);
    let data: Tensor<B, 3> = fp32(&data, [N / 16, 4, 16]);
    let x = match half {
        true => half_activation(data.clone()),
        false => data.clone(),
    };
    let (out, params) = norm(x);
    // A gradient along the input makes every term of the scale's gradient positive, and ones make
    // the shift's a count.
    let grads = ((data + 1.0) * out).sum().backward();
    params
        .into_iter()
        .flatten()
        .map(|param| {
            let grad = param.val().grad(&grads).expect("a gradient");
            values(grad).into_iter().map(|v| v as f32).collect()
        })
        .collect()
}

#[test]
fn scales_and_shifts_of_norms() {
    fn norms<B: AutodiffBackend>(half: bool) -> Vec<(&'static str, Vec<Vec<f32>>)> {
        let device = Default::default();
        let layer = LayerNormConfig::new(16).init::<B>(&device);
        let batch = BatchNormConfig::new(4).init::<B>(&device);
        let group = GroupNormConfig::new(2, 4).init::<B>(&device);
        let rms = RmsNormConfig::new(16).init::<B>(&device);
        vec![
            (
                "layer norm",
                norm(half, |x| {
                    (
                        layer.forward(x),
                        vec![Some(layer.gamma.clone()), layer.beta.clone()],
                    )
                }),
            ),
            (
                "batch norm",
                norm(half, |x| {
                    (
                        batch.forward(x),
                        vec![Some(batch.gamma.clone()), Some(batch.beta.clone())],
                    )
                }),
            ),
            (
                "group norm",
                norm(half, |x| {
                    (
                        group.forward(x),
                        vec![group.gamma.clone(), group.beta.clone()],
                    )
                }),
            ),
            (
                "rms norm",
                norm(half, |x| (rms.forward(x), vec![Some(rms.gamma.clone())])),
            ),
        ]
    }
    let expected = full_precision(|| norms::<Plain>(false));
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).expect("valid");
    for precision in halves() {
        let actual = with_precision(precision, || {
            scaler.scope(|| [norms::<Amp>(true), norms::<Balanced>(true)])
        });
        for run in actual {
            for ((what, actual), (_, expected)) in run.iter().zip(&expected) {
                for (actual, expected) in actual.iter().zip(expected) {
                    // Positions are rounded independently, so their sum is closer than each.
                    assert_close(what, precision, actual, expected, 1.0);
                }
            }
        }
    }
}

/// Makes an accumulator.
type Start<B> = fn([usize; 2], &<B as burn_backend::backend::BackendTypes>::Device) -> Tensor<B, 2>;

/// An accumulator in FP32, to which ones are added in half: 4,096 of them, as with PyTorch.
#[test]
fn an_fp32_accumulator_stays_fp32() {
    fn accumulated<B: Backend>(start: Start<B>) -> [Tensor<B, 2>; 3] {
        let one = half_activation(fp32::<B, 2>(&[1.0], [1, 1]));
        assert!(matches!(one.dtype(), DType::F16 | DType::BF16));
        let start = start([1, 1], &Default::default());
        let (mut left, mut right, mut less) = (start.clone(), start.clone(), start);
        for _ in 0..N {
            left = left + one.clone();
            right = one.clone() + right;
            less = less - one.clone();
        }
        [left, right, less]
    }
    fn sums<B: Backend>() -> Vec<f64> {
        let starts: [Start<B>; 3] = [
            |shape, device| Tensor::zeros(shape, device),
            |shape, device| Tensor::ones(shape, device),
            |shape, device| Tensor::full(shape, 2.0, device),
        ];
        starts
            .into_iter()
            .flat_map(accumulated::<B>)
            .flat_map(|sum| {
                assert_eq!(sum.dtype(), DType::F32);
                values(sum)
            })
            .collect()
    }
    let n = N as f64;
    let expected: Vec<f64> = [0.0, 1.0, 2.0]
        .into_iter()
        .flat_map(|start| [start + n, start + n, start - n])
        .collect();
    for precision in halves() {
        let sums = with_precision(precision, || [sums::<Inference>(), sums::<Amp>()]);
        assert_eq!(sums, [expected.clone(), expected.clone()], "{precision}");
    }
}
