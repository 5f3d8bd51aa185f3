//! Trials: which operations a device computes in half as exactly as half allows.
//!
//! Some kernels accumulate products in half, so that 4,096 ones sum to 2,048. Others compute a
//! function in half throughout and lose its last bits or its small results. An inexact operation
//! runs in FP32 on that device: operands are rounded to half first, and the result is half, so the
//! values are those of an exact device. An operation that could not be tried runs the same way.
//!
//! Other kernels compute in FP32 inside, such as LibTorch's: what the policy widens needs no casts
//! there. An operation that is widened by its class runs in half where the trial shows it exact.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::table::rows_of;
use super::{Class, HalfSupport, class, same};
use crate::FloatDType;

/// A tried operation, by its place in [`TRIED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TriedOp(usize);

impl TriedOp {
    /// The operation of this name; `None` if it is not tried.
    pub const fn named(name: &str) -> Option<Self> {
        let mut i = 0;
        while i < TRIED.len() {
            if same(TRIED[i], name) {
                return Some(Self(i));
            }
            i += 1;
        }
        None
    }

    /// Its name, that of a method of Burn's backends.
    pub const fn name(self) -> &'static str {
        TRIED[self.0]
    }

    /// Whether the policy runs it in half where the device is exact, and otherwise in FP32. The
    /// others run in half, and in FP32 where the device is not exact.
    fn is_widened(self) -> bool {
        class(self.name()) == Class::Fp32Inside
    }

    /// Tries the operation: each of `trials` says whether the device computes it exactly, `None` if
    /// its result cannot be read back. A trial that panics does not show it to be exact. Logs what
    /// was found.
    ///
    /// - `support`: that of the device. One that only contracts in half computes no other operation
    ///   there, and is not tried on it.
    /// - `device`, `half`: their names, for the log.
    /// - `or`: what else a user can do if the trial fails, empty or a sentence with a space before it.
    pub fn tried(
        self,
        support: HalfSupport,
        mut trials: impl Iterator<Item = Option<bool>>,
        [device, half]: [&str; 2],
        or: &str,
    ) -> bool {
        if support != HalfSupport::Arithmetic && class(self.name()) != Class::LowerPrecision {
            return false;
        }
        let exact = || trials.try_fold(true, |all, exact| Some(all && exact?));
        let exact = catch_unwind(AssertUnwindSafe(exact)).unwrap_or(None);
        let op = self.name();
        match exact {
            Some(false) if !self.is_widened() => log::info!(
                "burn-amp: {device} is not exact in {half} in {op}: it computes in FP32 and gives \
                 {half}"
            ),
            None if !self.is_widened() => log::warn!(
                "burn-amp: {device} could not be tried in {half} in {op}: the trial panicked, or its \
                 result could not be read back. It computes in FP32 and gives {half}.{or}"
            ),
            Some(_) | None => {}
        }
        exact == Some(true)
    }
}

/// What the trials of a device have shown so far, in one half dtype. An operation is tried when it
/// first computes there: all of them take minutes on a device that tunes its kernels.
#[derive(Debug)]
pub struct TrialResults {
    exact: [OnceLock<bool>; TRIED.len()],
}

impl Default for TrialResults {
    fn default() -> Self {
        Self {
            exact: [const { OnceLock::new() }; TRIED.len()],
        }
    }
}

impl TrialResults {
    /// Whether the device computes an operation exactly. `tried` tells, the first time. Nothing is
    /// locked meanwhile: a thread that waits for the trial's kernels may come here again, and a second
    /// trial does no harm.
    pub fn is_exact(&self, op: TriedOp, tried: impl FnOnce() -> bool) -> bool {
        let known = &self.exact[op.0];
        known.get().copied().unwrap_or_else(|| {
            let found = tried();
            *known.get_or_init(|| found)
        })
    }

    /// Operations that the policy runs in half and that the device is not shown to compute exactly.
    pub fn inexact(&self) -> Vec<String> {
        self.shown(false, |op| !op.is_widened())
    }

    /// Operations that the policy widens and that the device computes exactly in half.
    pub fn native(&self) -> Vec<String> {
        self.shown(true, TriedOp::is_widened)
    }

    /// The names of the operations that were shown to be exact or not, in the order of the trials.
    fn shown(&self, exact: bool, is: impl Fn(TriedOp) -> bool) -> Vec<String> {
        let ops = (0..TRIED.len()).map(TriedOp);
        ops.filter(|op| self.exact[op.0].get() == Some(&exact) && is(*op))
            .map(|op| op.name().into())
            .collect()
    }
}

/// Whether every value that `op` computed in `half` equals the rounded FP32 value.
pub fn is_exact<D: FloatDType>(op: &str, half: D, values: &[f32], expected: &[f32]) -> bool {
    let (bits, roundings) = if half == D::F16 {
        (11, 1)
    } else {
        (8, rows_of(op).roundings)
    };
    // A quarter of a rounding more, because FP32 is not exact either.
    let relative = (f32::from(roundings) + 0.25) * 2f32.powi(-bits);
    // 6e-8 is the smallest number of f16.
    let close = |(h, e): (&f32, &f32)| (h - e).abs() <= e.abs() * relative + 6e-8;
    values.iter().zip(expected).all(close)
}

/// The number of terms in a sum: beyond what f16 (2,048) and bf16 (256) can count to.
pub const N: usize = 4096;
/// Enough values that two roundings show where one is allowed.
pub const SPREAD: usize = 512;

/// Ones.
pub fn ones(count: usize) -> Vec<f32> {
    vec![1.0; count]
}

/// Ones, with 2,048 in the middle: from there, neither f16 nor bf16 can count in steps of one. For
/// sums of few terms, in any order.
pub fn peak(count: usize) -> Vec<f32> {
    let mut values = ones(count);
    values[count / 2] = 2048.0;
    values
}

/// Points at which precision is lost: near zero, at a bend and at the end of the range.
pub const POINTS: [f32; 12] = [
    6.2e-5, -1e-3, 0.02, -0.1, 0.5, -1.0, 1.7, -3.0, 3.93, -7.0, 256.0, 60_000.0,
];

/// Positive values of four orders of magnitude, in no order.
pub fn varied(count: usize) -> Vec<f32> {
    let fraction = |i: usize| (i as f32 * 0.618_034).fract();
    let value = |i: usize| fraction(i) * 10f32.powi((i * i % 4) as i32 - 2);
    (1..=count).map(value).collect()
}

/// The end of f16's range, where a sum of two overflows.
pub fn ends(count: usize) -> Vec<f32> {
    vec![60_000.0; count]
}

/// Values spread evenly over a range.
pub fn spread(range: std::ops::RangeInclusive<f32>) -> Vec<f32> {
    let (from, to) = range.into_inner();
    let value = |i: usize| from + (to - from) * i as f32 / (SPREAD - 1) as f32;
    (0..SPREAD).map(value).collect()
}

/// Hands the tried operations of Burn 0.21 to the macro `$callback`, each with the arguments that try
/// it, and then `$more`. A macro, since each version of Burn has a `Backend` of its own: a trial is a
/// call of its methods.
// One row selects a different kernel than many. So do few channels, and taps instead of channels.
#[doc(hidden)]
#[macro_export]
macro_rules! trials {
    ($callback:ident, |$make:ident| $($more:tt)*) => {
        $callback! { |$make|
                float_matmul
                    ($make.ones([1, N]), $make.ones([N, 1]))
                    ($make.ones([1, N]), $make.ones([N, 8]))
                    ($make.ones([8, N]), $make.ones([N, 8]))
                    ($make.ones([2, 1, N]), $make.ones([2, N, 8]));
                linear
                    ($make.ones([1, N]), $make.ones([N, 8]), None)
                    ($make.ones([8, N]), $make.ones([N, 8]), None);
                linear_x_backward
                    ($make.ones([8, N]), $make.ones([1, N]))
                    ($make.ones([8, N]), $make.ones([8, N]));
                linear_weight_backward
                    ($make.ones([N, 8]), $make.ones([N, 8]))
                    ($make.ones([N, 1]), $make.ones([N, 1]));
                conv1d
                    ($make.ones([1, N, 2]), $make.ones([4, N, 1]), None, conv())
                    ($make.ones([1, 1, 64]), $make.peak([1, 1, 64]), None, conv());
                conv1d_x_backward
                    ($make.ones([1, 4, 2]), $make.ones([N, 4, 1]), $make.ones([1, N, 2]), conv())
                    ($make.ones([1, 1, 127]), $make.peak([1, 1, 64]), $make.ones([1, 1, 64]), conv());
                conv1d_weight_backward
                    ($make.ones([2, 8, N / 2]), $make.ones([8, 8, 1]), $make.ones([2, 8, N / 2]), conv())
                    ($make.ones([2, 1, N / 2]), $make.ones([1, 1, 1]), $make.ones([2, 1, N / 2]), conv());
                conv2d
                    ($make.ones([1, N, 2, 2]), $make.ones([4, N, 1, 1]), None, conv())
                    ($make.ones([1, 1, 8, 8]), $make.peak([1, 1, 8, 8]), None, conv());
                conv2d_x_backward
                    ($make.ones([1, 4, 2, 2]), $make.ones([N, 4, 1, 1]), $make.ones([1, N, 2, 2]), conv())
                    ($make.ones([1, 1, 15, 15]), $make.peak([1, 1, 8, 8]), $make.ones([1, 1, 8, 8]), conv());
                conv2d_weight_backward
                    ($make.ones([4, 8, 32, 32]), $make.ones([8, 8, 1, 1]), $make.ones([4, 8, 32, 32]), conv())
                    ($make.ones([4, 1, 32, 32]), $make.ones([1, 1, 1, 1]), $make.ones([4, 1, 32, 32]), conv());
                conv3d
                    ($make.ones([1, N, 1, 2, 2]), $make.ones([4, N, 1, 1, 1]), None, conv())
                    ($make.ones([1, 1, 4, 4, 4]), $make.peak([1, 1, 4, 4, 4]), None, conv());
                conv3d_x_backward
                    ($make.ones([1, 4, 1, 2, 2]), $make.ones([N, 4, 1, 1, 1]), $make.ones([1, N, 1, 2, 2]), conv())
                    ($make.ones([1, 1, 7, 7, 7]), $make.peak([1, 1, 4, 4, 4]), $make.ones([1, 1, 4, 4, 4]), conv());
                conv3d_weight_backward
                    ($make.ones([1, 8, 16, 16, 16]), $make.ones([8, 8, 1, 1, 1]), $make.ones([1, 8, 16, 16, 16]), conv())
                    ($make.ones([1, 1, 16, 16, 16]), $make.ones([1, 1, 1, 1, 1]), $make.ones([1, 1, 16, 16, 16]), conv());
                conv_transpose1d
                    ($make.ones([1, N, 2]), $make.ones([N, 4, 1]), None, transpose())
                    ($make.ones([1, 1, 64]), $make.peak([1, 1, 64]), None, transpose());
                conv_transpose1d_x_backward
                    ($make.ones([4, N, 1]), $make.ones([1, N, 2]), transpose())
                    ($make.peak([1, 1, 64]), $make.ones([1, 1, 127]), transpose());
                conv_transpose1d_weight_backward
                    ($make.ones([2, 8, N / 2]), $make.ones([8, 8, 1]), $make.ones([2, 8, N / 2]), transpose())
                    ($make.ones([2, 1, N / 2]), $make.ones([1, 1, 1]), $make.ones([2, 1, N / 2]), transpose());
                conv_transpose2d
                    ($make.ones([1, N, 2, 2]), $make.ones([N, 4, 1, 1]), None, transpose())
                    ($make.ones([1, 1, 8, 8]), $make.peak([1, 1, 8, 8]), None, transpose());
                conv_transpose2d_x_backward
                    ($make.ones([4, N, 1, 1]), $make.ones([1, N, 2, 2]), transpose())
                    ($make.peak([1, 1, 8, 8]), $make.ones([1, 1, 15, 15]), transpose());
                conv_transpose2d_weight_backward
                    ($make.ones([4, 8, 32, 32]), $make.ones([8, 8, 1, 1]), $make.ones([4, 8, 32, 32]), transpose())
                    ($make.ones([4, 1, 32, 32]), $make.ones([1, 1, 1, 1]), $make.ones([4, 1, 32, 32]), transpose());
                conv_transpose3d
                    ($make.ones([1, N, 1, 2, 2]), $make.ones([N, 4, 1, 1, 1]), None, transpose())
                    ($make.ones([1, 1, 4, 4, 4]), $make.peak([1, 1, 4, 4, 4]), None, transpose());
                conv_transpose3d_x_backward
                    ($make.ones([4, N, 1, 1, 1]), $make.ones([1, N, 1, 2, 2]), transpose())
                    ($make.peak([1, 1, 4, 4, 4]), $make.ones([1, 1, 7, 7, 7]), transpose());
                conv_transpose3d_weight_backward
                    ($make.ones([1, 8, 16, 16, 16]), $make.ones([8, 8, 1, 1, 1]), $make.ones([1, 8, 16, 16, 16]), transpose())
                    ($make.ones([1, 1, 16, 16, 16]), $make.ones([1, 1, 1, 1, 1]), $make.ones([1, 1, 16, 16, 16]), transpose());
                float_tanh ($make.points());
                gelu ($make.points());
                float_atan ($make.points());
                float_atan2 ($make.points(), $make.values(vec![256.0; 12], [12]));
                gelu_backward
                    ($make.points(), $make.ones([12]))
                    ($make.spread(-6.0..=6.0), $make.varied([SPREAD]));
                sigmoid_backward ($make.spread(0.0..=1.0), $make.varied([SPREAD]));
                log_sigmoid_backward
                    ($make.points(), $make.ones([12]))
                    ($make.spread(-10.0..=10.0), $make.varied([SPREAD]));
                float_sqrt ($make.varied([64])) ($make.ends([1]));
                layer_norm
                    ($make.varied([8, 256]), $make.varied([256]), Some($make.varied([256])), 1e-5)
                    ($make.values((0..512).map(|i| i as f32 * 100.0).collect(), [1, 512]), $make.ones([512]), None, 1e-5);
                avg_pool1d
                    ($make.varied([1, 2, N]), 64, 64, 0, true, false)
                    ($make.ones([1, 1, N]), N, N, 0, true, false)
                    ($make.ends([1, 1, 64]), 4, 4, 0, true, false);
                avg_pool2d
                    ($make.varied([1, 2, 64, 64]), [8, 8], [8, 8], [0, 0], true, false)
                    ($make.ones([1, 1, 64, 64]), [64, 64], [64, 64], [0, 0], true, false)
                    ($make.ends([1, 1, 8, 8]), [2, 2], [2, 2], [0, 0], true, false);
                avg_pool1d_backward
                    ($make.ones([1, 1, 127]), $make.varied([1, 1, 64]), 64, 1, 0, true, false);
                avg_pool2d_backward
                    ($make.ones([1, 1, 15, 15]), $make.varied([1, 1, 8, 8]), [8, 8], [1, 1], [0, 0], true, false);
                adaptive_avg_pool1d
                    ($make.varied([1, 2, N]), 64)
                    ($make.ones([1, 1, N]), 1)
                    ($make.ends([1, 1, 64]), 16);
                adaptive_avg_pool2d
                    ($make.varied([1, 2, 64, 64]), [8, 8])
                    ($make.ones([1, 1, 64, 64]), [1, 1])
                    ($make.ends([1, 1, 8, 8]), [4, 4]);
                adaptive_avg_pool1d_backward
                    ($make.ones([1, 1, 64]), $make.varied([1, 1, 24]))
                    ($make.ones([1, 1, 1]), $make.ones([1, 1, N]));
                adaptive_avg_pool2d_backward
                    ($make.ones([1, 1, 16, 16]), $make.varied([1, 1, 12, 12]))
                    ($make.ones([1, 1, 1, 1]), $make.ones([1, 1, 64, 64]));
            $($more)*
        }
    };
}

/// As `trials`, with what Burn 0.22 adds.
#[doc(hidden)]
#[macro_export]
macro_rules! trials_0_22 {
    ($callback:ident, |$make:ident|) => {
        $crate::trials! { $callback, |$make|
                adaptive_avg_pool3d
                    ($make.varied([1, 2, 16, 16, 16]), [4, 4, 4])
                    ($make.ones([1, 1, 16, 16, 16]), [1, 1, 1])
                    ($make.ends([1, 1, 4, 4, 4]), [2, 2, 2]);
                adaptive_avg_pool3d_backward
                    ($make.ones([1, 1, 8, 8, 8]), $make.varied([1, 1, 6, 6, 6]))
                    ($make.ones([1, 1, 1, 1, 1]), $make.ones([1, 1, 16, 16, 16]));
        }
    };
}

macro_rules! names {
    (|$make:ident| $($op:ident $(($($argument:expr),+))+;)*) => {
        /// The tried operations.
        pub const TRIED: [&str; [$(stringify!($op)),*].len()] = [$(stringify!($op)),*];
    };
}

trials_0_22! { names, |make| }

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;
    use crate::dtype::tests::DType;

    /// The inexact and the native operations after a trial of `op`.
    fn tried(op: &str, support: HalfSupport, exact: impl Fn() -> Option<bool>) -> [String; 2] {
        let op = TriedOp::named(op).unwrap();
        let results = TrialResults::default();
        let trials = || [Some(true)].into_iter().chain(iter::once_with(&exact));
        let found = results.is_exact(op, || op.tried(support, trials(), ["a", "b"], ""));
        // It is tried once.
        assert_eq!(results.is_exact(op, || panic!("a second trial")), found);
        [results.inexact(), results.native()].map(|ops| ops.join(" "))
    }

    #[test]
    fn a_trial_takes_half_away_and_gives_it() {
        let found = |op, exact| tried(op, HalfSupport::Arithmetic, move || exact);
        assert_eq!(found("conv2d", Some(true)), ["", ""]);
        assert_eq!(found("conv2d", Some(false)), ["conv2d", ""]);
        assert_eq!(found("conv2d", None), ["conv2d", ""]);
        assert_eq!(found("gelu_backward", Some(true)), ["", "gelu_backward"]);
        assert_eq!(found("gelu_backward", Some(false)), ["", ""]);
        assert_eq!(found("gelu_backward", None), ["", ""]);
        let panics = || panic!("no such kernel");
        assert_eq!(
            tried("conv2d", HalfSupport::Arithmetic, panics),
            ["conv2d", ""]
        );
    }

    #[test]
    fn a_device_that_only_contracts_is_tried_on_contractions() {
        let found = |op, exact| tried(op, HalfSupport::Contractions, move || exact);
        assert_eq!(found("conv2d", Some(false)), ["conv2d", ""]);
        assert_eq!(found("conv2d", Some(true)), ["", ""]);
        let untried = || panic!("a trial");
        assert_eq!(
            tried("gelu_backward", HalfSupport::Contractions, untried),
            ["", ""]
        );
    }

    #[test]
    fn a_trial_within_a_trial_of_the_same_operation_ends() {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let op = TriedOp::named("conv2d").unwrap();
            let results = TrialResults::default();
            let found = results.is_exact(op, || results.is_exact(op, || true));
            done.send(found).unwrap();
        });
        let ended = ended.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(ended, Ok(true));
    }

    #[test]
    fn one_rounding_is_exact() {
        let ulp = 2f32.powi(-8);
        assert!(is_exact("conv2d", DType::BF16, &[1.0 + ulp], &[1.0]));
        assert!(!is_exact("conv2d", DType::BF16, &[1.0 + 2.0 * ulp], &[1.0]));
        let composed = "sigmoid_backward";
        assert!(is_exact(composed, DType::BF16, &[1.0 + 3.0 * ulp], &[1.0]));
        assert!(!is_exact(composed, DType::BF16, &[1.0 + 4.0 * ulp], &[1.0]));
        let three = 1.0 + 3.0 * 2f32.powi(-11);
        assert!(!is_exact(composed, DType::F16, &[three], &[1.0]));
        assert!(!is_exact("conv2d", DType::F16, &[1.0 + ulp], &[1.0]));
        assert!(!is_exact(
            "conv2d",
            DType::F16,
            &[f32::INFINITY],
            &[60_000.0]
        ));
        assert!(!is_exact("conv2d", DType::F16, &[f32::NAN], &[1.0]));
    }

    #[test]
    fn every_tried_operation_has_a_row_and_a_name() {
        for op in TRIED {
            // Panics without a row.
            class(op);
            assert_eq!(TriedOp::named(op).map(TriedOp::name), Some(op));
        }
        assert_eq!(TriedOp::named("no such operation"), None);
    }
}
