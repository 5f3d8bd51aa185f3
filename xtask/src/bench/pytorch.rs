//! What PyTorch does with the same models: what it casts, and, where it is installed, what it keeps,
//! how long a step takes and what it learns.

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
use super::models::{Dims, Model};

/// The casts of a step under `torch.autocast` on CUDA, of the models as `bench.py` has them.
pub struct Autocast {
    /// Of parameters in the forward pass: once, for autocast remembers those of leaves.
    parameters: usize,
    /// Of other tensors that the tape knows, at each use.
    tracked: usize,
    /// Of tensors that it does not know, which have none in the backward pass.
    untracked: usize,
    /// Gradients that are cast to half where an operation met FP32 and half and brought them
    /// together itself.
    promotions: usize,
}

impl Autocast {
    pub fn casts(&self) -> usize {
        2 * (self.parameters + self.tracked) + self.untracked + self.promotions
    }
}

/// By the rules of PyTorch's `autocast_mode`: contractions cast what is FP32, biases too; softmax,
/// log_softmax and layer norm compute in FP32; batch norm, activations, pooling and dropout in what
/// they are given.
pub fn autocast(model: Model, dims: Dims, precision: Precision) -> Autocast {
    // Of the logits, for the cross entropy.
    let loss = 1;
    match model {
        Model::Transformer => Autocast {
            // Six linear layers in a layer, and the head.
            parameters: 12 * dims.layers + 2,
            // The residuals are FP32, and so are the normalized ones that four linear layers of a
            // layer take, and the head. Softmax gives FP32 to a matmul; it takes half, which CUDA
            // casts inside the kernel in f16 and before it in bf16.
            tracked: (5 + usize::from(precision == Precision::Bf16)) * dims.layers + 1 + loss,
            untracked: 0,
            // The half branches that are added to the residuals.
            promotions: 2 * dims.layers,
        },
        Model::Cnn => Autocast {
            // Two convolutions in a stage, and the head.
            parameters: 2 * dims.layers + 2,
            tracked: loss,
            // The images.
            untracked: 1,
            promotions: 0,
        },
        Model::Mlp => Autocast {
            parameters: 2 * dims.layers + 2,
            tracked: loss,
            // The rows.
            untracked: 1,
            promotions: 0,
        },
        Model::Lstm => Autocast {
            // Two linear layers and the head.
            parameters: 6,
            // The hidden state is FP32, for the cell is, from its first zeros on. All but those
            // are cast for the next step, and the last for the head.
            tracked: dims.length + loss,
            // The input of each step, and the zeros.
            untracked: dims.length + 1,
            // Where half gates meet the cell: f*c, + i*g, o*tanh(c).
            promotions: 3 * dims.length,
        },
    }
}

/// PyTorch in a process of its own, which runs the same steps when it is asked to.
pub struct PyTorch {
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    child: Child,
    pub version: String,
    precisions: Vec<String>,
}

impl PyTorch {
    /// Starts PyTorch; says so and gives nothing where it is not installed.
    pub fn start(options: &Options) -> anyhow::Result<Option<Self>> {
        let Some(mut python) = script("bench.py", options.backend) else {
            return Ok(None);
        };
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
        pytorch.precisions = precisions.iter().map(|p| text(p).into()).collect();
        pytorch.version = text(&hello["pytorch"]).into();
        let device = device(options.backend);
        println!("\nPyTorch {} on {device}", pytorch.version);
        Ok(Some(pytorch))
    }

    /// The precisions that PyTorch has on this device, FP32 first.
    pub fn precisions(&self) -> impl Iterator<Item = &str> {
        self.precisions.iter().map(String::as_str)
    }

    /// How long so many steps take.
    pub fn timed(&self, model: Model, precision: &str, runs: u32) -> Duration {
        let request = json!({
            "ask": "time", "model": model.name(), "precision": precision, "runs": runs,
        });
        let answer = self.ask(&request).expect("an answer of PyTorch's");
        Duration::from_secs_f64(answer["seconds"].as_f64().expect("seconds"))
    }

    /// What PyTorch keeps for the backward pass, and its peak, where PyTorch can tell.
    pub fn memory(&self, options: &Options) -> anyhow::Result<Vec<Value>> {
        println!(
            "\nPyTorch\n{:<12} {:<10} {:>10} {:>10}",
            "model", "precision", "saved MiB", "peak MiB"
        );
        let mut rows = Vec::new();
        for model in options.models() {
            for precision in self.precisions() {
                let request =
                    json!({"ask": "memory", "model": model.name(), "precision": precision});
                let row = self.ask(&request)?;
                println!(
                    "{:<12} {precision:<10} {:>10} {:>10}",
                    model.name(),
                    number(&row["saved_bytes"], MIB, 1),
                    number(&row["peak_bytes"], MIB, 1),
                );
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
        // It waits for requests for ever.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The losses of PyTorch's training runs from the weights and on the batches in `folder`, in FP32
/// and in bf16. `None` where PyTorch is not installed.
pub fn losses(backend: Choice, folder: &Path) -> anyhow::Result<Option<[Vec<f64>; 2]>> {
    let Some(mut python) = script("convergence.py", backend) else {
        return Ok(None);
    };
    python.arg(folder).stderr(Stdio::inherit());
    let output = python.output().context("cannot start python3")?;
    ensure!(output.status.success(), "python3: {}", output.status);
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

const MIB: f64 = (1 << 20) as f64;

/// Where PyTorch is measured beside a backend.
fn device(backend: Choice) -> &'static str {
    match backend {
        Choice::Cuda => "cuda",
        Choice::Flex | Choice::Wgpu | Choice::Vulkan | Choice::Tch => "cpu",
    }
}

/// The command that runs one of our scripts beside a backend; says so and gives nothing where
/// PyTorch is not installed.
fn script(name: &str, backend: Choice) -> Option<Command> {
    if let Err(why) = has_torch() {
        println!("\nPyTorch is not measured beside: {why}");
        return None;
    }
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch");
    let mut python = python();
    python.arg(scripts.join(name));
    python.args(["--device", device(backend)]);
    Some(python)
}

fn python() -> Command {
    Command::new("python3")
}

/// Whether python3 has PyTorch, or what it says instead.
fn has_torch() -> Result<(), String> {
    let output = python().args(["-c", "import torch"]).output();
    let output = output.map_err(|error| format!("cannot start python3: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("python3: {}\n{}", output.status, said.trim())),
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value, unit: f64, digits: usize) -> String {
    let value = value.as_f64();
    value.map_or("-".into(), |value| format!("{:.digits$}", value / unit))
}

#[cfg(test)]
mod tests {
    use super::super::models::Size;
    use super::*;

    /// Counted in PyTorch 2.15: the casts of the forward pass and their nodes on the tape, with
    /// fake CUDA tensors.
    #[test]
    fn autocast_casts_what_pytorch_does() {
        let counted = [
            (Model::Transformer, Precision::F16, 72, 72),
            (Model::Transformer, Precision::Bf16, 76, 76),
            (Model::Cnn, Precision::F16, 10, 9),
            (Model::Cnn, Precision::Bf16, 10, 9),
            (Model::Mlp, Precision::F16, 16, 15),
            (Model::Mlp, Precision::Bf16, 16, 15),
            (Model::Lstm, Precision::F16, 136, 71),
            (Model::Lstm, Precision::Bf16, 136, 71),
        ];
        for (model, precision, forward, on_tape) in counted {
            let casts = autocast(model, model.dims(Size::Small), precision);
            let tracked = casts.parameters + casts.tracked;
            assert_eq!(tracked + casts.untracked, forward, "{model:?} {precision}");
            assert_eq!(tracked, on_tape, "{model:?} {precision}");
            assert_eq!(casts.casts(), forward + on_tape + casts.promotions);
        }
    }
}
