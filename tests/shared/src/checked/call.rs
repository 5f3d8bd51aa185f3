//! One call of an operation: its operands are checked, then lowered to the backend, and its results are
//! raised again.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use burn_backend::backend::Backend;
use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, GridSampleOptions, InterpolateOptions, MaxPool1dBackward,
    MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor};
use burn_backend::{
    BoolDType, DType, DTypeUsage, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata, TensorPrimitive,
};

use super::{Checked, CheckedBool, CheckedDevice, CheckedInt, CheckedQ, CheckedTensor, Fault};

/// The contractions: a device without arithmetic in a dtype may still have them, as accelerators do.
pub const CONTRACTIONS: [&str; 22] = [
    "float_matmul",
    "linear",
    "linear_x_backward",
    "linear_weight_backward",
    "conv1d",
    "conv1d_x_backward",
    "conv1d_weight_backward",
    "conv2d",
    "conv2d_x_backward",
    "conv2d_weight_backward",
    "conv3d",
    "conv3d_x_backward",
    "conv3d_weight_backward",
    "conv_transpose1d",
    "conv_transpose1d_x_backward",
    "conv_transpose1d_weight_backward",
    "conv_transpose2d",
    "conv_transpose2d_x_backward",
    "conv_transpose2d_weight_backward",
    "conv_transpose3d",
    "conv_transpose3d_x_backward",
    "conv_transpose3d_weight_backward",
];

/// The operations that copy bits: storage of a dtype is enough for them.
const MOVES: &[&str] = &[
    "float_from_data",
    "float_into_data",
    "float_to_device",
    "float_cast",
    "float_reshape",
    "float_transpose",
    "float_swap_dims",
    "float_permute",
    "float_flip",
    "float_slice",
    "float_expand",
    "float_repeat_dim",
    "float_select",
    "float_gather",
    "float_gather_nd",
    "float_unfold",
    "float_empty",
    "embedding",
];

/// Whether an operation is a contraction.
pub fn is_contraction(op: &str) -> bool {
    CONTRACTIONS.contains(&op)
}

/// An operation on its way to the backend.
pub(super) struct Call {
    op: &'static str,
    device: Option<CheckedDevice>,
    dtype: Option<DType>,
    shapes: Vec<Shape>,
    rank: usize,
    optional: bool,
}

impl Call {
    pub(super) fn new(op: &'static str) -> Self {
        Self {
            op,
            device: None,
            dtype: None,
            shapes: Vec::new(),
            rank: 0,
            optional: false,
        }
    }

    fn on(&mut self, device: CheckedDevice) {
        let first = *self.device.get_or_insert(device);
        let op = self.op;
        assert_eq!(first, device, "{op}: operands on different devices");
    }

    fn float<B: Backend>(&mut self, tensor: &CheckedTensor<B>) {
        let (op, dtype) = (self.op, tensor.dtype());
        self.on(tensor.device);
        let first = *self.dtype.get_or_insert(dtype);
        assert!(
            first == dtype,
            "{op}: operands of different dtypes, {first:?} and {dtype:?}"
        );
        self.rank = self.rank.max(tensor.rank());
        self.shapes.push(tensor.inner.shape());
    }

    /// Whether the device computes this call wrongly.
    fn is_wrong(&self) -> bool {
        let of = |dtype| self.device().is_wrong(self.op, dtype, &self.shapes);
        self.dtype.is_some_and(of)
    }

    /// The device of every operand.
    pub(super) fn device(&self) -> CheckedDevice {
        self.device.expect("an operand or a device")
    }

    /// Counts the operation. Panics if the device does not support it in its operands' dtype.
    pub(super) fn check(&mut self) {
        if let Some(dtype) = self.dtype {
            self.check_support(dtype);
            self.device().count_op(self.op, dtype);
        }
    }

    /// Runs the backend's operation, and times it if the device is timed.
    pub(super) fn run<B: Backend, T>(&self, op: impl FnOnce() -> T) -> T {
        let timed = self.device.filter(CheckedDevice::is_timed);
        let (Some(device), Some(dtype)) = (timed, self.dtype) else {
            return op();
        };
        let wait = || B::sync(default_device::<B>()).expect("a device that answers");
        wait();
        let start = Instant::now();
        let out = op();
        wait();
        device.add_time(self.op, dtype, start.elapsed());
        out
    }

    /// Checks a float result: the device must support its dtype as well.
    pub(super) fn gives(&mut self, dtype: DType) {
        if self.dtype.is_none() {
            self.dtype = Some(dtype);
            self.check();
        } else if self.dtype != Some(dtype) {
            self.check_support(dtype);
        }
    }

    fn check_support(&self, dtype: DType) {
        let (op, device) = (self.op, self.device());
        let Some(usage) = device.usage(dtype) else {
            return;
        };
        let bare = is_contraction(op) && self.is_bare();
        let enough = if usage.is_superset(DTypeUsage::general()) {
            true
        } else if usage.is_superset(DTypeUsage::Storage | DTypeUsage::Accelerated) {
            bare || MOVES.contains(&op)
        } else {
            usage.contains(DTypeUsage::Storage) && MOVES.contains(&op)
        };
        assert!(
            enough,
            "{op} in {dtype:?}, of which {device:?} supports {usage:?}"
        );
    }

    /// Only products: no bias is added, and no batch dimensions are summed afterwards.
    fn is_bare(&self) -> bool {
        !self.optional && (self.op != "linear_weight_backward" || self.rank == 2)
    }
}

/// An argument of an operation.
pub(super) trait Operand<B> {
    type Lower;

    fn seen(&self, _call: &mut Call) {}

    fn lower(self) -> Self::Lower;
}

/// A result of an operation, made from the backend's result.
pub(super) trait StepOutcome<L> {
    fn raised(lower: L, call: &mut Call) -> Self;
}

/// Arguments that hold no tensor.
macro_rules! plain {
    ($($ty:ty),* $(,)?) => {$(
        impl<B> Operand<B> for $ty {
            type Lower = Self;

            fn lower(self) -> Self {
                self
            }
        }
    )*};
}

plain! {
    usize, bool, f64, [usize; 2], &[usize], &[Slice], Range<i64>,
    Scalar, Shape, TensorData, FloatDType, IntDType, BoolDType, IndexingUpdateOp,
    ConvOptions<1>, ConvOptions<2>, ConvOptions<3>,
    ConvTransposeOptions<1>, ConvTransposeOptions<2>, ConvTransposeOptions<3>,
    DeformConvOptions<2>, UnfoldOptions, InterpolateOptions, AttentionModuleOptions,
    GridSampleOptions, &QuantScheme,
}

impl<B: Backend> Operand<B> for &CheckedDevice {
    type Lower = &'static B::Device;

    fn seen(&self, call: &mut Call) {
        call.on(**self);
    }

    fn lower(self) -> Self::Lower {
        default_device::<B>()
    }
}

impl<B: Backend> Operand<B> for CheckedTensor<B> {
    type Lower = FloatTensor<B>;

    fn seen(&self, call: &mut Call) {
        call.float(self);
    }

    fn lower(self) -> Self::Lower {
        self.inner
    }
}

/// A result of which a part is two percent off.
fn faulty<B: Backend>(result: FloatTensor<B>, fault: Fault) -> FloatTensor<B> {
    let (shape, rank) = (result.shape(), result.rank());
    let part = shape.iter().enumerate().map(|(axis, size)| match fault {
        Fault::Block if axis + 2 >= rank => size / 2..(size * 3 / 4).max(size / 2 + 1),
        Fault::LastColumn if axis + 1 == rank => size - 1..*size,
        _ => 0..*size,
    });
    let part: Vec<Slice> = part.map(Slice::from).collect();
    let off = B::float_mul_scalar(B::float_slice(result.clone(), &part), 1.02.into());
    B::float_slice_assign(result, &part, off)
}

impl<B: Backend> StepOutcome<FloatTensor<B>> for CheckedTensor<B> {
    fn raised(lower: FloatTensor<B>, call: &mut Call) -> Self {
        call.gives(lower.dtype());
        let lower = match call.is_wrong() {
            true => faulty::<B>(lower, call.device().fault()),
            false => lower,
        };
        Self::new(lower, call.device())
    }
}

/// Tensors of the other kinds: only their device is checked.
macro_rules! placed {
    ($($kind:ident: $lower:ty),*) => {$(
        impl<B: Backend> Operand<B> for $kind<B> {
            type Lower = $lower;

            fn seen(&self, call: &mut Call) {
                call.on(self.device);
            }

            fn lower(self) -> Self::Lower {
                self.inner
            }
        }

        impl<B: Backend> StepOutcome<$lower> for $kind<B> {
            fn raised(lower: $lower, call: &mut Call) -> Self {
                Self::new(lower, call.device())
            }
        }
    )*};
}

placed! {
    CheckedInt: IntTensor<B>,
    CheckedBool: burn_backend::tensor::BoolTensor<B>,
    CheckedQ: QuantizedTensor<B>
}

impl<B, T: Operand<B>> Operand<B> for Option<T> {
    type Lower = Option<T::Lower>;

    fn seen(&self, call: &mut Call) {
        if let Some(operand) = self {
            call.optional = true;
            operand.seen(call);
        }
    }

    fn lower(self) -> Self::Lower {
        self.map(T::lower)
    }
}

impl<B, T: Operand<B>> Operand<B> for Vec<T> {
    type Lower = Vec<T::Lower>;

    fn seen(&self, call: &mut Call) {
        self.iter().for_each(|operand| operand.seen(call));
    }

    fn lower(self) -> Self::Lower {
        self.into_iter().map(T::lower).collect()
    }
}

impl<B: Backend> Operand<B> for TensorPrimitive<Checked<B>> {
    type Lower = TensorPrimitive<B>;

    fn seen(&self, call: &mut Call) {
        match self {
            TensorPrimitive::Float(tensor) => tensor.seen(call),
            TensorPrimitive::QFloat(tensor) => tensor.seen(call),
        }
    }

    fn lower(self) -> Self::Lower {
        match self {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.lower()),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor.lower()),
        }
    }
}

impl<B: Backend> StepOutcome<TensorPrimitive<B>> for TensorPrimitive<Checked<B>> {
    fn raised(lower: TensorPrimitive<B>, call: &mut Call) -> Self {
        match lower {
            TensorPrimitive::Float(t) => Self::Float(StepOutcome::raised(t, call)),
            TensorPrimitive::QFloat(t) => Self::QFloat(StepOutcome::raised(t, call)),
        }
    }
}

impl<B: Backend> Operand<B> for QuantizationParametersPrimitive<Checked<B>> {
    type Lower = QuantizationParametersPrimitive<B>;

    fn seen(&self, call: &mut Call) {
        self.scales.seen(call);
    }

    fn lower(self) -> Self::Lower {
        QuantizationParametersPrimitive {
            scales: self.scales.lower(),
        }
    }
}

impl<A, B, LA, LB> StepOutcome<(LA, LB)> for (A, B)
where
    A: StepOutcome<LA>,
    B: StepOutcome<LB>,
{
    fn raised((a, b): (LA, LB), call: &mut Call) -> Self {
        (A::raised(a, call), B::raised(b, call))
    }
}

impl<T: StepOutcome<L>, L> StepOutcome<Option<L>> for Option<T> {
    fn raised(lower: Option<L>, call: &mut Call) -> Self {
        lower.map(|lower| T::raised(lower, call))
    }
}

/// The device that all checked devices stand for.
fn default_device<B: Backend>() -> &'static B::Device {
    static DEVICES: Mutex<BTreeMap<TypeId, &'static (dyn Any + Send + Sync)>> =
        Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let device = devices
        .entry(TypeId::of::<B::Device>())
        .or_insert_with(|| Box::leak(Box::new(B::Device::default())));
    device.downcast_ref().expect("a device of this type")
}

/// Results that are structs of tensors.
macro_rules! records {
    ($($record:ident($($field:ident),*);)*) => {$(
        impl<B: Backend> StepOutcome<$record<B>> for $record<Checked<B>> {
            fn raised(lower: $record<B>, call: &mut Call) -> Self {
                Self::new($(StepOutcome::raised(lower.$field, call)),*)
            }
        }
    )*};
}

records! {
    MaxPool1dWithIndices(output, indices);
    MaxPool2dWithIndices(output, indices);
    MaxPool1dBackward(x_grad);
    MaxPool2dBackward(x_grad);
    DeformConv2dBackward(x_grad, offset_grad, weight_grad, mask_grad, bias_grad);
}
