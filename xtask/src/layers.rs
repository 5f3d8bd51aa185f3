//! The layers of the library's modules, and a check that no module uses one of a higher layer.
//!
//! A module of another layer is named from the crate root, as `crate::module`, so the check reads the
//! text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use walkdir::WalkDir;

/// The layers of a package, the lowest first: modules that may use each other and those of the layers
/// before; their contents; what they are independent of.
type Layers = &'static [(&'static str, &'static str, &'static str)];

#[rustfmt::skip]
const CORE: Layers = &[
    ("dtype, words", "the float dtypes of any version of Burn; numbers as text", "tensors, backends"),
    ("policy, operations", "the table of operations and the pure decision; the operations of every Burn, as lists", "devices, tensors, backends"),
    ("precision, error, file, casts, reference, verified, exceptions", "`Precision`; `AmpError`; files written whole or not at all; a count of casts; what a contraction should give; the exceptions of a device", "devices, tensors, backends"),
    ("scaler", "configuration, state machine, protocol of a step, history, saved form, state that handles share", "devices, tensors, modules"),
    ("record, trainer", "a scaler's state as a record of Burn's; a trainer's settings and the metrics of a batch", "devices, tensors, modules"),
];

/// All of them above the core's.
#[rustfmt::skip]
const AMP: Layers = &[
    ("policy, precision", "the policy for the dtypes of this Burn; regions and every other mode of a thread", "devices"),
    ("scaler", "the handle of a loss scaler, its scopes", "devices, tensors, modules"),
    ("device", "identity, capabilities, `AmpConfig`, the device's one state, trials, what waits to be compared, statistics", "operations, autodiff"),
    ("tensor", "`AmpTensor`, its flags, its cached casts; the type `Amp` and the side of autodiff that it is on", "single operations"),
    ("workarounds", "faults of Burn and of its backends, each with its end", "single operations of the policy"),
    ("diagnostics", "anomalies, finite check, report, plot", "autodiff, trainers"),
    ("call", "an operation under the policy, its comparison with a reference, and the functions that formulas are written in", "the forms that the tape keeps"),
    ("autodiff", "recorded formulas, leaves, backward pass, gradients, replicas", "modules, trainers"),
    ("ops, backend", "a file for each of Burn's traits: what is recorded, and in which form; IR, distributed", "trainers"),
    ("train", "explicit protocol, trainer, `Learner`, metrics, schedules", "—"),
];

/// All of them above the core's.
#[rustfmt::skip]
const DEVICE: Layers = &[
    ("burn, error", "the crates of the Burn that is on; `Error`", "devices, tensors"),
    ("device", "capabilities, the device's one state, sessions, trials, statistics", "tensors, operations"),
    ("tensor", "`AmpTensor`, its flags, its marks", "single operations"),
    ("diagnostics", "the report of a device, finite check", "operations, trainings"),
    ("ops, backend", "dispatch of an operation, a file for each of Burn's traits, IR", "servers"),
    ("serve", "devices that are served, Burn's own server behind a proxy that checks connections, `AmpServer`", "clients"),
    ("client, local, region, burn_0_22", "connecting, devices of this process, regions in the client; the files that Burn 0.22 alone needs, in modules of `local`, `ops` and `serve`", "the loss scale"),
    ("train", "the loss scale in the client, a model's gradients and weights, a trainer, a `Learner`'s strategy and metrics", "—"),
];

/// The packages by their sources.
const PACKAGES: [(&str, Layers); 3] = [("core/src", CORE), ("src", AMP), ("device/src", DEVICE)];

/// Modules above all layers: they document or re-export. No layer may use them.
const ABOVE: &str = "guide, prelude";

/// Files by their path in a folder of sources.
type Sources = BTreeMap<String, String>;

pub fn layers() -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    for (folder, layers) in PACKAGES {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let found = sources(&root.join(folder))?;
        println!("{folder}: {} files in {} layers", found.len(), layers.len());
        let found = self::wrong(layers, &found).context(folder)?;
        wrong.extend(found.iter().map(|line| format!("{folder}/{line}")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The layers of the core and of burn-amp as rows of a table.
pub fn rows() -> Vec<[String; 3]> {
    let row = |of, &(modules, holds, not): &(&str, &str, &str)| {
        let modules = modules.replace(", ", "`, `");
        [format!("{of}`{modules}`"), holds.into(), not.into()]
    };
    let core = CORE.iter().map(|layer| row("core: ", layer));
    core.chain(AMP.iter().map(|layer| row("", layer))).collect()
}

/// The sources of a library, without its programs.
fn sources(folder: &Path) -> anyhow::Result<Sources> {
    let mut sources = Sources::new();
    for entry in WalkDir::new(folder) {
        let path = entry?.into_path();
        let name = path.strip_prefix(folder)?;
        if path.extension().is_some_and(|e| e == "rs") && !name.starts_with("bin") {
            let parts: Vec<_> = name.iter().map(|part| part.to_string_lossy()).collect();
            sources.insert(parts.join("/"), fs::read_to_string(&path)?);
        }
    }
    Ok(sources)
}

/// All errors, a line each.
fn wrong(layers: Layers, sources: &Sources) -> anyhow::Result<Vec<String>> {
    let mut files = Vec::new();
    for (path, text) in sources {
        let name = path.trim_end_matches(".rs").trim_end_matches("/mod");
        let module = name.split('/').next().unwrap_or(name);
        let tokens: Result<TokenStream, _> = text.parse();
        let tokens = tokens.map_err(|error| anyhow!("{path}: {error}"))?;
        files.push((path, module, name.contains('/'), words(tokens)));
    }
    let root = files.iter().flat_map(|file| of_root(file.1, &file.3));
    let root: BTreeMap<_, _> = root.collect();
    let modules: BTreeSet<_> = files.iter().map(|file| file.1).collect();
    let place = |module: &str| {
        let layers = layers.iter().map(|layer| layer.0);
        let mut all = layers.chain([ABOVE]);
        all.position(|modules| modules.split(", ").any(|m| m == module))
    };

    let mut wrong = Vec::new();
    for module in &modules {
        if *module != "lib" && place(module).is_none() {
            wrong.push(format!("lib.rs: the module {module} is in no layer"));
        }
    }
    for module in layers.iter().flat_map(|layer| layer.0.split(", ")) {
        if !modules.contains(module) {
            wrong.push(format!(
                "lib.rs: the module {module} of the layers is not there"
            ));
        }
    }
    for (path, from, is_inner, words) in &files {
        // lib.rs, and modules that document or re-export, may use all.
        let Some(own) = place(from).filter(|own| *own < layers.len()) else {
            continue;
        };
        for name in used(words, *is_inner) {
            match modules.get(name).or_else(|| root.get(name)) {
                Some(to) if place(to) <= Some(own) => {}
                Some(to) => wrong.push(format!("{path}: {name}: {from} is below {to}")),
                None => wrong.push(format!("{path}: {name}: write crate::module::Item")),
            }
        }
    }
    Ok(wrong)
}

/// The words and signs of a source, without comments, texts and code that is compiled only for tests.
/// All brackets are braces.
fn words(tokens: TokenStream) -> Vec<String> {
    let (mut words, mut for_tests) = (Vec::new(), false);
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                let text = group.stream().to_string().replace(' ', "");
                if text.starts_with("cfg(test)") || text.starts_with("cfg(all(test,") {
                    for_tests = true;
                } else if for_tests {
                    for_tests = group.delimiter() != Delimiter::Brace;
                } else {
                    words.push("{".into());
                    words.extend(self::words(group.stream()));
                    words.push("}".into());
                }
            }
            TokenTree::Literal(_) => {}
            token if for_tests => for_tests = token.to_string() != ";",
            token => words.push(token.to_string()),
        }
    }
    words
}

/// The names that are used from the crate root on, and constructs that hide such a name.
fn used(words: &[String], is_inner: bool) -> Vec<&str> {
    let mut used: Vec<&str> = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let next: Vec<_> = words[i + 1..].iter().take(3).map(String::as_str).collect();
        match (word.as_str(), &next[..]) {
            ("crate" | "super", ["as", ..]) | ("super", [":", ":", "super"]) => used.push(word),
            ("super", [":", ":", _]) if !is_inner => used.push(word),
            ("crate", [":", ":", _]) => {
                let mut level = 0;
                for pair in words[i + 2..].windows(2) {
                    match pair[1].as_str() {
                        "{" => level += 1,
                        "}" => level -= 1,
                        name if level == 0 || level == 1 && "{,".contains(&pair[0]) => {
                            used.push(name);
                        }
                        _ => {}
                    }
                    if level == 0 {
                        break;
                    }
                }
            }
            _ => {}
        }
    }
    used
}

/// The names that a file gives the crate root, each with the module or crate that it is from:
/// re-exports of lib.rs, and macros.
fn of_root<'a>(module: &'a str, words: &'a [String]) -> Vec<(&'a str, &'a str)> {
    let mut names = Vec::new();
    for (i, word) in words.iter().enumerate() {
        if word == "macro_rules" {
            names.push((words[i + 2].as_str(), module));
        } else if word == "use" && module == "lib" {
            let rest = words[i + 2..].iter().take_while(|word| *word != ";");
            let rest = rest.filter(|word| *word != "*");
            names.extend(rest.map(|word| (word.as_str(), words[i + 1].as_str())));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: Layers = &[("low", "", ""), ("mid, beside", "", ""), ("high", "", "")];

    const ROOT: &str = "prelude.rs: pub use crate::high::Top; pub use crate::*;
        lib.rs: mod low; pub use high::{Top, deep::Other as Renamed}; pub use high::*;\
            pub use low::Error; pub use burn::Tensor;";

    /// The errors in a set of empty modules where these files have these texts, a line each.
    fn wrong_in(layers: Layers, changed: &str) -> Vec<String> {
        let modules = layers.iter().flat_map(|layer| layer.0.split(", "));
        let empty = modules.map(|module| (format!("{module}/mod.rs"), String::new()));
        let changed = ROOT.lines().chain(changed.lines());
        let changed = changed.filter_map(|line| line.trim().split_once(": "));
        let changed = changed.map(|(path, text)| (path.to_string(), text.to_string()));
        wrong(layers, &empty.chain(changed).collect()).unwrap()
    }

    /// The names that are reported where a module in the middle has this text.
    fn reported(text: &str) -> String {
        let wrong = wrong_in(THREE, &format!("mid/mod.rs: {text}"));
        let names = wrong.iter().filter_map(|line| line.split(": ").nth(1));
        names.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_upward_use_fails_in_the_core_in_burn_amp_and_in_device() {
        for (folder, layers) in PACKAGES {
            let (lowest, highest) = (layers[0].0, layers[layers.len() - 1].0);
            let [low, high] = [lowest, highest].map(|all| all.split(", ").next().unwrap());
            let upward = wrong_in(layers, &format!("{low}/mod.rs: use crate::{high}::Item;"));
            let expected = format!("{low}/mod.rs: {high}: {low} is below {high}");
            assert_eq!(upward, [expected], "{folder}");
            let downward = wrong_in(layers, &format!("{high}/mod.rs: use crate::{low}::Item;"));
            assert!(downward.is_empty(), "{folder}");
        }
    }

    #[test]
    fn uses_of_lower_modules_and_those_of_the_same_layer_pass() {
        let set = "low/mod.rs: use self::own::A; use std::fmt; pub(super) fn f() {}
            mid/mod.rs: use crate::{beside::A, low::{self, high}, Error, Tensor};
            mid/part.rs: use super::x; use crate::low; fn f() { crate::mid::g() }
            beside/mod.rs: use crate::mid; pub(crate) use mid::x; pub(in crate::beside) fn f() {}";
        let wrong = wrong_in(THREE, set);
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn upward_uses_by_trees_paths_macros_and_names_of_the_root_are_reported() {
        let lines = "high | use crate::{low::A, high::{self, B}};
            high high | type A = Vec<crate::high::A>; m![crate::high::B; 2];
            high | macro_rules! m { () => {{ use $crate::{low, high::C}; }} }
            Renamed Top | use crate::{Error, Renamed}; crate::Top::new();
            prelude | use crate::prelude::x;";
        for line in lines.lines() {
            let (names, text) = line.trim().split_once(" | ").unwrap();
            assert_eq!(reported(text), names);
        }
        let exported = "high/mod.rs: #[macro_export] macro_rules! exported { () => {} }
            low/mod.rs: fn f() { crate::exported!(); }";
        let expected = "low/mod.rs: exported: low is below high";
        assert_eq!(wrong_in(THREE, exported), [expected]);
    }

    #[test]
    fn a_use_that_does_not_name_its_module_is_reported() {
        let text = "use crate::Unknown; use crate::*; use crate as all; m!($crate::$x::y);";
        assert_eq!(reported(text), "Unknown * crate $");
        assert_eq!(
            reported("use super::high; use super as all;"),
            "super super"
        );
        let inner = "mid/part.rs: use super::super::high;";
        let expected = "mid/part.rs: super: write crate::module::Item";
        assert_eq!(wrong_in(THREE, inner), [expected]);
    }

    #[test]
    fn comments_texts_and_what_is_for_tests_alone_are_left_out_and_features_are_not() {
        let text = "#[cfg(test)] use crate::{high::A}; const TEXT: &str = \"crate::high::B\";\
            #[cfg(all(test, unix))] #[path = \"y\"] mod tests { use crate::high::C; }\
            impl X { #[cfg(test)] fn f() { crate::high::D } } /* crate::high::E */\
            #[cfg(any(test, unix))] use crate::high::F; #[cfg(not(test))] use crate::high::G;";
        assert_eq!(reported(text), "high high");
    }

    #[test]
    fn every_module_is_in_one_layer() {
        assert_eq!(
            wrong_in(THREE, "other/part.rs: use crate::low;"),
            ["lib.rs: the module other is in no layer"]
        );
        assert_eq!(
            wrong(&[("gone", "", "")], &Sources::new()).unwrap(),
            ["lib.rs: the module gone of the layers is not there"]
        );
        for (folder, layers) in PACKAGES {
            let listed = layers.iter().flat_map(|layer| layer.0.split(", "));
            let all: Vec<_> = listed.chain(ABOVE.split(", ")).collect();
            let once: BTreeSet<_> = all.iter().collect();
            assert_eq!(once.len(), all.len(), "{folder}");
        }
    }
}
