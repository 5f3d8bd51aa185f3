//! The backends of the examples, chosen with `--backend`. Each except Flex is a feature.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One of Burn's backends, by the name of its feature.
#[derive(ValueEnum, Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub enum Choice {
    /// Burn's own, on the CPU. It emulates half precision.
    #[default]
    Flex,
    /// LibTorch, on the CPU. It computes in bf16, and emulates f16.
    Tch,
    /// An NVIDIA GPU.
    Cuda,
    /// An AMD GPU.
    Rocm,
    /// A GPU, with Vulkan.
    Vulkan,
    /// An Apple GPU.
    Metal,
    /// A GPU, with WGSL.
    Wgpu,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is hidden");
        f.write_str(value.get_name())
    }
}

impl Choice {
    /// How to build `program` with this backend. `program` is the part of Cargo's command line that
    /// names it.
    pub fn missing(self, program: &str) -> String {
        let on_a_gpu = if self == Self::Tch {
            ""
        } else {
            ",fusion,autotune"
        };
        let libtorch = "\n    pip install torch==2.9.0\n    export LIBTORCH_USE_PYTORCH=1\n    \
            export LD_LIBRARY_PATH=$(python3 -c \"import torch; print(torch.__path__[0])\")/lib";
        let first = if self == Self::Tch { libtorch } else { "" };
        format!(
            "--backend {self} needs the feature `{self}`:{first}\n    \
             cargo run --release {program} --features {self}{on_a_gpu} -- --backend {self}"
        )
    }
}

/// How a program ends: an error is its last line.
pub fn ended(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Calls `$run::<B>($args)` with the chosen backend, or returns an error with the command that
/// builds `$program` with it.
macro_rules! on_backend {
    ($choice:expr, $program:literal, $run:ident($($arg:expr),*)) => {
        match $choice {
            Choice::Flex => $run::<burn::backend::Flex>($($arg),*),
            #[cfg(feature = "tch")]
            Choice::Tch => $run::<burn_tch::LibTorch>($($arg),*),
            #[cfg(feature = "cuda")]
            Choice::Cuda => $run::<burn_cuda::Cuda>($($arg),*),
            #[cfg(feature = "rocm")]
            Choice::Rocm => $run::<burn_rocm::Rocm>($($arg),*),
            #[cfg(feature = "vulkan")]
            Choice::Vulkan => $run::<burn_wgpu::Vulkan>($($arg),*),
            #[cfg(feature = "metal")]
            Choice::Metal => $run::<burn_wgpu::Metal>($($arg),*),
            #[cfg(feature = "wgpu")]
            Choice::Wgpu => $run::<burn_wgpu::Wgpu>($($arg),*),
            #[allow(unreachable_patterns)]
            without => Err(without.missing($program).into()),
        }
    };
}
pub(crate) use on_backend;
