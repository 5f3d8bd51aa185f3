//! Runs the behaviour suite and the unit tests on one of Burn's backends, if the machine has all that the
//! backend needs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use libloading::Library;

use crate::bench::backend::Choice;
use crate::libtorch;

/// The tests that run on any backend. The others run on Flex: their subject is the same on all
/// backends.
pub const SUITE: [&str; 4] = ["device", "ops", "modules", "training"];

/// The tests to run, and their backend.
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
    /// Arguments of the tests themselves: a part of their names, `--nocapture`, ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub fn test(options: &Options) -> anyhow::Result<()> {
    let missing = missing(options.backend);
    if !missing.is_empty() {
        bail!("this machine cannot run it:\n- {}", missing.join("\n- "));
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--package", "burn-amp", "--lib", "--no-fail-fast"]);
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

/// The parts that the machine lacks, each with how to get it. Empty where that cannot be checked
/// beforehand.
fn missing(backend: Choice) -> Vec<String> {
    let needs = match backend {
        Choice::Tch => return libtorch::missing(),
        Choice::Vulkan | Choice::Wgpu if cfg!(target_os = "linux") => [
            (
                loads("libvulkan.so.1"),
                "no Vulkan loader, libvulkan.so.1: `apt-get install libvulkan1`, or your system's name \
                 for it",
            ),
            (
                has_vulkan_driver(),
                "no Vulkan driver (ICD): that of your GPU, or for Mesa's, with one in software \
                 among them, `apt-get install mesa-vulkan-drivers`",
            ),
        ],
        Choice::Cuda if cfg!(target_os = "linux") => [
            (
                loads("libcuda.so.1"),
                "no NVIDIA driver, libcuda.so.1: `apt-get install nvidia-driver` with an NVIDIA GPU",
            ),
            (
                has_cuda_toolkit(),
                "no CUDA toolkit, cuda_fp16.h: `apt-get install nvidia-cuda-toolkit`, or NVIDIA's \
                 own, and CUDA_PATH where it is",
            ),
        ],
        _ => return Vec::new(),
    };
    let missing = needs.iter().filter(|(is_there, _)| !is_there);
    missing.map(|(_, what)| what.to_string()).collect()
}

fn loads(library: &str) -> bool {
    // SAFETY: the initializers of the loaders of Vulkan and CUDA are those that the tests run next.
    unsafe { Library::new(library) }.is_ok()
}

/// Whether a manifest of a driver is where the loader looks for it.
fn has_vulkan_driver() -> bool {
    if let Some(named) = env::var_os("VK_DRIVER_FILES").or_else(|| env::var_os("VK_ICD_FILENAMES"))
    {
        return env::split_paths(&named).any(|file| file.exists());
    }
    let home = env::var_os("HOME").map(|home| Path::new(&home).join(".local/share"));
    let home = env::var_os("XDG_DATA_HOME").map(PathBuf::from).or(home);
    let folders = ["/etc", "/usr/local/etc", "/usr/local/share", "/usr/share"];
    let mut folders = folders.into_iter().map(PathBuf::from).chain(home);
    folders.any(|folder| {
        let files = fs::read_dir(folder.join("vulkan/icd.d"));
        let mut files = files.into_iter().flatten().flatten();
        files.any(|file| file.path().extension() == Some(OsStr::new("json")))
    })
}

/// Kernels are compiled when they are first used, with the toolkit's headers. CubeCL looks for the
/// toolkit in CUDA_PATH, else in these folders.
fn has_cuda_toolkit() -> bool {
    let usual = "/usr/local/cuda:/opt/cuda:/usr";
    let folders = env::var_os("CUDA_PATH").unwrap_or(usual.into());
    env::split_paths(&folders).any(|folder| folder.join("include/cuda_fp16.h").exists())
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
        assert!(missing(Choice::Flex).is_empty());
        assert!(!loads("libno-such-library.so.1"));
    }
}
