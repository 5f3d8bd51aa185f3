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
    /// Only these stages.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// A stage: its name, the seconds that it may take, the program with its first arguments, and the other
/// arguments. `{b}` stands for the backend, `{s}` for the size and `{r}` for the folder of the results.
type Stage = (&'static str, u64, &'static str, &'static str);

const SPEED: &str =
    "xtask bench speed --backend {b} --pytorch --without-floor --json {r}/measurements.json";
const MEMORY: &str = "xtask bench memory --backend {b} --size {s} --precision bf16 --pytorch --json {r}/measurements.json";

/// The most important first. The times leave room for kernels that are compiled at their first use,
/// 0.9 s each on an H100: they are kept for the stages after.
#[rustfmt::skip]
const STAGES: &[Stage] = &[
    ("tests-device", 60, "device", ""),
    ("tests-ops", 120, "ops", ""),
    ("tests-training", 120, "training", ""),
    ("tests-modules", 120, "modules", ""),
    ("speed-transformer", 240, SPEED, "--size {s} --model transformer --precision bf16"),
    ("speed-cnn", 150, SPEED, "--size {s} --model cnn --precision bf16"),
    ("speed-mlp", 90, SPEED, "--size {s} --model mlp --precision bf16"),
    ("speed-lstm", 120, SPEED, "--size {s} --model lstm --precision bf16"),
    ("memory-transformer", 60, MEMORY, "--model transformer"),
    ("first-steps", 180, "xtask bench first --backend {b} --precision bf16",
        "--size {s} --model transformer --json {r}/measurements.json"),
    ("small-mlp", 60, SPEED, "--model mlp"),
    ("small-transformer", 120, SPEED, "--model transformer"),
    ("small-cnn", 90, SPEED, "--model cnn"),
    ("small-lstm", 90, SPEED, "--model lstm"),
    ("host-mlp", 60, SPEED, "--size tiny --model mlp"),
    ("host-transformer", 90, SPEED, "--size tiny --model transformer"),
    ("kernels", 120, "xtask bench casts --backend {b}", "--detail --json {r}/measurements.json"),
    ("digits", 60, "digits --backend {b}", "--epochs 5 --out {r}/digits"),
    ("learner", 120, "learner --backend {b}", "--precision bf16 --epochs 2 --output {r}/learner"),
    ("memory-cnn", 60, MEMORY, "--model cnn"),
    ("memory-mlp", 60, MEMORY, "--model mlp"),
    ("memory-lstm", 60, MEMORY, "--model lstm"),
    ("f16-transformer", 120, "xtask bench speed --backend {b} --precision f16 --without-floor",
        "--size {s} --model transformer --json {r}/f16.json"),
    ("vulkan-kernels", 90, "xtask bench casts --backend vulkan", "--model mlp --detail"),
    ("vulkan-device", 90, "loopback --backend vulkan", "--rounds 3"),
    ("vulkan-speed", 90, "xtask bench speed --backend vulkan", "--model mlp --without-floor"),
];

const DEVICE_FEATURES: &str = "vulkan,fusion,autotune";

/// Makes CubeCL keep its kernels beside the results, from one stage to the next.
const CUBECL: &str = "[compilation]\ncache = \"local\"\n\n[autotune]\ncache = \"local\"\n";

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
        let backend = self.backend.to_possible_value().expect("none is hidden");
        let backend = backend.get_name();
        let on_cubecl = ![Choice::Flex, Choice::Tch].contains(&self.backend);
        let mut features: Vec<_> = ["xtask", "burn-amp", "learner"]
            .map(|package| format!("{package}/{backend}"))
            .into_iter()
            .filter(|feature| *feature != "xtask/flex" && *feature != "learner/flex")
            .collect();
        if on_cubecl {
            features.push("xtask/vulkan".into());
            let tuned = ["fusion", "autotune"].iter();
            let tuned = tuned.flat_map(|f| ["burn-amp", "learner"].map(|p| format!("{p}/{f}")));
            features.extend(tuned);
        }
        let mut cargo = cargo_build();
        cargo.args(["-p", "xtask", "-p", "burn-amp", "-p", "learner"]);
        cargo.args(["--bin", "xtask", "--bin", "learner", "--example", "digits"]);
        cargo.args(SUITE.iter().flat_map(|name| ["--test", name]));
        cargo.args(["--features", &features.join(",")]);
        let mut built = built(cargo)?;
        if on_cubecl {
            // burn-amp-device, on Vulkan: for CUDA, Burn 0.22 downloads LLVM.
            let mut cargo = cargo_build();
            cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../device"));
            cargo.args(["--example", "loopback", "--features", DEVICE_FEATURES]);
            built.extend(self::built(cargo)?);
        }

        fs::create_dir_all(&self.into)?;
        for (name, program) in &built {
            let plain = self.into.join(name);
            fs::copy(program, &plain)?;
            done(Command::new("strip").arg(&plain))?;
        }
        let packed = self.into.join(PACKED);
        done(
            Command::new("tar")
                .args(["--create", "--xz", "--file"])
                .arg(&packed)
                .arg("--directory")
                .arg(&self.into)
                .args(built.iter().map(|(name, _)| name))
                .env("XZ_OPT", XZ),
        )?;
        for (name, _) in &built {
            fs::remove_file(self.into.join(name))?;
        }
        let bytes = fs::metadata(&packed)?.len();
        let mib = bytes as f64 / f64::from(1 << 20);
        println!("{mib:.1} MiB  {}", packed.display());
        Ok(())
    }
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
        fs::write(into.join("cubecl.toml"), CUBECL)?;
        let ended = into.join(ENDED);
        let before = fs::read_to_string(&ended).unwrap_or_default();
        let before: BTreeSet<_> = before.lines().filter_map(|l| l.split(' ').next()).collect();
        let end = Instant::now() + Duration::from_secs_f64(60.0 * self.minutes);

        for &stage @ (name, seconds, ..) in STAGES {
            let is_wanted = self.only.is_empty() || self.only.iter().any(|only| only == name);
            if !is_wanted || before.contains(name) {
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
            let line = format!("{name} {took:.0} s, {status}");
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
        let (name, _, first, others) = stage;
        let mut words = first.split(' ').chain(others.split_whitespace());
        let program = self.from.join(words.next().unwrap_or_default());
        let program = program
            .canonicalize()
            .with_context(|| format!("no {}: extract {PACKED} there", program.display()))?;
        let value = |value: Option<clap::builder::PossibleValue>| {
            value.expect("none is hidden").get_name().to_string()
        };
        let (b, s) = (
            value(self.backend.to_possible_value()),
            value(self.size.to_possible_value()),
        );
        let r = into.to_str().context("a folder with a name in UTF-8")?;
        let arguments =
            words.map(|word| word.replace("{b}", &b).replace("{s}", &s).replace("{r}", r));
        let log = File::create(into.join(format!("{name}.log")))?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(into);
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
        for (name, _, first, others) in STAGES {
            assert!(names.insert(name), "{name}");
            let line = format!("{first} {others}")
                .replace("{b}", "cuda")
                .replace("{s}", "large");
            let words: Vec<_> = line.split_whitespace().collect();
            match words[0] {
                "xtask" => drop(Cli::try_parse_from(words).unwrap()),
                "digits" | "learner" | "loopback" => {}
                suite => assert!(SUITE.contains(&suite), "{suite}"),
            }
        }
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
