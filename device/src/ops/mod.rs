//! The backend's operations, one file per Burn trait. This file forwards an operation to the backend.

// A method left to its default would silently lose the inner backend's own kernel.
#![deny(clippy::missing_trait_methods)]

mod activation;
mod attention;
#[cfg(feature = "burn-0-23")]
mod attention_backward;
mod bool_tensor;
#[cfg(feature = "burn-0-22")]
#[path = "../burn_0_22/operations.rs"]
mod burn_0_22;
#[cfg(feature = "burn-0-23")]
mod burn_0_23;
#[cfg(feature = "burn-0-23")]
mod collective;
mod distributed;
mod float;
mod int_tensor;
mod module;
mod qtensor;
mod transaction;
mod unrounded;
mod watch;

#[cfg(feature = "burn-0-22")]
use burn_0_22 as this_burn;
#[cfg(feature = "burn-0-23")]
use burn_0_23 as this_burn;
use burn_amp_core::policy::trials::TriedOp;
use burn_amp_core::policy::{Decision, Effect, Layer, Mode, Op, Operand, Site, decide, widest};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata};

use crate::AmpTensor;
use crate::device::{DeviceState, UNSCALED, is_watched};
use crate::tensor::{Marks, Origin, converted};
use watch::Watch;

/// The operation of this name. Its row is looked up at compile time.
macro_rules! op {
    ($op:ident) => {
        const { burn_amp_core::policy::Op::named(stringify!($op)) }
    };
}

/// An operation, and the decision about it.
struct Call {
    op: Op,
    decision: Decision<DType>,
    /// The client's dtype of the result.
    declared: FloatDType,
    /// The marks of the result, unless the result is one number reduced from many.
    marks: Marks,
    reduces_from: usize,
    /// Whether one row is reshaped.
    reshapes_row: bool,
    origin: Origin,
    /// For anomaly detection.
    watch: Option<Watch>,
}

impl Call {
    /// An operation on these operands. For an absent operand, pass another one.
    fn new<B: Backend, const N: usize>(op: Op, tensors: [&AmpTensor<B>; N]) -> Self {
        Self::of(op, &tensors, &tensors.map(AmpTensor::operand), &[])
    }

    /// An operation on these operands of the tensors, and on these scalars.
    fn of<B: Backend>(
        op: Op,
        tensors: &[&AmpTensor<B>],
        operands: &[Operand<DType>],
        scalars: &[f64],
    ) -> Self {
        let device = tensors[0].device();
        let declared = declared(tensors);
        let marks = Marks::of(tensors.iter().map(|tensor| tensor.marks()));
        let state = DeviceState::of::<B>(&device);
        let watch = is_watched()
            .then(|| Watch::begin(&op, tensors, scalars, state, marks.is_gradient()))
            .flatten();
        let layer = Layer {
            // A device sees no parameters.
            data_in_half: true,
            mode: state.mode::<B>(&device, marks.region()),
            // Autodiff runs in the client, unless the backend has its own.
            is_kernel: !B::ad_enabled(&device),
            support: state.support::<B>(&device),
            // The client's graph has its own dtypes.
            declared: Some(declared.into()),
            known: state.exceptions().of(&op, || {
                let second = tensors.get(1).unwrap_or(&tensors[0]);
                op.length(&tensors[0].shape(), &second.shape())
            }),
        };
        if UNSCALED.is_watched()
            && op.name.ends_with("_backward")
            && layer.mode == Mode::On(DType::F16)
        {
            UNSCALED.backward_in_f16();
        }
        let at = At::<B> {
            state,
            device,
            tensors,
        };
        let mut decision = decide(&op, operands, scalars, &layer, &at);
        if let Some(first) = tensors[0].unrounded() {
            let all = tensors.iter().all(|tensor| tensor.unrounded().is_some());
            decision = decision.reading(&op, tensors[0].dtype(), first.functions(), all);
        }
        Self {
            op,
            decision,
            declared,
            marks,
            reduces_from: if marks == Marks::default() || !reduces(&op) {
                0
            } else {
                let elements = tensors.iter().map(|tensor| tensor.shape().num_elements());
                elements.max().unwrap_or(0)
            },
            reshapes_row: op.effect == Effect::Reshapes && is_row(&tensors[0].shape()),
            origin: origin(&op, tensors),
            watch,
        }
    }

    /// Casts an operand for the backend's operation.
    fn operand<B: Backend>(&self, tensor: AmpTensor<B>) -> FloatTensor<B> {
        let name = self.op.name;
        match (self.decision.operands, self.decision.rounded) {
            (None, _) if tensor.origin() == Origin::Noise => {
                let dtype = tensor.declared().into();
                tensor.into_dtype(dtype, name)
            }
            (None, _) => tensor.into_primitive(),
            (Some(dtype), None) => tensor.into_dtype(dtype, name),
            (Some(dtype), Some(half)) => {
                AmpTensor::<B>::plain(tensor.into_dtype(half, name)).into_dtype(dtype, name)
            }
        }
    }

    /// Wraps a float result of the backend's operation, in the dtype that the policy gives it.
    fn result<B: Backend>(&self, primitive: FloatTensor<B>) -> AmpTensor<B> {
        // A vector made of one row may be the gradient of a bias, for a batch of one row. In a larger batch, the
        // gradient is a sum, in FP32. Optimizers keep their momentum in the gradient's dtype.
        let dtype = if self.reshapes_row && primitive.rank() == 1 {
            self.declared.into()
        } else {
            self.decision.result.unwrap_or(primitive.dtype())
        };
        self.result_in(dtype, primitive)
    }

    /// Wraps a float result of the backend's operation, in `dtype`.
    fn result_in<B: Backend>(&self, dtype: DType, primitive: FloatTensor<B>) -> AmpTensor<B> {
        let primitive = if primitive.dtype() == dtype {
            primitive
        } else {
            converted::<B>(primitive, dtype, self.op.name)
        };
        if let Some(watch) = &self.watch {
            watch.result::<B>(&primitive);
        }
        let out = AmpTensor::new(primitive, self.declared, self.decision.flags);
        let out = out.with_terms(self.decision.terms).with_origin(self.origin);
        // A norm or a loss of marked tensors belongs to no region: otherwise tensors scaled by it would
        // belong to the region, too.
        let is_number = self.reduces_from > 1 && out.shape().num_elements() == 1;
        if is_number || self.marks == Marks::default() {
            out
        } else {
            out.with_marks(self.marks)
        }
    }
}

/// Where an operation runs.
struct At<'a, B: Backend> {
    state: &'static DeviceState,
    device: B::Device,
    tensors: &'a [&'a AmpTensor<B>],
}

impl<B: Backend> Site<DType> for At<'_, B> {
    fn tried(&self, op: TriedOp, half: DType) -> Option<bool> {
        self.state.tried::<B>(&self.device, half, op)
    }

    fn elements(&self, operand: usize) -> usize {
        self.tensors[operand].shape().num_elements()
    }

    fn inner_dimension(&self) -> usize {
        let shape = self.tensors[0].shape();
        shape.last().copied().unwrap_or(1)
    }

    fn is_tracked(&self, _operand: usize) -> Option<bool> {
        None
    }
}

/// Whether all dimensions but the last are 1.
fn is_row(shape: &Shape) -> bool {
    shape.num_dims() > 1 && shape.num_elements() == shape[shape.num_dims() - 1]
}

/// Whether an operation reduces many values to one.
fn reduces(op: &Op) -> bool {
    matches!(op.effect, Effect::Reduces | Effect::FindsLargest)
}

/// The origin of the result of an operation on these tensors.
fn origin<B: Backend>(op: &Op, tensors: &[&AmpTensor<B>]) -> Origin {
    match (op.effect, tensors) {
        (Effect::MultipliesMatrices, [_, rhs]) => match (rhs.origin(), rhs.rank()) {
            (Origin::Transposed, _) => Origin::Other,
            (Origin::Matrix, _) | (_, 2) => Origin::Product,
            _ => Origin::Other,
        },
        (Effect::Reshapes, [tensor]) => match (tensor.origin(), tensor.rank()) {
            (Origin::Transposed, _) => Origin::Other,
            (_, 1) => Origin::Row,
            (_, 2) => Origin::Matrix,
            _ => Origin::Other,
        },
        (Effect::Transposes, _) => Origin::Transposed,
        (Effect::FindsLargest, _) => Origin::Largest,
        _ => Origin::Other,
    }
}

/// The client's dtype of a result: the dtype of the operands, which all have the same dtype in the client.
fn declared<B: Backend>(tensors: &[&AmpTensor<B>]) -> FloatDType {
    let dtypes = tensors.iter().map(|tensor| tensor.declared());
    widest(dtypes.map(DType::from)).into()
}

/// Operands, with the first operand in place of each absent operand.
fn present<B: Backend, const N: usize>(tensors: [Option<&AmpTensor<B>>; N]) -> [&AmpTensor<B>; N] {
    let first = tensors[0].expect("the first operand is always given");
    tensors.map(|tensor| tensor.unwrap_or(first))
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
            let _session = $crate::device::enter::<P>();
            $own
        }
    )*};
}

/// Operations that follow their row, one per line, in the notation of [`own_ops`]. [`wrapped`] has an
/// arm for each kind of result.
macro_rules! float_ops {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident $(, of convolution($weight:ident, $options:ident))?;)*) => {$(
        $crate::ops::own_ops! {
            $op($($([$t])? $([?$o])? $({$s})? $($a: $ty)?),+) -> $out => {
                let tensors = $crate::ops::present([$($(Some(&$t),)? $($o.as_ref(),)?)+]);
                let operands = tensors.map($crate::AmpTensor::operand);
                let scalars = [$($($s.elem::<f64>(),)?)+];
                let op = $crate::ops::op!($op)$(.convolving(&tensors[0].shape(), &$weight.shape(), burn_amp_core::convolution!($options)))?;
                let call = $crate::ops::Call::of(op, &tensors, &operands, &scalars);
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
    (BatchNormTrain, $call:ident, $out:ident) => {{
        // The statistics feed running averages: they are not rounded.
        let declared = $call.declared.into();
        BatchNormTrain::new(
            $call.result($out.output),
            $call.result_in(declared, $out.mean),
            $call.result_in(declared, $out.variance),
        )
    }};
    ($kind:ident, $call:ident, $out:ident) => {{
        let _ = &$call;
        burn_amp_core::wrapped!($kind, ($call.result), $out)
    }};
}

/// Operations without float tensors, which go to the backend unchanged.
macro_rules! delegate {
    ($($(#[$on:meta])? fn $op:ident($($a:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {$(
        $(#[$on])?
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
    use burn_amp_core::policy::{HalfSupport, Support};
    use burn_backend::ops::{ActivationOps, AttentionModuleOptions, FloatTensorOps, ModuleOps};
    use burn_backend::{TensorData, try_read_sync};
    use burn_dispatch::{backends::Flex, devices::FlexDevice};

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

        let call = Call::new(op!(linear), [&ones([2, 2])]);
        assert!(call.decision.only_contracts);
        // The bias is added in FP32: bf16 would lose 0.002 in a sum with 2.
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

        // A tensor that the client creates in half is stored in half, and computed in FP32.
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
