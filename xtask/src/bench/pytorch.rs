//! PyTorch with the same models: its casts and, where it is installed, its memory, the time of a step
//! and its losses.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use burn_amp::Precision;
use clap::ValueEnum;
use serde_json::{Value, json};

use super::Options;
use super::backend::Choice;
use super::memory::or_dash;
use super::models::Model;
use crate::libtorch;

/// The casts of a step of a small model under `torch.autocast` on CUDA, with the models as `bench.py`
/// has them: counted in PyTorch 2.15, with fake CUDA tensors.
pub fn autocast_casts(model: Model, precision: Precision) -> usize {
    // In the forward pass; those on the tape, each with one in the backward pass; gradients that are
    // cast to half where an operation got FP32 and half operands and promoted them itself.
    let (forward, on_tape, promotions) = match (model, precision) {
        (_, Precision::F32) => (0, 0, 0),
        // Only in bf16, the FP32 probabilities go to a product that casts before the kernel.
        (Model::Transformer, Precision::Bf16) => (76, 76, 8),
        (Model::Transformer, _) => (72, 72, 8),
        (Model::Cnn, _) => (10, 9, 0),
        (Model::Mlp, _) => (16, 15, 0),
        // The cell is FP32 from its first zeros on, and meets half gates three times in a step.
        (Model::Lstm, _) => (136, 71, 192),
    };
    forward + on_tape + promotions
}

/// PyTorch in a process of its own, which runs the same steps on request.
pub struct PyTorch {
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    child: Child,
    pub version: String,
    precisions: Vec<String>,
}

impl PyTorch {
    /// Starts PyTorch. Where it is not installed, prints a note and returns `None`.
    pub fn start(options: &Options) -> anyhow::Result<Option<Self>> {
        if !installed() {
            return Ok(None);
        }
        // As a text, since the program may have been carried to a machine without the sources.
        let mut python = Command::new("python3");
        python.args(["-c", include_str!("../../pytorch/bench.py")]);
        python.args(["--device", device(options.backend)]);
        let size = options.size.to_possible_value();
        let size = size.expect("no size is skipped");
        python.args(["--size", size.get_name()]);
        python.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn().context("cannot start python3")?;
        let stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut pytorch = Self {
            pipes: RefCell::new((stdin, stdout)),
            child,
            version: String::new(),
            precisions: Vec::new(),
        };
        let hello = pytorch.ask(&json!({"ask": "versions"}))?;
        let precisions = hello["precisions"].as_array().context("no precisions")?;
        let wanted = |precision: &&str| {
            let only = options.precision.as_deref().unwrap_or_default();
            only.is_empty()
                || precision.contains("32")
                || only.iter().any(|only| only.to_string() == **precision)
        };
        let precisions = precisions.iter().map(text).filter(wanted);
        pytorch.precisions = precisions.map(String::from).collect();
        pytorch.version = text(&hello["pytorch"]).into();
        let device = device(options.backend);
        println!("\nPyTorch {} on {device}", pytorch.version);
        Ok(Some(pytorch))
    }

    /// The precisions that PyTorch has on this device, FP32 first.
    pub fn precisions(&self) -> impl Iterator<Item = &str> {
        self.precisions.iter().map(String::as_str)
    }

    /// The time of `runs` steps.
    pub fn timed(&self, model: Model, precision: &str, runs: u32) -> Duration {
        let model = model.name();
        let request = json!({"ask": "time", "model": model, "precision": precision, "runs": runs});
        let answer = self.ask(&request).expect("an answer of PyTorch's");
        Duration::from_secs_f64(answer["seconds"].as_f64().expect("seconds"))
    }

    /// PyTorch's memory for the backward pass, and its peak, where PyTorch reports them.
    pub fn memory(&self, options: &Options) -> anyhow::Result<Vec<Value>> {
        println!(
            "\nPyTorch\n{:<12} {:<10} {:>10} {:>10}",
            "model", "precision", "saved MiB", "peak MiB"
        );
        let mut rows = Vec::new();
        for model in options.models() {
            for precision in self.precisions() {
                let model = model.name();
                let row =
                    self.ask(&json!({"ask": "memory", "model": model, "precision": precision}))?;
                let mib = |bytes: &Value| bytes.as_f64().map(|bytes| bytes / f64::from(1 << 20));
                let [saved, peak] =
                    ["saved_bytes", "peak_bytes"].map(|name| or_dash(mib(&row[name]), 1));
                println!("{model:<12} {precision:<10} {saved:>10} {peak:>10}");
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// One request and its answer, a line each.
    fn ask(&self, request: &Value) -> anyhow::Result<Value> {
        let (stdin, stdout) = &mut *self.pipes.borrow_mut();
        writeln!(stdin, "{request}").context("PyTorch's process has ended")?;
        let mut answer = String::new();
        stdout.read_line(&mut answer)?;
        serde_json::from_str(&answer).with_context(|| format!("PyTorch answers {answer:?}"))
    }
}

impl Drop for PyTorch {
    fn drop(&mut self) {
        // The process waits for requests for ever.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The losses of PyTorch's training runs from the weights and on the batches in `folder`, in FP32
/// and in bf16. `None` where PyTorch is not installed.
pub fn losses(backend: Choice, folder: &Path) -> anyhow::Result<Option<[Vec<f64>; 2]>> {
    if !installed() {
        return Ok(None);
    }
    let mut python = Command::new("python3");
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch/convergence.py"));
    python.args(["--device", device(backend)]);
    python.arg(folder).stderr(Stdio::inherit());
    let output = python.output().context("cannot start python3")?;
    ensure!(output.status.success(), "python3: {}", output.status);
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

/// Where PyTorch is measured beside a backend.
fn device(backend: Choice) -> &'static str {
    match backend {
        Choice::Cuda => "cuda",
        Choice::Flex | Choice::Wgpu | Choice::Vulkan | Choice::Tch => "cpu",
    }
}

/// Whether PyTorch is installed. Prints a note where it is not.
fn installed() -> bool {
    let found = libtorch::python("import torch");
    if let Err(why) = &found {
        println!("\nPyTorch is not measured: {why}");
    }
    found.is_ok()
}

/// A text, or an empty one.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
