//! The passes of several devices, each on a thread of its own.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_optim::GradientsParams;
use burn_train::{Learner, LearningComponentsTypes, TrainOutput, TrainStep, TrainingModel};

use crate::GradScaler;

type Input<LC> = <TrainingModel<LC> as TrainStep>::Input;
pub(super) type Output<LC> = <TrainingModel<LC> as TrainStep>::Output;

/// The device and the scaler of a pass.
pub(super) type Place<LC> = (Device<<LC as LearningComponentsTypes>::Backend>, GradScaler);

/// The workers of a training. One alone works on the calling thread.
pub(super) enum Workers<LC: LearningComponentsTypes> {
    One(GradScaler),
    Several(Vec<Worker<LC>>),
}

/// A thread that runs a device's passes.
pub(super) struct Worker<LC: LearningComponentsTypes> {
    batches: Sender<(Input<LC>, TrainingModel<LC>)>,
    outputs: Receiver<TrainOutput<Output<LC>>>,
}

impl<LC: LearningComponentsTypes + 'static> Workers<LC> {
    /// Starts a worker at each place, until the returned value is dropped.
    pub fn start<'scope>(threads: &'scope Scope<'scope, '_>, places: Vec<Place<LC>>) -> Self {
        if let [(_, scaler)] = &places[..] {
            return Self::One(scaler.clone());
        }
        let start = |place| Worker::start(threads, place);
        Self::Several(places.into_iter().map(start).collect())
    }

    /// Runs the forward and backward pass of these batches, each with the number of its worker.
    pub fn passes(
        &self,
        batches: Vec<(usize, Input<LC>)>,
        learner: &Learner<LC>,
    ) -> (Vec<(usize, GradientsParams)>, Vec<Output<LC>>) {
        let outputs: Vec<_> = match self {
            Self::One(scaler) => {
                let pass = |(of, batch)| (of, scaler.pass(|| learner.train_step(batch)));
                batches.into_iter().map(pass).collect()
            }
            Self::Several(workers) => {
                let begin = |(of, batch): (usize, _)| {
                    // The thread of a worker that is gone has panicked, and says so when it is waited for.
                    let _ = workers[of].batches.send((batch, learner.model()));
                    of
                };
                let begun: Vec<usize> = batches.into_iter().map(begin).collect();
                let end = |of: usize| {
                    let output = workers[of].outputs.recv();
                    (of, output.expect("the thread of each device ends its pass"))
                };
                begun.into_iter().map(end).collect()
            }
        };
        outputs
            .into_iter()
            .map(|(of, output)| ((of, output.grads), output.item))
            .unzip()
    }
}

impl<LC: LearningComponentsTypes + 'static> Worker<LC> {
    fn start<'scope>(threads: &'scope Scope<'scope, '_>, (device, scaler): Place<LC>) -> Self {
        let (batches, given) = channel::<(Input<LC>, TrainingModel<LC>)>();
        let (passed, outputs) = channel();
        threads.spawn(move || {
            for (batch, model) in given {
                let output = scaler.pass(|| model.fork(&device).step(batch));
                if passed.send(output).is_err() {
                    break;
                }
            }
        });
        Self { batches, outputs }
    }
}
