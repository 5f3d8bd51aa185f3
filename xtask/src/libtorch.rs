//! LibTorch, where Burn's `tch` finds it, and Python.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The LibTorch that Burn's `tch` is made for.
const TORCH: &str = "2.9.0";

/// Lets the programs that `cargo` starts load LibTorch. The linker finds it by itself.
pub fn add_to_path(cargo: &mut Command) -> anyhow::Result<()> {
    if let Ok(folder) = folder() {
        let known = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = [folder].into_iter().chain(env::split_paths(&known));
        cargo.env("LD_LIBRARY_PATH", env::join_paths(folders)?);
    }
    Ok(())
}

/// The parts of LibTorch that this machine lacks, with how to get them.
pub fn missing() -> Vec<String> {
    let Err(why) = folder() else {
        return Vec::new();
    };
    vec![format!(
        "no LibTorch {TORCH}: set LIBTORCH to its folder, or `pip install torch=={TORCH}` and set \
         LIBTORCH_USE_PYTORCH=1 ({why})"
    )]
}

/// The folder of LibTorch's libraries, or why there is none.
fn folder() -> Result<PathBuf, String> {
    if let Some(folder) = env::var_os("LIBTORCH") {
        let folder = Path::new(&folder).join("lib");
        if !folder.exists() {
            return Err(format!("LIBTORCH is set and {} missing", folder.display()));
        }
        return Ok(folder);
    }
    if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        return Err("neither LIBTORCH nor LIBTORCH_USE_PYTORCH is set".into());
    }
    let script = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent / 'lib')";
    python(script).map(PathBuf::from)
}

/// A script's output, or the reason why it does not run.
pub fn python(script: &str) -> Result<String, String> {
    let python = Command::new("python3").args(["-c", script]).output();
    let python = python.map_err(|error| format!("cannot start python3: {error}"))?;
    let said = [python.stdout, python.stderr];
    let [out, err] = said.map(|said| String::from_utf8_lossy(&said).trim().to_string());
    let failed = || format!("python3: {}\n{err}", python.status);
    python.status.success().then_some(out).ok_or_else(failed)
}
