//! Devices of the same process on Burn 0.23, without a server. Tests for both Burn 0.22 and 0.23 are in
//! `local.rs`.

include!("../src/burn.rs");

mod client;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;

use burn::nn::LinearConfig;
use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_amp_device::{Amp, AmpReport, Precision, flex};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{DType, TensorData, TensorMetadata};
use burn_dispatch::{backends::Flex, devices::FlexDevice};
use client::{HALVES, assert_computed_in, product, read, roundoff, tensor};

/// A value that a product in half rounds.
const THIRD: f32 = 1.0 / 3.0;

/// A third, as each half precision rounds it.
const THIRDS: [(Precision, f32); 2] = [
    (Precision::F16, 0.333_251_95),
    (Precision::Bf16, 0.333_984_38),
];

/// A third in half: the result of a product. A product of one term is not computed in half.
fn third(device: &Device) -> Tensor<2> {
    let one = Tensor::<2>::from_floats([[1.0], [0.0]], device);
    Tensor::from_floats([[THIRD, 0.0]], device).matmul(one)
}

#[test]
fn devices_in_turn_on_one_thread_compute_each_in_its_precision() {
    let exact = product(&Device::flex());
    for _ in 0..3 {
        for precision in HALVES {
            assert_computed_in(precision, &product(&flex(precision).unwrap()));
            assert_eq!(product(&flex(Precision::F32).unwrap()), exact);
            assert_eq!(product(&Device::flex()), exact);
        }
    }
}

/// Operations that are not generated from a list: each puts the precision in force by itself.
#[test]
fn joining_padding_and_selecting_keep_half_as_half() {
    for (precision, third_in_half) in THIRDS {
        let device = flex(precision).unwrap();
        let joined = Tensor::cat(vec![third(&device), third(&device)], 0);
        let padded = joined.pad((1, 0, 0, 0), 0.5);
        let mask = Tensor::<2, Bool>::from_data([[true, false], [true, true]], &device);
        let selected = padded.mask_select(mask);
        assert_eq!(read(selected), [0.5, 0.5, third_in_half]);
        let casts = AmpReport::of_device(&device).unwrap().casts;
        for op in ["float_cat", "float_pad", "float_mask_select"] {
            assert!(!casts.contains_key(op), "{op}: {casts:?}");
        }
    }
}

#[test]
fn an_operation_that_panics_does_so_where_it_is_called_and_harms_nothing_else() {
    let device = flex(Precision::F16).unwrap();
    let before: Tensor<2> = tensor([2, 2], 1, &device);
    let values = read(before.clone());
    for _ in 0..2 {
        let beyond = Tensor::<1, Int>::from_data([7], &device);
        let input = before.clone().matmul(before.clone());
        let select = || read(input.select(0, beyond));
        assert!(catch_unwind(AssertUnwindSafe(select)).is_err());
        device.sync().unwrap();
        // The same device, with its tensors and its precision.
        assert_eq!(flex(Precision::F16).unwrap(), device);
        assert_eq!(read(before.clone()), values);
        assert_computed_in(Precision::F16, &product(&device));
        assert_computed_in(Precision::Bf16, &product(&flex(Precision::Bf16).unwrap()));
    }
    // The panic left no precision behind on this thread.
    let ones = || {
        let data = TensorData::new(vec![1f32; 4], [2, 2]);
        <Amp<Flex>>::float_from_data(data, &FlexDevice)
    };
    let own = <Amp<Flex>>::float_matmul(ones(), ones());
    assert_eq!(own.dtype(), DType::F32);
}

#[test]
fn a_tensor_goes_from_thread_to_thread() {
    let device = flex(Precision::Bf16).unwrap();
    let (sender, receiver) = channel::<Tensor<2>>();
    let consumer = thread::spawn(move || receiver.iter().map(read).collect::<Vec<_>>());
    for _ in 0..20 {
        sender.send(third(&device)).unwrap();
    }
    drop(sender);
    assert_eq!(consumer.join().unwrap(), vec![vec![0.333_984_38]; 20]);
}

#[test]
fn a_gradient_goes_back_from_one_device_to_another() {
    let [f16, bf16] = HALVES.map(|precision| flex(precision).unwrap().autodiff());
    let x = Tensor::<2>::from_floats([[2.0]], &f16).require_grad();
    let y = (x.clone() * 3.0).to_device(&bf16);
    let grads = y.powi_scalar(2).sum().backward();
    // d (3x)² / dx = 18x
    assert_eq!(read(x.grad(&grads).unwrap()), [36.0]);
}

#[cfg(target_os = "linux")]
#[test]
fn it_takes_no_port() {
    product(&flex(Precision::F16).unwrap());
    assert_eq!(client::listening(), []);
}

#[test]
fn the_report_counts_the_casts_of_the_device() {
    let device = flex(Precision::Bf16).unwrap();
    let casts = || AmpReport::of_device(&device).unwrap().all_casts().to_half;
    let before = casts().count;
    third(&device);
    // Casts both operands of the product. Tests that run at the same time may add casts.
    assert!(casts().count >= before + 2);
}

/// The losses of a few steps of SGD.
fn losses(device: &Device) -> Vec<f32> {
    let device = device.clone().autodiff();
    let (x, y) = (tensor([16, 8], 1, &device), tensor([16, 1], 2, &device));
    let mut model = LinearConfig::new(8, 1).init(&device);
    let weight = tensor([8, 1], 3, &device).require_grad();
    model.weight = burn::module::Param::from_tensor(weight);
    model.bias = None;
    let mut sgd = SgdConfig::new().init();
    let step = |_| {
        let loss = MseLoss::new().forward(model.forward(x.clone()), y.clone(), Reduction::Mean);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = sgd.step(0.1, model.clone(), grads);
        loss.into_scalar::<f32>()
    };
    (0..20).map(step).collect()
}

#[test]
fn a_model_trains_as_in_fp32() {
    let exact = losses(&Device::flex());
    assert!(exact[19] < 0.5 * exact[0], "{exact:?}");
    assert_eq!(losses(&flex(Precision::F32).unwrap()), exact);
    for precision in HALVES {
        let losses = losses(&flex(precision).unwrap());
        assert_ne!(losses, exact);
        for (loss, exact) in losses.iter().zip(&exact) {
            let error = (loss - exact).abs() / exact;
            assert!(error < 8.0 * roundoff(precision), "{precision}: {error}");
        }
    }
}

#[test]
fn a_product_with_a_quantized_weight_stays_in_its_region() {
    let scheme = burn::tensor::quantization::QuantScheme::default();
    let factors = |device: &Device| {
        let weight = Tensor::<2>::eye(32, device).quantize_dynamic(&scheme);
        (Tensor::<2>::ones([32, 32], device) * 301.0, weight)
    };
    let squares = |x: Tensor<2>, weight: Tensor<2>| {
        let x = x.matmul(weight);
        x.clone().matmul(x.transpose())
    };
    let (x, weight) = factors(&Device::flex());
    let expected = read(squares(x, weight))[0];
    assert!(expected > 1e6, "in f16 it would be infinite");
    for precision in HALVES {
        let (x, weight) = factors(&flex(precision).unwrap());
        for value in read(burn_amp_device::full_precision(x, |x| squares(x, weight))) {
            let error = (value / expected - 1.0).abs();
            assert!(error < 1e-5, "{precision}: {value} for {expected}");
        }
    }
}

#[test]
fn a_quantized_tensor_is_that_of_plain_burn() {
    let quantized = |device: &Device| {
        let scheme = burn::tensor::quantization::QuantScheme::default();
        let tensor: Tensor<2> = tensor([2, 32], 1, device);
        read(tensor.quantize_dynamic(&scheme).dequantize())
    };
    for precision in HALVES {
        assert_eq!(
            quantized(&flex(precision).unwrap()),
            quantized(&Device::flex())
        );
    }
}
