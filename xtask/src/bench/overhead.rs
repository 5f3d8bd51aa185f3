//! The overhead of AMP where it does nothing: small operations in FP32.

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};
use serde_json::{Value, json};

use super::backend::Measured;
use super::time::{Contender, in_turn, timed};

const ROUNDS: usize = 2001;
/// One run each in a round, so that a disturbance of the machine affects both.
const ROUND: Duration = Duration::ZERO;
/// Operations of the chain.
const OPS: usize = 1000;

pub fn overhead<B: Measured>() -> Vec<Value> {
    let steps = vec![
        step::<Autodiff<B>>(),
        step::<AmpAutodiff<B>>(),
        step::<Autodiff<B>>(),
    ];
    let step = in_turn(ROUNDS, ROUND, steps);
    let (ratio, noise) = (step.ratio(1, 0), step.ratio(2, 0));
    let [plain, amp] = [0, 1].map(|of| step.seconds(of).times(1e6).median);
    println!(
        "\nsmall_ops    a step in FP32: {plain:.1} us on Burn, {amp:.1} us on AMP, ratio {:.3} \
         ({:.3} to {:.3}); Burn to itself {:.3} ({:.3} to {:.3})",
        ratio.median, ratio.low, ratio.high, noise.median, noise.low, noise.high
    );
    let chain = |what, chains| {
        let chain = in_turn(ROUNDS, ROUND, chains);
        let [plain, amp] = [0, 1].map(|of| chain.seconds(of).times(1e9 / OPS as f64).median);
        let more = chain.difference(1, 0).times(1e9 / OPS as f64);
        let ratio = chain.ratio(1, 0);
        println!(
            "{what:<12} an operation: {plain:.0} ns on Burn, {amp:.0} ns on AMP, {:.1} ns more \
             ({:.1} to {:.1}), ratio {:.3} ({:.3} to {:.3})",
            more.median, more.low, more.high, ratio.median, ratio.low, ratio.high
        );
        (more.median, ratio.median)
    };
    let (forward, _) = chain("forward", vec![links_of::<B>(), links_of::<Amp<B>>()]);
    let both = vec![
        recorded_of::<Autodiff<B>>(),
        recorded_of::<AmpAutodiff<B>>(),
    ];
    let (recorded, recorded_ratio) = chain("recorded", both);
    // From here on the process uses half precision, and computes in FP32 all the same.
    with_precision(Precision::Bf16, || ());
    let beside = vec![links_of::<B>(), links_of::<Amp<B>>()];
    let (forward_beside, _) = chain("beside half", beside);
    let beside = vec![
        recorded_of::<Autodiff<B>>(),
        recorded_of::<AmpAutodiff<B>>(),
    ];
    let (recorded_beside, _) = chain("  recorded", beside);
    vec![json!({
        "model": "small_ops",
        "step_us": plain,
        "amp_step_us": amp,
        "step_ratio": ratio.median,
        "step_ratio_low": ratio.low,
        "step_ratio_high": ratio.high,
        "forward_ns_per_op": forward,
        "recorded_ns_per_op": recorded,
        "recorded_ratio": recorded_ratio,
        "forward_beside_half_ns_per_op": forward_beside,
        "recorded_beside_half_ns_per_op": recorded_beside,
    })]
}

/// A whole training step: forward, backward, and the optimizer.
fn step<B: AutodiffBackend>() -> Contender<'static> {
    let device = B::Device::default();
    let mut optimizer = AdamConfig::new().init();
    let mut model = Some(SmallOps::<B>::new(&device));
    let batch = Tensor::random([8, 16], Distribution::Normal(0.0, 1.0), &device);
    timed(
        move || {
            let trained = model.take().expect("put back by the last step");
            let grads = trained.loss(batch.clone()).backward();
            let grads = GradientsParams::from_grads(grads, &trained);
            model = Some(optimizer.step(1e-3, trained, grads));
        },
        sync::<B>,
    )
}

/// The chain without autodiff.
fn links_of<B: Backend>() -> Contender<'static> {
    let x = operand::<B>();
    timed(move || drop(links(x.clone())), sync::<B>)
}

/// The chain with autodiff. Its backward pass, which frees the tape, is not timed.
fn recorded_of<B: AutodiffBackend>() -> Contender<'static> {
    let x = operand::<B>();
    Box::new(move |runs| {
        let run = |_| {
            let x = x.clone().require_grad();
            let start = Instant::now();
            let y = links(x);
            sync::<B>();
            let elapsed = start.elapsed();
            y.sum().backward();
            elapsed
        };
        (0..runs).map(run).sum()
    })
}

/// Data: the policy follows a constant, such as ones.
fn operand<B: Backend>() -> Tensor<B, 1> {
    Tensor::random([8], Distribution::Default, &B::Device::default())
}

fn links<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    (0..OPS / 2).fold(x.clone(), |y, _| (y + x.clone()) * 0.5)
}

fn sync<B: Backend>() {
    <B as Backend>::sync(&B::Device::default()).expect("a device that answers");
}

/// Many operations on small tensors, where the cost of deciding them shows most.
#[derive(Module, Debug)]
struct SmallOps<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> SmallOps<B> {
    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(16, 16).init(device);
        Self {
            layers: (0..8).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let x = self.layers.iter().fold(x, |x, layer| {
            let y = layer.forward(x.clone()).tanh();
            let scale = y.clone().powi_scalar(2).mean_dim(1).sqrt() + 1.0;
            (y / scale + x) * 0.5
        });
        x.powi_scalar(2).mean()
    }
}
