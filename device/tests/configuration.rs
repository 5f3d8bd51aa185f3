//! The precision of a device: the result of `configure`, and the report.

include!("../src/burn.rs");

mod common;

use burn_amp_device::policy::{Class, OpPrecision};
use burn_amp_device::{AmpReport, Precision, configure, policy};
use burn_backend::ops::{ConvOptions, FloatTensorOps, ModuleOps};
use burn_backend::{Backend, DType, FloatDType};
use burn_dispatch::{backends::Flex, devices::FlexDevice};
use common::{A, on};

#[test]
fn configure_returns_the_precision_in_force() {
    let _alone = on(Precision::F16);
    for precision in [Precision::F16, Precision::Bf16, Precision::F32] {
        assert_eq!(configure::<Flex>(&FlexDevice, precision), Ok(precision));
        assert_eq!(AmpReport::of::<Flex>(&FlexDevice).precision, precision);
    }
    // Flex computes in the half dtypes, and accelerates none of them.
    assert_eq!(
        configure::<Flex>(&FlexDevice, Precision::Auto),
        Ok(Precision::F32)
    );
    let report = AmpReport::of::<Flex>(&FlexDevice);
    assert_eq!(report.reason, "the device accelerates neither f16 nor bf16");
}

#[test]
fn the_report_names_what_the_trials_found() {
    let _alone = on(Precision::F16);
    let ones = |shape: [usize; 4]| A::float_ones(shape.into(), &FlexDevice, FloatDType::F16);
    let options = ConvOptions::new([1; 2], [0; 2], [1; 2], 1);
    A::conv2d(ones([1, 1, 2, 2]), ones([1, 1, 1, 1]), None, options);
    A::float_sqrt(ones([1; 4]));
    let report = AmpReport::of::<Flex>(&FlexDevice);
    assert_eq!(report.device, "flex on Cpu");
    assert_eq!(report.reason, "asked for");
    // The kind of a convolution stands behind its name.
    let names: Vec<_> = report.exceptions.iter().map(ToString::to_string).collect();
    for exception in &report.exceptions {
        let is_half = exception.precision == OpPrecision::Half;
        let mut rows = policy::rows("0.23");
        let row = rows.find(|row| row.op.trim_start_matches("float_") == exception.op);
        assert_eq!(
            row.unwrap().may_be(Class::Fp32Inside),
            is_half,
            "{exception}"
        );
    }
    // Flex adds up in half in a convolution of few channels.
    assert!(
        names.contains(&"conv2d of few channels".into()),
        "{names:?}"
    );
    let text = report.to_string();
    assert!(text.contains("precision   f16: asked for\n"), "{text}");
}

#[test]
fn the_backend_is_named_and_its_device_answers() {
    assert_eq!(A::name(&FlexDevice), "amp<flex>");
    assert!(A::supports_dtype(&FlexDevice, DType::BF16));
    assert_eq!(
        A::dtype_usage(&FlexDevice, DType::F16),
        Flex::dtype_usage(&FlexDevice, DType::F16)
    );
    assert!(!A::ad_enabled(&FlexDevice));
}
