//! A whole program in one file, to copy: a small network learns which points of a square are in a
//! circle, in f16.
//!
//! ```sh
//! cargo run --release --example minimal
//! ```

use burn::backend::Flex;
use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::{Distribution, activation::relu};
use burn_amp::{AmpAutodiff, AmpConfig, AmpError, AmpReport, Precision};

type MyBackend = AmpAutodiff<Flex>; // was: Autodiff<Flex>

#[derive(Module, Debug)]
struct Model<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Model<B> {
    /// The logits of outside and inside, `[count, 2]`.
    fn forward(&self, points: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(relu(self.hidden.forward(points)))
    }
}

/// Random points, `[count, 2]`, and whether each is in the circle, `[count]`.
fn points<B: Backend>(count: usize, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let points = Tensor::random([count, 2], Distribution::Uniform(-1.0, 1.0), device);
    let squares: Tensor<B, 2> = points.clone() * points.clone();
    let inside = squares.sum_dim(1).lower_elem(0.5).int();
    (points, inside.squeeze_dim(1))
}

fn main() -> Result<(), AmpError> {
    let device = Default::default();
    MyBackend::seed(&device, 42);
    // Flex emulates half precision, so its default is FP32. A GPU's default needs no configuration.
    AmpConfig::new()
        .with_precision(Precision::F16)
        .apply::<MyBackend>(&device)?;

    let mut model = Model {
        hidden: LinearConfig::new(2, 64).init::<MyBackend>(&device),
        output: LinearConfig::new(64, 2).init(&device),
    };
    let mut optimizer = AdamConfig::new().init();
    for step in 1..=500 {
        let (points, inside) = points(256, &device);
        let loss = CrossEntropyLossConfig::new()
            .init(&device)
            .forward(model.forward(points), inside);
        if step % 100 == 0 {
            println!("step {step}: loss {:.4}", loss.clone().into_scalar());
        }
        // FP32 gradients without the scale, or none if one overflowed: the step is then skipped.
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }

    let (points, inside) = points(10_000, &device);
    let predicted = model.valid().forward(points).argmax(1).squeeze_dim(1);
    let correct: f32 = predicted.equal(inside).float().mean().into_scalar();
    println!("accuracy {:.2} %\n", 100.0 * correct);
    println!("{}", AmpReport::of::<MyBackend>(&device)?);
    Ok(())
}
