//! Peers that reduce their gradients, each with its own thread, model and scaler. All peers step or all
//! skip, whatever happens on one of them, and no peer is left waiting.

use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Amp, AmpAutodiff, LossScaler, Precision, StepOutcome, with_precision};
use burn_collective::{CollectiveConfig, PeerId, ReduceOperation};

use shared::close::{HALVES, assert_close};
use shared::mlp::{self, Mlp, parameters, scaler, state};

type A = AmpAutodiff<Flex>;
type Plain = Autodiff<Flex>;

const STEPS: usize = 12;
const LR: f64 = 0.1;

/// A fault in a step of a peer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// A NaN gradient of a finite loss.
    Gradient,
    /// An infinite loss with finite gradients.
    Loss,
}

/// A fault by peer and step.
type Faults = fn(usize, usize) -> Option<Fault>;

/// The final state of a peer.
#[derive(Debug)]
struct End {
    peer: usize,
    parameters: Vec<f32>,
    optimizer: Vec<(usize, Vec<u8>)>,
    stepped: Vec<bool>,
    outcomes: Vec<Option<StepOutcome>>,
    scaler: LossScaler,
}

fn sgd<B: AutodiffBackend>() -> OptimizerAdaptor<Sgd<B::InnerBackend>, Mlp<B>, B> {
    let momentum = MomentumConfig::new().with_momentum(0.5).with_dampening(0.0);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn loss<B: Backend>(model: &Mlp<B>, peer: usize, step: usize) -> Tensor<B, 1> {
    model.loss((100 * peer + 2 * step) as u64)
}

fn train(peer: usize, model: Mlp<A>, faults: Faults) -> End {
    let device = Default::default();
    let config = CollectiveConfig::default().with_num_devices(2);
    let id = PeerId::from(peer);
    burn_collective::register::<Amp<Flex>>(id, device, config).unwrap();

    let scaler = scaler(1024.0);
    let (mut optimizer, mut model) = (sgd(), model.fork(&device));
    let (mut stepped, mut outcomes) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss = match (loss(&model, peer, step), faults(peer, step)) {
            (loss, None) => loss,
            (loss, Some(Fault::Gradient)) => loss + (model.first.weight.val().sum() * 0.0).sqrt(),
            (loss, Some(Fault::Loss)) => loss + f32::INFINITY,
        };
        let before = (parameters(&model), state(&optimizer, &model));
        let grads = scaler.backward(loss, &model);
        let grads = grads.all_reduce::<Amp<Flex>>(id, ReduceOperation::Mean);
        let (next, took) = scaler.step(&mut optimizer, LR, model, grads.unwrap());
        let took = took.unwrap();
        scaler.update().unwrap();
        model = next;
        let after = (parameters(&model), state(&optimizer, &model));
        assert_eq!(after != before, took);
        stepped.push(took);
        outcomes.push(scaler.last_step().map(|step| step.outcome));
    }
    burn_collective::finish_collective::<Amp<Flex>>(id).unwrap();
    End {
        peer,
        parameters: parameters(&model),
        optimizer: state(&optimizer, &model),
        stepped,
        outcomes,
        scaler: scaler.state(),
    }
}

/// Two peers that train together and must end alike.
fn train_together(precision: Precision, faults: Faults) -> [End; 2] {
    // A process has one collective for each backend.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    burn_collective::reset_collective::<Amp<Flex>>();

    let model = Mlp::<A>::new();
    let (send, ends) = channel();
    for peer in 0..2 {
        let (model, send) = (model.clone(), send.clone());
        thread::spawn(move || {
            let end = with_precision(precision, || train(peer, model, faults));
            send.send(end).unwrap();
        });
    }
    let mut ends = [(); 2].map(|()| {
        let end = ends.recv_timeout(Duration::from_secs(60));
        end.expect("a peer is left waiting, or panicked")
    });
    ends.sort_by_key(|end| end.peer);
    let [first, second] = &ends;
    assert_eq!(first.parameters, second.parameters);
    assert_eq!(first.optimizer, second.optimizer);
    assert_eq!(first.stepped, second.stepped);
    ends
}

/// The parameters after and before training in one process: in FP32, on the mean of both losses,
/// without the steps that `skipped` selects.
fn train_alone(skipped: impl Fn(usize) -> bool) -> [Vec<f32>; 2] {
    let (mut optimizer, mut model) = (sgd(), Mlp::<Plain>::new());
    let start = parameters(&model);
    for step in (0..STEPS).filter(|step| !skipped(*step)) {
        let loss = (loss(&model, 0, step) + loss(&model, 1, step)) / 2.0;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LR, model, grads);
    }
    [parameters(&model), start]
}

/// Asserts that the peers moved the parameters as far as one process does.
#[track_caller]
fn assert_as_alone(precision: Precision, end: &End, skipped: impl Fn(usize) -> bool) {
    let [expected, start] = train_alone(skipped);
    let moved = |to: &[f32]| {
        to.iter()
            .zip(&start)
            .map(|(a, b)| a - b)
            .collect::<Vec<_>>()
    };
    let (actual, expected) = (moved(&end.parameters), moved(&expected));
    assert_close("peers", precision, &actual, &expected, 8.0);
}

#[test]
fn peers_train_as_one_process_on_the_mean_gradient() {
    for precision in HALVES.into_iter().chain([Precision::F32]) {
        let ends = train_together(precision, |_, _| None);
        let scaled = precision == Precision::F16;
        for end in &ends {
            assert_eq!(end.stepped, [true; STEPS]);
            let counted = if scaled { STEPS as u64 } else { 0 };
            assert_eq!(end.scaler.taken_steps(), counted);
            assert_eq!(end.scaler.skipped_steps(), 0);
            assert_as_alone(precision, end, |_| false);
        }
    }
}

#[test]
fn an_overflow_on_one_peer_is_skipped_by_all() {
    let faults: Faults = |peer, step| match (peer, step) {
        (1, 2) | (0, 5) | (1, 6) => Some(Fault::Gradient),
        _ => None,
    };
    let skipped = |step| [2, 5, 6].contains(&step);
    for end in &train_together(Precision::F16, faults) {
        for step in 0..STEPS {
            assert_eq!(end.stepped[step], !skipped(step));
            let outcome = match skipped(step) {
                true => StepOutcome::Overflow,
                false => StepOutcome::Finite,
            };
            assert_eq!(end.outcomes[step], Some(outcome));
        }
        assert_eq!(end.scaler.skipped_steps(), 3);
        assert_eq!(end.scaler.scale(), 128.0);
        assert_as_alone(Precision::F16, end, skipped);
    }
}

#[test]
fn a_loss_that_is_not_finite_on_one_peer_is_skipped_by_all() {
    let faults: Faults = |peer, step| (peer == 1 && step % 4 == 3).then_some(Fault::Loss);
    let skipped = |step| step % 4 == 3;
    let ends = train_together(Precision::F16, faults);
    let of_skipped = [StepOutcome::Overflow, StepOutcome::NonFiniteLoss];
    for (end, of_skipped) in ends.iter().zip(of_skipped) {
        for step in 0..STEPS {
            assert_eq!(end.stepped[step], !skipped(step));
            let outcome = match skipped(step) {
                true => of_skipped,
                false => StepOutcome::Finite,
            };
            assert_eq!(end.outcomes[step], Some(outcome));
        }
        assert_eq!(end.scaler.skipped_steps(), 3);
        // The scales differ from the first such loss on.
        assert_as_alone(Precision::F16, end, skipped);
    }
    let scales = ends.map(|end| end.scaler.scale());
    assert_eq!(scales, [128.0, 1024.0]);
}

#[test]
fn where_nothing_is_scaled_a_loss_that_is_not_finite_is_skipped_by_none() {
    let faults: Faults = |peer, step| (peer == 1 && step % 4 == 3).then_some(Fault::Loss);
    for precision in [Precision::Bf16, Precision::F32] {
        for end in &train_together(precision, faults) {
            assert_eq!(end.stepped, [true; STEPS]);
            assert_eq!(end.outcomes, [None; STEPS]);
            assert_as_alone(precision, end, |_| false);
        }
    }
}

#[test]
fn the_smallest_gradient_says_that_the_loss_is_not_finite() {
    fn check<B: AutodiffBackend>() {
        let model = Mlp::<B>::new();
        let scaler = scaler(1024.0);
        let expected = scaler.scale(model.loss(7)).backward();
        let expected = mlp::gradients(&model, &GradientsParams::from_grads(expected, &model));
        let of = |loss| mlp::gradients(&model, &scaler.backward(loss, &model));
        // The loss is finite in FP32, although it is beyond f16.
        assert_eq!(of(model.loss(7)), expected);
        assert_eq!(of(model.loss(7) + 1e6), expected);
        let rest = expected.len() - 4;
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let grads = of(model.loss(7) + bad);
            assert_eq!(grads[..rest], expected[..rest]);
            assert!(grads[rest..].iter().all(|v| v.is_nan()), "{grads:?}");
        }
    }
    with_precision(Precision::F16, check::<A>);
    check::<Plain>();
}
