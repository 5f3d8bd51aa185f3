//! How far a training run in bf16 is from one in FP32, and how far PyTorch's is: the losses of the
//! model of `examples/learner`, from the same weights on the same batches.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder};
use burn::tensor::ElementConversion;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::TrainStep;
use burn_amp::{AmpAutodiff, Precision, with_precision};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use super::backend::{Measured, precisions};
use super::{Options, pytorch};
use data::{Corpus, Window, WindowBatcher};
use model::Model;

// The example also validates, resumes and draws a text.
#[allow(dead_code)]
#[path = "../../../examples/learner/src/data.rs"]
mod data;
#[allow(dead_code)]
#[path = "../../../examples/learner/src/model.rs"]
mod model;

/// Python reads this format, too.
type Recorder = PrettyJsonFileRecorder<FullPrecisionSettings>;

/// Windows of the text in a step.
const BATCH: usize = 16;
/// The first losses, which have to be the same in FP32, before roundings add up.
const FIRST: usize = 3;
/// The steps at the end whose losses are compared.
const LAST: usize = 50;

/// The learning rate of AdamW, whose formula is the same in Burn and in PyTorch.
const LEARNING_RATE: f64 = 1e-3;
const BETAS: [f32; 2] = [0.9, 0.999];
const EPSILON: f32 = 1e-5;
const WEIGHT_DECAY: f32 = 1e-4;

/// From each seed: how far one seed's run drifts is chance as well.
pub fn convergence<B: Measured>(options: &Options, folder: &Path) -> anyhow::Result<Vec<Value>> {
    let device = B::Device::default();
    let name = B::name(&device);
    let has_bf16 = precisions::<B>().contains(&Precision::Bf16);
    ensure!(has_bf16, "{name} has no bf16");
    println!(
        "\nthe model of examples/learner on {name}: {} steps from each seed\n\
         {:<5} {:<14} {:>28} {:>14} {:>16}",
        options.steps, "seed", "precision", "first losses", "last, mean", "from its FP32"
    );

    let (mut rows, mut beside) = (Vec::new(), Vec::new());
    for &seed in &options.seed {
        let runs = of_seed::<B>(options, seed, folder)?;
        for framework in runs.chunks(2) {
            let (_, fp32) = &framework[0];
            for (precision, losses) in framework {
                let first = losses[..FIRST].iter().map(|loss| format!("{loss:.6}"));
                let first = first.collect::<Vec<_>>().join(" ");
                let (last, distance) = (mean(last(losses)), distance(losses, fp32));
                println!("{seed:<5} {precision:<14} {first:>28} {last:>14.5} {distance:>16.6}");
                rows.push(json!({
                    "model": "characters",
                    "precision": precision,
                    "seed": seed,
                    "steps": options.steps,
                    "last_loss": last,
                    "distance": distance,
                    "losses": losses,
                }));
            }
        }
        if let [(_, burn), (_, bf16), (_, pytorch), (_, autocast)] = &runs[..] {
            let first = largest_difference(&burn[..FIRST], &pytorch[..FIRST]);
            let (ours, pytorchs) = (distance(bf16, burn), distance(autocast, pytorch));
            let ratio = ours / pytorchs;
            println!(
                "Burn and PyTorch in FP32 differ by {first:.1e} in the first {FIRST} losses, by {:.1e} in the last\n\
                 in bf16, our distance is {ratio:.3} of PyTorch's",
                distance(burn, pytorch)
            );
            beside.push((first, ours, pytorchs));
        }
    }
    if !beside.is_empty() {
        let first = beside.iter().map(|(first, ..)| *first);
        let first = first.max_by(f64::total_cmp).unwrap_or(f64::NAN);
        let ours: f64 = beside.iter().map(|(_, ours, _)| ours).sum();
        let pytorchs: f64 = beside.iter().map(|(.., pytorchs)| pytorchs).sum();
        let ratio = ours / pytorchs;
        println!("from all seeds, our distance is {ratio:.3} of PyTorch's");
        rows.push(json!({
            "model": "characters",
            "precision": "bf16 beside PyTorch",
            "seeds": options.seed,
            "first_difference": first,
            "distance_ratio": ratio,
        }));
    }
    Ok(rows)
}

/// The losses of a seed's runs: Burn in FP32, burn-amp in bf16, and where it is asked for, PyTorch in both.
fn of_seed<B: Measured>(
    options: &Options,
    seed: u64,
    folder: &Path,
) -> anyhow::Result<Vec<(&'static str, Vec<f64>)>> {
    let task = Task::write::<B>(options.steps, seed, folder)?;
    let fp32 = task.train::<Autodiff<B>>()?;
    let bf16 = with_precision(Precision::Bf16, || task.train::<AmpAutodiff<B>>())?;
    let mut runs = vec![("burn", fp32), ("bf16", bf16)];
    if options.pytorch
        && let Some([fp32, bf16]) = pytorch::losses(options.backend, folder)?
    {
        runs.extend([("PyTorch fp32", fp32), ("PyTorch bf16", bf16)]);
    }
    Ok(runs)
}

/// The task of each run: the same weights on the same batches.
struct Task {
    weights: PathBuf,
    vocabulary: usize,
    batches: Vec<Vec<Window>>,
}

impl Task {
    /// Draws the weights and the batches, and writes them for PyTorch.
    fn write<B: Backend>(steps: u16, seed: u64, folder: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)?;
        let corpus = Corpus::load();
        let (vocabulary, weights) = (corpus.characters.len(), folder.join("weights.json"));
        let device = B::Device::default();
        B::seed(&device, seed);
        Model::<B>::new(vocabulary, &device).save_file(&weights, &Recorder::new())?;

        let mut rng = StdRng::seed_from_u64(seed);
        let mut batch = || corpus.train.choose_multiple(&mut rng, BATCH).copied();
        let batches = (0..steps).map(|_| batch().collect());
        let batches: Vec<Vec<Window>> = batches.collect();
        let tokens = |batch: &Vec<Window>| batch.iter().map(|w| w.to_vec()).collect();
        let tokens: Vec<Vec<_>> = batches.iter().map(tokens).collect();
        let (lr, decay) = (LEARNING_RATE, WEIGHT_DECAY);
        let adamw = json!({"lr": lr, "betas": BETAS, "eps": EPSILON, "weight_decay": decay});
        let run = json!({"batches": tokens, "adamw": adamw});
        fs::write(folder.join("run.json"), run.to_string())?;
        Ok(Self {
            weights,
            vocabulary,
            batches,
        })
    }

    /// The loss of each step.
    fn train<A: AutodiffBackend>(&self) -> anyhow::Result<Vec<f64>> {
        let device = A::Device::default();
        let model = Model::<A>::new(self.vocabulary, &device);
        let mut model = model.load_file(&self.weights, &Recorder::new(), &device)?;
        let mut optimizer = AdamWConfig::new()
            .with_beta_1(BETAS[0])
            .with_beta_2(BETAS[1])
            .with_epsilon(EPSILON)
            .with_weight_decay(WEIGHT_DECAY)
            .init();
        let mut losses = Vec::new();
        for windows in &self.batches {
            let batch = WindowBatcher.batch(windows.clone(), &device);
            let output = TrainStep::step(&model, batch);
            model = optimizer.step(LEARNING_RATE, model, output.grads);
            losses.push(output.item.loss.into_scalar().elem());
        }
        Ok(losses)
    }
}

fn last(losses: &[f64]) -> &[f64] {
    &losses[losses.len().saturating_sub(LAST)..]
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// How far two runs are from each other at the end.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    mean(&differences(last(a), last(b)))
}

/// NaN is above all others.
fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    let differences = differences(a, b).into_iter();
    differences.max_by(f64::total_cmp).unwrap_or(f64::NAN)
}

fn differences(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_is_that_of_the_last_losses() {
        let a = vec![1.0; LAST + 7];
        let mut b = vec![1.5; LAST + 7];
        b[..7].fill(100.0);
        assert_eq!(distance(&a, &b), 0.5);
        assert_eq!(distance(&a[..3], &a[..3]), 0.0);
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_the_largest_difference() {
        assert_eq!(largest_difference(&[1.0, 2.0], &[1.5, 2.0]), 0.5);
        assert!(largest_difference(&[1.0, f64::NAN], &[1.5, 2.0]).is_nan());
    }
}
