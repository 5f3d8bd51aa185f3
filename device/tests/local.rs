//! Devices of the same process.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
use std::net::Ipv4Addr;
use std::thread;
#[cfg(feature = "burn-0-22")]
use std::time::Duration;

use burn::module::Param;
use burn::nn::{Initializer, Linear};
use burn::optim::{AdamConfig, Optimizer};
#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::{Device, Tensor, activation};
#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
use burn_amp_device::connect;
use burn_amp_device::{AmpReport, AmpServer, Error, Precision, flex, mixed_precision};

#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
use client::listening;
use client::{HALVES, assert_computed_in, product, read, roundoff, tensor};

#[test]
fn the_same_precision_is_the_same_device_and_another_is_another() {
    let [f16, bf16] = HALVES.map(|precision| flex(precision).unwrap());
    assert_eq!(flex(Precision::F16).unwrap(), f16);
    assert_eq!(
        mixed_precision(Device::flex(), Precision::F16).unwrap(),
        f16
    );
    assert_ne!(f16, bf16);
    assert_ne!(f16, Device::flex());
    // Flex accelerates no half precision.
    let auto = flex(Precision::Auto).unwrap();
    assert_eq!(auto, flex(Precision::F32).unwrap());
    assert_ne!(auto, f16);
}

/// As for an operation that a program has for the plain device alone.
#[test]
fn a_part_of_a_model_computes_on_the_plain_device() {
    let plain = Device::flex().autodiff();
    for precision in HALVES {
        let device = flex(precision).unwrap().autodiff();
        let x = Tensor::<2>::ones([2, 2], &device).require_grad();
        let there = (x.clone() * 2.0).to_device(&plain);
        assert_eq!(there.device(), plain);
        let back = (there.clone() * there).to_device(&device);
        let grads = (back * 3.0).sum().backward();
        let grad = x.grad(&grads).unwrap();
        assert_eq!(read(grad), [24.0; 4]);
    }
}

#[test]
fn threads_that_ask_at_once_get_the_same_device() {
    let threads: Vec<_> = (0..4)
        .map(|_| thread::spawn(|| flex(Precision::Bf16).unwrap()))
        .collect();
    for device in threads {
        assert_eq!(device.join().unwrap(), flex(Precision::Bf16).unwrap());
    }
}

/// On Burn 0.22 the device computes on a thread of its own.
#[cfg(feature = "burn-0-22")]
#[test]
fn asking_for_a_device_again_does_not_wait_for_its_work() {
    let device = flex(Precision::F32).unwrap();
    let ones = Tensor::<2>::ones([512, 512], &device);
    let busy = (0..20).fold(ones.clone(), |x, _| x.matmul(ones.clone()) * 0.001);
    // The read sends what waits in the client.
    let reading = thread::spawn(move || busy.try_into_data());
    thread::sleep(Duration::from_millis(100));
    let mut asked = 0;
    while !reading.is_finished() && asked < 1000 {
        assert_eq!(flex(Precision::F32).unwrap(), device);
        asked += 1;
    }
    // One that waits asks once.
    assert_eq!(asked, 1000);
    reading.join().unwrap().unwrap();
}

/// On Burn 0.22 a device has some 20 sockets.
#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
mod descriptors {
    use super::*;

    use client::process::own_test;

    #[test]
    #[ignore = "a process with few descriptors, which the other test starts"]
    fn with_few_descriptors() {
        match flex(Precision::Bf16) {
            Ok(_) => println!("made"),
            Err(error) => {
                println!("{error:?}: {error}");
                // There may be more later.
                println!("again: {:?}", flex(Precision::Bf16).is_err());
            }
        }
    }

    #[test]
    fn too_few_descriptors_are_an_error_that_says_so() {
        let test = own_test("descriptors::with_few_descriptors");
        let mut errors = 0;
        for limit in (12..48).step_by(4) {
            let output = std::process::Command::new("sh")
                .args(["-c", "ulimit -n \"$1\"; shift; exec \"$0\" \"$@\""])
                .arg(test.get_program())
                .arg(limit.to_string())
                .args(test.get_args())
                .output()
                .unwrap();
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            let refused = said.contains("Listen(") && said.contains("descriptors");
            assert!(
                said.contains("made") || refused && said.contains("again: true"),
                "{limit}: {said}"
            );
            errors += usize::from(refused);
        }
        assert!(errors > 2, "{errors}");
    }
}

#[test]
fn autodiff_stays_with_the_device_that_has_it() {
    let plain = mixed_precision(Device::flex(), Precision::Bf16).unwrap();
    assert!(!plain.is_autodiff());
    let autodiff = mixed_precision(Device::flex().autodiff(), Precision::Bf16).unwrap();
    assert!(autodiff.is_autodiff());
    assert_eq!(autodiff.without_autodiff(), plain);
}

#[test]
fn each_device_computes_in_its_precision_beside_the_others_and_shows_fp32() {
    let exact = product(&Device::flex());
    let threads: Vec<_> = (0..4)
        .map(|i| {
            let precision = HALVES[i % 2];
            let device = flex(precision).unwrap();
            thread::spawn(move || {
                for _ in 0..20 {
                    assert_computed_in(precision, &product(&device));
                }
            })
        })
        .collect();
    let fp32 = flex(Precision::F32).unwrap();
    for _ in 0..20 {
        assert_eq!(product(&fp32), exact);
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn the_report_of_a_device_tells_its_precision_and_its_casts() {
    let device = flex(Precision::F16).unwrap();
    product(&device);
    for device in [device.clone(), device.autodiff()] {
        let report = AmpReport::of_device(&device).unwrap();
        assert_eq!(report.device, "flex on Cpu");
        assert_eq!(report.precision, Precision::F16);
        assert_eq!(report.reason, "asked for");
        assert!(report.all_casts().to_half.count > 0);
    }
    let auto = AmpReport::of_device(&flex(Precision::Auto).unwrap()).unwrap();
    assert_eq!(auto.precision, Precision::F32);
    assert!(AmpReport::of_device(&Device::flex()).is_none());
}

#[test]
fn a_server_of_the_same_device_keeps_its_own_precision() {
    // A server of this process in bf16, beside the device in f16.
    let f16 = flex(Precision::F16).unwrap();
    let allow = |_: burn::server::AuthorizationRequest<'_>| Ok(());
    let server = AmpServer::new([Device::flex()], Precision::Bf16, allow).unwrap();
    assert_eq!(server.precision(), Precision::Bf16);
    assert_computed_in(Precision::F16, &product(&f16));
}

#[test]
fn gradients_are_those_of_fp32_up_to_rounding() {
    let gradient = |device: &Device| {
        let w = tensor([16, 8], 1, device).require_grad();
        let y = tensor([4, 16], 2, device).matmul(w.clone()).tanh();
        let grads = y.powi_scalar(2).mean().backward();
        read(w.grad(&grads).unwrap())
    };
    let exact = gradient(&Device::flex().autodiff());
    let norm = exact.iter().map(|e| e * e).sum::<f32>().sqrt();
    for precision in HALVES {
        let half = gradient(&flex(precision).unwrap().autodiff());
        let error = half.iter().zip(&exact).map(|(h, e)| (h - e) * (h - e));
        let error = error.sum::<f32>().sqrt() / norm;
        let roundoff = roundoff(precision);
        assert!(
            error > roundoff / 16.0 && error < 8.0 * roundoff,
            "{precision}: {error}"
        );
    }
}

#[test]
fn a_tensor_moves_between_devices() {
    let plain = tensor([4, 4], 1, &Device::flex());
    let moved: Tensor<2> = plain.clone().to_device(&flex(Precision::F16).unwrap());
    let moved = moved.to_device(&flex(Precision::Bf16).unwrap());
    assert_eq!(read(moved.to_device(&Device::flex())), read(plain));
}

/// The README's statement: made on the plain device, an orthogonal weight is exact.
#[test]
fn an_orthogonal_weight_is_made_on_the_plain_device() {
    let weight = |device: &Device| {
        let weight = Initializer::Orthogonal { gain: 1.0 };
        weight.init::<2, _>([32, 32], device).val()
    };
    let error = |weight: Tensor<2>| {
        let weight = weight.to_device(&Device::flex());
        let product = read(weight.clone().matmul(weight.transpose()));
        let square = product.chunks(32).enumerate().flat_map(|(row, values)| {
            values
                .iter()
                .enumerate()
                .map(move |(column, value)| (value - f32::from(row == column)).abs())
        });
        square.fold(0.0, f32::max)
    };
    for precision in HALVES {
        let half = flex(precision).unwrap();
        let made_there = error(weight(&half));
        assert!(made_there > 1e-4, "{precision}: {made_there}");
        let moved = error(weight(&Device::flex()).to_device(&half));
        assert!(moved < 1e-5, "{precision}: {moved}");
    }
}

#[test]
fn a_device_that_cannot_be_served_is_an_error() {
    let remote = flex(Precision::Bf16).unwrap();
    let error = mixed_precision(remote, Precision::Bf16).unwrap_err();
    assert!(matches!(error, Error::UnsupportedDevice { .. }), "{error}");
    let error = AmpServer::new([], Precision::Bf16, burn::server::AllowAll).unwrap_err();
    let no_devices = matches!(error, Error::Serve(burn::server::ServeError::NoDevices));
    assert!(no_devices, "{error}");
}

#[cfg(all(target_os = "linux", feature = "burn-0-22"))]
#[test]
fn it_listens_on_loopback_alone_and_lets_nobody_in_without_the_token() {
    for precision in HALVES {
        flex(precision).unwrap();
    }
    let addresses = listening();
    assert!(addresses.len() >= 2, "{addresses:?}");
    let mut unauthorized = 0;
    for address in addresses {
        assert_eq!(address.ip(), Ipv4Addr::LOCALHOST);
        let host = RemoteHost::websocket(&format!("ws://{address}"));
        for host in [host.clone(), host.with_credential([0; 32].as_slice())] {
            // Burn's own servers accept no more connections.
            match connect(&host, Duration::from_secs(2)) {
                Err(Error::Connect(ConnectError::Unauthorized)) => unauthorized += 1,
                Err(Error::NoAnswer { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(unauthorized >= 4, "{unauthorized}");
}

/// Autodiff and accumulators of gradients add up the gradients of a tensor in the tensor's dtype.
#[test]
fn a_weight_that_is_used_a_thousand_times_has_the_gradient_of_fp32() {
    let gradient = |device: &Device| {
        let w = Tensor::<2>::ones([2, 2], device).require_grad();
        let x = Tensor::<2>::ones([1, 2], device);
        let uses = (0..1000).map(|_| x.clone().matmul(w.clone()).sum());
        let grads = uses.reduce(|all, one| all + one).unwrap().backward();
        read(w.grad(&grads).unwrap())
    };
    for precision in HALVES {
        let device = flex(precision).unwrap().autodiff();
        assert_eq!(gradient(&device), [1000.0; 4], "{precision}");
    }
}

/// Whether a tensor is FP32 on its device, and not bf16: a third of it is not rounded to bf16.
fn is_fp32<const D: usize>(tensor: Tensor<D>) -> bool {
    let thirds = read(tensor / 3.0);
    thirds.iter().any(|third| third.to_bits() & 0xffff != 0)
}

/// Whether a gradient, and both of Adam's moments after so many steps, are FP32.
fn are_fp32<const D: usize>(grad: Tensor<D>, steps: usize) -> [bool; 3] {
    let (adam, mut state) = (AdamConfig::new().build(), None);
    for _ in 0..steps {
        (_, state) = adam.step(1e-3, grad.zeros_like(), grad.clone(), state);
    }
    let moments = state.unwrap().momentum;
    [grad, moments.moment_1, moments.moment_2].map(is_fp32)
}

#[test]
fn the_gradients_of_linear_layers_are_fp32_at_each_batch_size() {
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let layer = |seed| Linear {
        weight: Param::from_tensor(tensor([16, 16], seed, &device)),
        bias: Some(Param::from_tensor(tensor([16], seed + 1, &device))),
    };
    fn check<const D: usize>(x: Tensor<D>, layers: [Linear; 3]) {
        let shape = x.dims();
        let hidden = layers
            .iter()
            .fold(x, |x, layer| activation::relu(layer.forward(x)));
        let grads = (hidden / 7.0).sum().backward();
        for (i, layer) in layers.iter().enumerate() {
            let weight = layer.weight.val().grad(&grads).unwrap();
            assert_eq!(are_fp32(weight, 2), [true; 3], "weight {i}, {shape:?}");
            let bias = layer.bias.as_ref().unwrap().val().grad(&grads).unwrap();
            assert_eq!(are_fp32(bias, 2), [true; 3], "bias {i}, {shape:?}");
        }
    }
    let layers = || [1, 3, 5].map(layer);
    for batch in [1, 2] {
        check(tensor([batch, 16], 7, &device), layers());
        check(tensor([batch, 5, 16], 7, &device), layers());
        check(tensor([batch, 1, 5, 16], 7, &device), layers());
    }
}

/// A device cannot distinguish a stack of matrices from a batch of activations: its gradient is bf16.
#[test]
fn the_moments_of_a_stack_of_matrices_become_fp32() {
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let experts = tensor([3, 16, 16], 1, &device).require_grad();
    let x = tensor([3, 5, 16], 2, &device);
    let grads = (x.matmul(experts.clone()) / 7.0).sum().backward();
    let grad = experts.grad(&grads).unwrap();
    assert_eq!(are_fp32(grad, 20)[1..], [true; 2]);
}

/// Each device fetches from each other device over its own connection: no tensor waits for a tensor that a
/// device has yet to compute from it.
#[cfg(feature = "burn-0-22")]
#[test]
fn three_devices_that_exchange_tensors_do_not_wait_for_each_other() {
    let [a, b, c] = [Precision::Bf16, Precision::F16, Precision::F32].map(|p| flex(p).unwrap());
    let moved = client::within(30, move || {
        let ones = |device: &Device| Tensor::<2>::ones([4, 4], device);
        let (x, u) = (ones(&a), ones(&a));
        // Occupies `b`, so that it asks for `x` after `c` has asked for the last tensor.
        let mut busy = Tensor::<2>::ones([256, 256], &b);
        for _ in 0..8 {
            busy = busy.clone().matmul(busy) / 256.0;
        }
        let x = x.to_device(&b);
        let y = (x * 2.0).to_device(&a);
        let last = (u + y).to_device(&c);
        let read = read(last);
        client::read(busy);
        read
    });
    assert_eq!(moved, [3.0; 16]);
}
