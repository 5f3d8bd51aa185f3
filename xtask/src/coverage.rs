//! Compares the traits of the resolved `burn-backend` with what burn-amp overrides, and those of Burn
//! 0.22 with what burn-amp-device overrides. A method that is left to its default silently loses the
//! inner backend's own kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use burn_amp_core::policy::{self, Row};
use cargo_metadata::MetadataCommand;
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, ImplItem, Item, ItemImpl, TraitItem, Type};
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

/// A trait's methods, and whether a float tensor takes part in each.
pub type Methods = BTreeMap<String, bool>;

/// By trait, the methods that the library writes out or makes with a macro.
type Overridden = BTreeMap<String, BTreeSet<String>>;

pub fn coverage(table: bool) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    for line in [burn_0_21()?, burn_0_22()?] {
        line.print()?;
        missing.extend(line.missing());
    }
    if table {
        println!("\n| operation | class | otherwise | why |\n|---|---|---|---|");
        for row in policy::rows("0.22") {
            let otherwise = row
                .otherwise
                .map(|(class, when)| format!("{class:?} {when}"));
            println!(
                "| `{}` | {:?} | {} | {} |",
                row.op,
                row.class,
                otherwise.unwrap_or_default(),
                row.why
            );
        }
    }
    ensure!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

/// A package of ours beside the line of Burn that it is for.
struct Line {
    package: &'static str,
    burn: String,
    whole: &'static [&'static str],
    traits: BTreeMap<String, Methods>,
    overridden: Overridden,
    /// The rows of its operations. A row without a method is reported, unless another line has it.
    table: Vec<Row>,
    elsewhere: BTreeSet<String>,
}

fn burn_0_21() -> anyhow::Result<Line> {
    let (folder, burn) = burn_backend()?;
    Ok(Line {
        package: "burn-amp",
        burn,
        whole: &["Backend", "AutodiffBackend"],
        traits: traits(&folder)?,
        overridden: overridden(&repository().join("src"))?,
        table: policy::rows("0.21").collect(),
        elsewhere: BTreeSet::new(),
    })
}

fn burn_0_22() -> anyhow::Result<Line> {
    let (folder, burn) = burn_backend_of(&repository().join("device/Cargo.toml"))?;
    let (before, _) = burn_backend()?;
    Ok(Line {
        package: "burn-amp-device",
        burn,
        // Autodiff is the client's.
        whole: &["Backend", "DistributedOps"],
        traits: traits(&folder)?,
        overridden: overridden(&repository().join("device/src"))?,
        table: policy::rows("0.22").collect(),
        elsewhere: traits(&before)?
            .into_values()
            .flat_map(Methods::into_keys)
            .collect(),
    })
}

impl Line {
    fn print(&self) -> anyhow::Result<()> {
        println!("{} on burn-backend {}\n", self.package, self.burn);
        println!("{:<16} overridden / methods", "trait");
        for name in self.whole.iter().chain(&OPERATIONS) {
            let methods = self
                .traits
                .get(*name)
                .with_context(|| format!("burn-backend {} has no trait {name}", self.burn))?;
            let done = methods.len() - left(name, methods, &self.overridden).count();
            println!("{name:<16} {done:>10} / {}", methods.len());
        }
        println!();
        Ok(())
    }

    /// Whatever is not as it should be, a line each.
    fn missing(&self) -> impl Iterator<Item = String> {
        let Self {
            whole,
            traits,
            overridden,
            table,
            elsewhere,
            ..
        } = self;
        let missing = missing(whole, traits, overridden, table, elsewhere);
        missing
            .into_iter()
            .map(|line| format!("{}: {line}", self.package))
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The methods of a trait that are left to their defaults.
fn left<'a>(
    name: &str,
    methods: &'a Methods,
    overridden: &'a Overridden,
) -> impl Iterator<Item = &'a String> {
    let ours = overridden.get(name);
    methods
        .keys()
        .filter(move |method| !ours.is_some_and(|ours| ours.contains(*method)))
}

/// Whatever is not as it should be, a line each. `whole` names the traits of a backend as a whole, and
/// `elsewhere` the methods of another line, which may have rows.
fn missing(
    whole: &[&str],
    traits: &BTreeMap<String, Methods>,
    overridden: &Overridden,
    table: &[Row],
    elsewhere: &BTreeSet<String>,
) -> Vec<String> {
    let mut missing = Vec::new();
    for (name, methods) in traits {
        let operations = OPERATIONS.contains(&name.as_str());
        if !operations && !whole.contains(&name.as_str()) {
            continue;
        }
        missing.extend(
            left(name, methods, overridden)
                .map(|method| format!("{name}::{method} is not overridden")),
        );
        if operations {
            missing.extend(
                methods
                    .iter()
                    .filter(|(method, float)| **float && table.iter().all(|r| r.op != *method))
                    .map(|(method, _)| format!("{name}::{method} has no policy row")),
            );
        }
    }
    let here = traits.values().flat_map(Methods::keys);
    let known: BTreeSet<&str> = here.chain(elsewhere).map(String::as_str).collect();
    missing.extend(
        table
            .iter()
            .filter(|row| !known.contains(row.op))
            .map(|row| format!("the policy row {} is no method of burn-backend", row.op)),
    );
    missing
}

/// Where the sources of the resolved `burn-backend` are, and its version.
pub fn burn_backend() -> anyhow::Result<(PathBuf, String)> {
    burn_backend_of(&repository().join("xtask/Cargo.toml"))
}

/// As [`burn_backend()`], as it is resolved for the package of a manifest.
fn burn_backend_of(manifest: &Path) -> anyhow::Result<(PathBuf, String)> {
    let host = rustc_version::version_meta()?.host;
    let metadata = MetadataCommand::new()
        .manifest_path(manifest)
        // Without a platform, cargo would want the crates of all of them.
        .other_options(["--locked", "--filter-platform", &host].map(String::from))
        .exec()
        .context("cargo metadata")?;
    let found: Vec<_> = metadata
        .packages
        .iter()
        .filter(|package| package.name.as_str() == "burn-backend")
        .collect();
    ensure!(
        found.len() == 1,
        "{} versions of burn-backend are in use",
        found.len()
    );
    let folder = found[0].manifest_path.parent().context("a folder")?;
    Ok((folder.join("src").into(), found[0].version.to_string()))
}

fn files(folder: &Path) -> impl Iterator<Item = anyhow::Result<syn::File>> {
    WalkDir::new(folder)
        .into_iter()
        .filter(|entry| match entry {
            Ok(entry) => entry.path().extension().is_some_and(|e| e == "rs"),
            Err(_) => true,
        })
        .map(|entry| {
            let path = entry?.into_path();
            let text = fs::read_to_string(&path)?;
            syn::parse_file(&text).with_context(|| format!("parsing {}", path.display()))
        })
}

pub fn traits(folder: &Path) -> anyhow::Result<BTreeMap<String, Methods>> {
    let mut all = BTreeMap::new();
    for file in files(folder) {
        all.extend(traits_in(file?));
    }
    Ok(all)
}

fn traits_in(file: syn::File) -> BTreeMap<String, Methods> {
    let mut traits = BTreeMap::new();
    for item in file.items {
        let Item::Trait(item) = item else { continue };
        let methods = item
            .items
            .into_iter()
            .filter_map(|item| match item {
                TraitItem::Fn(method) if !only_distributed(&method.attrs) => Some(method.sig),
                _ => None,
            })
            .map(|sig| {
                let text = sig.to_token_stream().to_string();
                let float = ["FloatTensor", "TransactionPrimitive <"]
                    .iter()
                    .any(|name| text.contains(name));
                (sig.ident.to_string(), float)
            })
            .collect();
        traits.insert(item.ident.to_string(), methods);
    }
    traits
}

/// Methods that exist under Burn's feature `distributed` alone.
fn only_distributed(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .to_token_stream()
                .to_string()
                .contains("distributed")
    })
}

fn overridden(folder: &Path) -> anyhow::Result<Overridden> {
    let mut all = Overridden::new();
    for file in files(folder) {
        all = overridden_in(file?, all);
    }
    Ok(all)
}

fn overridden_in(file: syn::File, mut overridden: Overridden) -> Overridden {
    for item in file.items {
        let Item::Impl(item) = item else { continue };
        let Some(name) = of_amp(&item) else { continue };
        let methods = overridden.entry(name).or_default();
        for item in item.items {
            match item {
                ImplItem::Fn(method) => methods.extend([method.sig.ident.to_string()]),
                ImplItem::Macro(lines) => methods.extend(operations(lines.mac.tokens)),
                _ => {}
            }
        }
    }
    overridden
}

/// The trait that an impl block gives `Amp` or `AmpAutodiff`.
fn of_amp(item: &ItemImpl) -> Option<String> {
    let (_, path, _) = item.trait_.as_ref()?;
    let Type::Path(of) = item.self_ty.as_ref() else {
        return None;
    };
    let of = of.path.segments.last()?.ident.to_string();
    let name = path.segments.last()?.ident.to_string();
    ["Amp", "AmpAutodiff"]
        .contains(&of.as_str())
        .then_some(name)
}

/// The identifiers that begin the lines of a macro call: the operations are among them. A line ends
/// with a semicolon and may begin with `fn`.
fn operations(tokens: TokenStream) -> impl Iterator<Item = String> {
    let mut begins = true;
    tokens.into_iter().filter_map(move |token| match token {
        TokenTree::Punct(punct) if punct.as_char() == ';' => {
            begins = true;
            None
        }
        TokenTree::Ident(ident) if begins && ident != "fn" => {
            begins = false;
            Some(ident.to_string())
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_amp_core::policy::Class;

    fn rows(ops: &[&'static str]) -> Vec<Row> {
        ops.iter()
            .map(|op| Row {
                op,
                class: Class::Keep,
                why: "",
                otherwise: None,
                recorded: None,
            })
            .collect()
    }

    #[test]
    fn a_method_without_override_or_row_and_a_row_without_method_are_reported() {
        let traits = traits_in(
            syn::parse_str(
                "pub trait ActivationOps<B: Backend> {
                    fn relu(tensor: FloatTensor<B>) -> FloatTensor<B> { tensor }
                    fn gelu(tensor: FloatTensor<B>) -> FloatTensor<B>;
                    fn made() -> FloatTensor<B>;
                    fn count() -> usize;
                    #[cfg(feature = \"distributed\")]
                    fn reduce(tensor: FloatTensor<B>);
                }
                pub trait Unrelated { fn other(); }",
            )
            .unwrap(),
        );
        let ours = |body: &str| {
            let text = format!("impl<B: Backend> ActivationOps<Self> for Amp<B> {{ {body} }}");
            overridden_in(syn::parse_str(&text).unwrap(), Overridden::new())
        };
        let whole = ours(
            "own_ops! { relu([tensor]) -> FloatTensor => made(tensor); }
             float_ops! { Forward; gelu([tensor], made: usize) -> FloatTensor; }
             delegate! { fn count() -> usize; }
             fn made() -> FloatTensor<Self> { B::made() }",
        );
        let table = rows(&["relu", "gelu", "made"]);
        let elsewhere = BTreeSet::new();
        let missing =
            |ours: &Overridden, table: &[Row]| missing(&[], &traits, ours, table, &elsewhere);
        assert!(missing(&whole, &table).is_empty());
        assert_eq!(
            missing(&whole, &rows(&["relu", "made", "swish"])),
            [
                "ActivationOps::gelu has no policy row",
                "the policy row swish is no method of burn-backend"
            ]
        );
        let part =
            ours("own_ops! { relu([tensor], made: usize) -> FloatTensor => gelu(count, tensor); }");
        assert_eq!(
            missing(&part, &table),
            [
                "ActivationOps::count is not overridden",
                "ActivationOps::gelu is not overridden",
                "ActivationOps::made is not overridden"
            ]
        );
    }
}
