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

use burn_amp_core::policy::trials::TriedOp;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use crate::autodiff::reuse;
use crate::autodiff::tape::{self, TapeExtension, cast};
use crate::device::DeviceContext;
use crate::diagnostics::anomaly;
use crate::policy::{self, Class, HalfSupport, Mode, Operands, Plan, holds, is_half, plan};
use crate::precision::{half_wanted, in_kernel, keep_dtypes, keeps_dtypes};
use crate::scaler::ScaledLoss;
use crate::tensor::{AmpTensor, TensorFlags};

/// An operation's name and class.
#[derive(Clone, Copy)]
struct Op {
    name: &'static str,
    class: Class,
    /// The operation as trials of devices know it, if it is tried.
    tried: Option<TriedOp>,
    /// Whether the policy records the operation in a form of its own.
    is_recorded: bool,
}

impl Op {
    /// The user's own operation.
    const fn new(name: &'static str, class: Class) -> Self {
        Self {
            name,
            class,
            tried: None,
            is_recorded: false,
        }
    }

    /// An operation of the policy table.
    const fn of_table(name: &'static str) -> Self {
        Self {
            name,
            class: policy::class(name),
            tried: TriedOp::named(name),
            is_recorded: policy::is_recorded(name),
        }
    }

    /// An operation of the policy table, in the case that its row names.
    const fn when(name: &'static str, case: &str) -> Self {
        Self {
            class: policy::class_when(name, case),
            ..Self::of_table(name)
        }
    }
}

/// How an operation stands to autodiff.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// One step of the tape: `Fp32Inside` restores the first operand's dtype.
    Forward,
    /// A backward function: `Fp32Inside` returns the widest dtype. Any other step that a formula of
    /// the backward pass takes on a gradient returns the gradient's dtype.
    Backward,
    /// Autodiff composes the operation of others. `Fp32Inside` is widened above autodiff; otherwise
    /// the composing steps would run in half.
    Composed,
}

/// A tape, and the half dtype in force.
type TapeInHalf<B> = (&'static dyn TapeExtension<B>, DType);

/// The decision on one operation: how its operands are cast, and the dtype and flags of its result.
struct Call {
    op: Op,
    context: DeviceContext,
    plan: Plan,
    /// The half dtype that operands are rounded to before the operation computes in FP32.
    rounded: Option<DType>,
    flags: TensorFlags,
    /// The scaler of the scaled loss among the operands, if any.
    scaled: Option<ScaledLoss>,
    /// Whether autodiff lies below and the policy is on.
    upper: bool,
    /// Whether no autodiff lies below: the backend's operation is a kernel.
    is_kernel: bool,
    /// Whether anomaly detection looks for values that are not finite.
    watched: bool,
}

impl Call {
    /// Decides a step of the tape on these operands. Another operand may stand in for an absent one.
    fn new<B: Backend>(named: Op, tensors: &[&AmpTensor<B>]) -> Self {
        Self::decide(Step::Forward, named, tensors, &[])
    }

    /// Decides an operation. If the first operand's dtype does not hold a scalar, the operation runs
    /// in FP32.
    #[inline(never)]
    fn decide<B: Backend>(
        step: Step,
        named: Op,
        tensors: &[&AmpTensor<B>],
        scalars: &[Scalar],
    ) -> Self {
        let class = named.class;
        let device = tensors[0].device();
        let context = DeviceContext::of::<B>(&device);
        let mode = mode(&context, tensors);
        let operands = match step {
            Step::Forward | Step::Composed => operands(tensors, mode),
            Step::Backward => {
                let widest = Operands::one(operands(tensors, mode).widest());
                tensors.iter().fold(widest, |all, t| all.and(t.dtype()))
            }
        };
        let is_kernel = !B::ad_enabled(&device);
        let upper = mode != Mode::Off && !is_kernel;
        let mut plan = match mode {
            // Half tensors that the policy made return to FP32; the user's own half tensors stay.
            Mode::Off if tensors.iter().any(|t| t.is_demoted()) => Plan {
                operands: (class != Class::Move).then_some(match operands.widest() {
                    DType::F64 => DType::F64,
                    _ => DType::F32,
                }),
                result: None,
            },
            // An FP32 gradient of a parameter that is still half: both are FP32 after the step.
            Mode::Off if is_step_in_half(tensors) => Plan::cast(operands.widest()),
            // The lower layer widens what autodiff passes down whole, so the tape keeps half.
            _ if upper && class == Class::Fp32Inside && step != Step::Composed => Plan::default(),
            mode => plan(class, operands, mode, || context.support::<B>(&device)),
        };
        if class == Class::Fp32Inside
            && plan.operands == Some(DType::F32)
            && let Some(op) = named.tried
            && is_kernel
            && let Some(half) = operands.only_half()
            && context.is_exact::<B>(&device, half, op) == Some(true)
        {
            plan = Plan::default();
        }
        let all = tensors.iter().map(|t| t.flags());
        let any: TensorFlags = all.clone().collect();
        let common = all.fold(TensorFlags::all(), |common, flags| common & flags);
        if step != Step::Backward
            && any.contains(TensorFlags::BACKWARD)
            && let Some(half) = half_gradient(tensors)
            && !matches!(class, Class::Move | Class::LowerPrecision)
            && context.support::<B>(&device).of(half) == HalfSupport::Arithmetic
        {
            plan.result = Some(half);
        }
        let mut flags =
            any & (TensorFlags::GRADIENT | TensorFlags::FROM_F16 | TensorFlags::BACKWARD);
        flags |= match class {
            Class::Move => common & (TensorFlags::WIDENED | TensorFlags::CONSTANT),
            Class::Keep | Class::Activation => common & TensorFlags::WIDENED,
            Class::Promote | Class::PromoteSum => any & fitting(tensors),
            _ => TensorFlags::empty(),
        };
        let by_choice = tensors.iter().all(|t| t.is_half_by_choice());
        flags.set(TensorFlags::DEMOTED, !by_choice);
        if plan.operands == Some(DType::F16) {
            flags |= TensorFlags::FROM_F16;
        }
        let computed = plan.operands.unwrap_or(tensors[0].dtype());
        let mut rounded = None;
        if is_half(computed)
            && class != Class::Fp32Inside
            && mode != Mode::Off
            && let Some(op) = named.tried
            // Above autodiff the operands are cast to half anyway, so that the tape keeps half.
            && is_kernel
            && context.is_exact::<B>(&device, computed, op) == Some(false)
        {
            rounded = Some(computed);
            plan.operands = Some(DType::F32);
            plan.result = plan.result.or(rounded);
        }
        let mut call = Self {
            op: named,
            context,
            plan,
            rounded,
            flags,
            scaled: scaled_loss(tensors),
            upper,
            is_kernel,
            watched: is_watched(&context, tensors, &device),
        };
        if !scalars.is_empty() {
            call.hold(scalars, tensors[0].dtype(), mode);
        }
        call
    }

    /// Widens the operation if half does not hold its scalars.
    fn hold(&mut self, scalars: &[Scalar], dtype: DType, mode: Mode) {
        if self.watched {
            anomaly::scalars(scalars);
        }
        let held = |dtype| scalars.iter().all(|s| holds(dtype, s.elem::<f64>()));
        if self.flags.intersects(TensorFlags::WIDENED) {
            self.flags -= TensorFlags::widened_where(|half| !held(half));
        }
        if is_half(dtype) && !held(dtype) && mode != Mode::Off {
            let is_gradient = self.flags.contains(TensorFlags::BACKWARD);
            self.plan = Plan {
                result: self.plan.result.filter(|_| is_gradient),
                ..Plan::cast(DType::F32)
            };
        }
    }

    /// As [`tape`](Call::tape), if the policy itself records the operation.
    fn recording<B: Backend>(&self, tensors: &[&AmpTensor<B>]) -> Option<TapeInHalf<B>> {
        self.op.is_recorded.then(|| self.tape(tensors))?
    }

    /// The tape of these operands, if the policy can record an operation on them.
    fn tape<B: Backend>(&self, tensors: &[&AmpTensor<B>]) -> Option<TapeInHalf<B>> {
        let device = tensors[0].device();
        let ours = |t: &&AmpTensor<B>| matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
        match mode(&self.context, tensors) {
            Mode::On(half) if B::ad_enabled(&device) && tensors.iter().all(ours) => {
                Some((tape::of::<B>(&device)?, half))
            }
            _ => None,
        }
    }

    /// Whether the operation runs in half on a device that only multiplies matrices in half.
    fn is_bare_contraction<B: Backend>(&self, tensor: &AmpTensor<B>) -> bool {
        self.plan.operands.is_some_and(|dtype| {
            let support = self.context.support::<B>(&tensor.device());
            support.of(dtype) == HalfSupport::Contractions
        })
    }

    /// Casts an operand for the backend's operation.
    #[inline(always)]
    fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        self.watch(&tensor);
        match (self.plan.operands, self.rounded) {
            (None, _) => tensor.into_primitive(),
            (Some(dtype), None) => reuse::into_dtype(tensor, dtype),
            (Some(dtype), Some(half)) => cast::<B>(reuse::into_dtype(tensor, half), dtype),
        }
    }

    /// Runs the backend's operation.
    #[inline(always)]
    fn run<T>(&self, op: impl FnOnce() -> T) -> T {
        match (self.upper, self.is_kernel) {
            (true, _) => keep_dtypes(op),
            (false, true) => in_kernel(op),
            (false, false) => op(),
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
        let is_gradient = self.op.class == Class::Fp32Inside
            && self.flags.contains(TensorFlags::BACKWARD)
            && self.plan.result.is_some_and(is_half);
        let is_wide = is_gradient && primitive.dtype() == DType::F32;
        let wide = is_wide.then(|| primitive.clone());
        self.recorded(self.in_result_dtype::<B>(primitive))
            .with_wide(wide)
    }

    /// Casts a result to the dtype that the policy gives it.
    #[inline(always)]
    fn in_result_dtype<B: Backend>(&self, primitive: FloatTensor<B>) -> FloatTensor<B> {
        match self.plan.result {
            Some(dtype) if primitive.dtype() != dtype => cast::<B>(primitive, dtype),
            _ => primitive,
        }
    }

    /// Wraps a float result of a recorded operation, in the result's own dtype.
    #[inline(always)]
    fn recorded<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        if self.watched {
            anomaly::result::<B>(self.op.name, self.op.class, &primitive);
        }
        self.marked(primitive)
    }

    /// A tensor with the flags and the scaler of the result.
    #[inline(always)]
    fn marked<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        AmpTensor::new(primitive, self.flags).with_scaled(self.scaled.clone())
    }
}

/// Whether anomaly detection looks at an operation on these operands.
#[inline(always)]
fn is_watched<B: Backend>(
    context: &DeviceContext,
    tensors: &[&AmpTensor<B>],
    device: &B::Device,
) -> bool {
    context.in_force.watched && anomaly::begins(tensors, |t| tape::id::<B, _>(t, device))
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

/// Whether an optimizer brings an FP32 gradient and a half parameter together.
fn is_step_in_half<B: Backend>(tensors: &[&AmpTensor<B>]) -> bool {
    let first = tensors[0].dtype();
    tensors.iter().any(|t| t.dtype() != first)
        && tensors
            .iter()
            .any(|t| t.flags().contains(TensorFlags::GRADIENT))
}

/// The dtype of the gradients among the operands of a formula of the backward pass, if it is half.
fn half_gradient<B: Backend>(tensors: &[&AmpTensor<B>]) -> Option<DType> {
    let is_gradient = |t: &&&AmpTensor<B>| t.flags().contains(TensorFlags::BACKWARD);
    let mut dtypes = tensors.iter().filter(is_gradient).map(|t| t.dtype());
    let first = dtypes.next().filter(|dtype| is_half(*dtype))?;
    dtypes.all(|dtype| dtype == first).then_some(first)
}

/// The widened flags of each half dtype in which all operands fit.
fn fitting<B: Backend>(tensors: &[&AmpTensor<B>]) -> TensorFlags {
    TensorFlags::widened_where(|half| tensors.iter().all(|t| t.fits(half)))
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

/// How the policy applies to these operands.
fn mode<B: Backend>(context: &DeviceContext, tensors: &[&AmpTensor<B>]) -> Mode {
    let is_gradient = |t: &&AmpTensor<B>| t.flags().contains(TensorFlags::GRADIENT);
    match keeps_dtypes() || tensors.iter().any(is_gradient) {
        true => Mode::KeepDtypes,
        false => context.mode,
    }
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
    step: Step,
    named: Op,
    operands: [AmpTensor<B>; N],
    op: impl FnOnce([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
) -> [AmpTensor<B>; M] {
    const { assert!(N > 0, "an operation needs an operand") };
    match half_wanted() {
        false => op(operands.map(AmpTensor::into_primitive)).map(AmpTensor::plain),
        true => by_policy(|| {
            let call = Call::decide(step, named, &operands.each_ref(), &[]);
            let operands = operands.map(|operand| call.operand(operand));
            call.run(|| op(operands)).map(|result| call.result(result))
        }),
    }
}

/// The operation of this name, or the case of it that its row names. Its class is looked up at
/// compile time.
macro_rules! op {
    ($op:ident) => {
        const { $crate::ops::Op::of_table(stringify!($op)) }
    };
    ($op:ident, $case:literal) => {
        const { $crate::ops::Op::when(stringify!($op), $case) }
    };
}

/// Operations, one per line: the arguments in the trait's order, the result, and what the policy
/// does. `[x]` is a float tensor, `[?x]` an optional one and `{x}` a scalar. [`wrapped`] has an arm
/// for each kind of result.
///
/// The check for a policy stands here, before anything else: in a process that never asked for half,
/// it is all that an operation pays.
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
            match $crate::precision::half_wanted() {
                true => $crate::ops::by_policy(move || $own),
                false => $crate::ops::wrapped!($out, ($crate::AmpTensor::plain), B::$op($(
                    $($t.into_primitive())?
                    $($o.map($crate::AmpTensor::into_primitive))?
                    $($s)?
                    $($a)?
                ),+)),
            }
        }
    )*};
}

/// Operations that follow their class, one per line, in the notation of [`own_ops`]. The [`Step`]
/// comes first. The half dtype of the first tensor must hold the scalars `{x}`.
macro_rules! float_ops {
    ($step:ident; $($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident;)*) => {$(
        $crate::ops::own_ops! {
            $op($($([$t])? $([?$o])? $({$s})? $($a: $ty)?),+) -> $out => {
                let tensors = $crate::ops::present([$($(Some(&$t),)? $($o.as_ref(),)?)+]);
                let step = $crate::ops::Step::$step;
                let call = $crate::ops::Call::decide(step, op!($op), &tensors, &[$($($s,)?)+]);
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

/// As [`delegate`], for operations on a device. The device is used without its own autodiff.
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
