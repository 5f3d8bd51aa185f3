//! Pooling and interpolation.

use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::pool::*;
use burn::nn::{PaddingConfig1d, PaddingConfig2d};

use crate::common::ON_CUBECL;
use crate::harness::{Lab, Run};

/// CubeCL's backends have a backward pass only for nearest neighbours. Of the other modes only the
/// forward pass is compared, and the input stands for their output.
fn interpolated<B: Run, const D: usize>(
    lab: &mut Lab<B>,
    name: &str,
    mode: InterpolateMode,
    input: floats!(B, D),
    forward: impl Fn(floats!(B, D)) -> floats!(B, D),
) -> floats!(B, D) {
    if !ON_CUBECL || matches!(mode, InterpolateMode::Nearest) {
        return forward(input);
    }
    let output = forward(input.clone().detach());
    lab.buffer(&format!("{name}, forward alone"), output);
    input
}

/// Half as large again along one dimension, with and without aligned corners.
macro_rules! interpolate1d {
    ($lab:ident, $mode:ident) => {{
        for align in [true, false] {
            let interpolate = Interpolate1dConfig::new()
                .with_scale_factor(Some(1.5))
                .with_mode(InterpolateMode::$mode)
                .with_align_corners(align)
                .init();
            let name = format!("aligned {align}");
            let input = $lab.input([2, 3, 8]);
            let mode = InterpolateMode::$mode;
            let output = interpolated($lab, &name, mode, input, |x| interpolate.forward(x));
            $lab.output(&name, output);
        }
        let interpolate = Interpolate1dConfig::new()
            .with_output_size(Some(5))
            .with_mode(InterpolateMode::$mode)
            .init();
        let input = $lab.input([2, 3, 8]);
        let mode = InterpolateMode::$mode;
        interpolated($lab, "smaller", mode, input, |x| interpolate.forward(x))
    }};
}

/// Larger and smaller, with and without aligned corners.
macro_rules! interpolate2d {
    ($lab:ident, $mode:ident) => {{
        for align in [true, false] {
            let interpolate = Interpolate2dConfig::new()
                .with_scale_factor(Some([1.5, 2.0]))
                .with_mode(InterpolateMode::$mode)
                .with_align_corners(align)
                .init();
            let name = format!("aligned {align}");
            let input = $lab.input([2, 2, 6, 5]);
            let mode = InterpolateMode::$mode;
            let output = interpolated($lab, &name, mode, input, |x| interpolate.forward(x));
            $lab.output(&name, output);
        }
        let interpolate = Interpolate2dConfig::new()
            .with_output_size(Some([4, 3]))
            .with_mode(InterpolateMode::$mode)
            .init();
        let input = $lab.input([2, 2, 6, 5]);
        let mode = InterpolateMode::$mode;
        interpolated($lab, "smaller", mode, input, |x| interpolate.forward(x))
    }};
}

cases! {
    avg_pool1d(0.0, 1.0) |lab| {
        let pool = lab.module(AvgPool1dConfig::new(3).init());
        pool.forward(lab.input([2, 3, 9]))
    };
    avg_pool1d_with_options(0.0, 1.0) |lab| {
        let config = AvgPool1dConfig::new(3)
            .with_stride(2)
            .with_padding(PaddingConfig1d::Explicit(1, 1))
            .with_count_include_pad(false)
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 8]))
    };
    avg_pool2d(0.0, 1.0) |lab| {
        let pool = lab.module(AvgPool2dConfig::new([2, 3]).init());
        pool.forward(lab.input([2, 3, 6, 6]))
    };
    avg_pool2d_with_options(0.0, 1.0) |lab| {
        let config = AvgPool2dConfig::new([3, 3])
            .with_strides([1, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_count_include_pad(false)
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 6, 8]))
    };
    avg_pool2d_padded_unequally(0.0, 1.0) |lab| {
        let config =
            AvgPool2dConfig::new([2, 2]).with_padding(PaddingConfig2d::Explicit(1, 0, 0, 1));
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 5, 5]))
    };
    max_pool1d(0.0, 1.0) |lab| {
        let pool = lab.module(MaxPool1dConfig::new(3).init());
        pool.forward(lab.input([2, 3, 9]))
    };
    max_pool1d_with_options(0.0, 1.5) |lab| {
        let config = MaxPool1dConfig::new(3)
            .with_stride(2)
            .with_padding(PaddingConfig1d::Explicit(1, 1))
            .with_dilation(2)
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 10]))
    };
    // Unequal padding is a pad of its own, filled with minus infinity in FP32.
    max_pool1d_padded_unequally(0.0, 1.0) |lab| {
        let config = MaxPool1dConfig::new(2).with_padding(PaddingConfig1d::Explicit(1, 0));
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 9]))
    };
    max_pool2d(0.0, 1.0) |lab| {
        let pool = lab.module(MaxPool2dConfig::new([2, 3]).init());
        pool.forward(lab.input([2, 3, 6, 6]))
    };
    max_pool2d_with_options(0.0, 1.5) |lab| {
        let config = MaxPool2dConfig::new([3, 3])
            .with_strides([1, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_dilation([2, 1])
            .with_ceil_mode(true);
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 6, 8]))
    };
    max_pool2d_padded_unequally(0.0, 1.0) |lab| {
        let config =
            MaxPool2dConfig::new([2, 2]).with_padding(PaddingConfig2d::Explicit(1, 0, 0, 1));
        let pool = lab.module(config.init());
        pool.forward(lab.input([2, 3, 5, 5]))
    };
    adaptive_avg_pool1d(0.0, 1.0) |lab| {
        let pool = lab.module(AdaptiveAvgPool1dConfig::new(4).init());
        pool.forward(lab.input([2, 3, 10]))
    };
    adaptive_avg_pool2d(0.0, 1.0) |lab| {
        let pool = lab.module(AdaptiveAvgPool2dConfig::new([3, 2]).init());
        pool.forward(lab.input([2, 3, 7, 6]))
    };
    // The mean over the whole image, as classifiers end.
    adaptive_avg_pool2d_global(0.0, 1.5) |lab| {
        let pool = lab.module(AdaptiveAvgPool2dConfig::new([1, 1]).init());
        pool.forward(lab.input([2, 3, 24, 24]))
    };
    interpolate1d_nearest(0.0, 1.5) |lab| interpolate1d!(lab, Nearest);
    interpolate1d_linear(0.0, 1.5) |lab| interpolate1d!(lab, Linear);
    interpolate1d_cubic(0.0, 1.0) |lab| interpolate1d!(lab, Cubic);
    interpolate2d_nearest(0.0, 1.0) |lab| interpolate2d!(lab, Nearest);
    interpolate2d_linear(0.0, 1.0) |lab| interpolate2d!(lab, Linear);
    interpolate2d_cubic(0.0, 1.0) |lab| interpolate2d!(lab, Cubic);
    // Flex has no backward pass for Lanczos: only the forward pass, which nothing tracks.
    interpolate_lanczos(0.0, 1.0) |lab| {
        let input = lab.input([2, 2, 6, 5]);
        let one = Interpolate1dConfig::new().with_output_size(Some(7));
        let two = Interpolate2dConfig::new().with_output_size(Some([9, 4]));
        let one = one.with_mode(InterpolateMode::Lanczos).init();
        let two = two.with_mode(InterpolateMode::Lanczos).init();
        let image = input.clone().detach();
        let row: floats!(B, 3) = image.clone().slice_dim(2, 0).squeeze_dim(2);
        lab.buffer("one dimension", one.forward(row));
        lab.buffer("two dimensions", two.forward(image));
        input
    };
}
