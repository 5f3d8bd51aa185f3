//! Neural network operations.

use burn_amp_core::policy::{Op, is_half};
#[cfg(feature = "burn-0-23")]
use burn_backend::ops::{AttentionBackward, MaxPool3dBackward, MaxPool3dWithIndices};
use burn_backend::ops::{
    AttentionModuleOptions, BatchNormTrain, BatchNormTrainBackward, ConvOptions,
    ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions, FloatTensorOps,
    InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward,
    MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, IntDType, TensorMetadata};

use super::attention::attention;
#[cfg(feature = "burn-0-23")]
use super::attention_backward::{WithLogsumexp, attention_backward, attention_with_logsumexp};
use super::this_burn::module_operations;
use super::{Call, delegate, float_ops, op, own_ops, present};
use crate::device::Session;
use crate::{Amp, AmpTensor};

/// Convolutions, each with the gradient of its bias.
macro_rules! conv_ops {
    ($($conv:ident($options:ty); $bias_backward:ident;)*) => {$(
        own_ops! {
            $conv([x], [weight], [?bias], options: $options) -> FloatTensor => {
                let op = op!($conv).convolving(&x.shape(), &weight.shape(), burn_amp_core::convolution!(options));
                contraction(op, 1, x, weight, bias, |x, weight, bias| {
                    B::$conv(x, weight, bias, options)
                })
            };
            $bias_backward([x], [bias], [output_grad]) -> FloatTensor =>
                bias_backward(op!($bias_backward), x, bias, output_grad, B::$bias_backward);
        }
    )*};
}

impl<B: Backend, P: Session> ModuleOps<Self> for Amp<B, P> {
    conv_ops! {
        conv1d(ConvOptions<1>); conv1d_bias_backward;
        conv2d(ConvOptions<2>); conv2d_bias_backward;
        conv3d(ConvOptions<3>); conv3d_bias_backward;
        conv_transpose1d(ConvTransposeOptions<1>); conv_transpose1d_bias_backward;
        conv_transpose2d(ConvTransposeOptions<2>); conv_transpose2d_bias_backward;
        conv_transpose3d(ConvTransposeOptions<3>); conv_transpose3d_bias_backward;
    }

    own_ops! {
        linear([x], [weight], [?bias]) -> FloatTensor => linear(x, weight, bias);
        attention([query], [key], [value], mask: Option<BoolTensor<Self>>, [?attn_bias], options: AttentionModuleOptions) -> FloatTensor => attention(query, key, value, mask, attn_bias, options);
        batch_norm_train_backward([x], [gamma], [mean], [variance], epsilon: f64, [output_grad]) -> BatchNormTrainBackward => batch_norm_train_backward(x, gamma, mean, variance, epsilon, output_grad);
        deform_conv2d_backward([x], [offset], [weight], [?mask], [?bias], [output_grad], options: DeformConvOptions<2>) -> DeformConv2dBackward => deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options);
    }

    float_ops! {
        linear_x_backward([weight], [output_grad]) -> FloatTensor;
        batch_norm([x], [gamma], [beta], [mean], [variance], epsilon: f64) -> FloatTensor;
        batch_norm_train([x], [gamma], [beta], epsilon: f64) -> BatchNormTrain;
        layer_norm([tensor], [gamma], [?beta], epsilon: f64) -> FloatTensor;
        fold4d([x], output_size: [usize; 2], kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor;
        adaptive_avg_pool3d([x], output_size: [usize; 3]) -> FloatTensor;
        max_pool1d_with_indices([x], kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool, indices_dtype: IntDType) -> MaxPool1dWithIndices;
        max_pool2d_with_indices([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, indices_dtype: IntDType) -> MaxPool2dWithIndices;
        linear_weight_backward([x], [output_grad]) -> FloatTensor;
        linear_bias_backward([output_grad]) -> FloatTensor;
        adaptive_avg_pool3d_backward([x], [grad]) -> FloatTensor;
    }

    delegate! {
        #[cfg(feature = "burn-0-23")]
        fn has_attention_backward() -> bool;
        fn has_ctc_loss_backward() -> bool;
    }

    #[cfg(feature = "burn-0-23")]
    own_ops! {
        attention_with_logsumexp([query], [key], [value], options: AttentionModuleOptions) -> WithLogsumexp => attention_with_logsumexp(query, key, value, options);
        attention_backward([query], [key], [value], [out], [logsumexp], [out_grad], options: AttentionModuleOptions) -> AttentionBackward => attention_backward(query, key, value, out, logsumexp, out_grad, options);
    }

    module_operations! { float_ops }

    burn_amp_core::module_operations! { float_ops }
}

fn linear<B: Backend>(
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
) -> AmpTensor<B> {
    let channels = x.rank() - 1;
    contraction(op!(linear), channels, x, weight, bias, B::linear)
}

/// A contraction of `x` with a weight, and a bias added along dimension `channels` of the result.
///
/// A device that only multiplies matrices in half cannot add a half bias: it adds the bias in FP32.
fn contraction<B: Backend>(
    op: Op,
    channels: usize,
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
    run: impl FnOnce(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&x, &weight, bias.as_ref().unwrap_or(&weight)]);
    let (x, weight) = (call.operand(x), call.operand(weight));
    match bias {
        Some(bias) if call.decision.only_contracts => {
            shifted(call.result(run(x, weight, None)), channels, bias)
        }
        bias => {
            let bias = bias.map(|bias| call.operand(bias));
            call.result(run(x, weight, bias))
        }
    }
}

/// A tensor plus a bias along one dimension.
fn shifted<B: Backend>(tensor: AmpTensor<B>, dim: usize, bias: AmpTensor<B>) -> AmpTensor<B> {
    let mut shape = vec![1; tensor.rank()];
    shape[dim] = bias.shape().num_elements();
    <Amp<B>>::float_add(tensor, <Amp<B>>::float_reshape(bias, shape.into()))
}

/// The gradient of a convolution's bias. Only the shapes of `x` and the bias matter: the output
/// gradient stands in for a half `x`, which saves a cast.
fn bias_backward<B: Backend>(
    op: Op,
    x: AmpTensor<B>,
    bias: AmpTensor<B>,
    output_grad: AmpTensor<B>,
    run: impl FnOnce(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&bias, &output_grad]);
    let stand_in = x.dtype() != output_grad.dtype() || is_half(x.dtype());
    let (bias, output_grad) = (call.operand(bias), call.operand(output_grad));
    let x = if stand_in {
        output_grad.clone()
    } else {
        x.into_primitive()
    };
    call.result(run(x, bias, output_grad))
}

/// Each gradient in the dtype of its operand.
fn batch_norm_train_backward<B: Backend, P: Session>(
    x: AmpTensor<B>,
    gamma: AmpTensor<B>,
    mean: AmpTensor<B>,
    variance: AmpTensor<B>,
    epsilon: f64,
    output_grad: AmpTensor<B>,
) -> BatchNormTrainBackward<Amp<B, P>> {
    let tensors = [&x, &gamma, &mean, &variance, &output_grad];
    let call = Call::new(op!(batch_norm_train_backward), tensors);
    let (x_dtype, gamma_dtype) = (x.dtype(), gamma.dtype());
    let [x, gamma, mean] = [x, gamma, mean].map(|operand| call.operand(operand));
    let [variance, output_grad] = [variance, output_grad].map(|operand| call.operand(operand));
    let grads = B::batch_norm_train_backward(x, gamma, mean, variance, epsilon, output_grad);
    BatchNormTrainBackward::new(
        call.result_in(x_dtype, grads.x_grad),
        call.result_in(gamma_dtype, grads.gamma_grad),
        call.result_in(gamma_dtype, grads.beta_grad),
    )
}

/// Each gradient in the dtype of its operand.
fn deform_conv2d_backward<B: Backend, P: Session>(
    x: AmpTensor<B>,
    offset: AmpTensor<B>,
    weight: AmpTensor<B>,
    mask: Option<AmpTensor<B>>,
    bias: Option<AmpTensor<B>>,
    output_grad: AmpTensor<B>,
    options: DeformConvOptions<2>,
) -> DeformConv2dBackward<Amp<B, P>> {
    let tensors = present([
        Some(&x),
        Some(&offset),
        Some(&weight),
        mask.as_ref(),
        bias.as_ref(),
        Some(&output_grad),
    ]);
    let call = Call::new(op!(deform_conv2d_backward), tensors);
    let dtypes = tensors.map(|tensor| tensor.dtype());
    let [x, offset, weight] = [x, offset, weight].map(|operand| call.operand(operand));
    let [mask, bias] = [mask, bias].map(|operand| operand.map(|operand| call.operand(operand)));
    let output_grad = call.operand(output_grad);
    let grads = B::deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options);
    DeformConv2dBackward::new(
        call.result_in(dtypes[0], grads.x_grad),
        call.result_in(dtypes[1], grads.offset_grad),
        call.result_in(dtypes[2], grads.weight_grad),
        grads.mask_grad.map(|grad| call.result_in(dtypes[3], grad)),
        grads.bias_grad.map(|grad| call.result_in(dtypes[4], grad)),
    )
}
