//! A device of this process whose session has ended. Alone in its process: the device is everybody's.
#![cfg(feature = "flex")]

mod client;

use burn::remote::CustomOpClient;
use burn::server::CustomOpIr;
use burn_amp_device::{Precision, flex};
use burn_dispatch::DispatchDevice;

use client::{assert_computed_in, product, tensor, within_a_minute};

#[test]
fn after_an_operation_that_panics_the_next_call_gives_a_new_device() {
    let device = flex(Precision::F16).unwrap();
    let before = tensor([2, 2], 1, &device);
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        panic!("{device:?}");
    };
    let client = CustomOpClient::new(remote);
    within_a_minute(move || {
        // No server knows it, which is a panic of Burn's.
        client.register(CustomOpIr::new("nobody knows", &[], &[]));
        assert!(device.sync().is_err());
        assert!(before.try_into_data().is_err());
        let new = flex(Precision::F16).unwrap();
        assert_ne!(new, device);
        assert_eq!(flex(Precision::F16).unwrap(), new);
        assert_computed_in(Precision::F16, &product(&new));
    });
}
