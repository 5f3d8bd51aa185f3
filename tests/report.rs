//! A report states what happened, in the words that a user reads.

#[path = "common/mod.rs"]
mod common;

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_amp::policy::{Exception, OpPrecision, Reason};
use burn_amp::{
    AmpAutodiff, AmpError, AmpReport, Casts, DynamicLossScale, GradScaler, LossScaleConfig,
    Precision, full_precision, with_precision,
};
use burn_backend::DType;

use common::HALVES;
use shared::checked::{self, Checked, CheckedDevice};

type B = AmpAutodiff<Checked>;

/// A device of one's own, with a scaler that grows after two good steps. No step is watched: each operation of such a
/// step is read back.
fn device_in(precision: Precision) -> CheckedDevice {
    let device = CheckedDevice::new();
    let config = checked::config().with_precision(precision);
    let config = config.with_overflow_fallback(false);
    let config = match precision.scales_loss() {
        true => config.with_loss_scale(DynamicLossScale::new().with_growth_interval(2).into()),
        false => config,
    };
    config.apply::<B>(&device).unwrap();
    device
}

/// A backward pass of a layer's mean output, times `factor`.
fn step(layer: &Linear<B>, factor: f32) {
    let device = layer.weight.val().device();
    let x = Tensor::<B, 2>::ones([2, 4], &device);
    (layer.forward(x).mean() * factor).backward();
    GradScaler::of::<B>(&device).explain(layer);
}

fn layer(device: &CheckedDevice) -> Linear<B> {
    LinearConfig::new(4, 4).init(device)
}

/// Two good steps, an overflow, a loss that is not finite and a good step.
fn trained() -> CheckedDevice {
    let device = device_in(Precision::F16);
    let layer = layer(&device);
    for factor in [1e-3, 1e-3, 1e34, f32::NAN, 1e-3] {
        step(&layer, factor);
    }
    device
}

/// The casts that the device counted, to and from the half dtypes.
fn counted(device: &CheckedDevice, to_half: bool) -> Casts {
    let halves = [DType::F16, DType::BF16];
    let pairs = halves.iter().map(|half| match to_half {
        true => (DType::F32, *half),
        false => (*half, DType::F32),
    });
    let mut sum = Casts::default();
    for (from, to) in pairs {
        let casts = device.counts().casts_between(from, to);
        sum.count += casts.count as u64;
        sum.bytes += (casts.elements * (from.size() + to.size())) as u64;
    }
    sum
}

#[test]
fn casts_and_read_backs_are_those_that_ran_on_the_device() {
    for precision in HALVES {
        let device = device_in(precision);
        let layer = layer(&device);
        device.reset();
        (0..3).for_each(|_| step(&layer, 1e-3));
        let report = AmpReport::of::<B>(&device).unwrap();
        assert!(report.casts_to_half.count > 0 && report.casts_from_half.count > 0);
        assert_eq!(report.casts_to_half, counted(&device, true));
        assert_eq!(report.casts_from_half, counted(&device, false));
        let reads = device.counts().reads;
        assert_eq!(
            report.read_backs as usize,
            reads.float + reads.int + reads.bool
        );
        let expected = if precision == Precision::F16 { 3 } else { 0 };
        assert_eq!((report.read_backs, report.steps()), (expected, expected));

        // Configuring a device starts its counts anew.
        checked::config()
            .with_precision(precision)
            .apply::<B>(&device)
            .unwrap();
        let report = AmpReport::of::<B>(&device).unwrap();
        assert_eq!(report.casts_to_half, Casts::default());
        assert_eq!(report.casts_from_half, Casts::default());
        assert_eq!((report.read_backs, report.steps()), (0, 0));
    }
}

#[test]
fn the_text_says_what_happened() {
    let report = AmpReport::of::<B>(&trained()).unwrap();
    let (to, from) = (report.casts_to_half, report.casts_from_half);
    let text = report.to_string();
    let lines: Vec<_> = text.lines().collect();
    let (device, lines) = lines.split_first().unwrap();
    assert!(device.starts_with("device      checked on CheckedDevice"));
    assert_eq!(
        lines,
        [
            "precision   f16: asked for with AmpConfig",
            "loss scale  65536: dynamic, from 65536, lowest 65536, highest 131072",
            "steps       3 taken, 2 skipped: 1 overflow, 1 loss not finite",
            "            step 3 at 131072: 2 gradients not finite, first bias",
            "            step 4 at 65536: the loss is not finite, first bias",
            &format!("casts       {to} to f16 or bf16, {from} to FP32 or wider"),
            "read-backs  7",
        ]
    );
}

#[test]
fn the_text_of_many_steps_is_short() {
    let device = device_in(Precision::F16);
    let layer = layer(&device);
    (0..9).for_each(|_| step(&layer, f32::NAN));
    let text = AmpReport::of::<B>(&device).unwrap().to_string();
    assert_eq!(
        text.lines().filter(|line| line.contains("step ")).count(),
        5
    );
    assert!(text.contains("0 taken, 9 skipped: 9 losses not finite\n"));
    assert!(text.contains("the last 9 steps were skipped"));
}

#[test]
fn the_precision_in_force_is_told_with_its_reason() {
    let device = device_in(Precision::Bf16);
    let told = || AmpReport::of::<B>(&device).unwrap().to_string();
    assert!(told().contains("\nprecision   bf16: asked for with AmpConfig\n"));
    assert!(told().contains("\nloss scale  none: bf16 needs none\n"));
    let region = full_precision(told);
    assert!(region.contains("\nprecision   f32: asked for in a region\n"));
    assert!(region.contains("\nloss scale  none: f32 needs none\n"));
    let auto = "f32: the device accelerates neither f16 nor bf16";
    assert!(with_precision(Precision::Auto, told).contains(auto));

    let unasked = CheckedDevice::new();
    let report = AmpReport::of::<B>(&unasked).unwrap();
    assert_eq!(format!("{}: {}", report.precision, report.reason), auto);

    for (config, said) in [
        (LossScaleConfig::Fixed(8.0), "loss scale  8: fixed\n"),
        (LossScaleConfig::Disabled, "loss scale  1: disabled\n"),
    ] {
        let config = checked::config()
            .with_precision(Precision::F16)
            .with_loss_scale(config);
        config.apply::<B>(&device).unwrap();
        assert!(told().contains(said));
    }
}

#[test]
fn operations_that_the_configuration_changes_are_named_where_half_is_in_force() {
    let device = CheckedDevice::new();
    let config = checked::config().with_precision(Precision::Bf16);
    let changed = config.with_op("softmax", OpPrecision::Half).unwrap();
    let changed = changed.with_op("float_matmul", OpPrecision::F32).unwrap();
    // No change.
    let changed = changed.with_op("conv2d", OpPrecision::Half).unwrap();
    changed.apply::<B>(&device).unwrap();
    let report = AmpReport::of::<B>(&device).unwrap();
    let operations = [("matmul", OpPrecision::F32), ("softmax", OpPrecision::Half)];
    let of = |e: &Exception| (e.op.clone(), e.precision, e.reason, e.half);
    let expected = operations.map(|(op, of)| (op.to_string(), of, Reason::Configured, None));
    assert_eq!(
        report.exceptions.iter().map(of).collect::<Vec<_>>(),
        expected
    );
    let text = report.to_string();
    let line = "\noperations  matmul in f32, softmax in half: changed by AmpConfig::with_op\n";
    assert!(text.contains(line), "{text}");
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<AmpReport>(&json).unwrap(), report);

    let region = full_precision(|| AmpReport::of::<B>(&device).unwrap());
    assert!(region.exceptions.is_empty());
    config.apply::<B>(&device).unwrap();
    let report = AmpReport::of::<B>(&device).unwrap();
    assert!(report.exceptions.is_empty());
    assert!(!report.to_string().contains("operations"));
}

#[test]
fn a_region_that_the_device_cannot_do_is_an_error() {
    let none = burn_backend::DTypeUsageSet::empty();
    let device = CheckedDevice::with_support(none, none);
    let report = with_precision(Precision::F16, || AmpReport::of::<B>(&device));
    assert!(matches!(report, Err(AmpError::UnsupportedPrecision { .. })));
}

#[test]
fn another_scaler_is_told_of_in_the_place_of_the_device_s() {
    let device = trained();
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    let layer = layer(&device);
    scaler.scope(|| step(&layer, 1e-3));
    scaler.set_scale(4.0).unwrap();
    let report = AmpReport::of::<B>(&device).unwrap().with_scaler(&scaler);
    assert_eq!((report.taken_steps, report.skipped_steps), (1, 0));
    assert_eq!(report.loss_scale, 4.0);
    assert_eq!(report.history.scales().collect::<Vec<_>>(), [65536.0, 4.0]);
}

#[test]
fn serde_keeps_all_of_it() {
    let report = AmpReport::of::<B>(&trained()).unwrap();
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<AmpReport>(&text).unwrap(), report);
}

#[cfg(feature = "plot")]
mod plot {
    use std::fs;

    use super::*;

    /// A folder of a test's own, gone with it.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder =
                std::env::temp_dir().join(format!("burn-amp-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn each_skipped_step_has_a_mark_and_each_reason_a_name() {
        let folder = Folder::new("marks");
        let path = folder.0.join("scale.svg");
        let report = AmpReport::of::<B>(&trained()).unwrap();
        report.save_svg(&path).unwrap();
        let svg = fs::read_to_string(&path).unwrap();
        // With those of the legend.
        assert_eq!(svg.matches("<circle").count(), 2 + 2);
        for text in [
            "overflow, skipped: 1",
            "loss not finite, skipped: 1",
            "131072",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error_and_leaves_the_file_that_was_there() {
        let folder = Folder::new("refused");
        let path = folder.0.join("scale.svg");
        fs::write(&path, "before").unwrap();
        let report = AmpReport::of::<B>(&device_in(Precision::F16)).unwrap();
        let error = report.save_svg(&path).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot draw the loss scale to {}: no step was counted yet (bf16 and FP32 \
                 need no loss scale and count no steps). An existing file there is unchanged",
                path.display()
            )
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");

        let report = AmpReport::of::<B>(&trained()).unwrap();
        let error = report.save_svg(folder.0.join("missing/scale.svg"));
        assert!(matches!(error, Err(AmpError::Plot { .. })));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }
}
