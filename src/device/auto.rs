//! The precision that `Precision::Auto` selects on a device: by the capabilities that its backend
//! reports or, where a backend reports none, by timing products of matrices.

use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn_amp_core::{Capabilities, Chosen, DTypeUses};
use burn_backend::{Backend, DeviceOps, FloatDType, Shape};

use super::BackendKind;
use crate::Precision;
use crate::policy::HalfSupport;
use crate::precision::{full_precision, keep_dtypes};

/// The precision that `Auto` selects on a device, and the reason.
pub(super) fn select<B: Backend>(device: &B::Device, capabilities: Capabilities) -> Chosen {
    // Burn reports the dtypes that LibTorch computes in, not those that the device accelerates.
    if BackendKind::of::<B>(device).is_libtorch {
        by_times(capabilities, times::<B>(device.inner()))
    } else {
        accelerated::<B>(device, capabilities).auto()
    }
}

/// What a device accelerates. CubeCL reports bf16 for all NVIDIA GPUs from compute capability 7.0 on; those before 8.0, such as
/// V100 and T4, have no matrix units for it.
///
/// Until: CubeCL 0.11, which Burn 0.22 uses.
fn accelerated<B: Backend>(device: &B::Device, reported: Capabilities) -> Capabilities {
    if !is_cuda_before_8_0::<B>(device) {
        return reported;
    }
    let bf16 = DTypeUses {
        accelerated: false,
        ..reported.bf16
    };
    Capabilities { bf16, ..reported }
}

/// Whether a device is CUDA's, without the asynchronous copies of compute capability 8.0.
#[cfg(feature = "cuda")]
fn is_cuda_before_8_0<B: Backend>(device: &B::Device) -> bool {
    use cubecl::Runtime;
    use cubecl::cuda::{CudaDevice, CudaRuntime};

    let device: &dyn std::any::Any = device.inner();
    device
        .downcast_ref::<CudaDevice>()
        .is_some_and(|device| !CudaRuntime::client(device).properties().features.copy_async)
}

#[cfg(not(feature = "cuda"))]
fn is_cuda_before_8_0<B: Backend>(_device: &B::Device) -> bool {
    false
}

/// How long a product of matrices takes on a device.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// The rows and columns of the matrices.
    size: usize,
    f32: Duration,
    /// The time in a half dtype; `None` if a much smaller product takes longer than the one in FP32.
    f16: Option<Duration>,
    bf16: Option<Duration>,
}

/// The least speed-up of a half dtype over FP32, since a step also casts.
const FASTER: f64 = 1.3;

fn by_times(capabilities: Capabilities, times: Option<Times>) -> Chosen {
    let Some(times) = times else {
        return Chosen {
            precision: Precision::F32,
            why: "the backend does not report what the device accelerates, and timing the device failed",
        };
    };
    let support = capabilities.support();
    let is_faster = |support, half: Option<Duration>| {
        let speedup = half.map(|half| times.f32.as_secs_f64() / half.as_secs_f64());
        support != HalfSupport::None && speedup.is_some_and(|by| by >= FASTER)
    };
    let precision = if is_faster(support.bf16, times.bf16) {
        Precision::Bf16
    } else if is_faster(support.f16, times.f16) {
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
    // Leaked once for each device: the state of a device is never freed.
    let why = why.leak();
    Chosen { precision, why }
}

/// Sizes are doubled until a product in FP32 takes this long, or the matrices are large enough.
const FILLED: Duration = Duration::from_millis(2);
const LARGEST: usize = 8192;

/// Times products of matrices in the dtypes of their operands, whatever the device's precision. `None`
/// if a product fails.
fn times<B: Backend>(device: &B::Device) -> Option<Times> {
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
    let times = || full_precision(times);
    catch_unwind(AssertUnwindSafe(times)).ok().flatten()
}

/// The shortest of three runs, after a first run that may compile a kernel.
fn product<B: Backend>(device: &B::Device, size: usize, dtype: FloatDType) -> Option<Duration> {
    // In this dtype, where a program's half ones may be the policy's.
    let ones = || keep_dtypes(|| B::float_ones(Shape::new([size, size]), device, dtype));
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
    fn times_prefer_bf16_then_f16_if_they_are_clearly_faster() {
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let none = DTypeUses::default();
        let general = DTypeUses {
            storage: true,
            arithmetic: true,
            accelerated: false,
        };
        let capabilities = |[f16, bf16]: [DTypeUses; 2]| Capabilities { f16, bf16 };
        for (f16, bf16, uses, expected) in [
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
            let auto = by_times(capabilities(uses), Some(times));
            assert_eq!(auto.precision, expected, "{times:?}");
            assert!(auto.why.contains("512x512 matrices takes 2.00 ms in f32"));
        }
        let failed = by_times(capabilities([general; 2]), None);
        assert_eq!(failed.precision, Precision::F32);
    }
}
