//! No operation is less exact than in PyTorch's autocast, nor is a loop of operations. The operations are those of the package
//! for Burn 0.21, in the same file.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use std::cell::RefCell;

use burn::tensor::{Device, Tensor};
use burn_amp_device::{Precision, flex};

use client::{HALVES, numbers, read as data};

thread_local! {
    /// The device of the operations of this thread.
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

fn device() -> Device {
    DEVICE.with_borrow(|device| device.clone().expect("a device"))
}

include!("../../tests/beside_autocast/operations.rs");

#[test]
fn no_operation_is_less_exact_than_in_autocast() {
    let on = |device: Device, casts, operation, seed| {
        DEVICE.set(Some(device.autodiff()));
        result(Casts(casts), operation, seed)
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
