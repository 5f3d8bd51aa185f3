//! Gradients of tensors that are used many times: their error does not grow with the number of uses.

mod common;

use std::sync::{Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LstmConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};

use common::{Inner, assert_close, halves, relative_error};

type Kept = AmpAutodiff<Inner>;
type Recomputed = AmpAutodiff<Inner, BalancedCheckpointing>;

/// Values of one sign: a sum that stops growing is far off.
fn positive<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Uniform(0.5, 1.5), &Default::default())
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

fn gradient<B: AutodiffBackend, const D: usize>(
    of: &Tensor<B, D>,
    grads: &B::Gradients,
) -> Vec<f32> {
    values(of.grad(grads).expect("a gradient"))
}

/// The gradients of a module's parameters, in module order.
fn gradients<B: AutodiffBackend>(
    model: &impl AutodiffModule<B>,
    grads: &B::Gradients,
) -> Vec<Vec<f32>> {
    struct Visitor<'a, B: AutodiffBackend>(&'a B::Gradients, Vec<Vec<f32>>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Visitor<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.1.push(gradient(&param.val(), self.0));
        }
    }
    let mut visitor = Visitor::<B>(grads, Vec::new());
    model.visit(&mut visitor);
    visitor.1
}

/// Gradients in FP32 and in a half precision, from the same random values. Not scaled: the
/// gradients are large.
fn both<B: Backend>(precision: Precision, grads: fn() -> Vec<Vec<f32>>) -> [Vec<Vec<f32>>; 2] {
    // The backend draws for all threads.
    static DRAWS: Mutex<()> = Mutex::new(());
    let _one_at_a_time = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();
    [Precision::F32, precision].map(|precision| {
        B::seed(&Default::default(), 7);
        with_precision(precision, || scaler.scope(grads))
    })
}

/// Each gradient is within so many roundings of FP32's.
fn within<B: Backend>(roundoffs: f64, grads: fn() -> Vec<Vec<f32>>) {
    for precision in halves() {
        let [expected, actual] = both::<B>(precision, grads);
        assert_eq!(actual.len(), expected.len());
        for (at, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let what = format!("gradient {at}");
            assert_close(&what, precision, actual, expected, roundoffs);
        }
    }
}

/// A weight whose uses have the same gradient. A sum in half of equal numbers is wrong in one
/// direction, so roundings do not cancel.
fn equal_uses<B: AutodiffBackend, const USES: usize>() -> Vec<Vec<f32>> {
    let device = Default::default();
    let of = |each: f32| {
        let weight = Tensor::<B, 2>::ones([1, 1], &device).require_grad();
        let factor = Tensor::<B, 2>::ones([1, 1], &device) * each;
        let uses = (0..USES).map(|_| factor.clone().matmul(weight.clone()).sum());
        let grads = uses.reduce(|sum, one| sum + one).unwrap().backward();
        gradient(&weight, &grads)
    };
    // 8 bits hold each of these. Sums of 16 in bf16 are wrong by 0, 4.4, 4.1 and 3.9 roundings.
    [1.0, 1.8125, 1.9375, 1.03125].map(of).into()
}

/// Within two roundings for ones, and within the roundings of a sum of 16 for any number.
fn as_exact_as_a_sum_of_16<B: AutodiffBackend, const USES: usize>() {
    within::<B>(5.0, equal_uses::<B, USES>);
    within::<B>(2.0, || equal_uses::<B, USES>().drain(..1).collect());
}

#[test]
fn the_error_of_a_weights_gradient_does_not_grow_with_its_uses() {
    as_exact_as_a_sum_of_16::<Kept, 3>();
    as_exact_as_a_sum_of_16::<Kept, 16>();
    as_exact_as_a_sum_of_16::<Kept, 17>();
    as_exact_as_a_sum_of_16::<Kept, 300>();
    as_exact_as_a_sum_of_16::<Kept, 4096>();
    as_exact_as_a_sum_of_16::<Recomputed, 300>();
}

/// Each use is of another view of a product, so that autodiff adds one gradient at a time.
#[test]
fn views_between_the_uses_change_nothing() {
    fn views() -> Vec<Vec<f32>> {
        let device = Default::default();
        let weight = Tensor::<Kept, 2>::ones([1, 6], &device).require_grad();
        let mut view = Tensor::<Kept, 2>::ones([4, 1], &device).matmul(weight.clone());
        let mut loss = view.clone().sum();
        for _ in 0..256 {
            let [rows, columns] = view.dims();
            view = view.reshape([columns, rows]);
            loss = loss + view.clone().sum() * 1.9375;
        }
        vec![gradient(&weight, &loss.backward())]
    }
    within::<Kept>(5.0, views);
}

/// Of numbers that differ, the roundings cancel.
#[test]
fn a_weight_of_many_uses_is_within_two_roundings() {
    fn uses() -> Vec<Vec<f32>> {
        let weight = positive::<Kept, 2>([8, 8]).require_grad();
        let once = |_| positive::<Kept, 2>([4, 8]).matmul(weight.clone()).sum();
        let loss = (0..4096).map(once).reduce(|sum, one| sum + one).unwrap();
        vec![gradient(&weight, &loss.backward())]
    }
    within::<Kept>(2.0, uses);
}

/// A weight that is used in passes of its own: the half copies outlive a pass.
#[test]
fn a_weight_of_many_passes_has_the_gradient_of_each() {
    fn passes() -> Vec<Vec<f32>> {
        let weight = positive::<Kept, 2>([8, 8]).require_grad();
        let pass = |uses: usize| {
            let once = || positive::<Kept, 2>([4, 8]).matmul(weight.clone()).sum();
            let grads = (0..uses).map(|_| once()).reduce(|sum, one| sum + one);
            gradient(&weight, &grads.unwrap().backward())
        };
        [1, 7, 2, 40, 3, 1].map(pass).into()
    }
    within::<Kept>(2.0, passes);
}

/// Losses that share the copies of a weight: the first backward pass consumes the steps of copies
/// that the second loss was computed from.
#[test]
fn losses_that_share_a_weight_have_their_own_gradients() {
    fn losses<B: AutodiffBackend>() -> Vec<Vec<f32>> {
        let weight = positive::<B, 2>([8, 8]).require_grad();
        let loss = |uses: usize| {
            let once = || positive::<B, 2>([4, 8]).matmul(weight.clone()).sum();
            let sum = (0..uses).map(|_| once()).reduce(|sum, one| sum + one);
            sum.unwrap()
        };
        let gradient = |loss: Tensor<B, 1>| gradient(&weight, &loss.backward());
        let (first, second, third) = (loss(6), loss(30), loss(1));
        let first = gradient(first);
        let fourth = loss(5);
        let third = gradient(third);
        let second = gradient(second);
        vec![first, third, second, gradient(fourth)]
    }
    within::<Kept>(2.0, losses::<Kept>);
    within::<Recomputed>(2.0, losses::<Recomputed>);
}

/// More uses than copies are kept for: the copy that all others come from is kept.
#[test]
fn losses_of_very_many_uses_have_their_own_gradients() {
    fn losses() -> Vec<Vec<f32>> {
        let weight = positive::<Kept, 2>([1, 1]).require_grad();
        let loss = |uses: usize| {
            let once = |_| positive::<Kept, 2>([1, 1]).matmul(weight.clone());
            Tensor::cat((0..uses).map(once).collect(), 0).sum()
        };
        let losses = [loss(8200), loss(8200)];
        losses
            .map(|loss| gradient(&weight, &loss.backward()))
            .into()
    }
    within::<Kept>(2.0, losses);
}

#[derive(Module, Debug)]
struct Tied<B: Backend> {
    embedding: Embedding<B>,
    hidden: Linear<B>,
}

/// A table of embeddings that is the output layer too, at each of 512 steps.
fn tied<B: AutodiffBackend>() -> Vec<Vec<f32>> {
    let device = Default::default();
    let model = Tied::<B> {
        embedding: EmbeddingConfig::new(6, 8).init(&device),
        hidden: LinearConfig::new(8, 8).init(&device),
    };
    let tokens = Tensor::<B, 2, Int>::from_data([[0, 3, 5, 1]], &device);
    let step = |_| {
        let hidden = model
            .hidden
            .forward(model.embedding.forward(tokens.clone()));
        let table = model.embedding.weight.val().transpose().unsqueeze();
        hidden.matmul(table).powi_scalar(2).sum()
    };
    let loss = (0..512).map(step).reduce(|sum, one| sum + one).unwrap();
    let grads = loss.backward();
    gradients(&model, &grads)
}

#[test]
fn tied_weights_are_as_exact_as_in_one_use() {
    within::<Kept>(4.0, tied::<Kept>);
    within::<Recomputed>(4.0, tied::<Recomputed>);
}

/// An activation with `uses` consumers: FP32 that each product casts (the exponential), or half.
fn consumers<B: AutodiffBackend, const USES: usize, const FP32: bool>() -> Vec<Vec<f32>> {
    let weight = positive::<B, 2>([8, 8]).require_grad();
    let activation = positive::<B, 2>([4, 8]).matmul(weight.clone());
    let activation = match FP32 {
        true => (activation / 8.0).exp(),
        false => relu(activation),
    };
    let one = |_| {
        let factor =
            positive::<B, 2>([8, 3]) * Tensor::from_data([[1.0, 3.0, 2.0]], &Default::default());
        activation.clone().matmul(factor).sum()
    };
    let loss = (0..USES).map(one).reduce(|sum, one| sum + one).unwrap();
    let grads = loss.backward();
    vec![gradient(&weight, &grads)]
}

#[test]
fn an_activation_of_many_consumers_is_as_exact_as_of_one() {
    within::<Kept>(4.0, consumers::<Kept, 1, false>);
    within::<Kept>(4.0, consumers::<Kept, 16, false>);
    within::<Kept>(4.0, consumers::<Kept, 1000, false>);
    within::<Recomputed>(4.0, consumers::<Recomputed, 1000, false>);
}

#[test]
fn an_fp32_activation_of_many_consumers_is_as_exact_as_of_one() {
    within::<Kept>(4.0, consumers::<Kept, 1, true>);
    within::<Kept>(4.0, consumers::<Kept, 16, true>);
    within::<Kept>(4.0, consumers::<Kept, 1000, true>);
    within::<Recomputed>(4.0, consumers::<Recomputed, 1000, true>);
}

/// The relative norm of each parameter's error after 512 steps of an LSTM is at most 2 %. The forward pass of Burn's autodiff
/// takes a time that grows with the square of the steps: of 1,024, half a minute.
#[test]
fn an_lstm_of_512_steps_has_the_gradients_of_fp32() {
    fn lstm() -> Vec<Vec<f32>> {
        let model = LstmConfig::new(4, 8, true).init::<Kept>(&Default::default());
        let (hidden, _) = model.forward(positive([2, 512, 4]), None);
        gradients(&model, &hidden.powi_scalar(2).sum().backward())
    }
    for precision in halves() {
        let [expected, actual] = both::<Kept>(precision, lstm);
        assert_eq!(actual.len(), 16);
        for (at, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let error = relative_error(actual, expected);
            assert!(error <= 0.02, "gradient {at} in {precision}: {error:.4}");
        }
    }
}
