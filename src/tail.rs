//! The word beside each tensor: its marks, or a pointer to them and to what its clones share.
//!
//! One word, because a tensor of more than 128 bytes is moved by calls to `memcpy` instead of by a
//! few instructions, and every operation moves its tensors several times.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use bitflags::bitflags;

bitflags! {
    /// What the policy remembers of a tensor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct Marks: usize {
        /// Half because the policy made it so; of no meaning for other dtypes.
        const DEMOTED = 1;
        /// A gradient, or computed from one: never demoted, so optimizers stay FP32.
        const GRADIENT = 1 << 1;
        /// The policy computed it, or something that it was computed from, in f16: a backward pass
        /// has to scale, also one that begins after the region that said f16.
        const FROM_F16 = 1 << 2;
        /// FP32, but computed from half tensors by steps that stay in their range, as the
        /// arithmetic of a composed norm does: half holds what it is worth.
        const WIDENED = 1 << 3;
        /// A constant that half holds as well, as the first state of an RNN: it follows a half
        /// tensor that it meets.
        const CONSTANT = 1 << 4;
        /// Zeros and ones at random: the noise of a dropout.
        const BINARY = 1 << 5;
        /// FP32 that the user cast from half: a half copy loses nothing.
        const EXACT = 1 << 6;
    }
}

/// What clones share, and the marks of those that do.
struct Shared<T> {
    marks: Marks,
    value: T,
}

/// Marks, and an `Arc` where there is something to share.
pub(crate) struct Tail<T> {
    /// An odd number says the marks, an even one where they are.
    word: AtomicPtr<Shared<T>>,
    owned: PhantomData<Arc<Shared<T>>>,
}

impl<T> Tail<T> {
    #[inline(always)]
    pub(crate) const fn new(marks: Marks) -> Self {
        Self {
            word: AtomicPtr::new(ptr::without_provenance_mut(marks.bits() << 1 | 1)),
            owned: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn marks(&self) -> Marks {
        match self.get() {
            Some(shared) => shared.marks,
            None => Marks::from_bits_truncate(self.word.load(Ordering::Relaxed).addr() >> 1),
        }
    }

    /// What the clones share, if anything.
    #[inline(always)]
    pub(crate) fn shared(&self) -> Option<&T> {
        self.get().map(|shared| &shared.value)
    }

    #[inline(always)]
    fn get(&self) -> Option<&Shared<T>> {
        let word = self.word.load(Ordering::Acquire);
        // Safety: a pointer came from an `Arc` that this tail holds until it is dropped; it is set
        // once and never changed.
        is_pointer(word).then(|| unsafe { &*word })
    }

    /// What the clones share, made if there is nothing yet.
    pub(crate) fn share(&self, make: impl FnOnce() -> T) -> &T {
        let bare = self.word.load(Ordering::Acquire);
        if !is_pointer(bare) {
            let (marks, value) = (self.marks(), make());
            let made = Arc::into_raw(Arc::new(Shared { marks, value })).cast_mut();
            let (set, seen) = (Ordering::AcqRel, Ordering::Acquire);
            if self.word.compare_exchange(bare, made, set, seen).is_err() {
                // Safety: just made, and nobody has seen it: another thread was first.
                drop(unsafe { Arc::from_raw(made) });
            }
        }
        self.shared().expect("set here, or by another thread")
    }

    /// Whether no clone shares with this tail.
    pub(crate) fn is_alone(&self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        // Safety: as in `get`; the count that `from_raw` takes over is not given back.
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
            // Safety: as in `get`; the clone owns the count.
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
            // Safety: as in `get`; this is the count that the tail owns.
            drop(unsafe { Arc::from_raw(word) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stay_whatever_is_shared() {
        let tail = Tail::<String>::new(Marks::all());
        assert!(tail.shared().is_none() && tail.is_alone());
        assert_eq!(tail.marks(), Marks::all());
        assert_eq!(tail.share(|| "one".into()), "one");
        assert_eq!(tail.share(|| unreachable!()), "one");
        assert_eq!(tail.marks(), Marks::all());
        assert_eq!(tail.clone().marks(), Marks::all());
        assert_eq!(size_of::<Tail<String>>(), size_of::<usize>());
    }

    #[test]
    fn what_is_shared_goes_with_the_last_clone() {
        let value = Arc::new(());
        let tail = Tail::new(Marks::empty());
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
            let tail = Tail::<Arc<()>>::new(Marks::DEMOTED);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let clone = tail.clone();
                        tail.share(|| value.clone());
                        assert_eq!(clone.marks(), Marks::DEMOTED);
                    });
                }
            });
            assert_eq!(Arc::strong_count(&value), 2);
        }
    }
}
