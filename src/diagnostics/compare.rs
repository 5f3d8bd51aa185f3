//! Half precision beside FP32, call by call: what an operation in half gives, and what FP32 gives on the same operands.
//!
//! Each call keeps some values of its result, so that memory is bounded and nothing stays on the device.

use std::cell::RefCell;

use burn_backend::{Backend, TensorMetadata, try_read_sync};

use super::leaf_of;
use crate::policy::short;
use crate::precision::{full_precision, inspecting, is_in_backward, is_inspecting, keeps_dtypes};
use crate::tensor::{AmpTensor, Side};

/// A call of an operation in a forward pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// The name, without `float_`.
    pub op: &'static str,
    /// The shapes of the float operands.
    pub shapes: Vec<Vec<usize>>,
    /// The node of the first parameter among the operands.
    pub leaf: Option<u64>,
    /// Values of the result, from all of its parts.
    pub values: Vec<f64>,
    /// The distance of these values from those in FP32 on the same operands, as a share of the latter.
    pub added: f64,
}

/// The calls of a pass.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub calls: Vec<Call>,
    /// How many more there were.
    pub more: usize,
    /// Whether each call is computed in FP32 as well.
    compares: bool,
}

/// So many calls of a pass are kept.
const CALLS: usize = 20_000;
/// So many values of a result are kept.
const VALUES: usize = 256;

thread_local! {
    /// Thread-local, as a pass runs on one thread, and Burn's operations have no argument for it.
    static CALLED: RefCell<Option<Calls>> = const { RefCell::new(None) };
}

/// Runs a forward pass. Returns its calls of operations above autodiff. Each is computed in FP32, too, if
/// `compares`.
#[cfg(feature = "train")]
pub(crate) fn recorded<T>(compares: bool, pass: impl FnOnce() -> T) -> (T, Calls) {
    /// Ends the record, also when the thread unwinds.
    struct Ended;
    impl Drop for Ended {
        fn drop(&mut self) {
            CALLED.take();
        }
    }
    let _ended = Ended;
    let calls = Calls {
        compares,
        ..Calls::default()
    };
    CALLED.set(Some(calls));
    let out = pass();
    (out, CALLED.take().unwrap_or_default())
}

/// Whether an operation of this side is recorded.
#[inline]
pub(crate) fn is_on<B: Backend, S: Side<B>>() -> bool {
    S::RECORDS
        && CALLED.with_borrow(Option::is_some)
        && !(is_inspecting() || is_in_backward() || keeps_dtypes())
}

/// An operand of the call in FP32: without a tape, so that its gradients are not those of the pass.
pub(crate) fn operand<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> AmpTensor<B, S> {
    let detach = |tensor| inspecting(|| B::float_detach(tensor));
    let unrounded = tensor.unrounded().map(|unrounded| unrounded.map(detach));
    AmpTensor::new(detach(tensor.unshared().into_primitive()), tensor.flags())
        .with_unrounded(unrounded)
}

/// Begins the record of a call on these operands, as far as they are there. `in_fp32` computes it.
pub(crate) fn begin<B: Backend, S: Side<B>>(
    op: &'static str,
    tensors: &[Option<&AmpTensor<B, S>>],
    in_fp32: impl FnOnce() -> AmpTensor<B, S>,
) -> Call {
    let compares =
        CALLED.with_borrow(|called| called.as_ref().is_some_and(|called| called.compares));
    let exact = compares.then(|| values(&full_precision(|| inspecting(in_fp32))));
    let tensors = || tensors.iter().copied().flatten();
    Call {
        op: short(op),
        shapes: tensors().map(|t| t.shape().to_vec()).collect(),
        leaf: leaf_of(tensors()),
        values: exact.unwrap_or_default(),
        added: 0.0,
    }
}

/// Ends the record of a call with its result.
pub(crate) fn end<B: Backend, S: Side<B>>(call: Call, result: &AmpTensor<B, S>) {
    let result = values(result);
    let added = match call.values.is_empty() {
        true => 0.0,
        false => distance(&result, &call.values),
    };
    let call = Call {
        values: result,
        added,
        ..call
    };
    CALLED.with_borrow_mut(|called| match called {
        Some(called) if called.calls.len() < CALLS => called.calls.push(call),
        Some(called) => called.more += 1,
        None => {}
    });
}

/// Some values of a tensor, evenly spaced. None where nothing can be read back. A half tensor that FP32 computes again has
/// FP32's values here: an operation that reads the tensor in half rounds them.
fn values<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> Vec<f64> {
    let read = || {
        let values = operand(tensor).computed_in_fp32().into_primitive();
        try_read_sync(B::float_into_data(values))?.ok()
    };
    let Some(data) = inspecting(read) else {
        return Vec::new();
    };
    let step = data.num_elements().div_ceil(VALUES).max(1);
    // One value of each stretch, at another place in each: evenly spaced ones could all be of one column.
    let is_taken = |i: usize| i % step == (i / step).wrapping_mul(0x9e37_79b1) % step;
    let values = data.iter::<f64>().enumerate();
    values
        .filter(|(i, _)| is_taken(*i))
        .map(|(_, value)| value)
        .collect()
}

/// The distance of values from exact ones, as a share of the latter: 0 where all are equal, and infinite where some are
/// finite in one of the two alone, or all exact ones are 0.
pub(crate) fn distance(values: &[f64], exact: &[f64]) -> f64 {
    let is_equal = |one: f64, other: f64| one == other || one.is_nan() && other.is_nan();
    let (mut off, mut norm) = (0.0, 0.0);
    for (&one, &other) in values.iter().zip(exact) {
        if other.is_finite() {
            norm += other.powi(2);
        }
        if !is_equal(one, other) {
            off += (one - other).powi(2);
        }
    }
    match (off / norm).sqrt() {
        _ if off == 0.0 => 0.0,
        share if share.is_finite() => share,
        _ => f64::INFINITY,
    }
}

/// Runs an operation in `$run`, and records it if its result is one float tensor.
macro_rules! recorded_call {
    (FloatTensor, $op:ident, $tensors:expr, $in_fp32:expr, $run:expr) => {{
        let call = $crate::diagnostics::compare::is_on::<B, S>()
            .then(|| $crate::diagnostics::compare::begin(stringify!($op), &$tensors, || $in_fp32));
        let out = $run;
        if let Some(call) = call {
            $crate::diagnostics::compare::end(call, &out);
        }
        out
    }};
    ($out:ident, $op:ident, $tensors:expr, $in_fp32:expr, $run:expr) => {
        $run
    };
}

pub(crate) use recorded_call;
