//! What a float tensor of [`Amp`](crate::Amp) is: the backend's own, with what the policy has to
//! remember of it. Knows nothing of single operations.

use std::fmt;
use std::sync::OnceLock;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};

use crate::autodiff::tape;
use crate::device;
use crate::precision::half_wanted;
pub(crate) use crate::tail::Marks;
use crate::tail::Tail;
use crate::traffic::Traffic;

/// A float tensor of [`Amp<B>`](crate::Amp): `B`'s own, of any shape and float dtype.
///
/// `dtype()` tells the truth. Data that leaves is FP32 where the policy had made it half. Clones
/// share the data, and without autodiff the half copies of FP32 data.
pub struct AmpTensor<B: Backend> {
    pub(crate) primitive: FloatTensor<B>,
    tail: Tail<Halves<B>>,
}

/// The half copies of an FP32 tensor, gone with the last of its clones. One that autodiff tracks
/// has none: its casts are nodes of the tape, which a backward pass consumes.
struct Halves<B: Backend> {
    f16: OnceLock<FloatTensor<B>>,
    bf16: OnceLock<FloatTensor<B>>,
}

impl<B: Backend> AmpTensor<B> {
    #[inline(always)]
    pub(crate) fn new(primitive: FloatTensor<B>, marks: Marks) -> Self {
        Self {
            primitive,
            tail: Tail::new(marks),
        }
    }

    /// A tensor as the user made it.
    #[inline(always)]
    pub(crate) fn plain(primitive: FloatTensor<B>) -> Self {
        Self::new(primitive, Marks::empty())
    }

    /// The tensor of the backend below. What it shared is let go here and not where the operation
    /// ends: an operation that has nothing left to drop writes its result where it belongs.
    #[inline(always)]
    pub(crate) fn into_primitive(self) -> FloatTensor<B> {
        self.primitive
    }

    #[inline(always)]
    pub(crate) fn marks(&self) -> Marks {
        self.tail.marks()
    }

    #[inline(always)]
    pub(crate) fn with_marks(self, marks: Marks) -> Self {
        match self.marks() == marks {
            true => self,
            false => Self::new(self.primitive, marks),
        }
    }

    pub(crate) fn device(&self) -> B::Device {
        B::float_device(&self.primitive)
    }

    /// Half because the policy made it so.
    #[inline(always)]
    pub(crate) fn is_demoted(&self) -> bool {
        self.marks().contains(Marks::DEMOTED) && is_half(self.dtype())
    }

    /// Half because the user made it so.
    #[inline(always)]
    pub(crate) fn is_half_by_choice(&self) -> bool {
        !self.marks().contains(Marks::DEMOTED) && is_half(self.dtype())
    }

    /// Half, or FP32 that half holds as well.
    pub(crate) fn fits_half(&self) -> bool {
        is_half(self.dtype()) || self.marks().contains(Marks::WIDENED)
    }

    /// The backend's tensor in `dtype`. FP32 is cast to each half dtype once, however many clones
    /// ask for it, as long as one of them is alive.
    pub(crate) fn into_dtype(self, dtype: DType) -> FloatTensor<B> {
        if self.dtype() == dtype {
            return self.primitive;
        }
        let copy = self.tail.shared().and_then(|s| s.half(self.dtype(), dtype));
        match copy.map(|copy| (copy, copy.get())) {
            Some((_, Some(copy))) => copy.clone(),
            Some((copy, None)) if !self.tail.is_alone() => copy
                .get_or_init(|| converted::<B>(self.primitive.clone(), dtype.into()))
                .clone(),
            // Nobody is there to share it with.
            _ => cast::<B>(self.primitive, dtype),
        }
    }
}

impl<B: Backend> AmpTensor<B> {
    /// Before an FP32 tensor is cloned.
    #[inline(never)]
    fn share_halves(&self) {
        if self.dtype() == DType::F32 && !B::ad_enabled(&self.device()) {
            self.tail.share(Halves::new);
        }
    }
}

impl<B: Backend> Clone for AmpTensor<B> {
    #[inline(always)]
    fn clone(&self) -> Self {
        if half_wanted() {
            self.share_halves();
        }
        Self {
            primitive: self.primitive.clone(),
            tail: self.tail.clone(),
        }
    }
}

impl<B: Backend> Halves<B> {
    fn new() -> Self {
        Self {
            f16: OnceLock::new(),
            bf16: OnceLock::new(),
        }
    }

    /// Where the copy of an FP32 tensor in a half dtype is; no other cast is shared.
    fn half(&self, from: DType, to: DType) -> Option<&OnceLock<FloatTensor<B>>> {
        match (from, to) {
            (DType::F32, DType::F16) => Some(&self.f16),
            (DType::F32, DType::BF16) => Some(&self.bf16),
            _ => None,
        }
    }
}

impl<B: Backend> fmt::Debug for AmpTensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmpTensor")
            .field("primitive", &self.primitive)
            .field("marks", &self.marks())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> TensorMetadata for AmpTensor<B> {
    #[inline(always)]
    fn dtype(&self) -> DType {
        self.primitive.dtype()
    }

    #[inline(always)]
    fn shape(&self) -> Shape {
        self.primitive.shape()
    }

    #[inline(always)]
    fn rank(&self) -> usize {
        self.primitive.rank()
    }
}

#[inline(always)]
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// A cast, on the tape where there is one of ours: gradient checkpointing then computes it again.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let device = B::float_device(&tensor);
    match half_wanted() && B::ad_enabled(&device) {
        true => match tape::of::<B>(&device) {
            Some(tape) => tape.cast(tensor, dtype),
            None => converted::<B>(tensor, dtype.into()),
        },
        false => converted::<B>(tensor, dtype.into()),
    }
}

/// The backend's own cast, on a device that the policy knows.
pub(crate) fn converted<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    counted::<B>(tensor, dtype, |device| {
        device::current::<B>(device).traffic()
    })
}

/// A tensor in FP32 where it is half, as it is where it is wider.
pub(crate) fn at_least_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match is_half(tensor.dtype()) {
        true => counted::<B>(tensor, FloatDType::F32, Traffic::of::<B>),
        false => tensor,
    }
}

/// A cast that is counted, unless it is handed on to a layer that does so.
fn counted<B: Backend>(
    tensor: FloatTensor<B>,
    dtype: FloatDType,
    traffic: impl FnOnce(&B::Device) -> &'static Traffic,
) -> FloatTensor<B> {
    let device = B::float_device(&tensor);
    if !B::ad_enabled(&device) {
        let elements = tensor.shape().num_elements();
        traffic(&device).cast(elements, tensor.dtype(), dtype.into());
    }
    B::float_cast(tensor, dtype)
}

/// Data as it leaves: FP32 for a tensor that the policy had demoted.
pub(crate) fn leaving(data: TensorData, demoted: bool) -> TensorData {
    match demoted && is_half(data.dtype) {
        true => data.convert_dtype(DType::F32),
        false => data,
    }
}
