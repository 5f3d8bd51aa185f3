//! Small programs that half precision would make wrong. Data that nothing learns keeps its FP32 values, also where it
//! stands beside a model. Bounds, thresholds and dtypes that a program asks for mean what they mean in FP32.
//!
//! `xtask/pytorch/data.py` has the same programs, with the same numbers, in PyTorch.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/on_backend.rs"]
mod on_backend;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Flex;
use burn_amp::{Amp, AmpConfig, Precision, with_precision};

use common::mlp::{data, in_scope, scaler};
use common::{HALVES, roundoff};
use on_backend::on_backend;

/// The programs on a backend.
macro_rules! programs_on {
    ($name:ident, $backend:ty) => {
        on_backend! {
            $name,
            $backend,

            use burn::backend::Flex;

            /// Half, where half is in force.
            fn assert_in_force(tensor: &Tensor<2>) {
                let precision = burn_amp::precision_of::<Flex>(&device()).unwrap();
                assert_eq!(
                    tensor.dtype(),
                    precision.compute_dtype().unwrap_or(DType::F32)
                );
            }

            fn full_precision<I, O>(input: I, program: impl FnOnce(I) -> O) -> O {
                burn_amp::full_precision(|| program(input))
            }

            include!("programs.rs");
        }
    };
}

programs_on!(trained, burn_amp::AmpAutodiff<burn::backend::Flex>);
programs_on!(evaluated, burn_amp::Amp<burn::backend::Flex>);

/// The device's configuration is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn data_that_nothing_learns_is_that_of_fp32() {
    let _alone = alone();
    for (name, program) in [trained::of_data(), evaluated::of_data()].concat() {
        let expected = with_precision(Precision::F32, program);
        assert!(
            expected.iter().all(|x| x.is_finite()),
            "{name}: {expected:?}"
        );
        for precision in HALVES {
            let found = with_precision(precision, program);
            assert_eq!(found, expected, "{name} in {precision}");
        }
    }
}

/// A contraction of the same data in half rounds it, unless it sums nothing.
#[test]
fn in_half_the_data_is_rounded() {
    let _alone = alone();
    let configure = |data_in_half| {
        let config = AmpConfig::new().with_precision(Precision::F32);
        let config = config.with_data_in_half(data_in_half);
        config.apply::<Amp<Flex>>(&Default::default()).unwrap();
    };
    for (name, program) in evaluated::of_data() {
        let expected = with_precision(Precision::F32, program);
        configure(true);
        let in_half = HALVES.map(|precision| with_precision(precision, program));
        configure(false);
        for (precision, found) in HALVES.into_iter().zip(in_half) {
            let is_exact = evaluated::OF_ONE_TERM.contains(&name);
            assert_eq!(found == expected, is_exact, "{name} in {precision}");
        }
    }
}

#[test]
fn bounds_thresholds_and_dtypes_are_those_asked_for() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for (name, program) in [trained::of_bounds(), evaluated::of_bounds()].concat() {
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let (found, exact) = with_precision(precision, program);
            let values = evaluated::wrong(&found, &exact, roundoff(precision));
            wrong.extend(
                values
                    .iter()
                    .map(|value| format!("{name} in {precision}: {value}")),
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn gradients_are_those_of_what_fp32_computes() {
    use trained::{FUNCTIONS, confident_logits, learned};

    let _alone = alone();
    for (name, function) in FUNCTIONS {
        let gradient = || {
            let x = confident_logits().require_grad();
            let grads = function(learned(x.clone())).sum().backward();
            data(x.grad(&grads).unwrap())
        };
        let expected = with_precision(Precision::F32, gradient);
        let expected: Vec<_> = expected.into_iter().map(f64::from).collect();
        for precision in HALVES {
            let found = in_scope(precision, &scaler(256.0), gradient);
            let wrong = trained::wrong(&found, &expected, roundoff(precision));
            assert!(wrong.is_empty(), "{name} in {precision}: {wrong:?}");
        }
    }
}
