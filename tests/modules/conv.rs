//! Convolutions.

use burn::nn::conv::*;
use burn::nn::*;

use crate::common::ON_CUBECL;
use crate::harness::{Lab, Run};

/// CubeCL's threads add the gradient of a deformable convolution's input as they come.
fn added_atomically<B: Run>(lab: &mut Lab<B>) {
    if ON_CUBECL {
        lab.adds_in_any_order("input 2");
    }
}

cases! {
    conv1d(3.0, 3.0) |lab| {
        let conv = lab.module(Conv1dConfig::new(4, 6, 3).init(&lab.device));
        conv.forward(lab.input([2, 4, 9]))
    };
    conv1d_without_bias(2.0, 2.0) |lab| {
        let conv = lab.module(Conv1dConfig::new(4, 6, 3).with_bias(false).init(&lab.device));
        conv.forward(lab.input([2, 4, 9]))
    };
    conv1d_strided_padded_dilated_grouped(2.0, 2.0) |lab| {
        let config = Conv1dConfig::new(4, 6, 3)
            .with_stride(2)
            .with_padding(PaddingConfig1d::Explicit(2, 2))
            .with_dilation(2)
            .with_groups(2);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 12]))
    };
    // Unequal padding is a pad of its own, filled with zeros in FP32.
    conv1d_padded_unequally(2.0, 2.0) |lab| {
        let config = Conv1dConfig::new(4, 6, 3).with_padding(PaddingConfig1d::Explicit(2, 1));
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 9]))
    };
    conv2d(3.0, 3.0) |lab| {
        let conv = lab.module(Conv2dConfig::new([3, 6], [3, 3]).init(&lab.device));
        conv.forward(lab.input([2, 3, 7, 6]))
    };
    conv2d_without_bias(3.0, 3.0) |lab| {
        let config = Conv2dConfig::new([3, 6], [3, 3]).with_bias(false);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 3, 7, 6]))
    };
    conv2d_pointwise(3.0, 3.0) |lab| {
        let conv = lab.module(Conv2dConfig::new([8, 6], [1, 1]).init(&lab.device));
        conv.forward(lab.input([2, 8, 4, 4]))
    };
    conv2d_same(4.0, 4.0) |lab| {
        let config = Conv2dConfig::new([3, 6], [3, 3]).with_padding(PaddingConfig2d::Same);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 3, 7, 6]))
    };
    conv2d_strided_padded_dilated_grouped(4.0, 4.0) |lab| {
        let config = Conv2dConfig::new([4, 6], [3, 2])
            .with_stride([2, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 2, 1, 2))
            .with_dilation([1, 2])
            .with_groups(2);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 8, 7]))
    };
    conv2d_depthwise(4.0, 4.0) |lab| {
        let config = Conv2dConfig::new([4, 4], [3, 3]).with_groups(4);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 7, 6]))
    };
    conv2d_padded_unequally(4.0, 4.0) |lab| {
        let config = Conv2dConfig::new([3, 6], [3, 3])
            .with_padding(PaddingConfig2d::Explicit(1, 0, 2, 1));
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 3, 7, 6]))
    };
    conv3d(2.0, 2.0) |lab| {
        let conv = lab.module(Conv3dConfig::new([2, 4], [2, 3, 2]).init(&lab.device));
        conv.forward(lab.input([2, 2, 4, 5, 4]))
    };
    conv3d_strided_padded_dilated_grouped(1.5, 1.5) |lab| {
        let config = Conv3dConfig::new([4, 4], [2, 2, 2])
            .with_stride([2, 1, 2])
            .with_padding(PaddingConfig3d::Explicit(1, 1, 1))
            .with_dilation([1, 2, 1])
            .with_groups(2)
            .with_bias(false);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 4, 4, 4]))
    };
    conv_transpose1d(2.0, 2.0) |lab| {
        let conv = lab.module(ConvTranspose1dConfig::new([4, 6], 3).init(&lab.device));
        conv.forward(lab.input([2, 4, 7]))
    };
    conv_transpose1d_strided_padded_dilated_grouped(3.0, 3.0) |lab| {
        let config = ConvTranspose1dConfig::new([4, 6], 3)
            .with_stride(2)
            .with_padding(1)
            .with_padding_out(1)
            .with_dilation(2)
            .with_groups(2);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 7]))
    };
    conv_transpose2d(3.0, 3.0) |lab| {
        let conv = lab.module(ConvTranspose2dConfig::new([4, 3], [3, 2]).init(&lab.device));
        conv.forward(lab.input([2, 4, 4, 5]))
    };
    conv_transpose2d_strided_padded_dilated_grouped(3.0, 3.0) |lab| {
        let config = ConvTranspose2dConfig::new([4, 6], [3, 2])
            .with_stride([2, 1])
            .with_padding([1, 0])
            .with_padding_out([1, 0])
            .with_dilation([1, 2])
            .with_groups(2)
            .with_bias(false);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 4, 5]))
    };
    conv_transpose3d(2.0, 2.0) |lab| {
        let conv = lab.module(ConvTranspose3dConfig::new([2, 3], [2, 3, 2]).init(&lab.device));
        conv.forward(lab.input([2, 2, 3, 3, 4]))
    };
    conv_transpose3d_strided_padded_dilated_grouped(1.5, 1.5) |lab| {
        let config = ConvTranspose3dConfig::new([4, 4], [2, 2, 2])
            .with_stride([2, 1, 2])
            .with_padding([1, 0, 1])
            .with_padding_out([1, 0, 1])
            .with_dilation([1, 2, 1])
            .with_groups(2);
        let conv = lab.module(config.init(&lab.device));
        conv.forward(lab.input([2, 4, 3, 3, 3]))
    };
    deform_conv2d(0.0, 1.0) |lab| {
        added_atomically(lab);
        let conv = lab.module(DeformConv2dConfig::new([3, 4], [2, 3]).init(&lab.device));
        let (input, offset) = (lab.input([2, 3, 5, 6]), lab.input([2, 12, 4, 4]));
        conv.forward(input, offset, None)
    };
    deform_conv2d_masked_strided_padded_grouped(0.0, 1.5) |lab| {
        let config = DeformConv2dConfig::new([4, 4], [3, 3])
            .with_stride([2, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_weight_groups(2);
        let conv = lab.module(with_two_offset_groups!(config).init(&lab.device));
        added_atomically(lab);
        let (input, offset) = (lab.input([2, 4, 5, 4]), lab.input([2, 36, 3, 4]));
        let mask = lab.probabilities([2, 18, 3, 4]);
        conv.forward(input, offset, Some(mask))
    };
    unfold4d(0.0, 1.5) |lab| {
        let unfold = lab.module(Unfold4dConfig::new([2, 3]).init());
        unfold.forward(lab.input([2, 3, 5, 6]))
    };
    unfold4d_strided_padded_dilated(0.0, 1.5) |lab| {
        let config = Unfold4dConfig::new([2, 2])
            .with_stride([2, 1])
            .with_padding([1, 1])
            .with_dilation([1, 2]);
        let unfold = lab.module(config.init());
        unfold.forward(lab.input([2, 3, 5, 6]))
    };
}
