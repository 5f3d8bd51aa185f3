//! How long a training step takes: forward and backward pass and a step of SGD.

use std::collections::BTreeMap;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, Precision, with_precision};
use serde_json::{Value, json};

use super::Options;
use super::backend::{Measured, precisions};
use super::casts::device_in;
use super::checked::{Checked, CheckedDevice, Counts, is_contraction};
use super::models::{Batch, Dims, Model, Net};
use super::pytorch::PyTorch;
use super::time::{Contender, Spread, in_turn, timed};

/// At least, in a round, for plain Burn.
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
    options
        .models()
        .flat_map(|model| one::<B>(options, model, pytorch))
        .collect()
}

fn one<B: Measured>(options: &Options, model: Model, pytorch: Option<&PyTorch>) -> Vec<Value> {
    let dims = model.dims(options.size);
    // Each with the one that it is compared with.
    let mut names = vec![("burn".to_string(), 0)];
    let mut contenders = vec![contender::<Autodiff<B>>(model, dims)];
    let precisions = precisions::<B>();
    for precision in precisions.iter().copied() {
        let mut run = contender::<AmpAutodiff<B>>(model, dims);
        names.push((precision.to_string(), 0));
        contenders.push(Box::new(move |runs| {
            with_precision(precision, || run(runs))
        }));
    }
    if let Some(pytorch) = pytorch {
        let fp32 = names.len();
        for precision in pytorch.precisions() {
            names.push((format!("PyTorch {precision}"), fp32));
            contenders.push(Box::new(move |runs| pytorch.timed(model, precision, runs)));
        }
    }
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
    let mut rows = Vec::new();
    for (of, (precision, to)) in names.iter().enumerate() {
        rows.push(row(
            precision,
            rounds.seconds(of).median,
            rounds.ratio(*to, of),
        ));
    }
    let fp32 = rounds.seconds(0).median;
    for precision in precisions.into_iter().skip(1) {
        let floor = fp32 - saved::<B>(options, model, dims, precision);
        let speedup = fp32 / floor;
        let speedup = Spread {
            low: speedup,
            median: speedup,
            high: speedup,
        };
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

/// The seconds that a step gains by its contractions alone: their time in FP32 less that in half,
/// each operation timed by itself.
fn saved<B: Measured>(options: &Options, model: Model, dims: Dims, precision: Precision) -> f64 {
    let half = device_in::<B>(precision);
    let plain = CheckedDevice::new();
    let contenders = vec![
        contractions::<Autodiff<Checked<B>>>(model, dims, plain),
        contractions::<AmpAutodiff<Checked<B>>>(model, dims, half),
    ];
    let rounds = in_turn(options.rounds.into(), Duration::ZERO, contenders);
    if options.detail {
        detail(&plain.counts(), &half.counts());
    }
    rounds.difference(0, 1).median
}

/// Prints how long each operation of a step takes, in FP32 and in half, the longest first.
fn detail(plain: &Counts, half: &Counts) {
    let mut times: BTreeMap<_, [(f64, usize); 2]> = BTreeMap::new();
    for (i, counts) in [plain, half].into_iter().enumerate() {
        for (op, _, time) in counts.times() {
            times.entry(op).or_default()[i].0 += time.as_secs_f64() * 1e3;
        }
        for (op, _, count) in counts.ops() {
            times.entry(op).or_default()[i].1 += count;
        }
    }
    let mut times: Vec<_> = times.into_iter().collect();
    times.sort_by(|(_, a), (_, b)| (b[0].0 + b[1].0).total_cmp(&(a[0].0 + a[1].0)));
    for (op, [(plain, plain_times), (half, half_times)]) in times {
        println!(
            "{op:>30} {plain:>9.3} ms {plain_times:>5} times, in half {half:>9.3} ms {half_times:>5} times"
        );
    }
}

/// Tells how long the contractions of its steps take.
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
