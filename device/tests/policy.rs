//! Every row of the policy as a property. The result of an operation equals that of an FP32 run: up to one
//! rounding if the row computes or returns half, otherwise bit for bit. The result's dtype is that of the
//! row's class. In FP32 every operation gives Flex's own result, bit for bit.

include!("../src/burn.rs");

mod common;

use std::collections::BTreeSet;

use burn_amp_device::Precision;
use burn_amp_device::policy::{self, Class};
use burn_backend::ops::*;
use burn_backend::tensor::{FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType, FloatDType, IntDType, Shape, Slice, TensorMetadata, try_read_sync,
};
use burn_dispatch::{backends::Flex, devices::FlexDevice};
use burn_std::ops::{InterpolateMode, PadMode};
use common::{A, bools, demoted, f32s, half, ints, on, rounding, values};

/// A backend of the test: Flex, or the policy over it.
trait Tested: Backend<Device = FlexDevice> {
    /// The tensor, made half as by the policy.
    fn demoted(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Tested for Flex {
    fn demoted(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

impl Tested for A {
    fn demoted(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        demoted(tensor)
    }
}

/// Creates the operands of a case: seeded values that both half dtypes represent exactly, so that only the
/// operation rounds.
struct Operands {
    seed: u64,
    demoted: Demoted,
    made: usize,
}

/// Which operands the policy had made half before the operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Demoted {
    No,
    All,
    /// The first, the third and so on: an operation never gets both dtypes.
    Odd,
    /// The second, the fourth and so on.
    Even,
}

impl Operands {
    fn next(&mut self) -> i64 {
        self.seed = self
            .seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.seed >> 33) as i64
    }

    fn tensor<B: Tested>(&mut self, values: Vec<f32>, shape: &[usize]) -> FloatTensor<B> {
        let tensor = f32s::<B>(&values, shape);
        self.made += 1;
        let demoted = match self.demoted {
            Demoted::No => false,
            Demoted::All => true,
            Demoted::Odd => !self.made.is_multiple_of(2),
            Demoted::Even => self.made.is_multiple_of(2),
        };
        match demoted {
            true => B::demoted(tensor),
            false => tensor,
        }
    }

    /// Values in (-2, 2) of seven bits.
    fn x<B: Tested>(&mut self, shape: &[usize]) -> FloatTensor<B> {
        let count = shape.iter().product();
        let values = (0..count)
            .map(|_| (self.next() % 255 - 127) as f32 / 64.0)
            .collect();
        self.tensor::<B>(values, shape)
    }

    /// Values in (0, 1) of six bits.
    fn unit<B: Tested>(&mut self, shape: &[usize]) -> FloatTensor<B> {
        let count = shape.iter().product();
        let values = (0..count)
            .map(|_| (self.next() % 63 + 1) as f32 / 64.0)
            .collect();
        self.tensor::<B>(values, shape)
    }

    /// Values in [1, 3) of seven bits.
    fn above_one<B: Tested>(&mut self, shape: &[usize]) -> FloatTensor<B> {
        let count = shape.iter().product();
        let values = (0..count)
            .map(|_| (self.next() % 64 + 32) as f32 / 32.0)
            .collect();
        self.tensor::<B>(values, shape)
    }

    /// Up to 97 values, each once, in no order.
    fn distinct<B: Tested>(&mut self, shape: &[usize]) -> FloatTensor<B> {
        let (count, start) = (shape.iter().product::<usize>() as i64, self.next() % 97);
        assert!(count <= 97);
        let value = |i| ((start + i * 41) % 97 - 48) as f32 / 32.0;
        self.tensor::<B>((0..count).map(value).collect(), shape)
    }
}

/// An integer result, to compare with the others.
fn int<B: Tested>(tensor: IntTensor<B>) -> FloatTensor<B> {
    B::int_into_float(tensor, FloatDType::F32)
}

fn bool<B: Tested>(tensor: burn_backend::tensor::BoolTensor<B>) -> FloatTensor<B> {
    B::bool_into_float(tensor, FloatDType::F32)
}

type Run<B> = fn(&mut Operands) -> Vec<FloatTensor<B>>;

/// The cases: an operation, the number of roundings that it may be off in half (a bias adds one), and its
/// results on this backend.
macro_rules! cases {
    (|$o:ident| $($(#[$on:meta])? $op:ident $(x $roundings:literal)? => [$($out:expr),+];)*) => {
        const OPS: &[(&str, f32)] = &[$($(#[$on])? (stringify!($op), 1.0 $(* $roundings)?)),*];

        fn runs<B: Tested>() -> Vec<Run<B>> {
            let runs: &[Run<B>] = &[$($(#[$on])? |$o| vec![$($out),+]),*];
            runs.to_vec()
        }
    };
}

const BOOL: BoolDType = BoolDType::Native;
const I32: IntDType = IntDType::I32;

fn conv<const D: usize>() -> ConvOptions<D> {
    ConvOptions::new([1; D], [1; D], [1; D], 1)
}

fn transpose<const D: usize>() -> ConvTransposeOptions<D> {
    ConvTransposeOptions::new([1; D], [1; D], [0; D], [1; D], 1)
}

fn deform() -> DeformConvOptions<2> {
    DeformConvOptions::new([1; 2], [1; 2], [1; 2], 1, 1)
}

fn windows() -> UnfoldOptions {
    UnfoldOptions::new([1; 2], [0; 2], [1; 2])
}

fn shape<const D: usize>(dims: [usize; D]) -> Shape {
    Shape::new(dims)
}

fn bilinear() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Bilinear)
}

/// All gradients of attention in one tensor, with two key/value heads.
#[cfg(feature = "burn-0-23")]
fn attention_grads<B: Tested>(
    o: &mut Operands,
    heads: usize,
    options: AttentionModuleOptions,
) -> FloatTensor<B> {
    let query = o.unit::<B>(&[1, heads, 5, 8]);
    let (key, value) = (o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]));
    let operands = (query.clone(), key.clone(), value.clone());
    let (out, logsumexp) = B::attention_with_logsumexp(operands.0, operands.1, operands.2, options);
    let out_grad = o.x::<B>(&[1, heads, 5, 8]);
    let grads = B::attention_backward(query, key, value, out, logsumexp, out_grad, options);
    let grads = [grads.query_grad, grads.key_grad, grads.value_grad];
    let rows = |grad: FloatTensor<B>| {
        let rows = grad.shape().num_elements() / 8;
        B::float_reshape(grad, shape([rows, 8]))
    };
    B::float_cat(grads.map(rows).into(), 0)
}

#[rustfmt::skip]
cases! { |o|
    float_matmul => [B::float_matmul(o.x::<B>(&[2, 5, 16]), o.x::<B>(&[2, 16, 6]))];
    linear x 2.0 => [
        B::linear(o.x::<B>(&[2, 5, 16]), o.x::<B>(&[16, 6]), Some(o.x::<B>(&[6]))),
        B::linear(o.x::<B>(&[5, 16]), o.x::<B>(&[16, 6]), None)];
    linear_x_backward => [B::linear_x_backward(o.x::<B>(&[16, 6]), o.x::<B>(&[2, 5, 6]))];
    linear_weight_backward => [B::linear_weight_backward(o.x::<B>(&[2, 5, 16]), o.x::<B>(&[2, 5, 6]))];
    linear_bias_backward => [B::linear_bias_backward(o.x::<B>(&[2, 5, 6]))];
    conv1d x 2.0 => [B::conv1d(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[4, 3, 3]), Some(o.x::<B>(&[4])), conv())];
    conv1d_x_backward => [B::conv1d_x_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[4, 3, 3]), o.x::<B>(&[2, 4, 9]), conv())];
    conv1d_weight_backward => [B::conv1d_weight_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[4, 3, 3]), o.x::<B>(&[2, 4, 9]), conv())];
    conv1d_bias_backward => [B::conv1d_bias_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[4]), o.x::<B>(&[2, 4, 9]))];
    conv2d x 2.0 => [B::conv2d(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[4, 3, 3, 3]), Some(o.x::<B>(&[4])), conv())];
    conv2d_x_backward => [B::conv2d_x_backward(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[4, 3, 3, 3]), o.x::<B>(&[2, 4, 5, 6]), conv())];
    conv2d_weight_backward => [B::conv2d_weight_backward(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[4, 3, 3, 3]), o.x::<B>(&[2, 4, 5, 6]), conv())];
    conv2d_bias_backward => [B::conv2d_bias_backward(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[4]), o.x::<B>(&[2, 4, 5, 6]))];
    conv3d x 2.0 => [B::conv3d(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[3, 2, 3, 3, 3]), Some(o.x::<B>(&[3])), conv())];
    conv3d_x_backward => [B::conv3d_x_backward(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[3, 2, 3, 3, 3]), o.x::<B>(&[1, 3, 3, 4, 5]), conv())];
    conv3d_weight_backward => [B::conv3d_weight_backward(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[3, 2, 3, 3, 3]), o.x::<B>(&[1, 3, 3, 4, 5]), conv())];
    conv3d_bias_backward => [B::conv3d_bias_backward(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[3]), o.x::<B>(&[1, 3, 3, 4, 5]))];
    conv_transpose1d x 2.0 => [B::conv_transpose1d(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[3, 4, 3]), Some(o.x::<B>(&[4])), transpose())];
    conv_transpose1d_x_backward => [B::conv_transpose1d_x_backward(o.x::<B>(&[3, 4, 3]), o.x::<B>(&[2, 4, 9]), transpose())];
    conv_transpose1d_weight_backward => [B::conv_transpose1d_weight_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[3, 4, 3]), o.x::<B>(&[2, 4, 9]), transpose())];
    conv_transpose1d_bias_backward => [B::conv_transpose1d_bias_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[4]), o.x::<B>(&[2, 4, 9]))];
    conv_transpose2d x 2.0 => [B::conv_transpose2d(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[3, 4, 3, 3]), Some(o.x::<B>(&[4])), transpose())];
    conv_transpose2d_x_backward => [B::conv_transpose2d_x_backward(o.x::<B>(&[3, 4, 3, 3]), o.x::<B>(&[2, 4, 5, 6]), transpose())];
    conv_transpose2d_weight_backward => [B::conv_transpose2d_weight_backward(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[3, 4, 3, 3]), o.x::<B>(&[2, 4, 5, 6]), transpose())];
    conv_transpose2d_bias_backward => [B::conv_transpose2d_bias_backward(o.x::<B>(&[2, 3, 5, 6]), o.x::<B>(&[4]), o.x::<B>(&[2, 4, 5, 6]))];
    conv_transpose3d x 2.0 => [B::conv_transpose3d(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[2, 3, 3, 3, 3]), Some(o.x::<B>(&[3])), transpose())];
    conv_transpose3d_x_backward => [B::conv_transpose3d_x_backward(o.x::<B>(&[2, 3, 3, 3, 3]), o.x::<B>(&[1, 3, 3, 4, 5]), transpose())];
    conv_transpose3d_weight_backward => [B::conv_transpose3d_weight_backward(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[2, 3, 3, 3, 3]), o.x::<B>(&[1, 3, 3, 4, 5]), transpose())];
    conv_transpose3d_bias_backward => [B::conv_transpose3d_bias_backward(o.x::<B>(&[1, 2, 3, 4, 5]), o.x::<B>(&[3]), o.x::<B>(&[1, 3, 3, 4, 5]))];
    // Half rounds the scaled query and the probabilities.
    attention x 6.0 => [
        B::attention(o.unit::<B>(&[1, 2, 5, 8]), o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]), None, None, Default::default()),
        B::attention(o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]), None, Some(o.x::<B>(&[1, 2, 7, 7])),
            AttentionModuleOptions { is_causal: true, softcap: Some(4.0), ..Default::default() })];
    #[cfg(feature = "burn-0-23")]
    attention_with_logsumexp x 6.0 => [
        B::attention_with_logsumexp(o.unit::<B>(&[1, 4, 5, 8]), o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]), Default::default()).0,
        B::attention_with_logsumexp(o.unit::<B>(&[1, 2, 5, 8]), o.unit::<B>(&[1, 2, 7, 8]), o.unit::<B>(&[1, 2, 7, 8]),
            AttentionModuleOptions { is_causal: true, causal_alignment: CausalAlignment::TopLeft, softcap: Some(4.0), ..Default::default() }).0];
    #[cfg(feature = "burn-0-23")]
    attention_backward x 6.0 => [attention_grads::<B>(o, 4, Default::default()), attention_grads::<B>(o, 2, AttentionModuleOptions {
        is_causal: true, causal_alignment: CausalAlignment::TopLeft, softcap: Some(4.0), ..Default::default()
    })];
    prelu => [B::prelu(o.x::<B>(&[2, 3, 4]), o.unit::<B>(&[1]))];
    float_exp => [B::float_exp(o.x::<B>(&[40]))];
    float_sinh => [B::float_sinh(o.x::<B>(&[40]))];
    float_cosh => [B::float_cosh(o.x::<B>(&[40]))];
    float_tan => [B::float_tan(o.x::<B>(&[40]))];
    float_log => [B::float_log(o.unit::<B>(&[40]))];
    float_log1p => [B::float_log1p(o.unit::<B>(&[40]))];
    float_recip => [B::float_recip(o.above_one::<B>(&[40]))];
    float_acos => [B::float_acos(o.unit::<B>(&[40]))];
    float_acosh => [B::float_acosh(o.above_one::<B>(&[40]))];
    float_asin => [B::float_asin(o.unit::<B>(&[40]))];
    float_asinh => [B::float_asinh(o.x::<B>(&[40]))];
    float_atanh => [B::float_atanh(o.unit::<B>(&[40]))];
    float_erf => [B::float_erf(o.x::<B>(&[40]))];
    log_sigmoid => [B::log_sigmoid(o.x::<B>(&[40]))];
    float_powf => [B::float_powf(o.above_one::<B>(&[40]), o.x::<B>(&[40]))];
    float_powi => [B::float_powi(o.x::<B>(&[4]), ints::<B>(&[2, 3, 0, 1], &[4]))];
    float_powi_scalar => [B::float_powi_scalar(o.x::<B>(&[40]), 2.into()), B::float_powi_scalar(o.x::<B>(&[40]), 3.into())];
    float_powi_scalar_impl => [B::float_powi_scalar_impl(o.x::<B>(&[40]), 3.into())];
    float_powf_scalar => [B::float_powf_scalar(o.above_one::<B>(&[40]), 1.5.into())];
    float_powf_scalar_impl => [B::float_powf_scalar_impl(o.above_one::<B>(&[40]), 1.5.into())];
    float_hypot => [B::float_hypot(o.x::<B>(&[40]), o.x::<B>(&[40]))];
    float_sum => [B::float_sum(o.x::<B>(&[5, 8]))];
    float_sum_dim => [B::float_sum_dim(o.x::<B>(&[5, 8]), 1)];
    float_sum_dims => [B::float_sum_dims(o.x::<B>(&[3, 5, 8]), &[0, 2])];
    float_mean => [B::float_mean(o.x::<B>(&[5, 8]))];
    float_mean_dim => [B::float_mean_dim(o.x::<B>(&[5, 8]), 0)];
    float_cumsum => [B::float_cumsum(o.x::<B>(&[5, 8]), 1)];
    float_prod => [B::float_prod(o.above_one::<B>(&[2, 4]))];
    float_prod_dim => [B::float_prod_dim(o.above_one::<B>(&[3, 4]), 1)];
    float_cumprod => [B::float_cumprod(o.above_one::<B>(&[3, 4]), 1)];
    embedding_backward => [B::embedding_backward(o.x::<B>(&[5, 4]), o.x::<B>(&[2, 3, 4]), ints::<B>(&[0, 1, 1, 4, 1, 0], &[2, 3]))];
    float_any => [bool::<B>(B::float_any(o.x::<B>(&[40]), BOOL))];
    float_any_dim => [bool::<B>(B::float_any_dim(o.x::<B>(&[5, 8]), 1, BOOL))];
    float_all => [bool::<B>(B::float_all(o.unit::<B>(&[40]), BOOL))];
    float_all_dim => [bool::<B>(B::float_all_dim(o.x::<B>(&[5, 8]), 0, BOOL))];
    softmax => [B::softmax(o.x::<B>(&[5, 8]), 1)];
    log_softmax => [B::log_softmax(o.x::<B>(&[5, 8]), 1)];
    softmin => [B::softmin(o.x::<B>(&[5, 8]), 0)];
    ctc_loss => [B::ctc_loss(B::float_log(o.unit::<B>(&[6, 1, 4])), ints::<B>(&[1, 2], &[1, 2]), ints::<B>(&[6], &[1]), ints::<B>(&[2], &[1]), 0)];
    #[cfg(feature = "burn-0-23")]
    ctc_loss_backward => [B::ctc_loss_backward(B::float_log(o.unit::<B>(&[6, 1, 4])), ints::<B>(&[1, 2], &[1, 2]), ints::<B>(&[6], &[1]), ints::<B>(&[2], &[1]), o.x::<B>(&[1]), 0)];
    float_remainder => [B::float_remainder(o.x::<B>(&[40]), o.above_one::<B>(&[40]))];
    #[cfg(feature = "burn-0-23")]
    float_fmod => [B::float_fmod(o.x::<B>(&[40]), o.above_one::<B>(&[40]))];
    float_cross => [B::float_cross(o.x::<B>(&[5, 3]), o.x::<B>(&[5, 3]), 1)];
    batch_norm => [B::batch_norm(o.x::<B>(&[2, 3, 4]), o.x::<B>(&[3]), o.x::<B>(&[3]), o.x::<B>(&[3]), o.unit::<B>(&[3]), 1e-5)];
    batch_norm_train => [B::batch_norm_train(o.x::<B>(&[4, 3, 5]), o.x::<B>(&[3]), o.x::<B>(&[3]), 1e-5).output];
    batch_norm_train_backward => [B::batch_norm_train_backward(o.x::<B>(&[4, 3, 5]), o.x::<B>(&[3]), o.x::<B>(&[3]), o.unit::<B>(&[3]), 1e-5, o.x::<B>(&[4, 3, 5])).x_grad];
    layer_norm => [B::layer_norm(o.x::<B>(&[4, 16]), o.x::<B>(&[16]), Some(o.x::<B>(&[16])), 1e-5)];
    #[cfg(feature = "burn-0-22")]
    avg_pool1d => [B::avg_pool1d(o.x::<B>(&[2, 3, 9]), 3, 2, 1, true, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool1d => [B::avg_pool1d(o.x::<B>(&[2, 3, 9]), 3, 2, 1, 1, true, false)];
    #[cfg(feature = "burn-0-22")]
    avg_pool1d_backward => [B::avg_pool1d_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[2, 3, 5]), 3, 2, 1, true, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool1d_backward => [B::avg_pool1d_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[2, 3, 5]), 3, 2, 1, 1, true, false)];
    #[cfg(feature = "burn-0-22")]
    avg_pool2d => [B::avg_pool2d(o.x::<B>(&[2, 3, 8, 8]), [3, 3], [1, 1], [1, 1], false, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool2d => [B::avg_pool2d(o.x::<B>(&[2, 3, 8, 8]), [3, 3], [1, 1], [1, 1], [1, 1], false, false)];
    #[cfg(feature = "burn-0-22")]
    avg_pool2d_backward => [B::avg_pool2d_backward(o.x::<B>(&[2, 3, 8, 8]), o.x::<B>(&[2, 3, 8, 8]), [3, 3], [1, 1], [1, 1], false, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool2d_backward => [B::avg_pool2d_backward(o.x::<B>(&[2, 3, 8, 8]), o.x::<B>(&[2, 3, 8, 8]), [3, 3], [1, 1], [1, 1], [1, 1], false, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool3d => [B::avg_pool3d(o.x::<B>(&[1, 2, 4, 5, 6]), [2, 3, 3], [2, 2, 1], [0, 1, 1], [1, 1, 2], true, false)];
    #[cfg(feature = "burn-0-23")]
    avg_pool3d_backward => [B::avg_pool3d_backward(o.x::<B>(&[1, 2, 4, 5, 6]), o.x::<B>(&[1, 2, 2, 3, 4]), [2, 3, 3], [2, 2, 1], [0, 1, 1], [1, 1, 2], true, false)];
    adaptive_avg_pool1d => [B::adaptive_avg_pool1d(o.x::<B>(&[2, 3, 9]), 4)];
    adaptive_avg_pool1d_backward => [B::adaptive_avg_pool1d_backward(o.x::<B>(&[2, 3, 9]), o.x::<B>(&[2, 3, 4]))];
    adaptive_avg_pool2d => [B::adaptive_avg_pool2d(o.x::<B>(&[2, 3, 8, 8]), [3, 5])];
    adaptive_avg_pool2d_backward => [B::adaptive_avg_pool2d_backward(o.x::<B>(&[2, 3, 8, 8]), o.x::<B>(&[2, 3, 3, 5]))];
    adaptive_avg_pool3d => [B::adaptive_avg_pool3d(o.x::<B>(&[1, 2, 4, 5, 6]), [2, 3, 4])];
    adaptive_avg_pool3d_backward => [B::adaptive_avg_pool3d_backward(o.x::<B>(&[1, 2, 4, 5, 6]), o.x::<B>(&[1, 2, 2, 3, 4]))];
    interpolate => [B::interpolate(o.x::<B>(&[1, 2, 4, 4]), [7, 9], bilinear())];
    interpolate_backward => [B::interpolate_backward(o.x::<B>(&[1, 2, 4, 4]), o.x::<B>(&[1, 2, 8, 8]), [8, 8], InterpolateOptions::new(InterpolateMode::Nearest))];
    float_grid_sample_2d => [B::float_grid_sample_2d(o.x::<B>(&[1, 2, 4, 4]), o.unit::<B>(&[1, 3, 3, 2]), GridSampleOptions::new(InterpolateMode::Bilinear))];
    deform_conv2d => [B::deform_conv2d(o.x::<B>(&[1, 2, 4, 4]), o.unit::<B>(&[1, 18, 4, 4]), o.x::<B>(&[3, 2, 3, 3]), Some(o.unit::<B>(&[1, 9, 4, 4])), Some(o.x::<B>(&[3])), deform())];
    deform_conv2d_backward => [{
        let grads = B::deform_conv2d_backward(o.x::<B>(&[1, 2, 4, 4]), o.unit::<B>(&[1, 18, 4, 4]), o.x::<B>(&[3, 2, 3, 3]), Some(o.unit::<B>(&[1, 9, 4, 4])), Some(o.x::<B>(&[3])), o.x::<B>(&[1, 3, 4, 4]), deform());
        B::float_cat([grads.x_grad, grads.offset_grad, grads.weight_grad, grads.mask_grad.unwrap(), grads.bias_grad.unwrap()].map(|grad| {
            let count = grad.shape().num_elements();
            B::float_reshape(grad, shape([count]))
        }).into(), 0)
    }];
    gelu_backward => [B::gelu_backward(o.x::<B>(&[40]), o.x::<B>(&[40]))];
    sigmoid_backward => [B::sigmoid_backward(o.unit::<B>(&[40]), o.x::<B>(&[40]))];
    log_sigmoid_backward => [B::log_sigmoid_backward(o.x::<B>(&[40]), o.x::<B>(&[40]))];
    fold4d => [B::fold4d(o.x::<B>(&[1, 8, 9]), [4, 4], [2, 2], windows())];
    float_sqrt => [B::float_sqrt(o.unit::<B>(&[40]))];
    float_remainder_scalar => [B::float_remainder_scalar(o.x::<B>(&[40]), 0.75.into())];
    #[cfg(feature = "burn-0-23")]
    float_fmod_scalar => [B::float_fmod_scalar(o.x::<B>(&[40]), 0.75.into())];
    float_add => [B::float_add(o.x::<B>(&[5, 8]), o.x::<B>(&[1, 8]))];
    float_sub => [B::float_sub(o.x::<B>(&[5, 8]), o.x::<B>(&[5, 8]))];
    float_mul => [B::float_mul(o.x::<B>(&[5, 8]), o.x::<B>(&[5, 1]))];
    float_div => [B::float_div(o.x::<B>(&[5, 8]), o.above_one::<B>(&[5, 8]))];
    float_atan2 => [B::float_atan2(o.x::<B>(&[40]), o.x::<B>(&[40]))];
    float_equal => [bool::<B>(B::float_equal(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_not_equal => [bool::<B>(B::float_not_equal(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_greater => [bool::<B>(B::float_greater(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_greater_equal => [bool::<B>(B::float_greater_equal(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_lower => [bool::<B>(B::float_lower(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_lower_equal => [bool::<B>(B::float_lower_equal(o.x::<B>(&[40]), o.x::<B>(&[40]), BOOL))];
    float_cat => [B::float_cat(vec![o.x::<B>(&[2, 3]), o.x::<B>(&[4, 3])], 0)];
    float_mask_where => [B::float_mask_where(o.x::<B>(&[4]), bools::<B>(&[true, false, false, true], &[4]), o.x::<B>(&[4]))];
    float_slice_assign => [B::float_slice_assign(o.x::<B>(&[5, 4]), &[Slice::from(1..3)], o.x::<B>(&[2, 4]))];
    float_scatter_nd => [B::float_scatter_nd(o.x::<B>(&[5]), ints::<B>(&[3, 1], &[2, 1]), o.x::<B>(&[2]), IndexingUpdateOp::Assign)];
    float_scatter => [B::float_scatter(0, o.x::<B>(&[5]), ints::<B>(&[3, 1], &[2]), o.x::<B>(&[2]), IndexingUpdateOp::Add)];
    float_select_assign => [B::float_select_assign(o.x::<B>(&[5, 2]), 0, ints::<B>(&[3, 3], &[2]), o.x::<B>(&[2, 2]), IndexingUpdateOp::Add)];
    relu_backward => [B::relu_backward(o.x::<B>(&[40]), o.x::<B>(&[40]))];
    max_pool1d => [B::max_pool1d(o.x::<B>(&[2, 3, 9]), 3, 2, 1, 1, false)];
    max_pool1d_with_indices => [B::max_pool1d_with_indices(o.distinct::<B>(&[2, 3, 9]), 3, 2, 1, 1, false, I32).output];
    max_pool1d_with_indices_backward => [{
        let x = o.distinct::<B>(&[2, 3, 9]);
        let indices = B::max_pool1d_with_indices(x.clone(), 3, 2, 1, 1, false, I32).indices;
        B::max_pool1d_with_indices_backward(x, 3, 2, 1, 1, false, o.x::<B>(&[2, 3, 5]), indices).x_grad
    }];
    max_pool2d => [B::max_pool2d(o.x::<B>(&[1, 2, 6, 6]), [3, 3], [2, 2], [1, 1], [1, 1], false)];
    max_pool2d_with_indices => [B::max_pool2d_with_indices(o.distinct::<B>(&[1, 2, 6, 6]), [3, 3], [2, 2], [1, 1], [1, 1], false, I32).output];
    max_pool2d_with_indices_backward => [{
        let x = o.distinct::<B>(&[1, 2, 6, 6]);
        let indices = B::max_pool2d_with_indices(x.clone(), [2, 2], [2, 2], [0, 0], [1, 1], false, I32).indices;
        B::max_pool2d_with_indices_backward(x, [2, 2], [2, 2], [0, 0], [1, 1], false, o.x::<B>(&[1, 2, 3, 3]), indices).x_grad
    }];
    #[cfg(feature = "burn-0-23")]
    max_pool3d => [B::max_pool3d(o.x::<B>(&[1, 2, 4, 5, 6]), [2, 3, 3], [2, 2, 1], [0, 1, 1], [1, 1, 2], false)];
    #[cfg(feature = "burn-0-23")]
    max_pool3d_with_indices => [B::max_pool3d_with_indices(o.distinct::<B>(&[1, 1, 4, 4, 6]), [2, 2, 3], [2, 2, 1], [0, 1, 1], [1, 1, 2], false, I32).output];
    #[cfg(feature = "burn-0-23")]
    max_pool3d_with_indices_backward => [{
        let x = o.distinct::<B>(&[1, 1, 4, 4, 6]);
        let (kernel, none, one) = ([2, 2, 3], [0, 0, 0], [1, 1, 1]);
        let indices = B::max_pool3d_with_indices(x.clone(), kernel, kernel, none, one, false, I32).indices;
        B::max_pool3d_with_indices_backward(x, kernel, kernel, none, one, false, o.x::<B>(&[1, 1, 2, 2, 2]), indices).x_grad
    }];
    relu => [B::relu(o.x::<B>(&[40]))];
    sigmoid => [B::sigmoid(o.x::<B>(&[40]))];
    float_tanh => [B::float_tanh(o.x::<B>(&[40]))];
    gelu => [B::gelu(o.x::<B>(&[40]))];
    leaky_relu => [B::leaky_relu(o.x::<B>(&[40]), 0.125.into())];
    hard_sigmoid => [B::hard_sigmoid(o.x::<B>(&[40]), 0.125.into(), 0.5.into())];
    float_sin => [B::float_sin(o.x::<B>(&[40]))];
    float_cos => [B::float_cos(o.x::<B>(&[40]))];
    float_atan => [B::float_atan(o.x::<B>(&[40]))];
    float_abs => [B::float_abs(o.x::<B>(&[40]))];
    float_sign => [B::float_sign(o.x::<B>(&[40]))];
    float_neg => [B::float_neg(o.x::<B>(&[40]))];
    float_round => [B::float_round(o.x::<B>(&[40]))];
    float_floor => [B::float_floor(o.x::<B>(&[40]))];
    float_ceil => [B::float_ceil(o.x::<B>(&[40]))];
    float_trunc => [B::float_trunc(o.x::<B>(&[40]))];
    float_add_scalar => [B::float_add_scalar(o.x::<B>(&[40]), 0.75.into())];
    float_sub_scalar => [B::float_sub_scalar(o.x::<B>(&[40]), 0.75.into())];
    float_mul_scalar => [B::float_mul_scalar(o.x::<B>(&[40]), 0.75.into())];
    float_div_scalar => [B::float_div_scalar(o.x::<B>(&[40]), 0.75.into())];
    float_clamp => [B::float_clamp(o.x::<B>(&[40]), (-0.5).into(), 0.75.into())];
    float_clamp_min => [B::float_clamp_min(o.x::<B>(&[40]), 0.25.into())];
    float_clamp_max => [B::float_clamp_max(o.x::<B>(&[40]), 0.25.into())];
    float_mask_fill => [B::float_mask_fill(o.x::<B>(&[4]), bools::<B>(&[true, false, false, true], &[4]), 0.75.into())];
    float_equal_elem => [bool::<B>(B::float_equal_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_not_equal_elem => [bool::<B>(B::float_not_equal_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_greater_elem => [bool::<B>(B::float_greater_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_greater_equal_elem => [bool::<B>(B::float_greater_equal_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_lower_elem => [bool::<B>(B::float_lower_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_lower_equal_elem => [bool::<B>(B::float_lower_equal_elem(o.x::<B>(&[40]), 0.5.into(), BOOL))];
    float_max => [B::float_max(o.x::<B>(&[5, 8]))];
    float_max_dim => [B::float_max_dim(o.x::<B>(&[5, 8]), 1)];
    float_max_dim_with_indices => [B::float_max_dim_with_indices(o.distinct::<B>(&[5, 8]), 1, I32).0];
    float_min => [B::float_min(o.x::<B>(&[5, 8]))];
    float_min_dim => [B::float_min_dim(o.x::<B>(&[5, 8]), 1)];
    float_min_dim_with_indices => [B::float_min_dim_with_indices(o.distinct::<B>(&[5, 8]), 1, I32).0];
    float_max_abs => [B::float_max_abs(o.x::<B>(&[5, 8]))];
    float_max_abs_dim => [B::float_max_abs_dim(o.x::<B>(&[5, 8]), 1)];
    float_cummin => [B::float_cummin(o.x::<B>(&[5, 8]), 1)];
    float_cummax => [B::float_cummax(o.x::<B>(&[5, 8]), 1)];
    float_argmax => [int::<B>(B::float_argmax(o.distinct::<B>(&[5, 8]), 1, I32))];
    float_argmin => [int::<B>(B::float_argmin(o.distinct::<B>(&[5, 8]), 1, I32))];
    float_argtopk => [int::<B>(B::float_argtopk(o.distinct::<B>(&[5, 8]), 1, 3, I32))];
    float_topk => [B::float_topk(o.distinct::<B>(&[5, 8]), 1, 3)];
    float_topk_with_indices => [B::float_topk_with_indices(o.distinct::<B>(&[5, 8]), 1, 3, I32).0];
    float_sort => [B::float_sort(o.distinct::<B>(&[5, 8]), 1, true)];
    float_sort_with_indices => [B::float_sort_with_indices(o.distinct::<B>(&[5, 8]), 1, false, I32).0];
    float_argsort => [int::<B>(B::float_argsort(o.distinct::<B>(&[5, 8]), 1, false, I32))];
    float_is_nan => [bool::<B>(B::float_is_nan(o.x::<B>(&[40]), BOOL))];
    float_is_inf => [bool::<B>(B::float_is_inf(o.x::<B>(&[40]), BOOL))];
    float_into_int => [int::<B>(B::float_into_int(o.x::<B>(&[40]), I32))];
    float_to_device => [B::float_to_device(o.x::<B>(&[40]), &FlexDevice)];
    float_repeat_dim => [B::float_repeat_dim(o.x::<B>(&[2, 3]), 1, 2)];
    float_transpose => [B::float_transpose(o.x::<B>(&[2, 3]))];
    float_swap_dims => [B::float_swap_dims(o.x::<B>(&[2, 3, 4]), 0, 2)];
    float_permute => [B::float_permute(o.x::<B>(&[2, 3, 4]), &[1, 2, 0])];
    float_flip => [B::float_flip(o.x::<B>(&[2, 3, 4]), &[1, 2])];
    float_reshape => [B::float_reshape(o.x::<B>(&[2, 3, 4]), shape([6, 4]))];
    float_gather => [B::float_gather(1, o.x::<B>(&[2, 3]), ints::<B>(&[0, 2, 1, 1], &[2, 2]))];
    float_gather_nd => [B::float_gather_nd(o.x::<B>(&[2, 3]), ints::<B>(&[0, 2, 1, 1], &[2, 2]))];
    float_select => [B::float_select(o.x::<B>(&[4, 3]), 0, ints::<B>(&[3, 0], &[2]))];
    float_slice => [B::float_slice(o.x::<B>(&[4, 3]), &[Slice::from(1..3)])];
    float_expand => [B::float_expand(o.x::<B>(&[1, 3]), shape([4, 3]))];
    float_unfold => [B::float_unfold(o.x::<B>(&[2, 9]), 1, 3, 2)];
    unfold4d => [B::unfold4d(o.x::<B>(&[1, 2, 4, 4]), [2, 2], windows())];
    embedding => [B::embedding(o.x::<B>(&[5, 4]), ints::<B>(&[0, 1, 1, 4, 1, 0], &[2, 3]))];
    float_mask_select => [try_read_sync(B::float_mask_select(o.x::<B>(&[4]), bools::<B>(&[true, false, true, true], &[4]))).unwrap()];
    float_pad => [
        B::float_pad(o.x::<B>(&[2, 3]), &[(1, 0), (2, 1)], PadMode::Constant(0.5)),
        B::float_pad(o.x::<B>(&[2, 3]), &[(1, 0), (2, 1)], PadMode::Reflect)];
    float_detach => [B::float_detach(o.x::<B>(&[4]))];
    float_set_require_grad => [B::float_set_require_grad(o.x::<B>(&[4]), false)];
}

/// Operations that create, read or inspect a tensor, most of them tested in `tensors.rs`; operations that
/// Burn 0.22 no longer has; and `ctc_loss_backward`, which Flex does not have on Burn 0.22.
const ELSEWHERE: &[&str] = &[
    "float_is_require_grad",
    "float_device",
    "float_from_data",
    "int_into_float",
    "dequantize",
    "float_zeros",
    "float_ones",
    "float_empty",
    "float_full",
    "bool_into_float",
    "float_random",
    "float_into_data",
    "tr_execute",
    "float_cast",
    "quantize",
    "quantize_dynamic",
    "q_matmul",
    "float_select_add",
    "float_scatter_add",
    "rfft",
    "irfft",
    "ctc_loss_backward",
];

#[test]
fn every_row_has_a_case() {
    let cases: BTreeSet<&str> = OPS.iter().map(|(op, _)| *op).collect();
    assert_eq!(cases.len(), OPS.len(), "an operation has two cases");
    let burn = if cfg!(feature = "burn-0-22") {
        "0.22"
    } else {
        "0.23"
    };
    let rows: BTreeSet<&str> = policy::rows(burn).map(|row| row.op).collect();
    let elsewhere: BTreeSet<&str> = ELSEWHERE.iter().copied().collect();
    let missing: Vec<_> = rows
        .difference(&cases)
        .filter(|op| !elsewhere.contains(*op))
        .collect();
    assert!(missing.is_empty(), "without a case: {missing:?}");
    assert!(
        cases.is_subset(&rows),
        "without a row: {:?}",
        cases.difference(&rows)
    );
}

/// Results with their real dtypes.
fn run<B: Tested>(run: Run<B>, seed: u64, demoted: Demoted) -> Vec<(DType, Vec<f32>)> {
    let made = 0;
    let mut operands = Operands {
        seed,
        demoted,
        made,
    };
    let results = run(&mut operands).into_iter();
    results.map(|out| (out.dtype(), values::<B>(out))).collect()
}

const SEEDS: [u64; 3] = [1, 20, 300];

#[test]
fn fp32_is_the_backends_own_bit_for_bit() {
    let _alone = on(Precision::F32);
    for (i, (op, _)) in OPS.iter().enumerate() {
        for seed in SEEDS {
            let bits = |results: Vec<(DType, Vec<f32>)>| -> Vec<_> {
                let bits =
                    |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                results
                    .into_iter()
                    .map(|(dtype, values)| (dtype, bits(values)))
                    .collect()
            };
            let demoted = Demoted::No;
            let ours = bits(run::<A>(runs::<A>()[i], seed, demoted));
            assert_eq!(
                ours,
                bits(run::<Flex>(runs::<Flex>()[i], seed, demoted)),
                "{op}"
            );
        }
    }
}

/// The class that decides a case.
fn class(op: &str) -> Class {
    match op {
        "float_scatter" | "float_select_assign" => Class::Fp32, // where it accumulates
        "float_unfold" | "unfold4d" => Class::Move,             // without autodiff
        _ => policy::class(op),
    }
}

/// The dtype of the results. Results that are not floats were cast to FP32 for the comparison.
fn expected_dtype(op: &str, demoted: bool, half: DType) -> DType {
    let is_float = ![
        "equal", "greater", "lower", "any", "all", "arg", "is_nan", "is_inf", "into_int",
    ]
    .iter()
    .any(|part| op.contains(part));
    let is_half = match class(op) {
        _ if !is_float => false,
        Class::LowerPrecision => !op.ends_with("_weight_backward"),
        Class::Fp32 => false,
        _ => demoted,
    };
    match is_half {
        true => half,
        false => DType::F32,
    }
}

fn is_up_to_a_rounding(precision: Precision) {
    let _alone = on(precision);
    let half = half(precision);
    let mut wrong = Vec::new();
    for (i, (op, roundings)) in OPS.iter().enumerate() {
        let all = [Demoted::No, Demoted::All, Demoted::Odd, Demoted::Even];
        for (seed, demoted) in SEEDS
            .into_iter()
            .flat_map(|seed| all.map(|all| (seed, all)))
        {
            let ours = run::<A>(runs::<A>()[i], seed, demoted);
            let theirs = run::<Flex>(runs::<Flex>()[i], seed, Demoted::No);
            assert_eq!(ours.len(), theirs.len(), "{op}");
            for ((dtype, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
                let case = format!("{op} in {precision}, demoted {demoted:?}");
                let is_mixed = matches!(demoted, Demoted::Odd | Demoted::Even);
                let expected = match is_mixed {
                    true => dtype,
                    false => expected_dtype(op, demoted == Demoted::All, half),
                };
                if dtype != expected || ours.len() != theirs.len() {
                    wrong.push(format!("{case}: {} of {dtype:?}", ours.len()));
                    continue;
                }
                let rounds = match class(op) {
                    Class::LowerPrecision => true,
                    // Some of several results may be half.
                    Class::Fp32Inside => dtype == half || is_mixed,
                    _ => dtype == half,
                };
                let relative = match rounds {
                    true => 1.01 * roundings * rounding(half),
                    false => 0.0,
                };
                let largest = theirs.iter().fold(0f32, |all, one| all.max(one.abs()));
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    // Each of several roundings may round an intermediate result.
                    let rounded = if *roundings > 1.0 {
                        largest
                    } else {
                        theirs.abs()
                    };
                    // A sum may be added up in another order, or end near zero.
                    let tolerance = rounded * relative + if relative > 0.0 { 1e-5 } else { 0.0 };
                    if (ours - theirs).abs() > tolerance || ours.is_nan() != theirs.is_nan() {
                        wrong.push(format!("{case}: {ours} for {theirs}"));
                        break;
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn f16_is_fp32_up_to_a_rounding() {
    is_up_to_a_rounding(Precision::F16);
}

#[test]
fn bf16_is_fp32_up_to_a_rounding() {
    is_up_to_a_rounding(Precision::Bf16);
}

/// Attention in training of so many queries over so many keys, which all score alike, and values of
/// such a width: its result, the logarithm of its sums, and the gradients of the queries, the keys
/// and the values.
#[cfg(feature = "burn-0-23")]
fn alike<B: Tested>(queries: usize, keys: usize, width: usize) -> [Vec<f32>; 5] {
    let ones = |length: usize| f32s::<B>(&vec![1.0; length * 8], &[1, 1, length, 8]);
    let ramp: Vec<_> = (0..keys * width).map(|i| (i % 16) as f32 / 16.0).collect();
    let value = f32s::<B>(&ramp, &[1, 1, keys, width]);
    let options = AttentionModuleOptions::default();
    let (out, logsumexp) =
        B::attention_with_logsumexp(ones(queries), ones(keys), value.clone(), options);
    let grad = f32s::<B>(&vec![1.0; queries * width], &[1, 1, queries, width]);
    let (query, key) = (ones(queries), ones(keys));
    let given = (out.clone(), logsumexp.clone());
    let grads = B::attention_backward(query, key, value, given.0, given.1, grad, options);
    let grads = [grads.query_grad, grads.key_grad, grads.value_grad].map(values::<B>);
    let [query, key, value] = grads;
    [values::<B>(out), values::<B>(logsumexp), query, key, value]
}

#[cfg(feature = "burn-0-23")]
#[test]
fn attention_in_training_is_as_exact_over_long_sequences_and_wide_values() {
    for [queries, keys, width] in [[1, 16, 8], [1, 4096, 8], [4096, 1, 8], [1, 16, 2048]] {
        let exact = alike::<Flex>(queries, keys, width);
        // The gradients of the query and the keys cancel up to the rounding errors of sums.
        let sum = width as f32 / 2.0;
        let each = queries as f32 / keys as f32;
        let sizes = [0.5, exact[1][0], sum, sum * each, each];
        for precision in [Precision::F16, Precision::Bf16] {
            let _alone = on(precision);
            let ours = alike::<A>(queries, keys, width);
            for (i, name) in ["out", "logsumexp", "query", "key", "value"]
                .iter()
                .enumerate()
            {
                assert_eq!(ours[i].len(), exact[i].len());
                let errors = ours[i].iter().zip(&exact[i]).map(|(o, e)| (o - e).abs());
                let error = errors.fold(0.0, f32::max) / sizes[i];
                let roundings = error / rounding(half(precision));
                assert!(
                    roundings < 2.0,
                    "{name}, {queries}, {keys}, {width}, {precision}: {roundings}"
                );
            }
        }
    }
}

/// If the backward pass has other scores than the forward pass, its probabilities do not sum to 1.
#[cfg(feature = "burn-0-23")]
#[test]
fn the_probabilities_of_attention_in_training_sum_to_one_where_half_rounds_the_scores() {
    // Two equal keys, and a score of 50.1015625, which is 50 in bf16 and 50.09375 in f16.
    let operands = || {
        let query = f32s::<A>(&[8.0, 1.0], &[1, 1, 1, 2]);
        let key = f32s::<A>(&[6.25, 0.101_562_5, 6.25, 0.101_562_5], &[1, 1, 2, 2]);
        [query, key, f32s::<A>(&[0.25, 0.75], &[1, 1, 2, 1])]
    };
    for precision in [Precision::F16, Precision::Bf16] {
        let _alone = on(precision);
        for softcap in [None, Some(64.0)] {
            let options = AttentionModuleOptions {
                scale: Some(1.0),
                softcap,
                ..Default::default()
            };
            let [query, key, value] = operands();
            let (out, logsumexp) = A::attention_with_logsumexp(query, key, value, options);
            let [query, key, value] = operands();
            let grad = f32s::<A>(&[1.0], &[1, 1, 1, 1]);
            let grads = A::attention_backward(query, key, value, out, logsumexp, grad, options);
            let each = values::<A>(grads.value_grad);
            assert_eq!(each, [0.5; 2], "{precision}, {softcap:?}");
        }
    }
}
