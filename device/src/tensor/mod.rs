//! The float tensor of [`Amp`](crate::Amp): the backend's own tensor, with the policy's state. Independent of
//! the operations.

mod marks;
mod unrounded;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn_amp_core::Precision;
use burn_amp_core::policy::{Function, HalfSupport, Operand, TensorFlags, is_half};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};

use crate::device::DeviceState;
pub(crate) use marks::{DEPTHS, Mark, Marks};
pub(crate) use unrounded::Unrounded;

/// A float tensor of [`Amp<B>`](crate::Amp): `B`'s own tensor, of any shape and float dtype.
///
/// The client has its own dtype for the tensor, which the policy does not change: data read back has this
/// dtype. Clones share the data.
pub struct AmpTensor<B: Backend> {
    pub(crate) primitive: FloatTensor<B>,
    /// The client's dtype.
    declared: FloatDType,
    flags: TensorFlags,
    /// How many gradients a half tensor is the sum of, if it is a gradient.
    terms: u8,
    marks: Marks,
    origin: Origin,
    /// What only the clones of a tensor share.
    identity: Arc<Identity>,
    /// How FP32 computes a half tensor.
    pub(crate) unrounded: Option<Arc<Unrounded<B>>>,
}

/// What the clones of a tensor share.
#[derive(Debug, Default)]
struct Identity {
    /// The bound that the tensor was last compared with, as a clamp is in training.
    bound: Mutex<Option<Function>>,
}

/// The operation that a tensor is the result of, if a later operation depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A product with one matrix, such as a linear layer's weight. A product with a transposed matrix, such
    /// as the scores of attention, is not included: a tensor added to the scores may be a mask.
    Product,
    /// A matrix, reshaped to a tensor of more dimensions.
    Matrix,
    /// A vector, reshaped to a row of a tensor of more dimensions.
    Row,
    Transposed,
    /// The largest values over a dimension.
    Largest,
    /// Random zeros and ones, stored in half: for the policy, an FP32 constant.
    Noise,
    Other,
}

impl<B: Backend> AmpTensor<B> {
    pub(crate) fn new(primitive: FloatTensor<B>, declared: FloatDType, flags: TensorFlags) -> Self {
        Self {
            primitive,
            declared,
            flags,
            terms: 1,
            marks: Marks::default(),
            origin: Origin::Other,
            identity: Arc::default(),
            unrounded: None,
        }
    }

    /// A tensor in the client's dtype.
    pub(crate) fn plain(primitive: FloatTensor<B>) -> Self {
        let declared = primitive.dtype().into();
        Self::new(primitive, declared, TensorFlags::empty())
    }

    pub(crate) fn into_primitive(self) -> FloatTensor<B> {
        self.primitive
    }

    pub(crate) fn declared(&self) -> FloatDType {
        self.declared
    }

    /// Whether the tensor has the client's dtype.
    pub(crate) fn is_as_declared(&self) -> bool {
        self.dtype() == self.declared.into()
    }

    pub(crate) fn flags(&self) -> TensorFlags {
        self.flags
    }

    pub(crate) fn with_flags(self, flags: TensorFlags) -> Self {
        Self { flags, ..self }
    }

    pub(crate) fn with_terms(self, terms: u8) -> Self {
        Self { terms, ..self }
    }

    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }

    pub(crate) fn with_origin(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    pub(crate) fn marks(&self) -> Marks {
        self.marks
    }

    pub(crate) fn with_marks(self, marks: Marks) -> Self {
        Self { marks, ..self }
    }

    /// The tensor with a mark of the client. On the border of a region, the tensor returns to the client's
    /// dtype: a half tensor of one side is not half on the other side.
    pub(crate) fn marked(self, mark: Mark) -> Self {
        let marks = self.marks.with(mark);
        let tensor = match mark {
            // FP32 values that fit in one side's half may not fit in the other side's half.
            Mark::Enter(..) | Mark::Leave(_) => {
                let tensor = self.into_declared("float_clamp");
                let flags = tensor.flags - TensorFlags::FITS;
                tensor.with_flags(flags)
            }
            Mark::Gradient | Mark::Clear => self,
            Mark::Half(precision) => self.in_half(precision),
        };
        // A marked tensor has a new identity.
        Self::new(tensor.primitive, tensor.declared, tensor.flags)
            .with_terms(tensor.terms)
            .with_marks(marks)
    }

    /// The tensor in half, where it is FP32 and the device stores that half dtype.
    fn in_half(self, precision: Precision) -> Self {
        let support = DeviceState::of::<B>(&self.device()).support::<B>(&self.device());
        match precision.compute_dtype() {
            Some(half) if self.dtype() == DType::F32 && support.of(half) != HalfSupport::None => {
                let (declared, flags) = (self.declared, self.flags);
                Self::new(self.into_dtype(half, "float_clamp"), declared, flags)
            }
            _ => self,
        }
    }

    /// The same values in another place, with the policy's state.
    pub(crate) fn moved(self, place: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        let (declared, flags) = (self.declared, self.flags);
        Self::new(place(self.primitive), declared, flags)
            .with_terms(self.terms)
            .with_marks(self.marks)
            .with_origin(self.origin)
    }

    /// Whether both are clones of one tensor.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.identity, &other.identity)
    }

    /// How FP32 computes this half tensor, if it is known.
    pub(crate) fn unrounded(&self) -> Option<&Unrounded<B>> {
        self.unrounded.as_deref()
    }

    /// The tensor in the client's dtype, if FP32 computes it, for the operation `op`.
    pub(crate) fn computed_in_fp32(self, op: &'static str) -> Self {
        match self.unrounded {
            Some(_) => self.into_declared(op),
            None => self,
        }
    }

    /// Remembers how FP32 computes this tensor, if it is half. The result of the operation `op` that is wide has these values.
    pub(crate) fn with_unrounded(
        mut self,
        unrounded: Option<Unrounded<B>>,
        op: &'static str,
    ) -> Self {
        match unrounded {
            Some(unrounded) if is_half(self.dtype()) => self.unrounded = Some(Arc::new(unrounded)),
            Some(unrounded) => {
                self.primitive = unrounded::wide::<B>(&unrounded, self.dtype(), op);
            }
            None => {}
        }
        self
    }

    /// Remembers the values beyond this bound that the program has looked for.
    pub(crate) fn set_bound(&self, bound: Function) {
        let last = self.identity.bound.lock();
        *last.unwrap_or_else(PoisonError::into_inner) = Some(bound);
    }

    /// The bound beyond which the program has last looked for values.
    pub(crate) fn bound(&self) -> Option<Function> {
        let last = self.identity.bound.lock();
        *last.unwrap_or_else(PoisonError::into_inner)
    }

    /// The tensor as an operand for the policy. Half counts as the policy's choice if the client's dtype
    /// differs.
    pub(crate) fn operand(&self) -> Operand<DType> {
        if self.origin == Origin::Noise {
            return Operand {
                dtype: self.declared.into(),
                flags: TensorFlags::CONSTANT,
                terms: 1,
            };
        }
        let mut flags = self.flags;
        flags.set(TensorFlags::DEMOTED, !self.is_as_declared());
        Operand {
            dtype: self.dtype(),
            flags,
            terms: self.terms,
        }
    }

    /// The backend's tensor in `dtype`, for the operation `op`.
    pub(crate) fn into_dtype(self, dtype: DType, op: &'static str) -> FloatTensor<B> {
        if self.dtype() == dtype {
            return self.primitive;
        }
        let is_wide = matches!(dtype, DType::F32 | DType::F64);
        match self.unrounded.filter(|_| is_wide) {
            Some(unrounded) => unrounded::wide::<B>(&unrounded, dtype, op),
            None => converted::<B>(self.primitive, dtype, op),
        }
    }

    /// The tensor in the client's dtype, for the operation `op`.
    pub(crate) fn into_declared(self, op: &'static str) -> Self {
        if self.is_as_declared() {
            self
        } else {
            let (declared, flags, marks) = (self.declared, self.flags, self.marks);
            Self::new(self.into_dtype(declared.into(), op), declared, flags).with_marks(marks)
        }
    }
}

impl<B: Backend> Clone for AmpTensor<B> {
    fn clone(&self) -> Self {
        Self {
            primitive: self.primitive.clone(),
            declared: self.declared,
            flags: self.flags,
            terms: self.terms,
            marks: self.marks,
            origin: self.origin,
            identity: self.identity.clone(),
            unrounded: self.unrounded.clone(),
        }
    }
}

impl<B: Backend> fmt::Debug for AmpTensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmpTensor")
            .field("primitive", &self.primitive)
            .field("declared", &self.declared)
            .field("flags", &self.flags)
            .field("marks", &self.marks)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> TensorMetadata for AmpTensor<B> {
    type Device = B::Device;

    /// The real dtype, which is not always the client's.
    fn dtype(&self) -> DType {
        self.primitive.dtype()
    }

    fn shape(&self) -> Shape {
        self.primitive.shape()
    }

    fn rank(&self) -> usize {
        self.primitive.rank()
    }

    fn device(&self) -> B::Device {
        self.primitive.device()
    }

    fn can_mut(&self) -> bool {
        self.primitive.can_mut()
    }
}

/// The backend's own cast, counted for the operation `op`.
pub(crate) fn converted<B: Backend>(
    tensor: FloatTensor<B>,
    dtype: DType,
    op: &'static str,
) -> FloatTensor<B> {
    let statistics = DeviceState::of::<B>(&tensor.device()).statistics();
    statistics.cast(op, tensor.shape().num_elements(), tensor.dtype(), dtype);
    B::float_cast(tensor, dtype.into())
}

/// Data as the client reads it: in the client's dtype.
pub(crate) fn to_client(data: TensorData, declared: FloatDType) -> TensorData {
    if data.dtype() == declared.into() {
        data
    } else {
        data.convert_dtype(declared.into())
    }
}
