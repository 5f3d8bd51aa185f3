//! The backends that can be measured. All but Flex are features of this crate.

use std::path::Path;

use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn_amp::{Precision, precision_of, with_precision};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Options;
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "wgpu"))]
use super::launches;

/// A backend by the name it has on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    #[default]
    Flex,
    /// WGSL, with Vulkan on Linux.
    Wgpu,
    /// SPIR-V on Vulkan.
    Vulkan,
    Cuda,
    /// LibTorch, on the CPU.
    Tch,
}

impl Choice {
    /// The feature that compiles the backend in, if this build lacks it.
    pub fn missing_feature(self) -> Option<&'static str> {
        let (feature, compiled_in) = match self {
            Self::Flex => return None,
            Self::Wgpu => ("wgpu", cfg!(feature = "wgpu")),
            Self::Vulkan => ("vulkan", cfg!(feature = "vulkan")),
            Self::Cuda => ("cuda", cfg!(feature = "cuda")),
            Self::Tch => ("tch", cfg!(feature = "tch")),
        };
        (!compiled_in).then_some(feature)
    }

    /// Whether this program takes the kernel that comes first, where others take the fastest of several.
    pub fn is_untuned(self) -> bool {
        let tunes = matches!(self, Self::Wgpu | Self::Vulkan | Self::Cuda);
        tunes && !cfg!(feature = "autotune")
    }

    /// Its name in prose.
    pub fn title(self) -> &'static str {
        match self {
            Self::Flex => "Flex",
            Self::Wgpu => "WebGPU",
            Self::Vulkan => "Vulkan",
            Self::Cuda => "CUDA",
            Self::Tch => "LibTorch",
        }
    }

    /// Whether its timings in half precision do not transfer to other backends.
    pub fn emulates_half(self) -> bool {
        self == Self::Flex
    }
}

/// The bytes of a device's memory.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// The bytes of tensors.
    pub in_use: usize,
    /// The bytes reserved on the device, also for later tensors.
    pub reserved: usize,
}

/// The data that a device keeps on disk for the next process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kept {
    /// The choice of the fastest kernels.
    Tuning,
    /// The compiled kernels, too.
    All,
}

/// A backend to measure on.
pub trait Measured: Backend {
    /// The precisions to measure, FP32 first.
    const PRECISIONS: &[Precision] = &[Precision::F32, Precision::F16, Precision::Bf16];

    /// The note to print if half precision is emulated.
    fn emulated() -> Option<&'static str> {
        None
    }

    /// Whether `casts` counts with the trials that a user's device has. Flex's kernels add up in f16,
    /// unlike those of accelerators.
    const TRIED: bool = true;

    /// Whether the memory of its tensors is counted, by the device or by Rust's allocator.
    const COUNTED: bool = true;

    /// The memory of a device that has one of its own.
    fn usage(_device: &Self::Device) -> Option<Usage> {
        None
    }

    /// Makes the device keep its tuned and compiled kernels for another process, where it can. Call it
    /// before anything runs on the device.
    fn keep(_kept: Kept, _folder: &Path) {}

    /// Makes the device log its launches, where it can. Call it before anything runs on the device.
    fn watch_launches() -> bool {
        false
    }

    /// The launches of a step.
    fn launches(_options: &Options) -> Vec<Value> {
        Vec::new()
    }
}

impl Measured for Flex {
    fn emulated() -> Option<&'static str> {
        Some("Flex emulates half precision on a CPU: its timings do not transfer to other backends")
    }

    const TRIED: bool = false;
}

#[cfg(feature = "tch")]
impl Measured for burn::backend::LibTorch {
    // PyTorch emulates f16 on a CPU: a step takes 50 to 100 times as long.
    const PRECISIONS: &[Precision] = &[Precision::F32, Precision::Bf16];
    const COUNTED: bool = false;

    fn emulated() -> Option<&'static str> {
        (!has_bf16()).then_some("this CPU has no bf16 (avx512_bf16): LibTorch emulates it")
    }
}

/// Whether the CPU multiplies in bf16.
#[cfg(feature = "tch")]
fn has_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("avx512bf16");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("bf16");
    #[allow(unreachable_code)]
    false
}

/// The backends on CubeCL, each by its feature and with its runtime.
macro_rules! on_cubecl {
    ($($feature:literal, $backend:ident, $($runtime:ident)::*;)*) => {$(
        #[cfg(feature = $feature)]
        impl Measured for burn::backend::$backend {
            fn usage(device: &Self::Device) -> Option<Usage> {
                usage::<Self, $($runtime)::*>(device)
            }

            fn keep(kept: Kept, folder: &Path) {
                keep(kept, folder);
            }

            fn watch_launches() -> bool {
                launches::watch();
                true
            }

            fn launches(options: &Options) -> Vec<Value> {
                launches::launches::<Self>(options)
            }
        }
    )*};
}

on_cubecl! {
    "cuda", Cuda, cubecl::cuda::CudaRuntime;
    "vulkan", Vulkan, cubecl::wgpu::WgpuRuntime;
    "wgpu", Wgpu, cubecl::wgpu::WgpuRuntime;
}

/// The memory in use once all queued operations have run.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "wgpu"))]
fn usage<B: Backend, R: cubecl::Runtime<Device = B::Device>>(device: &B::Device) -> Option<Usage> {
    B::sync(device).expect("a device that answers");
    let usage = R::client(device).memory_usage().ok()?;
    Some(Usage {
        in_use: usage.bytes_in_use as usize,
        reserved: usage.bytes_reserved as usize,
    })
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "wgpu"))]
fn keep(kept: Kept, folder: &Path) {
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let cache = CacheConfig::File(folder.into());
    let mut config = CubeClRuntimeConfig::from_current_dir();
    config.compilation.cache = (kept == Kept::All).then(|| cache.clone());
    config.autotune.cache = cache;
    CubeClRuntimeConfig::set(config);
}

/// The precisions to measure that AMP supports on the default device, FP32 first.
pub fn precisions<B: Measured>() -> Vec<Precision> {
    let device = B::Device::default();
    let possible = |p: &Precision| with_precision(*p, || precision_of::<B>(&device)).is_ok();
    B::PRECISIONS.iter().copied().filter(possible).collect()
}
