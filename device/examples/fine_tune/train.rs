//! Fine-tuning with Burn's `Learner`, and the accuracy that it reaches.

use std::error::Error;
use std::path::PathBuf;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::metric::AccuracyMetric;
use burn::train::{Learner, SupervisedTraining};
use burn_amp_device::AmpTrainingExt;

use crate::corpus::Verse;
use crate::data::{BATCH, Labelled, loader};
use crate::lines::Lines;
use crate::model::Classifier;

/// How a training goes.
pub struct Plan {
    /// At least so many: the last epoch is whole.
    pub steps: usize,
    /// At the beginning; from there down to 0.
    pub learning_rate: f64,
    pub seed: u64,
    /// Where the metrics go.
    pub output: PathBuf,
}

/// Trains the classifier in the precision of its device. The model that comes back is for inference.
pub fn fine_tune(
    model: Classifier,
    train: &[Verse],
    valid: &[Verse],
    plan: &Plan,
) -> Result<Classifier, Box<dyn Error>> {
    let batches = train.len().div_ceil(BATCH);
    let epochs = plan.steps.div_ceil(batches);
    let optimizer = AdamWConfig::new()
        .with_weight_decay(0.01)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    let schedule = LinearLrSchedulerConfig::new(plan.learning_rate, 0.0, epochs * batches);
    let train = loader(train, Some(plan.seed));
    let result = SupervisedTraining::new(&plan.output, train, loader(valid, None))
        .metrics((AccuracyMetric::new(),))
        .renderer(Box::new(Lines::bar()))
        .with_application_logger(None)
        .num_epochs(epochs)
        .with_amp()
        .launch(Learner::new(model, optimizer, schedule.init()?))?;
    match result.error {
        Some(error) => Err(error.to_string().into()),
        None => Ok(result.model),
    }
}

/// The share of the verses that the model puts in the right half.
pub fn accuracy(model: &Classifier, verses: &[Verse], device: &Device) -> f64 {
    let right = verses.chunks(BATCH).map(|verses| {
        let batch = Labelled::new(verses, device);
        let answers = model.forward(batch.tokens, batch.padding).argmax(1);
        let right = answers.squeeze_dim::<1>(1).equal(batch.halves).int().sum();
        right.into_scalar::<i64>()
    });
    right.sum::<i64>() as f64 / verses.len() as f64
}
