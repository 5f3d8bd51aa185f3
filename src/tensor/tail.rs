//! The word beside each tensor: its flags, or a pointer to flags and state that clones share.
//!
//! The tail is one word to keep tensors small: above 128 bytes, a tensor is moved by calls to
//! `memcpy` instead of a few instructions, and every operation moves its tensors several times.

//!
//! A byte of flags and a `OnceLock<Arc<_>>`, which need no `unsafe`, were measured: three times the
//! size, and a training step of small FP32 operations takes 3.5 % longer. `tests/interleavings`
//! checks this file with `loom`, under every order of its atomic operations.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;

use super::sync::{Arc, AtomicPtr, Ordering};

/// State that clones share, and their flags.
struct Shared<T> {
    flags: u16,
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
    pub(crate) fn new(flags: u16) -> Self {
        Self {
            word: AtomicPtr::new(ptr::without_provenance_mut(usize::from(flags) << 1 | 1)),
            owned: PhantomData,
        }
    }

    /// Starts with state that clones share.
    pub(crate) fn with(flags: u16, value: T) -> Self {
        let shared = Arc::into_raw(Arc::new(Shared { flags, value })).cast_mut();
        Self {
            word: AtomicPtr::new(shared),
            owned: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn flags(&self) -> u16 {
        match self.get() {
            Some(shared) => shared.flags,
            None => (self.word.load(Ordering::Relaxed).addr() >> 1) as u16,
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
        let word = self.word.load(Ordering::Relaxed);
        if is_pointer(word) {
            // Safety: as in `get`; this drops the count that the tail owns.
            drop(unsafe { Arc::from_raw(word) });
        }
    }
}
