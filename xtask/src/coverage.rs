//! Compares the operations of each version of Burn with the policy tables. Clippy checks that none is
//! left to its default: `clippy::missing_trait_methods` on the impls.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use burn_amp_core::policy::{self, Row};
use cargo_metadata::MetadataCommand;
use quote::ToTokens;
use syn::{Item, TraitItem};
use walkdir::WalkDir;

/// The traits of its operations, which need a policy row if a float tensor takes part in them.
pub const OPERATIONS: [&str; 7] = [
    "FloatTensorOps",
    "IntTensorOps",
    "BoolTensorOps",
    "ModuleOps",
    "ActivationOps",
    "QTensorOps",
    "TransactionOps",
];

/// The manifest of the package whose Burn 0.21 is checked, here and for the pages.
const MANIFEST: &str = "xtask/Cargo.toml";

const DEVICE: (&str, &str) = ("burn-amp-device", "device/Cargo.toml");

/// A trait's methods, and whether a float tensor takes part in each.
pub type Methods = BTreeMap<String, bool>;

pub fn coverage(table: bool) -> anyhow::Result<()> {
    // A package, the feature of its version of Burn, and that version.
    let packages = [
        ("burn-amp", MANIFEST, None, "0.21"),
        (DEVICE.0, DEVICE.1, Some("burn-0-22"), "0.22"),
        (DEVICE.0, DEVICE.1, Some("burn-0-23"), "0.23"),
    ];
    let tables = packages.map(|(.., burn)| policy::rows(burn).collect::<Vec<_>>());
    let (mut known, mut missing) = (BTreeSet::new(), Vec::new());
    for ((package, manifest, feature, burn), rows) in packages.into_iter().zip(&tables) {
        let (folder, burn) = burn_backend_of(manifest, feature, burn)?;
        let traits = traits(&folder)?;
        println!("{package} on burn-backend {burn}: {} rows", rows.len());
        // A table continues that of the previous version.
        known.extend(traits.values().flat_map(Methods::keys).cloned());
        let found = self::missing(&traits, &known, rows).into_iter();
        missing.extend(found.map(|line| format!("{package} on {burn}: {line}")));
    }
    if table {
        println!("\n| operation | class | otherwise | why |\n|---|---|---|---|");
        for row in &tables[2] {
            let (op, class, why, otherwise) = (row.op, row.class, row.why, row.otherwise);
            let otherwise = otherwise
                .iter()
                .map(|(class, when)| format!("{class:?} {when}"));
            let otherwise = otherwise.collect::<Vec<_>>().join("; ");
            println!("| `{op}` | {class:?} | {otherwise} | {why} |");
        }
    }
    ensure!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

/// Operations without a row, and rows of no known method.
fn missing(
    traits: &BTreeMap<String, Methods>,
    known: &BTreeSet<String>,
    rows: &[Row],
) -> Vec<String> {
    let mut missing = Vec::new();
    for name in OPERATIONS {
        let Some(methods) = traits.get(name) else {
            missing.push(format!("burn-backend has no trait {name}"));
            continue;
        };
        let floats = methods.iter().filter(|(_, float)| **float);
        let without = floats.filter(|(method, _)| rows.iter().all(|row| row.op != **method));
        missing.extend(without.map(|(method, _)| format!("{name}::{method} has no policy row")));
    }
    for row in rows.iter().filter(|row| !known.contains(row.op)) {
        let op = row.op;
        missing.push(format!("the policy row {op} is no method of burn-backend"));
    }
    missing
}

/// Where the sources of the resolved `burn-backend` are, and its version.
pub fn burn_backend() -> anyhow::Result<(PathBuf, String)> {
    burn_backend_of(MANIFEST, None, "0.21")
}

/// Like [`burn_backend()`], resolved for the package of a manifest, with only this feature and this version of Burn. A
/// weak feature (`burn-0-23?/..`) names the other version, too.
fn burn_backend_of(
    manifest: &str,
    feature: Option<&str>,
    burn: &str,
) -> anyhow::Result<(PathBuf, String)> {
    let host = env!("HOST");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // Without a platform, cargo would want the crates of all of them.
    let mut options = vec!["--quiet", "--locked", "--filter-platform", host];
    if let Some(feature) = feature {
        options.extend(["--no-default-features", "--features", feature]);
    }
    let metadata = MetadataCommand::new()
        .manifest_path(root.join(manifest))
        .other_options(options.into_iter().map(String::from).collect::<Vec<_>>())
        .exec()
        .context("cargo metadata")?;
    let packages = metadata.packages.iter();
    let found = packages.filter(|package| {
        let version = package.version.to_string();
        package.name.as_str() == "burn-backend" && version.starts_with(burn)
    });
    let found: Vec<_> = found.collect();
    let [package] = found[..] else {
        bail!("{} versions of burn-backend are in use", found.len());
    };
    let folder = package.manifest_path.parent().context("a folder")?;
    Ok((folder.join("src").into(), package.version.to_string()))
}

pub fn traits(folder: &Path) -> anyhow::Result<BTreeMap<String, Methods>> {
    let mut all = BTreeMap::new();
    for entry in WalkDir::new(folder) {
        let path = entry?.into_path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let file = syn::parse_file(&fs::read_to_string(&path)?);
            all.extend(traits_in(file.with_context(|| path.display().to_string())?));
        }
    }
    Ok(all)
}

fn traits_in(file: syn::File) -> BTreeMap<String, Methods> {
    let mut traits = BTreeMap::new();
    for item in file.items {
        let Item::Trait(item) = item else { continue };
        let mut methods = Methods::new();
        for item in item.items {
            let TraitItem::Fn(method) = item else {
                continue;
            };
            let text = method.sig.to_token_stream().to_string();
            let is_float = text.contains("FloatTensor") || text.contains("TransactionPrimitive <");
            methods.insert(method.sig.ident.to_string(), is_float);
        }
        traits.insert(item.ident.to_string(), methods);
    }
    traits
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_amp_core::policy::Class;

    fn rows(ops: &[&'static str]) -> Vec<Row> {
        let row = |op: &&'static str| Row {
            op,
            class: Class::Keep,
            why: "",
            otherwise: &[],
            recorded: None,
        };
        ops.iter().map(row).collect()
    }

    #[test]
    fn a_method_without_row_and_a_row_without_method_are_reported() {
        let text = "pub trait ActivationOps<B: Backend> {
                fn relu(tensor: FloatTensor<B>) -> FloatTensor<B> { tensor }
                fn gelu(tensor: FloatTensor<B>) -> FloatTensor<B>;
                fn count() -> usize;
            }
            pub trait Unrelated { fn other(tensor: FloatTensor<B>); }";
        let others = OPERATIONS.iter().filter(|name| **name != "ActivationOps");
        let others: String = others.map(|name| format!("trait {name} {{}}")).collect();
        let traits = traits_in(syn::parse_str(&(text.to_string() + &others)).unwrap());
        let known = ["relu", "gelu", "before"].map(String::from).into();
        assert!(missing(&traits, &known, &rows(&["relu", "gelu", "before"])).is_empty());
        assert_eq!(
            missing(&traits, &known, &rows(&["relu", "swish"])),
            [
                "ActivationOps::gelu has no policy row",
                "the policy row swish is no method of burn-backend"
            ]
        );
    }
}
