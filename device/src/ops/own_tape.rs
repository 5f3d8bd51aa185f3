//! A proof, only for tests: a tape below the policy, between two layers of [`Amp`], and the requests that a
//! client in the same process sends to it in band. `docs/own_tape.md` has the results.

use std::any::Any;
use std::cell::{Cell, RefCell};

use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, FloatDType, Scalar};
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_dispatch::backends::{Autodiff, Flex};

use crate::device::BelowTape;
use crate::{Amp, AmpTensor};

/// Below the tape, where its formulas run.
type Below = Amp<Flex, BelowTape>;

/// The tape. The layer above decides the precision of each operation, so its casts are recorded.
type Tape = Autodiff<Below>;

/// The backend of a group with a tape of its own, in the precision of `P`.
pub(crate) type OnTape<P> = Amp<Tape, P>;

/// A client's request for a tensor, sent as a clamp that is the identity on every other device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// The tensor as a leaf of the tape.
    Track,
    /// The tensor on no tape.
    Detach,
    /// To run the backward pass of a loss. Its gradients stay with the thread.
    Backward,
    /// The gradient of a leaf. [`take_found`] then returns whether there is one.
    Gradient,
}

thread_local! {
    /// The gradients of a backward pass until the client has fetched them. Thread-local: a client runs one
    /// step on its own thread.
    static GRADIENTS: RefCell<Option<Gradients>> = const { RefCell::new(None) };
    static FOUND: Cell<bool> = const { Cell::new(false) };
}

/// Whether the last leaf had a gradient.
pub(crate) fn take_found() -> bool {
    FOUND.take()
}

/// Drops the gradients that the last backward pass left.
pub(crate) fn forget_gradients() {
    GRADIENTS.take();
}

impl Ask {
    const ALL: [Self; 4] = [Self::Track, Self::Detach, Self::Backward, Self::Gradient];
    /// No mark of a region has this bound.
    const LOWER: f64 = (-f64::MAX).next_up();

    pub(crate) fn bounds(self) -> [Scalar; 2] {
        let place = Self::ALL.iter().position(|ask| *ask == self);
        let below = 1 + place.expect("every one is among all") as u64;
        let upper = f64::from_bits(f64::MAX.to_bits() - below);
        [Self::LOWER.into(), upper.into()]
    }

    pub(super) fn of(lower: Scalar, upper: Scalar) -> Option<Self> {
        let bounds = [lower, upper].map(|bound| bound.elem::<f64>());
        Self::ALL
            .into_iter()
            .find(|ask| ask.bounds().map(|bound| bound.elem::<f64>()) == bounds)
    }
}

/// The answer to a client's request: the tensor itself if the backend has no tape.
pub(super) fn answered<B: Backend>(tensor: AmpTensor<B>, ask: Ask) -> AmpTensor<B> {
    let mut tensor = Some(tensor);
    let any: &mut dyn Any = &mut tensor;
    if let Some(on_tape) = any.downcast_mut::<Option<AmpTensor<Tape>>>() {
        *on_tape = on_tape.take().map(|tensor| answer(tensor, ask));
    }
    tensor.expect("an answer")
}

fn answer(tensor: AmpTensor<Tape>, ask: Ask) -> AmpTensor<Tape> {
    let untracked = |tensor| AmpTensor::plain(Tape::from_inner(tensor));
    match ask {
        Ask::Track => {
            let value = Tape::from_inner(Tape::inner(tensor.into_primitive()));
            AmpTensor::plain(Tape::float_set_require_grad(value, true))
        }
        Ask::Detach => untracked(Tape::inner(tensor.into_primitive())),
        Ask::Backward => {
            let gradients = Tape::backward(tensor.primitive.clone());
            GRADIENTS.set(Some(gradients));
            tensor
        }
        Ask::Gradient => {
            let gradient = GRADIENTS.with_borrow_mut(|gradients| {
                Tape::grad_remove(&tensor.primitive, gradients.as_mut()?)
            });
            FOUND.set(gradient.is_some());
            match gradient {
                Some(gradient) => untracked(Below::float_cast(gradient, FloatDType::F32)),
                None => tensor,
            }
        }
    }
}

/// A ReLU. On the tape, this ReLU keeps its result, which the next layer keeps anyway. Burn's ReLU keeps its
/// operand.
pub(super) fn relu<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let mut tensor = Some(tensor);
    let any: &mut dyn Any = &mut tensor;
    match any.downcast_mut::<Option<FloatTensor<Tape>>>() {
        Some(on_tape) => {
            *on_tape = on_tape.take().map(recorded_relu);
            tensor.expect("a result")
        }
        None => B::relu(tensor.expect("an operand")),
    }
}

fn recorded_relu(tensor: FloatTensor<Tape>) -> FloatTensor<Tape> {
    #[derive(Debug)]
    struct Relu;

    #[expect(clippy::missing_trait_methods)] // Burn's `prepare` is right.
    impl<B: Backend> Backward<B, 1> for Relu {
        type State = FloatTensor<B>;

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                B::relu_backward(ops.state, grad)
            });
        }
    }

    let (operand, node) = tensor.into_parts();
    let result = Below::relu(operand);
    let relu = Backward::<Below, 1>::prepare::<NoCheckpointing>(Relu, [node]);
    match relu.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(result.clone(), result),
        OpsKind::UnTracked(prep) => prep.finish(result),
    }
}
