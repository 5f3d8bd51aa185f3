//! The precision that `Precision::Auto` selects on a device: by what its backend reports or, where a
//! backend reports nothing, by a trial.

use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet, DeviceOps, FloatDType, Shape};

use super::capabilities::half_support;
use super::{bare_name, name, trial};
use crate::Precision;
use crate::policy::HalfSupport;

/// What `Auto` selects on a device, and why.
#[derive(Debug)]
pub(crate) struct Auto {
    pub precision: Precision,
    pub why: String,
}

impl Auto {
    /// Runs the trial, if the backend does not report what the device accelerates.
    pub(super) fn of<B: Backend>(device: &B::Device) -> Self {
        let usage = |dtype| B::dtype_usage(device.inner(), dtype);
        let usage = [usage(DType::F16), usage(DType::BF16)];
        // Burn reports the dtypes that LibTorch computes in, not those that the device accelerates.
        match bare_name::<B>(device).starts_with("libtorch") {
            true => by_trial(usage, trial::times::<B>(device)),
            false => reported(usage),
        }
    }

    pub(super) fn log<B: Backend>(&self, device: &B::Device) {
        let Self { precision, why } = self;
        let device = name::<B>(device);
        log::info!("burn-amp: auto on {device} is {precision}: {why}");
    }

    fn new(precision: Precision, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { precision, why }
    }
}

fn reported([f16, bf16]: [DTypeUsageSet; 2]) -> Auto {
    let accelerated = |usage: DTypeUsageSet| {
        usage.contains(DTypeUsage::Accelerated) && half_support(usage) != HalfSupport::None
    };
    if accelerated(bf16) {
        Auto::new(Precision::Bf16, "the device accelerates bf16")
    } else if accelerated(f16) {
        Auto::new(Precision::F16, "the device accelerates f16, but not bf16")
    } else {
        Auto::new(
            Precision::F32,
            "the device accelerates neither f16 nor bf16",
        )
    }
}

/// How long a product of matrices takes on a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// The rows and columns of the matrices.
    size: usize,
    f32: Duration,
    /// In a half dtype; `None` if a much smaller product takes longer than the one in FP32.
    f16: Option<Duration>,
    bf16: Option<Duration>,
}

/// How many times as fast as FP32 a half dtype has to be, since a step also casts.
const FASTER: f64 = 1.3;

fn by_trial([f16, bf16]: [DTypeUsageSet; 2], times: Option<Times>) -> Auto {
    let Some(times) = times else {
        return Auto::new(
            Precision::F32,
            "the backend does not report what the device accelerates, and the trial failed",
        );
    };
    let is_faster = |usage, half: Option<Duration>| {
        let speedup = half.map(|half| times.f32.as_secs_f64() / half.as_secs_f64());
        half_support(usage) != HalfSupport::None && speedup.is_some_and(|by| by >= FASTER)
    };
    let precision = if is_faster(bf16, times.bf16) {
        Precision::Bf16
    } else if is_faster(f16, times.f16) {
        Precision::F16
    } else {
        Precision::F32
    };
    let ms = |time: Option<Duration>| match time {
        Some(time) => format!("{:.2} ms", time.as_secs_f64() * 1e3),
        None => "far longer".into(),
    };
    let [f32, f16, bf16] = [Some(times.f32), times.f16, times.bf16].map(ms);
    let size = times.size;
    let why = format!(
        "a product of {size}x{size} matrices takes {f32} in f32, {bf16} in bf16 and {f16} in f16"
    );
    Auto::new(precision, why)
}

/// Sizes are doubled until a product in FP32 takes this long, or the matrices are large enough.
const FILLED: Duration = Duration::from_millis(2);
const LARGEST: usize = 8192;

/// Times products of matrices. `B` must be a backend that computes. `None` if the device does not
/// answer.
pub(super) fn times<B: Backend>(device: &B::Device) -> Option<Times> {
    let product = |size, dtype| product::<B>(device, size, dtype);
    let times = || {
        let mut size = 256;
        let mut f32 = product(size, FloatDType::F32)?;
        while f32 < FILLED && size < LARGEST {
            size *= 2;
            f32 = product(size, FloatDType::F32)?;
        }
        // A device that emulates half may take a hundred times as long.
        let half = |dtype| match product(size / 4, dtype) {
            Some(small) if small < f32 => product(size, dtype),
            _ => None,
        };
        Some(Times {
            size,
            f32,
            f16: half(FloatDType::F16),
            bf16: half(FloatDType::BF16),
        })
    };
    catch_unwind(AssertUnwindSafe(times)).ok().flatten()
}

/// The shortest of three, after one that may compile a kernel.
fn product<B: Backend>(device: &B::Device, size: usize, dtype: FloatDType) -> Option<Duration> {
    let ones = || B::float_ones(Shape::new([size, size]), device, dtype);
    let (lhs, rhs) = (ones(), ones());
    let run = || {
        B::sync(device).ok()?;
        let start = Instant::now();
        black_box(B::float_matmul(lhs.clone(), rhs.clone()));
        B::sync(device).ok()?;
        Some(start.elapsed())
    };
    run()?;
    (0..3).map(|_| run()).min()?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_prefers_accelerated_bf16_then_f16_then_fp32() {
        let none = DTypeUsageSet::empty();
        let general = DTypeUsage::general();
        let accelerated = general | DTypeUsage::Accelerated;
        let contractions = DTypeUsage::Storage | DTypeUsage::Accelerated;
        for (f16, bf16, expected) in [
            (accelerated, accelerated, Precision::Bf16),
            (accelerated, contractions, Precision::Bf16),
            (accelerated, general, Precision::F16),
            (contractions, none, Precision::F16),
            (general, general, Precision::F32),
            (none, none, Precision::F32),
            (DTypeUsage::Accelerated.into(), none, Precision::F32),
        ] {
            let auto = reported([f16, bf16]);
            assert_eq!(auto.precision, expected, "{f16:?} {bf16:?}");
        }
    }

    #[test]
    fn a_trial_prefers_bf16_then_f16_if_they_are_clearly_faster() {
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let general = DTypeUsage::general();
        let none = DTypeUsageSet::empty();
        for (f16, bf16, usage, expected) in [
            (Some(1.0), Some(1.5), [general, general], Precision::Bf16),
            (Some(1.0), Some(1.6), [general, general], Precision::F16),
            (Some(1.0), None, [general, general], Precision::F16),
            (Some(1.0), None, [none, general], Precision::F32),
            (Some(1.6), Some(3.0), [general, general], Precision::F32),
            (None, None, [general, general], Precision::F32),
            (Some(1.0), Some(0.5), [general, none], Precision::F16),
        ] {
            let times = Times {
                size: 512,
                f32: ms(2.0),
                f16: f16.map(ms),
                bf16: bf16.map(ms),
            };
            let auto = by_trial(usage, Some(times));
            assert_eq!(auto.precision, expected, "{times:?}");
            assert!(auto.why.contains("512x512 matrices takes 2.00 ms in f32"));
        }
        assert_eq!(by_trial([general; 2], None).precision, Precision::F32);
    }
}
