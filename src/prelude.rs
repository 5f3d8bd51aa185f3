//! Ready-made types, and the most used names: `use burn_amp::prelude::*`.
//!
//! Each backend that a feature enables has a type to train on. `model.valid()` gives the model for
//! inference, on [`Amp`] of Burn's type.
//!
//! | feature | to train on | is |
//! |---|---|---|
//! | `flex` | `AmpFlex` | `AmpAutodiff<Flex>` |
//! | `ndarray` | `AmpNdArray` | `AmpAutodiff<NdArray>`, FP32 only |
//! | `cuda` | `AmpCuda` | `AmpAutodiff<Cuda>` |
//! | `rocm` | `AmpRocm` | `AmpAutodiff<Rocm>` |
//! | `wgpu` | `AmpWgpu` | `AmpAutodiff<Wgpu>` |
//! | `vulkan` | `AmpVulkan` | `AmpAutodiff<Vulkan>` |
//! | `metal` | `AmpMetal` | `AmpAutodiff<Metal>` |
//! | `webgpu` | `AmpWebGpu` | `AmpAutodiff<WebGpu>` |
//! | `tch` | `AmpLibTorch` | `AmpAutodiff<LibTorch>` |
//! | `cpu` | `AmpCpu` | `AmpAutodiff<Cpu>` |
//!
//! Each type takes a checkpointing strategy, like `AmpAutodiff`.
//!
//! Each feature enables Burn's crate for the backend, without its default features. These
//! come if the program enables both `burn`'s default features and `burn`'s feature of the backend. Fusion and autotune also come with
//! this crate's `fusion` and `autotune`.
//!
//! ```
//! use burn::backend::Flex;
//! use burn_amp::prelude::*;
//!
//! type MyBackend = AmpAutodiff<Flex>; // with the feature `flex` also: AmpFlex
//!
//! AmpConfig::new()
//!     .with_precision(Precision::Bf16)
//!     .apply::<MyBackend>(&Default::default())?;
//! # Ok::<(), AmpError>(())
//! ```

pub use crate::{
    Amp, AmpAutodiff, AmpConfig, AmpError, AmpReport, DynamicLossScale, GradScaler,
    LossScaleConfig, Precision, WhenStuck, full_precision, precision_of, with_precision,
};
#[cfg(feature = "train")]
pub use crate::{
    AmpTrainingExt, LossScaleMetric, MixedPrecision, MixedPrecisionTrainer,
    MixedPrecisionTrainerConfig, PrecisionMetric, SkippedStepsMetric, clip_grad_norm,
};

macro_rules! ready {
    ($($feature:literal $name:ident: $krate:ident::$backend:ident;)*) => {$(
        #[cfg(feature = $feature)]
        #[doc = concat!(
            "Mixed precision for training on [`", stringify!($backend), "`](", stringify!($krate),
            "::", stringify!($backend), ")."
        )]
        pub type $name<C = burn_autodiff::checkpoint::strategy::NoCheckpointing> =
            AmpAutodiff<$krate::$backend, C>;
    )*};
}

ready! {
    "flex" AmpFlex: burn_flex::Flex;
    "ndarray" AmpNdArray: burn_ndarray::NdArray;
    "cuda" AmpCuda: burn_cuda::Cuda;
    "rocm" AmpRocm: burn_rocm::Rocm;
    "wgpu" AmpWgpu: burn_wgpu::Wgpu;
    "vulkan" AmpVulkan: burn_wgpu::Vulkan;
    "metal" AmpMetal: burn_wgpu::Metal;
    "webgpu" AmpWebGpu: burn_wgpu::WebGpu;
    "tch" AmpLibTorch: burn_tch::LibTorch;
    "cpu" AmpCpu: burn_cpu::Cpu;
}
