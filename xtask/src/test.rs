//! Runs the behaviour suite on one of Burn's backends, if the machine has what that needs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use libloading::Library;

use crate::libtorch;

/// The tests that run on any backend. The others test what is the same on all, on Flex.
const SUITE: [&str; 4] = ["device", "ops", "modules", "training"];

/// A backend, by the feature that switches it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Choice {
    #[default]
    Flex,
    /// SPIR-V on Vulkan.
    Vulkan,
    /// WGSL, on Vulkan where this is Linux.
    Wgpu,
    Cuda,
    /// LibTorch, on the CPU.
    Tch,
}

/// What is tested, and on what.
#[derive(Debug, Args)]
pub struct Options {
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// With Burn's fusion and autotune, as most of its users have them.
    #[arg(long)]
    tuned: bool,
    /// Optimized: worth its compile time where tests take long.
    #[arg(long)]
    release: bool,
    /// What the tests themselves take: a part of their names, `--nocapture`, ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub fn test(options: &Options) -> anyhow::Result<()> {
    let missing = options.backend.missing();
    if !missing.is_empty() {
        bail!("this machine cannot run it:\n- {}", missing.join("\n- "));
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--package", "burn-amp", "--no-fail-fast"]);
    cargo.args(["--features", &options.features()]);
    cargo.args(SUITE.iter().flat_map(|name| ["--test", name]));
    if options.release {
        cargo.arg("--release");
    }
    if options.backend == Choice::Tch {
        libtorch::add_to_path(&mut cargo)?;
    }
    if options.tuned && env::var_os("RUST_MIN_STACK").is_none() {
        // Debug builds overflow the stack of the thread that tunes.
        cargo.env("RUST_MIN_STACK", (128 << 20).to_string());
    }
    let status = cargo.arg("--").args(&options.arguments).status();
    let status = status.context("cannot start cargo")?;
    exit(status.code().unwrap_or(1))
}

impl Options {
    fn features(&self) -> String {
        let backend = self.backend.to_possible_value().expect("none is hidden");
        let tuned = if self.tuned { ",fusion,autotune" } else { "" };
        format!("{}{tuned}", backend.get_name())
    }
}

impl Choice {
    /// What the machine lacks, each with how to come by it. Nothing where that cannot be told
    /// beforehand.
    fn missing(self) -> Vec<String> {
        match self {
            Self::Flex => Vec::new(),
            Self::Vulkan | Self::Wgpu => vulkan(),
            Self::Cuda => cuda(),
            Self::Tch => libtorch::missing(),
        }
    }
}

fn loads(library: &str) -> bool {
    // SAFETY: the initializers of the loaders of Vulkan and CUDA are those that the tests run next.
    unsafe { Library::new(library) }.is_ok()
}

fn vulkan() -> Vec<String> {
    let mut missing = Vec::new();
    if !cfg!(target_os = "linux") {
        return missing;
    }
    if !loads("libvulkan.so.1") {
        missing.push(
            "no Vulkan loader, libvulkan.so.1: `apt-get install libvulkan1`, or what your system \
             calls it"
                .into(),
        );
    }
    if drivers().is_empty() {
        missing.push(
            "no Vulkan driver (ICD): that of your GPU, or for Mesa's, with one in software among \
             them, `apt-get install mesa-vulkan-drivers`"
                .into(),
        );
    }
    missing
}

/// The manifests of Vulkan drivers, where the loader looks for them.
fn drivers() -> Vec<PathBuf> {
    if let Some(named) = env::var_os("VK_DRIVER_FILES").or_else(|| env::var_os("VK_ICD_FILENAMES"))
    {
        return env::split_paths(&named)
            .filter(|file| file.exists())
            .collect();
    }
    let home = env::var_os("HOME").map(|home| Path::new(&home).join(".local/share"));
    let home = env::var_os("XDG_DATA_HOME").map(PathBuf::from).or(home);
    ["/etc", "/usr/local/etc", "/usr/local/share", "/usr/share"]
        .into_iter()
        .map(PathBuf::from)
        .chain(home)
        .flat_map(|folder| {
            fs::read_dir(folder.join("vulkan/icd.d"))
                .into_iter()
                .flatten()
        })
        .flatten()
        .map(|entry| entry.path())
        .filter(|file| file.extension() == Some(OsStr::new("json")))
        .collect()
}

fn cuda() -> Vec<String> {
    let mut missing = Vec::new();
    if !cfg!(target_os = "linux") {
        return missing;
    }
    if !loads("libcuda.so.1") {
        missing.push(
            "no NVIDIA driver, libcuda.so.1: `apt-get install nvidia-driver` with an NVIDIA GPU"
                .into(),
        );
    }
    // Kernels are compiled when they are first used, with the toolkit's headers. CubeCL looks for
    // it where CUDA_PATH says, else in these.
    let folders = match env::var_os("CUDA_PATH") {
        Some(folder) => vec![folder],
        None => ["/usr/local/cuda", "/opt/cuda", "/usr"]
            .map(Into::into)
            .to_vec(),
    };
    let is_toolkit = |folder| Path::new(folder).join("include/cuda_fp16.h").exists();
    if !folders.iter().any(is_toolkit) {
        missing.push(
            "no CUDA toolkit, cuda_fp16.h: `apt-get install nvidia-cuda-toolkit`, or NVIDIA's own, \
             and CUDA_PATH where it is"
                .into(),
        );
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn parsed(line: &str) -> Options {
        Cli::parse_from(["test"].into_iter().chain(line.split_whitespace())).options
    }

    #[test]
    fn features_are_those_of_the_backend() {
        assert_eq!(parsed("").features(), "flex");
        assert_eq!(parsed("--backend vulkan").features(), "vulkan");
        let tuned = parsed("--backend wgpu --tuned -- sums --nocapture");
        assert_eq!(tuned.features(), "wgpu,fusion,autotune");
        assert_eq!(tuned.arguments, ["sums", "--nocapture"]);
    }

    #[test]
    fn flex_needs_nothing() {
        assert!(Choice::Flex.missing().is_empty());
        assert!(!loads("libno-such-library.so.1"));
    }
}
