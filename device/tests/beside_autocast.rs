//! No operation is less exact than in PyTorch's autocast, nor is a loop of operations. The operations are those of the package
//! for Burn 0.21, in the same file.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::tensor::{Device, Tensor};
use burn_amp_device::{Precision, flex};

use client::{HALVES, device, numbers, on_device, read as data};

include!("../../tests/beside_autocast/operations.rs");

#[test]
fn no_operation_is_less_exact_than_in_autocast() {
    let on = |device: Device, casts, operation, seed| {
        on_device(device.autodiff(), || result(Casts(casts), operation, seed))
    };
    let mut wrong = Vec::new();
    for precision in HALVES {
        let ours = flex(precision).unwrap();
        for (name, operation) in OPERATIONS {
            let found = (0..12).map(|seed| {
                let plain = |casts| on(Device::flex(), casts, operation, seed);
                let exact = plain(None);
                [
                    exact,
                    plain(precision.compute_dtype()),
                    on(ours.clone(), None, operation, seed),
                ]
            });
            wrong.extend(less_exact(name, precision, found));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
