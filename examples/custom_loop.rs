//! The explicit protocol in a training loop of one's own: scale, backward, unscale, clip, step,
//! update, as with PyTorch's `torch.amp.GradScaler`.
//!
//! A small network learns a wavy surface. The scale is made to grow every 50 steps, so that it soon
//! overflows and steps are seen to be skipped.
//!
//! ```sh
//! cargo run --release --example custom_loop
//! cargo run --release --example custom_loop -- --precision bf16
//! ```

use std::f32::consts::PI;
use std::process::ExitCode;

use burn::backend::Flex;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpError, DynamicLossScale, GradScaler, LossScaleConfig, Precision,
    clip_grad_norm,
};
use clap::Parser;

type B = AmpAutodiff<Flex>;

const EPOCHS: usize = 20;
const STEPS: usize = 32;
const BATCH: usize = 64;
const LEARNING_RATE: f64 = 5e-3;

#[derive(Parser)]
#[command(about = "Loss scaling by hand, in a training loop of one's own")]
struct Args {
    /// What to train in: auto, f32, f16 or bf16.
    #[arg(long, default_value_t = Precision::F16)]
    precision: Precision,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: [Linear<B>; 2],
    output: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            layers: [(2, 64), (64, 64)].map(|(from, to)| LinearConfig::new(from, to).init(device)),
            output: LinearConfig::new(64, 1).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self
            .layers
            .iter()
            .fold(x, |x, layer| Tanh::new().forward(layer.forward(x)));
        self.output.forward(hidden)
    }
}

fn main() -> ExitCode {
    match train(Args::parse().precision) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn train(precision: Precision) -> Result<(), AmpError> {
    let device = Default::default();
    let precision = AmpConfig::new()
        .with_precision(precision)
        .apply::<B>(&device)?;
    B::seed(&device, 42);

    let mut model = Model::<B>::new(&device);
    let mut optimizer = AdamConfig::new().init();
    // As PyTorch's `GradScaler(enabled=...)`: a disabled scaler lets the loop stay as it is.
    let scaler = GradScaler::new(match precision.scales_loss() {
        true => DynamicLossScale::new().with_growth_interval(50).into(),
        false => LossScaleConfig::Disabled,
    })?;

    println!("training in {precision}");
    println!(
        "{:>5} {:>10} {:>9} {:>7}",
        "epoch", "loss", "scale", "skipped"
    );
    for epoch in 1..=EPOCHS {
        let mut sum = 0.0;
        for _ in 0..STEPS {
            let x = Tensor::<B, 2>::random([BATCH, 2], Distribution::Uniform(-1.0, 1.0), &device);
            let waves = (x.clone() * PI).sin();
            let y = waves.clone().narrow(1, 0, 1) * waves.narrow(1, 1, 1);
            let loss = MseLoss::new().forward(model.forward(x), y, Reduction::Mean);
            sum += loss.clone().into_scalar().elem::<f64>();

            let grads = scaler.scale(loss).backward();
            let mut grads = GradientsParams::from_grads(grads, &model);
            // Clipping is of the true gradients; a loop that does not clip leaves unscaling to
            // `step`.
            scaler.unscale(&model, &mut grads)?;
            clip_grad_norm(&model, &mut grads, 1.0)?;
            // A step that overflowed gives the model back as it was, and says so.
            let stepped;
            (model, stepped) = scaler.step(&mut optimizer, LEARNING_RATE, model, grads);
            stepped?;
            scaler.update()?;
        }
        println!(
            "{epoch:>5} {:>10.6} {:>9} {:>7}",
            sum / STEPS as f64,
            scaler.loss_scale(),
            scaler.skipped_steps()
        );
    }
    Ok(())
}
