//! The backend's operations, one file per trait of Burn's. Here: how any of them is forwarded.

mod activation;
mod attention;
mod bool_tensor;
mod int_tensor;
mod module;
mod qtensor;
mod tensor;
mod transaction;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use crate::device;
use crate::policy::{Class, HalfSupport, Mode, Operands, Plan, holds, plan};
use crate::precision::{following, is_following};
use crate::tensor::{AmpTensor, Marks};

/// One operation, decided: how its operands are cast, and what its result is.
pub(crate) struct Call {
    plan: Plan,
    marks: Marks,
    mode: Mode,
    upper: bool,
}

impl Call {
    /// Decides an operation on these operands, where another may stand in for one that is absent.
    /// `Wide` gives back the first operand's dtype.
    pub(crate) fn new<B: Backend>(class: Class, tensors: &[&AmpTensor<B>]) -> Self {
        Self::decide(class, tensors, operands(tensors), false)
    }

    /// As [`new`](Call::new) for backward functions, where `Wide` gives the widest dtype.
    pub(crate) fn backward<B: Backend>(class: Class, tensors: &[&AmpTensor<B>]) -> Self {
        let operands = operands(tensors);
        let widest = Operands::one(operands.widest());
        let operands = tensors.iter().fold(widest, |all, t| all.and(t.dtype()));
        Self::decide(class, tensors, operands, false)
    }

    /// As [`new`](Call::new) for an operation with scalars: in FP32 when the operand's dtype does
    /// not hold one of them.
    pub(crate) fn with_scalars<B: Backend>(
        class: Class,
        tensor: &AmpTensor<B>,
        scalars: &[Scalar],
    ) -> Self {
        let mut call = Self::new(class, &[tensor]);
        let dtype = tensor.dtype();
        if call.plan.operands.is_none()
            && operands(&[tensor]).any_half()
            && scalars.iter().any(|s| !holds(dtype, s.elem::<f64>()))
            && call.mode != Mode::Off
        {
            call.plan.operands = Some(DType::F32);
        }
        call
    }

    /// As [`new`](Call::new) for an operation that autodiff composes of others: a `Wide` one is
    /// widened above autodiff, where it would otherwise be composed of steps in half.
    pub(crate) fn composed<B: Backend>(class: Class, tensors: &[&AmpTensor<B>]) -> Self {
        Self::decide(class, tensors, operands(tensors), true)
    }

    /// As [`composed`](Call::composed) for an operation that is `Wide` for its gradient alone:
    /// without autodiff it moves data.
    pub(crate) fn summed_backward<B: Backend>(class: Class, tensor: &AmpTensor<B>) -> Self {
        match B::ad_enabled(&tensor.device()) {
            true => Self::composed(class, &[tensor]),
            false => Self::new(Class::Move, &[tensor]),
        }
    }

    fn decide<B: Backend>(
        class: Class,
        tensors: &[&AmpTensor<B>],
        operands: Operands,
        composed: bool,
    ) -> Self {
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
        let marks = Marks {
            demoted: !tensors.iter().all(|t| t.is_half_by_choice()),
            gradient: tensors.iter().any(|t| t.marks().gradient),
            from_f16: plan.operands == Some(DType::F16)
                || tensors.iter().any(|t| t.marks().from_f16),
        };
        Self {
            plan,
            marks,
            mode,
            upper,
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
    pub(crate) fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        match self.plan.operands {
            Some(dtype) => tensor.into_dtype(dtype),
            None => tensor.into_primitive(),
        }
    }

    /// Runs the backend's operation.
    pub(crate) fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        match self.upper {
            true => following(op),
            false => op(),
        }
    }

    /// What the result is marked with.
    pub(crate) fn marks(&self) -> Marks {
        self.marks
    }

    /// A float result of the backend's operation.
    pub(crate) fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let primitive = match self.plan.result {
            Some(dtype) if primitive.dtype() != dtype => B::float_cast(primitive, dtype.into()),
            _ => primitive,
        };
        AmpTensor::new(primitive, self.marks)
    }
}

/// The dtypes of an operation's operands.
fn operands<B: Backend>(tensors: &[&AmpTensor<B>]) -> Operands {
    let (first, others) = tensors.split_first().expect("an operand");
    others
        .iter()
        .fold(Operands::one(first.dtype()), |all, t| all.and(t.dtype()))
}

/// How the policy applies to these operands.
fn mode<B: Backend>(tensors: &[&AmpTensor<B>]) -> Mode {
    if is_following() || tensors.iter().any(|t| t.marks().gradient) {
        return Mode::Follow;
    }
    device::mode::<B>(&tensors[0].device())
}

fn support_of<B: Backend>(tensor: &AmpTensor<B>, dtype: DType) -> HalfSupport {
    device::current::<B>(&tensor.device()).support().of(dtype)
}

/// The class of an operation, looked up while compiling.
macro_rules! class {
    ($op:ident) => {
        const { $crate::policy::class(stringify!($op)) }
    };
}

/// Operations from float tensors to a float tensor, each a line: its float operands in brackets,
/// then its other arguments.
macro_rules! float_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*);)*) => {$(
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> FloatTensor<Self> {
            let call = Call::new(class!($op), &[$(&$t),+]);
            $(let $t = call.operand($t);)+
            call.result(call.run(|| B::$op($($t,)+ $($a),*)))
        }
    )*};
}

/// As [`float_ops`], for backward functions.
macro_rules! backward_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> FloatTensor<Self> {
            let call = Call::backward(class!($op), &[$(&$t),+]);
            $(let $t = call.operand($t);)+
            call.result(call.run(|| B::$op($($t,)+ $($a),*)))
        }
    )*};
}

/// As [`float_ops`], for operations with scalars that the operand's dtype has to hold.
macro_rules! scalar_ops {
    ($($op:ident [$t:ident] ($($s:ident),+) -> $out:ident $(, $a:ident: $ty:ty)*;)*) => {$(
        fn $op($t: FloatTensor<Self>, $($s: Scalar,)+ $($a: $ty),*) -> $out<Self> {
            let call = Call::with_scalars(class!($op), &$t, &[$($s),+]);
            let $t = call.operand($t);
            let out = call.run(|| B::$op($t, $($s,)+ $($a),*));
            scalar_ops!(@ $out, call, out)
        }
    )*};
    (@ FloatTensor, $call:ident, $out:ident) => { $call.result($out) };
    (@ BoolTensor, $call:ident, $out:ident) => { $out };
}

/// Operations from float tensors to an integer or boolean tensor.
macro_rules! measuring_ops {
    ($($op:ident [$($t:ident),+] ($($a:ident: $ty:ty),*) -> $out:ident;)*) => {$(
        fn $op($($t: FloatTensor<Self>,)+ $($a: $ty),*) -> $out<Self> {
            let call = Call::new(class!($op), &[$(&$t),+]);
            $(let $t = call.operand($t);)+
            call.run(|| B::$op($($t,)+ $($a),*))
        }
    )*};
}

/// Operations that no float tensor takes part in: the backend's own.
macro_rules! delegate {
    ($(fn $op:ident($($a:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {$(
        fn $op($($a: $ty),*) -> $out {
            B::$op($($a),*)
        }
    )*};
}

pub(crate) use {backward_ops, class, delegate, float_ops, measuring_ops, scalar_ops};
