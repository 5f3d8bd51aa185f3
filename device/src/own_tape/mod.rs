//! A proof, only for tests: `loss.backward()` with a tape of this crate behind a chain of the client's nodes.
//! `docs/own_tape.md` has the results.

mod tests;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{TensorMetadata, try_read_sync};
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind};
use burn_dispatch::backends::{Autodiff, Group};
use burn_dispatch::devices::FlexDevice;
use burn_dispatch::{BackendTensor, DispatchDevice, DispatchTensor, DispatchTensorKind};
use burn_group::GroupDevice;

use crate::device::{InForce, Session};
use crate::local;
use crate::ops::own_tape::{Ask, OnTape, forget_gradients, take_found};

/// A tensor of the client's own tape.
type Recorded = FloatTensor<Autodiff<Group>>;

/// A device of this process whose backend has its own tape.
fn on_tape<P: Session>() -> Device {
    let group = GroupDevice::new::<OnTape<P>>(&[FlexDevice]).expect("a group of one device");
    let device = Device::new(DispatchDevice::from(group));
    if let Some(InForce::Precision(precision)) = P::IN_FORCE {
        local::know(&device, precision);
    }
    device
}

/// The loss that `f` computes with the model. The tape of the model's device computes the gradients at once,
/// from the loss times `scale` if there is a scale. The backward pass of the loss only returns these
/// gradients; after an overflow it returns none.
///
/// `f` gets the model with parameters that the client's tape does not track, on the same autodiff
/// device: dropout and batch norm train.
fn loss<M: Module>(model: &M, scale: Option<f32>, f: impl FnOnce(M) -> Tensor<1>) -> Tensor<1> {
    let mut tracked = Tracked::default();
    let inside = model.clone().map(&mut tracked);
    let DispatchTensor { kind, autodiff } = f(inside).into_dispatch();
    let loss = recorded(kind);
    let value = ask(loss.primitive().clone(), Ask::Detach);
    let gradients = gradients(loss.primitive().clone(), tracked.leaves, scale);
    // If `f` captured a tensor on the client's tape, the first link passes the gradient on to that tape.
    let parameters = tracked.parameters.into_iter().zip(gradients);
    let loss = parameters.fold(loss, |loss, (parameter, gradient)| {
        let nodes = [loss.node(), parameter.node()];
        let link = Backward::<Group, 2>::prepare::<NoCheckpointing>(Link, nodes);
        match link.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(gradient, value.clone()),
            OpsKind::UnTracked(prep) => prep.finish(value.clone()),
        }
    });
    Tensor::from_dispatch(DispatchTensor {
        kind: on_client(loss),
        autodiff,
    })
}

/// A tensor that leaves the closure of a [`loss`], for example for metrics on another thread.
#[cfg(feature = "train")]
fn off_tape<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let DispatchTensor { kind, autodiff } = tensor.into_dispatch();
    let value = ask(recorded(kind).into_primitive(), Ask::Detach);
    let kind = on_client(Autodiff::<Group>::from_inner(value));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff })
}

/// One parameter's link in the chain that is the loss. Its state is the gradient.
#[derive(Debug)]
struct Link;

impl Backward<Group, 2> for Link {
    type State = Option<FloatTensor<Group>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let seed = grads.consume::<Group>(&ops.node);
        let [before, parameter] = ops.parents;
        if let (Some(parameter), Some(gradient)) = (parameter, ops.state) {
            let factor = Group::float_reshape(seed.clone(), vec![1; gradient.rank()].into());
            grads.register::<Group>(parameter.id, Group::float_mul(gradient, factor));
        }
        if let Some(before) = before {
            grads.register::<Group>(before.id, seed);
        }
    }
}

/// The gradients of the leaves, each `None` after an overflow.
fn gradients(
    loss: FloatTensor<Group>,
    leaves: Vec<FloatTensor<Group>>,
    scale: Option<f32>,
) -> Vec<Option<FloatTensor<Group>>> {
    let times = |tensor, factor: f32| match scale {
        Some(_) => Group::float_mul_scalar(tensor, factor.into()),
        None => tensor,
    };
    let scale = scale.unwrap_or(1.0);
    ask(times(loss, scale), Ask::Backward);
    let gradients = leaves.into_iter().map(|leaf| {
        let gradient = ask(leaf, Ask::Gradient);
        take_found().then(|| times(gradient, 1.0 / scale))
    });
    let mut gradients: Vec<_> = gradients.collect();
    forget_gradients();
    if scale != 1.0 && !are_finite(&gradients) {
        gradients.fill_with(|| None);
    }
    gradients
}

/// Whether the sum of all values is finite.
fn are_finite(gradients: &[Option<FloatTensor<Group>>]) -> bool {
    let sums = gradients.iter().flatten().cloned().map(Group::float_sum);
    let Some(total) = sums.reduce(Group::float_add) else {
        return true;
    };
    let data = try_read_sync(Group::float_into_data(total)).expect("a device that answers");
    data.expect("a number").iter::<f32>().all(f32::is_finite)
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
