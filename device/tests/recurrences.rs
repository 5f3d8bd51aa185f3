//! The state of a recurrence with a long memory: what half rounds of it must not add up.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::module::Param;
use burn::nn::gru::GruConfig;
use burn::nn::{GateController, LstmConfig};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{Precision, flex};

use client::{HALVES, read, relative_error, roundoff, tensor};

const SHAPE: [usize; 3] = [16, 128, 8];
const BATCH: usize = SHAPE[0];
const STEPS: usize = SHAPE[1];
const WIDTH: usize = SHAPE[2];

/// The most roundoffs that a state may be off by. Where each step rounds the state, it is off by 10 to 12 in bf16.
const STATE: f32 = 2.0;

/// The most roundoffs that a gradient may be off by: the operand of a gate, which is about 5, is rounded to half.
const GRADIENT: f32 = 8.0;

/// A gate that is nearly open, so that the state is a mean over many steps.
fn nearly_open(gate: &mut GateController, device: &Device) {
    let bias = Tensor::full([WIDTH], 5.0, device);
    gate.input_transform.bias = Some(Param::from_tensor(bias));
}

/// The last outputs of a GRU.
fn gru(input: Tensor<3>) -> Tensor<2> {
    let device = input.device();
    let mut gru = GruConfig::new(WIDTH, WIDTH, false).init(&device);
    nearly_open(&mut gru.update_gate, &device);
    let outputs = gru.forward(input, None);
    outputs
        .slice([0..BATCH, STEPS - 1..STEPS, 0..WIDTH])
        .squeeze_dim(1)
}

/// The last cell of an LSTM.
fn lstm(input: Tensor<3>) -> Tensor<2> {
    let device = input.device();
    let mut lstm = LstmConfig::new(WIDTH, WIDTH, true)
        .with_clip(Some(50.0))
        .init(&device);
    if let Some(gate) = &mut lstm.forget_gate {
        nearly_open(gate, &device);
    }
    lstm.forward(input, None).1.cell
}

fn last(recurrence: fn(Tensor<3>) -> Tensor<2>, device: &Device) -> Vec<f32> {
    device.seed(1);
    read(recurrence(tensor(SHAPE, 1, device)))
}

/// The gradient of the first steps, which every later one multiplies.
fn gradient(recurrence: fn(Tensor<3>) -> Tensor<2>, device: &Device) -> Vec<f32> {
    device.seed(1);
    let input = tensor(SHAPE, 1, device).require_grad();
    let last = recurrence(input.clone());
    let grads = (last * tensor([BATCH, WIDTH], 2, device)).sum().backward();
    let grad = input.grad(&grads).expect("a gradient");
    read(grad.slice([0..BATCH, 0..8, 0..WIDTH]))
}

/// The error of half in roundoffs, where it is more than this.
fn wrong(name: &str, most: f32, trains: bool, run: impl Fn(&Device) -> Vec<f32>) -> Vec<String> {
    let on = |precision| {
        let device = flex(precision).unwrap();
        run(&if trains { device.autodiff() } else { device })
    };
    let exact = on(Precision::F32);
    let errors = HALVES.map(|precision| {
        let error = relative_error(&on(precision), &exact) / roundoff(precision);
        (error > most || error.is_nan())
            .then(|| format!("{name} in {precision}: {error:.2} roundoffs"))
    });
    errors.into_iter().flatten().collect()
}

/// One test: the seed is that of all threads.
#[test]
fn roundings_do_not_add_up() {
    let recurrences = [("a GRU", gru as fn(_) -> _), ("an LSTM", lstm)];
    let wrong = recurrences.into_iter().flat_map(|(name, of)| {
        let inferred = wrong(name, STATE, false, |device| last(of, device));
        let trained = wrong(&format!("{name} in training"), STATE, true, |device| {
            last(of, device)
        });
        let gradients = wrong(&format!("gradients of {name}"), GRADIENT, true, |device| {
            gradient(of, device)
        });
        [inferred, trained, gradients].concat()
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
