//! Neural network operations.

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
    MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};

use super::arithmetic::{added, kept};
use super::attention::attention;
use crate::autodiff::recorded::{LayerNorm, Linear};
use crate::call::{
    self, Call, checked, contraction, float_ops, linear_kernel, op, own_ops, present,
};
use crate::device::is_fused;
use crate::policy::{Op, is_half};
use crate::tensor::Side;
use crate::workarounds::fusion::unfused;
use crate::{Amp, AmpTensor};

/// Convolutions, each with the gradient of its bias.
macro_rules! conv_ops {
    ($($conv:ident($options:ty); $bias_backward:ident;)*) => {$(
        own_ops! {
            $conv([x], [weight], [?bias], options: $options) -> FloatTensor => {
                let op = op!($conv).convolving(&x.shape(), &weight.shape(), burn_amp_core::convolution!(options));
                contraction(op, 1, x, weight, bias, added, |_, x, weight, bias| {
                    B::$conv(x, unfused::<B, S>(weight), bias, options.clone())
                })
            };
        }

        fn $bias_backward(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            bias_backward(op!($bias_backward), x, bias, output_grad, B::$bias_backward)
        }
    )*};
}

impl<B: Backend, S: Side<B>> ModuleOps<Self> for Amp<B, S> {
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
        layer_norm([tensor], [gamma], [?beta], epsilon: f64) -> FloatTensor => layer_norm(tensor, gamma, beta, epsilon);
        deform_conv2d_backward([x], [offset], [weight], [?mask], [?bias], [output_grad], options: DeformConvOptions<2>) -> DeformConv2dBackward => deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options);
    }

    fn linear_x_backward(
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        call::linear_x_backward(weight, output_grad)
    }

    fn linear_weight_backward(
        x: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        call::linear_weight_backward(x, output_grad)
    }

    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        call::linear_bias_backward(output_grad)
    }

    float_ops! {
        avg_pool1d([x], kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
        avg_pool2d([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
        avg_pool1d_backward([x], [grad], kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
        avg_pool2d_backward([x], [grad], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
        irfft([spectrum_re], [spectrum_im], dim: usize, n: Option<usize>) -> FloatTensor;
        max_pool1d_with_indices([x], kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> MaxPool1dWithIndices;
        max_pool2d_with_indices([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> MaxPool2dWithIndices;
        rfft([signal], dim: usize, n: Option<usize>) -> Spectrum;
    }

    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    burn_amp_core::module_operations! { float_ops }
}

fn linear<B: Backend, S: Side<B>>(
    x: AmpTensor<B, S>,
    weight: AmpTensor<B, S>,
    bias: Option<AmpTensor<B, S>>,
) -> AmpTensor<B, S> {
    let channels = x.rank() - 1;
    let op = op!(linear);
    contraction(
        op,
        channels,
        x,
        weight,
        bias,
        added,
        |call, x, weight, bias| {
            let records = call.decision.records_in.is_some() && is_fused::<B>(&B::float_device(&x));
            let recorded = match bias {
                Some(bias) => call
                    .record_if(records, Linear, [x, weight, bias])
                    .map_err(|[x, weight, bias]| (x, weight, Some(bias))),
                None => call
                    .record_if(records, Linear, [x, weight])
                    .map_err(|[x, weight]| (x, weight, None)),
            };
            recorded.unwrap_or_else(|(x, weight, bias)| linear_kernel::<B, S>(x, weight, bias))
        },
    )
}

/// The real and the imaginary part.
type Spectrum<B> = (FloatTensor<B>, FloatTensor<B>);

fn layer_norm<B: Backend, S: Side<B>>(
    tensor: AmpTensor<B, S>,
    gamma: AmpTensor<B, S>,
    beta: Option<AmpTensor<B, S>>,
    epsilon: f64,
) -> AmpTensor<B, S> {
    let operands = [&tensor, &gamma, beta.as_ref().unwrap_or(&gamma)];
    let call = Call::new(op!(layer_norm), operands);
    let Some(half) = call.decision.records_in else {
        let (tensor, gamma) = (call.operand(tensor), call.operand(gamma));
        let beta = beta.map(|beta| call.operand(beta));
        return call.result(call.run(|| B::layer_norm(tensor, gamma, beta, epsilon)));
    };
    let operands = [Some(&tensor), Some(&gamma), beta.as_ref()];
    let operands = operands.into_iter().flatten();
    operands.for_each(|operand| call.watch(operand));
    let [tensor, gamma] = [tensor, gamma].map(|operand| call.recorded_operand(operand));
    let step = LayerNorm {
        epsilon,
        kept: kept(&tensor, half),
    };
    let [tensor, gamma] = [tensor, gamma].map(AmpTensor::into_primitive);
    let beta = beta.map(|beta| call.recorded_operand(beta).into_primitive());
    let out =
        call.in_own_dtype(call.run(|| {
            match beta {
                Some(beta) => S::record(step, [tensor, gamma, beta]).unwrap_or_else(
                    |[tensor, gamma, beta]| B::layer_norm(tensor, gamma, Some(beta), epsilon),
                ),
                None => S::record(step, [tensor, gamma])
                    .unwrap_or_else(|[tensor, gamma]| B::layer_norm(tensor, gamma, None, epsilon)),
            }
        }));
    call.marked(call.in_result_dtype(out.into_primitive()))
}

/// Each gradient in the dtype of its operand.
fn deform_conv2d_backward<B: Backend, S: Side<B>>(
    x: AmpTensor<B, S>,
    offset: AmpTensor<B, S>,
    weight: AmpTensor<B, S>,
    mask: Option<AmpTensor<B, S>>,
    bias: Option<AmpTensor<B, S>>,
    output_grad: AmpTensor<B, S>,
    options: DeformConvOptions<2>,
) -> DeformConv2dBackward<Amp<B, S>> {
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
    let grads =
        call.run(|| B::deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options));
    let result = |grad: FloatTensor<B>, operand: usize| {
        call.in_own_dtype(AmpTensor::<B, S>::plain(grad).into_dtype(dtypes[operand]))
    };
    DeformConv2dBackward::new(
        result(grads.x_grad, 0),
        result(grads.offset_grad, 1),
        result(grads.weight_grad, 2),
        grads.mask_grad.map(|grad| result(grad, 3)),
        grads.bias_grad.map(|grad| result(grad, 4)),
    )
}

/// The gradient of a convolution's bias. Only the shapes of `x` and the bias matter: the output
/// gradient stands in for a half `x`, which saves a cast.
fn bias_backward<B: Backend, S: Side<B>>(
    op: Op,
    x: AmpTensor<B, S>,
    bias: AmpTensor<B, S>,
    output_grad: AmpTensor<B, S>,
    run: impl FnOnce(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let stand_in = x.dtype() != output_grad.dtype() || is_half(x.dtype());
    let operands = [bias, output_grad];
    let [bias_grad] = checked(op, operands, |[bias, output_grad]| {
        let x = if stand_in {
            output_grad.clone()
        } else {
            x.into_primitive()
        };
        [run(x, bias, output_grad)]
    });
    bias_grad
}
