//! Checks that the library's modules stand in layers: each uses only itself and lower ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::Path;

use anyhow::{Context, ensure};
use proc_macro2::token_stream::IntoIter;
use proc_macro2::{Delimiter, Ident, Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::{ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Attribute, ImplItem, Item, ItemMacro, ItemMod, ItemUse, Macro, Meta, Token, TraitItem, UseTree,
};
use walkdir::WalkDir;

/// Modules that may use each other and those of the layers before.
pub struct Layer {
    /// Modules directly under the crate root.
    pub modules: &'static [&'static str],
    pub holds: &'static str,
    pub knows_nothing_of: &'static str,
}

/// The layers of burn-amp-core, the lowest first. They are below all those of burn-amp.
pub const CORE: &[Layer] = &[
    Layer {
        modules: &["dtype", "words"],
        holds: "the float dtypes of any version of Burn; numbers as text",
        knows_nothing_of: "tensors, backends",
    },
    Layer {
        modules: &["policy"],
        holds: "the tables of operations and the pure decision",
        knows_nothing_of: "devices, tensors, backends",
    },
    Layer {
        modules: &["precision", "error", "file", "casts"],
        holds: "`Precision`; `AmpError`; files written whole or not at all; a count of casts",
        knows_nothing_of: "devices, tensors, backends",
    },
    Layer {
        modules: &["scaler"],
        holds: "configuration, state machine, history, saved form, what a step was",
        knows_nothing_of: "devices, tensors, modules",
    },
    Layer {
        modules: &["record"],
        holds: "a scaler's state as a record of Burn's",
        knows_nothing_of: "devices, tensors, modules",
    },
];

/// The layers of burn-amp, the lowest first.
pub const LAYERS: &[Layer] = &[
    Layer {
        modules: &["policy", "precision"],
        holds: "the policy for the dtypes of this Burn; regions and every other mode of a thread",
        knows_nothing_of: "devices",
    },
    Layer {
        modules: &["scaler"],
        holds: "the handle of a loss scaler, its scopes, a step that is pending",
        knows_nothing_of: "devices, tensors, modules",
    },
    Layer {
        modules: &["device"],
        holds: "identity, capabilities, `AmpConfig`, the device's one state, trials, statistics",
        knows_nothing_of: "operations, autodiff",
    },
    Layer {
        modules: &["tensor"],
        holds: "`AmpTensor`, its flags, its cached casts; the type `Amp`",
        knows_nothing_of: "single operations",
    },
    Layer {
        modules: &["diagnostics"],
        holds: "anomalies, finite check, report, plot",
        knows_nothing_of: "autodiff, trainers",
    },
    Layer {
        modules: &["autodiff"],
        holds: "recorded operations, leaves, backward pass, gradients, replicas",
        knows_nothing_of: "modules, trainers",
    },
    Layer {
        modules: &["ops", "backend"],
        holds: "dispatch of an operation, a file for each of Burn's traits, IR, distributed",
        knows_nothing_of: "trainers",
    },
    Layer {
        modules: &["train"],
        holds: "explicit protocol, trainer, `Learner`, metrics, schedules",
        knows_nothing_of: "—",
    },
];

/// Modules above all layers: they document or re-export. No layer may use them.
const ABOVE: [&str; 2] = ["guide", "prelude"];

/// What a path within the crate starts with.
const STARTS: [&str; 3] = ["crate", "self", "super"];

pub fn layers() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    for (folder, layers) in [("core/src", CORE), ("src", LAYERS)] {
        let found = Found::new(folder, &sources(&root.join(folder))?);
        println!("{folder}\n\n{}", found.table(layers));
        wrong.extend(found.wrong(layers));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The layers as rows of a table.
pub fn rows() -> Vec<[String; 3]> {
    let row = |of: &'static str, layer: &Layer| {
        let modules: Vec<_> = layer.modules.iter().map(|m| format!("`{m}`")).collect();
        [
            format!("{of}{}", modules.join(", ")),
            layer.holds.to_string(),
            layer.knows_nothing_of.to_string(),
        ]
    };
    let core = CORE.iter().map(|layer| row("core: ", layer));
    core.chain(LAYERS.iter().map(|layer| row("", layer)))
        .collect()
}

/// A file, by its path under `src`.
struct Source {
    path: String,
    file: syn::File,
}

fn sources(folder: &Path) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for entry in WalkDir::new(folder).sort_by_file_name() {
        let path = entry?.into_path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let name = path.strip_prefix(folder)?.iter();
        let name: Vec<_> = name.map(|part| part.to_string_lossy()).collect();
        let file = syn::parse_file(&fs::read_to_string(&path)?)
            .with_context(|| format!("parsing {}", path.display()))?;
        sources.push(Source {
            path: name.join("/"),
            file,
        });
    }
    Ok(sources)
}

/// The module that a file is, as segments under the crate root.
fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    match path {
        "lib" => Vec::new(),
        _ => path.split('/').map(str::to_string).collect(),
    }
}

/// A use of one module by another; both stand directly under the crate root.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    from: String,
    /// `None` where the source does not tell.
    to: Option<String>,
    path: String,
    line: usize,
    written: String,
}

/// The modules under the crate root, and what each uses of the others.
struct Found {
    /// The sources of a crate, from the root of the repository.
    folder: &'static str,
    modules: BTreeSet<String>,
    uses: BTreeSet<Use>,
}

impl Found {
    fn new(folder: &'static str, sources: &[Source]) -> Self {
        let mut reader = Reader::default();
        for source in sources {
            reader.read(source);
        }
        reader.found(folder)
    }

    /// By the place of the module that uses and of the one that is used, those uses that go up.
    fn upward(&self, layers: &[Layer]) -> BTreeMap<(usize, usize), Vec<&Use>> {
        let mut upward = BTreeMap::<_, Vec<_>>::new();
        for found in &self.uses {
            let to = found.to.as_ref().and_then(|to| place(layers, to));
            if let (Some(from), Some(to)) = (place(layers, &found.from), to)
                && from < to
            {
                upward.entry((from, to)).or_default().push(found);
            }
        }
        upward
    }

    /// The modules that are in no layer.
    fn unlisted(&self, layers: &[Layer]) -> Vec<&str> {
        let modules = self.modules.iter().map(String::as_str);
        modules
            .filter(|module| place(layers, module).is_none())
            .collect()
    }

    /// What each layer uses: lower modules, those in no layer, and higher ones with their number.
    fn table(&self, layers: &[Layer]) -> String {
        let names: Vec<_> = layers
            .iter()
            .map(|layer| layer.modules.join(", "))
            .collect();
        let width = names.iter().map(String::len).max().unwrap_or_default();
        let mut text = format!("{:<width$}  uses\n", "layer");
        for (i, name) in names.iter().enumerate() {
            let mut counts = BTreeMap::<_, usize>::new();
            for found in &self.uses {
                if place(layers, &found.from) == Some(i)
                    && let Some(to) = &found.to
                {
                    let at = place(layers, to).unwrap_or(usize::MAX);
                    *counts.entry((at, to)).or_default() += 1;
                }
            }
            let lower: Vec<_> = counts
                .keys()
                .filter(|(at, _)| *at < i)
                .map(|(_, to)| to.as_str())
                .collect();
            text += &format!("{name:<width$}  {}", lower.join(", "));
            text.truncate(text.trim_end().len());
            text += "\n";
            let mut more = |what: &str, test: &dyn Fn(usize) -> bool| {
                let some: Vec<_> = counts
                    .iter()
                    .filter(|((at, _), _)| test(*at))
                    .map(|((_, to), count)| format!("{to} ({count})"))
                    .collect();
                if !some.is_empty() {
                    text += &format!("{:<width$}  {what}: {}\n", "", some.join(", "));
                }
            };
            more("upward", &|at| at > i && at != usize::MAX);
            more("in no layer", &|at| at == usize::MAX);
        }
        text
    }

    /// Whatever is not as it should be, a line each.
    fn wrong(&self, layers: &[Layer]) -> Vec<String> {
        let (src, mut wrong) = (self.folder, Vec::new());
        for module in self.unlisted(layers) {
            wrong.push(format!("{src}: the module {module} is in no layer"));
        }
        for module in layers.iter().flat_map(|layer| layer.modules) {
            if !self.modules.contains(*module) {
                wrong.push(format!(
                    "{src}: the module {module} of the layers is not there"
                ));
            }
        }
        for found in self.uses.iter().filter(|found| found.to.is_none()) {
            wrong.push(format!(
                "{src}/{}:{}: {}: {src}/lib.rs does not tell which module that is from",
                found.path, found.line, found.written
            ));
        }
        for ((from, to), uses) in self.upward(layers) {
            for found in uses {
                wrong.push(format!(
                    "{src}/{}:{}: {}: from {} up to {}",
                    found.path,
                    found.line,
                    found.written,
                    name(layers, from),
                    name(layers, to),
                ));
            }
        }
        wrong
    }
}

/// Where a module stands, or `None` if it is in no layer.
fn place(layers: &[Layer], module: &str) -> Option<usize> {
    match ABOVE.contains(&module) {
        true => Some(layers.len()),
        false => layers.iter().position(|l| l.modules.contains(&module)),
    }
}

/// The layer at a place.
fn name(layers: &[Layer], place: usize) -> String {
    let modules = layers.get(place).map_or(&ABOVE[..], |layer| layer.modules);
    modules.join(", ")
}

/// A path within the crate as the source has it.
struct Written {
    /// The module that it stands in.
    module: Vec<String>,
    path: String,
    line: usize,
    segments: Vec<String>,
}

impl Written {
    /// The name under the crate root that the path goes through.
    fn root_name(&self) -> Option<String> {
        let mut at = self.module.clone();
        for segment in &self.segments {
            match segment.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => {
                    at.pop();
                }
                name => at.push(name.to_string()),
            }
        }
        at.into_iter().next()
    }
}

/// Reads the sources, one after another.
#[derive(Default)]
struct Reader {
    /// The file that is being read, and the module that it is at.
    path: String,
    module: Vec<String>,
    modules: BTreeSet<Vec<String>>,
    /// The modules that are declared for tests alone, their files elsewhere.
    for_tests: BTreeSet<Vec<String>>,
    /// The names that the crate root takes in, and the module or crate that each is from.
    root: BTreeMap<String, String>,
    written: Vec<Written>,
}

impl Reader {
    fn read(&mut self, source: &Source) {
        if source.file.attrs.iter().any(is_for_tests) {
            return;
        }
        self.path.clone_from(&source.path);
        self.module = module_of(&source.path);
        self.modules.insert(self.module.clone());
        self.visit_file(&source.file);
    }

    fn found(&self, folder: &'static str) -> Found {
        let kept = |module: &[String]| self.for_tests.iter().all(|t| !module.starts_with(t));
        let modules: BTreeSet<_> = self
            .modules
            .iter()
            .filter(|module| kept(module))
            .filter_map(|module| module.first().cloned())
            .collect();
        let mut uses = BTreeSet::new();
        for written in self.written.iter().filter(|written| kept(&written.module)) {
            let Some(from) = written.module.first() else {
                continue; // The crate root itself.
            };
            let origin = written
                .root_name()
                .and_then(|name| self.origin(name, &modules));
            let of_another_crate = origin.as_ref().is_some_and(|to| !modules.contains(to));
            if ABOVE.contains(&from.as_str()) || origin.as_ref() == Some(from) || of_another_crate {
                continue;
            }
            uses.insert(Use {
                from: from.clone(),
                to: origin,
                path: written.path.clone(),
                line: written.line,
                written: written.segments.join("::"),
            });
        }
        Found {
            folder,
            modules,
            uses,
        }
    }

    /// The module or crate that a name of the crate root is from.
    fn origin(&self, name: String, modules: &BTreeSet<String>) -> Option<String> {
        if modules.contains(&name) {
            return Some(name);
        }
        let mut from = self.root.get(&name)?;
        while !modules.contains(from)
            && let Some(next) = self.root.get(from)
            && next != from
        {
            from = next;
        }
        Some(from.clone())
    }

    /// Notes a path.
    fn write(&mut self, mut segments: Vec<String>, line: usize) {
        // That of `use crate::a::{self, b}`.
        segments.pop_if(|last| *last == "self");
        self.written.push(Written {
            module: self.module.clone(),
            path: self.path.clone(),
            line,
            segments,
        });
    }

    /// Finds the paths among tokens.
    fn scan(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        let mut last = None;
        while let Some(token) = tokens.next() {
            match &token {
                // An attribute.
                TokenTree::Group(_) if last == Some('#') => {}
                TokenTree::Group(group) => self.scan(group.stream()),
                TokenTree::Ident(ident) if STARTS.iter().any(|start| ident == start) => {
                    self.follow(Vec::new(), ident, &mut tokens);
                }
                _ => {}
            }
            last = match &token {
                TokenTree::Punct(sign) if sign.as_char() == '!' && last == Some('#') => last,
                TokenTree::Punct(sign) => Some(sign.as_char()),
                _ => None,
            };
        }
    }

    /// Reads a path from its next segment on, in braces as well.
    fn follow(&mut self, before: Vec<String>, next: &Ident, tokens: &mut Peekable<IntoIter>) {
        let mut line = next.span().start().line;
        let mut segments = before;
        segments.push(next.to_string());
        while is_joint_colon(tokens.peek()) {
            tokens.nth(1);
            match tokens.next() {
                Some(TokenTree::Ident(ident)) => {
                    line = ident.span().start().line;
                    segments.push(ident.to_string());
                }
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    return self.branch(&segments, group.stream());
                }
                // `*`, or `$` of a name that the macro is given.
                Some(TokenTree::Punct(sign)) if sign.as_char() != '<' => {
                    segments.push(sign.to_string());
                }
                _ => break,
            }
        }
        let renamed = matches!(tokens.peek(), Some(TokenTree::Ident(next)) if next == "as");
        if renamed {
            tokens.nth(1);
        }
        // `crate` alone is mostly a visibility, `self` a value.
        if segments.len() > 1 || renamed && segments[0] != "self" {
            self.write(segments, line);
        }
    }

    /// Reads what stands in the braces of a `use`.
    fn branch(&mut self, before: &[String], tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(ident) => self.follow(before.to_vec(), &ident, &mut tokens),
                TokenTree::Group(group) => self.branch(before, group.stream()),
                TokenTree::Punct(sign) if sign.as_char() == '*' => {
                    let segments = [before, &["*".to_string()]].concat();
                    self.write(segments, sign.span().start().line);
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        if !starts_for_tests(item) {
            visit::visit_item(self, item);
        } else if let Item::Mod(item) = item
            && item.content.is_none()
        {
            let module = [&self.module[..], &[item.ident.to_string()]].concat();
            self.for_tests.insert(module);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !starts_for_tests(item) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !starts_for_tests(item) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if item.content.is_some() {
            self.module.push(item.ident.to_string());
            self.modules.insert(self.module.clone());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if self.module.is_empty() {
            take_in(&item.tree, None, &mut self.root);
        }
        self.scan(item.tree.to_token_stream());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if segments.len() > 1 && STARTS.contains(&segments[0].as_str()) {
            let line = path.segments[0].ident.span().start().line;
            self.write(segments, line);
        }
        visit::visit_path(self, path);
    }

    /// An exported macro stands at the crate root.
    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        if item.attrs.iter().any(|a| a.path().is_ident("macro_export"))
            && let (Some(name), Some(module)) = (&item.ident, self.module.first())
        {
            self.root.insert(name.to_string(), module.clone());
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

/// Notes the names that a `use` of the crate root takes in, and where from.
fn take_in(tree: &UseTree, first: Option<&str>, root: &mut BTreeMap<String, String>) {
    let mut name = |name: &Ident, of: &Ident| {
        let from = first.map_or_else(|| of.to_string(), str::to_string);
        root.insert(name.to_string(), from);
    };
    match tree {
        UseTree::Name(tree) => name(&tree.ident, &tree.ident),
        UseTree::Rename(tree) => name(&tree.rename, &tree.ident),
        UseTree::Path(tree) => {
            let ident = tree.ident.to_string();
            let this = (!STARTS.contains(&ident.as_str())).then_some(ident.as_str());
            take_in(&tree.tree, first.or(this), root);
        }
        UseTree::Group(tree) => tree.items.iter().for_each(|i| take_in(i, first, root)),
        // Its names are not known: a use of one is reported.
        UseTree::Glob(_) => {}
    }
}

/// Whether `::` comes next.
fn is_joint_colon(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Punct(sign))
        if sign.as_char() == ':' && sign.spacing() == Spacing::Joint)
}

/// Whether an item is compiled for tests alone.
fn starts_for_tests(item: &impl ToTokens) -> bool {
    let attributes = |input: ParseStream| {
        let attributes = input.call(Attribute::parse_outer)?;
        input.parse::<TokenStream>()?;
        Ok(attributes)
    };
    let attributes = attributes.parse2(item.to_token_stream());
    attributes.is_ok_and(|attributes| attributes.iter().any(is_for_tests))
}

fn is_for_tests(attribute: &Attribute) -> bool {
    let condition = || attribute.parse_args::<Meta>();
    attribute.path().is_ident("cfg") && condition().is_ok_and(|meta| needs_test(&meta))
}

/// Whether a condition holds in tests alone.
fn needs_test(condition: &Meta) -> bool {
    let Meta::List(list) = condition else {
        return condition.path().is_ident("test");
    };
    let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    let parts = parts.unwrap_or_default();
    match list.path.is_ident("all") {
        true => parts.iter().any(needs_test),
        false => list.path.is_ident("any") && !parts.is_empty() && parts.iter().all(needs_test),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn layer(modules: &'static [&'static str]) -> Layer {
        Layer {
            modules,
            holds: "",
            knows_nothing_of: "",
        }
    }

    const THREE: [Layer; 3] = [layer(&["low"]), layer(&["mid", "beside"]), layer(&["high"])];

    const ROOT: &str = "mod low; pub use high::{Top, deep::Other as Renamed}; pub use low::Error;
        pub use burn::Tensor;";

    fn found(changed: &[(&str, &str)]) -> Found {
        let mut texts = BTreeMap::from([
            ("lib.rs", ROOT),
            ("low.rs", ""),
            ("mid/mod.rs", ""),
            ("beside.rs", ""),
            ("high.rs", ""),
        ]);
        texts.extend(changed.iter().copied());
        let source = |(path, text): (&str, &str)| Source {
            path: path.to_string(),
            file: syn::parse_str(text).unwrap(),
        };
        Found::new("src", &texts.into_iter().map(source).collect::<Vec<_>>())
    }

    /// What is wrong in a set of empty modules where these files have these texts.
    fn wrong(changed: &[(&str, &str)]) -> Vec<String> {
        found(changed).wrong(&THREE)
    }

    #[test]
    fn uses_of_lower_modules_and_those_of_the_same_layer_pass() {
        let set = [
            (
                "low.rs",
                "use self::own::A; use std::fmt; mod own { use super::B; }",
            ),
            (
                "mid/mod.rs",
                "use crate::{beside::A, low::{self, B}}; use crate::{Error, Tensor};",
            ),
            (
                "mid/part.rs",
                "use super::x; use super::super::low; fn f() { crate::mid::g() }",
            ),
            (
                "beside.rs",
                "use crate::mid; pub(crate) use mid::x; pub(in crate::beside) fn f() {}",
            ),
            (
                "high.rs",
                "use crate::{low, mid::*}; fn f(self) { self.x; self::g() }",
            ),
            ("prelude.rs", "pub use crate::high::Top; pub use crate::*;"),
            ("guide/mod.rs", "use crate::high;"),
        ];
        assert_eq!(wrong(&set), Vec::<String>::new());
    }

    #[test]
    fn an_upward_use_by_a_tree_is_reported_where_it_stands() {
        let text = "use crate::{\n    low::A,\n    mid::{self, B as C},\n    high::*,\n};";
        assert_eq!(
            wrong(&[("low.rs", text)]),
            [
                "src/low.rs:3: crate::mid: from low up to mid, beside",
                "src/low.rs:3: crate::mid::B: from low up to mid, beside",
                "src/low.rs:4: crate::high::*: from low up to high",
            ]
        );
    }

    #[test]
    fn an_upward_use_by_a_path_in_the_code_is_reported() {
        let text = "type A = crate::high::A;
            fn f(x: Vec<super::mid::B>) -> bool {
                if let crate::high::P(_) = x { crate::high::g::<crate::mid::D>() }
                #[allow(crate::high::lint)]
                <u8 as crate::high::T>::g()
            }
            impl crate::high::U for A { fn g() { use crate::mid::h; } }";
        assert_eq!(
            wrong(&[("low.rs", text)]),
            [
                "src/low.rs:2: super::mid::B: from low up to mid, beside",
                "src/low.rs:3: crate::mid::D: from low up to mid, beside",
                "src/low.rs:7: crate::mid::h: from low up to mid, beside",
                "src/low.rs:1: crate::high::A: from low up to high",
                "src/low.rs:3: crate::high::P: from low up to high",
                "src/low.rs:3: crate::high::g: from low up to high",
                "src/low.rs:5: crate::high::T::g: from low up to high",
                "src/low.rs:7: crate::high::U: from low up to high",
            ]
        );
    }

    #[test]
    fn an_upward_use_by_super_is_reported() {
        assert_eq!(
            wrong(&[
                (
                    "low.rs",
                    "use super::high::A; mod own { use super::super::mid; }"
                ),
                (
                    "mid/part/mod.rs",
                    "use super::super::high; use super::high::C;"
                ),
                (
                    "mid/part/leaf.rs",
                    "use self::super::super::super::high as other;"
                ),
            ]),
            [
                "src/low.rs:1: super::super::mid: from low up to mid, beside",
                "src/low.rs:1: super::high::A: from low up to high",
                "src/mid/part/leaf.rs:1: self::super::super::super::high: from mid, beside up to \
                 high",
                "src/mid/part/mod.rs:1: super::super::high: from mid, beside up to high",
            ]
        );
    }

    #[test]
    fn an_upward_use_in_a_macro_is_reported() {
        let text = "macro_rules! made {
                ($x:ident) => {
                    #[doc(crate::high::unseen)]
                    fn $x(self: Self) -> u8 { $crate::high::g::<crate::mid::A>(self.x) }
                    use crate::{low, high::{B, C as D}};
                };
            }
            fn f() { vec![crate::high::E; 2]; crate::high::call!(); }
            impl A { other! { super::mid::x } }";
        assert_eq!(
            wrong(&[("low.rs", text)]),
            [
                "src/low.rs:4: crate::mid::A: from low up to mid, beside",
                "src/low.rs:9: super::mid::x: from low up to mid, beside",
                "src/low.rs:4: crate::high::g: from low up to high",
                "src/low.rs:5: crate::high::B: from low up to high",
                "src/low.rs:5: crate::high::C: from low up to high",
                "src/low.rs:8: crate::high::E: from low up to high",
                "src/low.rs:8: crate::high::call: from low up to high",
            ]
        );
    }

    #[test]
    fn a_name_of_the_crate_root_is_its_modules() {
        assert_eq!(
            wrong(&[(
                "mid/mod.rs",
                "use crate::{Error, Renamed}; fn f() { crate::Top::new(); super::Tensor::new(); }"
            )]),
            [
                "src/mid/mod.rs:1: crate::Renamed: from mid, beside up to high",
                "src/mid/mod.rs:1: crate::Top::new: from mid, beside up to high",
            ]
        );
    }

    #[test]
    fn an_exported_macro_is_its_modules() {
        assert_eq!(
            wrong(&[
                (
                    "high.rs",
                    "#[macro_export] macro_rules! exported { () => {} }"
                ),
                ("mid/mod.rs", "crate::exported!();"),
            ]),
            ["src/mid/mod.rs:1: crate::exported: from mid, beside up to high"]
        );
    }

    #[test]
    fn a_use_that_does_not_tell_its_module_is_reported() {
        assert_eq!(
            wrong(&[(
                "mid/mod.rs",
                "use crate::Unknown; use super::*; use crate as all; m!($crate::$x::y);"
            )]),
            ["crate", "crate::$", "crate::Unknown", "super::*"].map(|path| format!(
                "src/mid/mod.rs:1: {path}: src/lib.rs does not tell which module that is from"
            ))
        );
    }

    #[test]
    fn what_is_for_tests_alone_is_left_out_and_other_features_are_not() {
        let text = "#[cfg(test)] use crate::high::A;
            #[cfg(all(test, feature = \"x\"))] mod tests { use crate::high::B; }
            /// [`crate::high::C`]
            #[cfg(test)] mod outside;
            impl X { #[cfg(test)] fn f() { crate::high::D } }
            #[cfg(any(test, feature = \"x\"))] use crate::high::E;
            #[cfg(feature = \"x\")] use crate::high::F;
            #[cfg(not(test))] use crate::high::G;";
        let set = [
            ("low.rs", text),
            ("low/outside.rs", "use crate::high::H;"),
            ("mid/tests.rs", "#![cfg(test)] use crate::high::I;"),
        ];
        assert_eq!(
            wrong(&set),
            [(6, 'E'), (7, 'F'), (8, 'G')].map(|(line, name)| format!(
                "src/low.rs:{line}: crate::high::{name}: from low up to high"
            ))
        );
    }

    #[test]
    fn a_module_in_no_layer_and_a_layer_without_module_are_reported() {
        let changed = [("other/part.rs", "use crate::high;")];
        let [low, mid, high] = THREE;
        assert_eq!(
            found(&changed).wrong(&[low, mid, high, layer(&["gone"])]),
            [
                "src: the module other is in no layer",
                "src: the module gone of the layers is not there"
            ]
        );
        assert_eq!(
            wrong(&[("lib.rs", "mod inside { use super::low; }")]),
            ["src: the module inside is in no layer"]
        );
    }

    #[test]
    fn what_stands_above_all_layers_may_not_be_used_by_one() {
        let changed = [("high.rs", "use crate::prelude::x;"), ("prelude.rs", "")];
        assert_eq!(
            wrong(&changed),
            ["src/high.rs:1: crate::prelude::x: from high up to guide, prelude"]
        );
    }

    #[test]
    fn the_table_has_what_each_layer_uses() {
        let set = [
            (
                "mid/mod.rs",
                "use crate::{low::A, high::B, high::C, other::D};",
            ),
            ("high.rs", "use crate::{beside, low}; use crate::mid;"),
            ("other.rs", ""),
        ];
        assert_eq!(
            found(&set).table(&THREE),
            "layer        uses
low
mid, beside  low
             upward: high (2)
             in no layer: other (1)
high         low, beside, mid
"
        );
    }

    #[test]
    fn no_module_is_in_two_layers() {
        for layers in [CORE, LAYERS] {
            let listed = layers.iter().flat_map(|layer| layer.modules);
            let all: Vec<_> = listed.chain(&ABOVE).collect();
            let once: BTreeSet<_> = all.iter().collect();
            assert_eq!(once.len(), all.len());
        }
    }
}
