//! The float tensor of [`Amp`](crate::Amp): the backend's own tensor, with the policy's state for
//! it. Independent of individual operations.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

pub(crate) use burn_amp_core::policy::{Function, TensorFlags};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata};

use crate::device::DeviceState;
use crate::policy::{Operand, SMALL, is_half};
use crate::precision::{creates_parameter, half_wanted, in_kernel, keep_dtypes};
use crate::scaler::ScaledLoss;

mod amp;
mod deferred;
mod half_copies;
mod node;
mod side;
mod unrounded;

pub use amp::Amp;
use deferred::Deferred;
pub(crate) use half_copies::{HalfCopies, NextCopy};
pub(crate) use node::Node;
pub use node::WeakNode;
pub use side::{Above, Below, Checkpoint, Operands, Side, Step};
pub(crate) use unrounded::{Unrounded, computed, in_its_dtype};

/// A float tensor of [`Amp<B>`](crate::Amp): `B`'s own tensor, of any shape and float dtype.
///
/// `dtype()` is the real dtype, but for a gradient that `divided_later` leaves in half: its dtype is FP32,
/// as every operation sees it. Data read back is FP32 if the policy had made the tensor half.
/// Clones share the data and its copies in other dtypes (the cast cache).
pub struct AmpTensor<B: Backend, S = Below> {
    pub(crate) primitive: FloatTensor<B>,
    pub(crate) flags: TensorFlags,
    /// How many gradients a half gradient is the sum of.
    terms: u8,
    /// What the operations that read the tensor do first.
    deferred: Option<Deferred>,
    /// Unset before the first clone, unless the tensor is a scaled loss.
    pub(crate) shared: OnceLock<Arc<Shared<B>>>,
    side: PhantomData<S>,
}

/// State that the clones of a tensor share, dropped with the last clone.
#[derive(Default)]
pub(crate) struct Shared<B: Backend> {
    /// The cast cache: half copies of an FP32 tensor and, with autodiff, the FP32 copy of a half one.
    f32: Copied<B>,
    f16: Copied<B>,
    bf16: Copied<B>,
    /// A small gradient after what was deferred.
    applied: Copied<B>,
    /// The FP32 tensor that a program cast to this half tensor, of few values, to use it beside a larger one.
    statistic: Copied<B>,
    /// The half tensor that the program cast this FP32 tensor from.
    source: Copied<B>,
    /// How FP32 computes a half tensor.
    unrounded: OnceLock<Box<Unrounded<B>>>,
    /// Whether an operation took the tensor in half.
    used_in_half: AtomicBool,
    /// With autodiff, the nodes for the uses of a leaf in half.
    half_copies: OnceLock<Box<HalfCopies<FloatTensor<B>>>>,
    /// The scaler of a scaled loss.
    scaled: Option<ScaledLoss>,
}

/// A copy in another dtype. Boxed: most tensors have none.
type Copied<B> = OnceLock<Box<FloatTensor<B>>>;

impl<B: Backend, S: Side<B>> AmpTensor<B, S> {
    #[inline(always)]
    pub(crate) fn new(primitive: FloatTensor<B>, flags: TensorFlags) -> Self {
        Self {
            primitive,
            flags,
            terms: 1,
            deferred: None,
            shared: OnceLock::new(),
            side: PhantomData,
        }
    }

    /// A tensor that the policy knows nothing of.
    #[inline(always)]
    pub(crate) fn plain(primitive: FloatTensor<B>) -> Self {
        Self::new(primitive, TensorFlags::empty())
    }

    /// A tensor as the user created it. What is created for a parameter is one, although a frozen parameter shows
    /// itself in no other way.
    #[inline(always)]
    pub(crate) fn created(primitive: FloatTensor<B>) -> Self {
        let flags = match creates_parameter() {
            true => TensorFlags::LEARNED,
            false => TensorFlags::empty(),
        };
        Self::new(primitive, flags)
    }

    /// The tensor in FP32 or wider. Each operation that reads the tensor casts by itself: with fusion the
    /// cast is no kernel of its own, and no FP32 values are written.
    pub(crate) fn cast_later(self) -> Self {
        self.divided_later(1.0)
    }

    /// As [`cast_later`](Self::cast_later), and divided by `scale`.
    pub(crate) fn divided_later(self, scale: f32) -> Self {
        let before = self.deferred.map_or(1.0, Deferred::scale);
        Self {
            deferred: Deferred::new(self.primitive.dtype(), before * scale),
            flags: self.flags & TensorFlags::CAST,
            terms: 1,
            ..self.into_unshared()
        }
    }

    /// The sum of FP32 gradients in a backward pass that are divided alike, before the division.
    pub(crate) fn divided_sum(&self, other: &Self) -> Option<Self> {
        let is_alike = self.deferred? == other.deferred?;
        let is_in_pass = |grad: &Self| {
            grad.primitive.dtype() == DType::F32 && grad.flags.contains(TensorFlags::BACKWARD)
        };
        (is_alike && is_in_pass(self) && is_in_pass(other))
            .then(|| self.moved(|sum| B::float_add(sum, other.primitive.clone())))
    }

    /// The tensor after an operation that moves its values. What is deferred stays so.
    pub(crate) fn moved(&self, op: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self {
            primitive: in_kernel(|| op(self.primitive.clone())),
            ..self.unshared()
        }
    }

    /// Whether the operations that read the tensor cast half values.
    pub(crate) fn is_cast_later(&self) -> bool {
        self.deferred.is_some() && is_half(self.primitive.dtype())
    }

    /// The tensor without its shared state: an operation on it casts by itself. With fusion such a cast is
    /// no kernel of its own, but a shared cast is.
    pub(crate) fn unshared(&self) -> Self {
        Self {
            primitive: self.primitive.clone(),
            flags: self.flags,
            terms: self.terms,
            deferred: self.deferred,
            shared: OnceLock::new(),
            side: PhantomData,
        }
    }

    /// As [`unshared`](Self::unshared), without a clone.
    pub(crate) fn into_unshared(self) -> Self {
        Self {
            shared: OnceLock::new(),
            ..self
        }
    }

    /// The backend's own tensor. The shared state is dropped here, not at the end of the operation:
    /// an operation with nothing left to drop writes its result straight to its destination.
    #[inline(always)]
    pub(crate) fn into_primitive(self) -> FloatTensor<B> {
        let Self {
            primitive,
            flags,
            shared,
            deferred,
            ..
        } = self;
        // Take the shared state out: the compiler then leaves the primitive where it is.
        let shared = shared.into_inner();
        match deferred {
            None => {
                drop(shared);
                primitive
            }
            Some(deferred) => deferred.applied(primitive, flags, shared.as_ref()),
        }
    }

    #[inline(always)]
    pub(crate) fn flags(&self) -> TensorFlags {
        self.flags
    }

    #[inline(always)]
    pub(crate) fn with_flags(self, flags: TensorFlags) -> Self {
        Self { flags, ..self }
    }

    /// The tensor with these flags as well.
    #[inline(always)]
    pub(crate) fn and(self, flags: TensorFlags) -> Self {
        let flags = self.flags | flags;
        self.with_flags(flags)
    }

    /// The same values in another tensor of the backend's: the policy knows the same of them.
    pub(crate) fn map(self, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        let (flags, terms) = (self.flags(), self.operand().terms);
        Self::new(f(self.into_primitive()), flags).with_terms(terms)
    }

    #[inline(always)]
    pub(crate) fn with_terms(self, terms: u8) -> Self {
        Self { terms, ..self }
    }

    /// The scaler, if the tensor is a scaled loss or was computed from one.
    #[inline(always)]
    pub(crate) fn scaled(&self) -> Option<&ScaledLoss> {
        self.shared.get()?.scaled.as_ref()
    }

    /// Marks the tensor as a scaled loss, if there is a scaler.
    #[inline(always)]
    pub(crate) fn with_scaled(mut self, scaled: Option<ScaledLoss>) -> Self {
        if let Some(scaled) = scaled {
            self.set_scaled(scaled);
        }
        self
    }

    pub(crate) fn device(&self) -> B::Device {
        B::float_device(&self.primitive)
    }

    /// Whether the tensor is FP32, with nothing deferred, and no scaled loss.
    #[inline]
    pub(crate) fn is_fp32(&self) -> bool {
        self.primitive.dtype() == DType::F32 && self.deferred.is_none() && self.scaled().is_none()
    }

    /// Whether the policy made the tensor half.
    #[inline(always)]
    pub(crate) fn is_demoted(&self) -> bool {
        self.flags().contains(TensorFlags::DEMOTED) && is_half(self.dtype())
    }

    /// The tensor as the policy sees it.
    #[inline(always)]
    pub(crate) fn operand(&self) -> Operand {
        Operand {
            dtype: self.dtype(),
            flags: self.flags,
            terms: self.terms,
        }
    }

    /// Whether the dtype is `half`, or FP32 that fits in `half`.
    pub(crate) fn fits(&self, half: DType) -> bool {
        self.operand().fits(half)
    }

    /// The backend's tensor in `dtype`. FP32 is cast to each half dtype once for all clones; the
    /// cast cache lives as long as one of them.
    pub(crate) fn into_dtype(mut self, dtype: DType) -> FloatTensor<B> {
        if let Some(deferred) = self.deferred.take()
            && (self.dtype() != dtype || deferred.scale() != 1.0)
        {
            self.primitive = deferred.applied(self.primitive, self.flags, self.shared.get());
        }
        if self.dtype() == dtype {
            return self.primitive;
        }
        if is_half(dtype)
            && let Some(shared) = self.shared.get()
        {
            shared.used_in_half.store(true, Ordering::Relaxed);
        }
        match self.shared_copy(dtype) {
            // No lock is held while the kernel runs: a thread that waits for it may come here again.
            Some(shared) => match shared.get() {
                Some(copy) => (**copy).clone(),
                None => {
                    let copy = cast_of::<B, S>(self.primitive.clone(), self.shared.get(), dtype);
                    shared.set(copy.clone().into()).ok();
                    copy
                }
            },
            // No other clone could reuse the cast; do not cache.
            None => cast_of::<B, S>(self.primitive, self.shared.get(), dtype),
        }
    }

    /// The values in another dtype, for this use.
    pub(crate) fn cast_alone(self, dtype: DType) -> FloatTensor<B> {
        cast_of::<B, S>(self.primitive, self.shared.get(), dtype)
    }

    /// Casts an FP32 tensor into its cast cache, before an operation needs the copy.
    pub(crate) fn cast_ahead(&self, half: DType) {
        self.share();
        drop(self.clone().into_dtype(half));
        self.share().used_in_half.store(false, Ordering::Relaxed);
    }

    /// Prepares the cast cache before a tensor is cloned. Without autodiff, the FP32 copy of a half
    /// tensor is kept only for a gradient in the backward pass: the tape holds half tensors to save
    /// memory.
    #[inline(never)]
    fn share_copies(&self) {
        let is_gradient = || self.flags().contains(TensorFlags::BACKWARD);
        if self.dtype() == DType::F32 || is_gradient() || S::RECORDS {
            self.share();
        }
    }

    /// The slot of a copy in `dtype`, if the copy exists or another clone could use it.
    pub(crate) fn shared_copy(&self, dtype: DType) -> Option<&Copied<B>> {
        let shared = self.shared.get()?;
        let copy = shared.copy(self.dtype(), dtype)?;
        // As in `share_copies`, without a gradient.
        let is_kept = S::RECORDS || shared.unrounded.get().is_none();
        (copy.get().is_some() || is_kept && Arc::strong_count(shared) > 1).then_some(copy)
    }

    /// Whether an operation took an FP32 tensor in half, since its last
    /// [`cast_ahead`](Self::cast_ahead).
    pub(crate) fn is_used_in_half(&self) -> bool {
        let used = |shared: &Arc<Shared<B>>| shared.used_in_half.load(Ordering::Relaxed);
        self.shared.get().is_some_and(used)
    }

    /// The FP32 values that a half gradient was rounded from, if they are kept.
    pub(crate) fn wide(&self) -> Option<FloatTensor<B>> {
        let shared = self.shared.get().filter(|_| is_half(self.dtype()))?;
        shared.f32.get().map(|wide| (**wide).clone())
    }

    /// The nodes that serve the uses of an FP32 leaf in half. `None` before the first clone.
    pub(crate) fn half_copies(&self) -> Option<&HalfCopies<FloatTensor<B>>> {
        Some(self.shared.get()?.half_copies.get_or_init(Box::default))
    }

    /// Keeps the FP32 values that a half gradient was rounded from, for a formula that sums in FP32:
    /// no cast back, and one rounding less.
    pub(crate) fn with_wide(self, wide: Option<FloatTensor<B>>) -> Self {
        if let Some(wide) = wide
            && let Some(copy) = self.share().copy(self.dtype(), wide.dtype())
        {
            copy.set(wide.into()).ok();
        }
        self
    }

    /// How FP32 computes this half tensor, if it is known.
    pub(crate) fn unrounded(&self) -> Option<&Unrounded<B>> {
        unrounded(self.shared.get())
    }

    /// The tensor in FP32, if FP32 computes it.
    pub(crate) fn computed_in_fp32(self) -> Self {
        let Some(unrounded) = self.unrounded() else {
            return self;
        };
        let is_beyond = {
            let functions = unrounded.functions();
            // A sigmoid that is 0 in f16 may divide.
            functions.is_sigmoid() || self.dtype() == DType::F16 && functions.leave_f16()
        };
        let flags = match is_beyond {
            true => self.flags - TensorFlags::FITS,
            false => self.flags | TensorFlags::fits(self.dtype()),
        };
        let scaled = self.scaled().cloned();
        Self::new(S::into_dtype(self, DType::F32), flags).with_scaled(scaled)
    }

    /// The tensor in FP32, if so many more steps are not remembered.
    pub(crate) fn with_room(self, steps: usize) -> Self {
        match self.unrounded().is_some_and(|of| !of.has_room(steps)) {
            true => self.computed_in_fp32(),
            false => self,
        }
    }

    /// As [`computed_in_fp32`](Self::computed_in_fp32). A sigmoid follows half as a factor.
    pub(crate) fn gate_in_fp32(self) -> Self {
        let Some(unrounded) = self.unrounded() else {
            return self;
        };
        let gate = unrounded.functions().flags(self.dtype());
        self.computed_in_fp32().and(gate)
    }

    /// Remembers how FP32 computes this half tensor.
    pub(crate) fn with_unrounded(self, unrounded: Option<Unrounded<B>>) -> Self {
        if let Some(unrounded) = unrounded {
            self.share().unrounded.set(unrounded.into()).ok();
        }
        self
    }

    /// Puts this tensor in half into the cast cache.
    pub(crate) fn set_copy(&self, half: &Self) {
        if let Some(copy) = self.share().copy(self.dtype(), half.dtype()) {
            copy.set(half.primitive.clone().into()).ok();
        }
    }

    /// Keeps the half tensor that the program cast this FP32 tensor from, as a norm casts what it squares.
    pub(crate) fn with_source(self, half: Option<FloatTensor<B>>) -> Self {
        if let Some(half) = half {
            self.share().source.set(half.into()).ok();
        }
        self
    }

    /// The half tensor that the program cast this FP32 tensor from.
    pub(crate) fn source(&self) -> Option<&FloatTensor<B>> {
        self.shared.get()?.source.get().map(|half| &**half)
    }

    /// Keeps the FP32 tensor that a half tensor was cast from. Where the half tensor is a statistic of a larger one, the
    /// larger tensor's rows would all be scaled by its rounding.
    pub(crate) fn with_statistic(self, wide: Self) -> Self {
        let flags = self.flags | wide.flags & TensorFlags::UNBOUNDED;
        self.share()
            .statistic
            .set(wide.into_primitive().into())
            .ok();
        self.with_flags(flags)
    }

    /// The FP32 tensor that this half tensor was cast from, if it is kept and the tensor is a statistic of `beside`.
    pub(crate) fn or_statistic_of(self, beside: &Self) -> Self {
        if !self.is_demoted() || self.flags.contains(TensorFlags::BACKWARD) {
            return self;
        }
        let elements = |tensor: &Self| tensor.shape().num_elements();
        let statistic = self.shared.get().and_then(|shared| shared.statistic.get());
        match statistic {
            Some(wide) if elements(&self) * SMALL <= elements(beside) => {
                Self::new((**wide).clone(), self.flags).with_scaled(self.scaled().cloned())
            }
            _ => self,
        }
    }

    fn share(&self) -> &Shared<B> {
        self.shared.get_or_init(Arc::default)
    }
}

impl<B: Backend, S> AmpTensor<B, S> {
    /// Marks the tensor as a scaled loss.
    pub(crate) fn set_scaled(&mut self, scaled: ScaledLoss) {
        let shared = Shared {
            scaled: Some(scaled),
            ..Shared::default()
        };
        self.shared = OnceLock::from(Arc::new(shared));
    }
}

impl<B: Backend, S: Side<B>> Clone for AmpTensor<B, S> {
    #[inline(always)]
    fn clone(&self) -> Self {
        if half_wanted() {
            self.share_copies();
        }
        Self {
            primitive: self.primitive.clone(),
            flags: self.flags,
            terms: self.terms,
            deferred: self.deferred,
            // Inlined, unlike the clone of an `OnceLock`.
            shared: match self.shared.get() {
                Some(shared) => shared.clone().into(),
                None => OnceLock::new(),
            },
            side: PhantomData,
        }
    }
}

impl<B: Backend> Shared<B> {
    /// The cache slot for a cast between FP32 and a half dtype; `None` for any other cast.
    fn copy(&self, from: DType, to: DType) -> Option<&Copied<B>> {
        match (from, to) {
            (DType::F16 | DType::BF16, DType::F32) => Some(&self.f32),
            (DType::F32, DType::F16) => Some(&self.f16),
            (DType::F32, DType::BF16) => Some(&self.bf16),
            _ => None,
        }
    }
}

impl<B: Backend, S: Side<B>> fmt::Debug for AmpTensor<B, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmpTensor")
            .field("primitive", &self.primitive)
            .field("flags", &self.flags)
            .field("deferred", &self.deferred)
            .finish_non_exhaustive()
    }
}

impl<B: Backend, S: Side<B>> TensorMetadata for AmpTensor<B, S> {
    #[inline(always)]
    fn dtype(&self) -> DType {
        let dtype = self.primitive.dtype();
        match self.deferred {
            None => dtype,
            Some(_) => wide(dtype),
        }
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

/// The flag of what is computed from these tensors, if one of them is learned.
#[inline(always)]
pub(crate) fn learned<'a, B: Backend, S: Side<B>>(
    tensors: impl IntoIterator<Item = &'a AmpTensor<B, S>>,
) -> TensorFlags {
    let flags = tensors.into_iter().map(|tensor| tensor.flags);
    flags.collect::<TensorFlags>() & TensorFlags::LEARNED
}

/// The dtype of a tensor in `dtype` after [`at_least_f32`].
pub(crate) fn wide(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

/// Casts a half tensor to FP32; returns any other tensor unchanged.
pub(crate) fn at_least_f32<B: Backend, S: Side<B>>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match is_half(tensor.dtype()) {
        true => converted::<B, S>(tensor, DType::F32),
        false => tensor,
    }
}

fn unrounded<B: Backend>(shared: Option<&Arc<Shared<B>>>) -> Option<&Unrounded<B>> {
    Some(shared?.unrounded.get()?)
}

/// A tensor with this shared state in another dtype.
fn cast_of<B: Backend, S: Side<B>>(
    tensor: FloatTensor<B>,
    shared: Option<&Arc<Shared<B>>>,
    dtype: DType,
) -> FloatTensor<B> {
    let is_wide = matches!(dtype, DType::F32 | DType::F64);
    match unrounded(shared).filter(|_| is_wide) {
        Some(unrounded) => unrounded::wide::<B, S>(unrounded, dtype),
        None => S::cast(tensor, dtype),
    }
}

/// The backend's own cast, counted in the statistics of the device unless a layer below counts it.
pub(crate) fn converted<B: Backend, S: Side<B>>(
    tensor: FloatTensor<B>,
    dtype: DType,
) -> FloatTensor<B> {
    if S::RECORDS {
        // The layer's own cast, and not the user's.
        return keep_dtypes(|| B::float_cast(tensor, dtype.into()));
    }
    let elements = tensor.shape().num_elements();
    let state = DeviceState::of::<B>(&B::float_device(&tensor));
    state.statistics().cast(elements, tensor.dtype(), dtype);
    in_kernel(|| B::float_cast(tensor, dtype.into()))
}
