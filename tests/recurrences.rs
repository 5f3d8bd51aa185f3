//! The state of a recurrence with a long memory: what half rounds of it must not add up.

mod common;

use burn::backend::Flex;
use burn::module::Param;
use burn::nn::gru::GruConfig;
use burn::nn::{GateController, LstmConfig};
use burn::prelude::*;
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};

use common::mlp::{data, values};
use common::{HALVES, roundoff};

const WIDTH: usize = 8;
const STEPS: usize = 256;
const BATCH: usize = 16;

/// A gate that is nearly open, so that the state is a mean over many steps.
fn nearly_open<B: Backend>(gate: &mut GateController<B>, by: f32) {
    let bias = Tensor::full([WIDTH], by, &Default::default());
    gate.input_transform.bias = Some(Param::from_tensor(bias));
}

fn gru<B: Backend>() -> Vec<f32> {
    let device = Default::default();
    B::seed(&device, 1);
    let mut gru = GruConfig::new(WIDTH, WIDTH, true).init::<B>(&device);
    nearly_open(&mut gru.update_gate, 5.0);
    let outputs = gru.forward(values([BATCH, STEPS, WIDTH], 1), None);
    data(outputs.slice([0..BATCH, STEPS - 1..STEPS, 0..WIDTH]))
}

fn lstm<B: Backend>() -> Vec<f32> {
    let device = Default::default();
    B::seed(&device, 1);
    let mut lstm = LstmConfig::new(WIDTH, WIDTH, true).init::<B>(&device);
    nearly_open(&mut lstm.forget_gate, 5.0);
    let (_, state) = lstm.forward(values([BATCH, STEPS, WIDTH], 1), None);
    data(state.cell)
}

fn length(values: &[f32]) -> f64 {
    let squares = values.iter().map(|x| f64::from(*x).powi(2));
    squares.sum::<f64>().sqrt()
}

#[test]
fn errors_do_not_add_up() {
    let mut wrong = Vec::new();
    for (name, run) in [
        ("a GRU in training", gru::<AmpAutodiff<Flex>> as fn() -> _),
        ("a GRU", gru::<Amp<Flex>>),
        ("an LSTM in training", lstm::<AmpAutodiff<Flex>>),
        ("an LSTM", lstm::<Amp<Flex>>),
    ] {
        let exact = with_precision(Precision::F32, run);
        for precision in HALVES {
            let found = with_precision(precision, run);
            let errors: Vec<_> = found.iter().zip(&exact).map(|(a, b)| a - b).collect();
            let error = length(&errors) / length(&exact) / roundoff(precision);
            if error > 1.0 {
                wrong.push(format!("{name} in {precision}: {error:.2} roundoffs"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
