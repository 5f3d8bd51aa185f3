//! Shared code of the tests: values, and the error of half precision.
#![allow(dead_code)]

pub mod process;
#[cfg(feature = "server")]
pub mod served;
#[cfg(target_os = "linux")]
pub mod strangers;

use std::cell::RefCell;

use burn::tensor::{Device, Tensor, TensorData};
use burn_amp_device::Precision;

pub const HALVES: [Precision; 2] = [Precision::F16, Precision::Bf16];

thread_local! {
    /// The device of the program that this thread runs. A program takes no device: on Burn 0.21 the same code has its
    /// backend's.
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// Runs a program, whose [`device`] is this one.
pub fn on_device<O>(device: Device, program: impl FnOnce() -> O) -> O {
    DEVICE.set(Some(device));
    program()
}

/// The device of the program that this thread runs.
pub fn device() -> Device {
    DEVICE.with_borrow(|device| device.clone().expect("a device"))
}

/// Numbers from -1 to 1, the same for the same seed.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub fn tensor<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let count = shape.iter().product();
    Tensor::from_data(TensorData::new(numbers(count, seed), shape), device)
}

pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

/// The product of two matrices that are the same on each device.
pub fn product(device: &Device) -> Vec<f32> {
    let x = tensor([8, 64], 1, device);
    let w = tensor([64, 8], 2, device);
    let product = x.matmul(w);
    assert_eq!(product.dtype(), burn::tensor::DType::F32);
    read(product)
}

/// The largest relative error of rounding to a precision.
pub fn roundoff(precision: Precision) -> f32 {
    match precision {
        Precision::F16 => 2f32.powi(-11),
        Precision::Bf16 => 2f32.powi(-8),
        _ => 2f32.powi(-24),
    }
}

/// The length of the error beside that of the exact values.
pub fn relative_error(found: &[f32], exact: &[f32]) -> f32 {
    assert_eq!(found.len(), exact.len());
    let length = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let error = length(&mut found.iter().zip(exact).map(|(f, e)| f - e));
    error / length(&mut exact.iter().copied())
}

/// Asserts that `product` was computed in `precision`: not better, and not much worse.
pub fn assert_computed_in(precision: Precision, product: &[f32]) {
    let error = relative_error(product, &self::product(&Device::flex()));
    let half = roundoff(precision);
    assert!(
        error > half / 16.0 && error < 3.0 * half,
        "{precision}: {error}"
    );
}

/// The result of `f`. Panics after a minute.
pub fn within_a_minute<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    within(60, f)
}

/// The result of `f`. Panics after this many seconds.
#[track_caller]
pub fn within<T: Send + 'static>(seconds: u64, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(f()));
    receiver
        .recv_timeout(std::time::Duration::from_secs(seconds))
        .unwrap_or_else(|error| panic!("no end within {seconds} s: {error}"))
}

/// The addresses that this process listens on.
#[cfg(target_os = "linux")]
pub fn listening() -> Vec<std::net::SocketAddr> {
    use std::fs;

    let sockets: Vec<_> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let lines = table.lines().skip(1).map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.into_iter().map(str::to_string).collect::<Vec<_>>()
    });
    // State 0A: listening.
    let listening = lines
        .filter(|fields| fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9])));
    let addresses = listening.map(|fields| {
        let (address, port) = fields[1].split_once(':').unwrap();
        // The kernel writes the bytes of an address as a number in native byte order.
        let address = u32::from_str_radix(address, 16).unwrap().to_ne_bytes();
        (address, u16::from_str_radix(port, 16).unwrap()).into()
    });
    addresses.collect()
}
