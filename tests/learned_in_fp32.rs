//! What is learned stays learned in a process that has not left FP32 yet. One test, in a process of its own.

use burn::backend::Flex;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::{DType, activation};
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};
use shared as _; // with what it instantiates

fn computed<B: Backend>(layer: &Linear<B>) -> Vec<Tensor<B, 2>> {
    let device = Default::default();
    let ones = || Tensor::<B, 2>::ones([4, 4], &device);
    let weight = || layer.weight.val();
    vec![
        weight() * 2.0,
        ones() + weight(),
        Tensor::cat(vec![ones(), weight()], 0).slice([2..6, 0..4]),
        ones().matmul(weight()),
        layer.forward(ones()),
        activation::softmax(weight(), 1),
        weight().sort(0),
        weight().max_dim_with_indices(0).0.expand([4, 4]),
        weight().detach(),
        ones().mask_where(ones().greater_elem(2.0), weight()),
    ]
}

fn dtypes<B: Backend>(tensors: Vec<Tensor<B, 2>>) -> Vec<DType> {
    let ones = || Tensor::<B, 2>::ones([4, 4], &Default::default());
    let products = tensors.into_iter().map(|tensor| ones().matmul(tensor));
    products.map(|product| product.dtype()).collect()
}

#[test]
fn what_was_computed_before_half_was_asked_for_is_learned() {
    let layer: Linear<AmpAutodiff<Flex>> = LinearConfig::new(4, 4).init(&Default::default());
    let (trained, inferred) = (computed(&layer), computed(&layer.valid()));
    let data = vec![Tensor::<Amp<Flex>, 2>::ones([4, 4], &Default::default()) * 2.0];
    with_precision(Precision::F16, || {
        let half = vec![DType::F16; trained.len()];
        assert_eq!(dtypes(trained), half);
        assert_eq!(dtypes(inferred), half);
        assert_eq!(dtypes(data), [DType::F32]);
    });
}
