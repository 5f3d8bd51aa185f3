//! Attention as steps under the policy: contractions in half, with a softmax in FP32 between them.

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::BoolTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata, get_device_settings};

use super::activation::activated;
use super::arithmetic::{added, kept};
use crate::AmpTensor;
use crate::autodiff::recorded::{Activation, Softmax, SoftmaxKind};
use crate::call::{Call, div_scalar, mask_fill, masked_softmax, matmul, mul_scalar, op, transpose};
use crate::policy::is_half;
use crate::precision::keep_dtypes;
use crate::tensor::{Side, TensorFlags};
use crate::workarounds::cubecl;

/// Attention. In half it is composed of steps if autodiff records it, if the device only contracts in
/// half, if the bias has another dtype, or on CubeCL's backends. Otherwise it is one operation of the backend.
pub(super) fn attention<B: Backend, S: Side<B>>(
    mut query: AmpTensor<B, S>,
    key: AmpTensor<B, S>,
    value: AmpTensor<B, S>,
    mask: Option<BoolTensor<B>>,
    attn_bias: Option<AmpTensor<B, S>>,
    mut options: AttentionModuleOptions,
) -> AmpTensor<B, S> {
    let bias = attn_bias.as_ref().unwrap_or(&value);
    let call = Call::new(op!(attention), [&query, &key, &value, bias]);
    if let Some(half) = call.decision.operands.filter(|dtype| is_half(*dtype)) {
        let device = query.device();
        let whole = !S::RECORDS
            && !call.decision.only_contracts
            && attn_bias.as_ref().is_none_or(|bias| bias.dtype() == half)
            && !cubecl::attends_inexactly::<B>(&device);
        // Scale the query instead of the scores: unscaled scores may exceed 65504.
        if half == DType::F16 || !whole {
            let head = query.shape()[query.rank() - 1] as f64;
            let scale = options.scale.replace(1.0).unwrap_or(1.0 / head.sqrt());
            query = mul_scalar(query, scale);
        }
        if !whole {
            let out = scaled_dot_product(&call, query, key, value, mask, attn_bias, options);
            return call.marked(out.into_primitive());
        }
    }
    let (query, key) = (call.operand(query), call.operand(key));
    let value = call.operand(value);
    let attn_bias = attn_bias.map(|bias| call.operand(bias));
    call.result(call.run(|| B::attention(query, key, value, mask, attn_bias, options)))
}

/// softmax(softcap(Q Kᵀ) + bias) V for `[batch, heads, length, head]` and a scaled query. Masked
/// scores are minus infinity.
///
/// A fully masked row gives zeros, with a gradient of zeros. With Burn's `attention_fallback` the
/// gradient is NaN.
fn scaled_dot_product<B: Backend, S: Side<B>>(
    call: &Call<B, S>,
    query: AmpTensor<B, S>,
    key: AmpTensor<B, S>,
    value: AmpTensor<B, S>,
    mask: Option<BoolTensor<B>>,
    attn_bias: Option<AmpTensor<B, S>>,
    options: AttentionModuleOptions,
) -> AmpTensor<B, S> {
    let mut scores = matmul(query, transpose(key));
    if let Some(softcap) = options.softcap {
        assert!(softcap > 0.0, "softcap must be positive, got {softcap}");
        let scaled = div_scalar(scores, softcap);
        let call = Call::new(op!(float_tanh), [&scaled]);
        let capped = activated(call, Activation::Tanh, scaled);
        scores = mul_scalar(capped, softcap);
    }
    if let Some(mask) = mask {
        scores = mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if options.is_causal {
        let mask = future(&scores);
        scores = mask_fill(scores, mask, f64::NEG_INFINITY.into());
    }
    if let Some(bias) = attn_bias {
        scores = added(scores, bias);
    }
    let dim = scores.rank() - 1;
    let probabilities = match call.decision.records_in {
        Some(half) => {
            let flags = scores.flags() - TensorFlags::FITS;
            let step = Softmax {
                kind: SoftmaxKind::Masked,
                dim,
                kept: kept(&scores, half),
            };
            let scaled = scores.scaled().cloned();
            let scores = [scores.into_primitive()];
            match keep_dtypes(|| S::record(step, scores)) {
                Ok(out) => AmpTensor::new(out, flags).with_scaled(scaled),
                Err([scores]) => masked_softmax(AmpTensor::new(scores, flags), dim),
            }
        }
        None => masked_softmax(scores, dim),
    };
    matmul(probabilities, value)
}

/// True where a key lies in the future of its query. The last key is aligned with the last query.
fn future<B: Backend, S: Side<B>>(scores: &AmpTensor<B, S>) -> BoolTensor<B> {
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
