//! What precision is wanted: the names users write, and the regions that override them.
//! Knows dtypes but no tensor, no backend and no device.

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::DType;
use serde::{Deserialize, Serialize};

use crate::AmpError;

/// The precision that matrix multiplications and convolutions compute in.
///
/// Parsed from a string, where case and spaces around it do not matter, and any other is
/// [`AmpError::UnknownPrecision`]; `16-mixed` and `bf16-mixed` are PyTorch Lightning's names:
///
/// | precision | names |
/// |---|---|
/// | `Auto` | `auto` |
/// | `F16` | `f16`, `fp16`, `16-mixed` |
/// | `Bf16` | `bf16`, `bf16-mixed` |
/// | `F32` | `f32`, `fp32`, `32` |
///
/// ```
/// use burn_amp::Precision;
///
/// assert_eq!("bf16-mixed".parse(), Ok(Precision::Bf16));
/// assert!("fp8".parse::<Precision>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Precision {
    /// bf16 where the device accelerates it, else f16 where it accelerates that, else FP32.
    /// LibTorch does not tell: f16 on CUDA and MPS, FP32 elsewhere.
    #[default]
    Auto,
    /// IEEE half: 11 bits of significand, largest value 65504. Trains with loss scaling.
    F16,
    /// bfloat16: 8 bits of significand, the range of FP32. Needs no loss scaling.
    Bf16,
    /// No half precision: on FP32 and F64 tensors every operation is the backend's own, bit for
    /// bit.
    F32,
}

impl Precision {
    /// Every name that parses.
    pub const NAMES: [&'static str; 9] = [
        "auto",
        "f16",
        "fp16",
        "16-mixed",
        "bf16",
        "bf16-mixed",
        "f32",
        "fp32",
        "32",
    ];

    /// The half dtype that matrix multiplications compute in; `None` for `F32` and for `Auto`,
    /// which is no dtype before a device has resolved it.
    pub fn compute_dtype(self) -> Option<DType> {
        match self {
            Precision::F16 => Some(DType::F16),
            Precision::Bf16 => Some(DType::BF16),
            Precision::F32 | Precision::Auto => None,
        }
    }

    /// Whether the loss is scaled by default: only f16 has too small a range of exponents.
    pub fn scales_loss(self) -> bool {
        self == Precision::F16
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Precision::Auto => "auto",
            Precision::F16 => "f16",
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        })
    }
}

impl FromStr for Precision {
    type Err = AmpError;

    fn from_str(given: &str) -> Result<Self, AmpError> {
        match given.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Precision::Auto),
            "f16" | "fp16" | "16-mixed" => Ok(Precision::F16),
            "bf16" | "bf16-mixed" => Ok(Precision::Bf16),
            "f32" | "fp32" | "32" => Ok(Precision::F32),
            _ => Err(AmpError::UnknownPrecision {
                given: given.to_string(),
            }),
        }
    }
}

thread_local! {
    static REGION: Cell<Option<Precision>> = const { Cell::new(None) };
    static FOLLOW: Cell<bool> = const { Cell::new(false) };
}

/// Whether half precision was ever asked for in this process.
static HALF_WANTED: AtomicBool = AtomicBool::new(false);

/// From now on half tensors may come into being.
pub(crate) fn want_half() {
    // Written once: the flag is read by every operation of every thread.
    if !half_wanted() {
        HALF_WANTED.store(true, Ordering::Relaxed);
    }
}

/// Whether the policy has anything to do: false in a process that never left FP32, where an
/// operation costs no more than this question.
#[inline]
pub(crate) fn half_wanted() -> bool {
    HALF_WANTED.load(Ordering::Relaxed)
}

/// Sets a thread-local for as long as it lives, also when the thread unwinds.
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

/// Runs `f` with every AMP operation of this thread in `precision`, whatever the devices are
/// configured to. Regions nest, the innermost holds; a panic leaves the region as well.
///
/// The counterpart of PyTorch's `torch.autocast(..., dtype=..)`: the backward pass may be in the
/// region or after it. A region holds on this thread alone: code that moves work to other threads
/// opens it there.
///
/// # Panics
///
/// The first operation in the region panics with [`AmpError::UnsupportedPrecision`]'s text on a
/// device that cannot do `precision`.
pub fn with_precision<T>(precision: Precision, f: impl FnOnce() -> T) -> T {
    if precision != Precision::F32 {
        want_half();
    }
    let _region = Restore::set(&REGION, Some(precision));
    f()
}

/// Runs `f` in FP32: half tensors that the policy made are brought back to FP32 where they are
/// used. The counterpart of PyTorch's `torch.autocast(enabled=False)`.
pub fn full_precision<T>(f: impl FnOnce() -> T) -> T {
    with_precision(Precision::F32, f)
}

/// The precision of the innermost region of this thread.
#[inline]
pub(crate) fn region() -> Option<Precision> {
    REGION.get()
}

/// Runs `f` with the lower layer following the dtypes it is given instead of demoting FP32: while
/// the upper layer calls through autodiff, and throughout the backward pass.
#[inline]
pub(crate) fn following<T>(f: impl FnOnce() -> T) -> T {
    let _follow = Restore::set(&FOLLOW, true);
    f()
}

/// Whether the current thread is inside [`following`].
#[inline]
pub(crate) fn is_following() -> bool {
    FOLLOW.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_in_any_case_and_displays_as_a_name() {
        for name in Precision::NAMES {
            let precision: Precision = name.parse().unwrap();
            assert_eq!(name.to_uppercase().parse(), Ok(precision));
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_names() {
        for given in ["", "half", "fp8", "16", "tf32", "bf16 mixed"] {
            let error = given.parse::<Precision>().unwrap_err();
            assert_eq!(
                error,
                AmpError::UnknownPrecision {
                    given: given.into()
                }
            );
            let text = error.to_string();
            assert!(text.contains(&format!("{given:?}")), "{text}");
            assert!(text.contains("bf16-mixed"), "{text}");
        }
    }

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

        let caught = std::panic::catch_unwind(|| following(|| panic!("inside")));
        assert!(caught.is_err());
        assert!(!is_following());
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
