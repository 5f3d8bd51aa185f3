//! An operation under the policy: decided, its operands cast, run on the backend, its result cast and
//! marked. Independent of the forms that the tape keeps.

mod alone;
mod create;
mod plain;
mod probe;
mod verify;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_amp_core::policy::trials::TriedOp;
use burn_amp_core::policy::{Layer, decide};
use burn_amp_core::{Exceptions, Overflow, Overflowed};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};

use crate::device::{self, DeviceContext};
use crate::diagnostics::anomaly;
use crate::policy::{Decision, Mode, Op, Operand, Site, is_half};
use crate::precision::{creates_parameter, half_wanted, in_kernel, keep_dtypes, keeps_dtypes};
use crate::scaler::ScaledLoss;
use crate::tensor::{AmpTensor, Side, Step, converted, learned};
use probe::Probe;

pub(crate) use alone::alone;
pub(crate) use create::{assert_one_autodiff, below, constant, create, in_use, of_program, zeros};
pub(crate) use plain::*;
pub(crate) use verify::{compare_pass, ends_pass};

/// An operation on side `S`, and the policy's decision on it.
pub(crate) struct Call<B: Backend, S> {
    op: Op,
    pub decision: Decision,
    /// The scaler of the scaled loss among the operands, if any.
    scaled: Option<ScaledLoss>,
    /// Whether the operation is watched.
    pub watched: bool,
    /// What an overflow of a watched operation would be, if its calls may be exceptions.
    overflow: Option<Overflow>,
    /// The call, if its result is to be compared with a reference.
    held: Cell<Option<Box<verify::Held<B>>>>,
    layer: PhantomData<fn() -> (B, S)>,
}

impl<B: Backend, S: Side<B>> Call<B, S> {
    /// An operation on these operands. Another operand may stand in for an absent one.
    pub fn new<const N: usize>(op: Op, tensors: [&AmpTensor<B, S>; N]) -> Self {
        Self::of(op, &tensors, &tensors.map(AmpTensor::operand), &[])
    }

    /// An operation on these tensors, with their `operands`, and on these scalars.
    #[inline(never)]
    pub fn of(op: Op, tensors: &[&AmpTensor<B, S>], operands: &[Operand], scalars: &[f64]) -> Self {
        let device = tensors[0].device();
        let context = DeviceContext::of::<B>(&device);
        let at = At {
            tensors,
            context,
            device,
        };
        let length = || {
            let second = tensors.get(1).unwrap_or(&tensors[0]);
            op.length(&tensors[0].shape(), &second.shape())
        };
        let watched = is_watched(op.name, &context, tensors);
        if watched {
            anomaly::scalars(scalars);
        }
        let layer = Layer {
            mode: match keeps_dtypes() || creates_parameter() {
                true => Mode::KeepDtypes,
                false => context.mode,
            },
            is_kernel: !S::RECORDS,
            support: context.in_force.support,
            data_in_half: context.in_force.data_in_half,
            declared: None,
            known: context.known(&op, length),
        };
        let mut decision = decide(&op, operands, scalars, &layer, &at);
        let mut held = None;
        if !S::RECORDS
            && context.in_force.verifies
            && op.is_contraction()
            && decision.rounded.is_none()
        {
            let decide_inexact = |half| {
                let known = layer.known.inexact(op.kind(), half);
                decide(&op, operands, scalars, &Layer { known, ..layer }, &at)
            };
            (decision, held) =
                verify::verified(&op, &context, tensors, operands, decision, decide_inexact);
        }
        let decided = decision;
        if let Some(first) = tensors[0].unrounded() {
            let all = tensors.iter().all(|t| t.unrounded().is_some());
            decision = decision.reading(&op, tensors[0].dtype(), first.functions(), all);
        }
        if decision.is_of_data {
            context.count_data::<B>(&at.device);
        }
        if !S::RECORDS && op.is_backward() && !keeps_dtypes() {
            foreign_pass::<B>(&op, &decision, operands, &at.device);
        }
        Self {
            op,
            decision,
            scaled: S::RECORDS.then(|| scaled_loss(tensors)).flatten(),
            watched,
            held: Cell::new(held),
            overflow: (watched && S::RECORDS && Exceptions::may_overflow(&op)).then(|| {
                // Whether an exception changes the call: it may have FP32 operands anyway.
                let known = layer.known.without_overflow();
                let without = decide(&op, operands, scalars, &Layer { known, ..layer }, &at);
                let casts = |of: &Decision| (of.operands, of.rounded, of.result);
                Overflow {
                    op: op.name,
                    length: length(),
                    of: match casts(&without) == casts(&decided) {
                        true => Overflowed::Result,
                        false => Overflowed::InFp32,
                    },
                }
            }),
            layer: PhantomData,
        }
    }

    /// Records a step, `if` the policy wants it. Returns the operands otherwise, also where the step leaves its
    /// record to Burn.
    pub fn record_if<K: Step<S::Inner, N>, const N: usize>(
        &self,
        condition: bool,
        step: K,
        operands: [FloatTensor<B>; N],
    ) -> Result<FloatTensor<B>, [FloatTensor<B>; N]> {
        if condition {
            S::record(step, operands)
        } else {
            Err(operands)
        }
    }

    /// Casts an operand for the backend's operation.
    #[inline(always)]
    pub fn operand(&self, tensor: AmpTensor<B, S>) -> FloatTensor<B> {
        self.watch(&tensor);
        match (self.decision.operands, self.decision.rounded) {
            (None, _) => tensor.into_primitive(),
            (Some(dtype), None) if tensor.dtype() == dtype => tensor.into_dtype(dtype),
            (Some(dtype), None) => self.probed(S::into_dtype(tensor, dtype)),
            (Some(dtype), Some(half)) => S::cast(S::into_dtype(tensor, half), dtype),
        }
    }

    /// Casts an operand for a recorded formula, which widens half itself: only a cast to half goes on
    /// the tape.
    pub fn recorded_operand(&self, tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
        let half = self.decision.rounded.or(self.decision.operands);
        match half.filter(|dtype| is_half(*dtype) && tensor.dtype() != *dtype) {
            Some(half) => {
                let flags = tensor.flags();
                AmpTensor::new(S::into_dtype(tensor, half), flags)
            }
            // A small number may be lost in a sum that half rounds.
            None if tensor.unrounded().is_some_and(|of| of.functions().is_sum()) => {
                tensor.computed_in_fp32()
            }
            None => tensor,
        }
    }

    /// Runs the backend's operation.
    #[inline(always)]
    pub fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        match self.decision.keeps_dtypes && S::RECORDS {
            true => keep_dtypes(op),
            false => unchanged::<B, S, _>(op),
        }
    }

    /// Runs a contraction, and wraps its result. What is compared at once and found wrong in half runs once more, in FP32.
    pub fn contract<const N: usize>(
        &self,
        operands: [FloatTensor<B>; N],
        run: impl Fn([FloatTensor<B>; N]) -> FloatTensor<B>,
    ) -> AmpTensor<B, S> {
        let held = match self.held.take() {
            Some(held) if held.is_at_once() => held,
            held => {
                self.held.set(held);
                return self.result(self.run(|| run(operands)));
            }
        };
        let again = operands.clone();
        let mut out = self.run(|| run(operands));
        if held.finds_wrong(&out) && again.iter().any(|operand| is_half(operand.dtype())) {
            let dtype = out.dtype();
            let wide = again.map(|operand| converted::<B, S>(operand, DType::F32));
            out = converted::<B, S>(self.run(|| run(wide)), dtype);
        }
        self.result(out)
    }

    /// Checks an operand if the operation is watched. For operands that do not pass through
    /// [`operand`](Call::operand).
    #[inline(always)]
    pub fn watch(&self, tensor: &AmpTensor<B, S>) {
        if self.watched {
            anomaly::operand(tensor);
        }
    }

    /// The same tensor. In a watched pass, its gradient is checked.
    #[inline(always)]
    fn probed(&self, primitive: FloatTensor<B>) -> FloatTensor<B> {
        match self.overflow {
            Some(overflow) => probed::<B, S>(overflow, primitive),
            None => primitive,
        }
    }

    /// Wraps a float result of the backend's operation.
    #[inline(always)]
    pub fn result(&self, primitive: FloatTensor<B>) -> AmpTensor<B, S> {
        if !S::RECORDS
            && let Some(held) = self.held.take()
        {
            held.wait(&primitive);
        }
        let is_wide = self.decision.keeps_wide && primitive.dtype() == DType::F32;
        let wide = is_wide.then(|| primitive.clone());
        self.in_own_dtype(self.in_result_dtype(primitive))
            .with_wide(wide)
    }

    /// Casts a result to the dtype that the policy gives it.
    #[inline(always)]
    pub fn in_result_dtype(&self, primitive: FloatTensor<B>) -> FloatTensor<B> {
        match self.decision.result {
            Some(dtype) if primitive.dtype() != dtype => S::cast(primitive, dtype),
            _ => primitive,
        }
    }

    /// Wraps a float result of a recorded operation, in the result's own dtype.
    #[inline(always)]
    pub fn in_own_dtype(&self, primitive: FloatTensor<B>) -> AmpTensor<B, S> {
        if self.watched {
            let casts = [self.decision.operands, self.decision.rounded];
            let in_f16 = casts.contains(&Some(DType::F16)) || primitive.dtype() == DType::F16;
            // In FP32, only what is an exception is looked at.
            let looked_at = |overflow: &Overflow| in_f16 == (overflow.of == Overflowed::Result);
            let overflow = self.overflow.filter(looked_at);
            anomaly::result::<B, S>(&self.op, overflow, &primitive);
        }
        self.marked(self.probed(primitive))
    }

    /// A tensor with the flags, the terms and the scaler of the result.
    #[inline(always)]
    pub fn marked(&self, primitive: FloatTensor<B>) -> AmpTensor<B, S> {
        AmpTensor::new(primitive, self.decision.flags)
            .with_terms(self.decision.terms)
            .with_scaled(self.scaled.clone())
    }
}

/// The same tensor, whose gradient is checked: in f16, and in FP32 that of an exception.
#[cold]
fn probed<B: Backend, S: Side<B>>(overflow: Overflow, primitive: FloatTensor<B>) -> FloatTensor<B> {
    let of = match (primitive.dtype(), overflow.of) {
        (DType::F16, _) => Overflowed::Gradient,
        (DType::F32, Overflowed::InFp32) => Overflowed::GradientInFp32,
        _ => return primitive,
    };
    if !S::is_tracked(&primitive) {
        return primitive;
    }
    let recorded = S::record(Probe(Overflow { of, ..overflow }), [primitive]);
    recorded.unwrap_or_else(|[primitive]| primitive)
}

/// Logs, once, that a backward function in f16 runs outside of a backward pass of burn-amp's. Autodiff hands nothing
/// else to the layer below that tells a backward pass.
#[cold]
fn foreign_pass<B: Backend>(
    op: &Op,
    decision: &Decision,
    operands: &[Operand],
    device: &B::Device,
) {
    let computed = decision.operands.unwrap_or(operands[0].dtype);
    if computed != DType::F16 && decision.rounded != Some(DType::F16) {
        return;
    }
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !LOGGED.swap(true, Ordering::Relaxed) {
        log::warn!(
            "burn-amp: {} in f16 on {} is part of a backward pass that is not burn-amp's: the program puts its own \
             Autodiff on Amp<..>. Its loss is not scaled, so that small gradients become 0, and no gradient is \
             checked. Give the program AmpAutodiff<..> where it trains, or train in bf16, which needs no loss scale",
            op.name,
            device::name::<B>(device)
        );
    }
}

/// Where an operation runs.
struct At<'a, B: Backend, S> {
    tensors: &'a [&'a AmpTensor<B, S>],
    context: DeviceContext,
    device: B::Device,
}

impl<B: Backend, S: Side<B>> Site<DType> for At<'_, B, S> {
    fn tried(&self, op: TriedOp, half: DType) -> Option<bool> {
        self.context.tried::<B>(&self.device, half, op)
    }

    fn elements(&self, operand: usize) -> usize {
        self.tensors[operand].shape().num_elements()
    }

    fn inner_dimension(&self) -> usize {
        let shape = self.tensors[0].shape();
        shape.last().copied().unwrap_or(1)
    }

    fn is_tracked(&self, operand: usize) -> Option<bool> {
        Some(S::is_tracked(&self.tensors[operand].primitive))
    }
}

/// So many calls of an operation on operands of one last dimension are looked at, where no step was skipped: a recurrent layer
/// makes thousands.
const LOOKS: u32 = 32;

/// Whether anomaly detection checks an operation on these operands.
#[inline(always)]
pub(crate) fn is_watched<B: Backend, S: Side<B>>(
    op: &'static str,
    context: &DeviceContext,
    tensors: &[&AmpTensor<B, S>],
) -> bool {
    context.is_watched() && {
        let most = if context.is_looked_at() {
            LOOKS
        } else {
            u32::MAX
        };
        anomaly::begins(op, tensors, context.in_force.watched, most)
    }
}

/// The scaler of the scaled losses among the operands.
///
/// # Panics
///
/// If two scalers or two scales meet: the gradients of a sum of such losses have no single scale.
fn scaled_loss<B: Backend, S: Side<B>>(tensors: &[&AmpTensor<B, S>]) -> Option<ScaledLoss> {
    let mut losses = tensors.iter().filter_map(|t| t.scaled());
    let first = losses.next()?;
    if let Some(other) = losses.find(|other| !first.is_like(other)) {
        panic!(
            "burn-amp: an operation combines losses of two scalers, scaled by {} and {}: the gradients \
             of the result have no single scale. Add up the losses first, then scale the sum",
            first.scale, other.scale
        )
    }
    Some(first.clone())
}

/// Operands, with the first in place of each absent one.
#[inline(always)]
pub(crate) fn present<T, const N: usize>(tensors: [Option<&T>; N]) -> [&T; N] {
    let first = tensors[0].expect("the first operand is always given");
    tensors.map(|tensor| tensor.unwrap_or(first))
}

/// Runs the backend's operation where nothing is passed to a layer below: recorded, or as a kernel.
#[inline(always)]
pub(crate) fn unchanged<B: Backend, S: Side<B>, T>(op: impl FnOnce() -> T) -> T {
    match S::RECORDS {
        true => op(),
        false => in_kernel(op),
    }
}

/// Runs an operation under the policy, out of line: callers inline only the check whether there is
/// a policy.
#[inline(never)]
pub(crate) fn by_policy<T>(op: impl FnOnce() -> T) -> T {
    op()
}

/// Runs an operation that follows its class, after the check for a policy.
pub(crate) fn checked<B: Backend, S: Side<B>, const N: usize, const M: usize>(
    op: Op,
    operands: [AmpTensor<B, S>; N],
    run: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
) -> [AmpTensor<B, S>; M] {
    const { assert!(N > 0, "an operation needs an operand") };
    if !half_wanted() {
        let learned = learned(&operands);
        let results = run(operands.map(AmpTensor::into_primitive));
        return results.map(|result| AmpTensor::new(result, learned));
    }
    by_policy(|| {
        let call = Call::new(op, operands.each_ref());
        let operands = operands.map(|operand| call.operand(operand));
        call.run(|| run(operands)).map(|result| call.result(result))
    })
}

/// A contraction that follows its class, after the check for a policy.
pub(crate) fn contracted<B: Backend, S: Side<B>, const N: usize>(
    op: Op,
    operands: [AmpTensor<B, S>; N],
    run: impl Fn([FloatTensor<B>; N]) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    if !half_wanted() {
        let learned = learned(&operands);
        return AmpTensor::new(run(operands.map(AmpTensor::into_primitive)), learned);
    }
    by_policy(|| {
        let call = Call::new(op, operands.each_ref());
        call.contract(operands.map(|operand| call.operand(operand)), run)
    })
}

/// The operation of this name. Its row is looked up at compile time.
macro_rules! op {
    ($op:ident) => {
        const { $crate::policy::Op::named(stringify!($op)) }
    };
}

/// Operations, one per line: the arguments in the trait's order, the result, and what the policy
/// does. `[x]` is a float tensor, `[?x]` an optional one and `{x}` a scalar. [`burn_amp_core::wrapped`] has
/// an arm for each kind of result.
///
/// The check for a policy comes first: in a process without half precision, it is all that an operation
/// costs. Elsewhere, an operation in FP32 [alone](alone()) costs little more: there, what the policy does has to be
/// the backend's operation.
macro_rules! own_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident => $own:expr;)*) => {$(
        #[allow(unused_variables, clippy::too_many_arguments, clippy::clone_on_copy)]
        #[inline(never)]
        fn $op($(
            $($t: FloatTensor<Self>)?
            $($o: Option<FloatTensor<Self>>)?
            $($s: Scalar)?
            $($a: $ty)?
        ),+) -> $out<Self> {
            if !$crate::precision::half_wanted() {
                // Nothing is deferred in such a process.
                let learned = $crate::tensor::TensorFlags::LEARNED
                    & ($crate::tensor::TensorFlags::empty() $($(| $t.flags)?)+ $($(| $crate::tensor::learned(&$o))?)+);
                return $crate::call::backends_own!(learned, $op($($([$t])? $([?$o])? $($s)? $($a)?),+) -> $out);
            }
            let tensors = [$($(Some(&$t),)? $($o.as_ref(),)?)+];
            if let Some(flags) = $crate::call::alone(op!($op), $crate::call::present(tensors)) {
                return $crate::call::unchanged::<B, S, _>(|| {
                    $crate::call::backends_own!(flags, $op($($([$t])? $([?$o])? $($s)? $($a)?),+) -> $out)
                });
            }
            $crate::diagnostics::compare::recorded_call!(
                $out,
                $op,
                tensors,
                Self::$op($(
                    $($crate::diagnostics::compare::operand(&$t))?
                    $($o.as_ref().map($crate::diagnostics::compare::operand))?
                    $($s)?
                    $($a.clone())?
                ),+),
                $crate::call::by_policy(move || $own)
            )
        }
    )*};
}

/// The backend's own operation on the backend's own tensors. Its float results have these flags.
macro_rules! backends_own {
    ($flags:expr, $op:ident($($([$t:ident])? $([?$o:ident])? $($a:ident)?),+) -> $out:ident) => {{
        // Drop first: an operation with nothing left to drop writes its result straight to its destination. Drop
        // field by field: moving the whole tensor would copy it.
        $($(drop($t.shared.into_inner());)?)+
        burn_amp_core::wrapped!($out, ((|primitive| $crate::AmpTensor::new(primitive, $flags))), B::$op($(
            $($t.primitive)?
            $($o.map($crate::AmpTensor::into_primitive))?
            $($a)?
        ),+))
    }};
}

/// Operations that follow their row, one per line, in the notation of [`own_ops`].
macro_rules! float_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident $(, of convolution($weight:ident, $options:ident))?;)*) => {$(
        $crate::call::own_ops! {
            $op($($([$t])? $([?$o])? $({$s})? $($a: $ty)?),+) -> $out => {
                let tensors = $crate::call::present([$($(Some(&$t),)? $($o.as_ref(),)?)+]);
                let operands = tensors.map($crate::AmpTensor::operand);
                let scalars = [$($($s.elem::<f64>(),)?)+];
                let op = op!($op)$(.convolving(&tensors[0].shape(), &$weight.shape(), burn_amp_core::convolution!($options)))?;
                let call = $crate::call::Call::of(op, &tensors, &operands, &scalars);
                $(
                    $(let $t = call.operand($t);)?
                    $(let $o = $o.map(|tensor| call.operand(tensor));)?
                )+
                $crate::call::kernel!(call, $op($($([$t])? $([?$o])? $($s)? $($a)?),+) -> $out $(, of $weight)?)
            };
        }
    )*};
}

/// The result of the backend's operation on operands that are cast. A convolution's has a weight.
macro_rules! kernel {
    ($call:ident, $op:ident($($([$t:ident])? $([?$o:ident])? $($a:ident)?),+) -> $out:ident) => {{
        let out = $call.run(|| B::$op($($($t)? $($o)? $($a)?),+));
        burn_amp_core::wrapped!($out, ($call.result), out)
    }};
    ($call:ident, $op:ident($([$t:ident]),+, $options:ident) -> $out:ident, of $weight:ident) => {
        $call.contract([$($t),+], |[$($t),+]| B::$op($($t,)+ $options.clone()))
    };
}

/// Operations without float tensors: the backend's own.
macro_rules! delegate {
    ($(fn $op:ident($($a:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {$(
        #[inline]
        fn $op($($a: $ty),*) $(-> $out)? {
            $crate::precision::in_kernel(|| B::$op($($a),*))
        }
    )*};
}

/// Like [`delegate`], for operations on a device. The device is used without its own autodiff.
macro_rules! delegate_on_device {
    ($(fn $op:ident($($a:ident: $ty:ty),*; device $(, $b:ident: $bty:ty)*) $(-> $out:ty)?;)*) => {$(
        #[inline]
        fn $op($($a: $ty,)* device: &Device<Self> $(, $b: $bty)*) $(-> $out)? {
            B::$op($($a,)* device.inner() $(, $b)*)
        }
    )*};
}

pub(crate) use {backends_own, delegate, delegate_on_device, float_ops, kernel, op, own_ops};
