//! Thread-local modes: precision regions, and what the two layers tell each other past Burn's
//! autodiff, which lies between them.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Precision;

thread_local! {
    /// The precision of the innermost region. A region covers code that a thread runs; tensors and
    /// devices have no region.
    static REGION: Cell<Option<Precision>> = const { Cell::new(None) };
    /// Whether the lower layer demotes nothing. Thread-local, because Burn's autodiff between the
    /// two layers has no argument for it.
    static KEEP_DTYPES: Cell<bool> = const { Cell::new(false) };
    /// Whether a backward pass is running. Burn runs a backward pass on the calling thread.
    static IN_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

/// Whether half precision was ever requested in this process.
static HALF_WANTED: AtomicBool = AtomicBool::new(false);

/// Records that half tensors may exist from now on.
pub(crate) fn want_half() {
    // Written only once: every operation of every thread reads the flag.
    if !half_wanted() {
        HALF_WANTED.store(true, Ordering::Relaxed);
    }
}

/// Whether the policy has anything to do. False in a process that never left FP32, where this check
/// is all that an operation pays.
#[inline]
pub(crate) fn half_wanted() -> bool {
    HALF_WANTED.load(Ordering::Relaxed)
}

/// Sets a thread-local and restores it on drop, also when the thread unwinds.
pub(crate) struct Restore<T: Copy + 'static> {
    cell: &'static std::thread::LocalKey<Cell<T>>,
    before: T,
}

impl<T: Copy + 'static> Restore<T> {
    pub(crate) fn set(cell: &'static std::thread::LocalKey<Cell<T>>, value: T) -> Self {
        let before = cell.replace(value);
        Self { cell, before }
    }
}

impl<T: Copy + 'static> Drop for Restore<T> {
    fn drop(&mut self) {
        self.cell.set(self.before);
    }
}

/// Runs `f` with every AMP operation of this thread in `precision`, however the devices are
/// configured. Regions nest, and the innermost applies. A panic also ends the region.
///
/// The counterpart of PyTorch's `torch.autocast(..., dtype=..)`: the backward pass may run inside
/// the region or after it. A region applies to this thread only. Code that moves work to other
/// threads opens a region on each of them.
///
/// # Panics
///
/// If a device does not support `precision`, the first operation on it in the region panics with
/// the text of [`AmpError::UnsupportedPrecision`](crate::AmpError::UnsupportedPrecision).
pub fn with_precision<T>(precision: Precision, f: impl FnOnce() -> T) -> T {
    if precision != Precision::F32 {
        want_half();
    }
    let _region = Restore::set(&REGION, Some(precision));
    f()
}

/// Runs `f` in FP32: half tensors that the policy made are cast to FP32 when they are used. The
/// counterpart of PyTorch's `torch.autocast(enabled=False)`.
pub fn full_precision<T>(f: impl FnOnce() -> T) -> T {
    with_precision(Precision::F32, f)
}

/// The precision of the innermost region of this thread.
#[inline]
pub(crate) fn region() -> Option<Precision> {
    REGION.get()
}

/// Runs `f` with the lower layer computing in the given dtypes instead of demoting FP32. In effect
/// while the upper layer calls through autodiff, and throughout the backward pass.
#[inline]
pub(crate) fn keep_dtypes<T>(f: impl FnOnce() -> T) -> T {
    let _follow = Restore::set(&KEEP_DTYPES, true);
    f()
}

/// Whether the current thread is inside [`keep_dtypes`].
#[inline]
pub(crate) fn keeps_dtypes() -> bool {
    KEEP_DTYPES.get()
}

/// Runs `pass`, marked as a backward pass.
pub(crate) fn in_backward<T>(pass: impl FnOnce() -> T) -> T {
    let _in_backward = Restore::set(&IN_BACKWARD, true);
    pass()
}

/// Whether the current thread is inside [`in_backward`].
#[inline]
pub(crate) fn is_in_backward() -> bool {
    IN_BACKWARD.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_nest_and_survive_a_panic() {
        assert_eq!(region(), None);
        with_precision(Precision::F16, || {
            full_precision(|| assert_eq!(region(), Some(Precision::F32)));
            assert_eq!(region(), Some(Precision::F16));
            let caught = std::panic::catch_unwind(|| {
                with_precision(Precision::Bf16, || panic!("inside the region"))
            });
            assert!(caught.is_err());
            assert_eq!(region(), Some(Precision::F16));
        });
        assert_eq!(region(), None);

        let caught = std::panic::catch_unwind(|| keep_dtypes(|| panic!("inside")));
        assert!(caught.is_err());
        assert!(!keeps_dtypes());
    }

    #[test]
    fn a_region_is_not_seen_on_another_thread() {
        with_precision(Precision::F16, || {
            std::thread::spawn(|| assert_eq!(region(), None))
                .join()
                .unwrap();
        });
    }
}
