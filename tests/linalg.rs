//! `burn::tensor::linalg` composes its functions of products, and image metrics are composed of convolutions. They run
//! in half on what is learned; on data, and in `full_precision`, they are Burn's own in FP32.

mod common;

use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{DType, linalg};
use burn_amp::{Amp, AmpAutodiff, full_precision, with_precision};

use common::mlp::{data, values};
use common::{HALVES, relative_error, roundoff};

/// 4x4 and larger, for which Burn composes the determinant of products.
fn square<B: Backend>() -> Tensor<B, 2> {
    values::<B, 2>([4, 4], 1) + Tensor::eye(4, &Default::default()) * 2.0
}

fn image<B: Backend>() -> Tensor<B, 4> {
    values::<B, 4>([1, 1, 12, 12], 6) * 0.01 + 0.7
}

/// The variances of windows of an image, as SSIM computes them: a mean of squares less the square of a mean.
fn variances<B: Backend>(image: Tensor<B, 4>) -> Tensor<B, 4> {
    let window = Tensor::ones([1, 1, 3, 3], &Default::default()) / 9.0;
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    let mean = |image| conv2d(image, window.clone(), None, options.clone());
    let of_image = mean(image.clone());
    mean(image.clone() * image) - of_image.clone() * of_image
}

/// Every function of `linalg` that multiplies matrices or vectors, by name, and the variances.
fn results<B: Backend>() -> Vec<(&'static str, Vec<f32>)> {
    let square = square::<B>();
    let wide = values::<B, 2>([6, 9], 2);
    let (left, right) = (values::<B, 2>([4, 16], 3), values::<B, 2>([4, 16], 4));
    let (permutation, lower, upper) = linalg::lu::<B, 2, 1>(wide.clone());
    let floats = |x: Tensor<B, 2>| {
        assert_eq!(x.dtype(), DType::F32);
        data(x)
    };
    vec![
        (
            "det",
            data(linalg::det::<B, 3, 2, 1>(square.clone().unsqueeze())),
        ),
        ("lu, permutation", floats(permutation)),
        ("lu, lower", floats(lower)),
        ("lu, upper", floats(upper)),
        (
            "cosine_similarity",
            floats(linalg::cosine_similarity(
                left.clone(),
                right.clone(),
                1,
                None,
            )),
        ),
        (
            "matvec",
            data(linalg::matvec::<B, 2, 1, _>(wide, values([9], 5))),
        ),
        (
            "outer",
            floats(linalg::outer::<B, 1, 2, _>(
                values([16], 6),
                values([16], 7),
            )),
        ),
        (
            "vector_norm",
            floats(linalg::vector_norm(left.clone(), 2.0, 1)),
        ),
        ("trace", data(linalg::trace::<B, 2, 1>(square))),
        ("variances", data(variances::<B>(image()))),
        ("l2_norm", floats(linalg::l2_norm(right, 1))),
    ]
}

#[track_caller]
fn assert_same(actual: Vec<(&str, Vec<f32>)>, expected: &[(&str, Vec<f32>)]) {
    for ((name, actual), (_, expected)) in actual.iter().zip(expected) {
        assert!(
            expected.iter().all(|x| x.is_finite()),
            "{name}: {expected:?}"
        );
        assert_eq!(actual, expected, "{name}");
    }
}

#[test]
fn in_full_precision_it_is_burns_own() {
    let inference = results::<Flex>();
    let training = results::<Autodiff<Flex>>();
    for precision in HALVES {
        with_precision(precision, || {
            assert_same(full_precision(results::<Amp<Flex>>), &inference);
            assert_same(full_precision(results::<AmpAutodiff<Flex>>), &training);
        });
    }
}

/// Nothing learned takes part.
#[test]
fn on_data_it_is_burns_own() {
    let inference = results::<Flex>();
    let training = results::<Autodiff<Flex>>();
    for precision in HALVES {
        with_precision(precision, || {
            assert_same(results::<Amp<Flex>>(), &inference);
            assert_same(results::<AmpAutodiff<Flex>>(), &training);
        });
    }
}

/// The guide's statement: of what is learned the products run in half.
#[test]
fn of_what_is_learned_the_products_run_in_half() {
    fn product<B: Backend>() -> Vec<f32> {
        let learned = values::<B, 2>([6, 9], 2).set_require_grad(false);
        data(linalg::matvec::<B, 2, 1, _>(learned, values([9], 5)))
    }
    let exact = product::<Flex>();
    for precision in HALVES {
        let half = with_precision(precision, product::<Amp<Flex>>);
        let error = relative_error(&half, &exact);
        assert!(error > roundoff(precision) / 64.0, "{precision}: {error}");
    }
}

/// The guide's statement: what cancels in FP32 is lost in half, for an image that a model made.
#[test]
fn a_variance_of_what_is_learned_is_lost() {
    let exact = data(variances::<Flex>(image()));
    for precision in HALVES {
        let half = with_precision(precision, || {
            data(variances::<Amp<Flex>>(image().set_require_grad(false)))
        });
        let error = relative_error(&half, &exact);
        assert!(error > 0.5, "{precision}: {error}");
    }
}
