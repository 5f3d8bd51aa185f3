//! FP32 data that a product only moves or scales keeps its values.

mod common;

use burn::backend::Flex;
use burn::nn::LinearConfig;
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};

use common::HALVES;

type A = AmpAutodiff<Flex>;

fn column<B: Backend>(values: impl Iterator<Item = i32>) -> Tensor<B, 2> {
    let values: Vec<f32> = values.map(|value| value as f32).collect();
    Tensor::<B, 1>::from_floats(&values[..], &Default::default()).unsqueeze_dim(1)
}

/// In FP32, and in each half precision.
fn in_each<T>(f: impl Fn() -> T) -> [T; 3] {
    [Precision::F32, Precision::F16, Precision::Bf16].map(|precision| with_precision(precision, &f))
}

/// Positions times one: 70,001 is 70,144 in bf16, and infinite in f16.
fn positions<B: Backend>() -> TensorData {
    let one = Tensor::<B, 2>::ones([1, 1], &Default::default());
    column::<B>(70_001..70_065).matmul(one).into_data()
}

/// The angles of a rotary encoding: at position 3,001 a rounded angle is off by 1.
fn angles<B: Backend>() -> TensorData {
    let frequencies = (0..16).map(|i| 10_000f32.powf(-(i as f32) / 16.0));
    let frequencies: Vec<f32> = frequencies.collect();
    let frequencies = Tensor::<B, 1>::from_floats(&frequencies[..], &Default::default());
    let angles = column::<B>(3_001..3_033).matmul(frequencies.unsqueeze());
    angles.cos().into_data()
}

#[test]
fn positions_stay_what_they_are() {
    for [plain, f16, bf16] in [in_each(positions::<A>), in_each(positions::<Amp<Flex>>)] {
        let expected: Vec<f32> = (70_001..70_065).map(|i| i as f32).collect();
        assert_eq!(plain.to_vec::<f32>().unwrap(), expected);
        assert_eq!(f16, plain);
        assert_eq!(bf16, plain);
    }
}

#[test]
fn the_angles_of_an_outer_product_are_those_of_fp32() {
    for [plain, f16, bf16] in [in_each(angles::<A>), in_each(angles::<Amp<Flex>>)] {
        assert_eq!(f16, plain);
        assert_eq!(bf16, plain);
    }
}

/// A layer of one feature gives half, as any layer: an LSTM of one feature stays half.
#[test]
fn a_layer_of_one_feature_gives_half() {
    for precision in HALVES {
        with_precision(precision, || {
            let layer = LinearConfig::new(1, 8).init::<A>(&Default::default());
            let out = layer.forward(column::<A>(0..8));
            assert_eq!(Some(out.dtype()), precision.compute_dtype::<DType>());
        });
    }
}

#[test]
fn what_is_half_is_multiplied_in_half() {
    for precision in HALVES {
        with_precision(precision, || {
            let device = Default::default();
            let half = LinearConfig::new(4, 1).init::<A>(&device);
            let half = half.forward(Tensor::<A, 2>::ones([2, 4], &device));
            let layer = LinearConfig::new(1, 3).init::<A>(&device);
            let dtype = precision.compute_dtype::<DType>();
            assert_eq!(Some(half.dtype()), dtype);
            assert_eq!(Some(layer.forward(half).dtype()), dtype);
        });
    }
}
