//! Code that asks for the dtype of a tensor, as Burn's own does: what it creates in this dtype, or casts to it, is the
//! policy's if the policy made the tensor half.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::nn::RmsNormConfig;
use burn::prelude::*;
use burn::tensor::{DType, Distribution, linalg};
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, GradScaler, LossScaleConfig, Precision, full_precision,
    with_precision,
};

use common::{Inner, halves};

type B = AmpAutodiff<Inner>;
type I = Amp<Inner>;

/// The device's configuration is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn configure(precision: Precision) {
    let config = AmpConfig::new().with_precision(precision);
    config.apply::<I>(&Default::default()).unwrap();
}

/// These rows in half, by a product with a parameter that changes no value.
fn by_policy<B: Backend>(rows: Tensor<B, 2>) -> Tensor<B, 2> {
    let [_, n] = rows.dims();
    let identity = Tensor::<B, 2>::eye(n, &rows.device());
    let half = rows.matmul(identity.set_require_grad(false));
    assert!(matches!(half.dtype(), DType::F16 | DType::BF16));
    half
}

fn tensor<B: Backend, const M: usize, const N: usize>(rows: [[f32; N]; M]) -> Tensor<B, 2> {
    Tensor::from_data(rows, &Default::default())
}

fn data<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

/// The largest relative error.
fn error(found: &[f32], expected: &[f32]) -> f32 {
    let each = found.iter().zip(expected).map(|(f, e)| (f / e - 1.0).abs());
    each.fold(0.0, f32::max)
}

/// A matrix with a determinant that half does not hold.
const ROWS: [[f32; 4]; 4] = [
    [4.25, 1.25, 0.75, 0.125],
    [1.0, 3.125, 1.75, 0.3125],
    [0.25, 1.125, 2.875, 0.625],
    [0.75, 0.5, 1.25, 3.75],
];

fn asked<B: Backend>(half: Tensor<B, 2>) -> Vec<Tensor<B, 2>> {
    let computed = half.clone().exp();
    let mut asked = vec![
        half.zeros_like(),
        half.ones_like(),
        half.full_like(0.5),
        half.random_like(Distribution::Default),
        half.random_like(Distribution::Bernoulli(0.5)),
        Tensor::empty(half.dims(), (&half.device(), half.dtype())),
        computed.cast(half.dtype()),
    ];
    asked.push(linalg::det::<B, 3, 2, 1>(half.unsqueeze()).unsqueeze());
    asked
}

#[test]
fn the_data_of_what_a_program_asks_for_is_fp32() {
    for precision in halves() {
        with_precision(precision, || {
            let half = by_policy(tensor::<I, 4, 4>(ROWS));
            for (at, tensor) in asked(half.clone()).into_iter().enumerate() {
                assert_eq!(tensor.dtype(), half.dtype(), "{precision} {at}");
                assert_eq!(tensor.into_data().dtype, DType::F32, "{precision} {at}");
            }
            full_precision(|| {
                for (at, tensor) in asked(half).into_iter().enumerate() {
                    assert_eq!(tensor.dtype(), DType::F32, "{precision} {at}");
                }
            });
        });
    }
}

/// By the configuration of the device, and in regions around the innermost one.
#[test]
fn the_policys_dtype_is_that_of_the_device_and_of_the_regions() {
    let _alone = alone();
    for precision in halves() {
        configure(precision);
        let half = by_policy(tensor::<I, 4, 4>(ROWS));
        let ones = || half.ones_like().into_data().dtype;
        assert_eq!(ones(), DType::F32);
        for other in [Precision::F32, Precision::F16, Precision::Bf16] {
            if other == Precision::F32 || halves().contains(&other) {
                let nested = || with_precision(other, || full_precision(ones));
                assert_eq!([with_precision(other, ones), nested()], [DType::F32; 2]);
            }
        }
    }
    configure(Precision::F32);
}

/// Half data, a dtype that is not in force, and a cast of plain FP32 data.
#[test]
fn the_users_own_half_stays_half() {
    let _alone = alone();
    let device = Default::default();
    let [f16, bf16] = [Precision::F16, Precision::Bf16];
    for (precision, half, other) in [
        (f16, DType::F16, DType::BF16),
        (bf16, DType::BF16, DType::F16),
    ] {
        if halves().len() < 2 {
            continue;
        }
        let plain = || tensor::<I, 4, 4>(ROWS);
        let own = move || {
            let data = plain().into_data().convert_dtype(half);
            [
                Tensor::<I, 2>::from_data(data, (&device, half)),
                plain().cast(half),
                Tensor::ones([4, 4], (&device, other)),
                plain().exp().cast(other),
            ]
        };
        with_precision(precision, || {
            let dtypes = [half, half, other, other];
            for tensors in [own(), full_precision(own)] {
                for (tensor, dtype) in tensors.into_iter().zip(dtypes) {
                    assert_eq!(tensor.dtype(), dtype);
                    assert_eq!(tensor.clone().into_data().dtype, dtype);
                    assert_eq!(full_precision(|| tensor * 2.0).dtype(), dtype);
                }
            }
        });
    }
}

/// A leaf is trained in FP32, also one that the user cast.
#[test]
fn a_leaf_of_the_users_own_half_is_fp32() {
    for precision in halves() {
        with_precision(precision, || {
            let half = by_policy(tensor::<I, 4, 4>(ROWS)).dtype();
            let leaf = tensor::<B, 4, 4>(ROWS).cast(half).require_grad();
            assert_eq!(leaf.dtype(), DType::F32);
        });
    }
}

/// Burn casts the statistic of a root mean square norm to the dtype of its operand.
#[test]
fn a_norm_in_full_precision_is_that_of_fp32() {
    for precision in halves() {
        with_precision(precision, || {
            let norm = RmsNormConfig::new(2).init::<I>(&Default::default());
            let half = by_policy(tensor::<I, 1, 2>([[1.0, 2.0]]));
            let expected = full_precision(|| data(norm.forward(half.clone().cast(DType::F32))));
            let found = full_precision(|| data(norm.forward(half)));
            let error = error(&found, &expected);
            assert!(
                error < 1e-6,
                "{precision}: {found:?} for {expected:?}: {error:e}"
            );
        });
    }
}

/// The gradient of the statistic is a sum over all features, times the loss scale: it overflows f16, and not FP32.
#[test]
fn a_norm_in_full_precision_does_not_overflow_backward() {
    const N: usize = 1024;
    if !halves().contains(&Precision::F16) {
        return;
    }
    let scaler = GradScaler::new(LossScaleConfig::Fixed(65536.0)).unwrap();
    let found = with_precision(Precision::F16, || {
        scaler.scope(|| {
            let device = Default::default();
            let norm = RmsNormConfig::new(N).init::<B>(&device);
            let values: Vec<f32> = (0..N).map(|i| 0.01 + (i % 16) as f32 / 1024.0).collect();
            let x = Tensor::<B, 2>::from_data(TensorData::new(values, [1, N]), &device);
            let x = x.require_grad();
            let half = by_policy(x.clone());
            let loss = full_precision(|| norm.forward(half)).mean();
            x.grad(&loss.backward()).map(data)
        })
    });
    assert_eq!((found.is_some(), scaler.skipped_steps()), (true, 0));
}

#[test]
fn a_determinant_in_full_precision_is_that_of_fp32() {
    let exact = data(linalg::det::<Inner, 3, 2, 1>(
        tensor::<Inner, 4, 4>(ROWS).unsqueeze(),
    ));
    for precision in halves() {
        with_precision(precision, || {
            let half = by_policy(tensor::<I, 4, 4>(ROWS));
            let found = full_precision(|| linalg::det::<I, 3, 2, 1>(half.unsqueeze()));
            let dtype = found.dtype();
            assert_eq!(
                (dtype, data(found)),
                (DType::F32, exact.clone()),
                "{precision}"
            );
        });
    }
}

/// f16 stops counting at 2,048, and bf16 at 256.
#[test]
fn ones_are_counted_and_multiplied_in_full_precision() {
    const N: usize = 2500;
    for precision in halves() {
        with_precision(precision, || {
            let row = Tensor::<I, 2>::ones([1, 2], &Default::default());
            let half = by_policy(row).slice([0..1, 0..1]).repeat_dim(1, N);
            let counts = || {
                let ones = half.ones_like();
                let product = ones.clone().matmul(ones.clone().transpose());
                let norm = linalg::l0_norm(half.clone(), 1);
                [ones.sum().unsqueeze(), product, norm].map(data)
            };
            let exact = vec![N as f32];
            assert_eq!(
                full_precision(counts),
                [(); 3].map(|()| exact.clone()),
                "{precision}"
            );
            let [sum, ..] = counts();
            assert_eq!(sum, exact, "{precision}");
        });
    }
}

const FEATURES: usize = 256;

/// Rows of different sizes in half, by a parameter, and the norm of each row.
fn norm_of_rows<B: Backend>(norm: impl Fn(Tensor<B, 2>) -> Tensor<B, 2>) -> (Vec<f32>, Vec<f32>) {
    const ROWS: usize = 64;
    let value =
        |at: usize| ((0.37 * at as f64).sin() * (0.5 + (at / FEATURES) as f64 / 40.0)) as f32;
    let values: Vec<f32> = (0..ROWS * FEATURES).map(value).collect();
    let device = Default::default();
    let half = by_policy(Tensor::<B, 2>::from_data(
        TensorData::new(values, [ROWS, FEATURES]),
        &device,
    ));
    let expected = full_precision(|| data(norm(half.clone().cast(DType::F32))));
    (data(norm(half)), expected)
}

/// The root mean square of each row.
fn sizes(values: &[f32]) -> Vec<f32> {
    let size = |row: &[f32]| {
        let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
        (squares / FEATURES as f64).sqrt() as f32
    };
    values.chunks(FEATURES).map(size).collect()
}

/// A rounded statistic would scale all features of a row by the same wrong factor, 3.7e-3 in bf16: the errors would not
/// average out. The statistic stays FP32, and so does the result.
#[test]
fn a_norm_scales_each_row_by_its_fp32_statistic() {
    for precision in halves() {
        with_precision(precision, || {
            let plain = RmsNormConfig::new(FEATURES).init::<I>(&Default::default());
            let trained = RmsNormConfig::new(FEATURES).init::<B>(&Default::default());
            for (found, expected) in [
                norm_of_rows::<I>(|x| plain.forward(x)),
                norm_of_rows::<B>(|x| trained.forward(x)),
                // As programs write it by hand, with a product.
                norm_of_rows::<B>(|x| {
                    let wide = x.clone().cast(DType::F32);
                    let factor = wide.square().mean_dim(1).sqrt().recip();
                    let half = factor.cast(x.dtype());
                    x * half
                }),
            ] {
                let error = error(&sizes(&found), &sizes(&expected));
                assert!(error < 1e-6, "{precision}: {error:e}");
            }
        });
    }
}

/// A parameter is data, before its first step and after it, and an optimizer may keep its state in half.
#[test]
fn a_parameter_and_a_gradient_are_cast_as_the_program_says() {
    for precision in halves() {
        with_precision(precision, || {
            let half = by_policy(tensor::<I, 4, 4>(ROWS)).dtype();
            let x = tensor::<B, 4, 4>(ROWS).require_grad();
            let grads = by_policy(x.clone()).mean().backward();
            let grad = x.grad(&grads).unwrap();
            let stepped = Tensor::<B, 2>::from_inner(x.clone().inner() - grad.clone() * 0.1);
            let stepped = stepped.require_grad();
            for parameter in [x, stepped] {
                assert_eq!(parameter.cast(half).into_data().dtype, half, "{precision}");
            }
            let moment = full_precision(|| (grad.clone() * 0.1).cast(half));
            assert_eq!(
                (moment.dtype(), moment.into_data().dtype),
                (half, half),
                "{precision}"
            );
        });
    }
}

/// The FP32 values stand in beside a larger tensor alone: a cast rounds.
#[test]
fn a_cast_of_a_statistic_rounds() {
    for precision in halves() {
        with_precision(precision, || {
            let row = |n| Tensor::<I, 2>::full([32, n], 1.0 / 3.0, &Default::default()) * 1.0;
            let half = by_policy(tensor::<I, 4, 4>(ROWS)).dtype();
            let rounded = |n| data(row(n).cast(half).cast(DType::F32))[0];
            assert_eq!(rounded(1), rounded(2), "{precision}");
            assert_ne!(rounded(1), 1.0 / 3.0, "{precision}");
        });
    }
}
