//! Thread-local modes: precision regions, and state that the two layers pass each other around Burn's
//! autodiff, which lies between them.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Precision;

/// The modes of the code that a thread is running.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Modes {
    /// The precision of the innermost region. A region covers code that a thread runs; tensors and
    /// devices have no region.
    region: Option<Precision>,
    /// The precisions of the regions that this thread is in, with the innermost: a bit for each.
    regions: u8,
    /// Whether the lower layer demotes nothing. Burn's autodiff between the two layers has no argument
    /// for it.
    keep_dtypes: bool,
    /// Whether Burn creates or loads a parameter.
    creates_parameter: bool,
    /// Whether a backward pass is running. Burn runs a backward pass on the calling thread.
    in_backward: bool,
    /// The gradient that the backward pass starts with.
    seed: Seed,
    /// The region around the optimizer's step that runs, if one does.
    around_step: Option<Option<Precision>>,
    /// Whether anomaly detection inspects a tensor: the inspection runs operations too.
    inspecting: bool,
    /// The scaler scopes that this thread has entered, and how many of them do not apply.
    scopes: u32,
    hidden_scopes: u32,
}

/// The gradient that a backward pass starts with.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Seed {
    /// Autodiff's own.
    None,
    /// The loss scale, until autodiff takes it.
    Given(f32),
    /// The loss scale, which autodiff has taken.
    Taken(f32),
}

impl Modes {
    const NONE: Self = Self {
        region: None,
        regions: 0,
        keep_dtypes: false,
        creates_parameter: false,
        in_backward: false,
        seed: Seed::None,
        around_step: None,
        inspecting: false,
        scopes: 0,
        hidden_scopes: 0,
    };

    /// No mode, and no scope that applies.
    fn aside(self) -> Self {
        Self {
            scopes: self.scopes,
            hidden_scopes: self.scopes,
            ..Self::NONE
        }
    }
}

thread_local! {
    static MODES: Cell<Modes> = const { Cell::new(Modes::NONE) };
}

/// Runs `f` in changed modes. A panic also restores them.
#[inline]
fn changed<T>(change: impl FnOnce(&mut Modes), f: impl FnOnce() -> T) -> T {
    let mut modes = MODES.get();
    change(&mut modes);
    let _restored = Restore::set(modes);
    f()
}

/// Runs a kernel of the backend, with the modes of this thread put aside. A thread that waits for a
/// kernel may run any other task meanwhile, as with rayon, and the modes must not apply to that task.
#[inline]
pub(crate) fn in_kernel<T>(kernel: impl FnOnce() -> T) -> T {
    // No mode changes anything before half precision is requested.
    if !half_wanted() {
        return kernel();
    }
    let modes = MODES.get();
    let aside = modes.aside();
    // Often, as in FP32 without a region, there is nothing to put aside.
    if modes == aside {
        return kernel();
    }
    let _restored = Restore::set(aside);
    kernel()
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

/// Whether the policy has anything to do. False in a process that never left FP32: this check is then
/// all that an operation costs.
#[inline]
pub(crate) fn half_wanted() -> bool {
    HALF_WANTED.load(Ordering::Relaxed)
}

/// Sets the modes and restores them on drop, also when the thread unwinds.
struct Restore(Modes);

impl Restore {
    fn set(modes: Modes) -> Self {
        Self(MODES.replace(modes))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        MODES.set(self.0);
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
    let enter = |modes: &mut Modes| {
        modes.region = Some(precision);
        modes.regions |= bit(precision);
    };
    changed(enter, f)
}

fn bit(precision: Precision) -> u8 {
    1 << precision as u8
}

/// Runs `f` in FP32: half tensors that the policy made are cast to FP32 when they are used. The
/// counterpart of PyTorch's `torch.autocast(enabled=False)`.
pub fn full_precision<T>(f: impl FnOnce() -> T) -> T {
    with_precision(Precision::F32, f)
}

/// Runs an optimizer's step in FP32, also for gradients that are not marked as such, like those of a record.
#[cfg(feature = "train")]
pub(crate) fn in_step<T>(step: impl FnOnce() -> T) -> T {
    let change = |modes: &mut Modes| {
        modes.around_step = Some(modes.region);
        modes.region = Some(Precision::F32);
    };
    changed(change, step)
}

/// Runs `f` in the precision around the optimizer's step, if it is within one.
pub(crate) fn around_step<T>(f: impl FnOnce() -> T) -> T {
    let change = |modes: &mut Modes| modes.region = modes.around_step.unwrap_or(modes.region);
    changed(change, f)
}

/// The precision of the innermost region of this thread.
#[inline]
pub(crate) fn region() -> Option<Precision> {
    MODES.get().region
}

/// Whether the thread is in a region of this precision, the innermost one or one around it.
pub(crate) fn is_in_region(precision: Precision) -> bool {
    MODES.get().regions & bit(precision) != 0
}

/// Runs `f` with the lower layer computing in the given dtypes instead of demoting FP32. In effect
/// while the upper layer calls through autodiff, and throughout the backward pass.
#[inline]
pub(crate) fn keep_dtypes<T>(f: impl FnOnce() -> T) -> T {
    changed(|modes| modes.keep_dtypes = true, f)
}

/// Whether the current thread is inside [`keep_dtypes`].
#[inline]
pub(crate) fn keeps_dtypes() -> bool {
    MODES.get().keep_dtypes
}

/// Runs `f`, in which Burn creates or loads a parameter: what is created is learned, and is computed in FP32.
pub(crate) fn creating_parameter<T>(f: impl FnOnce() -> T) -> T {
    changed(|modes| modes.creates_parameter = true, f)
}

/// Whether the current thread is inside [`creating_parameter`].
#[inline]
pub(crate) fn creates_parameter() -> bool {
    MODES.get().creates_parameter
}

/// Runs `pass`, marked as a backward pass, in the dtypes of the forward pass. It starts with the
/// gradient `seed`, if there is one.
pub(crate) fn in_backward<T>(seed: Option<f32>, pass: impl FnOnce() -> T) -> T {
    let change = |modes: &mut Modes| {
        modes.keep_dtypes = true;
        modes.in_backward = true;
        modes.seed = seed.map_or(Seed::None, Seed::Given);
    };
    changed(change, pass)
}

/// Takes the gradient that a backward pass starts with, if it begins now.
#[inline]
pub(crate) fn take_seed() -> Option<f32> {
    let modes = MODES.get();
    let Seed::Given(seed) = modes.seed else {
        return None;
    };
    MODES.set(Modes {
        seed: Seed::Taken(seed),
        ..modes
    });
    Some(seed)
}

/// The gradient that the backward pass around this call started with, if it is not autodiff's own.
pub(crate) fn seed_of_pass() -> Option<f32> {
    match MODES.get().seed {
        Seed::Taken(seed) => Some(seed),
        _ => None,
    }
}

/// Whether the current thread is inside [`in_backward`].
#[inline]
pub(crate) fn is_in_backward() -> bool {
    MODES.get().in_backward
}

/// Runs `f`, which inspects a tensor for anomaly detection.
pub(crate) fn inspecting<T>(f: impl FnOnce() -> T) -> T {
    changed(|modes| modes.inspecting = true, f)
}

/// Whether the current thread is inside [`inspecting`].
#[inline]
pub(crate) fn is_inspecting() -> bool {
    MODES.get().inspecting
}

/// Runs `f` in one more scaler scope.
pub(crate) fn in_scope<T>(f: impl FnOnce() -> T) -> T {
    changed(|modes| modes.scopes += 1, f)
}

/// The scaler scopes that apply, counted from 0, the innermost last.
#[inline]
pub(crate) fn scopes() -> Range<usize> {
    let modes = MODES.get();
    modes.hidden_scopes as usize..modes.scopes as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_nest_and_survive_a_panic() {
        assert_eq!(region(), None);
        with_precision(Precision::F16, || {
            full_precision(|| {
                assert_eq!(region(), Some(Precision::F32));
                let all = [Precision::F32, Precision::F16, Precision::Bf16];
                assert_eq!(all.map(is_in_region), [true, true, false]);
            });
            assert_eq!(region(), Some(Precision::F16));
            assert!(!is_in_region(Precision::F32));
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
    fn a_kernel_puts_all_modes_aside_and_a_panic_brings_them_back() {
        let everything = |f: &dyn Fn()| {
            with_precision(Precision::F16, || {
                in_backward(Some(8.0), || inspecting(|| in_scope(f)))
            });
        };
        everything(&|| {
            let before = MODES.get();
            let caught = std::panic::catch_unwind(|| {
                in_kernel(|| {
                    assert_eq!((region(), scopes().next_back()), (None, None));
                    assert!(!keeps_dtypes() && !is_in_backward() && !is_inspecting());
                    assert_eq!(take_seed(), None);
                    // A task in its own scope.
                    in_scope(|| assert_eq!(scopes().next_back(), Some(1)));
                    panic!("inside the kernel")
                })
            });
            assert!(caught.is_err());
            assert_eq!(MODES.get(), before);
            assert_eq!(scopes().next_back(), Some(0));
            assert_eq!(seed_of_pass(), None);
            assert_eq!((take_seed(), take_seed()), (Some(8.0), None));
            assert_eq!(seed_of_pass(), Some(8.0));
            in_backward(None, || assert_eq!(seed_of_pass(), None));
            in_kernel(|| assert_eq!(seed_of_pass(), None));
            assert_eq!(seed_of_pass(), Some(8.0));
        });
        assert_eq!(MODES.get(), Modes::NONE);
    }

    #[cfg(feature = "train")]
    #[test]
    fn a_step_is_in_fp32_and_has_the_region_around_it() {
        for around in [None, Some(Precision::Bf16)] {
            let step = || {
                assert_eq!(region(), Some(Precision::F32));
                around_step(|| assert_eq!(region(), around));
                assert_eq!(region(), Some(Precision::F32));
            };
            match around {
                Some(precision) => with_precision(precision, || in_step(step)),
                None => in_step(step),
            }
            around_step(|| assert_eq!(region(), None));
        }
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
