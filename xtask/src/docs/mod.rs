//! The op reference, `src/guide/ops.md`: the policy table as a page, beside what PyTorch does. And
//! what other pages have of the layers and of what was measured, and its picture.

mod figures;
mod pytorch;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use burn_amp_core::policy::{self, Case, Class, Row, Rows, TABLE};
use syn::{Attribute, Expr, ExprLit, Item, ItemEnum, Lit, Meta};

use crate::coverage::{self, Methods, OPERATIONS};
use crate::measurements::{self, Run};
use crate::{layers, plot};
use pytorch::{Autocast, Counterpart};

const PAGE: &str = "src/guide/ops.md";
const POLICY: &str = "core/src/policy/mod.rs";

const PICTURE: &str = "docs/memory_and_speed.svg";

/// Reasons that say no more than the class does.
const SAID_BY_THE_CLASS: [&str; 2] = ["moves data", "operands of one dtype, the widest of them"];

/// A difference between rows that are else treated alike: which have it, and what it is.
type Beyond = (fn(&Row) -> bool, &'static str);

const BEYOND_THE_CLASS: [Beyond; 5] = [
    (
        |row| row.class == Class::Activation,
        "FP32 that half holds as well is brought to half; in PyTorch it stays FP32",
    ),
    (
        |row| matches!(row.otherwise, Some((_, Case::UnheldScalar))),
        "a scalar that half does not hold takes it to FP32; in PyTorch it stays in half, or \
         refuses the scalar",
    ),
    (
        |row| stands_with(row, "float_zeros") || stands_with(row, "float_full"),
        "what is made in FP32 follows half tensors; in PyTorch it takes them to FP32",
    ),
    (
        |row| stands_with(row, "float_into_data"),
        "data leaves in FP32; in PyTorch in half",
    ),
    (
        |row| row.op == "float_slice_assign",
        "the result has the widest dtype; in PyTorch that of the tensor that is written to",
    ),
];

/// Whether the operation stands in the table under the reason of another one.
fn stands_with(row: &Row, op: &str) -> bool {
    let has = |rows: &&Rows| rows.ops.contains(&op);
    TABLE
        .iter()
        .find(has)
        .is_some_and(|rows| rows.ops.contains(&row.op))
}

/// The policy, an operation a row.
fn table() -> Vec<Row> {
    policy::rows("0.21").collect()
}

/// Writes the pages, or with `check` fails where one is not what would be written.
pub fn docs(check: bool) -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let policy = syn::parse_file(&fs::read_to_string(root.join(POLICY))?)?;
    let (burn, _) = coverage::burn_backend()?;
    let runs = measurements::read(&root.join(measurements::FILE))?;
    let mut pages = vec![
        (
            PAGE,
            page(&coverage::traits(&burn)?, &table(), class_enum(&policy)?)?,
        ),
        (PICTURE, plot::bars(&figures::picture(&runs)?)?),
    ];
    for (name, parts) in parts(&runs)? {
        let found =
            fs::read_to_string(root.join(name)).with_context(|| format!("reading {name}"))?;
        let renewed = parts
            .iter()
            .try_fold(found, |page, part| part.renewed(&page));
        pages.push((name, renewed.with_context(|| name)?));
    }
    for (name, page) in pages {
        let path = root.join(name);
        if check {
            // A missing page is a stale one.
            compare(name, &fs::read_to_string(&path).unwrap_or_default(), &page)?;
        } else {
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(&path, page).with_context(|| format!("writing {name}"))?;
        }
    }
    Ok(())
}

/// The pages that are written by hand but for some parts, and these.
fn parts(runs: &[Run]) -> anyhow::Result<[(&'static str, Vec<Part>); 3]> {
    let measured = |name, text| Part {
        name,
        source: measurements::FILE,
        text,
    };
    let layers = Part {
        name: "layers",
        source: "xtask/src/layers.rs",
        text: aligned(["layer", "holds", "knows nothing of"], &layers::rows()),
    };
    Ok([
        ("src/guide/how_it_works.md", vec![layers]),
        (
            "README.md",
            vec![
                measured("memory", figures::memory(runs)?),
                measured("speed", figures::speed(runs)?),
            ],
        ),
        (
            "src/guide/measurements.md",
            vec![
                measured("memory", figures::memory_in_full(runs)?),
                measured("overhead", figures::overhead(runs)?),
                measured("speed", figures::speed_in_full(runs)?),
            ],
        ),
    ])
}

/// What stands between two marks in a page.
struct Part {
    name: &'static str,
    /// What it is made from.
    source: &'static str,
    text: String,
}

impl Part {
    fn start(&self) -> String {
        let Self { name, source, .. } = self;
        format!("<!-- The {name}, made from {source} by `cargo xtask docs`: change that. -->")
    }

    fn end(&self) -> String {
        format!("<!-- End of the {}. -->", self.name)
    }

    /// The page with this part renewed.
    fn renewed(&self, page: &str) -> anyhow::Result<String> {
        let (start, end) = (self.start(), self.end());
        let parts = page
            .split_once(&start)
            .and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
        let (before, after) = parts.with_context(|| format!("no place for the {}", self.name))?;
        let text = self.text.trim_end();
        Ok(format!("{before}{start}\n{text}\n{end}{after}"))
    }
}

fn compare(name: &str, found: &str, page: &str) -> anyhow::Result<()> {
    let same = found.lines().zip(page.lines());
    let line = 1 + same.take_while(|(found, made)| found == made).count();
    ensure!(
        found == page,
        "{name} is stale from line {line} on: `cargo xtask docs` renews it"
    );
    Ok(())
}

/// A row as the page has it.
struct Entry<'a> {
    row: &'a Row,
    pytorch: Option<Counterpart>,
}

impl Entry<'_> {
    fn new(row: &Row) -> anyhow::Result<Entry<'_>> {
        let pytorch = pytorch::counterpart(row.op).with_context(|| {
            format!(
                "what is {} in PyTorch? xtask/src/docs/pytorch.rs does not say",
                row.op
            )
        })?;
        Ok(Entry { row, pytorch })
    }

    /// What PyTorch does otherwise, if it does: what sort of difference this is, and why.
    fn difference(&self) -> Option<(String, &str)> {
        let (class, autocast) = (self.row.class, self.pytorch?.autocast);
        let alike = match autocast {
            Autocast::LowerPrecision => class == Class::LowerPrecision,
            Autocast::Float32 => class == Class::Fp32,
            Autocast::Widest => class == Class::Promote,
            // What takes several operands promotes them itself.
            Autocast::AsGiven => !matches!(
                class,
                Class::LowerPrecision | Class::Fp32 | Class::Fp32Inside
            ),
        };
        if !alike {
            let sort = format!("`{class:?}`, in PyTorch {autocast}");
            return Some((sort, self.row.why));
        }
        let beyond = BEYOND_THE_CLASS.iter().find(|(has, _)| has(self.row))?;
        Some(("treated alike, but for this".to_string(), beyond.1))
    }

    /// The reason, without what the class says already, and where the row is more than its class.
    fn why(&self) -> String {
        let row = self.row;
        let why = (!SAID_BY_THE_CLASS.contains(&row.why)).then(|| row.why.to_string());
        let otherwise = row
            .otherwise
            .map(|(class, when)| format!("`{class:?}` {when}"));
        let recorded = row.recorded.map(|form| format!("recorded form: {form}"));
        let parts: Vec<_> = [why, otherwise, recorded].into_iter().flatten().collect();
        parts.join("; ")
    }

    fn cells(&self) -> [String; 4] {
        let pytorch = match self.pytorch {
            None => "—".to_string(),
            Some(Counterpart { name, autocast }) => format!("`{name}`: {autocast}"),
        };
        let mark = self.difference().map_or("", |_| " ≠");
        [
            format!("`{}`", self.row.op),
            format!("`{:?}`", self.row.class),
            self.why(),
            pytorch + mark,
        ]
    }
}

fn page(
    traits: &BTreeMap<String, Methods>,
    table: &[Row],
    classes: &ItemEnum,
) -> anyhow::Result<String> {
    for Row { op, .. } in table {
        let has = |name: &&str| traits.get(*name).is_some_and(|all| all.contains_key(*op));
        let places = OPERATIONS.iter().filter(|name| has(name)).count();
        ensure!(places == 1, "{op} is a method of {places} of Burn's traits");
    }
    let entries: Vec<_> = table.iter().map(Entry::new).collect::<Result<_, _>>()?;
    let version = pytorch::VERSION;
    let mut page = format!(
        "Which precision each operation of Burn runs in, and what PyTorch's autocast does with it.

<!-- Made from core/src/policy by `cargo xtask docs`: change that. -->

Every operation that takes or gives a float tensor is in the table of its trait in Burn, in
alphabetical order. Names from PyTorch, such as `pow` or `index_select`, are in the last column.

## The classes

{}

{}
## How PyTorch compares

The last column says what PyTorch {version} does under `torch.autocast` on CUDA with the operation
of the same meaning:

- **lower precision**: operands are cast to half
- **float32**: operands are cast to FP32, or the result is asked for in FP32
- **widest**: operands of different dtypes are brought to the widest of them
- **as given**: it is in none of the lists and runs in what it is given; where it takes several
  operands, as `add` does, it mostly brings them to the widest dtype itself
- **—**: PyTorch has no such operation

A row that differs ends in **≠**. Where `Fp32Inside` stands beside *as given*, the results have the same
dtype: it is what happens inside that PyTorch leaves to its kernels. A backward function is set
beside the forward operation, for PyTorch's backward pass runs in the dtypes of the forward pass.

The lists, and the names, are those of [`aten/src/ATen/autocast_mode.h`][lists]. The [Autocast Op
Reference][reference] in PyTorch's documentation explains them.

[lists]: https://github.com/pytorch/pytorch/blob/v{version}.0/aten/src/ATen/autocast_mode.h
[reference]: https://docs.pytorch.org/docs/{version}/amp.html#autocast-op-reference

## Where it differs from PyTorch, and why

{}",
        doc(&classes.attrs).join("\n"),
        class_table(classes),
        differences(&entries),
    );
    for name in OPERATIONS {
        let methods = traits
            .get(name)
            .with_context(|| format!("no trait {name}"))?;
        let mut rows: Vec<_> = entries
            .iter()
            .filter(|entry| methods.contains_key(entry.row.op))
            .collect();
        rows.sort_by_key(|entry| entry.row.op);
        if !rows.is_empty() {
            let cells: Vec<_> = rows.iter().map(|entry| entry.cells()).collect();
            let header = ["operation", "class", "why", "PyTorch's autocast"];
            page += &format!("\n## {name}\n\n{}", aligned(header, &cells));
        }
    }
    page += "
## What is no single operation in Burn

Batch norm, group norm, losses other than CTC's and the cells of recurrent networks are composed of
several operations, and each of those follows its own row. What PyTorch's lists have beyond the
tables above is composed in Burn, or not there:

";
    let ops: Vec<_> = table.iter().map(|row| row.op).collect();
    for (autocast, names) in pytorch::without_counterpart(&ops) {
        page += &format!("- **{autocast}**: {}\n", quoted(&names));
    }
    Ok(page)
}

/// What differs, by sort and reason.
fn differences(entries: &[Entry]) -> String {
    let mut all = BTreeMap::<(String, &str), Vec<&str>>::new();
    for entry in entries {
        if let Some(difference) = entry.difference() {
            all.entry(difference).or_default().push(entry.row.op);
        }
    }
    let mut text = String::new();
    let mut last = None;
    for ((sort, why), ops) in &all {
        if last != Some(sort) {
            text += &format!("- {sort}:\n");
            last = Some(sort);
        }
        text += &format!("  - {}: {why}\n", quoted(ops));
    }
    text
}

fn quoted(ops: &[&str]) -> String {
    let ops: Vec<_> = ops.iter().map(|op| format!("`{op}`")).collect();
    ops.join(", ")
}

fn class_enum(policy: &syn::File) -> anyhow::Result<&ItemEnum> {
    policy
        .items
        .iter()
        .find_map(|item| match item {
            Item::Enum(item) if item.ident == "Class" => Some(item),
            _ => None,
        })
        .with_context(|| format!("{POLICY} has no enum Class"))
}

/// The classes and what their documentation says.
fn class_table(classes: &ItemEnum) -> String {
    let rows: Vec<_> = classes
        .variants
        .iter()
        .map(|class| [format!("`{}`", class.ident), doc(&class.attrs).join(" ")])
        .collect();
    aligned(["class", "what happens"], &rows)
}

/// The lines of a doc comment.
fn doc(attributes: &[Attribute]) -> Vec<String> {
    let text = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(ExprLit {
                lit: Lit::Str(text),
                ..
            }) => Some(text.value().trim().to_string()),
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(text).collect()
}

/// A markdown table whose columns stand below each other in its source as well.
fn aligned<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let escaped = |cell: &str| cell.replace('|', "\\|");
    let rows: Vec<_> = std::iter::once(header.map(escaped))
        .chain(
            rows.iter()
                .map(|row| row.each_ref().map(|cell| escaped(cell))),
        )
        .collect();
    let widths: [usize; N] = std::array::from_fn(|column| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or_default()
    });
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(widths) {
            text += &format!("| {cell:<width$} ");
        }
        text += "|\n";
        if i == 0 {
            for width in widths {
                text += &format!("|{}", "-".repeat(width + 2));
            }
            text += "|\n";
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENUM: &str = "/// How.\npub enum Class {\n/// Cast\n/// down.\nLowerPrecision }";

    fn made(table: &[Row]) -> anyhow::Result<String> {
        let (burn, _) = coverage::burn_backend()?;
        page(
            &coverage::traits(&burn)?,
            table,
            &syn::parse_str(ENUM).unwrap(),
        )
    }

    #[test]
    fn every_policy_row_is_on_the_page_once() {
        let page = made(&table()).unwrap();
        for Row { op, class, .. } in policy::rows("0.21") {
            let rows: Vec<_> = page
                .lines()
                .filter(|line| line.starts_with(&format!("| `{op}` ")))
                .collect();
            assert_eq!(rows.len(), 1, "{op}");
            assert!(rows[0].contains(&format!("| `{class:?}` ")), "{}", rows[0]);
        }
        assert!(
            page.contains("| `LowerPrecision` | Cast down.   |"),
            "{page}"
        );
    }

    #[test]
    fn a_row_that_is_unknown_or_renamed_fails() {
        let mut table = table();
        table[0].op = "float_matrix_product";
        assert_eq!(
            made(&table).unwrap_err().to_string(),
            "float_matrix_product is a method of 0 of Burn's traits"
        );
        // A method without a row, for no float tensor takes part in it.
        table[0].op = "int_add";
        assert_eq!(
            made(&table).unwrap_err().to_string(),
            "what is int_add in PyTorch? xtask/src/docs/pytorch.rs does not say"
        );
    }

    #[test]
    fn a_changed_line_is_noticed() {
        compare(PAGE, "one\ntwo\n", "one\ntwo\n").unwrap();
        for (found, line) in [("one\n2\n", 2), ("one\n", 2), ("one\ntwo", 3), ("", 1)] {
            assert_eq!(
                compare(PAGE, found, "one\ntwo\n").unwrap_err().to_string(),
                format!(
                    "src/guide/ops.md is stale from line {line} on: `cargo xtask docs` renews it"
                )
            );
        }
    }

    #[test]
    fn a_part_is_renewed_between_its_marks() {
        let part = |name, text: &str| Part {
            name,
            source: "a file",
            text: text.into(),
        };
        let [old, new] = ["| old |\n", "| new |\n"].map(|text| part("speed", text));
        let (start, end) = (new.start(), new.end());
        let page = |part: &str| format!("above\n{start}{part}{end}\nbelow\n");
        let renewed = page("\n| new |\n");
        assert_eq!(new.renewed(&page("\nstale\n")).unwrap(), renewed);
        assert_eq!(
            new.renewed(&old.renewed(&renewed).unwrap()).unwrap(),
            renewed
        );
        let other = part("memory", "").renewed(&renewed);
        assert_eq!(other.unwrap_err().to_string(), "no place for the memory");
    }

    #[test]
    fn a_row_shows_what_its_class_does_not_and_where_pytorch_differs() {
        for (op, why, pytorch) in [
            ("float_add", "recorded form: sums", "`add`: as given"),
            ("float_cat", "", "`cat`: as given"),
            (
                "float_div",
                "recorded form: keeps what half",
                "`div`: as given",
            ),
            ("float_mean", "a sum of", "`mean`: as given ≠"),
            ("float_unfold", "moves data, but", "`unfold`: as given ≠"),
            ("layer_norm", "sums and squares", "`layer_norm`: float32 ≠"),
            (
                "float_mask_fill",
                "rounded at most once",
                "`masked_fill`: as given ≠",
            ),
            (
                "float_scatter_nd",
                "`Fp32` where it accumulates",
                "`index_put`: widest",
            ),
            ("q_matmul", "its scales", "—"),
        ] {
            let row = &policy::rows("0.21").find(|row| row.op == op).unwrap();
            let cells = Entry::new(row).unwrap().cells();
            assert!(cells[2].starts_with(why), "{cells:?}");
            assert_eq!(cells[2].is_empty(), why.is_empty(), "{cells:?}");
            assert_eq!(cells[3], pytorch);
        }
    }

    #[test]
    fn every_phrase_is_of_the_policy() {
        for said in SAID_BY_THE_CLASS {
            assert!(policy::rows("0.21").any(|row| row.why == said), "{said}");
        }
        for (has, what) in BEYOND_THE_CLASS {
            assert!(table().iter().any(has), "{what}");
        }
    }

    #[test]
    fn columns_are_aligned_and_bars_escaped() {
        let rows = [["≠".to_string(), "a|b".to_string()]];
        assert_eq!(
            aligned(["one", "two"], &rows),
            "| one | two  |\n|-----|------|\n| ≠   | a\\|b |\n"
        );
    }
}
