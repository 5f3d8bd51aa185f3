//! Configuration and its errors: every one is triggered, and reads well on its own.

use std::panic::catch_unwind;

use burn::backend::{Flex, NdArray};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::prelude::*;
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpError, DynamicLossScale, GradScaler, LossScaleConfig,
    Precision, precision_of, with_precision,
};
use shared as _; // with what it instantiates

type Cpu = AmpAutodiff<NdArray>;

#[test]
fn an_unknown_precision_says_what_is_known() {
    let error = "fp8".parse::<Precision>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown precision \"fp8\": expected one of auto, f16, fp16, float16, 16-mixed, bf16, \
         bfloat16, bf16-mixed, f32, fp32, float32, 32. Use \"auto\" to let the device decide"
    );
}

#[test]
fn a_precision_that_the_device_cannot_do_is_refused_and_nothing_changes() {
    let device = Default::default();
    for precision in [Precision::F16, Precision::Bf16] {
        let error = AmpConfig::new()
            .with_precision(precision)
            .apply::<Cpu>(&device)
            .unwrap_err();
        assert!(matches!(error, AmpError::UnsupportedPrecision { .. }));
        let text = error.to_string();
        for part in [
            format!(
                "ndarray on Cpu does not support {precision}: the backend reports nothing for it"
            ),
            "Supported here: f32.".into(),
            "Flex".into(),
            "auto".into(),
        ] {
            assert!(text.contains(&part), "{part:?} is not in {text:?}");
        }
        assert_eq!(precision_of::<Cpu>(&device), Ok(Precision::F32));
    }
}

#[test]
fn an_operation_on_an_impossible_device_panics_with_the_same_text() {
    let device = Default::default();
    let expected = AmpConfig::new()
        .with_precision(Precision::F16)
        .apply::<Amp<NdArray>>(&device)
        .unwrap_err();
    let panic = catch_unwind(|| {
        with_precision(Precision::F16, || {
            let x = Tensor::<Amp<NdArray>, 2>::ones([2, 2], &Default::default());
            x.clone().matmul(x)
        })
    })
    .unwrap_err();
    assert_eq!(panic.downcast_ref::<String>(), Some(&expected.to_string()));
    with_precision(Precision::F16, || {
        assert_eq!(precision_of::<Amp<NdArray>>(&device), Err(expected));
    });
}

#[test]
fn auto_on_a_cpu_is_fp32_and_trains_as_plain_burn() {
    let device = Default::default();
    let applied = AmpConfig::new().apply::<Cpu>(&device);
    assert_eq!(applied, Ok(Precision::F32));
    with_precision(Precision::Auto, || {
        assert_eq!(precision_of::<Cpu>(&device), Ok(Precision::F32));
        let model = LinearConfig::new(2, 2).init::<Cpu>(&device);
        let loss = model.forward::<2>(Tensor::ones([1, 2], &device)).sum();
        assert!(model.weight.val().grad(&loss.backward()).is_some());
        assert_eq!(model.num_params(), 6);
    });
}

#[test]
fn a_loss_scale_without_f16_is_answered() {
    let device = Default::default();
    for precision in [Precision::Bf16, Precision::F32] {
        let error = AmpConfig::new()
            .with_precision(precision)
            .with_loss_scale(LossScaleConfig::Fixed(128.0))
            .apply::<Amp<Flex>>(&device)
            .unwrap_err();
        assert_eq!(error, AmpError::LossScaleWithoutF16 { precision });
    }
}

#[test]
fn a_loss_scale_out_of_range_is_refused_and_the_scaler_is_as_it_was() {
    let device = Default::default();
    let bad = LossScaleConfig::Dynamic(DynamicLossScale {
        growth_factor: 0.5,
        ..DynamicLossScale::default()
    });
    let error = AmpConfig::new()
        .with_precision(Precision::F16)
        .with_loss_scale(bad)
        .apply::<Amp<Flex>>(&device)
        .unwrap_err();
    let text = "loss scaling: growth_factor is 0.5, expected a finite number above 1";
    assert_eq!(error.to_string(), text);
    assert_eq!(GradScaler::new(bad).unwrap_err(), error);
    let of_device = GradScaler::of::<Amp<Flex>>(&device);
    assert_eq!(of_device.state().scale(), 65536.0);

    let scaler = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    assert_eq!(scaler.configure(bad).unwrap_err(), error);
    assert_eq!(scaler.loss_scale(), 8.0);
}

#[test]
fn a_device_that_scales_no_loss_has_a_loss_scale_of_1() {
    let device = Default::default();
    let scaler = GradScaler::of::<Amp<Flex>>(&device);
    for (precision, scale) in [
        (Precision::Bf16, 1.0),
        (Precision::F16, 65536.0),
        (Precision::F32, 1.0),
    ] {
        let config = AmpConfig::new().with_precision(precision);
        config.apply::<Amp<Flex>>(&device).unwrap();
        assert_eq!(scaler.loss_scale(), scale, "{precision}");
        // A state is the same in any precision, for a file to resume from.
        assert_eq!(scaler.state().scale(), 65536.0);
        scaler.load_state(scaler.state());
        assert_eq!(scaler.loss_scale(), scale, "{precision}");
    }
}

#[test]
fn the_configuration_reads_from_a_file_with_defaults() {
    let config: AmpConfig = serde_json::from_str(r#"{"precision":"Bf16"}"#).unwrap();
    assert_eq!(config, AmpConfig::new().with_precision(Precision::Bf16));
    let text = r#"{"precision":"F16","loss_scale":{"Dynamic":{"init_scale":1024.0}}}"#;
    let config: AmpConfig = serde_json::from_str(text).unwrap();
    let scale = LossScaleConfig::Dynamic(DynamicLossScale {
        init_scale: 1024.0,
        ..DynamicLossScale::default()
    });
    let expected = AmpConfig::new()
        .with_precision(Precision::F16)
        .with_loss_scale(scale);
    assert_eq!(config, expected);
}

#[test]
fn a_misspelt_field_of_a_configuration_is_refused_and_named() {
    for (text, field) in [
        (
            r#"{"precision":"f16","loss_scaling":{"Fixed":8.0}}"#,
            "loss_scaling",
        ),
        (
            r#"{"loss_scale":{"Dynamic":{"init_scal":8.0}}}"#,
            "init_scal",
        ),
    ] {
        let error = serde_json::from_str::<AmpConfig>(text)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("unknown field `{field}`")),
            "{error}"
        );
    }
}

/// A precision is written as it is parsed and displayed; earlier spellings are also read.
#[test]
fn a_precision_has_one_spelling() {
    for (precision, name, before) in [
        (Precision::Auto, "auto", "Auto"),
        (Precision::F16, "f16", "F16"),
        (Precision::Bf16, "bf16", "Bf16"),
        (Precision::F32, "f32", "F32"),
    ] {
        assert_eq!(precision.to_string(), name);
        assert_eq!(serde_json::to_value(precision).unwrap(), name);
        for text in [name, before] {
            let read = serde_json::from_value::<Precision>(text.into()).unwrap();
            assert_eq!(read, precision);
        }
        let config = AmpConfig::new().with_precision(precision);
        let text = serde_json::to_string(&config).unwrap();
        assert!(
            text.contains(&format!("\"precision\":\"{name}\"")),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<AmpConfig>(&text).unwrap(), config);
    }
    let read = serde_json::from_value::<Precision>("bf16-mixed".into()).unwrap();
    assert_eq!(read, Precision::Bf16);
    let error = serde_json::from_value::<Precision>("fp8".into()).unwrap_err();
    assert!(
        error.to_string().contains("expected one of auto"),
        "{error}"
    );
}
