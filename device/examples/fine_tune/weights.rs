//! Files of weights: safetensors in any float dtype, of a model with FP32 parameters.

use std::error::Error;
use std::path::{Path, PathBuf};

use burn::store::{ApplyResult, FloatCastAdapter, ModuleSnapshot, SafetensorsStore};
use burn::tensor::DType;

/// The pretrained encoder in f16, which burn-amp's example for Burn 0.21 has written.
pub fn shipped() -> PathBuf {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/fine_tune");
    example.join("genesis-f16.safetensors")
}

/// Writes all parameters in FP32.
pub fn save(model: &impl ModuleSnapshot, file: &Path) -> Result<(), Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(file).overwrite(true);
    let saved = model.save_into(&mut store);
    saved.map_err(|error| format!("cannot write {}: {error}", file.display()).into())
}

/// Reads what the file has for this model. `new` are its parameters that no file has, by the
/// beginning of their names.
pub fn load(
    model: &mut impl ModuleSnapshot,
    file: &Path,
    new: Option<&str>,
) -> Result<ApplyResult, Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(file)
        .allow_partial(true)
        .with_from_adapter(FloatCastAdapter::to(DType::F32));
    let loaded = model
        .load_from(&mut store)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let is_new = |name: &str| new.is_some_and(|new| name.starts_with(new));
    match loaded.missing.iter().find(|(name, _)| !is_new(name)) {
        Some((name, _)) => Err(format!("{} has no {name}", file.display()).into()),
        None => Ok(loaded),
    }
}
