//! The backend's operations, one file per Burn trait. This file: how an operation is forwarded.

// A method left to its default would silently lose the inner backend's own kernel.
#![deny(clippy::missing_trait_methods)]

mod activation;
mod arithmetic;
mod attention;
mod bool_tensor;
mod custom;
mod int_tensor;
mod leaving;
mod module;
mod qtensor;
mod tensor;
mod transaction;

use std::sync::Once;

use burn_amp_core::policy::decide;
use burn_amp_core::policy::trials::TriedOp;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};

use crate::autodiff::reuse;
use crate::autodiff::tape::{self, TapeExtension, cast};
use crate::device::{self, DeviceContext};
use crate::diagnostics::anomaly;
use crate::policy::{Decision, Mode, Op, OpPrecision, Operand, Site, Support, is_half};
use crate::precision::{half_wanted, in_kernel, keep_dtypes, keeps_dtypes};
use crate::scaler::ScaledLoss;
use crate::tensor::AmpTensor;

/// A tape, and the half dtype in force.
type TapeInHalf<B> = (&'static dyn TapeExtension<B>, DType);

/// An operation, and the policy's decision on it.
struct Call {
    op: Op,
    decision: Decision,
    /// The scaler of the scaled loss among the operands, if any.
    scaled: Option<ScaledLoss>,
    /// Whether no autodiff lies below: the backend's operation is a kernel.
    is_kernel: bool,
    /// Whether anomaly detection checks the operation.
    watched: bool,
}

impl Call {
    /// An operation on these operands. Another operand may stand in for an absent one.
    fn new<B: Backend, const N: usize>(op: Op, tensors: [&AmpTensor<B>; N]) -> Self {
        Self::of(op, &tensors, &tensors.map(AmpTensor::operand), &[])
    }

    /// An operation on these tensors, with their `operands`, and on these scalars.
    #[inline(never)]
    fn of<B: Backend>(
        op: Op,
        tensors: &[&AmpTensor<B>],
        operands: &[Operand],
        scalars: &[f64],
    ) -> Self {
        let device = tensors[0].device();
        let context = DeviceContext::of::<B>(&device);
        let at = At {
            tensors,
            context,
            is_kernel: !B::ad_enabled(&device),
            device,
        };
        let watched = is_watched(op.name, &context, tensors, &at.device);
        if watched {
            anomaly::scalars(scalars);
        }
        let decision = decide(&op, operands, scalars, &at);
        if at.is_kernel && op.is_backward() && !keeps_dtypes() {
            foreign_pass::<B>(&op, &decision, operands, &at.device);
        }
        Self {
            op,
            decision,
            scaled: scaled_loss(tensors),
            is_kernel: at.is_kernel,
            watched,
        }
    }

    /// The tape, if the policy itself records the operation.
    fn recording<B: Backend>(&self) -> Option<TapeInHalf<B>> {
        let half = self.decision.recorded?;
        Some((tape::of::<B>()?, half))
    }

    /// Casts an operand for the backend's operation.
    #[inline(always)]
    fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        self.watch(&tensor);
        match (self.decision.operands, self.decision.rounded) {
            (None, _) => tensor.into_primitive(),
            (Some(dtype), None) => reuse::into_dtype(tensor, dtype),
            (Some(dtype), Some(half)) => cast::<B>(reuse::into_dtype(tensor, half), dtype),
        }
    }

    /// Casts an operand for a recorded formula, which widens half itself: only a cast to half goes on
    /// the tape.
    fn recorded_operand<B: Backend>(&self, tensor: AmpTensor<B>) -> AmpTensor<B> {
        let half = self.decision.rounded.or(self.decision.operands);
        match half.filter(|dtype| is_half(*dtype) && tensor.dtype() != *dtype) {
            Some(half) => {
                let flags = tensor.flags();
                AmpTensor::new(reuse::into_dtype(tensor, half), flags)
            }
            None => tensor,
        }
    }

    /// Runs the backend's operation.
    #[inline(always)]
    fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        if self.is_kernel {
            in_kernel(op)
        } else if self.decision.keeps_dtypes {
            keep_dtypes(op)
        } else {
            op()
        }
    }

    /// Checks an operand if the operation is watched. For operands that do not pass through
    /// [`operand`](Call::operand).
    #[inline(always)]
    fn watch<B: Backend>(&self, tensor: &AmpTensor<B>) {
        if self.watched {
            anomaly::operand(tensor);
        }
    }

    /// Wraps a float result of the backend's operation.
    #[inline(always)]
    fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let is_wide = self.decision.keeps_wide && primitive.dtype() == DType::F32;
        let wide = is_wide.then(|| primitive.clone());
        self.recorded(self.in_result_dtype::<B>(primitive))
            .with_wide(wide)
    }

    /// Casts a result to the dtype that the policy gives it.
    #[inline(always)]
    fn in_result_dtype<B: Backend>(&self, primitive: FloatTensor<B>) -> FloatTensor<B> {
        match self.decision.result {
            Some(dtype) if primitive.dtype() != dtype => cast::<B>(primitive, dtype),
            _ => primitive,
        }
    }

    /// Wraps a float result of a recorded operation, in the result's own dtype.
    #[inline(always)]
    fn recorded<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        if self.watched {
            anomaly::result::<B>(self.op.name, self.op.class(), &primitive);
        }
        self.marked(primitive)
    }

    /// A tensor with the flags and the scaler of the result.
    #[inline(always)]
    fn marked<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        AmpTensor::new(primitive, self.decision.flags).with_scaled(self.scaled.clone())
    }
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
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| {
        log::warn!(
            "burn-amp: {} in f16 on {} is part of a backward pass that is not burn-amp's: the program puts its own \
             Autodiff on Amp<..>. Its loss is not scaled, so that small gradients become 0, and no gradient is \
             checked. Give the program AmpAutodiff<..> where it trains, or train in bf16, which needs no loss scale",
            op.name,
            device::name::<B>(device)
        );
    });
}

/// Where an operation runs.
struct At<'a, B: Backend> {
    tensors: &'a [&'a AmpTensor<B>],
    context: DeviceContext,
    device: B::Device,
    is_kernel: bool,
}

impl<B: Backend> Site<DType> for At<'_, B> {
    fn mode(&self) -> Mode {
        if keeps_dtypes() {
            Mode::KeepDtypes
        } else {
            self.context.mode
        }
    }

    fn is_kernel(&self) -> bool {
        self.is_kernel
    }

    fn support(&self) -> Support {
        self.context.support::<B>(&self.device)
    }

    fn is_exact(&self, op: TriedOp, half: DType) -> Option<bool> {
        self.context.is_exact::<B>(&self.device, half, op)
    }

    fn elements(&self, operand: usize) -> usize {
        self.tensors[operand].shape().num_elements()
    }

    fn is_tracked(&self, operand: usize) -> Option<bool> {
        let is_tracked =
            |tape: &'static dyn TapeExtension<B>| tape.is_tracked(&self.tensors[operand].primitive);
        Some(!self.is_kernel && tape::of::<B>().is_some_and(is_tracked))
    }

    fn declared(&self) -> Option<DType> {
        None
    }

    fn changed(&self, op: &Op) -> Option<OpPrecision> {
        self.context.changed(op)
    }
}

/// Whether anomaly detection checks an operation on these operands.
#[inline(always)]
fn is_watched<B: Backend>(
    op: &'static str,
    context: &DeviceContext,
    tensors: &[&AmpTensor<B>],
    device: &B::Device,
) -> bool {
    context.in_force.watched && anomaly::begins(op, tensors, |t| tape::id::<B, _>(t, device))
}

/// The scaler of the scaled losses among the operands.
///
/// # Panics
///
/// If two scalers or two scales meet: the gradients of a sum of such losses have no single scale.
fn scaled_loss<B: Backend>(tensors: &[&AmpTensor<B>]) -> Option<ScaledLoss> {
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
fn present<B: Backend, const N: usize>(tensors: [Option<&AmpTensor<B>>; N]) -> [&AmpTensor<B>; N] {
    let first = tensors[0].expect("the first operand is always given");
    tensors.map(|tensor| tensor.unwrap_or(first))
}

/// Runs an operation under the policy, out of line: callers inline only the check whether there is
/// a policy.
#[inline(never)]
fn by_policy<T>(op: impl FnOnce() -> T) -> T {
    op()
}

/// Runs an operation that follows its class, after the check for a policy.
fn checked<B: Backend, const N: usize, const M: usize>(
    op: Op,
    operands: [AmpTensor<B>; N],
    run: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
) -> [AmpTensor<B>; M] {
    const { assert!(N > 0, "an operation needs an operand") };
    if !half_wanted() {
        return run(operands.map(AmpTensor::into_primitive)).map(AmpTensor::plain);
    }
    by_policy(|| {
        let call = Call::new(op, operands.each_ref());
        let operands = operands.map(|operand| call.operand(operand));
        call.run(|| run(operands)).map(|result| call.result(result))
    })
}

/// The operation of this name. Its row is looked up at compile time.
macro_rules! op {
    ($op:ident) => {
        const { $crate::policy::Op::named(stringify!($op)) }
    };
}

/// Operations, one per line: the arguments in the trait's order, the result, and what the policy
/// does. `[x]` is a float tensor, `[?x]` an optional one and `{x}` a scalar. [`wrapped`] has an arm
/// for each kind of result.
///
/// The check for a policy comes first: in a process without half precision, it is all that an operation
/// costs.
macro_rules! own_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident => $own:expr;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        #[inline(never)]
        fn $op($(
            $($t: FloatTensor<Self>)?
            $($o: Option<FloatTensor<Self>>)?
            $($s: Scalar)?
            $($a: $ty)?
        ),+) -> $out<Self> {
            if $crate::precision::half_wanted() {
                $crate::ops::by_policy(move || $own)
            } else {
                // Nothing is deferred in such a process.
                // Drop first: an operation with nothing left to drop writes its result straight to its
                // destination. Drop field by field: moving the whole tensor would copy it.
                $($(drop($t.shared.into_inner());)?)+
                $crate::ops::wrapped!($out, ($crate::AmpTensor::plain), B::$op($(
                    $($t.primitive)?
                    $($o.map($crate::AmpTensor::into_primitive))?
                    $($s)?
                    $($a)?
                ),+))
            }
        }
    )*};
}

/// Operations that follow their row, one per line, in the notation of [`own_ops`].
macro_rules! float_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident $(, of $kind:expr)?;)*) => {$(
        $crate::ops::own_ops! {
            $op($($([$t])? $([?$o])? $({$s})? $($a: $ty)?),+) -> $out => {
                let tensors = $crate::ops::present([$($(Some(&$t),)? $($o.as_ref(),)?)+]);
                let operands = tensors.map($crate::AmpTensor::operand);
                let scalars = [$($($s.elem::<f64>(),)?)+];
                let op = op!($op)$(.of_kind($kind))?;
                let call = $crate::ops::Call::of(op, &tensors, &operands, &scalars);
                $(
                    $(let $t = call.operand($t);)?
                    $(let $o = $o.map(|tensor| call.operand(tensor));)?
                )+
                let out = call.run(|| B::$op($($($t)? $($o)? $($s)? $($a)?),+));
                $crate::ops::wrapped!($out, (call.result), out)
            };
        }
    )*};
}

/// A result of the backend's operation, with its float tensors wrapped.
macro_rules! wrapped {
    (FloatTensor, ($($wrap:tt)+), $out:expr) => { $($wrap)+($out) };
    (BoolTensor, $wrap:tt, $out:expr) => { $out };
    (IntTensor, $wrap:tt, $out:expr) => { $out };
    (QuantizedTensor, $wrap:tt, $out:expr) => { $out };
    (WithIndices, ($($wrap:tt)+), $out:expr) => {{
        let (values, indices) = $out;
        ($($wrap)+(values), indices)
    }};
    (Spectrum, ($($wrap:tt)+), $out:expr) => {{
        let (re, im) = $out;
        ($($wrap)+(re), $($wrap)+(im))
    }};
    (MaxPool1dWithIndices, ($($wrap:tt)+), $out:expr) => {{
        let pooled = $out;
        MaxPool1dWithIndices::new($($wrap)+(pooled.output), pooled.indices)
    }};
    (MaxPool2dWithIndices, ($($wrap:tt)+), $out:expr) => {{
        let pooled = $out;
        MaxPool2dWithIndices::new($($wrap)+(pooled.output), pooled.indices)
    }};
    (MaxPool1dBackward, ($($wrap:tt)+), $out:expr) => {
        MaxPool1dBackward::new($($wrap)+($out.x_grad))
    };
    (MaxPool2dBackward, ($($wrap:tt)+), $out:expr) => {
        MaxPool2dBackward::new($($wrap)+($out.x_grad))
    };
    (DeformConv2dBackward, ($($wrap:tt)+), $out:expr) => {{
        let grads = $out;
        DeformConv2dBackward::new(
            $($wrap)+(grads.x_grad),
            $($wrap)+(grads.offset_grad),
            $($wrap)+(grads.weight_grad),
            grads.mask_grad.map(|grad| $($wrap)+(grad)),
            grads.bias_grad.map(|grad| $($wrap)+(grad)),
        )
    }};
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

pub(crate) use {delegate, delegate_on_device};
use {float_ops, op, own_ops, wrapped};
