//! Operations with kernels and gradients of your own, in mixed precision.
//!
//! Burn's way to a kernel is a trait over backends. `ops.rs` has one with two operations: a layer
//! with a matrix product, which is for half precision, and a loss with an exponential, which is
//! not. Each of its implementations is what it would be without mixed precision; that for `Amp<B>`
//! says of which class an operation is, and calls the backend's.
//!
//! The same generic function then trains with them on `Autodiff<Flex>`, and on `AmpAutodiff<Flex>`
//! in f16 and bf16.
//!
//! ```sh
//! cargo run --release --example custom_op
//! ```

mod ops;

use std::f32::consts::PI;

use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpAutodiff, AmpConfig, AmpError, Precision};

use ops::{MyOps, log_cosh, tanh_linear};

const STEPS: usize = 600;
const BATCH: usize = 128;
const WIDTH: usize = 64;
const LEARNING_RATE: f64 = 5e-3;

/// Learns the product of two sines.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    layers: [Param<Tensor<B, 2>>; 2],
    output: Linear<B>,
}

impl<B: MyOps> Model<B> {
    fn new(device: &B::Device) -> Self {
        let weight = |from| {
            let uniform = Initializer::KaimingUniform {
                gain: 1.0,
                fan_out_only: false,
            };
            uniform.init_with([from, WIDTH], Some(from), Some(WIDTH), device)
        };
        Self {
            // The third input is 1, for there is no bias.
            layers: [3, WIDTH].map(weight),
            output: LinearConfig::new(WIDTH, 1).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self
            .layers
            .iter()
            .fold(x, |x, weight| tanh_linear(x, weight.val()));
        self.output.forward(hidden)
    }
}

/// The mean loss of the last 50 steps.
fn train<B: MyOps + AutodiffBackend>(device: &B::Device) -> f64 {
    B::seed(device, 42);
    let mut model = Model::<B>::new(device);
    let mut optimizer = AdamConfig::new().init();
    let mut last = Vec::new();
    for step in 0..STEPS {
        let x = Tensor::<B, 2>::random([BATCH, 2], Distribution::Uniform(-1.0, 1.0), device);
        let waves = (x.clone() * PI).sin();
        let y = waves.clone().narrow(1, 0, 1) * waves.narrow(1, 1, 1);
        let x = Tensor::cat(vec![x, Tensor::ones([BATCH, 1], device)], 1);

        let loss = log_cosh(model.forward(x) - y).mean();
        if step >= STEPS - 50 {
            last.push(loss.clone().into_scalar().elem::<f64>());
        }
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, grads);
    }
    last.iter().sum::<f64>() / last.len() as f64
}

fn main() -> Result<(), AmpError> {
    type B = AmpAutodiff<Flex>;

    let device = Default::default();
    println!("precision    loss");
    println!(
        "{:<9} {:.5}",
        Precision::F32,
        train::<Autodiff<Flex>>(&device)
    );
    for precision in [Precision::F16, Precision::Bf16] {
        AmpConfig::new()
            .with_precision(precision)
            .apply::<B>(&device)?;
        println!("{precision:<9} {:.5}", train::<B>(&device));
    }
    Ok(())
}
