//! The backend's operations, one file per Burn trait. This file: how an operation is forwarded.

mod activation;
mod attention;
mod bool_tensor;
mod distributed;
mod float;
mod int_tensor;
mod module;
mod qtensor;
mod transaction;

use burn_amp_core::policy::trials::TriedOp;
use burn_amp_core::policy::{
    self, Class, HalfSupport, Mode, Operands, Plan, Support, holds, is_half, plan, same,
};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Scalar, TensorMetadata};

use crate::AmpTensor;
use crate::device::DeviceState;
use crate::tensor::{TensorFlags, converted};

/// An operation's name and class.
#[derive(Clone, Copy)]
struct Op {
    name: &'static str,
    class: Class,
    /// The operation as trials of devices know it, if it is tried.
    tried: Option<TriedOp>,
    /// Whether the result fits in half wherever the operands do.
    is_bounded: bool,
}

impl Op {
    /// An operation of the policy table.
    const fn of_table(name: &'static str) -> Self {
        Self::with(name, policy::class(name))
    }

    /// An operation of the policy table, in the case that its row names.
    const fn when(name: &'static str, case: &str) -> Self {
        Self::with(name, policy::class_when(name, case))
    }

    const fn with(name: &'static str, class: Class) -> Self {
        let is_bounded = match class {
            // A product of two large operands may be of any size.
            Class::Promote => !same(name, "float_mul") && !same(name, "float_div"),
            Class::PromoteSum | Class::Keep | Class::Activation | Class::Move => true,
            _ => same(name, "float_mean") || same(name, "float_mean_dim"),
        };
        Self {
            name,
            class,
            tried: TriedOp::named(name),
            is_bounded,
        }
    }
}

/// What becomes of an operation's result.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// `Fp32Inside` restores the first operand's dtype.
    Forward,
    /// A backward function: `Fp32Inside` returns the widest dtype of its operands.
    Backward,
    /// The gradient of a parameter: in the dtype that the client knows, since an optimizer sums it up
    /// and multiplies it with small factors.
    ParameterGradient,
}

/// The decision on one operation: how its operands are cast, and the dtype and flags of its result.
struct Call {
    name: &'static str,
    plan: Plan<DType>,
    /// The half dtype that operands are rounded to before the operation computes in FP32.
    rounded: Option<DType>,
    /// The dtype by which the client knows the result.
    declared: FloatDType,
    flags: TensorFlags,
    support: Support,
}

impl Call {
    /// Decides an operation of the forward pass, or one that has no pass of its own. Another operand
    /// may stand in for an absent one.
    fn new<B: Backend>(op: Op, tensors: &[&AmpTensor<B>]) -> Self {
        Self::decide(Step::Forward, op, tensors, &[])
    }

    /// Decides an operation. If the dtype that the operation would run in does not hold a scalar, it
    /// runs in FP32.
    fn decide<B: Backend>(
        step: Step,
        op: Op,
        tensors: &[&AmpTensor<B>],
        scalars: &[Scalar],
    ) -> Self {
        let device = tensors[0].device();
        let state = DeviceState::of::<B>(&device);
        let support = state.support::<B>(&device);
        let declared = declared(tensors);
        let mut call = Self {
            name: op.name,
            plan: Plan::default(),
            rounded: None,
            declared,
            flags: TensorFlags::empty(),
            support,
        };
        let mode = state.mode::<B>(&device);
        let Mode::On(half) = mode else {
            // Only where the device was in half before.
            if tensors.iter().any(|t| !t.is_as_declared()) {
                call.plan = Plan::cast(declared.into());
            }
            return call;
        };
        let operands = operands(step, tensors, half);
        call.plan = plan(op.class, operands, mode, || support);
        if step == Step::ParameterGradient {
            call.plan.result = Some(declared.into());
        }
        call.flags = flags(op, tensors);
        call.hold(scalars, tensors);
        let Some(tried) = op.tried else {
            return call;
        };
        let is_exact = |half| state.is_exact::<B>(&device, half, tried);
        if op.class == Class::Fp32Inside {
            if call.plan.operands == Some(DType::F32)
                && let Some(half) = operands.only_half()
                && is_exact(half)
            {
                call.plan = Plan::default();
            }
            return call;
        }
        let computed = call.plan.operands.unwrap_or(tensors[0].dtype());
        if is_half(computed) && !is_exact(computed) {
            call.rounded = Some(computed);
            call.plan = Plan {
                operands: Some(DType::F32),
                result: call.plan.result.or(call.rounded),
            };
        }
        call
    }

    /// Widens the operation if a half dtype that it takes or computes in does not hold its scalars.
    fn hold<B: Backend>(&mut self, scalars: &[Scalar], tensors: &[&AmpTensor<B>]) {
        let held = |dtype| scalars.iter().all(|s| holds(dtype, s.elem::<f64>()));
        self.flags -= TensorFlags::widened_where(|half| !held(half));
        let dtype = tensors[0].dtype();
        if !held(dtype) || !held(self.plan.operands.unwrap_or(dtype)) {
            self.plan = Plan::cast(DType::F32);
        }
    }

    /// Whether the operation runs in half on a device that only multiplies matrices in half.
    fn is_bare_contraction(&self) -> bool {
        let computed = self.plan.operands;
        computed.is_some_and(|dtype| self.support.of(dtype) == HalfSupport::Contractions)
    }

    /// Casts an operand for the backend's operation.
    fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        match (self.plan.operands, self.rounded) {
            (None, _) => tensor.into_primitive(),
            (Some(dtype), None) => tensor.into_dtype(dtype, self.name),
            (Some(dtype), Some(half)) => AmpTensor::<B>::plain(tensor.into_dtype(half, self.name))
                .into_dtype(dtype, self.name),
        }
    }

    /// Wraps a float result of the backend's operation, in the dtype that the policy gives it.
    fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        match self.plan.result {
            Some(dtype) => self.result_in(dtype, primitive),
            None => AmpTensor::new(primitive, self.declared, self.flags),
        }
    }

    /// Wraps a float result of the backend's operation, in `dtype`.
    fn result_in<B: Backend>(&self, dtype: DType, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let primitive = match primitive.dtype() == dtype {
            true => primitive,
            false => converted::<B>(primitive, dtype, self.name),
        };
        AmpTensor::new(primitive, self.declared, self.flags)
    }
}

/// The dtype by which the client knows a result: that of the operands, which are of one dtype to it.
fn declared<B: Backend>(tensors: &[&AmpTensor<B>]) -> FloatDType {
    let first = Operands::<DType>::one(tensors[0].declared().into());
    let all = tensors
        .iter()
        .fold(first, |all, t| all.and(t.declared().into()));
    all.widest().into()
}

/// What is known about the values of a result.
fn flags<B: Backend>(op: Op, tensors: &[&AmpTensor<B>]) -> TensorFlags {
    let mut flags = TensorFlags::empty();
    if op.is_bounded {
        flags |= TensorFlags::widened_where(|half| tensors.iter().all(|t| t.fits(half)));
    }
    let is_constant = |t: &&AmpTensor<B>| t.flags().contains(TensorFlags::CONSTANT);
    flags.set(
        TensorFlags::CONSTANT,
        op.class == Class::Move && tensors.iter().all(is_constant),
    );
    flags
}

/// The dtypes of an operation's operands, on a device in `half`.
fn operands<B: Backend>(step: Step, tensors: &[&AmpTensor<B>], half: DType) -> Operands<DType> {
    let is_constant = |t: &AmpTensor<B>| t.flags().contains(TensorFlags::CONSTANT);
    let first = tensors[0];
    let first = match first.dtype() {
        DType::F32 if first.flags().contains(TensorFlags::widened(half)) => Operands::widened(),
        dtype if is_constant(first) => Operands::constant(dtype),
        dtype => Operands::one(dtype),
    };
    let all = tensors[1..]
        .iter()
        .fold(first, |all, t| match is_constant(t) {
            true => all.and_constant(t.dtype()),
            false => all.and(t.dtype()),
        });
    match step {
        // The first operand's dtype is restored: the widest of all stands first.
        Step::Backward => {
            let widest = Operands::one(all.widest());
            tensors.iter().fold(widest, |all, t| all.and(t.dtype()))
        }
        Step::Forward | Step::ParameterGradient => all,
    }
}

/// Operands, with the first in place of each absent one.
fn present<B: Backend, const N: usize>(tensors: [Option<&AmpTensor<B>>; N]) -> [&AmpTensor<B>; N] {
    let first = tensors[0].expect("the first operand is always given");
    tensors.map(|tensor| tensor.unwrap_or(first))
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
/// does. `[x]` is a float tensor, `[?x]` an optional one and `{x}` a scalar.
macro_rules! own_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident => $own:expr;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        fn $op($(
            $($t: FloatTensor<Self>)?
            $($o: Option<FloatTensor<Self>>)?
            $($s: Scalar)?
            $($a: $ty)?
        ),+) -> $out<Self> {
            $own
        }
    )*};
}

/// Operations that follow their class, one per line, in the notation of [`own_ops`]. The [`Step`]
/// comes first. [`wrapped`] has an arm for each kind of result.
macro_rules! float_ops {
    ($step:ident; $($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident;)*) => {$(
        $crate::ops::own_ops! {
            $op($($([$t])? $([?$o])? $({$s})? $($a: $ty)?),+) -> $out => {
                let tensors = $crate::ops::present([$($(Some(&$t),)? $($o.as_ref(),)?)+]);
                let step = $crate::ops::Step::$step;
                let op = $crate::ops::op!($op);
                let call = $crate::ops::Call::decide(step, op, &tensors, &[$($($s,)?)+]);
                $(
                    $(let $t = call.operand($t);)?
                    $(let $o = $o.map(|tensor| call.operand(tensor));)?
                )+
                let out = B::$op($($($t)? $($o)? $($s)? $($a)?),+);
                $crate::ops::wrapped!($out, call, out)
            };
        }
    )*};
}

/// A result of the backend's operation, with its float tensors wrapped.
macro_rules! wrapped {
    (FloatTensor, $call:ident, $out:ident) => {
        $call.result($out)
    };
    (BoolTensor, $call:ident, $out:ident) => {{
        let _ = $call;
        $out
    }};
    (IntTensor, $call:ident, $out:ident) => {{
        let _ = $call;
        $out
    }};
    (QuantizedTensor, $call:ident, $out:ident) => {{
        let _ = $call;
        $out
    }};
    (WithIndices, $call:ident, $out:ident) => {
        ($call.result($out.0), $out.1)
    };
    (MaxPool1dWithIndices, $call:ident, $out:ident) => {
        MaxPool1dWithIndices::new($call.result($out.output), $out.indices)
    };
    (MaxPool2dWithIndices, $call:ident, $out:ident) => {
        MaxPool2dWithIndices::new($call.result($out.output), $out.indices)
    };
    (MaxPool1dBackward, $call:ident, $out:ident) => {
        MaxPool1dBackward::new($call.result($out.x_grad))
    };
    (MaxPool2dBackward, $call:ident, $out:ident) => {
        MaxPool2dBackward::new($call.result($out.x_grad))
    };
    (BatchNormTrain, $call:ident, $out:ident) => {{
        // The statistics feed running averages: they are not rounded.
        let declared = $call.declared.into();
        BatchNormTrain::new(
            $call.result($out.output),
            $call.result_in(declared, $out.mean),
            $call.result_in(declared, $out.variance),
        )
    }};
}

/// Operations without float tensors: the backend's own.
macro_rules! delegate {
    ($(fn $op:ident($($a:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {$(
        fn $op($($a: $ty),*) $(-> $out)? {
            B::$op($($a),*)
        }
    )*};
}

pub(crate) use delegate;
use {float_ops, op, own_ops, wrapped};

#[cfg(test)]
mod tests {
    use burn_amp_core::Precision;
    use burn_backend::ops::{ActivationOps, AttentionModuleOptions, FloatTensorOps, ModuleOps};
    use burn_backend::{TensorData, try_read_sync};
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::{Amp, configure};

    /// A device that only multiplies matrices in bf16. Its state is not that of Flex.
    type Contracting = Amp<Amp<Flex>>;

    fn ones(shape: [usize; 2]) -> AmpTensor<Amp<Flex>> {
        let data = TensorData::new(vec![1f32; shape[0] * shape[1]], shape);
        Contracting::float_from_data(data, &FlexDevice)
    }

    #[test]
    fn a_device_that_only_contracts_in_half_does_nothing_else_in_half() {
        DeviceState::of::<Amp<Flex>>(&FlexDevice).pretend(Support {
            f16: HalfSupport::None,
            bf16: HalfSupport::Contractions,
        });
        configure::<Amp<Flex>>(&FlexDevice, Precision::Bf16).unwrap();
        let is_fp32 = |tensor: AmpTensor<_>| assert_eq!(tensor.dtype(), DType::F32);

        let call = Call::new(op!(linear), &[&ones([2, 2])]);
        assert!(call.is_bare_contraction());
        // The bias is added in FP32: beside 2, bf16 does not hold it.
        let data = TensorData::new(vec![0.002f32; 2], [2]);
        let bias = Contracting::float_from_data(data, &FlexDevice);
        let out = Contracting::linear(ones([2, 2]), ones([2, 2]), Some(bias));
        let data = try_read_sync(Contracting::float_into_data(out.clone()));
        let values: Vec<f32> = data.unwrap().unwrap().try_to_vec().unwrap();
        assert_eq!(values, [2.002; 4]);
        is_fp32(out);
        is_fp32(Contracting::prelu(ones([2, 2]), ones([1, 1])));
        is_fp32(Contracting::relu(ones([2, 2])));
        let heads = || Contracting::float_reshape(ones([4, 4]), [1, 1, 4, 4].into());
        let options = AttentionModuleOptions::default();
        is_fp32(Contracting::attention(
            heads(),
            heads(),
            heads(),
            None,
            None,
            options,
        ));

        // What the client asks for in half is stored so, and computed in FP32.
        let shape = [2, 2].into();
        let own = Contracting::float_zeros(shape, &FlexDevice, FloatDType::BF16);
        assert_eq!(own.dtype(), DType::BF16);
        is_fp32(Contracting::float_add_scalar(own, 1.0.into()));
    }

    #[test]
    fn the_dtype_that_a_client_knows_is_the_widest() {
        let f16 = || AmpTensor::<Flex>::plain(half(DType::F16));
        let bf16 = || AmpTensor::<Flex>::plain(half(DType::BF16));
        assert_eq!(declared(&[&f16(), &f16()]), FloatDType::F16);
        assert_eq!(declared(&[&f16(), &bf16()]), FloatDType::F32);
    }

    fn half(dtype: DType) -> FloatTensor<Flex> {
        Flex::float_zeros([1].into(), &FlexDevice, dtype.into())
    }
}
