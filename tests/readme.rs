//! The Rust blocks of the README: each stands in a test, here or in `learner/readme.rs`.

mod common;
#[path = "common/readme.rs"]
mod readme;

use burn::backend::{Autodiff, Flex as Vulkan};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn_amp::prelude::*;

use common::mlp::{Mlp, parameters};
use readme::assert_blocks_stand_in;

type MyBackend = AmpAutodiff<Vulkan>; // was: Autodiff<Vulkan>

#[test]
fn every_block_of_the_readme_is_a_test() {
    assert_blocks_stand_in(
        &[include_str!("readme.rs"), include_str!("learner/readme.rs")],
        include_str!("../README.md"),
        "rust",
        // The imports are those of the tests, on Flex.
        "use burn::backend::Vulkan;\nuse burn_amp::prelude::*;\n",
        6,
    );
}

#[test]
fn the_loop_and_the_explicit_loop_train_and_a_region_is_fp32() -> Result<(), AmpError> {
    let device = Default::default();
    let layer = Mlp::<MyBackend>::new();
    let input = common::mlp::values([32, 8], 1);
    AmpConfig::new()
        .with_precision(Precision::Bf16)
        .apply::<MyBackend>(&device)?;
    let output = full_precision(|| layer.forward(input));
    assert_eq!(precision_of::<MyBackend>(&device)?, Precision::Bf16);
    let plain = Mlp::<Autodiff<Vulkan>>::new();
    let expected = plain.forward(common::mlp::values([32, 8], 1));
    assert_eq!(output.into_data(), expected.into_data());

    let mut model = Mlp::<MyBackend>::new();
    let (mut optimizer, lr) = (SgdConfig::new().init(), 0.1);
    let before = parameters(&model);
    let loss = model.loss(1);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    model = optimizer.step(lr, model, grads);
    assert_ne!(parameters(&model), before);

    let before = parameters(&model);
    let loss = model.loss(2);
    let scaler = GradScaler::of::<MyBackend>(&device); // once, before the loop
    let mut grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    scaler.unscale(&model, &mut grads)?; // only to clip or to look at them
    clip_grad_norm(&model, &mut grads, 1.0)?; // returns their norm, a tensor of one element
    let stepped;
    (model, stepped) = scaler.step(&mut optimizer, lr, model, grads);
    let stepped = stepped?; // false: the step was skipped. The model is here, also after an error
    scaler.update()?;
    assert!(stepped);
    assert_ne!(parameters(&model), before);
    Ok(())
}

/// Compiled only: the README's path is relative, and the current folder is that of all tests.
#[allow(dead_code)]
fn the_loss_scale_in_the_current_folder(
    device: burn::backend::flex::FlexDevice,
) -> Result<(), AmpError> {
    GradScaler::of::<MyBackend>(&device).save_file("scaler.json")?;
    // In the process that resumes:
    GradScaler::of::<MyBackend>(&device).load_file("scaler.json")?;
    Ok(())
}

/// By scalers of their own: another test configures the device, and with it the device's scaler.
#[test]
fn the_loss_scale_is_saved_and_loaded() -> Result<(), AmpError> {
    let file = std::env::temp_dir().join(format!("burn-amp-readme-{}", std::process::id()));
    let saved = GradScaler::new(LossScaleConfig::default())?;
    saved.set_scale(128.0)?;
    saved.save_file(&file)?;
    let resumed = GradScaler::new(LossScaleConfig::default())?;
    resumed.load_file(&file)?;
    assert_eq!(resumed.loss_scale(), 128.0);
    std::fs::remove_file(&file).unwrap();
    Ok(())
}
