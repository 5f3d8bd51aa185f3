//! Every error as a user reads it: each is caused by the mistake that it is about, and its whole
//! text is here.

mod common;
#[allow(dead_code)]
use burn::backend::{Autodiff, Flex, NdArray};
use burn::module::Param;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use burn_amp::policy::OpPrecision;
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, AmpError, DynamicLossScale, GradScaler, LossScaleConfig,
    MixedPrecisionTrainerConfig, Precision, StepProgress, WhenStuck, compare, half_weights,
    with_precision,
};
use burn_backend::{DTypeUsage, DTypeUsageSet};

use common::mlp::{Mlp, scaler, values};
use shared::checked::{Checked, CheckedDevice};

type Plain = Autodiff<Flex>;

#[track_caller]
fn assert_says<T>(result: Result<T, AmpError>, text: &str) {
    assert_eq!(result.err().expect("an error").to_string(), text);
}

#[test]
fn every_variant_has_a_test_of_its_name() {
    let tests = include_str!("errors.rs");
    let (_, errors) = include_str!("../core/src/error.rs")
        .split_once("pub enum AmpError {")
        .unwrap();
    let variants: Vec<_> = errors
        .lines()
        .take_while(|line| *line != "}")
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()))
        .map(|line| line.trim_end_matches([' ', '{', ',']))
        .collect();
    assert!(variants.contains(&"NothingStepped"), "{variants:?}");
    for variant in variants {
        let mut name = String::new();
        for c in variant.chars() {
            if c.is_ascii_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(c.to_ascii_lowercase());
        }
        let test = format!("#[test]\nfn {name}()");
        assert!(tests.contains(&test), "{variant} has no test");
    }
}

#[test]
fn unknown_precision() {
    assert_says(
        "fp8".parse::<Precision>(),
        "unknown precision \"fp8\": expected one of auto, f16, fp16, float16, 16-mixed, bf16, \
         bfloat16, bf16-mixed, f32, fp32, float32, 32. Use \"auto\" to let the device decide",
    );
}

#[test]
fn unsupported_precision() {
    let f16 = AmpConfig::new().with_precision(Precision::F16);
    assert_says(
        f16.apply::<AmpAutodiff<NdArray>>(&Default::default()),
        "ndarray on Cpu does not support f16: the backend reports nothing for it, and AMP \
         requires f16 arithmetic, or at least f16 matrix multiplication. \
         Supported here: f32. Choose one of these, or \"auto\", or the Flex backend, which \
         computes in half on a CPU",
    );
    let storage = DTypeUsageSet::from(DTypeUsage::Storage);
    let device = CheckedDevice::with_support(DTypeUsage::general(), storage);
    let bf16 = AmpConfig::new().with_precision(Precision::Bf16);
    assert_says(
        bf16.apply::<AmpAutodiff<Checked>>(&device),
        &format!(
            "checked on {device:?} does not support bf16: the backend reports Storage for it, and \
             AMP requires bf16 arithmetic, or at least bf16 matrix multiplication. \
             Supported here: f16, f32. Choose one of these, or \"auto\""
        ),
    );
}

#[test]
fn invalid_loss_scale() {
    let new = DynamicLossScale::new;
    for (config, text) in [
        (
            LossScaleConfig::Fixed(-1.0),
            "loss scaling: fixed scale is -1, expected a positive and finite number",
        ),
        (
            new().with_min_scale(0.0).into(),
            "loss scaling: min_scale is 0, expected a positive and finite number",
        ),
        (
            new().with_max_scale(0.5).into(),
            "loss scaling: max_scale is 0.5, expected a finite number, at least min_scale (1)",
        ),
        (
            new().with_init_scale(f32::NAN).into(),
            "loss scaling: init_scale is NaN, expected a number from min_scale (1) to \
             max_scale (16777216)",
        ),
        (
            new().with_growth_factor(0.5).into(),
            "loss scaling: growth_factor is 0.5, expected a finite number above 1",
        ),
        (
            new().with_backoff_factor(2.0).into(),
            "loss scaling: backoff_factor is 2, expected a number between 0 and 1",
        ),
        (
            new().with_growth_interval(0).into(),
            "loss scaling: growth_interval is 0, expected at least 1",
        ),
        (
            new().with_hysteresis(0).into(),
            "loss scaling: hysteresis is 0, expected at least 1",
        ),
        (
            new().with_stuck_after(0).into(),
            "loss scaling: stuck_after is 0, expected at least 1",
        ),
    ] {
        assert_says(GradScaler::new(config), text);
    }
    for (config, text) in [
        (
            LossScaleConfig::default(),
            "loss scaling: scale is inf, expected a number from min_scale (1) to max_scale (16777216)",
        ),
        (
            LossScaleConfig::Fixed(8.0),
            "loss scaling: scale is inf, expected a positive and finite number",
        ),
        (
            LossScaleConfig::Disabled,
            "loss scaling: scale is inf, expected 1 while loss scaling is disabled",
        ),
    ] {
        let scaler = GradScaler::new(config).unwrap();
        assert_says(scaler.set_scale(f32::INFINITY), text);
    }
}

#[test]
fn state() {
    let scaler = scaler(1024.0);
    assert_says(
        scaler.load_file("Cargo.toml"),
        "cannot read the state from Cargo.toml: expected value at line 1 column 2. Nothing was \
         changed. Was this written by the same type, such as by `GradScaler::save_file`? If it is \
         damaged, use an older copy. A scaler can also start anew, and finds its scale within a few steps",
    );
    assert_says(
        scaler.save_file("missing/scaler.json"),
        "cannot write the state to missing/scaler.json: No such file or directory (os error 2). An \
         existing file there is unchanged",
    );
}

#[cfg(feature = "plot")]
#[test]
fn plot() {
    let report = burn_amp::AmpReport::of::<Amp<Flex>>(&Default::default()).unwrap();
    assert_says(
        report.save_svg("scale.svg"),
        "cannot draw the loss scale to scale.svg: no step was counted yet (bf16 and FP32 need \
         no loss scale and count no steps). An existing file there is unchanged",
    );
}

#[test]
fn stuck() {
    let dynamic = DynamicLossScale::new()
        .with_init_scale(2.0)
        .with_stuck_after(3)
        .into();
    let cases = [
        (
            (dynamic, 1e7, 4),
            "4 steps in a row were skipped, the last one at the minimum loss scale 1: the model is \
             not training. No loss scale makes its gradients finite: second.bias, second.weight, \
             first.bias, first.weight. Try bf16, or full_precision around the layers that overflow",
        ),
        (
            (LossScaleConfig::Fixed(2.0), 1e7, 20),
            "20 steps in a row were skipped, the last one at the fixed loss scale 2: the model is \
             not training. Its gradients are not finite: second.bias, second.weight, first.bias, \
             first.weight. Try a smaller or a dynamic loss scale, bf16, or full_precision around the \
             layers that overflow",
        ),
        (
            (dynamic, f32::NAN, 3),
            "3 steps in a row were skipped, the last one because its loss is not finite: the model \
             is not training. The loss scale is not the cause: check the inputs, the learning rate, \
             and the forward pass for values beyond 65504, which f16 cannot hold. For such values \
             try bf16, or full_precision around the layers that overflow",
        ),
    ];
    // The first of them would be mended.
    AmpConfig::new()
        .with_overflow_fallback(false)
        .apply::<AmpAutodiff<Flex>>(&Default::default())
        .unwrap();
    for ((loss_scale, factor, steps), text) in cases {
        let model = Mlp::<AmpAutodiff<Flex>>::new();
        let optimizer = SgdConfig::new().init();
        let mut trainer = MixedPrecisionTrainerConfig::new()
            .with_precision(Precision::F16)
            .with_loss_scale(Some(loss_scale))
            .with_when_stuck(WhenStuck::Stop)
            .init(model, optimizer, 1e-3)
            .unwrap();
        let mut step = || {
            let batch = (values([32, 8], 1), values([32, 4], 2));
            trainer.train_step(batch.0, batch.1, |model, x, y| model.loss_on(x, y) * factor)
        };
        for _ in 1..steps {
            step().unwrap();
        }
        assert_says(step(), text);
        step().unwrap();
    }
}

#[test]
fn invalid_trainer() {
    let accumulating = MixedPrecisionTrainerConfig::new().with_grads_accumulation(0);
    let clipping = |norm| MixedPrecisionTrainerConfig::new().with_grad_clipping_norm(Some(norm));
    for (config, text) in [
        (
            accumulating,
            "trainer: grads_accumulation is 0, expected at least 1 batch for a step",
        ),
        (
            clipping(0.0),
            "trainer: grad_clipping_norm is 0, expected a number greater than 0, or None for no \
             clipping",
        ),
        (
            clipping(f32::NAN),
            "trainer: grad_clipping_norm is NaN, expected a number greater than 0, or None for no \
             clipping",
        ),
    ] {
        let model = Mlp::<AmpAutodiff<Flex>>::new();
        assert_says(config.init(model, SgdConfig::new().init(), 1e-3), text);
    }
}

#[test]
fn loss_shape() {
    let model = Mlp::<AmpAutodiff<Flex>>::new();
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .with_precision(Precision::F16)
        .with_grads_accumulation(2)
        .init(model, SgdConfig::new().init(), 1e-3)
        .unwrap();
    let per_sample = |model: &Mlp<_>, x, y| model.loss_on(x, y).repeat_dim(0, 32);
    assert_says(
        trainer.train_step(values([32, 8], 1), values([32, 4], 2), per_sample),
        "the loss has shape [32], expected [1]: the mean or the sum of the batch. Reduce it with \
         .mean() or .sum(), or pass Reduction::Mean to Burn's loss. Nothing was changed",
    );
    // The window of two batches has not begun.
    for expected in [StepProgress::Accumulated, StepProgress::Stepped] {
        let batch = (values([32, 8], 1), values([32, 4], 2));
        let step = trainer.train_step(batch.0, batch.1, |model, x, y| model.loss_on(x, y));
        assert_eq!(step.unwrap().progress, expected);
    }
}

#[test]
fn nothing_scaled() {
    let (scaler, model) = (scaler(1024.0), Mlp::<Plain>::new());
    let mut optimizer = SgdConfig::new().init();
    let grads = GradientsParams::from_grads(model.loss(0).backward(), &model);
    assert_says(
        scaler.step(&mut optimizer, 0.1, model, grads).1,
        "step was called, but no loss was scaled since the last update. Call \
         scaler.scale(loss).backward(), or scaler.backward(loss, &model), first, on this scaler or a clone of it",
    );
}

#[test]
fn nothing_stepped() {
    let (scaler, model) = (scaler(1024.0), Mlp::<Plain>::new());
    scaler.backward(model.loss(0), &model);
    assert_says(
        scaler.update(),
        "update was called, but there was no step since the last update. Call scaler.step(..) \
         first, once for each optimizer, and update once after all of them",
    );
}

/// Of burn-amp-device: the scalers of a device here share their step.
#[test]
fn several_steps() {
    let several = AmpError::SeveralSteps {
        call: "step",
        steps: 2,
    };
    assert_says::<()>(
        Err(several),
        "step: expected one step, got 2: some of their losses were given to scalers that were dropped, as \
         of several trainings that call GradScaler::of(&device) for each step. Call it once in each training, and \
         use that scaler, or its clones, for scale, step and update",
    );
}

#[test]
fn already_unscaled() {
    let (scaler, model) = (scaler(1024.0), Mlp::<Plain>::new());
    let mut grads = scaler.backward(model.loss(0), &model);
    scaler.unscale(&model, &mut grads).unwrap();
    assert_says(
        scaler.unscale(&model, &mut grads),
        "unscale was called again, or after step, before update: the gradient of \
        first.weight, for example, would be divided by the scale twice. Unscale once, \
        after the last micro-batch and before step",
    );
}

#[test]
fn already_stepped() {
    let (scaler, mut model) = (scaler(1024.0), Mlp::<Plain>::new());
    let mut optimizer = SgdConfig::new().init();
    let mut step = |model: Mlp<Plain>| {
        let grads = scaler.backward(model.loss(0), &model);
        scaler.step(&mut optimizer, 0.1, model, grads)
    };
    (model, _) = step(model);
    assert_says(
        step(model).1,
        "step was called again before update: the gradient of first.weight, for example, \
         would be applied twice. Call update once after the steps of all optimizers; with \
         accumulation, step once, after the last micro-batch",
    );
}

#[test]
fn foreign_gradients() {
    let scaler = scaler(1024.0);
    let [model, other] = [(); 2].map(|()| Mlp::<Plain>::new());
    let mut grads = scaler.backward(other.loss(0), &other);
    assert_says(
        scaler.unscale(&model, &mut grads),
        "unscale was given 4 gradients, but only 0 of them belong to this model. Either they \
         were computed with another model (GradientsParams::from_grads takes the model to step), \
         or the loss does not depend on its parameters. Are they frozen or detached?",
    );
}

#[test]
fn partial_batch() {
    assert_says(
        Err::<(), _>(AmpError::PartialBatch { micro_batches: 4 }),
        "a training strategy of your own adds up 4 micro-batches. Where steps are checked, as in f16, a \
         micro-batch whose gradients are not finite has none, and the strategy applies those of the others as if they \
         were the whole batch. Use one of Burn's strategies, or choose bf16 without a finite check",
    );
}

#[test]
fn loss_scale_without_f16() {
    let config = AmpConfig::new()
        .with_precision(Precision::Bf16)
        .with_loss_scale(LossScaleConfig::Fixed(128.0));
    assert_says(
        config.apply::<Amp<Flex>>(&Default::default()),
        "a loss scale was configured with bf16, which needs none: only f16 has a smaller range \
         than FP32. Remove the loss scale, or choose f16",
    );
}

#[test]
#[should_panic(
    expected = "its backend autodiff<checked> has autodiff already. Use the backend without autodiff"
)]
fn autodiff_below_amp_autodiff_is_refused() {
    type Twice = AmpAutodiff<Autodiff<Checked>>;
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    config.apply::<Twice>(&CheckedDevice::new()).ok();
}

#[test]
fn nothing_to_compare() {
    let model = Mlp::<AmpAutodiff<Flex>>::new();
    let compared = with_precision(Precision::F32, || compare(&model, 0, |model| model.loss(0)));
    let text = "compare: got f32, expected f16 or bf16 in force on the model's device, which is an AmpAutodiff's. Apply \
                AmpConfig::with_precision, or call compare in with_precision(..)";
    assert_says(compared, text);
    let model = Mlp::<Plain>::new();
    let compared = with_precision(Precision::F16, || compare(&model, 0, |model| model.loss(0)));
    assert_says(compared, &text.replace("f32", "f16"));
}

#[test]
fn unknown_operation() {
    let with = |op| AmpConfig::new().with_op(op, OpPrecision::Half);
    assert_says(
        with("sofmax"),
        "unknown operation \"sofmax\": expected the name of an operation of the policy, such as \
         softmax. The guide's page `ops` lists all names; the prefix `float_` is optional",
    );
    assert_says(
        with("banana"),
        "unknown operation \"banana\": expected the name of an operation of the policy. The guide's \
         page `ops` lists all names; the prefix `float_` is optional",
    );
}

#[test]
fn operation_precision() {
    let with = |op, precision| AmpConfig::new().with_op(op, precision);
    assert_says(
        with("float_reshape", OpPrecision::F32),
        "the precision of the operation reshape: got \"f32\", expected none, because the operation \
         moves or creates data and computes nothing",
    );
    assert_says(
        with("neg", OpPrecision::Half),
        "the precision of the operation neg: got \"half\", expected f32, because the operation \
         computes in its operand's dtype, which may already be half",
    );
    assert_says(
        with("conv2d_weight_backward", OpPrecision::F32),
        "the precision of the operation conv2d_weight_backward: got \"f32\", expected none, because the \
         backward pass follows the forward pass: set conv2d instead",
    );
    assert_says(
        with("quantize", OpPrecision::Half),
        "the precision of the operation quantize: got \"half\", expected f32, because its scales and \
         rounding are calibrated in FP32",
    );
}

#[test]
fn not_half() {
    for precision in [Precision::F32, Precision::Auto] {
        assert_says(
            half_weights(Mlp::<Amp<Flex>>::new(), precision),
            &format!("weights in half precision: got {precision}, expected f16 or bf16"),
        );
    }
}

#[test]
fn half_parameter() {
    let mut model = Mlp::<Plain>::new();
    let weight = model.first.weight.val().inner().cast(FloatDType::F16);
    model.first.weight = Param::from_tensor(Tensor::from_inner(weight));
    let scaler = scaler(1024.0);
    let weight = model.first.weight.val().cast(FloatDType::F32);
    let grads = scaler.scale(weight.sum()).backward();
    let mut grads = GradientsParams::from_grads(grads, &model);
    assert_says(
        scaler.unscale(&model, &mut grads),
        "unscale: the parameter first.weight, or its gradient, is f16, expected FP32: the steps of a training are \
         too small for f16. Cast the parameter to FP32 before training, or the record that it is loaded from",
    );
}

#[test]
fn weight_overflow() {
    let large = |value: f32| {
        let mut model = Mlp::<Amp<Flex>>::new();
        let weight = Tensor::full([16, 4], value, &Default::default());
        model.second.weight = Param::from_tensor(weight);
        model
    };
    assert_says(
        half_weights(large(7e4), Precision::F16),
        "the weight second.weight has a value of magnitude 70000, expected at most 65504, the largest \
         of f16: use bf16",
    );
    assert!(half_weights(large(7e4), Precision::Bf16).is_ok());
    assert_says(
        half_weights(large(f32::MIN), Precision::Bf16),
        "the weight second.weight has a value of magnitude 340282350000000000000000000000000000000, \
         expected at most 65504 in f16 and 3.39e38 in bf16: clamp it, or keep the weights in FP32",
    );
    assert!(half_weights(large(-65504.0), Precision::F16).is_ok());
    // An infinite weight is no error.
    assert!(half_weights(large(f32::INFINITY), Precision::F16).is_ok());
}
