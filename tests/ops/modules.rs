//! Operations of layers: contractions, norms, pooling, attention and losses.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    GridSampleOptions, GridSamplePaddingMode, InterpolateMode, InterpolateOptions, UnfoldOptions,
};
use burn::tensor::{Tensor, TensorPrimitive, activation, loss, module};

use crate::common::{ON_CUBECL, ON_LIBTORCH};
use crate::harness::{Case, cases, check, full, half, x};

pub fn cases() -> Vec<Case> {
    [
        contractions(),
        convolutions(),
        norms(),
        pooling(),
        sampling(),
        attention(),
        losses(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// `layer_norm`, which only the module calls.
fn layer_norm<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    gamma: Tensor<B, 1>,
    beta: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    let float = |t: TensorPrimitive<B>| t.tensor();
    Tensor::from_primitive(TensorPrimitive::Float(B::layer_norm(
        float(x.into_primitive()),
        float(gamma.into_primitive()),
        beta.map(|beta| float(beta.into_primitive())),
        1e-5,
    )))
}

#[rustfmt::skip]
fn contractions() -> Vec<Case> {
    cases! {
        "float_matmul", x(&[5, 8]).x(&[8, 3]), half(2.0, 2.0).whole() => |a| a.t::<2>(0).matmul(a.t(1));
        "float_matmul:weight", x(&[5, 8]).w(&[8, 3]), half(2.0, 2.0).whole() => |a| a.t::<2>(0).matmul(a.t(1));
        "float_matmul:fp32", x(&[5, 8]).fp32().w(&[8, 3]), half(2.0, 2.0).whole() => |a| a.t::<2>(0).matmul(a.t(1));
        "float_matmul:batch", x(&[2, 5, 8]).x(&[2, 8, 3]), half(2.0, 2.0).whole() => |a| a.t::<3>(0).matmul(a.t(1));
        "float_matmul:broadcast left", x(&[1, 5, 8]).x(&[4, 8, 3]), half(2.0, 4.0).whole() => |a| a.t::<3>(0).matmul(a.t(1));
        "float_matmul:broadcast right", x(&[4, 5, 8]).w(&[1, 8, 3]), half(2.0, 4.0).whole() => |a| a.t::<3>(0).matmul(a.t(1));
        "float_matmul:broadcast both", x(&[3, 1, 5, 8]).x(&[1, 4, 8, 3]), half(2.0, 4.0).whole() => |a| a.t::<4>(0).matmul(a.t(1));
        "float_matmul:transposed", x(&[5, 8]).x(&[3, 8]), half(2.0, 2.0).whole() => |a| a.t::<2>(0).matmul(a.t::<2>(1).transpose());
        "linear linear_x_backward linear_weight_backward linear_bias_backward", x(&[5, 8]).w(&[8, 3]).w(&[3]), half(3.0, 2.0).whole() => |a| module::linear(a.t::<2>(0), a.t(1), Some(a.t(2)));
        "linear:batch", x(&[2, 5, 8]).w(&[8, 3]).w(&[3]), half(3.0, 2.0).whole() => |a| module::linear(a.t::<3>(0), a.t(1), Some(a.t(2)));
        "linear:no bias", x(&[2, 2, 5, 8]).w(&[8, 3]), half(2.0, 2.0).whole() => |a| module::linear(a.t::<4>(0), a.t(1), None);
        "linear:one row", x(&[8]).w(&[8, 3]).w(&[3]), half(9.0, 2.0).whole() => |a| module::linear(a.t::<1>(0), a.t(1), Some(a.t(2)));
        "prelu", x(&[2, 3, 4]).w(&[3]), half(2.0, 3.0).whole() => |a| activation::prelu(a.t::<3>(0), a.t(1));
        "embedding embedding_backward", x(&[5, 3]), half(0.0, 1.0).whole() => |a| module::embedding(a.t(0), a.int(&[0, 4, 4, 2, 4, 0], [2, 3]));
        "embedding:fp32", x(&[5, 3]).fp32(), full(0.01) => |a| module::embedding(a.t(0), a.int(&[0, 4, 4, 2, 4, 0], [2, 3]));
    }
}

#[rustfmt::skip]
fn convolutions() -> Vec<Case> {
    cases! {
        "conv1d conv1d_x_backward conv1d_weight_backward conv1d_bias_backward", x(&[2, 4, 9]).w(&[6, 4, 3]).w(&[6]), half(4.0, 4.0).whole() => |a| module::conv1d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([1], [1], [1], 1));
        "conv1d:strided, dilated, groups", x(&[2, 4, 9]).w(&[6, 2, 3]).w(&[6]), half(4.0, 4.0).whole() => |a| module::conv1d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([2], [1], [2], 2));
        "conv2d conv2d_x_backward conv2d_weight_backward conv2d_bias_backward", x(&[2, 4, 6, 5]).w(&[6, 4, 3, 3]).w(&[6]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        "conv2d:fp32", x(&[2, 4, 6, 5]).fp32().w(&[6, 4, 3, 3]).w(&[6]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        "conv2d:strided, groups", x(&[2, 4, 6, 5]).w(&[6, 2, 3, 3]).w(&[6]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([2, 1], [1, 0], [1, 1], 2));
        "conv2d:depthwise", x(&[2, 4, 6, 5]).w(&[4, 1, 3, 3]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [1, 1], [1, 1], 4));
        "conv2d:1x1", x(&[2, 4, 6, 5]).w(&[3, 4, 1, 1]).w(&[3]), half(4.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([1, 1], [0, 0], [1, 1], 1));
        // oneDNN's kernels for bf16 give a part of these sums on CPUs with AMX, the last as the gradient of the weight.
        "conv1d:four channels, sixteen taps", x(&[2, 4, 40]).w(&[16, 4, 16]), half(6.0, 6.0).whole() => |a| module::conv1d(a.t(0), a.t(1), None, ConvOptions::new([1], [0], [1], 1));
        "conv2d:patches", x(&[2, 16, 16, 16]).w(&[16, 16, 4, 4]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([4, 4], [0, 0], [1, 1], 1));
        "conv2d:a batch of four", x(&[4, 16, 16, 16]).w(&[16, 16, 3, 3]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        // Flex sums these gradients of a weight in f16 up to a batch of four.
        "conv2d:a batch of one", x(&[1, 16, 16, 16]).w(&[16, 16, 3, 3]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        "conv2d:a batch of sixteen", x(&[16, 16, 16, 16]).w(&[16, 16, 3, 3]), half(6.0, 6.0).whole() => |a| module::conv2d(a.t(0), a.t(1), None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        "conv3d conv3d_x_backward conv3d_weight_backward conv3d_bias_backward", x(&[2, 2, 4, 4, 3]).w(&[3, 2, 2, 2, 2]).w(&[3]), half(4.0, 6.0).whole() => |a| module::conv3d(a.t(0), a.t(1), Some(a.t(2)), ConvOptions::new([1, 1, 1], [1, 0, 0], [1, 1, 1], 1));
        "conv_transpose1d conv_transpose1d_x_backward conv_transpose1d_weight_backward conv_transpose1d_bias_backward", x(&[2, 4, 5]).w(&[4, 3, 3]).w(&[3]), half(4.0, 4.0).whole() => |a| module::conv_transpose1d(a.t(0), a.t(1), Some(a.t(2)), ConvTransposeOptions::new([2], [1], [1], [1], 1));
        "conv_transpose2d conv_transpose2d_x_backward conv_transpose2d_weight_backward conv_transpose2d_bias_backward", x(&[2, 4, 3, 4]).w(&[4, 3, 3, 3]).w(&[3]), half(4.0, 4.0).whole() => |a| module::conv_transpose2d(a.t(0), a.t(1), Some(a.t(2)), ConvTransposeOptions::new([2, 1], [1, 1], [0, 0], [1, 1], 1));
        "conv_transpose2d:groups", x(&[2, 4, 3, 4]).w(&[4, 3, 3, 3]).w(&[6]), half(4.0, 4.0).whole() => |a| module::conv_transpose2d(a.t(0), a.t(1), Some(a.t(2)), ConvTransposeOptions::new([1, 1], [1, 1], [0, 0], [1, 1], 2));
        "conv_transpose3d conv_transpose3d_x_backward conv_transpose3d_weight_backward conv_transpose3d_bias_backward", x(&[2, 2, 3, 3, 2]).w(&[2, 3, 2, 2, 2]).w(&[3]), half(4.0, 4.0).whole() => |a| module::conv_transpose3d(a.t(0), a.t(1), Some(a.t(2)), ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1));
        "deform_conv2d deform_conv2d_backward", x(&[1, 4, 5, 5]).x(&[1, 18, 3, 3]).within(-0.4, 0.4).w(&[3, 4, 3, 3]).x(&[1, 9, 3, 3]).within(0.1, 1.0).w(&[3]).not_on(ON_LIBTORCH), half(2.0, 2.0).whole() => |a| module::deform_conv2d(a.t(0), a.t(1), a.t(2), Some(a.t(3)), Some(a.t(4)), DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1));
        "unfold4d", x(&[2, 3, 5, 4]), half(0.0, 6.0).whole() => |a| module::unfold4d(a.t(0), [3, 2], UnfoldOptions::new([1, 1], [1, 0], [1, 1]));
    }
}

#[rustfmt::skip]
fn norms() -> Vec<Case> {
    cases! {
        "softmax", x(&[3, 9]).within(-8.0, 8.0), full(2.0).whole() => |a| activation::softmax(a.t::<2>(0), 1);
        "softmax:first dimension", x(&[9, 3]).within(-8.0, 8.0), full(2.0).whole() => |a| activation::softmax(a.t::<2>(0), 0);
        "softmax:far apart", x(&[1, 4]).given(&[300.0, 299.0, -300.0, 298.0]), full(2.0).whole() => |a| activation::softmax(a.t::<2>(0), 1);
        "log_softmax", x(&[3, 9]).within(-8.0, 8.0), full(2.0).whole() => |a| activation::log_softmax(a.t::<2>(0), 1);
        "log_softmax:far apart", x(&[1, 4]).given(&[300.0, 299.0, -300.0, 298.0]), full(2.0) => |a| activation::log_softmax(a.t::<2>(0), 1);
        "softmin", x(&[3, 9]).within(-8.0, 8.0), full(2.0).whole() => |a| activation::softmin(a.t::<2>(0), 1);
        ":log of summed exponentials", x(&[3, 9]).within(30.0, 80.0), full(1.0).whole() => |a| a.t::<2>(0).exp().sum_dim(1).log();
        ":quiet softmax", x(&[3, 9]).within(-8.0, 8.0), full(2.0).rounded(8.0).whole() => |a| activation::quiet_softmax(a.t::<2>(0), 1);
        "layer_norm", x(&[3, 9]).w(&[9]).w(&[9]), half(1.0, 1.0).whole() => |a| layer_norm(a.t::<2>(0), a.t(1), Some(a.t(2)));
        "layer_norm:one row", x(&[9]).w(&[9]).w(&[9]), half(1.0, 1.0).whole() => |a| layer_norm(a.t::<1>(0), a.t(1), Some(a.t(2)));
        "layer_norm:batch", x(&[2, 3, 9]).w(&[9]).w(&[9]), half(1.0, 1.0).whole() => |a| layer_norm(a.t::<3>(0), a.t(1), Some(a.t(2)));
        "layer_norm:beyond half", x(&[3, 9]).within(-600.0, 600.0).w(&[9]), half(1.0, 1.0).whole() => |a| layer_norm(a.t::<2>(0), a.t(1), None);
        "layer_norm:far from zero", x(&[3, 9]).within(299.0, 301.0).w(&[9]), half(1.0, 2.0).whole() => |a| layer_norm(a.t::<2>(0), a.t(1), None);
        "layer_norm:small", x(&[3, 9]).within(-2e-4, 2e-4).w(&[9]), half(1.0, 1.0).whole() => |a| layer_norm(a.t::<2>(0), a.t(1), None);
        ":glu", x(&[3, 8]), half(2.0, 4.0).whole() => |a| activation::glu(a.t::<2>(0), 1);
        ":silu", x(&[64]).within(-9.0, 9.0), half(2.0, 4.0).absolute(9.0) => |a| activation::silu(a.x());
    }
}

#[rustfmt::skip]
fn pooling() -> Vec<Case> {
    cases! {
        "avg_pool1d avg_pool1d_backward", x(&[2, 3, 9]), half(1.0, 1.0).whole() => |a| module::avg_pool1d(a.t(0), 3, 2, 1, false, false);
        "avg_pool2d avg_pool2d_backward", x(&[2, 3, 6, 5]), half(1.0, 1.0).whole() => |a| module::avg_pool2d(a.t(0), [3, 2], [2, 1], [1, 1], true, false);
        "avg_pool2d:overlapping", x(&[1, 2, 9, 9]), half(1.0, 1.0).whole() => |a| module::avg_pool2d(a.t(0), [5, 5], [1, 1], [2, 2], false, false);
        "adaptive_avg_pool1d adaptive_avg_pool1d_backward", x(&[2, 3, 9]), half(1.0, 1.0).whole() => |a| module::adaptive_avg_pool1d(a.t(0), 4);
        "adaptive_avg_pool2d adaptive_avg_pool2d_backward", x(&[2, 3, 7, 5]), half(1.0, 1.0).whole() => |a| module::adaptive_avg_pool2d(a.t(0), [3, 2]);
        "max_pool1d", x(&[2, 3, 9]), half(0.0, 2.0).whole() => |a| module::max_pool1d(a.t(0), 3, 2, 1, 1, false);
        "max_pool1d_with_indices max_pool1d_with_indices_backward", x(&[2, 3, 9]), half(0.0, 2.0).whole() => |a| module::max_pool1d_with_indices(a.t(0), 3, 1, 1, 1, false).0;
        "max_pool2d", x(&[2, 3, 6, 5]), half(0.0, 4.0).whole() => |a| module::max_pool2d(a.t(0), [3, 3], [1, 1], [1, 1], [1, 1], false);
        "max_pool2d_with_indices max_pool2d_with_indices_backward", x(&[2, 3, 6, 5]), half(0.0, 2.0).whole() => |a| module::max_pool2d_with_indices(a.t(0), [2, 2], [2, 2], [0, 0], [1, 1], false).0;
    }
}

#[rustfmt::skip]
fn sampling() -> Vec<Case> {
    cases! {
        "interpolate interpolate_backward", x(&[1, 2, 4, 5]), half(1.0, 1.0).whole() => |a| module::interpolate(a.t(0), [8, 10], InterpolateOptions::new(InterpolateMode::Nearest));
        "interpolate:bilinear", x(&[1, 2, 4, 5]).not_on(ON_CUBECL), half(1.0, 1.0).whole() => |a| module::interpolate(a.t(0), [7, 9], InterpolateOptions::new(InterpolateMode::Bilinear));
        "interpolate:bicubic", x(&[1, 2, 4, 5]).not_on(ON_CUBECL), half(1.0, 1.0).whole() => |a| module::interpolate(a.t(0), [7, 9], InterpolateOptions::new(InterpolateMode::Bicubic));
        "interpolate:down", x(&[1, 1, 16, 16]).not_on(ON_CUBECL), half(1.0, 1.0).whole() => |a| module::interpolate(a.t(0), [3, 5], InterpolateOptions::new(InterpolateMode::Bilinear).with_align_corners(false));
        // Half would count these columns in steps of 8.
        "float_grid_sample_2d:wide", x(&[1, 1, 1, 2048]).x(&[1, 1, 9, 2]).within(-0.99, 0.99).fp32(), half(1.0, 1.0).whole() => |a| a.t::<4>(0).grid_sample_2d(a.t(1), GridSampleOptions::new(InterpolateMode::Bilinear));
        "float_grid_sample_2d", x(&[1, 2, 5, 6]).x(&[1, 4, 3, 2]).within(-0.95, 0.95), half(1.0, 1.0).whole() => |a| a.t::<4>(0).grid_sample_2d(a.t(1), GridSampleOptions::new(InterpolateMode::Bilinear).with_padding_mode(GridSamplePaddingMode::Border));
        "float_grid_sample_2d:fp32 grid", x(&[1, 2, 5, 6]).x(&[1, 4, 3, 2]).within(-1.2, 1.2).fp32(), half(1.0, 1.0).whole() => |a| a.t::<4>(0).grid_sample_2d(a.t(1), GridSampleOptions::new(InterpolateMode::Bilinear));
    }
}

#[rustfmt::skip]
fn attention() -> Vec<Case> {
    cases! {
        "attention", x(&[2, 2, 5, 8]).x(&[2, 2, 6, 8]).x(&[2, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, Default::default());
        "attention:fp32", x(&[2, 2, 5, 8]).fp32().w(&[2, 2, 6, 8]).w(&[2, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, Default::default());
        "attention:causal", x(&[1, 2, 6, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, AttentionModuleOptions { is_causal: true, ..Default::default() });
        "attention:causal, more keys", x(&[1, 2, 4, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, AttentionModuleOptions { is_causal: true, ..Default::default() });
        "attention:softcap, scale", x(&[1, 2, 6, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, None, AttentionModuleOptions { softcap: Some(2.0), scale: Some(0.5), is_causal: false });
        "attention:mask", x(&[1, 2, 6, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), Some(a.mask([1, 2, 6, 6])), None, Default::default());
        "attention:bias", x(&[1, 2, 6, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]).w(&[1, 2, 6, 6]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, Some(a.t(3)), Default::default());
        "attention:half bias", x(&[1, 2, 6, 8]).x(&[1, 2, 6, 8]).x(&[1, 2, 6, 4]).x(&[1, 2, 6, 6]), half(4.0, 8.0).whole() => |a| module::attention(a.t(0), a.t(1), a.t(2), None, Some(a.t(3)), Default::default());
    }
}

#[rustfmt::skip]
fn losses() -> Vec<Case> {
    cases! {
        "ctc_loss", x(&[6, 2, 4]), full(2.0).whole() => |a| module::ctc_loss(activation::log_softmax(a.t::<3>(0), 2), a.int(&[1, 2, 3, 1], [2, 2]), a.int(&[6, 6], [2]), a.int(&[2, 2], [2]), 0);
        ":cross entropy", x(&[4, 5]).within(-8.0, 8.0).x(&[4, 5]).within(0.0, 1.0).fp32(), full(1.0).whole() => |a| loss::cross_entropy_with_logits(a.t::<2>(0), a.t(1));
        ":mean squared", x(&[4, 5]).within(-600.0, 600.0).w(&[4, 5]), full(1.0).whole() => |a| (a.t::<2>(0) - a.t(1)).square().mean();
    }
}

#[test]
fn contractions_and_embeddings() {
    check(&contractions());
}

#[test]
fn convolutions_of_every_kind() {
    check(&convolutions());
}

#[test]
fn norms_and_gates() {
    check(&norms());
}

#[test]
fn pools() {
    check(&pooling());
}

#[test]
fn samples() {
    check(&sampling());
}

#[test]
fn attention_with_every_option() {
    check(&attention());
}

#[test]
fn losses_from_half() {
    check(&losses());
}
