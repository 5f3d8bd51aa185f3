//! Attention as steps of the policy's own: contractions in half, the softmax between in FP32.

use burn_backend::ops::{AttentionModuleOptions, FloatTensorOps};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, FloatDType, Shape, TensorMetadata, get_device_settings};

use super::arithmetic::kept;
use super::recording;
use crate::autodiff::tape::Softmax;
use crate::precision::following;
use crate::tensor::{Marks, converted, is_half};
use crate::{Amp, AmpTensor};

/// The factor on the scores: the option's, else 1/sqrt(head dimension).
pub(super) fn scale<T: TensorMetadata>(query: &T, options: &AttentionModuleOptions) -> f64 {
    let head = query.shape()[query.rank() - 1];
    options.scale.unwrap_or_else(|| 1.0 / (head as f64).sqrt())
}

/// softmax(softcap(scale Q Kᵀ) + bias) V for `[batch, heads, length, head]`, where masked scores
/// are minus infinity and a row that is masked throughout gives zeros.
///
/// As Burn's `attention_fallback`, but the query is scaled before the product, which in f16 would
/// overflow beyond 65504, and a row that is masked throughout has a gradient of zeros, not NaN.
pub(super) fn scaled_dot_product<B: Backend>(
    query: FloatTensor<Amp<B>>,
    key: FloatTensor<Amp<B>>,
    value: FloatTensor<Amp<B>>,
    mask: Option<BoolTensor<Amp<B>>>,
    attn_bias: Option<FloatTensor<Amp<B>>>,
    options: AttentionModuleOptions,
) -> FloatTensor<Amp<B>> {
    type A<B> = Amp<B>;

    let scale = scale(&query, &options);
    let query = A::<B>::float_mul_scalar(query, scale.into());
    let mut scores = A::<B>::float_matmul(query, A::<B>::float_transpose(key));
    if let Some(softcap) = options.softcap {
        assert!(softcap > 0.0, "softcap must be positive, got {softcap}");
        let capped = A::<B>::float_tanh(A::<B>::float_div_scalar(scores, softcap.into()));
        scores = A::<B>::float_mul_scalar(capped, softcap.into());
    }
    if let Some(mask) = mask {
        scores = A::<B>::float_mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if options.is_causal {
        let mask = future::<B>(&scores);
        scores = A::<B>::float_mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if let Some(bias) = attn_bias {
        scores = A::<B>::float_add(scores, bias);
    }
    let dim = scores.rank() - 1;
    let probabilities = match recording(&[&scores]) {
        Some((tape, half)) => {
            let marks = scores.marks() - Marks::WIDENED;
            let kept = kept(&scores, half);
            let scores = scores.into_primitive();
            let out = following(|| tape.softmax(Softmax::Masked, scores, dim, kept));
            AmpTensor::new(out, marks)
        }
        None => masked_softmax::<A<B>>(scores, dim),
    };
    A::<B>::float_matmul(probabilities, value)
}

/// The softmax over a dimension, in FP32; zeros for a row of minus infinities.
pub(crate) fn masked_softmax<B: Backend>(scores: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    let scores = match is_half(scores.dtype()) {
        true => converted::<B>(scores, FloatDType::F32),
        false => scores,
    };
    let info = scores.dtype().finfo().expect("a float dtype");
    let largest = B::float_max_dim(B::float_detach(scores.clone()), dim);
    let largest = B::float_clamp_min(largest, info.min.into());
    let exps = B::float_exp(B::float_sub(scores, largest));
    let sums = B::float_sum_dim(exps.clone(), dim);
    // A row sums to 1 at least, for its largest score counts as 1; a masked one to 0. Half of one
    // leaves room for rounding and, unlike the smallest positive number, can be squared in
    // backward.
    B::float_div(exps, B::float_clamp_min(sums, 0.5.into()))
}

/// True where a key lies in the future of its query, the last of both being aligned.
fn future<B: Backend>(scores: &FloatTensor<Amp<B>>) -> BoolTensor<Amp<B>> {
    let device = scores.device();
    let settings = get_device_settings::<B>(&device);
    let shape = scores.shape();
    let rank = shape.num_dims();
    let (queries, keys) = (shape[rank - 2], shape[rank - 1]);
    let row = B::int_arange(0..queries as i64, &device, settings.int_dtype);
    let row = B::int_add_scalar(row, (keys as i64 - queries as i64).into());
    let column = B::int_arange(0..keys as i64, &device, settings.int_dtype);
    let row = B::int_reshape(row, Shape::new([queries, 1]));
    let column = B::int_reshape(column, Shape::new([1, keys]));
    let mask = B::int_lower(row, column, settings.bool_dtype);
    let mask = B::bool_reshape(mask, Shape::new([1, 1, queries, keys]));
    B::bool_expand(mask, shape)
}
