//! The tables and the picture of the measurements, for the README and the guide. Independent of the
//! pages.

use anyhow::{Context, ensure};

use serde_json::Value;

use super::aligned;
use crate::bench::models::Model;
use crate::bench::pytorch::text;
use crate::measurements::{Machine, Run, Versions};
use crate::plot::{Group, Panel};

const MIB: f64 = (1 << 20) as f64;

/// The memory kept for the backward pass and held at the peak, for the README.
pub fn memory(runs: &[Run]) -> anyhow::Result<String> {
    tables(of(runs, "memory"), |run| {
        let all = [
            (Some(run), "kept_bytes", &OURS[..]),
            (Some(run), "peak_bytes", &OURS),
        ];
        let names = "kept, Burn | in bf16 | in f16 | peak, Burn | in bf16 | in f16";
        let header = format!("{} | {names}", place(run));
        Ok(aligned(&header, &held(run, &all)))
    })
}

/// The same, a table each, with gradient checkpointing and beside PyTorch.
pub fn memory_in_full(runs: &[Run]) -> anyhow::Result<String> {
    tables(of(runs, "memory"), |run| {
        let beside = |bench| {
            of(runs, bench).find(|other| (other.backend, other.size) == (run.backend, run.size))
        };
        let (balanced, pytorch) = (beside("memory_balanced"), beside("pytorch_memory"));
        let table = |title, ours, pytorchs| {
            let all = [
                (Some(run), ours, &OURS[..]),
                (balanced, ours, &OURS),
                (pytorch, pytorchs, &["fp32", "bf16"]),
            ];
            let names = "Burn | AMP in bf16 | AMP in f16 | Burn, checkpointing | AMP in bf16 \
                         | AMP in f16 | PyTorch | autocast in bf16";
            aligned(&format!("{title} | {names}"), &held(run, &all))
        };
        let kept = table("kept", "kept_bytes", "saved_bytes");
        let peak = table("peak", "peak_bytes", "peak_bytes");
        let mut text = under_head(run, &format!("{kept}\n{peak}"));
        // PyTorch may have been measured at another time.
        if let Some(Run { head, .. }) = pytorch {
            let version = head.versions.pytorch.as_ref();
            let version = version.context("PyTorch without its version")?;
            let (cpu, date) = (cpu(&head.machine), &head.date);
            text += &format!("\nPyTorch {version}: {cpu}, {date}.\n");
        }
        Ok(text)
    })
}

/// The precisions of Burn and of AMP that the memory is shown in.
const OURS: [&str; 3] = ["burn", "bf16", "f16"];

/// The models of a run, each with the MiB of `all`: runs, figures and precisions.
fn held(run: &Run, all: &[(Option<&Run>, &str, &[&str])]) -> Vec<Vec<String>> {
    let row = |model: Model| {
        let cells = all.iter().flat_map(|(run, bytes, precisions)| {
            precisions
                .iter()
                .map(move |precision| mib(*run, model, precision, bytes))
        });
        std::iter::once(model.description(run.size))
            .chain(cells)
            .collect()
    };
    models(run).map(row).collect()
}

/// The time of a step where half precision is not emulated, for the README.
pub fn speed(runs: &[Run]) -> anyhow::Result<String> {
    tables(timed(runs), |run| {
        let half = half(run)?;
        let autocast = format!("PyTorch {half}");
        let row = |model: Model| {
            let ms = |precision: &str| milliseconds(run.figure(model, precision, "step_ms"));
            let speedup = |precision: &str| number(run.figure(model, precision, "speedup"), 2);
            let ours = [model.title().into(), ms("burn"), ms(half), speedup(half)];
            let pytorchs = [ms("PyTorch fp32"), ms(&autocast), speedup(&autocast)];
            ours.into_iter().chain(pytorchs).collect::<Vec<_>>()
        };
        let place = place(run);
        let amp = format!("{place} | Burn | burn-amp in {half} | speed-up");
        let header = format!("{amp} | PyTorch | PyTorch in {half} | speed-up");
        Ok(aligned(&header, &models(run).map(row).collect::<Vec<_>>()))
    })
}

/// The same in each precision that was timed, on each backend.
pub fn speed_in_full(runs: &[Run]) -> anyhow::Result<String> {
    tables(of(runs, "speed"), |run| {
        let row = |row: &Value| {
            let figure = |name: &str, digits| number(row[name].as_f64(), digits);
            let [median, low, high] =
                ["speedup", "speedup_low", "speedup_high"].map(|name| figure(name, 2));
            let model = Model::ALL
                .into_iter()
                .find(|model| row["model"] == model.name());
            let precision = text(&row["precision"]);
            let precision = match (precision, precision.strip_suffix(" floor")) {
                (_, Some(half)) => format!("{half} only in products"),
                ("burn", _) => "Burn".into(),
                ("f32" | "f16" | "bf16", _) => format!("AMP in {precision}"),
                _ => precision.into(),
            };
            [
                model.map_or("", Model::title).into(),
                precision,
                milliseconds(row["step_ms"].as_f64()),
                median,
                format!("{low} to {high}"),
                format!("{} {}", figure("items_per_second", 0), text(&row["unit"])),
            ]
        };
        let header = "model | precision | step in ms | speed-up | middle half | a second";
        let rows: Vec<_> = run.rows.iter().map(row).collect();
        Ok(under_head(run, &aligned(header, &rows)))
    })
}

/// The cost of AMP where it gains nothing.
pub fn overhead(runs: &[Run]) -> anyhow::Result<String> {
    tables(of(runs, "overhead"), |run| {
        let row = run.rows.first().context("overhead without a row")?;
        let (part, place) = (number(row["step_ratio"].as_f64(), 2), place(run));
        Ok(format!(
            "With mixed precision off, a training step of only small operations takes {part} of Burn's\n\
             time ({place}).\n"
        ))
    })
}

/// Memory and time by model, FP32 beside half.
pub fn picture(runs: &[Run]) -> anyhow::Result<Vec<Panel>> {
    let title = "Kept for the backward pass in MiB";
    let memory = of(runs, "memory").map(|run| (run, "kept_bytes", MIB, title));
    let speed = timed(runs).map(|run| (run, "step_ms", 1.0, "A training step in ms"));
    let panel = |(run, name, unit, title): (&Run, &str, f64, &str)| {
        let half = half(run)?;
        let groups = models(run).map(|model| {
            let bar = |precision| {
                let figure = run.figure(model, precision, name);
                let what = || format!("{} in {precision}: no {name}", model.name());
                anyhow::Ok(figure.with_context(what)? / unit)
            };
            Ok(Group {
                name: model.title(),
                bars: [bar("burn")?, bar(half)?],
            })
        });
        Ok(Panel {
            title: format!("{title} ({})", run.backend.title()),
            names: ["Burn in FP32".into(), format!("burn-amp in {half}")],
            groups: groups.collect::<anyhow::Result<_>>()?,
        })
    };
    memory.chain(speed).map(panel).collect()
}

/// A table for each run.
fn tables<'a>(
    runs: impl Iterator<Item = &'a Run>,
    table: impl Fn(&Run) -> anyhow::Result<String>,
) -> anyhow::Result<String> {
    let tables: Vec<_> = runs.map(table).collect::<anyhow::Result<_>>()?;
    ensure!(!tables.is_empty(), "nothing was measured");
    Ok(tables.join("\n"))
}

fn of<'a>(runs: &'a [Run], bench: &'static str) -> impl Iterator<Item = &'a Run> {
    runs.iter().filter(move |run| run.bench == bench)
}

/// The runs of `speed` without emulated half precision.
fn timed(runs: &[Run]) -> impl Iterator<Item = &Run> {
    of(runs, "speed").filter(|run| !run.backend.emulates_half())
}

/// Where and when a run was, in short.
fn place(run: &Run) -> String {
    let machine = &run.head.machine;
    let processor = machine.gpu.clone().unwrap_or_else(|| cpu(machine));
    format!("{}, {processor}, {}", run.backend.title(), run.head.date)
}

fn cpu(machine: &Machine) -> String {
    format!("{} with {} cores", machine.cpu, machine.cores)
}

/// The table, below the conditions that its figures hold for.
fn under_head(run: &Run, table: &str) -> String {
    let (machine, versions) = (&run.head.machine, &run.head.versions);
    let mut head = vec![place(run)];
    head.extend(machine.gpu.as_ref().map(|_| cpu(machine)));
    head.push(format!("{}, Rust {}", machine.os, versions.rustc));
    let Versions { burn, burn_amp, .. } = versions;
    head.push(format!("Burn {burn}, burn-amp {burn_amp}"));
    head.extend(versions.pytorch.iter().map(|v| format!("PyTorch {v}")));
    format!("{}:\n\n{table}", head.join(", "))
}

/// The half precision to show: bf16 where the run has it, as `Auto` would choose.
fn half(run: &Run) -> anyhow::Result<&'static str> {
    let has = |half: &&str| run.rows.iter().any(|row| row["precision"] == **half);
    let half = ["bf16", "f16"].into_iter().find(has);
    half.with_context(|| format!("{} was measured in no half precision", run.bench))
}

/// The models of a run, in the order that all tables have.
fn models(run: &Run) -> impl Iterator<Item = Model> {
    let measured = |model: &Model| run.rows.iter().any(|row| row["model"] == model.name());
    Model::ALL.into_iter().filter(measured)
}

/// A figure in MiB; in another precision than FP32 also as a share of FP32's.
fn mib(run: Option<&Run>, model: Model, precision: &str, bytes: &str) -> String {
    let of = |precision: &str| Some(run?.figure(model, precision, bytes)? / MIB);
    let mib = number(of(precision), 1);
    // Burn's name and PyTorch's.
    let fp32 = of("burn").or_else(|| of("fp32"));
    match (precision, of(precision).zip(fp32)) {
        ("bf16" | "f16", Some((half, fp32))) => format!("{mib} ({:.2})", half / fp32),
        _ => mib,
    }
}

fn milliseconds(ms: Option<f64>) -> String {
    number(ms, if ms < Some(10.0) { 2 } else { 1 })
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("—".into(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bench::backend::Choice;
    use crate::measurements::tests::run;

    fn held(precision: &str, kept: f64, peak: f64) -> Value {
        let [kept, peak] = [kept, peak].map(|mib| mib * MIB);
        json!({"model": "cnn", "precision": precision, "kept_bytes": kept, "peak_bytes": peak})
    }

    fn pytorch(version: &str) -> Run {
        let saved = |precision: &str, mib: f64| {
            let bytes = mib * MIB;
            json!({"model": "cnn", "precision": precision, "saved_bytes": bytes, "peak_bytes": null})
        };
        let rows = json!([saved("fp32", 28.0), saved("bf16", 14.0)]);
        let mut run = run("pytorch_memory", Choice::Flex, rows);
        run.head.versions.pytorch = Some(version.into());
        run
    }

    fn timed(precision: &str, ms: f64, speedup: f64) -> Value {
        json!({
            "model": "lstm", "precision": precision, "step_ms": ms, "items_per_second": 4096.4,
            "unit": "tokens", "speedup": speedup, "speedup_low": speedup, "speedup_high": 2.0,
        })
    }

    fn runs() -> Vec<Run> {
        let memory = json!([held("burn", 70.25, 72.0), held("f16", 28.1, 36.0)]);
        let speed = [timed("burn", 30.0, 1.0), timed("bf16", 20.0, 1.5)];
        vec![
            run("memory", Choice::Flex, memory),
            run("speed", Choice::Tch, json!(speed)),
            run("speed", Choice::Flex, json!([timed("burn", 9.0, 1.0)])),
            run("overhead", Choice::Flex, json!([{"step_ratio": 1.056}])),
        ]
    }

    #[test]
    fn the_readme_has_the_figures_and_where_they_are_from() {
        let cnn = "CNN, 6 convolutions with batch norm, batch 32 of 3x32x32";
        assert_eq!(
            memory(&runs()).unwrap(),
            format!(
                "| {:<56} | kept, Burn | in bf16 | in f16      | peak, Burn | in bf16 | in f16      |\n\
                 |{}|------------|---------|-------------|------------|---------|-------------|\n\
                 | {cnn} | 70.2       | —       | 28.1 (0.40) | 72.0       | —       | 36.0 (0.50) |\n",
                "Flex, Abacus with 2 cores, 2026-01-02",
                "-".repeat(58)
            )
        );
        let overhead = overhead(&runs()).unwrap();
        let said = " 1.06 of Burn's\ntime (Flex, ";
        assert!(overhead.contains(said), "{overhead}");
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        let speed = speed(&runs()).unwrap().replace(' ', "");
        let last = "\n|LSTM|30.0|20.0|1.50|—|—|—|\n";
        assert!(speed.ends_with(last), "{speed}");
        assert!(memory(&[]).is_err());
    }

    #[test]
    fn pytorchs_memory_is_what_was_measured_or_a_dash() {
        let ends = |runs: &[Run], ends: [&str; 2]| {
            let text = memory_in_full(runs).unwrap().replace(' ', "");
            let rows = text.lines().filter(|line| line.starts_with("|CNN"));
            let mut rows = rows.zip(ends);
            assert!(rows.all(|(row, end)| row.ends_with(end)), "{text}");
        };
        ends(&runs(), ["|—|—|"; 2]);
        let mut measured = runs();
        measured.push(pytorch("2.9.0"));
        ends(&measured, ["|28.0|14.0(0.50)|", "|—|—|"]);
        let text = memory_in_full(&measured).unwrap();
        let from = "\nPyTorch 2.9.0: Abacus with 2 cores, 2026-01-02.\n";
        assert!(text.ends_with(from), "{text}");
    }

    #[test]
    fn an_emulation_is_in_the_guide_alone() {
        assert!(!speed(&runs()).unwrap().contains("Flex"));
        let all = speed_in_full(&runs()).unwrap();
        for said in ["\nFlex, ", "| 1.50 to 2.00 | 4096 tokens |"] {
            assert!(all.contains(said), "{all}");
        }
        assert_eq!(picture(&runs()).unwrap().len(), 2);
    }
}
