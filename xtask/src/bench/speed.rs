//! How long a training step takes: forward and backward pass and a step of SGD.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, Precision, with_precision};
use serde_json::{Value, json};

use super::Options;
use super::backend::Measured;
use super::casts::device_in;
use super::checked::{Checked, CheckedDevice, is_contraction};
use super::models::{Batch, Dims, Model, Net};
use super::pytorch::{PyTorch, text};
use super::time::{Contender, Rounds, Spread, in_turn, timed, warmed, watched};

/// The least time of a round for plain Burn.
const ROUND: Duration = Duration::from_millis(100);

/// A training step of a model, again and again on one batch.
pub struct Step<A: AutodiffBackend> {
    net: Option<Net<A>>,
    batch: Batch<A>,
    optimizer: OptimizerAdaptor<Sgd<A::InnerBackend>, Net<A>, A>,
}

impl<A: AutodiffBackend> Step<A> {
    pub fn new(model: Model, dims: Dims, device: &A::Device) -> Self {
        Self {
            net: Some(Net::new(model, dims, device)),
            batch: Batch::new(model, dims, device),
            optimizer: SgdConfig::new().init(),
        }
    }

    pub fn run(&mut self) {
        let net = self.net.take().expect("the model of the last step");
        let grads = net.loss(self.batch.clone()).backward();
        let grads = GradientsParams::from_grads(grads, &net);
        self.net = Some(self.optimizer.step(1e-4, net, grads));
    }
}

/// `so_far` gets the rows each time that there is more to tell: a run may be stopped.
pub fn speed<B: Measured>(
    options: &Options,
    pytorch: Option<&PyTorch>,
    mut so_far: impl FnMut(&[Value]),
) -> Vec<Value> {
    println!(
        "\ntraining steps on {}: median of {} rounds; speed-up over FP32 in the same framework",
        B::name(&B::Device::default()),
        options.rounds
    );
    if let Some(why) = B::emulated() {
        println!("{why}");
    }
    println!(
        "{:<12} {:<13} {:>10} {:>9} {:>16} {:>16}",
        "model", "precision", "step ms", "speed-up", "middle half", "a second"
    );
    let mut rows = Vec::new();
    for model in options.models() {
        let with_before = |new: &[Value]| so_far(&[&rows, new].concat());
        let of_model = one::<B>(options, model, pytorch, with_before);
        rows.extend(of_model);
    }
    rows
}

fn one<B: Measured>(
    options: &Options,
    model: Model,
    pytorch: Option<&PyTorch>,
    mut so_far: impl FnMut(&[Value]),
) -> Vec<Value> {
    let dims = model.dims(options.size);
    let mut names = vec!["burn".to_string()];
    let mut contenders = vec![contender::<Autodiff<B>>(model, dims)];
    let precisions = options.precisions::<B>();
    for precision in precisions.iter().copied() {
        let mut run = contender::<AmpAutodiff<B>>(model, dims);
        names.push(precision.to_string());
        contenders.push(Box::new(move |n| with_precision(precision, || run(n))));
    }
    let ours = names.len();
    if let Some(pytorch) = pytorch {
        for precision in pytorch.precisions() {
            names.push(format!("PyTorch {precision}"));
            contenders.push(Box::new(move |n| pytorch.timed(model, precision, n)));
        }
    }
    let contenders = contenders.into_iter().map(warmed).collect();
    let (unit, items) = model.items(dims);
    let row = |precision: &str, seconds: f64, speedup: Spread| {
        let a_second = items as f64 / seconds;
        json!({
            "backend": B::name(&B::Device::default()),
            "emulated": B::emulated().is_some(),
            "model": model.name(),
            "precision": precision,
            "step_ms": seconds * 1e3,
            "speedup": speedup.median,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "items_per_second": a_second,
            "unit": unit,
        })
    };
    let rows_of = |rounds: &Rounds| -> Vec<_> {
        let timed = names.iter().enumerate().filter(|(of, _)| rounds.has(*of));
        let row = |(of, name): (usize, &String)| {
            // Each with FP32 in the same framework.
            let fp32 = if of < ours { 0 } else { ours };
            let speedup = rounds.ratio(fp32, of);
            let mut row = row(name, rounds.seconds(of).median, speedup);
            let peer = format!("PyTorch {name}");
            let peer = names.iter().position(|name| *name == peer);
            if let Some(peer) = peer.filter(|peer| rounds.has(*peer)) {
                row["of_pytorch"] = json!(speedup.median / rounds.ratio(ours, peer).median);
            }
            row
        };
        timed.map(row).collect()
    };
    let begun = |of: usize, took: Duration| {
        if options.first_steps {
            let (model, name) = (model.name(), &names[of]);
            println!(
                "{model:<12} {name:<13} {:>10.1} s for the first two steps",
                took.as_secs_f64()
            );
        }
    };
    let kept = |rounds: &Rounds| so_far(&rows_of(rounds));
    let rounds = watched(options.rounds.into(), ROUND, contenders, begun, kept);
    let mut rows = rows_of(&rounds);
    if !options.without_floor {
        let fp32 = rounds.seconds(0).median;
        for precision in precisions.into_iter().skip(1) {
            let floor = fp32 - saved::<B>(options, model, dims, precision);
            let speedup = Spread::of(fp32 / floor);
            rows.push(row(&format!("{precision} floor"), floor, speedup));
        }
    }
    rows.iter().for_each(print);
    rows
}

fn print(row: &Value) {
    let figure = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    let [low, high, a_second] = ["speedup_low", "speedup_high", "items_per_second"].map(figure);
    println!(
        "{:<12} {:<13} {:>10.3} {:>9.3} {:>16} {:>16}",
        text(&row["model"]),
        text(&row["precision"]),
        figure("step_ms"),
        figure("speedup"),
        format!("{low:.3} to {high:.3}"),
        format!("{a_second:.0} {}", text(&row["unit"])),
    );
}

fn contender<A: AutodiffBackend>(model: Model, dims: Dims) -> Contender<'static> {
    let device = A::Device::default();
    <A as Backend>::seed(&device, 1);
    let mut step = Step::<A>::new(model, dims, &device);
    timed(
        move || step.run(),
        move || <A as Backend>::sync(&device).expect("a device that answers"),
    )
}

/// The seconds that a step would gain if only its contractions ran in half: their time in FP32 less
/// that in half, each operation timed by itself.
fn saved<B: Measured>(options: &Options, model: Model, dims: Dims, precision: Precision) -> f64 {
    let contenders = vec![
        contractions::<Autodiff<Checked<B>>>(model, dims, CheckedDevice::new()),
        contractions::<AmpAutodiff<Checked<B>>>(model, dims, device_in::<B>(precision)),
    ];
    let contenders = contenders.into_iter().map(warmed).collect();
    let rounds = in_turn(options.rounds.into(), Duration::ZERO, contenders);
    rounds.difference(0, 1).median
}

/// Times the contractions of its steps.
fn contractions<A: AutodiffBackend<Device = CheckedDevice>>(
    model: Model,
    dims: Dims,
    device: CheckedDevice,
) -> Contender<'static> {
    let mut step = Step::<A>::new(model, dims, &device);
    device.set_timed(true);
    Box::new(move |runs| {
        device.reset();
        (0..runs).for_each(|_| step.run());
        let counts = device.counts();
        let contractions = counts.times().filter(|(op, ..)| is_contraction(op));
        contractions.map(|(_, _, time)| time).sum()
    })
}
