//! A campaign on a computer with a GPU, but without Rust or a network, within a time limit: builds the
//! programs to carry there, and runs them there, the most important first.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context, bail, ensure};
use cargo_metadata::Message;
use clap::{Args, Subcommand, ValueEnum};

use crate::bench::backend::Choice;
use crate::bench::models::Size;
use crate::test::SUITE;

/// A campaign on a machine with a GPU.
#[derive(Debug, Subcommand)]
pub enum Gpu {
    /// Builds the programs of the campaign, and packs them into one archive.
    Pack(Pack),
    /// Runs the campaign with the packed programs, or continues it.
    Run(Run),
}

#[derive(Debug, Args)]
pub struct Pack {
    #[arg(long, value_enum, default_value_t = Choice::Cuda)]
    backend: Choice,
    /// The folder for the archive.
    #[arg(long, default_value = "target/gpu")]
    into: PathBuf,
    /// Only the programs of the campaign's first two parts, which are built in a third of the time.
    #[arg(long)]
    quick: bool,
}

#[derive(Debug, Args)]
pub struct Run {
    #[arg(long, value_enum, default_value_t = Choice::Cuda)]
    backend: Choice,
    #[arg(long, value_enum, default_value_t = Size::Large)]
    size: Size,
    /// The folder of the unpacked programs.
    #[arg(long, default_value = "target/gpu")]
    from: PathBuf,
    /// The folder for a log of each stage, the figures, and the list of ended stages. An ended stage is
    /// not run again.
    #[arg(long, default_value = "target/gpu/results")]
    into: PathBuf,
    /// The time for all stages, from now.
    #[arg(long, default_value_t = 25.0)]
    minutes: f64,
    /// Only the stages of parts up to this one.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    part: u8,
    /// Only these stages.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// A stage: its name, the part of the campaign that it belongs to, the seconds that it may take, the program
/// with its first arguments, and the other arguments. `{b}` stands for the backend, `{s}` for the size,
/// `{p}` for the half precision and `{r}` for the folder of the results.
type Stage = (&'static str, u8, u64, &'static str, &'static str);

/// Without trials, since each compiles kernels of its own: the stage `trials` has them. Each stage of the same kind and
/// size measures PyTorch too: figures with PyTorch's version and figures without do not go into one run.
const SPEED: &str =
    "xtask bench speed --backend {b} --without-floor --without-trials --first-steps --pytorch";
/// The same where each operation takes the kernel that comes first.
const UNTUNED: &str =
    "untuned bench speed --backend {b} --without-floor --without-trials --first-steps --pytorch";
/// The place of the figures. Those of another precision need another file: a run replaces those of the same model.
const JSON: &str = "--json {r}/measurements.json";
const MEMORY: &str = "bench memory --backend {b} --size {s} --precision {p} --without-trials --pytorch --json {r}/measurements.json";

/// The most important first, in three parts: eight minutes, three minutes, and what a longer time is good
/// for. What takes time is to compile kernels at their first use, 0.9 s each on an H100; they are kept for
/// the stages after. So the first part begins without tuning, and ends with the tuning that its time allows:
/// a later part goes on with it.
#[rustfmt::skip]
const STAGES: &[Stage] = &[
    ("transformer-untuned", 1, 200, UNTUNED, "--size {s} --model transformer --precision {p} {json}"),
    ("cnn", 1, 220, SPEED, "--size {s} --model cnn --precision {p} {json}"),
    ("tests-ops", 1, 60, "ops", "results_that_are_sums --nocapture"),
    ("memory-transformer", 2, 60, "untuned", "{memory} --model transformer"),
    ("memory-cnn", 2, 90, "xtask", "{memory} --model cnn"),
    // If the first part did not come to an end with it.
    ("cnn-continued", 2, 60, SPEED, "--size {s} --model cnn --precision {p} {json}"),
    ("f16-transformer", 2, 80, UNTUNED, "--size {s} --model transformer --precision f16 --json {r}/f16.json"),
    ("small-transformer", 2, 40, UNTUNED, "--model transformer --precision {p} {json}"),
    ("small-mlp", 2, 50, UNTUNED, "--model mlp --precision {p} {json}"),
    ("small-lstm", 2, 80, UNTUNED, "--model lstm --precision {p} {json}"),
    ("trials", 2, 60, "xtask", "bench trials --backend {b} --precision {p}"),
    ("transformer", 1, 300, SPEED, "--size {s} --model transformer --precision {p} {json}"),
    ("tests-device", 3, 60, "device", ""),
    ("tests-training", 3, 120, "training", ""),
    ("tests-modules", 3, 120, "modules", ""),
    ("tests-all-ops", 3, 120, "ops", ""),
    ("mlp", 3, 90, SPEED, "--size {s} --model mlp --precision {p} {json}"),
    ("lstm", 3, 120, SPEED, "--size {s} --model lstm --precision {p} {json}"),
    ("first-steps", 3, 180, "xtask", "bench first --backend {b} --precision {p} --size {s} --model transformer \
        --json {r}/measurements.json"),
    ("small-tuned", 3, 300, SPEED, "{json}"),
    ("host-mlp", 3, 60, SPEED, "--size tiny --model mlp {json}"),
    ("host-transformer", 3, 90, SPEED, "--size tiny --model transformer {json}"),
    ("kernels", 3, 120, "xtask", "bench casts --backend {b} --detail --json {r}/measurements.json"),
    ("digits", 3, 60, "digits", "--backend {b} --epochs 5 --out {r}/digits"),
    ("learner", 3, 120, "learner", "--backend {b} --precision {p} --epochs 2 --output {r}/learner"),
    ("memory-mlp", 3, 60, "xtask", "{memory} --model mlp"),
    ("memory-lstm", 3, 60, "xtask", "{memory} --model lstm"),
    ("vulkan-kernels", 3, 90, "xtask", "bench casts --backend vulkan --model mlp --detail"),
    ("vulkan-device", 3, 90, "loopback", "--backend vulkan --rounds 3"),
    ("vulkan-speed", 3, 90, "xtask", "bench speed --backend vulkan --model mlp --without-floor"),
];

const DEVICE_FEATURES: &str = "vulkan,fusion,autotune";

/// CubeCL's configuration in a stage: keeps the kernels, compiled and chosen, for the stages after, and logs
/// each that is compiled and what each candidate takes. `{r}` and `{name}` stand for the folder of the
/// results and the stage.
const CUBECL: &str = r#"
[compilation]
cache = { file = "{r}/kernels" }
logger = { level = "basic", file = "{r}/{name}.kernels" }

[autotune]
cache = { file = "{r}/kernels" }
logger = { level = "full", file = "{r}/{name}.tuning" }
"#;

/// The line of CubeCL's log for a kernel.
const COMPILING: &str = "[Compiling kernel]";

/// A small test that is built with the second program: with the features of the tests' dependencies, only what tunes
/// is built again.
const WITNESS: &str = "without_half";

/// The programs. They share most of their code, so one archive is two thirds of eight.
const PACKED: &str = "programs.tar.xz";

/// A window of two large programs, and one thread, since each thread would begin a window of its own.
const XZ: &str = if cfg!(target_arch = "x86_64") {
    "--threads=1 --x86 --lzma2=preset=6,dict=192MiB"
} else {
    "--threads=1 --lzma2=preset=6,dict=192MiB"
};

/// The stages that have ended, a line each.
const ENDED: &str = "ended.txt";

pub fn gpu(gpu: &Gpu) -> anyhow::Result<()> {
    match gpu {
        Gpu::Pack(pack) => pack.pack(),
        Gpu::Run(run) => run.run(),
    }
}

impl Pack {
    fn pack(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.into)?;
        let mut names = Vec::new();
        // Each build before the next one, which replaces programs of the same name.
        for (cargo, renamed) in self.builds() {
            for (name, program) in built(cargo)? {
                if name == WITNESS {
                    continue;
                }
                let name = renamed
                    .filter(|_| name == "xtask")
                    .map_or(name, String::from);
                let plain = self.into.join(&name);
                fs::copy(program, &plain)?;
                done(Command::new("strip").arg(&plain))?;
                names.push(name);
            }
        }
        let packed = self.into.join(PACKED);
        done(
            Command::new("tar")
                .args(["--create", "--xz", "--file"])
                .arg(&packed)
                .arg("--directory")
                .arg(&self.into)
                .args(&names)
                .env("XZ_OPT", XZ),
        )?;
        for name in &names {
            fs::remove_file(self.into.join(name))?;
        }
        let bytes = fs::metadata(&packed)?.len();
        let mib = bytes as f64 / f64::from(1 << 20);
        println!("{mib:.1} MiB  {}", packed.display());
        Ok(())
    }

    /// The calls of Cargo, each with another name for its `xtask`.
    fn builds(&self) -> Vec<(Command, Option<&'static str>)> {
        let backend = value_name(&self.backend);
        let on_cubecl = ![Choice::Flex, Choice::Tch].contains(&self.backend);
        let features = |packages: &[&str], others: &[&str]| {
            let of = packages
                .iter()
                .map(|package| format!("{package}/{backend}"));
            let known = of.filter(|feature| !["xtask/flex", "learner/flex"].contains(&&**feature));
            let others = others
                .iter()
                .filter(|_| on_cubecl)
                .map(|feature| feature.to_string());
            known.chain(others).collect::<Vec<_>>().join(",")
        };
        let mut untuned = cargo_build();
        untuned.args(["-p", "xtask", "--bin", "xtask", "--no-default-features"]);
        let mut tuned = cargo_build();
        tuned.args(["-p", "xtask", "--bin", "xtask"]);
        if self.quick {
            let features = features(&["xtask", "burn-amp"], &["burn-amp/fusion"]);
            untuned.args(["-p", "burn-amp", "--test", "ops", "--features"]);
            untuned.arg(format!("{features},burn-amp/train"));
            tuned.args(["-p", "burn-amp", "--test", WITNESS, "--features", &features]);
            return vec![(untuned, Some("untuned")), (tuned, None)];
        }
        untuned.args(["--features", &features(&["xtask"], &[])]);
        tuned.args([
            "-p",
            "burn-amp",
            "-p",
            "learner",
            "--bin",
            "learner",
            "--example",
            "digits",
        ]);
        tuned.args(SUITE.iter().flat_map(|name| ["--test", name]));
        let others = [
            "xtask/vulkan",
            "burn-amp/fusion",
            "burn-amp/autotune",
            "learner/fusion",
            "learner/autotune",
        ];
        tuned.args([
            "--features",
            &features(&["xtask", "burn-amp", "learner"], &others),
        ]);
        let mut builds = vec![(untuned, Some("untuned")), (tuned, None)];
        if on_cubecl {
            // burn-amp-device, on Vulkan: for CUDA, Burn 0.22 downloads LLVM.
            let mut device = cargo_build();
            device.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../device"));
            device.args(["--example", "loopback", "--features", DEVICE_FEATURES]);
            builds.push((device, None));
        }
        builds
    }
}

/// The name of a choice on the command line.
fn value_name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("none is hidden");
    value.get_name().into()
}

fn cargo_build() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    let messages = ["--message-format", "json-render-diagnostics"];
    cargo.args(["build", "--release"]).args(messages);
    cargo
}

/// The programs that cargo builds, by name.
fn built(mut cargo: Command) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut building = cargo
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let output = std::io::BufReader::new(building.stdout.take().context("a pipe")?);
    let mut built = Vec::new();
    for message in Message::parse_stream(output) {
        if let Message::CompilerArtifact(artifact) = message?
            && let Some(program) = artifact.executable
        {
            built.push((artifact.target.name, program.into()));
        }
    }
    let status = building.wait()?;
    ensure!(status.success(), "cargo: {status}");
    Ok(built)
}

impl Run {
    fn run(&self) -> anyhow::Result<()> {
        let known: BTreeSet<_> = STAGES.iter().map(|(name, ..)| *name).collect();
        if let Some(unknown) = self.only.iter().find(|name| !known.contains(name.as_str())) {
            bail!("there is no stage {unknown}; there are {known:?}");
        }
        fs::create_dir_all(&self.into)?;
        let into = self.into.canonicalize()?;
        let ended = into.join(ENDED);
        let before = fs::read_to_string(&ended).unwrap_or_default();
        let before: BTreeSet<_> = before.lines().filter_map(|l| l.split(' ').next()).collect();
        let end = Instant::now() + Duration::from_secs_f64(60.0 * self.minutes);

        for &stage @ (name, part, seconds, ..) in STAGES {
            let is_wanted = self.only.is_empty() || self.only.iter().any(|only| only == name);
            if part > self.part || !is_wanted || before.contains(name) {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            let limit = left.min(Duration::from_secs(seconds));
            let start = Instant::now();
            let status = self.stage(stage, &into, limit);
            let took = start.elapsed().as_secs_f64();
            // A stage that the campaign's own end has cut short is run again by the next call.
            let is_cut = matches!(status, Ok(None)) && left < Duration::from_secs(seconds);
            let status = match status {
                Ok(Some(status)) => status.to_string(),
                Ok(None) if is_cut => "no time left".into(),
                Ok(None) => format!("stopped after its {seconds} s"),
                // A stage that did not start has not ended.
                Err(error) => {
                    println!("{name}: {error:#}");
                    continue;
                }
            };
            let compiled = fs::read_to_string(into.join(format!("{name}.kernels")));
            let compiled = compiled.unwrap_or_default().matches(COMPILING).count();
            let line = format!("{name} {took:.0} s, {compiled} kernels compiled so far, {status}");
            println!("{line}");
            if is_cut {
                break;
            }
            let mut file = OpenOptions::new().create(true).append(true).open(&ended)?;
            writeln!(file, "{line}")?;
        }
        Ok(())
    }

    /// How a stage ended; `None` if its time ran out.
    fn stage(
        &self,
        stage: Stage,
        into: &Path,
        limit: Duration,
    ) -> anyhow::Result<Option<ExitStatus>> {
        let (name, _, _, first, others) = stage;
        let r = into.to_str().context("a folder with a name in UTF-8")?;
        let config = CUBECL.replace("{r}", r).replace("{name}", name);
        fs::write(into.join("cubecl.toml"), config)?;
        let line = arguments(first, others, &self.backend, self.size, r);
        let mut words = line.split_whitespace();
        let program = self.from.join(words.next().unwrap_or_default());
        let program = program
            .canonicalize()
            .with_context(|| format!("no {}: extract {PACKED} there", program.display()))?;
        let log = File::create(into.join(format!("{name}.log")))?;
        let mut command = Command::new(program);
        command.args(words).current_dir(into);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if name.starts_with("tests-") {
            // Each kernel is timed once less; and tuning overflows a small stack.
            command
                .env("CUBECL_AUTOTUNE_LEVEL", "minimal")
                .env("RUST_MIN_STACK", (128 << 20).to_string());
        }
        within(limit, command)
    }
}

/// The command line of a stage.
fn arguments(first: &str, others: &str, backend: &Choice, size: Size, results: &str) -> String {
    format!("{first} {others}")
        .replace("{memory}", MEMORY)
        .replace("{json}", JSON)
        .replace("{b}", &value_name(backend))
        .replace("{p}", half(backend))
        .replace("{s}", &value_name(&size))
        .replace("{r}", results)
}

/// The half precision to measure: most devices of wgpu have no bf16.
fn half(backend: &Choice) -> &'static str {
    match backend {
        Choice::Vulkan | Choice::Wgpu => "f16",
        Choice::Flex | Choice::Cuda | Choice::Tch => "bf16",
    }
}

/// Runs a command, and stops it with all that it started once its time is over.
fn within(limit: Duration, mut command: Command) -> anyhow::Result<Option<ExitStatus>> {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            let group = format!("-{}", child.id());
            let _ = Command::new("kill")
                .args(["-s", "KILL", "--", &group])
                .status();
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a command that has to succeed.
fn done(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Args as Cli;

    #[test]
    fn every_stage_of_the_benches_is_a_command() {
        let mut names = BTreeSet::new();
        for (name, part, _, first, others) in STAGES {
            assert!(names.insert(name), "{name}");
            let line = arguments(first, others, &Choice::Cuda, Size::Large, "results");
            let words: Vec<_> = line.split_whitespace().collect();
            // The programs of the quick pack.
            assert!(
                *part == 3 || ["xtask", "untuned", "ops"].contains(&words[0]),
                "{name}"
            );
            match words[0] {
                "xtask" | "untuned" => drop(Cli::try_parse_from(words).unwrap()),
                "digits" | "learner" | "loopback" => {}
                suite => assert!(SUITE.contains(&suite), "{suite}"),
            }
        }
    }

    /// The first program logs two kernels where its configuration says, the second one fails, and the third one is cut.
    #[cfg(unix)]
    #[test]
    fn a_campaign_that_is_cut_goes_on_where_it_ended() {
        use std::os::unix::fs::PermissionsExt;

        let from = env::temp_dir().join(format!("xtask-campaign-{}", std::process::id()));
        let into = from.join("results");
        fs::create_dir_all(&into).unwrap();
        let program = |name: &str, script: &str| {
            let path = from.join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        let log = r#"log=$(sed -n 's/.*"basic", file = "\(.*\)".*/\1/p' cubecl.toml)"#;
        let kernel = format!("echo '{COMPILING} one' >> \"$log\"");
        program(
            "untuned",
            &format!("{log}; {kernel}; {kernel}; echo once >> ran"),
        );
        program("xtask", "exit 3");
        program("ops", "sleep 60");
        let run = |minutes: f64| {
            let stages = "transformer-untuned,cnn,tests-ops,memory-transformer";
            let run = Run {
                backend: Choice::Cuda,
                size: Size::Tiny,
                from: from.clone(),
                into: into.clone(),
                minutes,
                part: 1,
                only: stages.split(',').map(String::from).collect(),
            };
            run.run().unwrap();
            let ended = fs::read_to_string(into.join(ENDED)).unwrap();
            let without_time = |line: &str| {
                let (name, rest) = line.split_once(' ').unwrap();
                let (_, status) = rest.split_once(" s, ").unwrap();
                format!("{name}: {status}")
            };
            ended.lines().map(without_time).collect::<Vec<_>>()
        };
        let first = [
            "transformer-untuned: 2 kernels compiled so far, exit status: 0",
            "cnn: 0 kernels compiled so far, exit status: 3",
        ];
        assert_eq!(run(3.0 / 60.0), first);
        program("ops", "exit 0");
        let rest = ["tests-ops: 0 kernels compiled so far, exit status: 0"];
        assert_eq!(run(1.0), [&first[..], &rest].concat());
        // Each stage ran once, and that of a later part not at all.
        assert_eq!(fs::read_to_string(into.join("ran")).unwrap(), "once\n");
        fs::remove_dir_all(&from).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_stage_ends_with_its_time_and_all_that_it_started() {
        let file = env::temp_dir().join(format!("xtask-gpu-{}", std::process::id()));
        let mut command = Command::new("sh");
        let script = format!("(sleep 1; touch {}) & wait", file.display());
        command.args(["-c", &script]);
        let ended = within(Duration::from_millis(100), command).unwrap();
        assert!(ended.is_none());
        thread::sleep(Duration::from_millis(1500));
        assert!(!file.exists());

        let quick = within(Duration::from_secs(60), Command::new("true")).unwrap();
        assert!(quick.expect("an end of its own").success());
    }
}
