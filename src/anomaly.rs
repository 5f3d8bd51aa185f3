//! Which operation's result was the first that was not finite: looked for on request, at the cost
//! of reading back from the device after every operation.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use serde::{Deserialize, Serialize};

use crate::autodiff::tape;
use crate::finite::FiniteCheck;
use crate::ops::Op;
use crate::policy::Class;
use crate::precision::{Restore, is_following};
use crate::tensor::at_least_f32;
use crate::{AmpTensor, device};

/// The first operation of a pass with finite operands and a result that is not finite; looked for
/// where [`AmpConfig::with_anomaly_detection`](crate::AmpConfig::with_anomaly_detection) is on.
///
/// Masks of minus infinity, and operations that only move values, are none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Anomaly {
    /// The operation, as the backend calls it: `linear`.
    pub op: String,
    /// The pass that it was in.
    pub pass: Pass,
    /// The dtype of its result: `F16`.
    pub dtype: String,
    /// The shape of its result.
    pub shape: Vec<usize>,
    /// The largest magnitude among the values of its operands, read in FP32.
    pub largest_operand: f32,
    /// In the forward pass the path of its parameter in the module, or that of the last operation
    /// before it that had one. As for [`LastStep::parameters`](crate::LastStep::parameters), it is
    /// there where the module was at hand.
    pub parameter: Option<String>,
    /// The node of that parameter.
    #[serde(skip)]
    pub(crate) leaf: Option<u64>,
}

#[cfg(feature = "train")]
impl Anomaly {
    /// Says at which parameter it was, given the nodes of those of the module.
    pub(crate) fn place(&mut self, nodes: &[(u64, String)]) {
        let of_leaf = nodes.iter().find(|(node, _)| Some(*node) == self.leaf);
        if let Some((_, path)) = of_leaf {
            self.parameter = Some(path.clone());
        }
    }
}

/// The two passes of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From the inputs to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        write!(
            f,
            "{pass}: {} {:?} in {}, operands up to {:e}",
            self.op, self.shape, self.dtype, self.largest_operand
        )?;
        match &self.parameter {
            Some(parameter) => write!(f, ", at {parameter}"),
            None => Ok(()),
        }
    }
}

/// Whether a device was ever configured to be watched.
static WANTED: AtomicBool = AtomicBool::new(false);

/// The environment variable that has every device watched.
const VARIABLE: &str = "BURN_AMP_DETECT_ANOMALY";

/// Whether the environment asks for it.
pub(crate) fn is_wanted_by_environment() -> bool {
    static ASKED: LazyLock<bool> = LazyLock::new(|| {
        std::env::var(VARIABLE).is_ok_and(|value| !matches!(value.trim(), "" | "0" | "false"))
    });
    *ASKED
}

/// From now on operations ask whether their device is watched.
pub(crate) fn want() {
    WANTED.store(true, Ordering::Relaxed);
}

/// What is known of the pass of this thread.
#[derive(Default)]
struct Watched {
    /// The first of each pass.
    found: Vec<Anomaly>,
    /// The node of the last parameter that an operation of the forward pass took.
    leaf: Option<u64>,
    /// The operands of the operation at hand.
    largest: f32,
    finite: bool,
}

thread_local! {
    static WATCHED: RefCell<Watched> = RefCell::default();
    static IN_BACKWARD: Cell<bool> = const { Cell::new(false) };
    /// While a tensor is looked at, which is done with operations.
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a backward pass.
pub(crate) fn in_backward<T>(pass: impl FnOnce() -> T) -> T {
    let _in_backward = Restore::set(&IN_BACKWARD, true);
    pass()
}

/// What was found since the last time.
pub(crate) fn take() -> Vec<Anomaly> {
    match WANTED.load(Ordering::Relaxed) {
        true => WATCHED.take().found,
        false => Vec::new(),
    }
}

/// An operation begins; whether it is watched.
#[inline]
pub(crate) fn begins<B: Backend>(tensors: &[&AmpTensor<B>]) -> bool {
    WANTED.load(Ordering::Relaxed) && watches(tensors)
}

#[cold]
fn watches<B: Backend>(tensors: &[&AmpTensor<B>]) -> bool {
    let device = tensors[0].device();
    // The forward pass is watched above autodiff, and the backward pass below.
    let here = match IN_BACKWARD.get() {
        true => true,
        false => B::ad_enabled(&device) && !is_following(),
    };
    if !here || LOOKING.get() || !device::current::<B>(&device).is_watched() {
        return false;
    }
    let mut leaves = tensors
        .iter()
        .filter(|t| B::float_is_require_grad(&t.primitive));
    let leaf = leaves.find_map(|leaf| tape::id::<B, AmpTensor<B>>(leaf, &device));
    WATCHED.with_borrow_mut(|watched| {
        watched.leaf = leaf.or(watched.leaf);
        (watched.largest, watched.finite) = (0.0, true);
    });
    true
}

/// An operand of the operation at hand.
#[cold]
pub(crate) fn operand<B: Backend>(tensor: &AmpTensor<B>) {
    let magnitude = magnitude::<B>(tensor.primitive.clone());
    WATCHED.with_borrow_mut(|watched| match magnitude {
        Some(magnitude) => watched.largest = watched.largest.max(magnitude),
        None => watched.finite = false,
    });
}

/// The result of the operation at hand.
#[cold]
pub(crate) fn result<B: Backend>(op: Op, tensor: &FloatTensor<B>) {
    let pass = match IN_BACKWARD.get() {
        true => Pass::Backward,
        false => Pass::Forward,
    };
    let is_known = |watched: &Watched| watched.found.iter().any(|found| found.pass == pass);
    let moves = matches!(op.class, Class::Move | Class::Keep);
    if moves || WATCHED.with_borrow(|watched| !watched.finite || is_known(watched)) {
        return;
    }
    if magnitude::<B>(tensor.clone()).is_none() {
        WATCHED.with_borrow_mut(|watched| {
            watched.found.push(Anomaly {
                op: op.name.trim_start_matches("float_").into(),
                pass,
                dtype: format!("{:?}", tensor.dtype()),
                shape: tensor.shape().to_vec(),
                largest_operand: watched.largest,
                parameter: None,
                leaf: watched.leaf.filter(|_| pass == Pass::Forward),
            });
        });
    }
}

/// The largest magnitude, if all values are finite.
fn magnitude<B: Backend>(tensor: FloatTensor<B>) -> Option<f32> {
    let _looking = Restore::set(&LOOKING, true);
    let tensor = B::float_detach(tensor);
    let mut check = FiniteCheck::<B>::new(B::float_device(&tensor));
    check.add(tensor.clone());
    if check.read() != [true] {
        return None;
    }
    let largest = B::float_max_abs(at_least_f32::<B>(tensor));
    let data = burn_backend::read_sync(B::float_into_data(largest)).ok()?;
    data.iter::<f32>().next()
}
