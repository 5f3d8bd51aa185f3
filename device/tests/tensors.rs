//! The state of tensors: the values that a client reads, constants that follow half, and scalars.

include!("../src/burn.rs");

mod common;

use burn_amp_device::{AmpReport, Precision, configure};
use burn_backend::ops::*;
use burn_backend::tensor::FloatTensor;
use burn_backend::{
    BoolDType, DType, Distribution, FloatDType, IntDType, Shape, TensorMetadata, try_read_sync,
};
use burn_dispatch::{backends::Flex, devices::FlexDevice};
use burn_ir::{BackendIr, TensorHandle};
use burn_std::ops::PadMode;
use common::{A, bools, data, demoted, f32s, half, ints, on, values, zeros};

const HALVES: [Precision; 2] = [Precision::F16, Precision::Bf16];

fn x() -> FloatTensor<A> {
    f32s::<A>(&[0.5, -1.0, 1.5, 2.0], &[2, 2])
}

#[test]
fn a_client_reads_the_dtype_that_it_knows() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        let product = A::float_matmul(x(), x());
        assert_eq!(product.dtype(), half);
        assert_eq!(values::<A>(product), [-1.25, -2.5, 3.75, 2.5]);

        // The client's own half tensors stay half for the client, also where the policy widens.
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let own = A::float_cast(x(), dtype);
            assert_eq!(data::<A>(own.clone()).dtype(), dtype.into());
            let exp = A::float_exp(own.clone());
            assert_eq!(exp.dtype(), DType::F32);
            assert_eq!(data::<A>(exp.clone()).dtype(), dtype.into());
            assert_eq!(data::<A>(A::float_matmul(own, exp)).dtype(), dtype.into());
        }

        // A cast to FP32 also casts a tensor that the policy made half.
        let wide = A::float_cast(demoted(x()), FloatDType::F32);
        assert_eq!(wide.dtype(), DType::F32);

        let f64s = A::float_cast(x(), FloatDType::F64);
        let product = A::float_matmul(f64s.clone(), f64s);
        assert_eq!(data::<A>(product).dtype(), DType::F64);
    }
}

#[test]
fn a_transaction_reads_what_a_client_knows() {
    let _alone = on(Precision::Bf16);
    let floats = vec![demoted(x()), x(), A::float_cast(x(), FloatDType::F16)];
    let ints = vec![ints::<A>(&[1, 2], &[2])];
    let transaction = TransactionPrimitive::new(floats, vec![], ints, vec![]);
    let read = try_read_sync(A::tr_execute(transaction)).unwrap().unwrap();
    let dtypes: Vec<_> = read.read_floats.iter().map(|data| data.dtype()).collect();
    assert_eq!(dtypes, [DType::F32, DType::F32, DType::F16]);
    assert_eq!(read.read_ints[0].dtype(), DType::I32);
    assert_eq!(
        read.read_floats[0].as_slice::<f32>().unwrap(),
        [0.5, -1.0, 1.5, 2.0]
    );
}

#[test]
fn a_scalar_that_half_does_not_hold_takes_an_operation_to_fp32() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        let mask = || bools::<A>(&[true, false, false, false], &[2, 2]);
        let unheld = match precision {
            Precision::F16 => DType::F32,
            _ => half,
        };

        let masked = A::float_mask_fill(demoted(x()), mask(), (-1e9).into());
        assert_eq!(masked.dtype(), unheld);
        let lowest = values::<A>(masked)[0];
        assert!((lowest / -1e9 - 1.0).abs() < 0.01, "{lowest}");

        let masked = A::float_mask_fill(demoted(x()), mask(), f64::NEG_INFINITY.into());
        assert_eq!(masked.dtype(), half);
        assert_eq!(
            A::float_add_scalar(demoted(x()), 1e-8.into()).dtype(),
            unheld
        );
        assert_eq!(
            A::float_mul_scalar(demoted(x()), 1e6.into()).dtype(),
            unheld
        );
        assert_eq!(A::float_mul_scalar(demoted(x()), 0.5.into()).dtype(), half);
        // bf16's range ends a little before FP32's.
        let lowest = f64::from(f32::MIN);
        assert_eq!(
            A::float_clamp_min(demoted(x()), lowest.into()).dtype(),
            DType::F32
        );
        assert_eq!(
            A::float_remainder_scalar(demoted(x()), 1e6.into()).dtype(),
            unheld
        );
        let padded =
            |value| A::float_pad(demoted(x()), &[(1, 1), (0, 0)], PadMode::Constant(value));
        assert_eq!(padded(-1e9).dtype(), unheld);
        assert_eq!(padded(0.0).dtype(), half);
        assert_eq!(A::leaky_relu(demoted(x()), 1e-6.into()).dtype(), unheld);
    }
}

#[test]
fn an_additive_mask_of_minus_a_billion_survives() {
    for precision in HALVES {
        let _alone = on(precision);
        let scores = demoted(f32s::<A>(&[1.0, 2.0, 3.0, 0.5, 0.25, 2.0], &[2, 3]));
        let mask = f32s::<A>(&[0.0, 0.0, -1e9], &[1, 3]);
        let masked = A::float_add(scores, mask);
        assert_eq!(masked.dtype(), DType::F32);
        let probabilities = values::<A>(A::softmax(masked, 1));
        assert!(
            probabilities.iter().all(|p| p.is_finite()),
            "{probabilities:?}"
        );
        assert_eq!((probabilities[2], probabilities[5]), (0.0, 0.0));
        assert!((probabilities[0] + probabilities[1] - 1.0).abs() < 1e-6);
    }
}

/// Burn's clients send a softmax in training as several operations.
#[test]
fn what_a_program_writes_or_selects_it_finds_again() {
    const VALUE: f32 = -12_345.0;
    let places = |places| values::<A>(A::bool_into_float(places, FloatDType::F32));
    let equal = |tensor| places(A::float_equal_elem(tensor, VALUE.into(), BoolDType::Native));
    for precision in HALVES {
        let _alone = on(precision);
        let mask = bools::<A>(&[true, false, false, false], &[2, 2]);
        let filled = A::float_mask_fill(demoted(x()), mask, VALUE.into());
        assert_eq!(filled.dtype(), half(precision));
        assert_eq!(equal(filled), [1.0, 0.0, 0.0, 0.0]);
        let padded = A::float_pad(demoted(x()), &[(0, 0), (1, 0)], PadMode::Constant(VALUE));
        assert_eq!(padded.dtype(), half(precision));
        assert_eq!(equal(padded), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);

        // The peaks of a mean over channels, which fits in half and is FP32.
        let channels = [1.0, 3.0, 2.0, 6.0, 1.25, 3.5, 2.25, 7.0];
        let heat = A::float_mean_dim(demoted(f32s::<A>(&channels, &[1, 2, 4])), 1);
        let heat = A::float_div_scalar(heat, 3.0.into());
        let largest = A::max_pool1d(heat.clone(), 3, 1, 1, 1, false);
        let peaks = places(A::float_equal(largest, heat, BoolDType::Native));
        assert_eq!(peaks, [0.0, 1.0, 0.0, 1.0]);
    }
}

#[test]
fn the_difference_from_the_maximum_is_fp32() {
    for precision in HALVES {
        let _alone = on(precision);
        let scores = demoted(f32s::<A>(&[16.0, 1.0, -65504.0], &[1, 3]));
        let expected: Vec<_> = values::<A>(scores.clone())
            .iter()
            .map(|x| x - 16.0)
            .collect();
        let difference = A::float_sub(scores.clone(), A::float_max_dim(scores.clone(), 1));
        assert_eq!(difference.dtype(), DType::F32);
        assert_eq!(values::<A>(difference), expected);
        // Another difference of half tensors is half.
        assert_eq!(
            A::float_sub(scores.clone(), scores).dtype(),
            half(precision)
        );
    }
}

/// Burn's clients send a linear layer as a product and a sum, with the bias as a row.
#[test]
fn the_bias_of_a_linear_layer_is_added_in_half_and_no_other_row_is() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        let x = || f32s::<A>(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]);
        let weight = || f32s::<A>(&[0.5, 1.0, -1.0, 2.0], &[2, 2]);
        let row = |shape: &[usize]| A::float_reshape(f32s::<A>(&[0.25, -1e9], &[2]), shape.into());
        let batch = |tensor, shape: &[usize]| A::float_reshape(tensor, shape.into());

        let product = A::float_matmul(x(), weight());
        let sum = A::float_add(product.clone(), row(&[1, 2]));
        assert_eq!(sum.dtype(), half);
        // A row that looks like a bias may be a mask: the sum stays finite.
        let sum = values::<A>(sum);
        assert_eq!(sum[0], -1.25);
        assert!(sum[1] < -1e4 && sum[1].is_finite(), "{sum:?}");
        let lost = f32s::<A>(&[f32::NAN, f32::NEG_INFINITY], &[2]);
        let sum = A::float_add(product.clone(), A::float_reshape(lost, [1, 2].into()));
        let sum = values::<A>(sum);
        assert!(
            sum[0].is_nan() && sum[1] < -1e4 && sum[1].is_finite(),
            "{sum:?}"
        );
        let batched = A::float_matmul(batch(x(), &[3, 1, 2]), batch(weight(), &[1, 2, 2]));
        assert_eq!(A::float_add(batched, row(&[1, 1, 2])).dtype(), half);

        // A sum is not a linear layer with a column, with a tensor that was not a vector, or in another
        // order.
        let column = A::float_reshape(f32s::<A>(&[1.0, 2.0, 3.0], &[3]), Shape::new([3, 1]));
        assert_eq!(A::float_add(product.clone(), column).dtype(), DType::F32);
        let tensor = f32s::<A>(&[0.25, 0.5], &[1, 2]);
        assert_eq!(A::float_add(product.clone(), tensor).dtype(), DType::F32);
        assert_eq!(A::float_add(row(&[1, 2]), product).dtype(), DType::F32);

        // Scores, and a mask of their columns.
        let scores = A::float_matmul(x(), A::float_swap_dims(weight(), 0, 1));
        assert_eq!(A::float_add(scores, row(&[1, 2])).dtype(), DType::F32);
        let keys = A::float_swap_dims(batch(weight(), &[1, 2, 2]), 1, 2);
        let scores = A::float_matmul(batch(x(), &[1, 3, 2]), keys);
        let masked = A::float_add(scores, row(&[1, 1, 2]));
        assert_eq!(masked.dtype(), DType::F32);
        assert_eq!(values::<A>(masked)[1], -1e9);

        // In FP32, the sum stays FP32, and a mask stays whole, also beside a product from before.
        let product = A::float_matmul(x(), weight());
        configure::<Flex>(&FlexDevice, Precision::F32).unwrap();
        for product in [product, A::float_matmul(x(), weight())] {
            let sum = A::float_add(product, row(&[1, 2]));
            assert_eq!(sum.dtype(), DType::F32);
            assert_eq!(values::<A>(sum)[1], -1e9);
        }
    }
}

#[test]
fn attention_with_masks_is_finite() {
    for precision in HALVES {
        let _alone = on(precision);
        let heads = |value: f32| f32s::<A>(&[value; 16], &[1, 1, 4, 4]);
        let options = || AttentionModuleOptions::default();
        // Unscaled scores of 4 * 300 * 300 are beyond f16.
        let out = A::attention(
            heads(300.0),
            heads(300.0),
            heads(1.0),
            None,
            None,
            options(),
        );
        assert_eq!(values::<A>(out), [1.0; 16]);
        let bias = f32s::<A>(&[0.0, 0.0, -1e9, -1e9], &[1, 1, 1, 4]);
        let bias = A::float_expand(bias, Shape::new([1, 1, 4, 4]));
        let out = A::attention(
            heads(1.0),
            heads(1.0),
            heads(1.0),
            None,
            Some(bias),
            options(),
        );
        assert_eq!(values::<A>(out), [1.0; 16]);
        // With only a large negative bias as mask, a row without a key attends to all keys.
        let bias = f32s::<A>(&[-1e9; 16], &[1, 1, 4, 4]);
        let out = A::attention(
            heads(1.0),
            heads(1.0),
            heads(1.0),
            None,
            Some(bias),
            options(),
        );
        assert_eq!(values::<A>(out), [1.0; 16]);
        // A row without a key.
        let mask = bools::<A>(&[true; 16], &[1, 1, 4, 4]);
        let out = A::attention(
            heads(1.0),
            heads(1.0),
            heads(1.0),
            Some(mask),
            None,
            options(),
        );
        assert_eq!(values::<A>(out), [0.0; 16]);
    }
}

#[test]
fn attention_in_half_is_fp32_between_roundings() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = FloatDType::from(half(precision));
        let values = |from: usize| -> Vec<f32> {
            (from..from + 24).map(|i| (i as f32 * 0.7).sin()).collect()
        };
        let shape = [1, 2, 4, 3];
        let usual = AttentionModuleOptions::default();
        let options = |scale, softcap| AttentionModuleOptions {
            scale,
            softcap,
            ..Default::default()
        };
        for options in [usual, options(Some(0.3), None), options(None, Some(2.0))] {
            let [q, k, v] = [0, 24, 48].map(|from| f32s::<A>(&values(from), &shape));
            let widened = || {
                let report = AmpReport::of::<Flex>(&FlexDevice);
                let of_attention = report.casts.get("attention").copied();
                of_attention.unwrap_or_default().from_half.count
            };
            let before = widened();
            let out = A::attention(q, k, v, None, None, options);
            assert_eq!(out.dtype(), half.into());
            // Flex gives the same values without these casts.
            assert_eq!(widened() - before, 3);
            let [q, k, v] = [0, 24, 48].map(|from| {
                let rounded = Flex::float_cast(f32s::<Flex>(&values(from), &shape), half);
                Flex::float_cast(rounded, FloatDType::F32)
            });
            let expected = Flex::attention(q, k, v, None, None, options);
            let expected = Flex::float_cast(Flex::float_cast(expected, half), FloatDType::F32);
            assert_eq!(common::values::<A>(out), common::values::<Flex>(expected));
        }
    }
}

#[test]
fn the_product_of_a_tensor_with_itself_is_a_square_in_fp32() {
    let _alone = on(Precision::F16);
    let large = || demoted(f32s::<A>(&[300.0, -512.0], &[2]));
    // A square as a client sends it: as a product of a tensor with itself.
    let tensor = A::float_tensor_handle(large());
    let operand = || {
        A::float_tensor(TensorHandle {
            handle: tensor.clone(),
            shape: Shape::new([2]),
        })
    };
    let square = A::float_mul(operand(), operand());
    assert_eq!(square.dtype(), DType::F32);
    assert_eq!(values::<A>(square), [90_000.0, 262_144.0]);
    // Equal values are not the same tensor.
    let product = A::float_mul(large(), large());
    assert_eq!(product.dtype(), DType::F16);
    assert_eq!(values::<A>(product), [f32::INFINITY; 2]);
}

#[test]
fn long_sums_do_not_stop_at_two_thousand() {
    for precision in HALVES {
        let _alone = on(precision);
        let ones = |shape: &[usize]| {
            A::float_ones(Shape::from(shape.to_vec()), &FlexDevice, FloatDType::F32)
        };
        assert_eq!(
            values::<A>(A::float_matmul(ones(&[1, 4096]), ones(&[4096, 1]))),
            [4096.0]
        );
        assert_eq!(values::<A>(A::float_sum(demoted(ones(&[4096])))), [4096.0]);
        let mut sum = zeros(&[1]);
        for _ in 0..4096 {
            sum = A::float_add(sum, demoted(ones(&[1])));
        }
        assert_eq!(values::<A>(sum), [4096.0]);
        let x = ones(&[1, 1, 64, 64]);
        let weight_grad = A::conv2d_weight_backward(
            x.clone(),
            ones(&[1, 1, 1, 1]),
            x,
            ConvOptions::new([1; 2], [0; 2], [1; 2], 1),
        );
        assert_eq!(values::<A>(weight_grad), [4096.0]);
    }
}

#[test]
fn constants_follow_half_in_products_and_not_in_sums() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        assert_eq!(
            A::float_cat(vec![zeros(&[2, 2]), demoted(x())], 0).dtype(),
            half
        );
        assert_eq!(
            A::float_add(demoted(x()), zeros(&[2, 2])).dtype(),
            DType::F32
        );
        assert_eq!(A::float_mul(demoted(x()), x()).dtype(), DType::F32);

        // A running product begins with ones, and its length is not known. A state begins with zeros.
        let ones = || A::float_ones(Shape::new([2, 2]), &FlexDevice, FloatDType::F32);
        assert_eq!(A::float_mul(ones(), demoted(x())).dtype(), DType::F32);
        for zeros in [
            zeros(&[2, 2]),
            A::float_reshape(zeros(&[4]), Shape::new([2, 2])),
        ] {
            assert_eq!(A::float_mul(demoted(x()), zeros).dtype(), DType::F32);
        }
        let joined = A::float_cat(vec![demoted(x()), ones()], 0);
        assert_eq!(joined.dtype(), half);

        let full = |value: f64, shape: &[usize]| {
            A::float_full(
                shape.to_vec().into(),
                value.into(),
                &FlexDevice,
                FloatDType::F32,
            )
        };
        assert_eq!(A::float_mul(demoted(x()), full(0.5, &[2, 2])).dtype(), half);
        assert_eq!(
            A::float_mul(demoted(x()), full(1e-6, &[2, 2])).dtype(),
            DType::F32
        );

        // A moved constant stays a constant, and a computed tensor is not a constant.
        let moved = A::float_reshape(full(0.5, &[4]), Shape::new([2, 2]));
        assert_eq!(A::float_mul(demoted(x()), moved).dtype(), half);
        let computed = A::float_add_scalar(zeros(&[2, 2]), 1.0.into());
        assert_eq!(A::float_mul(demoted(x()), computed).dtype(), DType::F32);

        // The noise of a dropout.
        let bernoulli = Distribution::Bernoulli(0.5);
        let random = |distribution| {
            A::float_random(
                Shape::new([2, 2]),
                distribution,
                &FlexDevice,
                FloatDType::F32,
            )
        };
        assert_eq!(A::float_mul(demoted(x()), random(bernoulli)).dtype(), half);
        let drawn = random(Distribution::Default);
        assert_eq!(A::float_mul(demoted(x()), drawn).dtype(), DType::F32);
    }
}

#[test]
fn fp32_that_fits_in_half_returns_to_it_at_an_activation() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        let mean = || A::float_mean_dim(demoted(x()), 1);
        assert_eq!(mean().dtype(), DType::F32);
        let centered = || A::float_sub(demoted(x()), mean());
        assert_eq!(centered().dtype(), DType::F32);
        assert_eq!(A::relu(centered()).dtype(), half);
        assert_eq!(A::relu(A::float_neg(centered())).dtype(), half);
        // A product of two large operands, or a sum with another FP32 tensor, may be of any size.
        assert_eq!(
            A::relu(A::float_mul(centered(), centered())).dtype(),
            DType::F32
        );
        assert_eq!(A::relu(A::float_add(centered(), x())).dtype(), DType::F32);
        assert_eq!(A::relu(x()).dtype(), DType::F32);
        // A sum of many that fit may be beyond f16.
        let mean = A::float_mean(demoted(f32s::<A>(&[6_400.0; 4], &[2, 2])));
        let sum = (0..15).fold(mean.clone(), |sum, _| A::float_add(sum, mean.clone()));
        assert_eq!(values::<A>(A::relu(sum)), [102_400.0]);
        // Scaled values may leave f16.
        let expected = if precision == Precision::F16 {
            DType::F32
        } else {
            half
        };
        for scale in [1e-6, 4096.0] {
            let scaled = A::float_mul_scalar(centered(), scale.into());
            assert_eq!(A::relu(scaled).dtype(), expected);
        }
    }
}

#[test]
fn a_parameters_gradient_is_fp32() {
    for precision in HALVES {
        let _alone = on(precision);
        let grad = A::linear_weight_backward(demoted(x()), demoted(x()));
        assert_eq!(grad.dtype(), DType::F32);
        let grad = A::linear_x_backward(x(), demoted(x()));
        assert_eq!(grad.dtype(), half(precision));
        // For the client's own half tensors, the gradient has the client's dtype.
        let own = || A::float_cast(x(), FloatDType::BF16);
        let grad = A::linear_weight_backward(own(), own());
        assert_eq!(data::<A>(grad).dtype(), DType::BF16);
    }
}

#[test]
fn batch_norm_gives_half_and_keeps_its_statistics() {
    for precision in HALVES {
        let _alone = on(precision);
        let half = half(precision);
        let image = || {
            demoted(f32s::<A>(
                &[0.5, 1.0, 1.5, 2.0, 1.0, 0.0, 3.0, 1.0],
                &[2, 2, 2],
            ))
        };
        let channels = || f32s::<A>(&[1.0, 2.0], &[2]);
        let trained = A::batch_norm_train(image(), channels(), channels(), 1e-5);
        assert_eq!(trained.output.dtype(), half);
        assert_eq!(trained.mean.dtype(), DType::F32);
        assert_eq!(trained.variance.dtype(), DType::F32);
        assert_eq!(values::<A>(trained.mean.clone()), [0.625, 1.875]);
        let (mean, variance) = (trained.mean, trained.variance);
        let grads =
            A::batch_norm_train_backward(image(), channels(), mean, variance, 1e-5, image());
        assert_eq!(grads.x_grad.dtype(), half);
        assert_eq!(grads.gamma_grad.dtype(), DType::F32);
        assert_eq!(grads.beta_grad.dtype(), DType::F32);
    }
}

#[test]
fn a_seed_gives_fp32s_numbers() {
    use burn_backend::Backend;

    let _alone = on(Precision::F16);
    let draw = |dtype| {
        A::seed(&FlexDevice, 7);
        let distribution = Distribution::Uniform(0.0, 1.0);
        let drawn = A::float_random(Shape::new([200]), distribution, &FlexDevice, dtype);
        values::<A>(A::float_cast(drawn, FloatDType::F32))
    };
    let (wide, half) = (draw(FloatDType::F32), draw(FloatDType::F16));
    for (wide, half) in wide.into_iter().zip(half) {
        assert!(
            (wide - half).abs() <= wide * 2f32.powi(-11) + 6e-8,
            "{half} for {wide}"
        );
    }
}

#[test]
fn the_noise_of_a_dropout_is_half_and_fp32s_own() {
    use burn_backend::Backend;

    let noise = |precision| {
        configure::<Flex>(&FlexDevice, precision).unwrap();
        A::seed(&FlexDevice, 7);
        let bernoulli = Distribution::Bernoulli(0.9);
        A::float_random(Shape::new([200]), bernoulli, &FlexDevice, FloatDType::F32)
    };
    for precision in HALVES {
        let _alone = on(precision);
        let (half_noise, wide) = (noise(precision), noise(Precision::F32));
        assert_eq!(wide.dtype(), DType::F32);
        assert_eq!(half_noise.dtype(), half(precision));
        assert_eq!(values::<A>(half_noise.clone()), values::<A>(wide));
        // A product with FP32 is exact, in FP32.
        configure::<Flex>(&FlexDevice, precision).unwrap();
        let thirds = f32s::<A>(&[1.0 / 3.0; 200], &[200]);
        let dropped = values::<A>(A::float_mul(thirds, half_noise.clone()));
        assert!(dropped.iter().all(|v| *v == 0.0 || *v == 1.0 / 3.0));
        // In every other operation the noise is FP32.
        let scaled = A::float_div_scalar(half_noise, 0.9.into());
        assert_eq!(scaled.dtype(), DType::F32);
        let scaled = values::<A>(scaled);
        assert!(scaled.iter().all(|v| *v == 0.0 || *v == 1.0 / 0.9));
    }
}

#[test]
fn half_tensors_return_to_fp32_when_the_device_does() {
    let _alone = on(Precision::F16);
    let product = A::float_matmul(x(), x());
    let own = A::float_cast(x(), FloatDType::F16);
    configure::<Flex>(&FlexDevice, Precision::F32).unwrap();
    let sum = A::float_add(product.clone(), x());
    assert_eq!(sum.dtype(), DType::F32);
    assert_eq!(values::<A>(sum), [-0.75, -3.5, 5.25, 4.5]);
    assert_eq!(A::float_transpose(product).dtype(), DType::F32);
    // The client's own half tensors stay half.
    assert_eq!(A::float_add(own.clone(), own).dtype(), DType::F16);
}

#[test]
fn other_kinds_become_floats_as_asked() {
    let _alone = on(Precision::Bf16);
    let half = half(Precision::Bf16);
    let int = || ints::<A>(&[1, 2], &[2]);
    assert_eq!(
        A::int_into_float(int(), FloatDType::F32).dtype(),
        DType::F32
    );
    let mask = A::bool_into_float(bools::<A>(&[true, false], &[2]), FloatDType::F32);
    let product = A::float_mul(demoted(f32s::<A>(&[3.0, 4.0], &[2])), mask);
    assert_eq!(product.dtype(), half);
    assert_eq!(values::<A>(product), [3.0, 0.0]);
    let indices = A::float_argmax(demoted(x()), 1, IntDType::I32);
    assert_eq!(indices.dtype(), DType::I32);
    let larger = A::float_greater(demoted(x()), x(), BoolDType::Native);
    assert!(larger.dtype().is_bool());
}

#[test]
fn quantized_tensors_are_made_of_fp32_and_give_fp32() {
    let _alone = on(Precision::F16);
    let values_of = |count: usize| (0..count).map(|i| i as f32 / 64.0).collect::<Vec<_>>();
    let tensor = || f32s::<A>(&values_of(64), &[2, 32]);
    let scheme = Default::default();
    let ours = A::quantize_dynamic(demoted(tensor()), &scheme);
    let theirs = Flex::quantize_dynamic(f32s::<Flex>(&values_of(64), &[2, 32]), &scheme);
    let ours = A::dequantize(ours, FloatDType::F32);
    assert_eq!(ours.dtype(), DType::F32);
    let theirs = Flex::dequantize(theirs, FloatDType::F32);
    assert_eq!(values::<A>(ours), values::<Flex>(theirs));
}

#[cfg(feature = "burn-0-23")]
#[test]
fn a_collective_adds_in_the_dtype_that_the_client_knows_and_moves_half_as_half() {
    use burn_backend::distributed::ReduceOperation::Sum;

    let _alone = on(Precision::Bf16);
    let half = || demoted(f32s::<A>(&[1.0, 2.0], &[2]));
    let fp32 = || f32s::<A>(&[0.1, 256.5], &[2]);
    let read = |tensors: Vec<FloatTensor<A>>, dtype| -> Vec<Vec<f32>> {
        let all = tensors.into_iter();
        all.map(|tensor| {
            assert_eq!(tensor.dtype(), dtype);
            values::<A>(tensor)
        })
        .collect()
    };
    // bf16 cannot represent either sum.
    let reduced = A::float_all_reduce(vec![half(), fp32()], Sum);
    assert_eq!(read(reduced, DType::F32), [[1.1, 258.5], [1.1, 258.5]]);
    let scattered = A::float_reduce_scatter(vec![half(), fp32()], 0, Sum);
    assert_eq!(read(scattered, DType::F32), [[1.1], [258.5]]);
    let gathered = A::float_all_gather(vec![half(), fp32()], 0);
    assert_eq!(read(gathered, DType::F32), [[1.0, 2.0, 0.1, 256.5]; 2]);
    let gathered = A::float_all_gather(vec![half(), half()], 0);
    assert_eq!(read(gathered, DType::BF16), [[1.0, 2.0, 1.0, 2.0]; 2]);
    let exchanged = A::float_all_to_all(vec![half(), fp32()], 0, 0);
    assert_eq!(read(exchanged, DType::F32), [[1.0, 0.1], [2.0, 256.5]]);
    let sent = A::float_broadcast(half(), &[FlexDevice, FlexDevice]);
    assert_eq!(read(sent, DType::BF16), [[1.0, 2.0]; 2]);
}
