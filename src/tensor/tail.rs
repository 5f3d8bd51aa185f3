//! The word beside each tensor: its flags, or a pointer to flags and state that clones share.
//!
//! The tail is one word to keep tensors small: above 128 bytes, a tensor is moved by calls to
//! `memcpy` instead of a few instructions, and every operation moves its tensors several times.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use bitflags::bitflags;
use burn_backend::DType;

use crate::policy::HALVES;

bitflags! {
    /// What the policy knows about a tensor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct TensorFlags: usize {
        /// Half by the policy's decision; meaningless for other dtypes.
        const DEMOTED = 1;
        /// A gradient, or computed from one: never demoted, so optimizers stay FP32.
        const GRADIENT = 1 << 1;
        /// The policy computed the tensor, or a tensor that it depends on, in f16. A backward pass
        /// must scale the loss, even after the f16 region has ended.
        const FROM_F16 = 1 << 2;
        /// FP32, but computed from F16 tensors by steps that stay in the F16 range, such as the
        /// arithmetic of a composed norm: the values fit in F16.
        const WIDENED_F16 = 1 << 3;
        /// As `WIDENED_F16`, for BF16. The values need not fit in F16.
        const WIDENED_BF16 = 1 << 4;
        const WIDENED = Self::WIDENED_F16.bits() | Self::WIDENED_BF16.bits();
        /// A constant that fits in both half dtypes, such as an RNN's initial state: the constant
        /// follows a half operand beside it.
        const CONSTANT = 1 << 5;
        /// Random zeros and ones: the noise of a dropout.
        const BINARY = 1 << 6;
        /// FP32 that the user cast from F16: casting back to F16 loses nothing.
        const EXACT_F16 = 1 << 7;
        /// As `EXACT_F16`, for BF16.
        const EXACT_BF16 = 1 << 8;
    }
}

impl TensorFlags {
    /// The flag for FP32 that fits in this half dtype.
    pub(crate) fn widened(half: DType) -> Self {
        match half {
            DType::F16 => Self::WIDENED_F16,
            _ => Self::WIDENED_BF16,
        }
    }

    /// The flags for FP32 that fits in each half dtype of which `fits` is true.
    pub(crate) fn widened_where(fits: impl Fn(DType) -> bool) -> Self {
        let halves = HALVES.into_iter().filter(|half| fits(*half));
        halves.map(Self::widened).collect()
    }

    /// The flag for FP32 that was cast from this half dtype.
    pub(crate) fn exact(half: DType) -> Self {
        match half {
            DType::F16 => Self::EXACT_F16,
            _ => Self::EXACT_BF16,
        }
    }
}

/// State that clones share, and their flags.
struct Shared<T> {
    flags: TensorFlags,
    value: T,
}

/// A tensor's flags, or an `Arc` of the flags and the state that clones share.
pub(crate) struct Tail<T> {
    /// Odd: flags, shifted left by one. Even: pointer to `Shared`.
    word: AtomicPtr<Shared<T>>,
    owned: PhantomData<Arc<Shared<T>>>,
}

impl<T> Tail<T> {
    #[inline(always)]
    pub(crate) const fn new(flags: TensorFlags) -> Self {
        Self {
            word: AtomicPtr::new(ptr::without_provenance_mut(flags.bits() << 1 | 1)),
            owned: PhantomData,
        }
    }

    /// Starts with state that clones share.
    pub(crate) fn with(flags: TensorFlags, value: T) -> Self {
        let shared = Arc::into_raw(Arc::new(Shared { flags, value })).cast_mut();
        Self {
            word: AtomicPtr::new(shared),
            owned: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn flags(&self) -> TensorFlags {
        match self.get() {
            Some(shared) => shared.flags,
            None => TensorFlags::from_bits_truncate(self.word.load(Ordering::Relaxed).addr() >> 1),
        }
    }

    /// The state that the clones share, if any.
    #[inline(always)]
    pub(crate) fn shared(&self) -> Option<&T> {
        self.get().map(|shared| &shared.value)
    }

    #[inline(always)]
    fn get(&self) -> Option<&Shared<T>> {
        let word = self.word.load(Ordering::Acquire);
        // Safety: the pointer came from an `Arc` that this tail holds until the tail is dropped.
        // The pointer is set once and never changed.
        is_pointer(word).then(|| unsafe { &*word })
    }

    /// The state that the clones share, created if there is none yet.
    pub(crate) fn share(&self, make: impl FnOnce() -> T) -> &T {
        let bare = self.word.load(Ordering::Acquire);
        if !is_pointer(bare) {
            let (flags, value) = (self.flags(), make());
            let made = Arc::into_raw(Arc::new(Shared { flags, value })).cast_mut();
            let (set, seen) = (Ordering::AcqRel, Ordering::Acquire);
            if self.word.compare_exchange(bare, made, set, seen).is_err() {
                // Another thread was first. Safety: `made` is new, and nothing else has seen it.
                drop(unsafe { Arc::from_raw(made) });
            }
        }
        self.shared().expect("set here, or by another thread")
    }

    /// Whether no other clone shares this tail's state.
    pub(crate) fn is_alone(&self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        // Safety: as in `get`; `ManuallyDrop` keeps `from_raw` from giving up a count.
        !is_pointer(word)
            || Arc::strong_count(&ManuallyDrop::new(unsafe { Arc::from_raw(word) })) == 1
    }
}

#[inline(always)]
fn is_pointer<T>(word: *mut Shared<T>) -> bool {
    word.addr() & 1 == 0
}

impl<T> Clone for Tail<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        let word = self.word.load(Ordering::Acquire);
        if is_pointer(word) {
            // Safety: as in `get`; the clone owns the new count.
            unsafe { Arc::increment_strong_count(word) };
        }
        Self {
            word: AtomicPtr::new(word),
            owned: PhantomData,
        }
    }
}

impl<T> Drop for Tail<T> {
    #[inline(always)]
    fn drop(&mut self) {
        let word = *self.word.get_mut();
        if is_pointer(word) {
            // Safety: as in `get`; this drops the count that the tail owns.
            drop(unsafe { Arc::from_raw(word) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stay_whatever_is_shared() {
        let tail = Tail::<String>::new(TensorFlags::all());
        assert!(tail.shared().is_none() && tail.is_alone());
        assert_eq!(tail.flags(), TensorFlags::all());
        assert_eq!(tail.share(|| "one".into()), "one");
        assert_eq!(tail.share(|| unreachable!()), "one");
        assert_eq!(tail.flags(), TensorFlags::all());
        assert_eq!(tail.clone().flags(), TensorFlags::all());
        assert_eq!(size_of::<Tail<String>>(), size_of::<usize>());
    }

    #[test]
    fn what_is_shared_goes_with_the_last_clone() {
        let value = Arc::new(());
        let tail = Tail::new(TensorFlags::empty());
        tail.share(|| value.clone());
        let clone = tail.clone();
        assert!(!tail.is_alone());
        drop(tail);
        assert!(clone.is_alone());
        assert_eq!(Arc::strong_count(&value), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn threads_that_share_at_once_share_one_value() {
        for _ in 0..200 {
            let value = Arc::new(());
            let tail = Tail::<Arc<()>>::new(TensorFlags::DEMOTED);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let clone = tail.clone();
                        tail.share(|| value.clone());
                        assert_eq!(clone.flags(), TensorFlags::DEMOTED);
                    });
                }
            });
            assert_eq!(Arc::strong_count(&value), 2);
        }
    }
}
