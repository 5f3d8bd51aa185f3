//! Devices: each gets only dtypes that it supports, and keeps its own configuration.

use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Distribution, Tensor};
use burn_amp::{
    Amp, AmpConfig, AmpError, DynamicLossScale, GradScaler, LossScaleConfig,
    MixedPrecisionTrainerConfig, Precision, precision_of, with_precision,
};
use burn_amp_core::policy::{Class, class};
use burn_backend::{Backend, DTypeUsage, DTypeUsageSet, TensorPrimitive};

use crate::common::{HALVES, assert_close};
use crate::mixed::{self, Gives};
use crate::steps::{KINDS, Keeping, Recomputing, input, read};
use crate::training::assert_like;
use crate::{configured, device_in};
use shared::checked::{Checked, CheckedDevice, Counts, is_contraction};

fn none() -> DTypeUsageSet {
    DTypeUsageSet::empty()
}

fn general() -> DTypeUsageSet {
    DTypeUsage::general()
}

/// Matrix units and nothing else, as for bf16 on Vulkan.
fn contractions() -> DTypeUsageSet {
    DTypeUsage::Storage | DTypeUsage::Accelerated
}

/// A device with matrix units in only one half dtype, that of `precision`.
fn contracting(precision: Precision) -> CheckedDevice {
    let device = match precision {
        Precision::F16 => CheckedDevice::with_support(contractions(), none()),
        _ => CheckedDevice::with_support(none(), contractions()),
    };
    configured(device, precision)
}

/// Asserts that only contractions and moves of data were half.
#[track_caller]
fn assert_only_contractions(what: &str, counts: &Counts) {
    let in_half = counts.in_half();
    for (op, dtype, _) in &in_half {
        let fine = is_contraction(op) || class(op) == Class::Move;
        assert!(fine, "{what}: {op} ran in {dtype:?}");
    }
    let contracted = in_half.iter().any(|(op, ..)| is_contraction(op));
    assert!(contracted, "{what}: nothing was contracted in half");
}

#[test]
fn every_kind_of_step_trains_where_half_only_contracts() {
    for kind in KINDS {
        let plain = (kind.plain)(&CheckedDevice::new());
        for precision in HALVES {
            for steps in [kind.keeping, kind.recomputing] {
                let step = steps(&contracting(precision));
                assert_like(kind.name, precision, &step, &plain);
                assert_only_contractions(kind.name, &step.counts);
            }
        }
    }
}

#[test]
fn every_kind_of_step_trains_where_the_other_half_does_not_exist() {
    for kind in KINDS {
        let plain = (kind.plain)(&CheckedDevice::new());
        for (precision, f16, bf16) in [
            (Precision::F16, general(), none()),
            (Precision::Bf16, none(), general()),
        ] {
            let device = CheckedDevice::with_support(f16, bf16);
            let step = (kind.keeping)(&configured(device, precision));
            assert_like(kind.name, precision, &step, &plain);
        }
    }
}

#[test]
fn half_operands_of_the_user_are_contracted_or_widened() {
    let device = contracting(Precision::Bf16);
    let dtypes = [
        (DType::BF16, DType::F32),
        (DType::F32, DType::BF16),
        (DType::BF16, DType::BF16),
        (DType::F64, DType::BF16),
    ];
    // No result is in a dtype without arithmetic.
    mixed::assert_values(&device, Precision::Bf16, &dtypes, |gives, a, b| {
        match gives != Gives::Bool && [a, b].contains(&DType::F64) {
            true => DType::F64,
            false => DType::F32,
        }
    });
    mixed::assert_gradients::<Keeping>(&device, Precision::Bf16, &dtypes);
    mixed::assert_gradients::<Recomputing>(&device, Precision::Bf16, &dtypes);
}

#[test]
fn half_tensors_are_made_where_half_only_contracts() {
    type B = Amp<Checked>;
    let device = contracting(Precision::Bf16);
    let options = || (&device, DType::BF16);
    for (what, made, expected) in [
        ("zeros", Tensor::<B, 1>::zeros([3], options()), 0.0),
        ("ones", Tensor::<B, 1>::ones([3], options()), 1.0),
        ("full", Tensor::<B, 1>::full([3], 2.5, options()), 2.5),
        ("data", Tensor::<B, 1>::from_data([2.5; 3], options()), 2.5),
    ] {
        assert_eq!(made.dtype(), DType::BF16, "{what}");
        assert_eq!(mixed::flat(made), [expected; 3], "{what}");
    }
    let drawn = Tensor::<B, 1>::random([3], Distribution::Default, options());
    assert_eq!(drawn.dtype(), DType::BF16);
}

#[test]
fn auto_takes_what_the_device_accelerates() {
    let accelerated = general() | DTypeUsage::Accelerated;
    for (f16, bf16, expected) in [
        (general(), general(), Precision::F32),
        (none(), none(), Precision::F32),
        (accelerated, none(), Precision::F16),
        (accelerated, general(), Precision::F16),
        (contractions(), none(), Precision::F16),
        (none(), accelerated, Precision::Bf16),
        (accelerated, accelerated, Precision::Bf16),
        (accelerated, contractions(), Precision::Bf16),
    ] {
        let what = format!("{f16:?} {bf16:?}");
        let device = CheckedDevice::with_support(f16, bf16);
        // Through any of the backends: they share the device.
        let precisions = [
            precision_of::<Checked>(&device),
            precision_of::<Amp<Checked>>(&device),
            precision_of::<Keeping>(&device),
            shared::checked::config().apply::<Keeping>(&device),
        ];
        for precision in precisions {
            assert_eq!(
                precision.expect("auto is always possible"),
                expected,
                "{what}"
            );
        }
        let output = LinearConfig::new(4, 4)
            .init::<Amp<Checked>>(&device)
            .forward(input::<_, 2>([2, 4], 1, &device));
        let dtype = expected.compute_dtype().unwrap_or(DType::F32);
        assert_eq!(device.counts().ran_in("linear", dtype), 1, "{what}");
        assert!(read(output).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn an_impossible_precision_is_an_error_that_changes_nothing() {
    let device = configured(
        CheckedDevice::with_support(general(), none()),
        Precision::F16,
    );
    let error = AmpConfig::new()
        .with_precision(Precision::Bf16)
        .apply::<Checked>(&device);
    assert!(matches!(
        error,
        Err(AmpError::UnsupportedPrecision {
            precision: Precision::Bf16,
            ..
        })
    ));
    let in_region = with_precision(Precision::Bf16, || precision_of::<Checked>(&device));
    assert!(in_region.is_err());
    assert_eq!(precision_of::<Checked>(&device).ok(), Some(Precision::F16));
}

#[test]
#[should_panic(expected = "bf16")]
fn an_impossible_region_panics_at_its_first_operation() {
    let device = CheckedDevice::with_support(general(), none());
    let x = input::<Amp<Checked>, 2>([2, 2], 1, &device);
    with_precision(Precision::Bf16, || x.clone() + x);
}

/// A step of `layer` on `device`, and the gradient of `of`'s weight.
fn grad(
    layer: &Linear<Keeping>,
    device: &CheckedDevice,
    of: &Linear<Keeping>,
) -> Tensor<Amp<Checked>, 2> {
    device.reset();
    let loss = layer.forward(input::<_, 2>([3, 4], 1, device)).mean();
    let grads = loss.backward();
    let grad = of.weight.grad(&grads).expect("a gradient of the weight");
    assert_eq!(grad.dtype(), DType::F32);
    grad
}

#[test]
fn each_device_keeps_its_own_precision() {
    let precisions = [Precision::F16, Precision::Bf16, Precision::F32];
    let devices = precisions.map(device_in);
    let home = &devices[0];
    let layer = LinearConfig::new(4, 4).init::<Keeping>(home);
    let expected = read(grad(&layer, home, &layer));
    for (device, precision) in devices.iter().zip(precisions) {
        let what = format!("{precision} from f16");
        assert_eq!(precision_of::<Keeping>(device).ok(), Some(precision));
        let dtype = precision.compute_dtype().unwrap_or(DType::F32);
        let ran = |op| {
            let counts = device.counts();
            assert_eq!(counts.ran(op), 1, "{what}: {op}");
            assert_eq!(counts.ran_in(op, dtype), 1, "{what}: {op}");
        };

        // A fork is a leaf of its own on its device.
        let fork = layer.clone().fork(device);
        let forked = grad(&fork, device, &fork);
        assert_eq!(forked.device(), *device, "{what}");
        ran("linear");
        ran("linear_weight_backward");
        let reads = usize::from(precision == Precision::F16);
        assert_eq!(device.counts().reads.float, reads, "{what}");

        // A moved layer computes on its new device, and its gradient returns to the first device.
        let moved = grad(&layer.clone().to_device(device), device, &layer);
        assert_eq!(moved.device(), *home, "{what}");
        ran("linear");
        ran("linear_weight_backward");
        assert_close(&what, Precision::Bf16, &read(forked), &expected, 8.0);
        assert_close(&what, Precision::Bf16, &read(moved), &expected, 8.0);

        // Inference follows the device as well.
        let valid = layer.valid().to_device(device);
        device.reset();
        valid.forward(input::<_, 2>([3, 4], 1, device));
        ran("linear");
    }
}

/// Two steps on each device in turn, then the weight. `after` gets the device of the steps.
fn trained_on(devices: &[CheckedDevice], mut after: impl FnMut(&CheckedDevice)) -> Vec<f32> {
    let mut model = LinearConfig::new(4, 4).init::<Keeping>(&devices[0]);
    let filled = input::<Keeping, 2>([4, 4], 3, &devices[0]).require_grad();
    model.weight = Param::initialized(model.weight.id, filled);
    let mut optimizer = AdamConfig::new().init();
    for device in devices {
        model = model.fork(device);
        device.reset();
        for seed in 0..2 {
            let output = model.forward(input::<_, 2>([3, 4], seed, device));
            let grads = output.powi_scalar(2).mean().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-2, model, grads);
        }
        after(device);
    }
    read(model.weight.val().inner())
}

#[test]
fn a_model_that_moves_between_steps_trains_as_each_device_is_configured() {
    let [home, away] = [Precision::F16, Precision::Bf16].map(device_in);
    let dynamic = DynamicLossScale {
        init_scale: 256.0,
        growth_interval: 2,
        ..DynamicLossScale::default()
    };
    let config = shared::checked::config().with_precision(Precision::F16);
    let config = config.with_loss_scale(LossScaleConfig::Dynamic(dynamic));
    config.apply::<Checked>(&home).expect("f16");

    // Steps elsewhere are not counted, and the scale goes on from where it was.
    let mut scales = Vec::new();
    let moved = trained_on(&[home, away, home], |device| {
        let dtype = match *device == home {
            true => DType::F16,
            false => DType::BF16,
        };
        assert_eq!(device.counts().ran_in("linear", dtype), 2);
        assert_eq!(device.counts().ran("linear"), 2);
        scales.push(GradScaler::of::<Keeping>(&home).loss_scale());
    });
    assert_eq!(scales, [512.0, 512.0, 1024.0]);

    let full = device_in(Precision::F32);
    let expected = trained_on(&[full; 3], |_| {});
    assert_close("weight", Precision::Bf16, &moved, &expected, 4.0);
}

#[test]
fn a_model_may_span_devices_of_different_precision() {
    for (first, second) in [
        (Precision::F16, Precision::Bf16),
        (Precision::Bf16, Precision::F16),
        (Precision::F32, Precision::F16),
        (Precision::Bf16, Precision::F32),
    ] {
        let [near, far] = [first, second].map(device_in);
        let one = LinearConfig::new(4, 8).init::<Keeping>(&near);
        let two = LinearConfig::new(8, 2).init::<Keeping>(&far);
        let hidden = one.forward(input::<_, 2>([3, 4], 1, &near));
        let loss = two.forward(hidden.to_device(&far)).mean();
        let grads = loss.backward();
        for (what, grad, device) in [
            ("near", one.weight.grad(&grads), near),
            ("far", two.weight.grad(&grads), far),
        ] {
            let grad = grad.unwrap_or_else(|| panic!("{what}: no gradient"));
            assert_eq!(grad.device(), device);
            assert_eq!(grad.dtype(), DType::F32);
            assert!(read(grad).iter().any(|v| *v != 0.0 && v.is_finite()));
        }
        for (device, precision) in [(near, first), (far, second)] {
            let dtype = precision.compute_dtype().unwrap_or(DType::F32);
            assert_eq!(
                device.counts().ran_in("linear", dtype),
                1,
                "{first} {second}"
            );
        }
    }
}

#[test]
fn random_halves_are_the_rounded_fp32_draw() {
    for dtype in [DType::F16, DType::BF16] {
        for distribution in [
            Distribution::Default,
            Distribution::Uniform(-3.0, 2.0),
            Distribution::Normal(1.0, 2.0),
            Distribution::Bernoulli(0.3),
        ] {
            let device = CheckedDevice::new();
            let drawn = |dtype| {
                Amp::<Checked>::seed(&device, 17);
                Tensor::<Amp<Checked>, 1>::random([64], distribution, (&device, dtype))
            };
            let half = drawn(dtype);
            assert_eq!(half.dtype(), dtype);
            let rounded = drawn(DType::F32).cast(dtype);
            assert_eq!(half.into_data(), rounded.into_data(), "{distribution:?}");
            // Zeros and ones are drawn in the requested dtype: the draw is the same in every dtype.
            let in_fp32 = match distribution {
                Distribution::Bernoulli(_) => 1,
                _ => 2,
            };
            assert_eq!(device.counts().ran_in("float_random", DType::F32), in_fp32);
        }
        // The backend's own draw differs, or this would prove nothing.
        let device = CheckedDevice::new();
        let drawn = |dtype: DType| {
            <Checked>::seed(&device, 17);
            let drawn = Tensor::<Checked, 1>::random([64], Distribution::Default, (&device, dtype));
            drawn.into_data().convert_dtype(dtype)
        };
        let rounded = drawn(DType::F32).convert_dtype(dtype);
        assert_ne!(drawn(dtype), rounded);
    }
}

/// Quantization takes FP32, whatever it is given.
#[test]
fn half_tensors_are_quantized_from_fp32() {
    use burn::tensor::quantization::{QTensorPrimitive, QuantScheme};

    for precision in HALVES {
        let device = device_in(precision);
        let x = input::<Amp<Checked>, 2>([32, 32], 1, &device);
        let half = x.clone().matmul(Tensor::eye(32, &device));
        let scheme: QuantScheme =
            <Checked as burn_backend::BackendTypes>::QuantizedTensorPrimitive::default_scheme();
        device.reset();
        let quantized = half.clone().quantize_dynamic(&scheme);
        let product = half.matmul(quantized);
        let counts = device.counts();
        assert_eq!(counts.ran_in("quantize_dynamic", DType::F32), 1);
        assert_eq!(counts.ran_in("q_matmul", DType::F32), 1);
        assert!(matches!(
            product.into_primitive(),
            TensorPrimitive::Float(_) | TensorPrimitive::QFloat(_)
        ));
    }
}

#[test]
fn a_model_on_two_devices_is_clipped_by_the_norm_of_both() {
    #[derive(Module, Debug)]
    struct Spanning<B: Backend> {
        near: Linear<B>,
        far: Linear<B>,
    }
    for precision in HALVES {
        let [near, far] = [(); 2].map(|()| device_in(precision));
        let model = Spanning::<Keeping> {
            near: LinearConfig::new(4, 8).init(&near),
            far: LinearConfig::new(8, 2).init(&far),
        };
        let optimizer = SgdConfig::new().init::<Keeping, Spanning<Keeping>>();
        let mut trainer = MixedPrecisionTrainerConfig::new()
            .with_precision(precision)
            .with_grad_clipping_norm(Some(1e-3))
            .init(model, optimizer, 1.0)
            .unwrap();
        let weights = |model: &Spanning<Keeping>| {
            let parts = [&model.near, &model.far].map(|layer| {
                let bias = layer.bias.as_ref().expect("a bias").val();
                [read(layer.weight.val().inner()), read(bias.inner())].concat()
            });
            parts.concat()
        };
        let before = weights(trainer.model());
        let metrics = trainer.train_step(input::<_, 2>([3, 4], 1, &near), (), |model, x, ()| {
            let hidden = model.near.forward(x).to_device(&far);
            model.far.forward(hidden).mean()
        });
        assert!(metrics.expect("a step").stepped());
        let after = weights(trainer.model());
        let moved = before
            .iter()
            .zip(&after)
            .map(|(b, a)| f64::from(b - a).powi(2));
        let norm = moved.sum::<f64>().sqrt();
        assert!((norm - 1e-3).abs() < 1e-6, "{norm}");
    }
}
