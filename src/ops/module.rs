//! Neural network operations.

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, FloatTensorOps, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
    MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, TensorMetadata};

use super::arithmetic::kept;
use super::attention::{scale, scaled_dot_product};
use super::{Call, Op, backward_ops, by_policy, float_ops, op, recording};
use crate::policy::is_half;
use crate::precision::half_wanted;
use crate::{Amp, AmpTensor};

/// A convolution and the gradient of its bias.
macro_rules! conv_ops {
    ($conv:ident, $bias_backward:ident, $options:ty) => {
        fn $conv(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            options: $options,
        ) -> FloatTensor<Self> {
            contraction(op!($conv), 1, x, weight, bias, |x, weight, bias| {
                B::$conv(x, weight, bias, options)
            })
        }

        /// Only the shapes of `x` and the bias matter: the output gradient stands in for a half
        /// `x`, which saves a cast.
        fn $bias_backward(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let call = Call::new(op!($bias_backward), &[&bias, &output_grad]);
            let stand_in = x.dtype() != output_grad.dtype() || is_half(x.dtype());
            let bias = call.operand(bias);
            let output_grad = call.operand(output_grad);
            let x = match stand_in {
                true => output_grad.clone(),
                false => x.into_primitive(),
            };
            call.result(call.run(|| B::$bias_backward(x, bias, output_grad)))
        }
    };
}

impl<B: Backend> ModuleOps<Self> for Amp<B> {
    conv_ops!(conv1d, conv1d_bias_backward, ConvOptions<1>);
    conv_ops!(conv2d, conv2d_bias_backward, ConvOptions<2>);
    conv_ops!(conv3d, conv3d_bias_backward, ConvOptions<3>);
    conv_ops!(
        conv_transpose1d,
        conv_transpose1d_bias_backward,
        ConvTransposeOptions<1>
    );
    conv_ops!(
        conv_transpose2d,
        conv_transpose2d_bias_backward,
        ConvTransposeOptions<2>
    );
    conv_ops!(
        conv_transpose3d,
        conv_transpose3d_bias_backward,
        ConvTransposeOptions<3>
    );

    fn linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let features = x.rank() - 1;
        contraction(op!(linear), features, x, weight, bias, |x, weight, bias| {
            B::linear(x, weight, bias)
        })
    }

    /// In half, batch dimensions are folded into one contraction. A separate sum over the batch
    /// would run in half.
    fn linear_weight_backward(
        x: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let call = Call::new(op!(linear_weight_backward), &[&x, &output_grad]);
        let folded = |tensor: FloatTensor<B>| {
            let shape = tensor.shape();
            let features = shape[shape.num_dims() - 1];
            let rows = shape.num_elements() / features;
            match shape.num_dims() > 2 && is_half(tensor.dtype()) {
                true => B::float_reshape(tensor, Shape::new([rows, features])),
                false => tensor,
            }
        };
        let (x, output_grad) = (call.operand(x), call.operand(output_grad));
        call.result(call.run(|| B::linear_weight_backward(folded(x), folded(output_grad))))
    }

    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let bias = attn_bias.as_ref().unwrap_or(&value);
        let call = Call::new(op!(attention), &[&query, &key, &value, bias]);
        let half = call.compute_dtype().filter(|dtype| is_half(*dtype));
        if let Some(dtype) = half {
            let whole = !B::ad_enabled(&query.device())
                && !call.is_bare_contraction(&query)
                && attn_bias.as_ref().is_none_or(|bias| bias.dtype() == dtype);
            if !whole {
                let out = scaled_dot_product(query, key, value, mask, attn_bias, options);
                return call.marked(out.into_primitive());
            }
        }
        // Scale the query instead of the scores: unscaled scores may exceed 65504.
        let (query, options) = match half {
            Some(_) => {
                let scale = scale(&query, &options);
                let options = AttentionModuleOptions {
                    scale: Some(1.0),
                    ..options
                };
                (Self::float_mul_scalar(query, scale.into()), options)
            }
            None => (query, options),
        };
        let (query, key) = (call.operand(query), call.operand(key));
        let value = call.operand(value);
        let attn_bias = attn_bias.map(|bias| call.operand(bias));
        call.result(call.run(|| B::attention(query, key, value, mask, attn_bias, options)))
    }

    fn layer_norm(
        tensor: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let shift = beta.as_ref().unwrap_or(&gamma);
        let call = Call::composed(op!(layer_norm), &[&tensor, &gamma, shift]);
        if let Some((tape, half)) = recording(&[&tensor, &gamma, shift]) {
            let mut shape = vec![1; tensor.rank()];
            shape[tensor.rank() - 1] = gamma.shape().num_elements();
            let kept = kept(&tensor, half);
            [&tensor, &gamma].into_iter().for_each(|t| call.watch(t));
            let (tensor, gamma) = (tensor.into_primitive(), gamma.into_primitive());
            let scaled = call.run(|| tape.layer_norm(tensor, gamma, epsilon, kept));
            let scaled = call.recorded(scaled);
            let out = match beta {
                Some(beta) => {
                    Self::float_add(scaled, Self::float_reshape(beta, Shape::from(shape)))
                }
                None => scaled,
            };
            return call.marked(call.in_result_dtype::<B>(out.into_primitive()));
        }
        let (tensor, gamma) = (call.operand(tensor), call.operand(gamma));
        let beta = beta.map(|beta| call.operand(beta));
        call.result(call.run(|| B::layer_norm(tensor, gamma, beta, epsilon)))
    }

    fn deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        let (m, b) = (mask.as_ref().unwrap_or(&x), bias.as_ref().unwrap_or(&x));
        let call = Call::new(op!(deform_conv2d), &[&x, &offset, &weight, m, b]);
        let (x, offset) = (call.operand(x), call.operand(offset));
        let weight = call.operand(weight);
        let mask = mask.map(|mask| call.operand(mask));
        let bias = bias.map(|bias| call.operand(bias));
        call.result(call.run(|| B::deform_conv2d(x, offset, weight, mask, bias, options)))
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let (m, b) = (mask.as_ref().unwrap_or(&x), bias.as_ref().unwrap_or(&x));
        let call = Call::backward(
            op!(deform_conv2d_backward),
            &[&x, &offset, &weight, &output_grad, m, b],
        );
        let (x, offset) = (call.operand(x), call.operand(offset));
        let (weight, output_grad) = (call.operand(weight), call.operand(output_grad));
        let mask = mask.map(|mask| call.operand(mask));
        let bias = bias.map(|bias| call.operand(bias));
        let grads = call
            .run(|| B::deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options));
        DeformConv2dBackward::new(
            call.result(grads.x_grad),
            call.result(grads.offset_grad),
            call.result(grads.weight_grad),
            grads.mask_grad.map(|grad| call.result(grad)),
            grads.bias_grad.map(|grad| call.result(grad)),
        )
    }

    float_ops! {
        conv1d_x_backward [x, weight, output_grad] (options: ConvOptions<1>);
        conv1d_weight_backward [x, weight, output_grad] (options: ConvOptions<1>);
        conv2d_x_backward [x, weight, output_grad] (options: ConvOptions<2>);
        conv2d_weight_backward [x, weight, output_grad] (options: ConvOptions<2>);
        conv3d_x_backward [x, weight, output_grad] (options: ConvOptions<3>);
        conv3d_weight_backward [x, weight, output_grad] (options: ConvOptions<3>);
        conv_transpose1d_x_backward [weight, output_grad] (options: ConvTransposeOptions<1>);
        conv_transpose1d_weight_backward [x, weight, output_grad] (options: ConvTransposeOptions<1>);
        conv_transpose2d_x_backward [weight, output_grad] (options: ConvTransposeOptions<2>);
        conv_transpose2d_weight_backward [x, weight, output_grad] (options: ConvTransposeOptions<2>);
        conv_transpose3d_x_backward [weight, output_grad] (options: ConvTransposeOptions<3>);
        conv_transpose3d_weight_backward [x, weight, output_grad] (options: ConvTransposeOptions<3>);
        linear_x_backward [weight, output_grad] ();
        linear_bias_backward [output_grad] ();
        embedding [weights] (indices: IntTensor<Self>);
        embedding_backward [weights, output_grad] (indices: IntTensor<Self>);
        interpolate [x] (output_size: [usize; 2], options: InterpolateOptions);
        adaptive_avg_pool1d [x] (output_size: usize);
        adaptive_avg_pool2d [x] (output_size: [usize; 2]);
        avg_pool1d [x] (kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool);
        avg_pool2d [x] (kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool);
        max_pool1d [x] (kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool);
        max_pool2d [x] (kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool);
        ctc_loss [log_probs] (targets: IntTensor<Self>, input_lengths: IntTensor<Self>, target_lengths: IntTensor<Self>, blank: usize);
        irfft [spectrum_re, spectrum_im] (dim: usize, n: Option<usize>);
    }

    backward_ops! {
        interpolate_backward [x, grad] (output_size: [usize; 2], options: InterpolateOptions);
        adaptive_avg_pool1d_backward [x, grad] ();
        adaptive_avg_pool2d_backward [x, grad] ();
        avg_pool1d_backward [x, grad] (kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool);
        avg_pool2d_backward [x, grad] (kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool);
    }

    fn unfold4d(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        options: UnfoldOptions,
    ) -> FloatTensor<Self> {
        let call = Call::summed_backward(op!(unfold4d), &x);
        let x = call.operand(x);
        call.result(call.run(|| B::unfold4d(x, kernel_size, options)))
    }

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let call = Call::new(op!(max_pool1d_with_indices), &[&x]);
        let x = call.operand(x);
        let pooled = call.run(|| {
            B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)
        });
        MaxPool1dWithIndices::new(call.result(pooled.output), pooled.indices)
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let op = op!(max_pool1d_with_indices_backward);
        let call = Call::backward(op, &[&x, &output_grad]);
        let (x, grad) = (call.operand(x), call.operand(output_grad));
        let grads = call.run(|| {
            B::max_pool1d_with_indices_backward(
                x,
                kernel_size,
                stride,
                padding,
                dilation,
                ceil_mode,
                grad,
                indices,
            )
        });
        MaxPool1dBackward::new(call.result(grads.x_grad))
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let call = Call::new(op!(max_pool2d_with_indices), &[&x]);
        let x = call.operand(x);
        let pooled = call.run(|| {
            B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)
        });
        MaxPool2dWithIndices::new(call.result(pooled.output), pooled.indices)
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let op = op!(max_pool2d_with_indices_backward);
        let call = Call::backward(op, &[&x, &output_grad]);
        let (x, grad) = (call.operand(x), call.operand(output_grad));
        let grads = call.run(|| {
            B::max_pool2d_with_indices_backward(
                x,
                kernel_size,
                stride,
                padding,
                dilation,
                ceil_mode,
                grad,
                indices,
            )
        });
        MaxPool2dBackward::new(call.result(grads.x_grad))
    }

    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    fn ctc_loss_backward(
        log_probs: FloatTensor<Self>,
        targets: IntTensor<Self>,
        input_lengths: IntTensor<Self>,
        target_lengths: IntTensor<Self>,
        grad_loss: FloatTensor<Self>,
        blank: usize,
    ) -> FloatTensor<Self> {
        let call = Call::backward(op!(ctc_loss_backward), &[&log_probs, &grad_loss]);
        let (log_probs, grad_loss) = (call.operand(log_probs), call.operand(grad_loss));
        call.result(call.run(|| {
            B::ctc_loss_backward(
                log_probs,
                targets,
                input_lengths,
                target_lengths,
                grad_loss,
                blank,
            )
        }))
    }

    fn rfft(
        signal: FloatTensor<Self>,
        dim: usize,
        n: Option<usize>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let call = Call::new(op!(rfft), &[&signal]);
        let signal = call.operand(signal);
        let (re, im) = call.run(|| B::rfft(signal, dim, n));
        (call.result(re), call.result(im))
    }
}

/// A contraction of `x` with a weight, and a bias added along dimension `channels` of the result.
///
/// A device that only multiplies matrices in half cannot add a half bias: it adds the bias in FP32.
#[inline]
fn contraction<B: Backend>(
    named: Op,
    channels: usize,
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
    op: impl FnOnce(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    match half_wanted() {
        false => AmpTensor::plain(op(
            x.into_primitive(),
            weight.into_primitive(),
            bias.map(AmpTensor::into_primitive),
        )),
        true => by_policy(|| contraction_by_policy(named, channels, x, weight, bias, op)),
    }
}

/// As [`contraction`], when there is a policy.
fn contraction_by_policy<B: Backend>(
    named: Op,
    channels: usize,
    x: AmpTensor<B>,
    weight: AmpTensor<B>,
    bias: Option<AmpTensor<B>>,
    op: impl FnOnce(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>,
) -> AmpTensor<B> {
    let call = Call::new(named, &[&x, &weight, bias.as_ref().unwrap_or(&weight)]);
    match bias {
        Some(bias) if call.is_bare_contraction(&x) => {
            let out = contraction_by_policy(named, channels, x, weight, None, op);
            let mut shape = vec![1; out.rank()];
            shape[channels] = bias.shape().num_elements();
            Amp::<B>::float_add(out, Amp::<B>::float_reshape(bias, Shape::from(shape)))
        }
        bias => {
            let (x, weight) = (call.operand(x), call.operand(weight));
            let bias = bias.map(|bias| call.operand(bias));
            call.result(call.run(|| op(x, weight, bias)))
        }
    }
}
