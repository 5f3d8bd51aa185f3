//! Finds the first operation with a non-finite result: on request, and where f16 overflows at any loss scale. Costs a
//! read-back from the device after every operation.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem;

use burn_amp_core::{Overflow, Watched};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata, try_read_sync};

use super::{FiniteCheck, leaf_of};
use crate::policy::{Class, Op, short};
use crate::precision::{inspecting, is_in_backward, is_inspecting, keeps_dtypes};
use crate::tensor::{AmpTensor, Below, Side, at_least_f32};
use crate::{Anomaly, AnomalyPass};

/// The findings so far in this thread's pass.
#[derive(Default)]
struct Pass {
    found: Watched,
    /// Whether a gradient was found that is not finite.
    has_gradient: bool,
    /// Whether anomaly detection is on. Otherwise only what overflows is looked for.
    detects: bool,
    /// The current operation of the forward pass.
    op: Option<&'static str>,
    /// The operation whose backward step runs.
    step: Option<&'static str>,
    /// The node of the last parameter used by an operation of the forward pass.
    leaf: Option<u64>,
    /// How many calls of an operation on operands of a last dimension there were.
    calls: HashMap<(&'static str, usize), u32>,
    /// The largest magnitude of the current operation's operands, and whether all are finite.
    largest: f32,
    finite: bool,
}

thread_local! {
    /// Thread-local, because a pass runs on one thread: Burn's operations have no argument for the
    /// findings of earlier operations.
    static WATCHED: RefCell<Pass> = RefCell::default();
}

/// Takes what was found since the last call.
pub(crate) fn take() -> Watched {
    WATCHED.take().found
}

/// Ends a backward pass that no step reports: the log has its anomalies. Those of a forward pass may belong to
/// the next step, if there `are_steps`.
pub(crate) fn end_unreported(are_steps: bool) {
    let is_next = |anomaly: &Anomaly| are_steps && anomaly.pass == AnomalyPass::Forward;
    let ended = WATCHED.with_borrow_mut(|watched| {
        if !are_steps {
            watched.found.overflows.clear();
            watched.has_gradient = false;
        }
        let found = &mut watched.found;
        let ended: Vec<_>;
        (found.anomalies, ended) = mem::take(&mut found.anomalies)
            .into_iter()
            .partition(is_next);
        ended
    });
    for anomaly in ended {
        log::warn!("burn-amp: the first non-finite result of a pass: {anomaly}");
    }
}

/// Begins an operation on a watched device, where anomaly detection is on or only overflows are looked for. Returns
/// whether this operation is watched: at `most` so many calls of it on operands of one last dimension are.
#[cold]
pub(crate) fn begins<B: Backend, S: Side<B>>(
    op: &'static str,
    tensors: &[&AmpTensor<B, S>],
    detects: bool,
    most: u32,
) -> bool {
    // The forward pass is watched above autodiff, the backward pass below it.
    if is_inspecting() || !(detects && is_in_backward() || S::RECORDS && !keeps_dtypes()) {
        return false;
    }
    if most != u32::MAX {
        let last = tensors[0].shape().last().copied().unwrap_or(1);
        let is_enough = WATCHED.with_borrow_mut(|watched| {
            let calls = watched.calls.entry((op, last)).or_default();
            *calls = calls.saturating_add(1);
            *calls > most
        });
        if is_enough {
            return false;
        }
    }
    let leaf = leaf_of(tensors.iter().copied());
    WATCHED.with_borrow_mut(|watched| {
        watched.detects = detects;
        watched.op = S::RECORDS.then_some(op).or(watched.op);
        watched.leaf = leaf.or(watched.leaf);
        (watched.largest, watched.finite) = (0.0, true);
    });
    true
}

/// The operation that is recorded, if it is watched.
pub(crate) fn recorded_op() -> Option<&'static str> {
    WATCHED.with_borrow(|watched| watched.op)
}

/// Runs the backward step of a recorded operation.
pub(crate) fn in_step_of<T>(op: Option<&'static str>, step: impl FnOnce() -> T) -> T {
    if op.is_none() {
        return step();
    }
    /// Restores the step around this one, also when the thread unwinds.
    struct Around(Option<&'static str>);
    impl Drop for Around {
        fn drop(&mut self) {
            set_step(self.0);
        }
    }
    let _around = Around(set_step(op));
    step()
}

fn set_step(op: Option<&'static str>) -> Option<&'static str> {
    WATCHED.with_borrow_mut(|watched| mem::replace(&mut watched.step, op))
}

/// Adds an operand of the current operation.
#[cold]
pub(crate) fn operand<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) {
    let detects = WATCHED.with_borrow(|watched| watched.detects);
    let magnitude = magnitude::<B, S>(tensor.unshared().into_primitive(), detects);
    WATCHED.with_borrow_mut(|watched| match magnitude {
        Some(magnitude) => watched.largest = watched.largest.max(magnitude),
        None => watched.finite = false,
    });
}

/// Adds the scalars of the current operation. An infinite scalar is intended, so the result of its
/// operation is no anomaly.
#[cold]
pub(crate) fn scalars(scalars: &[f64]) {
    WATCHED.with_borrow_mut(|watched| {
        for scalar in scalars {
            watched.largest = watched.largest.max(scalar.abs() as f32);
            watched.finite &= scalar.is_finite();
        }
    });
}

/// Checks the result of the current operation. `of` is what its overflow would be, if the call may be an exception.
#[cold]
pub(crate) fn result<B: Backend, S: Side<B>>(
    op: &Op,
    of: Option<Overflow>,
    tensor: &FloatTensor<B>,
) {
    let pass = if is_in_backward() {
        AnomalyPass::Backward
    } else {
        AnomalyPass::Forward
    };
    let is_moved = op.class() == Class::Move;
    if is_moved || WATCHED.with_borrow(|watched| !watched.finite) {
        return;
    }
    if magnitude::<B, S>(tensor.clone(), false).is_some() {
        return;
    }
    WATCHED.with_borrow_mut(|watched| {
        watched.add(of);
        let anomalies = &mut watched.found.anomalies;
        if !watched.detects || anomalies.iter().any(|found| found.pass == pass) {
            return;
        }
        anomalies.push(Anomaly {
            op: short(op.name).into(),
            pass,
            dtype: format!("{:?}", tensor.dtype()),
            shape: tensor.shape().to_vec(),
            largest_operand: watched.largest,
            step: watched
                .step
                .filter(|_| pass == AnomalyPass::Backward)
                .map(|step| short(step).into()),
            parameter: None,
            leaf: watched.leaf.filter(|_| pass == AnomalyPass::Forward),
        });
    });
}

/// Checks the gradient of the result of a call, or of an operand that it casts to f16.
#[cold]
pub(crate) fn gradient<B: Backend>(of: Overflow, grad: &AmpTensor<B>) {
    // The first one explains those before it.
    if WATCHED.with_borrow(|watched| watched.has_gradient) {
        return;
    }
    let primitive = grad.unshared().into_primitive();
    if magnitude::<B, Below>(primitive, false).is_none() {
        WATCHED.with_borrow_mut(|watched| {
            watched.has_gradient = true;
            watched.add(Some(of));
        });
    }
}

impl Pass {
    fn add(&mut self, overflow: Option<Overflow>) {
        let overflows = &mut self.found.overflows;
        overflows.extend(overflow.filter(|overflow| !overflows.contains(overflow)));
    }
}

/// The largest magnitude, if all values are finite. 0 where it is not `wanted`: it takes a read-back of its own.
fn magnitude<B: Backend, S: Side<B>>(tensor: FloatTensor<B>, wanted: bool) -> Option<f32> {
    // A backend may have no largest value of none.
    if tensor.shape().num_elements() == 0 {
        return Some(0.0);
    }
    inspecting(|| {
        let tensor = B::float_detach(tensor);
        let mut check = FiniteCheck::<B, S>::new(B::float_device(&tensor));
        check.add(tensor.clone());
        if check.read() != [true] {
            return None;
        }
        if !wanted {
            return Some(0.0);
        }
        let largest = B::float_max_abs(at_least_f32::<B, S>(tensor));
        let data = try_read_sync(B::float_into_data(largest))?.ok()?;
        data.iter::<f32>().next()
    })
}
