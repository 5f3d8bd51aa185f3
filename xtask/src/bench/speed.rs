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
use super::pytorch::PyTorch;
use super::time::{Contender, Spread, in_turn, timed, warmed};

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

pub fn speed<B: Measured>(options: &Options, pytorch: Option<&PyTorch>) -> Vec<Value> {
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
    let models = options.models();
    let rows = models.flat_map(|model| one::<B>(options, model, pytorch));
    rows.collect()
}

fn one<B: Measured>(options: &Options, model: Model, pytorch: Option<&PyTorch>) -> Vec<Value> {
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
    let rounds = in_turn(options.rounds.into(), ROUND, contenders);
    let (unit, items) = model.items(dims);
    let row = |precision: &str, seconds: f64, speedup: Spread| {
        let a_second = items as f64 / seconds;
        println!(
            "{:<12} {precision:<13} {:>10.3} {:>9.3} {:>16} {:>16}",
            model.name(),
            seconds * 1e3,
            speedup.median,
            format!("{:.3} to {:.3}", speedup.low, speedup.high),
            format!("{a_second:.0} {unit}"),
        );
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
    let timed = names.iter().enumerate().map(|(of, name)| {
        // Each with FP32 in the same framework.
        let fp32 = if of < ours { 0 } else { ours };
        let speedup = rounds.ratio(fp32, of);
        let mut row = row(name, rounds.seconds(of).median, speedup);
        let peer = format!("PyTorch {name}");
        if let Some(peer) = names.iter().position(|name| *name == peer) {
            row["of_pytorch"] = json!(speedup.median / rounds.ratio(ours, peer).median);
        }
        row
    });
    let mut rows: Vec<_> = timed.collect();
    if options.without_floor {
        return rows;
    }
    let fp32 = rounds.seconds(0).median;
    for precision in precisions.into_iter().skip(1) {
        let floor = fp32 - saved::<B>(options, model, dims, precision);
        let speedup = Spread::of(fp32 / floor);
        rows.push(row(&format!("{precision} floor"), floor, speedup));
    }
    rows
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
