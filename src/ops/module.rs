//! Neural network operations.

use burn_amp_core::policy::trials::{Kind, Strides};
use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, FloatTensorOps, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
    MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, TensorMetadata};

use super::arithmetic::kept;
use super::attention::attention;
use super::{Call, checked, float_ops, op, own_ops, present};
use crate::autodiff::tape::Sign;
use crate::policy::{Op, is_half};
use crate::workarounds::fusion::{apart, linear_of_rows, row_or_column_apart};
use crate::{Amp, AmpTensor};

/// Convolutions, each with the gradient of its bias.
macro_rules! conv_ops {
    ($($conv:ident($options:ty), $strides:expr; $bias_backward:ident;)*) => {$(
        own_ops! {
            $conv([x], [weight], [?bias], options: $options) -> FloatTensor => {
                let op = op!($conv).of_kind(kind(&weight, options.groups, $strides(&options.stride)));
                contraction(op, 1, x, weight, bias, |_, x, weight, bias| {
                    B::$conv(x, apart::<B>(weight), bias, options)
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

impl<B: Backend> ModuleOps<Self> for Amp<B> {
    conv_ops! {
        conv1d(ConvOptions<1>), gathered; conv1d_bias_backward;
        conv2d(ConvOptions<2>), gathered; conv2d_bias_backward;
        conv3d(ConvOptions<3>), gathered; conv3d_bias_backward;
        conv_transpose1d(ConvTransposeOptions<1>), Strides::Spread; conv_transpose1d_bias_backward;
        conv_transpose2d(ConvTransposeOptions<2>), Strides::Spread; conv_transpose2d_bias_backward;
        conv_transpose3d(ConvTransposeOptions<3>), Strides::Spread; conv_transpose3d_bias_backward;
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
        let (op, operands) = (op!(linear_x_backward), [weight, output_grad]);
        let [x_grad] = checked(op, operands, |[weight, output_grad]| {
            [by_rows::<B>(output_grad, |grad| {
                row_or_column_apart::<B>(B::linear_x_backward(weight, grad))
            })]
        });
        x_grad
    }

    /// In half, one contraction: a separate sum over the batch would run in half.
    fn linear_weight_backward(
        x: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (op, operands) = (op!(linear_weight_backward), [x, output_grad]);
        let [weight_grad] = checked(op, operands, |[x, output_grad]| {
            [row_or_column_apart::<B>(B::linear_weight_backward(
                rows::<B>(x),
                rows::<B>(output_grad),
            ))]
        });
        weight_grad
    }

    /// In half, one sum: every further sum would round again.
    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let (op, operands) = (op!(linear_bias_backward), [output_grad]);
        let [bias_grad] = checked(op, operands, |[output_grad]| {
            [B::linear_bias_backward(rows::<B>(output_grad))]
        });
        bias_grad
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

/// The kind of a convolution with this weight, for the trials of devices.
fn kind<B: Backend>(weight: &AmpTensor<B>, groups: usize, strides: Strides) -> Kind {
    Kind::of_convolution(&weight.shape(), groups, strides)
}

fn gathered(_: &[usize]) -> Strides<'_> {
    Strides::Gathered
}

/// A half tensor with its leading dimensions folded into one, unless autodiff records them.
fn rows<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let (leading, features) = shape.split_at(shape.num_dims() - 1);
    let folds = leading.len() > 1 && is_half(tensor.dtype());
    if folds && !B::ad_enabled(&B::float_device(&tensor)) {
        let (rows, features) = (leading.iter().product(), features[0]);
        B::float_reshape(tensor, Shape::new([rows, features]))
    } else {
        tensor
    }
}

/// Multiplies the rows of a tensor with a matrix: in half with one contraction instead of one for each
/// batch. On LibTorch this takes half the time.
fn by_rows<B: Backend>(
    tensor: FloatTensor<B>,
    product: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let mut shape = tensor.shape();
    let out = product(rows::<B>(tensor));
    let last = shape.num_dims() - 1;
    if out.rank() == shape.num_dims() {
        return out;
    }
    shape[last] = out.shape()[out.rank() - 1];
    B::float_reshape(out, shape)
}

fn linear<B: Backend>(
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
) -> AmpTensor<B> {
    let channels = x.rank() - 1;
    let op = op!(linear);
    contraction(op, channels, x, weight, bias, |call, x, weight, bias| {
        let recording = call.recording::<B>();
        recording
            .and_then(|(tape, _)| tape.linear(&x, &weight, bias.as_ref()))
            .unwrap_or_else(|| by_rows::<B>(x, |x| linear_of_rows::<B>(x, weight, bias)))
    })
}

/// The real and the imaginary part.
type Spectrum<B> = (FloatTensor<B>, FloatTensor<B>);

fn layer_norm<B: Backend>(
    tensor: AmpTensor<B>,
    gamma: AmpTensor<B>,
    beta: Option<AmpTensor<B>>,
    epsilon: f64,
) -> AmpTensor<B> {
    let operands = [&tensor, &gamma, beta.as_ref().unwrap_or(&gamma)];
    let call = Call::new(op!(layer_norm), operands);
    if let Some((tape, half)) = call.recording::<B>() {
        [&tensor, &gamma].into_iter().for_each(|t| call.watch(t));
        let [tensor, gamma] = [tensor, gamma].map(|operand| call.recorded_operand(operand));
        let beta = beta.map(|beta| call.recorded_operand(beta));
        let kept = kept(&tensor, half);
        let channels = tensor.rank() - 1;
        let (tensor, gamma) = (tensor.into_primitive(), gamma.into_primitive());
        let out = call.run(|| tape.layer_norm(tensor, gamma, epsilon, kept));
        let out = call.recorded(out);
        let out = match beta.map(|beta| along(channels, out.rank(), beta)) {
            // The gradient of beta is one sum.
            Some(beta) if beta.dtype() == out.dtype() => {
                [&out, &beta].into_iter().for_each(|t| call.watch(t));
                let operands = [out, beta].map(AmpTensor::into_primitive);
                call.recorded(call.run(|| tape.sum(Sign::Plus, operands)))
            }
            Some(beta) => Amp::<B>::float_add(out, beta),
            None => out,
        };
        return call.marked(call.in_result_dtype::<B>(out.into_primitive()));
    }
    let (tensor, gamma) = (call.operand(tensor), call.operand(gamma));
    let beta = beta.map(|beta| call.operand(beta));
    call.result(call.run(|| B::layer_norm(tensor, gamma, beta, epsilon)))
}

/// Each gradient in the dtype of its operand.
fn deform_conv2d_backward<B: Backend>(
    x: AmpTensor<B>,
    offset: AmpTensor<B>,
    weight: AmpTensor<B>,
    mask: Option<AmpTensor<B>>,
    bias: Option<AmpTensor<B>>,
    output_grad: AmpTensor<B>,
    options: DeformConvOptions<2>,
) -> DeformConv2dBackward<Amp<B>> {
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
        call.recorded(AmpTensor::<B>::plain(grad).into_dtype(dtypes[operand]))
    };
    DeformConv2dBackward::new(
        result(grads.x_grad, 0),
        result(grads.offset_grad, 1),
        result(grads.weight_grad, 2),
        grads.mask_grad.map(|grad| result(grad, 3)),
        grads.bias_grad.map(|grad| result(grad, 4)),
    )
}

/// A tensor plus a bias along one dimension.
fn shifted<B: Backend>(tensor: AmpTensor<B>, dim: usize, bias: AmpTensor<B>) -> AmpTensor<B> {
    let bias = along(dim, tensor.rank(), bias);
    Amp::<B>::float_add(tensor, bias)
}

/// A tensor of one dimension as dimension `dim` of `rank`.
fn along<B: Backend>(dim: usize, rank: usize, tensor: AmpTensor<B>) -> AmpTensor<B> {
    let mut shape = vec![1; rank];
    shape[dim] = tensor.shape().num_elements();
    Amp::<B>::float_reshape(tensor, shape.into())
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

/// A contraction of `x` with a weight, and a bias added along dimension `channels` of the result.
///
/// A device that only multiplies matrices in half cannot add a half bias: it adds the bias in FP32.
fn contraction<B: Backend>(
    op: Op,
    channels: usize,
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
    run: impl FnOnce(&Call, FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(op, [&x, &weight, bias.as_ref().unwrap_or(&weight)]);
    let (x, weight) = (call.operand(x), call.operand(weight));
    match bias {
        Some(bias) if call.decision.only_contracts => {
            let out = call.result(call.run(|| run(&call, x, weight, None)));
            shifted(out, channels, bias)
        }
        bias => {
            let bias = bias.map(|bias| call.operand(bias));
            call.result(call.run(|| run(&call, x, weight, bias)))
        }
    }
}
