//! The file of pretrained weights: safetensors in f16, of a model with FP32 parameters.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use burn::prelude::*;
use burn_store::{HalfPrecisionAdapter, ModuleSnapshot, SafetensorsStore};

use crate::model::WordGuesser;

/// The file that stands beside the sources.
pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("genesis-f16.safetensors")
}

/// Converts FP32 to f16 when a file is written, and f16 to FP32 when it is read. Modules that are not
/// Burn's own have to be named.
fn half() -> HalfPrecisionAdapter {
    HalfPrecisionAdapter::new().with_module("WordGuesser")
}

/// Writes all parameters in f16, and gives the size of the file in bytes.
pub fn save<B: Backend>(model: &WordGuesser<B>, file: &Path) -> Result<u64, Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(file)
        .overwrite(true)
        .with_to_adapter(half());
    model
        .save_into(&mut store)
        .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    Ok(fs::metadata(file)?.len())
}

/// Reads the file's parameters of this model. `new` names its parameters that no file has, by the
/// beginning of their names.
pub fn load<B: Backend, M: ModuleSnapshot<B>>(
    model: &mut M,
    file: &Path,
    new: Option<&str>,
) -> Result<(), Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(file)
        .allow_partial(true)
        .with_from_adapter(half());
    let loaded = model
        .load_from(&mut store)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let is_new = |name: &str| new.is_some_and(|new| name.starts_with(new));
    match loaded.missing.iter().find(|(name, _)| !is_new(name)) {
        Some((name, _)) => Err(format!("{} has no {name}", file.display()).into()),
        None => Ok(()),
    }
}
