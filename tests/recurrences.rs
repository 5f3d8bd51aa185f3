//! The state of a recurrence with a long memory: what half rounds of it adds up, and FP32 does not.

mod common;

use burn::backend::Flex;
use burn::module::Param;
use burn::nn::{LstmConfig, LstmState};
use burn::prelude::*;
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};

use common::mlp::{data, values};
use common::{HALVES, relative_error, roundoff};

const SHAPE: [usize; 3] = [16, 256, 8];

/// The last cell of an LSTM that forgets little, so that the cell is a sum over many steps.
fn cell<B: Backend>(from_data: bool) -> Vec<f32> {
    let device = Default::default();
    B::seed(&device, 1);
    let [batch, _, width] = SHAPE;
    let mut lstm = LstmConfig::new(width, width, true).init::<B>(&device);
    let bias = Tensor::full([width], 5.0, &device);
    lstm.forget_gate.input_transform.bias = Some(Param::from_tensor(bias));
    let zeros = TensorData::zeros::<f32, _>([batch, width]);
    let zeros = Tensor::from_data(zeros, &device);
    let state = from_data.then(|| LstmState::new(zeros.clone(), zeros));
    data(lstm.forward(values(SHAPE, 1), state).1.cell)
}

/// The error in roundoffs.
fn error(precision: Precision, run: impl Fn() -> Vec<f32>) -> f64 {
    let [found, exact] =
        [precision, Precision::F32].map(|precision| with_precision(precision, &run));
    relative_error(&found, &exact) / roundoff(precision)
}

#[test]
fn a_state_from_data_is_right_after_many_steps() {
    for precision in HALVES {
        for run in [cell::<AmpAutodiff<Flex>>, cell::<Amp<Flex>>] {
            let from_data = error(precision, || run(true));
            assert!(from_data < 1.0, "{precision}: {from_data:.2}");
            // One from zeros is half.
            let from_zeros = error(precision, || run(false));
            assert!(from_zeros > 5.0, "{precision}: {from_zeros:.2}");
        }
    }
}
