//! How long a training step takes: forward and backward pass and a step of SGD.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_amp::{AmpAutodiff, with_precision};
use serde_json::{Value, json};

use super::Options;
use super::backend::{Measured, precisions};
use super::models::{Batch, Dims, Model, Net};
use super::time::{Contender, in_turn, timed};

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

pub fn speed<B: Measured>(options: &Options) -> Vec<Value> {
    let name = B::name(&B::Device::default());
    println!(
        "\ntraining steps on {name}: median of {} rounds",
        options.rounds
    );
    if name.contains("flex") {
        println!("a CPU emulates half precision: these are no figures of a GPU's");
    }
    println!(
        "{:<12} {:<10} {:>12} {:>7} {:>16} {:>16}",
        "model", "precision", "step ms", "ratio", "middle half", "a second"
    );
    options
        .models()
        .flat_map(|model| one::<B>(options, model))
        .collect()
}

fn one<B: Measured>(options: &Options, model: Model) -> Vec<Value> {
    let dims = model.dims(options.size);
    let mut names = vec!["burn".to_string()];
    let mut contenders = vec![contender::<Autodiff<B>>(model, dims)];
    for precision in precisions::<B>() {
        let mut run = contender::<AmpAutodiff<B>>(model, dims);
        names.push(precision.to_string());
        contenders.push(Box::new(move |runs| {
            with_precision(precision, || run(runs))
        }));
    }
    let rounds = in_turn(options.rounds.into(), ROUND, contenders);
    let (unit, items) = model.items(dims);
    let row = |(of, precision): (usize, String)| {
        let (seconds, ratio) = (rounds.seconds(of), rounds.ratio(of, 0));
        let a_second = items as f64 / seconds.median;
        println!(
            "{:<12} {precision:<10} {:>12.3} {:>7.3} {:>16} {:>16}",
            model.name(),
            seconds.median * 1e3,
            ratio.median,
            format!("{:.3} to {:.3}", ratio.low, ratio.high),
            format!("{a_second:.0} {unit}"),
        );
        json!({
            "model": model.name(),
            "precision": precision,
            "step_ms": seconds.median * 1e3,
            "step_ratio": ratio.median,
            "step_ratio_low": ratio.low,
            "step_ratio_high": ratio.high,
            "items_per_second": a_second,
            "unit": unit,
        })
    };
    names.into_iter().enumerate().map(row).collect()
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
