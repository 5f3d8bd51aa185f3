//! The README's `Learner`: `tests/readme.rs` compares the text.

use burn::backend::Flex;
use burn::train::{Learner, SupervisedTraining};
use burn_amp::prelude::*;

use crate::harness::{A, BATCH, Model, alone, folder, loader, samples, sgd};

type MyBackend = A;

#[test]
fn the_learner_of_the_readme_trains_in_f16() -> Result<(), AmpError> {
    let _alone = alone();
    let device = Default::default();
    let directory = folder("readme");
    let train = loader::<MyBackend>(samples(3, &[]), BATCH);
    let valid = loader::<Amp<Flex>>(samples(2, &[]), BATCH);
    let (model, optimizer, scheduler) = (Model::new(), sgd(), 0.1);
    let scaler = GradScaler::of::<MyBackend>(&device); // the device's own
    SupervisedTraining::new(directory, train, valid)
        .to_fp16() // or to_bf16(), to_fp32(), with_amp(config)
        .launch(Learner::new(
            model,
            optimizer,
            scaler.checkpoint_with(scheduler), // or scheduler
        ))?;
    assert_eq!(precision_of::<MyBackend>(&device)?, Precision::F16);
    let scaler = GradScaler::of::<MyBackend>(&device);
    assert_eq!(scaler.state().taken_steps(), 3);
    Ok(())
}
