//! The backend's operations, one file per trait of Burn's. Here: how any of them is forwarded.

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

use crate::autodiff::tape::{self, Tape};
use crate::policy::{self, Class, HalfSupport, Mode, Operands, Plan, holds, plan};
use crate::precision::{following, half_wanted, is_following};
use crate::qualification::OpSet;
use crate::tensor::{AmpTensor, Marks, cast, is_half};
use crate::{anomaly, device};

pub(crate) use attention::masked_softmax;

/// An operation, by its name and its class.
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub name: &'static str,
    pub class: Class,
    /// What it is among those that a device is qualified for.
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

/// One operation, decided: how its operands are cast, and what its result is.
pub(crate) struct Call {
    op: Op,
    plan: Plan,
    /// The half dtype that operands are rounded to although they are then computed with in FP32.
    rounded: Option<DType>,
    marks: Marks,
    mode: Mode,
    upper: bool,
    /// Whether values are looked at that are not finite.
    watched: bool,
}

impl Call {
    /// In a process that never left FP32: the backend's own operation.
    const UNTOUCHED: Self = Self {
        op: Op::new("", Class::Keep),
        plan: Plan {
            operands: None,
            result: None,
        },
        rounded: None,
        marks: Marks::empty(),
        mode: Mode::Off,
        upper: false,
        watched: false,
    };

    /// Decides an operation on these operands, where another may stand in for one that is absent.
    /// `Wide` gives back the first operand's dtype.
    #[inline(always)]
    pub(crate) fn new<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        Self::decide(named, tensors, operands(tensors), false)
    }

    /// As [`new`](Call::new) for backward functions, where `Wide` gives the widest dtype.
    #[inline(always)]
    pub(crate) fn backward<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        let operands = operands(tensors);
        let widest = Operands::one(operands.widest());
        let operands = tensors.iter().fold(widest, |all, t| all.and(t.dtype()));
        Self::decide(named, tensors, operands, false)
    }

    /// As [`new`](Call::new) for an operation with scalars: in FP32 when the operand's dtype does
    /// not hold one of them.
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
        let dtype = tensor.dtype();
        if let Mode::On(half) = call.mode
            && scalars.iter().any(|s| !holds(half, s.elem::<f64>()))
        {
            call.marks -= Marks::WIDENED;
        }
        if operands(&[tensor]).any_half()
            && scalars.iter().any(|s| !holds(dtype, s.elem::<f64>()))
            && call.mode != Mode::Off
        {
            call.plan = Plan {
                operands: Some(DType::F32),
                result: None,
            };
        }
        call
    }

    /// As [`new`](Call::new) for an operation that autodiff composes of others: a `Wide` one is
    /// widened above autodiff, where it would otherwise be composed of steps in half.
    #[inline(always)]
    pub(crate) fn composed<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        if !half_wanted() {
            return Self::UNTOUCHED;
        }
        Self::decide(named, tensors, operands(tensors), true)
    }

    /// As [`composed`](Call::composed) for an operation that is `Wide` for its gradient alone:
    /// without autodiff it moves data.
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
        operands: Operands,
        composed: bool,
    ) -> Self {
        let class = named.class;
        let mode = mode(tensors);
        let upper = mode != Mode::Off && B::ad_enabled(&tensors[0].device());
        let plan = match mode {
            // Half tensors that the policy made come back to FP32; the user's own are theirs.
            Mode::Off if tensors.iter().any(|t| t.is_demoted()) => Plan {
                operands: (class != Class::Move).then_some(match operands.widest() {
                    DType::F64 => DType::F64,
                    _ => DType::F32,
                }),
                result: None,
            },
            // The layer below widens what autodiff hands down whole, and the tape keeps the half.
            _ if upper && class == Class::Wide && !composed => Plan::default(),
            mode => plan(class, operands, mode, || {
                device::current::<B>(&tensors[0].device()).support()
            }),
        };
        let all = tensors.iter().map(|t| t.marks());
        let any = all.clone().fold(Marks::empty(), |any, marks| any | marks);
        let common = all.fold(Marks::all(), |common, marks| common & marks);
        let mut marks = any & (Marks::GRADIENT | Marks::FROM_F16);
        marks |= match class {
            Class::Move => common & (Marks::WIDENED | Marks::CONSTANT),
            Class::Keep | Class::Activation => common & Marks::WIDENED,
            Class::Widest if tensors.iter().all(|t| t.fits_half()) => any & Marks::WIDENED,
            _ => Marks::empty(),
        };
        marks.set(
            Marks::DEMOTED,
            !tensors.iter().all(|t| t.is_half_by_choice()),
        );
        if plan.operands == Some(DType::F16) {
            marks |= Marks::FROM_F16;
        }
        let rounded = match named.qualifies.is_none() || mode == Mode::Off {
            true => None,
            false => inexact_half(named, &plan, tensors),
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
            marks,
            mode,
            upper,
            watched: anomaly::begins(tensors),
        }
    }

    /// Whether the operation runs in half on a device that only multiplies matrices in it.
    pub(crate) fn is_bare_contraction<B: Backend>(&self, tensor: &AmpTensor<B>) -> bool {
        match self.plan.operands {
            Some(dtype) => support_of::<B>(tensor, dtype) == HalfSupport::Contractions,
            None => false,
        }
    }

    /// The dtype that operands are cast to.
    pub(crate) fn compute_dtype(&self) -> Option<DType> {
        self.plan.operands
    }

    /// An operand as the backend gets it.
    #[inline(always)]
    pub(crate) fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        if self.watched {
            anomaly::operand(&tensor);
        }
        match self.plan.operands {
            Some(dtype) => match self.rounded {
                Some(half) => cast::<B>(tensor.into_dtype(half), dtype),
                None => tensor.into_dtype(dtype),
            },
            None => tensor.into_primitive(),
        }
    }

    /// Runs the backend's operation.
    #[inline(always)]
    pub(crate) fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        match self.upper {
            true => following(op),
            false => op(),
        }
    }

    /// What the result is marked with.
    #[inline(always)]
    pub(crate) fn marks(&self) -> Marks {
        self.marks
    }

    /// A float result of the backend's operation.
    #[inline(always)]
    pub(crate) fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let primitive = match self.plan.result {
            Some(dtype) if primitive.dtype() != dtype => cast::<B>(primitive, dtype),
            _ => primitive,
        };
        if self.watched {
            anomaly::result::<B>(self.op, &primitive);
        }
        AmpTensor::new(primitive, self.marks)
    }
}

/// The half dtype that an operation would compute in and that the device is not exact in.
fn inexact_half<B: Backend>(named: Op, plan: &Plan, tensors: &[&AmpTensor<B>]) -> Option<DType> {
    let half = plan.operands.unwrap_or(tensors[0].dtype());
    let device = tensors[0].device();
    // Above autodiff the operands are made half nevertheless: that is what the tape keeps.
    let computes = is_half(half) && !B::ad_enabled(&device);
    let inexact = computes && device::inexact::<B>(&device, half).contains(named.qualifies);
    inexact.then_some(half)
}

/// The dtypes of an operation's operands.
fn operands<B: Backend>(tensors: &[&AmpTensor<B>]) -> Operands {
    let (first, others) = tensors.split_first().expect("an operand");
    let is_constant = |t: &AmpTensor<B>| t.marks().contains(Marks::CONSTANT);
    let first = match first.dtype() {
        DType::F32 if first.marks().contains(Marks::WIDENED) => Operands::widened(),
        dtype if is_constant(first) => Operands::constant(dtype),
        dtype => Operands::one(dtype),
    };
    others.iter().fold(first, |all, t| match is_constant(t) {
        true => all.and_constant(t.dtype()),
        false => all.and(t.dtype()),
    })
}

/// The tape to record an operation on these operands on, and the half dtype in force, where the
/// policy records it itself.
fn recording<B: Backend>(tensors: &[&AmpTensor<B>]) -> Option<(&'static dyn Tape<B>, DType)> {
    let device = tensors[0].device();
    if !half_wanted() || !B::ad_enabled(&device) {
        return None;
    }
    let ours = |t: &&AmpTensor<B>| matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
    match mode(tensors) {
        Mode::On(half) if tensors.iter().all(ours) => Some((tape::of::<B>(&device)?, half)),
        _ => None,
    }
}

/// How the policy applies to these operands.
fn mode<B: Backend>(tensors: &[&AmpTensor<B>]) -> Mode {
    if is_following() || tensors.iter().any(|t| t.marks().contains(Marks::GRADIENT)) {
        return Mode::Follow;
    }
    device::mode::<B>(&tensors[0].device())
}

fn support_of<B: Backend>(tensor: &AmpTensor<B>, dtype: DType) -> HalfSupport {
    device::current::<B>(&tensor.device()).support().of(dtype)
}

/// Runs an operation that the policy decides, apart from the callers' code, into which only the
/// question whether there is a policy is to be inlined.
#[inline(never)]
fn by_policy<T>(op: impl FnOnce() -> T) -> T {
    op()
}

/// An operation of a name, its class looked up while compiling.
macro_rules! op {
    ($op:ident) => {
        const { $crate::ops::Op::of_table(stringify!($op)) }
    };
}

/// Operations from float tensors to a float tensor, each a line: its float operands in brackets,
/// then its other arguments.
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

/// As [`float_ops`], for operations with scalars that the operand's dtype has to hold.
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

/// Operations that no float tensor takes part in: the backend's own.
macro_rules! delegate {
    ($(fn $op:ident($($a:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {$(
        #[inline]
        fn $op($($a: $ty),*) -> $out {
            B::$op($($a),*)
        }
    )*};
}

pub(crate) use {backward_ops, delegate, float_ops, measuring_ops, op, scalar_ops};
