//! Regions: their precision applies, whatever the device's configuration.

use burn::backend::Autodiff;
use burn::nn::LinearConfig;
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{DType, Tensor};
use burn_amp::{Amp, GradScaler, LossScaleConfig, Precision, full_precision, with_precision};
use burn_amp_core::policy::{Class, class};

use crate::common::{HALVES, activation};
use crate::device_in;
use crate::mixed::{flat, operations};
use crate::steps::{KINDS, Keeping, input, param, step};
use crate::training::assert_like;
use shared::checked::{Checked, CheckedDevice, Counts};

/// Asserts that nothing was computed in half: half tensors may only be moved, and cast to FP32.
#[track_caller]
fn assert_nothing_half(what: &str, counts: &Counts) {
    for (op, dtype, _) in counts.in_half() {
        assert!(class(op) == Class::Move, "{what}: {op} ran in {dtype:?}");
    }
    assert_eq!(counts.casts_between(DType::F32, DType::F16).count, 0);
    assert_eq!(counts.casts_between(DType::F32, DType::BF16).count, 0);
}

/// Values as a layer gives them: half by the policy.
fn activations(device: &CheckedDevice, seed: u64) -> Tensor<Amp<Checked>, 2> {
    let eye = Tensor::eye(4, device);
    let x = (input::<Amp<Checked>, 2>([4, 4], seed, device) * 0.5 + 0.75).matmul(eye);
    assert!(matches!(x.dtype(), DType::F16 | DType::BF16));
    x
}

#[test]
fn nothing_is_half_in_full_precision() {
    for precision in HALVES {
        let device = device_in(precision);
        let plain = operations::<Checked>();
        for ((name, _, op), (_, _, plain)) in operations().into_iter().zip(plain) {
            let half = [1, 2].map(|seed| activations(&device, seed));
            let wide = half.clone().map(|x| full_precision(|| x.cast(DType::F32)));
            for (what, a, b) in [
                ("two half operands", &half[0], &half[1]),
                ("half and FP32", &half[0], &wide[1]),
                ("FP32 and half", &wide[0], &half[1]),
            ] {
                let what = format!("{name} of {what} in {precision}");
                device.reset();
                let out = full_precision(|| op(a.clone(), b.clone()));
                assert_nothing_half(&what, &device.counts());
                // The result is the backend's own on FP32 operands of the same values, bit for bit.
                let [a, b] = [a, b].map(|x| Tensor::from_data(x.to_data(), (&device, DType::F32)));
                assert_eq!(flat(out), flat(plain(a, b)), "{what}");
            }
        }
    }
}

#[test]
fn a_step_in_full_precision_is_plain_burn() {
    for kind in KINDS {
        let plain = (kind.plain)(&CheckedDevice::new());
        for precision in HALVES {
            for steps in [kind.keeping, kind.recomputing] {
                let device = device_in(precision);
                let step = full_precision(|| steps(&device));
                assert_nothing_half(kind.name, &step.counts);
                assert_eq!(step.grads, plain.grads, "{} in {precision}", kind.name);
                assert_eq!(step.counts.reads.total(), 0, "{}", kind.name);
            }
        }
    }
}

#[test]
fn what_ran_in_full_precision_has_its_backward_pass_there() {
    fn run<B>(device: &CheckedDevice) -> crate::steps::Step
    where
        B: burn::tensor::backend::AutodiffBackend<Device = CheckedDevice>,
    {
        let model = (
            param([4, 8], 1, device),
            LinearConfig::new(8, 8).init(device),
            LinearConfig::new(8, 8).init(device),
        );
        step::<B, _>(device, model, |(x, first, second)| {
            let hidden = first.forward(x.val());
            let inside = full_precision(|| softmax(second.forward(hidden), 1));
            (inside * input([4, 8], 2, device)).sum()
        })
    }
    let plain = run::<Autodiff<Checked>>(&CheckedDevice::new());
    for precision in HALVES {
        let half = precision.compute_dtype().expect("a half precision");
        let step = run::<Keeping>(&device_in(precision));
        assert_like("a region inside", precision, &step, &plain);
        for op in ["linear", "linear_x_backward", "linear_weight_backward"] {
            assert_eq!(step.counts.ran_in(op, half), 1, "{op}");
            assert_eq!(step.counts.ran_in(op, DType::F32), 1, "{op}");
        }
    }
}

#[test]
fn the_innermost_region_holds() {
    let device = device_in(Precision::F16);
    let layer = LinearConfig::new(4, 4).init::<Amp<Checked>>(&device);
    let x = input::<Amp<Checked>, 2>([2, 4], 1, &device);
    let dtype = || {
        device.reset();
        layer.forward(x.clone());
        let counts = device.counts();
        let dtypes: Vec<_> = counts.ops().filter(|(op, ..)| *op == "linear").collect();
        assert_eq!(dtypes.len(), 1);
        dtypes[0].1
    };
    with_precision(Precision::Bf16, || {
        assert_eq!(dtype(), DType::BF16);
        full_precision(|| assert_eq!(dtype(), DType::F32));
        with_precision(Precision::F16, || assert_eq!(dtype(), DType::F16));
        // This device accelerates nothing.
        with_precision(Precision::Auto, || assert_eq!(dtype(), DType::F32));
        assert_eq!(dtype(), DType::BF16);
    });
    assert_eq!(dtype(), DType::F16);
}

#[test]
fn a_wider_operand_is_not_narrowed_in_full_precision() {
    for precision in HALVES {
        let device = device_in(precision);
        let third = (input::<Amp<Checked>, 2>([4, 4], 1, &device) / 3.0).cast(DType::F64);
        let nothing = activations(&device, 2) * 0.0;
        let sum = full_precision(|| nothing + third.clone());
        assert_eq!(sum.dtype(), DType::F64);
        let [sum, third] = [sum, third].map(|t| t.into_data().to_vec::<f64>().unwrap());
        assert_eq!(sum, third);
    }
}

/// An FP32 tensor that fits in bf16, but not in f16, stays FP32 in a region in f16.
#[test]
fn what_one_half_holds_is_not_brought_to_the_other() {
    type B = burn_amp::AmpAutodiff<Checked>;
    let device = CheckedDevice::new();
    let ones = || Tensor::<B, 2>::ones([1, 1], &device);
    // 1e6 to the rounding of bf16, by a contraction.
    let large = || activation(ones() * 1e6);
    let bf16 = |f: &dyn Fn() -> Tensor<B, 2>| with_precision(Precision::Bf16, f);
    let f16 = |f: &dyn Fn() -> Tensor<B, 2>| with_precision(Precision::F16, f);
    let value = |x: Tensor<B, 2>| x.into_scalar();
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1.0)).unwrap();

    // A sum of it and of a small FP32 tensor that autodiff tracks, as a norm composes it.
    let sum = || {
        let x = large().expand([4, 16]);
        assert_eq!(x.dtype(), DType::BF16);
        x + ones().require_grad()
    };
    let wide = bf16(&sum);
    assert_eq!(wide.dtype(), DType::F32);
    let out = f16(&|| relu(wide.clone()));
    assert_eq!(out.dtype(), DType::F32);
    let held = bf16(&|| relu(wide.clone()));
    assert_eq!(held.dtype(), DType::BF16);
    for out in [out, held] {
        let out = value(out.slice([0..1, 0..1]));
        assert!((out - 1e6).abs() <= 1e6 / 256.0, "{out}");
    }

    // FP32 that was cast from bf16, kept for a backward pass.
    let exact = bf16(&|| large().cast(DType::F32));
    let w = ones().require_grad();
    let grads = scaler.scope(|| f16(&|| exact.clone() * w.clone()).sum().backward());
    let grad = w.grad(&grads).expect("a finite gradient").into_scalar();
    assert!((grad - 1e6).abs() <= 1e6 / 256.0, "{grad}");
}
