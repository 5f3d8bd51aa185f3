//! A proof, for tests alone: `loss.backward()` with a tape of this crate behind one chain of the
//! client's nodes. `docs/own_tape.md` has what it shows.

mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::try_read_sync;
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind};
use burn_dispatch::backends::{Autodiff, Group};
use burn_dispatch::devices::FlexDevice;
use burn_dispatch::{BackendTensor, DispatchDevice, DispatchTensor, DispatchTensorKind};
use burn_group::GroupDevice;

use crate::device::Session;
use crate::ops::own_tape::{Ask, OnTape, forget_gradients, take_found};

/// A tensor of the client's own tape.
type Recorded = FloatTensor<Autodiff<Group>>;

/// A device of this process whose backend has a tape of its own.
fn on_tape<P: Session>() -> Device {
    let group = GroupDevice::new::<OnTape<P>>(&[FlexDevice]).expect("a group of one device");
    Device::new(DispatchDevice::from(group))
}

/// The loss that `f` computes with the model, whose gradients the tape of the model's device computes.
/// It is scaled by `scale` there. After an overflow its backward pass gives no gradient.
///
/// `f` gets the model with parameters that the client's tape does not track, on the same autodiff
/// device: dropout and batch norm train.
fn loss<M: Module>(model: &M, scale: f32, f: impl FnOnce(M) -> Tensor<1>) -> Tensor<1> {
    let mut tracked = Tracked::default();
    let inside = model.clone().map(&mut tracked);
    let DispatchTensor { kind, autodiff } = f(inside).into_dispatch();
    let loss = recorded(kind);
    let pass = Pass(Arc::new(Mutex::new(State::Ahead(Some(Ahead {
        loss: loss.primitive().clone(),
        leaves: tracked.leaves,
        scale,
    })))));
    let value = ask(loss.primitive().clone(), Ask::Detach);
    // Where `f` captured what the client's tape tracks, the first link hands that gradient on there.
    let parameters = tracked.parameters.iter().enumerate();
    let loss = parameters.fold(loss, |loss, (place, parameter)| {
        let link =
            Backward::<Group, 2>::prepare::<NoCheckpointing>(Link, [loss.node(), parameter.node()]);
        match link.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((pass.clone(), place), value.clone()),
            OpsKind::UnTracked(prep) => prep.finish(value.clone()),
        }
    });
    Tensor::from_dispatch(DispatchTensor {
        kind: on_client(loss),
        autodiff,
    })
}

/// One parameter's place in the chain that is the loss. The last link runs first.
#[derive(Debug)]
struct Link;

impl Backward<Group, 2> for Link {
    type State = (Pass, usize);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let seed = grads.consume::<Group>(&ops.node);
        let [before, parameter] = ops.parents;
        let (pass, place) = ops.state;
        if let Some(gradient) = pass.gradient(place, &seed)
            && let Some(parameter) = parameter
        {
            grads.register::<Group>(parameter.id, gradient);
        }
        if let Some(before) = before {
            grads.register::<Group>(before.id, seed);
        }
    }
}

/// A backward pass on the device's tape, which all links of a chain share.
#[derive(Debug, Clone)]
struct Pass(Arc<Mutex<State>>);

#[derive(Debug)]
enum State {
    Ahead(Option<Ahead>),
    /// The gradients, unscaled. None of them after an overflow.
    Done(Vec<Option<FloatTensor<Group>>>),
}

impl Pass {
    /// The gradient of the leaf at this place, where the gradient of the loss is `seed`. The first call
    /// runs the backward pass.
    fn gradient(&self, place: usize, seed: &FloatTensor<Group>) -> Option<FloatTensor<Group>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Ahead(ahead) = &mut *state {
            let ahead = ahead.take().expect("a pass that runs once");
            *state = State::Done(ahead.gradients(seed.clone()));
        }
        match &mut *state {
            State::Done(gradients) => gradients.get_mut(place)?.take(),
            State::Ahead(_) => unreachable!("the pass has run"),
        }
    }
}

/// What a backward pass needs.
#[derive(Debug)]
struct Ahead {
    loss: FloatTensor<Group>,
    leaves: Vec<FloatTensor<Group>>,
    scale: f32,
}

impl Ahead {
    /// Runs the pass, where the gradient of the loss is `seed`.
    fn gradients(self, seed: FloatTensor<Group>) -> Vec<Option<FloatTensor<Group>>> {
        let seed = Group::float_mul_scalar(seed, self.scale.into());
        ask(Group::float_mul(self.loss, seed), Ask::Backward);
        let leaves = self.leaves.into_iter();
        let mut unscaled: Vec<_> = leaves
            .map(|leaf| {
                let gradient = ask(leaf, Ask::Gradient);
                take_found().then(|| Group::float_mul_scalar(gradient, (1.0 / self.scale).into()))
            })
            .collect();
        forget_gradients();
        let sums = unscaled.iter().flatten().cloned().map(Group::float_sum);
        let total = sums.reduce(Group::float_add).map(|total| {
            let data = try_read_sync(Group::float_into_data(total)).expect("a device that answers");
            data.expect("a number").iter::<f32>().sum::<f32>()
        });
        if total.is_some_and(|total| !total.is_finite()) {
            unscaled.clear();
        }
        unscaled
    }
}

/// The parameters of a model that are trained, and their leaves on the device's tape.
#[derive(Default)]
struct Tracked {
    parameters: Vec<Recorded>,
    leaves: Vec<FloatTensor<Group>>,
}

impl ModuleMapper for Tracked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val();
        if !value.is_require_grad() {
            return param;
        }
        let DispatchTensor { kind, autodiff } = value.into_dispatch();
        let parameter = recorded(kind);
        let leaf = ask(parameter.primitive().clone(), Ask::Track);
        self.parameters.push(parameter);
        self.leaves.push(leaf.clone());
        let kind = on_client(Autodiff::<Group>::from_inner(leaf));
        let inside = Tensor::from_dispatch(DispatchTensor { kind, autodiff });
        Param::initialized(ParamId::new(), inside)
    }
}

/// A tensor of an autodiff device of this process.
fn recorded(kind: DispatchTensorKind) -> Recorded {
    if let DispatchTensorKind::Autodiff(kind) = kind
        && let DispatchTensorKind::Group(BackendTensor::Autodiff(tensor)) = *kind
    {
        return tensor;
    }
    panic!("expected a tensor of an autodiff device of this process")
}

fn on_client(tensor: Recorded) -> DispatchTensorKind {
    let tensor = BackendTensor::Autodiff(tensor);
    DispatchTensorKind::Autodiff(Box::new(DispatchTensorKind::Group(tensor)))
}

fn ask(tensor: FloatTensor<Group>, ask: Ask) -> FloatTensor<Group> {
    let [lower, upper] = ask.bounds();
    Group::float_clamp(tensor, lower, upper)
}
