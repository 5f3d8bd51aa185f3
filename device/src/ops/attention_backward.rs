//! Attention in training, from Burn 0.23 on: a client sends its forward pass with the logarithms of
//! the softmax's sums, and its backward pass, as one operation each.

use burn_amp_core::policy::is_half;
use burn_backend::ops::{
    AttentionBackward, AttentionModuleOptions, FloatTensorOps, attention::AttentionShapes,
};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata};

use super::attention::{MaskedSoftmax, context, scaled, scores};
use super::this_burn::causal_offset;
use super::{Call, op};
use crate::device::Session;
use crate::{Amp, AmpTensor};

/// The result of attention and, in FP32, the logarithm of each row's sum.
pub(super) type WithLogsumexp<B> = (FloatTensor<B>, FloatTensor<B>);

/// Attention without a mask and a bias, and the logarithm of each query's sum of exponentials. In
/// half, without a kernel of the backend's for it, in steps of the policy's own: a device need not be
/// exact in Burn's.
pub(super) fn attention_with_logsumexp<B: Backend>(
    query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    mut options: AttentionModuleOptions,
) -> (AmpTensor<B>, AmpTensor<B>) {
    let call = Call::new(op!(attention_with_logsumexp), [&query, &key, &value]);
    if is_in_half(&call) && !has_kernel(&call, &query, &key, &options) {
        let query = scaled(query, &mut options).0;
        return steps_with_logsumexp(query, key, value, options);
    }
    let [query, key, value] = [query, key, value].map(|operand| call.operand(operand));
    let (out, logsumexp) = B::attention_with_logsumexp(query, key, value, options);
    (call.result(out), AmpTensor::plain(logsumexp))
}

/// The gradients of [`attention_with_logsumexp`]: in one kernel of the backend's or, in half without
/// such a kernel, in FP32. Burn's own steps sum in the dtype of the operands.
pub(super) fn attention_backward<B: Backend, P: Session>(
    mut query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    out: AmpTensor<B>,
    logsumexp: AmpTensor<B>,
    out_grad: AmpTensor<B>,
    mut options: AttentionModuleOptions,
) -> AttentionBackward<Amp<B, P>> {
    let operands = [&query, &key, &value, &out, &out_grad];
    let call = Call::new(op!(attention_backward), operands);
    let kernel = has_kernel(&call, &query, &key, &options);
    let logsumexp = logsumexp.into_primitive();
    let (grads, scale) = if is_in_half(&call) && !kernel {
        // The values of the forward pass, so that the probabilities are those that it had.
        let (scaled, scale) = scaled(query, &mut options);
        query = scaled;
        let widened = |tensor| {
            let half = AmpTensor::<B>::plain(call.operand(tensor));
            half.into_dtype(DType::F32, call.op.name)
        };
        let [query, key, value] = [query, key, value].map(widened);
        let [out, out_grad] = [out, out_grad].map(|t| t.into_dtype(DType::F32, call.op.name));
        let grads = B::attention_backward(query, key, value, out, logsumexp, out_grad, options);
        (grads, Some(scale))
    } else {
        let [query, key, value] = [query, key, value].map(|operand| call.operand(operand));
        let [out, out_grad] = [out, out_grad].map(|operand| call.operand(operand));
        let grads = B::attention_backward(query, key, value, out, logsumexp, out_grad, options);
        (grads, None)
    };
    let query_grad = match scale {
        Some(scale) => B::float_mul_scalar(grads.query_grad, scale.into()),
        None => grads.query_grad,
    };
    let dtype = call.decision.operands.unwrap_or(query_grad.dtype());
    AttentionBackward::new(
        call.result_in(dtype, query_grad),
        call.result_in(dtype, grads.key_grad),
        call.result_in(dtype, grads.value_grad),
    )
}

fn is_in_half(call: &Call) -> bool {
    call.decision.operands.is_some_and(is_half)
}

/// Whether the backend computes an attention, and its gradients, in one kernel each: with the scores
/// and the sums in FP32. CubeCL's backends have none for a cap of the scores, and none for a causal
/// mask that does not align the last key with the last query.
fn has_kernel<B: Backend>(
    call: &Call,
    query: &AmpTensor<B>,
    key: &AmpTensor<B>,
    options: &AttentionModuleOptions,
) -> bool {
    let (queries, keys) = (query.shape()[2], key.shape()[2]);
    let aligned = keys as i64 - queries as i64;
    B::has_attention_backward()
        && !call.decision.only_contracts
        && options.softcap.is_none()
        && (!options.is_causal || causal_offset(options, queries, keys) == aligned)
}

/// The same in steps, for a scaled query.
fn steps_with_logsumexp<B: Backend>(
    query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    options: AttentionModuleOptions,
) -> (AmpTensor<B>, AmpTensor<B>) {
    let shapes = AttentionShapes::new(&query.shape(), &key.shape(), &value.shape());
    let softmax = MaskedSoftmax::of(scores(query, key, None, None, options));
    let logsumexp = <Amp<B>>::float_add(softmax.largest, <Amp<B>>::float_log(softmax.sums));
    let rows = Shape::new([shapes.batch, shapes.q_heads, shapes.seq_q]);
    let logsumexp = <Amp<B>>::float_reshape(logsumexp, rows);
    let logsumexp = AmpTensor::plain(logsumexp.into_dtype(DType::F32, "attention_with_logsumexp"));
    (context(softmax.probabilities, value), logsumexp)
}
