//! `AmpConfig::with_finite_check` in a process that never leaves FP32. One test, in a process of its own.

mod common;

use burn::backend::Flex;
use burn::module::Module;
use burn::optim::SgdConfig;
use burn_amp::{AmpAutodiff, AmpConfig, GradScaler, LossScaleConfig};

use common::mlp::{Mlp, parameters};

type A = AmpAutodiff<Flex>;

#[test]
fn an_own_scaler_skips_the_step_that_is_its_own() {
    let config = AmpConfig::new().with_finite_check(true);
    config.apply::<A>(&Default::default()).unwrap();
    let scaler = GradScaler::new(LossScaleConfig::default()).unwrap();
    let model = Mlp::<A>::new();
    let before = parameters(&model);
    let mut optimizer = SgdConfig::new().init();
    let mut model = model.fork(&Default::default());
    for (factor, taken) in [(1.0, true), (f32::NAN, false)] {
        // Arithmetic after `scale`, as with accumulation.
        let loss = scaler.scale(model.loss(1) * factor) / 4.0;
        let grads = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        let (next, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
        assert_eq!(stepped.unwrap(), taken);
        scaler.update().unwrap();
        model = next;
    }
    assert_eq!((scaler.taken_steps(), scaler.skipped_steps()), (1, 1));
    let after = parameters(&model);
    assert_ne!(after, before);
    assert!(after.iter().all(|value| value.is_finite()));
    let own = GradScaler::of::<A>(&Default::default());
    assert_eq!(own.taken_steps() + own.skipped_steps(), 0);
}
