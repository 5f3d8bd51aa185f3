//! Verifies contractions in half at the shapes that a program uses: samples of a result are compared with sums on the host.
//!
//! The operands and the result of a call are held to the end of its pass, and all samples are then read back at once: a read
//! between would split the block of operations in which fusion and autotune have the kernel stay. LibTorch has neither: there
//! a call is compared before its result is used.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use burn_amp_core::{Begun, Reference, Taken, Verdict, multiplied};
use burn_backend::ops::TransactionPrimitive;
use burn_backend::tensor::FloatTensor;
use burn_backend::{
    Backend, DType, TensorData, TensorMetadata, get_device_settings, try_read_sync,
};

use crate::AmpTensor;
use crate::device::{BackendKind, DeviceContext, DeviceState, Waiting, name};
use crate::policy::{Decision, Mode, Op, Operand, is_half};
use crate::precision::{half_wanted, in_kernel};
use crate::tensor::{Side, TensorFlags};

/// A call whose result is to be compared.
pub(super) struct Held<B: Backend> {
    begun: Begun,
    state: &'static DeviceState,
    op: Op,
    half: DType,
    operands: [FloatTensor<B>; 2],
    bias: Option<FloatTensor<B>>,
}

/// A call that is dropped before it was compared, as when its kernel panics, is compared another time.
impl<B: Backend> Drop for Held<B> {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// A call with its result.
type Computed<B> = (Held<B>, FloatTensor<B>);

/// What was verified of a call: a decision in the place of this one if the device is wrong, and whether to compare the call.
pub(super) fn verified<B: Backend, S: Side<B>>(
    op: &Op,
    context: &DeviceContext,
    tensors: &[&AmpTensor<B, S>],
    operands: &[Operand],
    decision: Decision,
    decide_inexact: impl FnOnce(DType) -> Decision,
) -> (Decision, Option<Box<Held<B>>>) {
    let half = decision.operands.unwrap_or(operands[0].dtype);
    let state = context.state;
    let shapes: Vec<_> = tensors.iter().map(|tensor| tensor.shape()).collect();
    // Where the device is in FP32, half is the program's own, and stays so.
    let is_off = context.mode == Mode::Off
        && !operands
            .iter()
            .any(|operand| operand.flags.contains(TensorFlags::GRADIENT));
    if !is_half(half) || is_off || shapes.iter().any(|shape| shape.contains(&0)) {
        return (decision, None);
    }
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    // Without the bias.
    let is_forward = !op.is_backward();
    let known = if is_forward {
        &shapes[..2]
    } else {
        &shapes[..]
    };
    let may_begin = !state.waiting().is_off();
    let found = state.exceptions().verified(op, half, known, may_begin);
    let decision = match found.is_wrong {
        true => decide_inexact(half),
        false => decision,
    };
    let held = found.begun.map(|begun| {
        let primitive = |tensor: &AmpTensor<B, S>| tensor.unshared().into_primitive();
        // Another operand stands in for an absent bias.
        let bias = tensors.get(2).filter(|bias| {
            is_forward && !decision.only_contracts && !std::ptr::eq(**bias, tensors[1])
        });
        Box::new(Held {
            begun,
            state,
            op: *op,
            half,
            operands: multiplied(op).map(|operand| primitive(tensors[operand])),
            bias: bias.map(|bias| primitive(bias)),
        })
    });
    (decision, held)
}

impl<B: Backend> Held<B> {
    /// Whether the call is compared before its result is used, and not at the end of the pass.
    pub(super) fn is_at_once(&self) -> bool {
        BackendKind::of::<B>(&B::float_device(&self.operands[0])).is_libtorch
    }

    /// Compares the result of the call. Returns whether the result is wrong.
    #[cold]
    pub(super) fn finds_wrong(self, result: &FloatTensor<B>) -> bool {
        let (device, state) = (B::float_device(result), self.state);
        in_kernel(|| judge::<B>(state, &device, vec![(self, result.clone())]))
    }

    /// Has the result of the call compared at the end of the pass, if there is room for it.
    #[cold]
    pub(super) fn wait(self, result: &FloatTensor<B>) {
        let tensors = self.operands.iter().chain(&self.bias).chain([result]);
        let bytes = tensors.map(|tensor| tensor.shape().num_elements() * tensor.dtype().size());
        let bytes: usize = bytes.sum();
        if bytes > Waiting::BYTES {
            return self.end(Some(Verdict::Silent));
        }
        let waiting = self.state.waiting();
        let computed: Computed<B> = (self, result.clone());
        waiting.add(bytes, computed);
    }

    /// Ends the comparison, if it has not ended yet.
    fn end(&self, verdict: Option<Verdict>) {
        self.state
            .exceptions()
            .end_verifications([(self.begun, verdict)]);
    }
}

/// Compares what waits on a device: before a program reads from it.
#[inline]
fn compare_waiting<B: Backend>(device: &B::Device) {
    if half_wanted() {
        let state = DeviceState::of::<B>(device);
        compare::<B>(state, device, state.waiting().take(None));
    }
}

/// A pass of a layer below autodiff is over: a program reads from the device, or waits for it.
#[inline]
pub(crate) fn ends_pass<B: Backend, S: Side<B>>(device: impl FnOnce() -> B::Device) {
    if !S::RECORDS && half_wanted() {
        compare_waiting::<B>(&device());
    }
}

/// Compares what waits on the device of a loss, and what this thread had computed on others: at the end of a backward pass.
#[inline]
pub(crate) fn compare_pass<B: Backend>(device: &B::Device) {
    if half_wanted() {
        compare_waiting::<B>(device);
        let this = Some(thread::current().id());
        for (device, state) in DeviceState::others::<B>(device) {
            compare::<B>(state, &device, state.waiting().take(this));
        }
    }
}

fn compare<B: Backend>(state: &DeviceState, device: &B::Device, waiting: Vec<Computed<B>>) {
    if !waiting.is_empty() {
        in_kernel(|| judge(state, device, waiting));
    }
}

/// Compares the calls with a reference. Returns whether one of them is wrong.
#[cold]
fn judge<B: Backend>(state: &DeviceState, device: &B::Device, waiting: Vec<Computed<B>>) -> bool {
    let exceptions = state.exceptions().named(|| name::<B>(device));
    state.statistics().read_back();
    let compared = catch_unwind(AssertUnwindSafe(|| verdicts::<B>(device, &waiting)));
    let Ok(Some(verdicts)) = compared else {
        if state.waiting().turn_off() {
            log::warn!(
                "burn-amp: samples of contractions could not be read back from {}: its kernels are not verified",
                name::<B>(device)
            );
        }
        return false;
    };
    let is_wrong = verdicts
        .iter()
        .any(|of| matches!(of, Verdict::Wrong { .. }));
    let begun = waiting.iter().map(|(held, _)| held.begun);
    exceptions.end_verifications(begun.zip(verdicts.into_iter().map(Some)));
    is_wrong
}

/// Reads the samples of all calls at once. `None` if they cannot be read.
fn verdicts<B: Backend>(device: &B::Device, waiting: &[Computed<B>]) -> Option<Vec<Verdict>> {
    let int_dtype = get_device_settings::<B>(device).int_dtype;
    let select = |tensor: FloatTensor<B>, axis: usize, indices: &[usize]| {
        let indices: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
        let data = TensorData::new(indices.clone(), [indices.len()]);
        let indices = B::int_from_data(data.convert_dtype(int_dtype.into()), device);
        B::float_select(tensor, axis, indices)
    };
    let take = |tensor: FloatTensor<B>, taken: &Taken| {
        let some = taken.iter();
        some.fold(tensor, |tensor, (axis, indices)| {
            match indices.iter().copied().eq(0..tensor.shape()[*axis]) {
                true => tensor,
                false => select(tensor, *axis, indices),
            }
        })
    };
    let mut reads = Vec::new();
    let mut references = Vec::new();
    for (held, result) in waiting {
        let shapes = held.operands.each_ref().map(|operand| operand.shape());
        let [first, second] = shapes.each_ref().map(|shape| &shape[..]);
        let reference = Reference::of(&held.op, [first, second], &result.shape());
        if let Some(reference) = &reference {
            let [one, other] = &held.operands;
            for (tensor, taken) in [one, other, result].into_iter().zip(reference.taken()) {
                reads.push(take(tensor.clone(), taken));
            }
            reads.extend(
                held.bias
                    .clone()
                    .map(|bias| select(bias, 0, reference.of_bias())),
            );
        }
        references.push((reference, held.half, held.bias.is_some()));
    }
    let read = TransactionPrimitive::new(reads, vec![], vec![], vec![]);
    let data = try_read_sync(B::tr_execute(read))?.ok()?;
    let mut data = data.read_floats.iter();
    let mut values = || -> Option<Vec<f32>> { Some(data.next()?.iter::<f32>().collect()) };
    let verdict = |(reference, half, has_bias): (Option<Reference>, DType, bool)| {
        // What is too large to be summed tells nothing.
        let Some(reference) = reference else {
            return Some(Verdict::Silent);
        };
        let [one, other, out] = [values()?, values()?, values()?];
        let bias = if has_bias { Some(values()?) } else { None };
        Some(reference.compared(half, [&one, &other, &out], bias.as_deref()))
    };
    references.into_iter().map(verdict).collect()
}
