//! Attention in the policy's own steps: contractions in half, with a softmax in FP32 between them.

use burn_amp_core::policy::is_half;
use burn_backend::ops::{AttentionModuleOptions, FloatTensorOps};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, Shape, TensorMetadata, get_device_settings};

use super::this_burn::causal_offset;
use super::{Call, op};
use crate::{Amp, AmpTensor};

/// Attention as one operation of the backend. In half, it runs in steps if the device only contracts in half, or
/// if the bias has another dtype. Otherwise it computes in FP32 on operands rounded to half, as Flex does by
/// itself: CubeCL's fast kernels only take f16, and Burn computes what they refuse in steps with a softmax in half.
pub(super) fn attention<B: Backend>(
    mut query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    mask: Option<BoolTensor<B>>,
    attn_bias: Option<AmpTensor<B>>,
    mut options: AttentionModuleOptions,
) -> AmpTensor<B> {
    let bias = attn_bias.as_ref().unwrap_or(&value);
    let call = Call::new(op!(attention), [&query, &key, &value, bias]);
    let half = call.decision.operands.filter(|dtype| is_half(*dtype));
    // A bias that is not half may hold masks of -1e9.
    let is_whole = |half| {
        let of_bias = attn_bias.as_ref().map(TensorMetadata::dtype);
        !call.decision.only_contracts && of_bias.is_none_or(|dtype| dtype == half)
    };
    if half.is_some_and(|half| !is_whole(half)) {
        query = scaled(query, &mut options);
        return scaled_dot_product(query, key, value, mask, attn_bias, options);
    }
    let operand = |tensor| operand(&call, tensor, half.is_some());
    let [query, key, value] = [query, key, value].map(operand);
    let attn_bias = attn_bias.map(operand);
    let out = B::attention(query, key, value, mask, attn_bias, options);
    let dtype = result::<B>(&call, &out);
    call.result_in(dtype, out)
}

/// An operand in the policy's dtype, and then cast to FP32 if `widens`.
pub(super) fn operand<B: Backend>(
    call: &Call,
    tensor: AmpTensor<B>,
    widens: bool,
) -> FloatTensor<B> {
    let operand = call.operand(tensor);
    if widens {
        AmpTensor::<B>::plain(operand).into_dtype(DType::F32, call.op.name)
    } else {
        operand
    }
}

/// The dtype of a result, whatever dtype it was computed in: half, unless the device only contracts in half.
pub(super) fn result<B: Backend>(call: &Call, computed: &FloatTensor<B>) -> DType {
    let decision = &call.decision;
    let dtype = decision.result.or(decision.operands);
    dtype.unwrap_or(computed.dtype())
}

/// The query times the scale of the scores.
fn scaled<B: Backend>(query: AmpTensor<B>, options: &mut AttentionModuleOptions) -> AmpTensor<B> {
    let head = query.shape()[query.rank() - 1] as f64;
    let scale = options.scale.replace(1.0).unwrap_or(1.0 / head.sqrt());
    <Amp<B>>::float_mul_scalar(query, scale.into())
}

/// softmax(softcap(Q Kᵀ) + bias) V for `[batch, heads, length, head]` and a scaled query. Masked
/// scores are minus infinity, and a fully masked row gives zeros.
fn scaled_dot_product<B: Backend>(
    query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    mask: Option<BoolTensor<B>>,
    attn_bias: Option<AmpTensor<B>>,
    options: AttentionModuleOptions,
) -> AmpTensor<B> {
    type A<B> = Amp<B>;

    let mut scores = grouped(query, A::<B>::float_transpose(key));
    if let Some(softcap) = options.softcap {
        assert!(softcap > 0.0, "softcap must be positive, got {softcap}");
        let capped = A::<B>::float_tanh(A::<B>::float_div_scalar(scores, softcap.into()));
        scores = A::<B>::float_mul_scalar(capped, softcap.into());
    }
    if let Some(mask) = mask {
        scores = A::<B>::float_mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if options.is_causal {
        let mask = future::<B>(&scores, &options);
        scores = A::<B>::float_mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if let Some(bias) = attn_bias {
        scores = A::<B>::float_add(scores, bias);
    }
    grouped(masked_softmax(scores), value)
}

/// A product of `[batch, heads, rows, n]` with `[batch, heads, n, columns]`. Several neighbouring
/// heads on the left may share one on the right: their rows are then those of one matrix.
fn grouped<B: Backend>(lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
    type A<B> = Amp<B>;

    let (left, right) = (lhs.shape(), rhs.shape());
    let (heads, shared) = (left[1], right[1]);
    if heads == shared {
        return A::<B>::float_matmul(lhs, rhs);
    }
    assert!(
        shared > 0 && heads % shared == 0,
        "attention with {heads} query heads and {shared} key/value heads: expected {heads}, or a \
         divisor of {heads}"
    );
    let rows = Shape::new([left[0], shared, heads / shared * left[2], left[3]]);
    let product = A::<B>::float_matmul(A::<B>::float_reshape(lhs, rows), rhs);
    A::<B>::float_reshape(product, Shape::new([left[0], heads, left[2], right[3]]))
}

/// A softmax over the last dimension, in FP32. A row without a finite score gives zeros.
fn masked_softmax<B: Backend>(scores: AmpTensor<B>) -> AmpTensor<B> {
    type A<B> = Amp<B>;

    let dim = scores.rank() - 1;
    let largest = A::<B>::float_max_dim(scores.clone(), dim);
    // Half cannot represent the bound, so the largest score becomes FP32.
    let largest = A::<B>::float_clamp_min(largest, f64::from(f32::MIN).into());
    let exps = A::<B>::float_exp(A::<B>::float_sub(scores, largest));
    let sums = A::<B>::float_sum_dim(exps.clone(), dim);
    // A row sums to at least 1, because its largest score contributes 1. A masked row sums to 0.
    let sums = A::<B>::float_clamp_min(sums, 0.5.into());
    A::<B>::float_div(exps, sums)
}

/// True where a key lies in the future of its query.
fn future<B: Backend>(scores: &AmpTensor<B>, options: &AttentionModuleOptions) -> BoolTensor<B> {
    let device = scores.device();
    let settings = get_device_settings::<B>(&device);
    let shape = scores.shape();
    let rank = shape.num_dims();
    let (queries, keys) = (shape[rank - 2], shape[rank - 1]);
    let row = B::int_arange(0..queries as i64, &device, settings.int_dtype);
    let row = B::int_add_scalar(row, causal_offset(options, queries, keys).into());
    let column = B::int_arange(0..keys as i64, &device, settings.int_dtype);
    let row = B::int_reshape(row, Shape::new([queries, 1]));
    let column = B::int_reshape(column, Shape::new([1, keys]));
    let mask = B::int_lower(row, column, settings.bool_dtype);
    let mask = B::bool_reshape(mask, Shape::new([1, 1, queries, keys]));
    B::bool_expand(mask, shape)
}
