//! Writes the policy, the layers and the measurements into the pages, between marks, and draws the
//! picture of the measurements.

mod figures;
mod pytorch;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use burn_amp_core::policy::{self, Case, Class, Row};

use crate::coverage::{self, Methods, OPERATIONS};
use crate::measurements;
use crate::{layers, plot};
use pytorch::{Autocast, Counterpart};

const POLICY: &str = "core/src/policy/mod.rs";

const PICTURE: &str = "docs/memory_and_speed.svg";

/// Reasons that add nothing to the class.
const SAID_BY_THE_CLASS: [&str; 2] = ["moves data", "operands of one dtype, the widest of them"];

/// A difference between rows that are otherwise treated alike: which rows have it, and the text.
type Beyond = (fn(&Row) -> bool, &'static str);

const BEYOND_THE_CLASS: [Beyond; 6] = [
    (
        |row| row.class == Class::Activation,
        "an FP32 tensor that fits in half is cast to half; in PyTorch it stays FP32",
    ),
    (
        |row| matches!(row.otherwise, [(_, Case::UnheldScalar), ..]),
        "a scalar that does not fit in half moves the operation to FP32; PyTorch stays in half, or \
         rejects the scalar",
    ),
    (
        |row| matches!(row.otherwise, [(_, Case::InexactScalar)]),
        "a bound or a threshold that half does not hold exactly moves the operation to FP32; PyTorch rounds it",
    ),
    (
        |row| {
            let makes = ["float_zeros", "float_empty", "float_full"];
            makes.iter().any(|op| stands_with(row, op))
        },
        "an FP32 constant follows half tensors; in PyTorch it makes the result FP32",
    ),
    (
        |row| stands_with(row, "float_into_data"),
        "data is read back in FP32; in PyTorch in half",
    ),
    (
        |row| row.op == "float_slice_assign",
        "the result has the widest dtype; in PyTorch the dtype of the tensor that is written to",
    ),
];

/// Whether the operation stands in the table under the reason of another one.
fn stands_with(row: &Row, op: &str) -> bool {
    policy::rows("0.21").any(|other| other.op == op && other.why == row.why)
}

/// Writes the pages or, with `check`, fails if a page is stale.
pub fn docs(check: bool) -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read =
        |name| fs::read_to_string(root.join(name)).with_context(|| format!("reading {name}"));
    let runs = measurements::read(&root.join(measurements::FILE))?;
    let part = |name, source, text| Part { name, source, text };
    let measured = |name, text| part(name, measurements::FILE, text);
    let layers = aligned("layer | holds | independent of", &layers::rows());
    let mut pages = vec![(PICTURE, plot::bars(&figures::picture(&runs)?)?)];
    for (name, parts) in [
        ("src/guide/ops.md", of_policy(&read(POLICY)?)?),
        (
            "src/guide/how_it_works.md",
            vec![part("layers", "xtask/src/layers.rs", layers)],
        ),
        (
            "README.md",
            vec![
                measured("memory", figures::memory(&runs)?),
                measured("speed", figures::speed(&runs)?),
            ],
        ),
        (
            "src/guide/measurements.md",
            vec![
                measured("memory", figures::memory_in_full(&runs)?),
                measured("overhead", figures::overhead(&runs)?),
                measured("speed", figures::speed_in_full(&runs)?),
            ],
        ),
    ] {
        let mut parts = parts.iter();
        let page = parts.try_fold(read(name)?, |page, part| part.renewed(&page));
        pages.push((name, page.context(name)?));
    }
    for (name, page) in pages {
        if check {
            compare(name, &read(name)?, &page)?;
        } else {
            fs::write(root.join(name), page).with_context(|| format!("writing {name}"))?;
        }
    }
    Ok(())
}

fn of_policy(source: &str) -> anyhow::Result<Vec<Part>> {
    let traits = coverage::traits(&coverage::burn_backend()?.0)?;
    let table: Vec<_> = policy::rows("0.21").collect();
    let entries = entries(&traits, &table)?;
    let tables = operations(&traits, &entries);
    let others = without_counterpart(&table);
    let parts = [
        ("classes", POLICY, classes(source)?),
        ("differences", "core/src/policy", differences(&entries)),
        ("operations", "core/src/policy", tables),
        ("others of PyTorch's", pytorch::FILE, others),
    ];
    let parts = parts.map(|(name, source, text)| Part { name, source, text });
    Ok(parts.into())
}

/// The text between two marks in a page.
struct Part {
    name: &'static str,
    /// The source that the text is made from.
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
        let parts = page.split_once(&start);
        let parts = parts.and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
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
    /// The difference of PyTorch's operation, if there is one: its sort, and the reason.
    fn difference(&self) -> Option<(String, &str)> {
        let (class, autocast) = (self.row.class, self.pytorch?.autocast);
        let alike = match autocast {
            Autocast::LowerPrecision => class == Class::LowerPrecision,
            Autocast::Float32 => class == Class::Fp32,
            Autocast::Widest => class == Class::Promote,
            // PyTorch's operations on several operands promote them.
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
        Some(("treated alike, except for this".to_string(), beyond.1))
    }

    /// The reason, unless the class implies it, and the exceptions of the row.
    fn why(&self) -> String {
        let row = self.row;
        let why = (!SAID_BY_THE_CLASS.contains(&row.why)).then(|| row.why.to_string());
        let otherwise = row.otherwise.iter();
        let otherwise = otherwise.map(|(class, when)| format!("`{class:?}` {when}"));
        let recorded = row.recorded.map(|form| format!("recorded form: {form}"));
        let parts: Vec<_> = why.into_iter().chain(otherwise).chain(recorded).collect();
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

/// The rows as the page has them. Each has to be a method of one of Burn's traits.
fn entries<'a>(
    traits: &BTreeMap<String, Methods>,
    table: &'a [Row],
) -> anyhow::Result<Vec<Entry<'a>>> {
    let entry = |row: &'a Row| {
        let op = row.op;
        let has = |name: &&str| traits.get(*name).is_some_and(|all| all.contains_key(op));
        let places = OPERATIONS.iter().filter(|name| has(name)).count();
        ensure!(places == 1, "{op} is a method of {places} of Burn's traits");
        let pytorch = pytorch::counterpart(op)
            .with_context(|| format!("{} has no counterpart of {op}", pytorch::FILE))?;
        Ok(Entry { row, pytorch })
    };
    table.iter().map(entry).collect()
}

/// The operations of each trait in a table of their own, in alphabetical order.
fn operations(traits: &BTreeMap<String, Methods>, entries: &[Entry]) -> String {
    let mut text = String::new();
    for name in OPERATIONS {
        let ours = entries.iter();
        let ours = ours.filter(|entry| traits[name].contains_key(entry.row.op));
        let ours: BTreeMap<_, _> = ours.map(|entry| (entry.row.op, entry.cells())).collect();
        if !ours.is_empty() {
            let cells: Vec<_> = ours.into_values().collect();
            let header = "operation | class | why | PyTorch's autocast";
            text += &format!("\n## {name}\n\n{}", aligned(header, &cells));
        }
    }
    text
}

/// The operations of PyTorch's lists that the table lacks.
fn without_counterpart(table: &[Row]) -> String {
    let ops: Vec<_> = table.iter().map(|row| row.op).collect();
    let line = |(autocast, names): (_, Vec<_>)| format!("- **{autocast}**: {}\n", quoted(&names));
    pytorch::without_counterpart(&ops).map(line).concat()
}

/// The differences, by sort and reason.
fn differences(entries: &[Entry]) -> String {
    let mut all = BTreeMap::<(String, &str), Vec<&str>>::new();
    for entry in entries {
        if let Some(difference) = entry.difference() {
            all.entry(difference).or_default().push(entry.row.op);
        }
    }
    let (mut text, mut last) = (String::new(), None);
    for ((sort, why), ops) in &all {
        if last.replace(sort) != Some(sort) {
            text += &format!("- {sort}:\n");
        }
        text += &format!("  - {}: {why}\n", quoted(ops));
    }
    text
}

fn quoted(ops: &[&str]) -> String {
    let ops: Vec<_> = ops.iter().map(|op| format!("`{op}`")).collect();
    ops.join(", ")
}

/// The docs of the classes in the policy's source.
fn classes(source: &str) -> anyhow::Result<String> {
    let parts = source.split_once("pub enum Class {\n");
    let parts = parts.and_then(|(before, rest)| Some((before, rest.split_once("\n}")?.0)));
    let (before, classes) = parts.with_context(|| format!("{POLICY} has no enum Class"))?;
    let said = |line: &str| Some(line.trim().strip_prefix("///")?.trim().to_string());
    let of_all = before.rsplit("\n\n").next().unwrap_or_default();
    let of_all: Vec<_> = of_all.lines().filter_map(said).collect();
    let (mut rows, mut of_one) = (Vec::new(), Vec::new());
    for line in classes.lines() {
        if let Some(line) = said(line) {
            of_one.push(line);
        } else {
            let name = line.trim().trim_end_matches(',');
            rows.push([format!("`{name}`"), std::mem::take(&mut of_one).join(" ")]);
        }
    }
    let table = aligned("class | what happens", &rows);
    Ok(format!("{}\n\n{table}", of_all.join("\n")))
}

/// A markdown table whose columns stand below each other in its source as well.
fn aligned(header: &str, rows: &[impl AsRef<[String]>]) -> String {
    let escaped = |cell: &String| cell.replace('|', "\\|");
    let header: Vec<_> = header.split(" | ").map(String::from).collect();
    let rows = rows.iter().map(AsRef::as_ref);
    let rows = rows.map(|row| row.iter().map(escaped).collect());
    let rows: Vec<Vec<_>> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..rows[0].len()).filter_map(width).collect();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            text += &format!("| {cell:<width$} ");
        }
        text += "|\n";
        if i == 0 {
            for width in &widths {
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

    fn table() -> Vec<Row> {
        policy::rows("0.21").collect()
    }

    fn made(table: &[Row]) -> anyhow::Result<String> {
        let traits = coverage::traits(&coverage::burn_backend()?.0)?;
        Ok(operations(&traits, &entries(&traits, table)?))
    }

    #[test]
    fn every_policy_row_is_on_the_page_once() {
        let page = made(&table()).unwrap();
        for Row { op, class, .. } in policy::rows("0.21") {
            let start = format!("| `{op}` ");
            let rows: Vec<_> = page
                .lines()
                .filter(|line| line.starts_with(&start))
                .collect();
            assert_eq!(rows.len(), 1, "{op}");
            assert!(rows[0].contains(&format!("| `{class:?}` ")), "{}", rows[0]);
        }
    }

    #[test]
    fn a_class_has_what_its_documentation_says() {
        let source =
            "/// How.\npub enum Class {\n    /// Cast\n    /// down.\n    LowerPrecision,\n}";
        let classes = classes(source).unwrap();
        assert!(classes.starts_with("How.\n\n| class "), "{classes}");
        assert!(
            classes.contains("| `LowerPrecision` | Cast down.   |"),
            "{classes}"
        );
    }

    #[test]
    fn a_row_that_is_unknown_or_renamed_fails() {
        let mut table = table();
        table[0].op = "float_matrix_product";
        let error = made(&table).unwrap_err().to_string();
        assert_eq!(
            error,
            "float_matrix_product is a method of 0 of Burn's traits"
        );
        // A method without a row, for no float tensor takes part in it.
        table[0].op = "int_add";
        let error = made(&table).unwrap_err().to_string();
        assert_eq!(
            error,
            "xtask/src/docs/pytorch.rs has no counterpart of int_add"
        );
    }

    #[test]
    fn a_changed_line_is_noticed() {
        let compare = |found| compare("src/guide/ops.md", found, "one\ntwo\n");
        compare("one\ntwo\n").unwrap();
        for (found, line) in [("one\n2\n", 2), ("one\n", 2), ("one\ntwo", 3), ("", 1)] {
            assert_eq!(
                compare(found).unwrap_err().to_string(),
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
        for line in "float_add | recorded form: sums | `add`: as given
            float_cat |  | `cat`: as given
            float_div | recorded form: keeps what half | `div`: as given
            float_mean | a sum of | `mean`: as given ≠
            float_unfold | moves data, but | `unfold`: as given ≠
            layer_norm | sums and squares | `layer_norm`: float32 ≠
            float_mask_fill | rounded at most once | `masked_fill`: as given ≠
            float_scatter_nd | `Fp32` where it accumulates | `index_put`: widest
            q_matmul | its scales | —"
            .lines()
        {
            let parts: Vec<_> = line.trim().split(" | ").collect();
            let row = &policy::rows("0.21").find(|row| row.op == parts[0]).unwrap();
            let pytorch = pytorch::counterpart(row.op).unwrap();
            let cells = Entry { row, pytorch }.cells();
            assert!(cells[2].starts_with(parts[1]), "{cells:?}");
            assert_eq!(cells[2].is_empty(), parts[1].is_empty(), "{cells:?}");
            assert_eq!(cells[3], parts[2]);
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
            aligned("one | two", &rows),
            "| one | two  |\n|-----|------|\n| ≠   | a\\|b |\n"
        );
    }
}
