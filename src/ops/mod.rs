//! The backend's operations, one file per Burn trait. This file: how an operation is forwarded.

mod activation;
mod arithmetic;
mod attention;
mod bool_tensor;
mod custom;
mod int_tensor;
mod module;
mod qtensor;
mod tensor;
mod transaction;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use crate::autodiff::tape::{self, TapeExtension, cast};
use crate::device::{self, DeviceContext, OpSet};
use crate::diagnostics::anomaly;
use crate::policy::{self, Class, HalfSupport, Mode, Operands, Plan, holds, is_half, plan};
use crate::precision::{half_wanted, keep_dtypes, keeps_dtypes};
use crate::scaler::ScaledLoss;
use crate::tensor::{AmpTensor, TensorFlags};

/// An operation's name and class.
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub name: &'static str,
    pub class: Class,
    /// The operation as a set for device trials; empty if it is not tried.
    pub qualifies: OpSet,
}

impl Op {
    pub(crate) const fn new(name: &'static str, class: Class) -> Self {
        Self {
            name,
            class,
            qualifies: OpSet::NONE,
        }
    }

    /// An operation of the policy table.
    pub(crate) const fn of_table(name: &'static str) -> Self {
        Self {
            name,
            class: policy::class(name),
            qualifies: OpSet::of(name),
        }
    }
}

/// The decision on one operation: how its operands are cast, and the dtype and flags of its result.
pub(crate) struct Call {
    op: Op,
    plan: Plan,
    /// The half dtype that operands are rounded to before the operation computes in FP32.
    rounded: Option<DType>,
    flags: TensorFlags,
    /// The scaler of the scaled loss among the operands, if any.
    scaled: Option<ScaledLoss>,
    mode: Mode,
    upper: bool,
    /// Whether anomaly detection looks for values that are not finite.
    watched: bool,
}

impl Call {
    /// For a process that never left FP32: the backend's own operation.
    const UNTOUCHED: Self = Self {
        op: Op::new("", Class::Keep),
        plan: Plan {
            operands: None,
            result: None,
        },
        rounded: None,
        flags: TensorFlags::empty(),
        scaled: None,
        mode: Mode::Off,
        upper: false,
        watched: false,
    };

    /// Decides an operation on these operands. Another operand may stand in for an absent one.
    /// `Fp32Inside` restores the first operand's dtype.
    #[inline(always)]
    pub(crate) fn new<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        Self::decide(named, tensors, false, false)
    }

    /// As [`new`](Call::new), for backward functions: `Fp32Inside` returns the widest dtype.
    #[inline(always)]
    pub(crate) fn backward<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        Self::decide(named, tensors, true, false)
    }

    /// As [`new`](Call::new), for an operation with scalars. If the operand's dtype does not hold a
    /// scalar, the operation runs in FP32.
    #[inline(always)]
    pub(crate) fn with_scalars<B: Backend>(
        named: Op,
        tensor: &AmpTensor<B>,
        scalars: &[Scalar],
    ) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        let mut call = Self::new(named, &[tensor]);
        if call.watched {
            anomaly::scalars(scalars);
        }
        let dtype = tensor.dtype();
        let held = |dtype| scalars.iter().all(|s| holds(dtype, s.elem::<f64>()));
        if call.flags.intersects(TensorFlags::WIDENED) {
            call.flags -= TensorFlags::widened_where(|half| !held(half));
        }
        if is_half(dtype) && !held(dtype) && call.mode != Mode::Off {
            call.plan = Plan {
                operands: Some(DType::F32),
                result: None,
            };
        }
        call
    }

    /// As [`new`](Call::new), for an operation that autodiff composes of others. `Fp32Inside` is
    /// widened above autodiff; otherwise the composing steps would run in half.
    #[inline(always)]
    pub(crate) fn composed<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        Self::decide(named, tensors, false, true)
    }

    /// As [`composed`](Call::composed), for an operation that is `Fp32Inside` only because of its
    /// gradient. Without autodiff the operation moves data.
    pub(crate) fn summed_backward<B: Backend>(named: Op, tensor: &AmpTensor<B>) -> Self {
        match B::ad_enabled(&tensor.device()) {
            true => Self::composed(named, &[tensor]),
            false => Self::new(Op::new(named.name, Class::Move), &[tensor]),
        }
    }

    #[inline(never)]
    fn decide<B: Backend>(
        named: Op,
        tensors: &[&AmpTensor<B>],
        backward: bool,
        composed: bool,
    ) -> Self {
        let class = named.class;
        let device = tensors[0].device();
        let context = DeviceContext::of::<B>(&device);
        let mode = mode(&context, tensors);
        let operands = match backward {
            false => operands(tensors, mode),
            true => {
                let widest = Operands::one(operands(tensors, mode).widest());
                tensors.iter().fold(widest, |all, t| all.and(t.dtype()))
            }
        };
        let upper = mode != Mode::Off && B::ad_enabled(&device);
        let plan = match mode {
            // Half tensors that the policy made return to FP32; the user's own half tensors stay.
            Mode::Off if tensors.iter().any(|t| t.is_demoted()) => Plan {
                operands: (class != Class::Move).then_some(match operands.widest() {
                    DType::F64 => DType::F64,
                    _ => DType::F32,
                }),
                result: None,
            },
            // The lower layer widens what autodiff passes down whole, so the tape keeps half.
            _ if upper && class == Class::Fp32Inside && !composed => Plan::default(),
            mode => plan(class, operands, mode, || context.support::<B>(&device)),
        };
        let all = tensors.iter().map(|t| t.flags());
        let any = all
            .clone()
            .fold(TensorFlags::empty(), |any, flags| any | flags);
        let common = all.fold(TensorFlags::all(), |common, flags| common & flags);
        let mut flags = any & (TensorFlags::GRADIENT | TensorFlags::FROM_F16);
        flags |= match class {
            Class::Move => common & (TensorFlags::WIDENED | TensorFlags::CONSTANT),
            Class::Keep | Class::Activation => common & TensorFlags::WIDENED,
            Class::Promote | Class::PromoteSum => any & fitting(tensors),
            _ => TensorFlags::empty(),
        };
        flags.set(
            TensorFlags::DEMOTED,
            !tensors.iter().all(|t| t.is_half_by_choice()),
        );
        if plan.operands == Some(DType::F16) {
            flags |= TensorFlags::FROM_F16;
        }
        let rounded = match named.qualifies.is_none() || mode == Mode::Off {
            true => None,
            false => inexact_half::<B>(named, &plan, tensors[0].dtype(), &context, &device),
        };
        let plan = match rounded {
            Some(half) => Plan {
                operands: Some(DType::F32),
                result: plan.result.or(Some(half)),
            },
            None => plan,
        };
        Self {
            op: named,
            plan,
            rounded,
            flags,
            scaled: scaled_loss(tensors),
            mode,
            upper,
            watched: context.in_force.watched
                && anomaly::begins(tensors, |t| tape::id::<B, _>(t, &device)),
        }
    }

    /// Whether the operation runs in half on a device that only multiplies matrices in half.
    pub(crate) fn is_bare_contraction<B: Backend>(&self, tensor: &AmpTensor<B>) -> bool {
        match self.plan.operands {
            Some(dtype) => support_of::<B>(tensor, dtype) == HalfSupport::Contractions,
            None => false,
        }
    }

    /// The dtype that operands are cast to, if any.
    pub(crate) fn compute_dtype(&self) -> Option<DType> {
        self.plan.operands
    }

    /// Casts an operand for the backend's operation.
    #[inline(always)]
    pub(crate) fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        self.watch(&tensor);
        match self.plan.operands {
            Some(dtype) => match self.rounded {
                Some(half) => cast::<B>(tape::into_dtype(tensor, half), dtype),
                None => tape::into_dtype(tensor, dtype),
            },
            None => tensor.into_primitive(),
        }
    }

    /// Runs the backend's operation.
    #[inline(always)]
    pub(crate) fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        match self.upper {
            true => keep_dtypes(op),
            false => op(),
        }
    }

    /// Checks an operand if the operation is watched. For operands that do not pass through
    /// [`operand`](Call::operand).
    #[inline(always)]
    pub(crate) fn watch<B: Backend>(&self, tensor: &AmpTensor<B>) {
        if self.watched {
            anomaly::operand(tensor);
        }
    }

    /// Wraps a float result of the backend's operation.
    #[inline(always)]
    pub(crate) fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let primitive = self.in_result_dtype::<B>(primitive);
        self.recorded(primitive)
    }

    /// Casts a result to the dtype that the policy gives it.
    #[inline(always)]
    pub(crate) fn in_result_dtype<B: Backend>(&self, primitive: FloatTensor<B>) -> FloatTensor<B> {
        match self.plan.result {
            Some(dtype) if primitive.dtype() != dtype => cast::<B>(primitive, dtype),
            _ => primitive,
        }
    }

    /// Wraps a float result of a recorded operation, in the result's own dtype.
    #[inline(always)]
    pub(crate) fn recorded<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        if self.watched {
            anomaly::result::<B>(self.op.name, self.op.class, &primitive);
        }
        self.marked(primitive)
    }

    /// A tensor with the flags and the scaler of the result.
    #[inline(always)]
    pub(crate) fn marked<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        AmpTensor::new(primitive, self.flags).with_scaled(self.scaled.clone())
    }
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
            "burn-amp: an operation takes losses of two scalers, scaled by {} and {}: the gradients of \
             the result have no one scale. Add up the losses first, and scale the sum",
            first.scale, other.scale
        )
    }
    Some(first.clone())
}

/// The widened flags of each half dtype in which all operands fit.
fn fitting<B: Backend>(tensors: &[&AmpTensor<B>]) -> TensorFlags {
    TensorFlags::widened_where(|half| tensors.iter().all(|t| t.fits(half)))
}

/// The operation's half dtype, if the device does not compute the operation exactly in it.
fn inexact_half<B: Backend>(
    named: Op,
    plan: &Plan,
    first: DType,
    context: &DeviceContext,
    device: &B::Device,
) -> Option<DType> {
    let half = plan.operands.unwrap_or(first);
    // Above autodiff the operands are cast to half anyway, so that the tape keeps half.
    let computes = is_half(half) && !B::ad_enabled(device);
    let inexact = computes && context.inexact::<B>(device, half).contains(named.qualifies);
    inexact.then_some(half)
}

/// The dtypes of an operation's operands.
fn operands<B: Backend>(tensors: &[&AmpTensor<B>], mode: Mode) -> Operands {
    let (first, others) = tensors.split_first().expect("an operand");
    let is_constant = |t: &AmpTensor<B>| t.flags().contains(TensorFlags::CONSTANT);
    let is_widened = |t: &AmpTensor<B>| match mode {
        Mode::On(half) => t.flags().contains(TensorFlags::widened(half)),
        Mode::Off | Mode::KeepDtypes => false,
    };
    let first = match first.dtype() {
        DType::F32 if is_widened(first) => Operands::widened(),
        dtype if is_constant(first) => Operands::constant(dtype),
        dtype => Operands::one(dtype),
    };
    others.iter().fold(first, |all, t| match is_constant(t) {
        true => all.and_constant(t.dtype()),
        false => all.and(t.dtype()),
    })
}

/// The tape and the half dtype in force, if the policy itself records an operation on these
/// operands.
fn recording<B: Backend>(
    tensors: &[&AmpTensor<B>],
) -> Option<(&'static dyn TapeExtension<B>, DType)> {
    let device = tensors[0].device();
    if !half_wanted() || !B::ad_enabled(&device) {
        return None;
    }
    let ours = |t: &&AmpTensor<B>| matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
    match mode(&DeviceContext::of::<B>(&device), tensors) {
        Mode::On(half) if tensors.iter().all(ours) => Some((tape::of::<B>(&device)?, half)),
        _ => None,
    }
}

/// How the policy applies to these operands.
fn mode<B: Backend>(context: &DeviceContext, tensors: &[&AmpTensor<B>]) -> Mode {
    match keeps_dtypes()
        || tensors
            .iter()
            .any(|t| t.flags().contains(TensorFlags::GRADIENT))
    {
        true => Mode::KeepDtypes,
        false => context.mode,
    }
}

fn support_of<B: Backend>(tensor: &AmpTensor<B>, dtype: DType) -> HalfSupport {
    device::registered::<B>(&tensor.device()).of(dtype)
}

/// Runs an operation under the policy, out of line: callers inline only the check whether there is
/// a policy.
#[inline(never)]
fn by_policy<T>(op: impl FnOnce() -> T) -> T {
    op()
}

/// The operation of this name. Its class is looked up at compile time.
macro_rules! op {
    ($op:ident) => {
        const { $crate::ops::Op::of_table(stringify!($op)) }
    };
}

/// Operations from float tensors to a float tensor, one per line: the float operands in brackets,
/// then the other arguments.
macro_rules! float_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*);)*) => {$(
        #[inline(never)]
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> FloatTensor<Self> {
            match $crate::precision::half_wanted() {
                false => $crate::AmpTensor::plain(B::$op($($t.into_primitive(),)+ $($a),*)),
                true => $crate::ops::by_policy(move || {
                    let call = Call::new(op!($op), &[$(&$t),+]);
                    $(let $t = call.operand($t);)+
                    call.result(call.run(|| B::$op($($t,)+ $($a),*)))
                }),
            }
        }
    )*};
}

/// As [`float_ops`], for backward functions.
macro_rules! backward_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        #[inline(never)]
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> FloatTensor<Self> {
            match $crate::precision::half_wanted() {
                false => $crate::AmpTensor::plain(B::$op($($t.into_primitive(),)+ $($a),*)),
                true => $crate::ops::by_policy(move || {
                    let call = Call::backward(op!($op), &[$(&$t),+]);
                    $(let $t = call.operand($t);)+
                    call.result(call.run(|| B::$op($($t,)+ $($a),*)))
                }),
            }
        }
    )*};
}

/// As [`float_ops`], for operations whose scalars must fit the operand's dtype.
macro_rules! scalar_ops {
    ($($op:ident [$t:ident] ($($s:ident),+) -> $out:ident $(, $a:ident: $ty:ty)*;)*) => {$(
        #[inline(never)]
        fn $op($t: FloatTensor<Self>, $($s: Scalar,)+ $($a: $ty),*) -> $out<Self> {
            match $crate::precision::half_wanted() {
                false => scalar_ops!(@ $out, plain, B::$op($t.into_primitive(), $($s,)+ $($a),*)),
                true => $crate::ops::by_policy(move || {
                    let call = Call::with_scalars(op!($op), &$t, &[$($s),+]);
                    let $t = call.operand($t);
                    scalar_ops!(@ $out, call, call.run(|| B::$op($t, $($s,)+ $($a),*)))
                }),
            }
        }
    )*};
    (@ FloatTensor, plain, $out:expr) => { $crate::AmpTensor::plain($out) };
    (@ FloatTensor, $call:ident, $out:expr) => { $call.result($out) };
    (@ BoolTensor, $call:ident, $out:expr) => { $out };
}

/// Operations from float tensors to an integer or boolean tensor.
macro_rules! measuring_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*) -> $out:ident;)*) => {$(
        #[inline(never)]
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> $out<Self> {
            match $crate::precision::half_wanted() {
                false => B::$op($($t.into_primitive(),)+ $($a),*),
                true => $crate::ops::by_policy(move || {
                    let call = Call::new(op!($op), &[$(&$t),+]);
                    $(let $t = call.operand($t);)+
                    call.run(|| B::$op($($t,)+ $($a),*))
                }),
            }
        }
    )*};
}

/// Operations without float tensors: the backend's own.
macro_rules! delegate {
    ($(fn $op:ident($($a:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {$(
        #[inline]
        fn $op($($a: $ty),*) -> $out {
            B::$op($($a),*)
        }
    )*};
}

/// As [`delegate`], for operations on a device. The device is used without its own autodiff.
macro_rules! delegate_on_device {
    ($(fn $op:ident($($a:ident: $ty:ty),*; device $(, $b:ident: $bty:ty)*) -> $out:ty;)*) => {$(
        #[inline]
        fn $op($($a: $ty,)* device: &Device<Self> $(, $b: $bty)*) -> $out {
            B::$op($($a,)* device.inner() $(, $b)*)
        }
    )*};
}

pub(crate) use {
    backward_ops, delegate, delegate_on_device, float_ops, measuring_ops, op, scalar_ops,
};
