//! Devices of this process whose sessions have ended. In their own process, and one test at a time: all tests
//! share the devices.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::nn::LinearConfig;
use burn::optim::AdamConfig;
use burn::remote::CustomOpClient;
use burn::server::CustomOpIr;
use burn::tensor::{Device, Tensor};
use burn_amp_device::{AmpReport, Error, MixedPrecisionTrainerConfig, Precision, flex};
use burn_dispatch::DispatchDevice;

use client::{HALVES, assert_computed_in, product, read, tensor, within, within_a_minute};

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // The backtrace of a panic takes seconds to print.
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends an operation that panics, which ends the session.
fn end(device: &Device) {
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        panic!("{device:?}");
    };
    // No server has this tensor, so Burn panics.
    CustomOpClient::new(remote).register(CustomOpIr::new("nobody knows", &[], &[]));
}

#[test]
fn after_an_operation_that_panics_the_next_call_gives_a_new_device() {
    let _alone = alone();
    let device = flex(Precision::F16).unwrap();
    let before = tensor([2, 2], 1, &device);
    within_a_minute(move || {
        end(&device);
        assert!(device.sync().is_err());
        assert!(before.try_into_data().is_err());
        let new = flex(Precision::F16).unwrap();
        assert_ne!(new, device);
        assert_eq!(flex(Precision::F16).unwrap(), new);
        assert_computed_in(Precision::F16, &product(&new));
    });
}

#[test]
fn a_tensor_of_an_ended_session_keeps_no_other_device_waiting() {
    let _alone = alone();
    let [f16, bf16] = within(5, || HALVES.map(|precision| flex(precision).unwrap()));
    let lost: Tensor<2> = tensor([4, 4], 1, &f16);
    let healthy: Tensor<2> = tensor([4, 4], 2, &bf16);
    assert_eq!(read(healthy.clone()).len(), 16);
    let ended = f16.clone();
    within(5, move || {
        end(&ended);
        assert!(ended.sync().is_err());
    });
    let target = bf16.clone();
    let moved = within(5, move || lost.to_device(&target));
    let device = bf16.clone();
    within(5, move || device.sync()).unwrap();
    let values = within(5, move || healthy.try_into_data());
    assert!(values.is_ok(), "{values:?}");
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        within(5, move || flex(precision).unwrap());
    }
    let device = bf16.clone();
    assert!(within(5, move || AmpReport::of_device(&device)).is_some());
    assert!(within(5, move || moved.try_into_data()).is_err());
    // Reading the tensor that never arrived has ended that session, too.
    let new = within(5, || flex(Precision::Bf16).unwrap());
    assert_computed_in(Precision::Bf16, &within(5, move || product(&new)));
}

#[test]
fn a_tensor_that_is_moved_while_its_session_ends_keeps_no_other_device_waiting() {
    let _alone = alone();
    let [f16, bf16] = within(5, || HALVES.map(|precision| flex(precision).unwrap()));
    for _ in 0..3 {
        let lost: Tensor<2> = tensor([4, 4], 1, &f16);
        end(&f16);
        let target = bf16.clone();
        let moved = within(5, move || lost.to_device(&target));
        drop(moved);
        let device = bf16.clone();
        // Returns a value or an error.
        let _ = within(5, move || device.sync());
    }
    let new = within(5, || flex(Precision::Bf16).unwrap());
    assert_computed_in(Precision::Bf16, &within(5, move || product(&new)));
}

#[test]
fn the_record_of_a_device_that_does_not_answer_is_an_error() {
    let _alone = alone();
    let plain = flex(Precision::F16).unwrap();
    let device = plain.clone().autodiff();
    let model = LinearConfig::new(4, 2).init(&device);
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .init(model, AdamConfig::new().init(), 1e-3)
        .unwrap();
    let ones = || Tensor::<2>::ones([2, 4], &device);
    let step = trainer.train_step(ones(), (), |model, x, ()| model.forward(x).mean());
    step.unwrap();
    within_a_minute(move || {
        end(&plain);
        assert!(plain.sync().is_err());
        assert!(matches!(trainer.to_record(), Err(Error::Read(_))));
        let file = std::env::temp_dir().join(format!("burn-amp-{}-ended", std::process::id()));
        assert!(matches!(trainer.save_file(&file), Err(Error::Read(_))));
        assert!(!file.exists());
    });
}

/// How many threads have names with this prefix.
#[cfg(target_os = "linux")]
fn threads(name: &str) -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|found| found.starts_with(name)).count()
}

#[cfg(target_os = "linux")]
#[test]
fn ten_recoveries_leave_no_socket_and_no_thread_of_a_server() {
    use client::strangers::Held;

    let _alone = alone();
    let recover = || {
        let device = flex(Precision::F16).unwrap();
        end(&device);
        assert!(device.sync().is_err());
        let device = flex(Precision::F16).unwrap();
        assert_computed_in(Precision::F16, &product(&device));
    };
    within_a_minute(recover);
    let (before, listening) = (Held::by("self"), client::listening().len());
    let clients = threads("DSD-");
    for _ in 0..10 {
        within_a_minute(recover);
    }
    let more = || {
        let (now, listening_now) = (Held::by("self"), client::listening().len());
        // Burn's client keeps a thread for each device, to the end of the process.
        let new_clients = threads("DSD-") - clients;
        let same = now.descriptors <= before.descriptors + 2
            && now.threads <= before.threads + new_clients + 2
            && new_clients <= 10
            && listening_now <= listening;
        let tell =
            || format!("{now:?}, {listening_now} listen; before {before:?}, {listening} listen");
        (!same).then(tell)
    };
    // Threads may take a moment to end.
    for _ in 0..50 {
        if more().is_some() {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
    assert_eq!(more(), None);
}
