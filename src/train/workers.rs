//! The passes of several devices, each on a thread of its own.

use std::sync::Once;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_optim::GradientsParams;
use burn_train::{Learner, LearningComponentsTypes, TrainOutput, TrainStep, TrainingModel};

use super::gradients;
use crate::GradScaler;
use crate::scaler::Passes;

pub(super) type Input<LC> = <TrainingModel<LC> as TrainStep>::Input;
pub(super) type Item<LC> = <TrainingModel<LC> as TrainStep>::Output;
type Output<LC> = (TrainOutput<Item<LC>>, Passes);

/// The device and the scaler of a worker.
pub(super) type Place<LC> = (Device<<LC as LearningComponentsTypes>::Backend>, GradScaler);

/// What a worker's forward and backward pass gave, besides its item.
pub(super) struct Passed {
    pub worker: usize,
    pub gradients: GradientsParams,
    pub passes: Passes,
}

/// The workers of a training. A single one works on the calling thread.
pub(super) enum Workers<LC: LearningComponentsTypes> {
    Single(GradScaler),
    Several(Vec<Worker<LC>>),
}

/// A thread that runs a device's passes.
pub(super) struct Worker<LC: LearningComponentsTypes> {
    batches: Sender<(Input<LC>, TrainingModel<LC>)>,
    outputs: Receiver<Output<LC>>,
}

impl<LC: LearningComponentsTypes + 'static> Workers<LC> {
    /// Starts a worker at each place, until the returned value is dropped.
    pub fn start<'scope>(threads: &'scope Scope<'scope, '_>, places: Vec<Place<LC>>) -> Self {
        if let [(_, scaler)] = &places[..] {
            return Self::Single(scaler.clone());
        }
        let start = |place| Worker::start(threads, place);
        Self::Several(places.into_iter().map(start).collect())
    }

    /// Runs the forward and backward pass of these batches, each with the number of its worker. A worker begins before
    /// the next batch is fetched.
    pub fn passes(
        &self,
        batches: impl Iterator<Item = (usize, Input<LC>)>,
        learner: &Learner<LC>,
    ) -> (Vec<Passed>, Vec<Item<LC>>) {
        let outputs: Vec<(usize, Output<LC>)> = match self {
            Self::Single(scaler) => {
                let pass = |(of, batch)| {
                    let step = || learner.train_step(batch);
                    (of, run::<LC>(scaler, step, || learner.model()))
                };
                batches.map(pass).collect()
            }
            Self::Several(workers) => {
                let begin = |(of, batch): (usize, _)| {
                    // A worker that is gone has panicked, which shows below.
                    let _ = workers[of].batches.send((batch, learner.model()));
                    of
                };
                let begun: Vec<usize> = batches.map(begin).collect();
                let end = |of: usize| {
                    let output = workers[of].outputs.recv();
                    (of, output.expect("the thread of a device ends its pass"))
                };
                begun.into_iter().map(end).collect()
            }
        };
        let parts = outputs.into_iter().map(|(worker, (output, passes))| {
            let gradients = output.grads;
            let passed = Passed {
                worker,
                gradients,
                passes,
            };
            (passed, output.item)
        });
        parts.unzip()
    }
}

impl<LC: LearningComponentsTypes + 'static> Worker<LC> {
    fn start<'scope>(threads: &'scope Scope<'scope, '_>, (device, scaler): Place<LC>) -> Self {
        let (batches, given) = channel::<(Input<LC>, TrainingModel<LC>)>();
        let (passed, outputs) = channel();
        threads.spawn(move || {
            for (batch, model) in given {
                let model = model.fork(&device);
                let output = run::<LC>(&scaler, || model.step(batch), || model.clone());
                if passed.send(output).is_err() {
                    break;
                }
            }
        });
        Self { batches, outputs }
    }
}

/// Runs a forward and backward pass. The loop takes the step: what another scaler has scaled is checked here, too.
fn run<LC: LearningComponentsTypes>(
    scaler: &GradScaler,
    step: impl FnOnce() -> TrainOutput<Item<LC>>,
    model: impl FnOnce() -> TrainingModel<LC>,
) -> Output<LC> {
    let (mut output, mut passes) = scaler.pass(step);
    if passes.other_scaled && !gradients::are_finite(&model(), &mut output.grads) {
        passes.other_skipped = true;
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            log::warn!(
                "burn-amp: the gradients of a loss that a TrainStep scaled with a scaler of its own are not finite: the \
                 step is skipped, and that scale stays. Use GradScaler::of(&device), or no scaler: the training scales \
                 the loss"
            );
        });
    }
    (output, passes)
}
