//! Attention in training, from Burn 0.23 on: a client sends its forward pass with the logarithms of
//! the softmax's sums, and its backward pass, as one operation each.

use burn_amp_core::policy::is_half;
use burn_backend::ops::{AttentionBackward, AttentionModuleOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};

use super::attention::{operand, result};
use super::this_burn::causal_offset;
use super::{Call, op};
use crate::device::Session;
use crate::{Amp, AmpTensor};

/// The result of attention and, in FP32, the logarithm of each row's sum.
pub(super) type WithLogsumexp<B> = (FloatTensor<B>, FloatTensor<B>);

/// Attention without a mask and a bias, and the logarithm of each query's sum of exponentials. In half, if
/// the backend has no kernel for it, both passes compute in FP32 on operands rounded to half, so that both
/// have the same scores. Burn's own steps round the scores to half.
pub(super) fn attention_with_logsumexp<B: Backend>(
    query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    options: AttentionModuleOptions,
) -> (AmpTensor<B>, AmpTensor<B>) {
    let call = Call::new(op!(attention_with_logsumexp), [&query, &key, &value]);
    let widens = widens(&call, &query, &key, &options);
    let operand = |tensor| operand(&call, tensor, widens);
    let [query, key, value] = [query, key, value].map(operand);
    let (out, logsumexp) = B::attention_with_logsumexp(query, key, value, options);
    let dtype = result::<B>(&call, &out);
    (call.result_in(dtype, out), AmpTensor::plain(logsumexp))
}

/// The gradients of [`attention_with_logsumexp`], in the same kernel or in FP32.
pub(super) fn attention_backward<B: Backend, P: Session>(
    query: AmpTensor<B>,
    key: AmpTensor<B>,
    value: AmpTensor<B>,
    out: AmpTensor<B>,
    logsumexp: AmpTensor<B>,
    out_grad: AmpTensor<B>,
    options: AttentionModuleOptions,
) -> AttentionBackward<Amp<B, P>> {
    let operands = [&query, &key, &value, &out, &out_grad];
    let call = Call::new(op!(attention_backward), operands);
    let widens = widens(&call, &query, &key, &options);
    let operand = |tensor| operand(&call, tensor, widens);
    let [query, key, value] = [query, key, value].map(operand);
    // In FP32, `out` and `out_grad` need no rounding: neither is an operand of the forward pass.
    let [out, out_grad] = [out, out_grad].map(|tensor| {
        if widens {
            tensor.into_dtype(DType::F32, call.op.name)
        } else {
            call.operand(tensor)
        }
    });
    let logsumexp = logsumexp.into_primitive();
    let grads = B::attention_backward(query, key, value, out, logsumexp, out_grad, options);
    let dtype = result::<B>(&call, &grads.query_grad);
    AttentionBackward::new(
        call.result_in(dtype, grads.query_grad),
        call.result_in(dtype, grads.key_grad),
        call.result_in(dtype, grads.value_grad),
    )
}

/// Whether half operands become FP32, because the backend has no kernel for this attention and its gradients
/// that keeps the scores and the sums in FP32. CubeCL's backends have no such kernel for a cap of the scores,
/// or for a causal mask that does not align the last key with the last query.
fn widens<B: Backend>(
    call: &Call,
    query: &AmpTensor<B>,
    key: &AmpTensor<B>,
    options: &AttentionModuleOptions,
) -> bool {
    let (queries, keys) = (query.shape()[2], key.shape()[2]);
    let aligned = keys as i64 - queries as i64;
    let has_kernel = B::has_attention_backward()
        && !call.decision.only_contracts
        && options.softcap.is_none()
        && (!options.is_causal || causal_offset(options, queries, keys) == aligned);
    call.decision.operands.is_some_and(is_half) && !has_kernel
}
