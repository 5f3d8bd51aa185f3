//! Small programs that half precision would make wrong. The programs are those of the package for Burn 0.21, in the same
//! file.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::tensor::Tensor;
use burn_amp_device::{Precision, flex, full_precision};

use client::{HALVES, device, on_device, read as data, roundoff};

/// The results of a program on a device of this precision, in inference and in training.
fn on<O>(precision: Precision, program: fn() -> O) -> [O; 2] {
    let device = flex(precision).unwrap();
    [device.clone(), device.autodiff()].map(|device| on_device(device, program))
}

/// A client's tensor is always FP32.
fn assert_in_force(_: &Tensor<2>) {}

include!("../../tests/data_programs/programs.rs");

#[test]
fn bounds_thresholds_and_dtypes_are_those_asked_for() {
    let mut wrong = Vec::new();
    for (name, program) in of_bounds() {
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            for (found, exact) in on(precision, program) {
                let values = self::wrong(&found, &exact, roundoff(precision).into());
                wrong.extend(
                    values
                        .iter()
                        .map(|value| format!("{name} in {precision}: {value}")),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A device knows no parameters: it rounds data as well, unless a product sums nothing.
#[test]
fn data_is_rounded_in_half() {
    for (name, program) in of_data() {
        let [expected, in_training] = on(Precision::F32, program);
        assert_eq!(expected, in_training, "{name}");
        for precision in HALVES {
            for found in on(precision, program) {
                let is_exact = OF_ONE_TERM.contains(&name);
                assert_eq!(found == expected, is_exact, "{name} in {precision}");
            }
        }
    }
}

#[test]
fn gradients_are_those_of_what_fp32_computes() {
    for (name, function) in FUNCTIONS {
        let gradient = |precision| {
            on_device(flex(precision).unwrap().autodiff(), || {
                let x = confident_logits().require_grad();
                let grads = function(learned(x.clone())).sum().backward();
                data(x.grad(&grads).unwrap())
            })
        };
        let expected = gradient(Precision::F32).into_iter().map(f64::from);
        let expected: Vec<_> = expected.collect();
        for precision in HALVES {
            let wrong = self::wrong(&gradient(precision), &expected, roundoff(precision).into());
            assert!(wrong.is_empty(), "{name} in {precision}: {wrong:?}");
        }
    }
}
