//! What a float tensor of [`Amp`](crate::Amp) is: the backend's own, with what the policy has to
//! remember of it. Knows nothing of single operations.

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};

use crate::device;

/// A float tensor of [`Amp<B>`](crate::Amp).
///
/// `dtype()` tells the truth. Data that leaves is FP32 where the policy had made it half.
pub struct AmpTensor<B: Backend> {
    primitive: FloatTensor<B>,
    marks: Marks,
    halves: OnceLock<Arc<Halves<FloatTensor<B>>>>,
    leaf: Option<Arc<Leaf<B>>>,
}

/// What the policy remembers of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Marks {
    /// Half because the policy made it so; of no meaning for other dtypes.
    pub demoted: bool,
    /// A gradient, or computed from one: never demoted, so optimizers stay FP32.
    pub gradient: bool,
    /// The policy computed it, or something that it was computed from, in f16: a backward pass has
    /// to scale, also one that begins after the region that said f16.
    pub from_f16: bool,
}

/// The half copies of one FP32 tensor, shared by its clones and gone with the last of them.
struct Halves<P> {
    f16: OnceLock<P>,
    bf16: OnceLock<P>,
}

/// A tensor whose gradient is wanted. Its clones hold it, and nothing else does: what is left of it
/// elsewhere is weak.
pub(crate) struct Leaf<B: Backend> {
    pub tensor: FloatTensor<B>,
    pub marks: Marks,
}

impl<B: Backend> AmpTensor<B> {
    pub(crate) fn new(primitive: FloatTensor<B>, marks: Marks) -> Self {
        Self {
            primitive,
            marks,
            halves: OnceLock::new(),
            leaf: None,
        }
    }

    /// A tensor as the user made it.
    pub(crate) fn plain(primitive: FloatTensor<B>) -> Self {
        Self::new(primitive, Marks::default())
    }

    /// The tensor of the backend below.
    pub(crate) fn primitive(&self) -> &FloatTensor<B> {
        &self.primitive
    }

    /// The tensor of the backend below, without the marks.
    pub(crate) fn into_primitive(self) -> FloatTensor<B> {
        self.primitive
    }

    pub(crate) fn marks(&self) -> Marks {
        self.marks
    }

    pub(crate) fn with_marks(mut self, marks: Marks) -> Self {
        self.marks = marks;
        self
    }

    pub(crate) fn device(&self) -> B::Device {
        B::float_device(&self.primitive)
    }

    /// Half because the policy made it so.
    pub(crate) fn is_demoted(&self) -> bool {
        self.marks.demoted && is_half(self.dtype())
    }

    /// Half because the user made it so.
    pub(crate) fn is_half_by_choice(&self) -> bool {
        !self.marks.demoted && is_half(self.dtype())
    }

    /// The leaf that this tensor is, if its gradient is wanted.
    pub(crate) fn leaf(&self) -> Option<&Arc<Leaf<B>>> {
        self.leaf.as_ref()
    }

    /// Makes this tensor a leaf that its clones hold.
    pub(crate) fn into_leaf(mut self) -> (Self, Arc<Leaf<B>>) {
        let leaf = Arc::new(Leaf {
            tensor: self.primitive.clone(),
            marks: self.marks,
        });
        self.leaf = Some(leaf.clone());
        (self, leaf)
    }

    /// The backend's tensor in `dtype`. FP32 is cast to each half dtype once, however many clones
    /// ask for it, as long as one of them is alive.
    pub(crate) fn into_dtype(self, dtype: DType) -> FloatTensor<B> {
        if self.dtype() == dtype {
            return self.primitive;
        }
        let Some((halves, copy)) = self
            .halves
            .get()
            .and_then(|halves| Some((halves, halves.of(self.dtype(), dtype)?)))
        else {
            return B::float_cast(self.primitive, dtype.into());
        };
        match copy.get() {
            Some(copy) => copy.clone(),
            // Nobody is left to share it with.
            None if Arc::strong_count(halves) == 1 => B::float_cast(self.primitive, dtype.into()),
            None => copy
                .get_or_init(|| B::float_cast(self.primitive.clone(), dtype.into()))
                .clone(),
        }
    }
}

impl<B: Backend> Clone for AmpTensor<B> {
    fn clone(&self) -> Self {
        let halves = OnceLock::new();
        if device::half_wanted() && self.dtype() == DType::F32 && !B::ad_enabled(&self.device()) {
            let shared = self.halves.get_or_init(Default::default).clone();
            let _ = halves.set(shared);
        }
        Self {
            primitive: self.primitive.clone(),
            marks: self.marks,
            halves,
            leaf: self.leaf.clone(),
        }
    }
}

impl<P> Halves<P> {
    /// Where the copy of an FP32 tensor in a half dtype is; no other cast is shared.
    fn of(&self, from: DType, to: DType) -> Option<&OnceLock<P>> {
        match (from, to) {
            (DType::F32, DType::F16) => Some(&self.f16),
            (DType::F32, DType::BF16) => Some(&self.bf16),
            _ => None,
        }
    }
}

impl<P> Default for Halves<P> {
    fn default() -> Self {
        Self {
            f16: OnceLock::new(),
            bf16: OnceLock::new(),
        }
    }
}

impl<B: Backend> fmt::Debug for AmpTensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmpTensor")
            .field("primitive", &self.primitive)
            .field("marks", &self.marks)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> TensorMetadata for AmpTensor<B> {
    fn dtype(&self) -> DType {
        self.primitive.dtype()
    }

    fn shape(&self) -> Shape {
        self.primitive.shape()
    }

    fn rank(&self) -> usize {
        self.primitive.rank()
    }
}

pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// A tensor in FP32 where it is half, as it is where it is wider.
pub(crate) fn at_least_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match is_half(tensor.dtype()) {
        true => B::float_cast(tensor, FloatDType::F32),
        false => tensor,
    }
}

/// Data as it leaves: FP32 for a tensor that the policy had demoted.
pub(crate) fn leaving(data: TensorData, demoted: bool) -> TensorData {
    match demoted && is_half(data.dtype) {
        true => data.convert_dtype(DType::F32),
        false => data,
    }
}
