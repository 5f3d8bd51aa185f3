//! The option `--backend` of the examples: one of the backends that the features enable.

use burn::tensor::Device;
use clap::ValueEnum;

macro_rules! backends {
    ($($(#[$on:meta])* $name:ident => $device:expr;)*) => {
        #[derive(Clone, Copy, Debug, ValueEnum)]
        pub enum Backend {
            $($(#[$on])* $name,)*
        }

        impl Backend {
            /// The first device, without mixed precision.
            pub fn device(self) -> Device {
                match self {
                    $($(#[$on])* Self::$name => $device,)*
                }
            }
        }
    };
}

backends! {
    Flex => Device::flex();
    #[cfg(feature = "cuda")]
    Cuda => Device::cuda(0);
    #[cfg(feature = "rocm")]
    Rocm => Device::rocm(0);
    #[cfg(feature = "vulkan")]
    Vulkan => Device::vulkan(Default::default());
    #[cfg(feature = "metal")]
    Metal => Device::metal(Default::default());
    #[cfg(feature = "wgpu")]
    Wgpu => Device::wgpu(Default::default());
}
