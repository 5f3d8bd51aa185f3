//! Operations that a device is not exact in are found, and compute in FP32.

mod common;

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::module::{conv_transpose2d, conv2d};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn_amp::policy::{OpPrecision, Reason};
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpReport, GradScaler, LossScaleConfig, Precision, exceptions,
    precision_of, with_precision,
};
use burn_backend::{DType, DTypeUsage, DTypeUsageSet, Shape};

use shared::checked::{self, Checked, CheckedDevice, Wrong};

type B = AmpAutodiff<Flex>;

/// The terms of a sum that f16 stops counting at 2,048.
const N: usize = 4096;

/// Flex has one device, whose configuration is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn configure(precision: Precision, tried: bool) {
    let config = AmpConfig::new()
        .with_precision(precision)
        .with_trials(tried);
    let config = match precision.scales_loss() {
        true => config.with_loss_scale(LossScaleConfig::Fixed(1.0)),
        false => config,
    };
    config.apply::<B>(&Default::default()).unwrap();
}

fn report() -> AmpReport {
    AmpReport::of::<B>(&Default::default()).unwrap()
}

fn named(report: &AmpReport, precision: OpPrecision) -> Vec<String> {
    let tried = report.exceptions.iter();
    let tried = tried.filter(|e| e.reason == Reason::Tried && e.precision == precision);
    tried.map(ToString::to_string).collect()
}

/// What the policy runs in half, and the device in FP32.
fn fp32_here(report: &AmpReport) -> Vec<String> {
    named(report, OpPrecision::F32)
}

/// What the policy runs in FP32, and the device in half.
fn half_here(report: &AmpReport) -> Vec<String> {
    named(report, OpPrecision::Half)
}

fn ones<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    Tensor::ones(shape, &Default::default())
}

fn largest<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> f32 {
    tensor.max().into_scalar().elem()
}

/// A product of one row, which Flex adds up in f16, and the gradient of a row.
fn row() -> (DType, f32, f32) {
    let weight = ones::<Amp<Flex>, 2>([N, 8]).set_require_grad(false);
    let product = ones([1, N]).matmul(weight);
    let x = ones::<B, 2>([1, 8]).require_grad();
    let grads = x.clone().matmul(ones([8, N])).sum().backward();
    let grad = x.grad(&grads).expect("a finite gradient");
    (product.dtype(), largest(product), largest(grad))
}

#[test]
fn what_adds_up_in_half_computes_in_fp32_and_gives_half() {
    let _alone = alone();
    configure(Precision::F16, true);
    assert_eq!(row(), (DType::F16, N as f32, N as f32));
    let report = report();
    for op in ["matmul", "linear", "conv2d_weight_backward"] {
        // Operations that did not run were not tried.
        let ran = op == "matmul";
        assert_eq!(fp32_here(&report).contains(&op.into()), ran, "{report}");
    }
    assert!(
        report
            .to_string()
            .contains("\nFP32 here   matmul: computed in FP32, then rounded to f16\n")
    );
    assert_eq!(GradScaler::of::<B>(&Default::default()).skipped_steps(), 0);
}

/// Flex sums over the channels in FP32, rounds, and adds up the taps in f16.
#[test]
fn taps_that_add_up_in_half_compute_in_fp32() {
    let _alone = alone();
    configure(Precision::F16, true);
    let device = Default::default();
    // One for each tap, but 2,048 for the first.
    let mut weight = vec![1.0 / 16.0; 16 * 16 * 9];
    weight.iter_mut().step_by(9).for_each(|tap| *tap = 128.0);
    let weight = TensorData::new(weight, [16, 16, 3, 3]);
    let weight = Tensor::<Amp<Flex>, 4>::from_data(weight, &device).set_require_grad(false);
    let options = ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1);
    let out = conv_transpose2d(ones([1, 16, 8, 8]), weight, None, options);
    assert_eq!((out.dtype(), largest(out.clone())), (DType::F16, 2056.0));
    assert!(fp32_here(&report()).contains(&"conv_transpose2d".into()));
    exceptions::<B>(&device).clear();
}

/// A convolution of two groups, and the gradients of its input and of its weight. The shapes have one channel in each
/// group, as a depthwise convolution.
fn convolved(
    device: &CheckedDevice,
    channels: usize,
    groups: usize,
    stride: usize,
) -> [Tensor<Amp<Checked>, 4>; 3] {
    type B = AmpAutodiff<Checked>;
    let x = Tensor::<B, 4>::ones([1, channels, 9, 9], device).require_grad();
    let weight = Tensor::<B, 4>::ones([channels, channels / groups, 3, 3], device).require_grad();
    let options = ConvOptions::new([stride; 2], [0; 2], [1; 2], groups);
    let out = conv2d(x.clone(), weight.clone(), None, options);
    let grads = out.clone().sum().backward();
    let grad = |of: Tensor<B, 4>| of.grad(&grads).expect("finite");
    [out.inner(), grad(x), grad(weight)]
}

/// CubeCL 0.21 adds up in half where a convolution has groups, and where the gradient of its input has a stride.
/// What is wrong there does not move the other convolutions to FP32.
#[test]
fn each_kind_of_convolution_is_tried_by_itself() {
    const CONVOLUTIONS: [&str; 3] = ["conv2d", "conv2d_x_backward", "conv2d_weight_backward"];

    fn in_groups(op: &str, shapes: &[Shape]) -> bool {
        CONVOLUTIONS.contains(&op) && shapes[1][1] == 1 && shapes[1][0] > 1
    }
    /// The gradient of an input that is twice as large as the output.
    fn at_a_stride(op: &str, shapes: &[Shape]) -> bool {
        op == "conv2d_x_backward" && shapes[0][2] >= 2 * shapes[2][2]
    }
    let run = |wrong: Wrong| {
        let device = CheckedDevice::new();
        device.set_wrong(wrong);
        let config = AmpConfig::new().with_precision(Precision::Bf16);
        config.apply::<Checked>(&device).unwrap();
        // Usual, at a stride, in groups.
        for (channels, groups, stride) in [(32, 1, 1), (32, 1, 2), (32, 32, 1)] {
            let found = convolved(&device, channels, groups, stride);
            let expected = with_precision(Precision::F32, || {
                let right = CheckedDevice::new();
                convolved(&right, channels, groups, stride)
            });
            for (found, expected) in found.into_iter().zip(expected) {
                let values = |tensor: Tensor<_, 4>| -> Vec<f32> {
                    tensor.into_data().convert::<f32>().to_vec().unwrap()
                };
                for (found, expected) in values(found).into_iter().zip(values(expected)) {
                    let close = (found - expected).abs() <= expected.abs() * 2f32.powi(-8);
                    assert!(
                        close,
                        "{found} for {expected}: {channels}, {groups}, {stride}"
                    );
                }
            }
        }
        let report = AmpReport::of::<Checked>(&device).unwrap();
        let mut fp32 = fp32_here(&report);
        fp32.retain(|op| op.starts_with("conv"));
        fp32
    };
    assert!(run(|_, _, _| false).is_empty());
    let grouped = run(|op, dtype, shapes| dtype == DType::BF16 && in_groups(op, shapes));
    assert_eq!(grouped, CONVOLUTIONS.map(|op| format!("{op} in groups")));
    let strided = run(|op, dtype, shapes| dtype == DType::BF16 && at_a_stride(op, shapes));
    assert_eq!(strided, ["conv2d_x_backward with a stride"]);
}

/// Flex computes some operations that the policy widens in FP32 inside: they need no casts around them.
#[test]
fn what_is_exact_in_half_computes_without_casts() {
    let device = CheckedDevice::new();
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    config.apply::<Checked>(&device).unwrap();
    let report = || AmpReport::of::<Checked>(&device).unwrap();
    let mut counted = 0;
    let mut widened = |op: &str, run: &dyn Fn()| {
        run(); // Tries the operation.
        device.reset();
        run();
        let in_half = device.counts().ran_in(op, DType::BF16);
        let name = op.trim_start_matches("float_");
        let is_half_here = half_here(&report()).contains(&name.into());
        assert_eq!(in_half == 1, is_half_here, "{op}");
        assert_eq!(report().to_string().contains(name), is_half_here);
        assert_eq!(device.counts().ran(op), 1, "{op}");
        counted += usize::from(is_half_here);
    };
    let half = || Tensor::<Amp<Checked>, 3>::ones([1, 2, 8], &device).cast(DType::BF16);
    widened("float_sqrt", &|| drop(half().sqrt()));
    widened("avg_pool1d", &|| {
        drop(burn::tensor::module::avg_pool1d(
            half(),
            2,
            2,
            0,
            true,
            false,
        ));
    });
    assert_eq!(half_here(&report()).len(), counted);
    assert!(fp32_here(&report()).is_empty());
    let off = checked::config().with_precision(Precision::Bf16);
    off.apply::<Checked>(&device).unwrap();
    assert!(report().exceptions.is_empty());
    device.reset();
    drop(half().sqrt());
    assert_eq!(device.counts().ran_in("float_sqrt", DType::F32), 1);
}

#[test]
fn it_can_be_switched_off() {
    let _alone = alone();
    configure(Precision::F16, false);
    assert_eq!(row().1, 2048.0);
    assert!(fp32_here(&report()).is_empty());
    // And on again.
    configure(Precision::F16, true);
    assert_eq!(row(), (DType::F16, N as f32, N as f32));
    assert!(!fp32_here(&report()).is_empty());
}

#[test]
fn a_dtype_that_the_device_is_exact_in_is_left_alone() {
    let _alone = alone();
    configure(Precision::Bf16, true);
    assert_eq!(row(), (DType::BF16, N as f32, N as f32));
    assert!(fp32_here(&report()).is_empty());
    configure(Precision::F32, true);
    assert!(fp32_here(&report()).is_empty());
}

#[test]
fn a_region_tries_the_device_as_well() {
    let _alone = alone();
    AmpConfig::new().apply::<B>(&Default::default()).unwrap();
    let row = burn_amp::with_precision(Precision::F16, || {
        GradScaler::new(LossScaleConfig::Fixed(1.0))
            .unwrap()
            .scope(row)
    });
    assert_eq!(row, (DType::F16, N as f32, N as f32));
}

#[test]
fn an_operation_is_tried_when_it_first_runs_and_never_again() {
    let device = CheckedDevice::new();
    let config = AmpConfig::new().with_precision(Precision::F16);
    for _ in 0..2 {
        config.apply::<AmpAutodiff<Checked>>(&device).unwrap();
        assert_eq!(device.counts().ops().count(), 0);
    }
    let one = || Tensor::<AmpAutodiff<Checked>, 2>::ones([2, 2], &device).require_grad();
    one().matmul(one()).into_data();
    assert!(device.counts().ran("float_matmul") > 1);
    assert_eq!(device.counts().ran("conv3d"), 0);

    device.reset();
    config.apply::<AmpAutodiff<Checked>>(&device).unwrap();
    one().matmul(one()).into_data();
    let counts = device.counts();
    assert_eq!(counts.ran("float_matmul"), 1);
    assert_eq!(counts.ran_in("float_matmul", DType::F32), 1);
}

#[test]
fn a_device_that_only_contracts_in_half_is_tried_on_contractions() {
    let contractions: DTypeUsageSet = DTypeUsage::Storage | DTypeUsage::Accelerated;
    let device = CheckedDevice::with_support(DTypeUsageSet::empty(), contractions);
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    config.apply::<Checked>(&device).unwrap();
    let half = product(&device);
    assert!(device.counts().ran_in("float_matmul", DType::BF16) > 1);
    drop(half.clone().tanh());
    drop(half.sqrt());
    for op in ["float_tanh", "float_sqrt"] {
        assert_eq!(device.counts().ran_in(op, DType::BF16), 0, "{op}");
        assert_eq!(device.counts().ran(op), 1, "{op}");
    }
}

#[test]
fn a_device_that_computes_in_fp32_is_not_tried() {
    let device = CheckedDevice::new();
    AmpConfig::new().apply::<Checked>(&device).unwrap();
    product(&device).into_data();
    assert_eq!(device.counts().ran("float_matmul"), 1);
}

fn product(device: &CheckedDevice) -> Tensor<Amp<Checked>, 2> {
    let ones = || Tensor::<Amp<Checked>, 2>::ones([2, 2], device);
    ones().matmul(ones().set_require_grad(false))
}

/// Like LibTorch, for which Burn does not report what it accelerates. The layers have no precision of
/// their own while its products are timed.
#[test]
fn what_a_backend_does_not_report_is_timed_in_each_dtype_through_any_layer() {
    fn is_timed<B: Backend<Device = CheckedDevice>>(precision: Option<Precision>) {
        let device = CheckedDevice::new();
        device.set_name("libtorch");
        if let Some(precision) = precision {
            let config = checked::config().with_precision(precision);
            config.apply::<B>(&device).unwrap();
            assert_eq!(device.counts().ran("float_matmul"), 0);
        }
        let report = || AmpReport::of::<B>(&device).unwrap();
        let auto = with_precision(Precision::Auto, report);
        assert!(auto.reason.contains("matrices takes"), "{auto}");
        let counts = device.counts();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert!(counts.ran_in("float_matmul", dtype) >= 4, "{dtype:?}");
        }
        assert_eq!(counts.casts_between(DType::F32, DType::F16).count, 0);
        // Timed only once: the choice stays.
        device.reset();
        let again = with_precision(Precision::Auto, report);
        assert_eq!(
            (again.reason, device.counts().ran("float_matmul")),
            (auto.reason, 0)
        );
    }
    for precision in [None, Some(Precision::F16)] {
        is_timed::<Checked>(precision);
        is_timed::<Amp<Checked>>(precision);
        is_timed::<Autodiff<Checked>>(precision);
        is_timed::<AmpAutodiff<Checked>>(precision);
    }
}

/// A configuration that another thread makes during a trial holds.
#[test]
fn a_configuration_during_the_trial_is_kept() {
    let device = CheckedDevice::new();
    let once = std::sync::Once::new();
    device.before_each(move |op, _| {
        if op == "float_matmul" {
            once.call_once(|| {
                device.without_hook();
                let apply = move || {
                    let config = checked::config().with_precision(Precision::Bf16);
                    config.apply::<Checked>(&device).unwrap();
                };
                std::thread::spawn(apply).join().unwrap();
            });
        }
    });
    // The first operation in half on this device, by a region: the device itself is in FP32.
    assert_eq!(precision_of::<Checked>(&device), Ok(Precision::F32));
    let half = with_precision(Precision::F16, || product(&device));
    assert_eq!(half.dtype(), DType::F16);
    assert_eq!(precision_of::<Checked>(&device), Ok(Precision::Bf16));
    assert_eq!(product(&device).dtype(), DType::BF16);
}

/// If a trial panics, or its result cannot be read, the operation computes in FP32.
#[test]
fn what_cannot_be_tried_computes_in_fp32() {
    let _alone = alone();
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    let fp32_here = |device: &CheckedDevice| fp32_here(&AmpReport::of::<Checked>(device).unwrap());

    let device = CheckedDevice::new();
    device.before_each(|op, dtype| {
        assert!(
            op != "float_matmul" || dtype == DType::F32,
            "no such kernel"
        );
    });
    config.apply::<Checked>(&device).unwrap();
    assert_eq!(product(&device).dtype(), DType::BF16);
    assert_eq!(fp32_here(&device), ["matmul"]);
    device.without_hook();

    // Nothing can be read, as on WebAssembly: inference goes on.
    let device = CheckedDevice::new();
    device.set_unreadable(true);
    config.apply::<Checked>(&device).unwrap();
    let half = product(&device);
    assert_eq!(half.dtype(), DType::BF16);
    assert_eq!(fp32_here(&device), ["matmul"]);
    device.set_unreadable(false);
    assert_eq!(half.into_data().to_vec::<f32>().unwrap(), [2.0; 4]);
    device.reset();
    product(&device);
    assert_eq!(device.counts().ran_in("float_matmul", DType::F32), 1);
}

/// As `cargo xtask bench trials` asks.
#[test]
fn each_operation_of_this_version_of_burn_has_a_trial_and_those_of_later_ones_have_none() {
    use burn_amp::is_exact;
    use burn_amp_core::policy::trials::TriedOp;

    type Amped = AmpAutodiff<Checked>;

    let device = CheckedDevice::new();
    let config = AmpConfig::new().with_precision(Precision::F16);
    config.apply::<Amped>(&device).unwrap();
    let exact = |name: &str| is_exact::<Amped>(&device, TriedOp::named(name).unwrap());
    assert!(exact("avg_pool2d").is_some());
    assert_eq!(exact("avg_pool3d"), None);
    let known = TriedOp::all().filter(|op| is_exact::<Amped>(&device, *op).is_some());
    assert!(known.count() > 50);
}

/// A file spares the next process the trials, in bf16 as well.
#[test]
fn a_file_of_exceptions_spares_the_trials() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("exceptions.json");
    for precision in [Precision::F16, Precision::Bf16] {
        let config = AmpConfig::new().with_precision(precision);
        let [first, second] = [(); 2].map(|()| CheckedDevice::new());
        let ran = |device: &CheckedDevice| {
            config.apply::<Checked>(device).unwrap();
            product(device).into_data();
            device.counts().ran("float_matmul")
        };
        exceptions::<Checked>(&first).keep_in(&path).unwrap();
        assert!(ran(&first) > 1);
        let kept = fs::read_to_string(&path).unwrap();
        assert!(
            kept.contains(&format!("\"half\": \"{precision}\"")),
            "{kept}"
        );
        // As the same device in another process, which the name tells.
        let name =
            |device: &CheckedDevice| format!("{} on {device:?}", Checked::<Flex>::name(device));
        let kept = kept.replacen(&name(&first), &name(&second), 1);
        fs::write(&path, kept).unwrap();
        exceptions::<Checked>(&second).keep_in(&path).unwrap();
        assert_eq!(ran(&second), 1);
        let [one, other] = [first, second].map(|device| exceptions::<Checked>(&device).list());
        assert_eq!(one, other);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn frozen_exceptions_leave_the_others_to_the_policy() {
    let device = CheckedDevice::new();
    let config = AmpConfig::new().with_precision(Precision::F16);
    config.apply::<Checked>(&device).unwrap();
    let exceptions = exceptions::<Amp<Checked>>(&device);
    exceptions.freeze(true);
    assert_eq!(product(&device).dtype(), DType::F16);
    assert_eq!(device.counts().ran("float_matmul"), 1);
    exceptions.freeze(false);
    product(&device);
    assert!(device.counts().ran("float_matmul") > 2);
    device.reset();
    exceptions.clear();
    assert_eq!(exceptions.list(), []);
    product(&device);
    assert!(device.counts().ran("float_matmul") > 1);
}
