//! The state of a recurrence with a long memory: what half rounds of it must not add up.

mod common;

use std::sync::{Mutex, MutexGuard};

use burn::backend::Flex;
use burn::module::Param;
use burn::nn::gru::GruConfig;
use burn::nn::{GateController, LstmConfig, LstmState};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};

use common::mlp::{data, values};
use common::{HALVES, activation, relative_error, roundoff};

const BATCH: usize = 16;
const STEPS: usize = 128;
const WIDTH: usize = 8;

/// The most roundoffs that a state may be off by. Where each step rounds the state, it is off by 10 to 12 in bf16.
const STATE: f64 = 1.2;

/// The most roundoffs that a gradient may be off by: the operand of a gate, which is about 5, is rounded to half.
const GRADIENT: f64 = 8.0;

/// A gate that is nearly open, so that the state is a mean over many steps.
fn nearly_open<B: Backend>(gate: &mut GateController<B>) {
    let bias = Tensor::full([WIDTH], 5.0, &Default::default());
    gate.input_transform.bias = Some(Param::from_tensor(bias));
}

/// The last state of a recurrence over this input.
type Recurrence<B> = fn(Tensor<B, 3>) -> Tensor<B, 2>;

fn gru_of<B: Backend>(input: Tensor<B, 3>, bias: bool, config: GruConfig) -> Tensor<B, 2> {
    let mut gru = config.init::<B>(&Default::default());
    nearly_open(&mut gru.update_gate);
    // Without a bias elsewhere, the candidates are half.
    if !bias {
        for gate in [&mut gru.reset_gate, &mut gru.new_gate] {
            gate.input_transform.bias = None;
            gate.hidden_transform.bias = None;
        }
    }
    let last = gru
        .forward(input, None)
        .slice([0..BATCH, STEPS - 1..STEPS, 0..WIDTH]);
    last.squeeze_dim(1)
}

fn gru<B: Backend>(input: Tensor<B, 3>) -> Tensor<B, 2> {
    gru_of(input, true, GruConfig::new(WIDTH, WIDTH, true))
}

fn gru_with_half_candidates<B: Backend>(input: Tensor<B, 3>) -> Tensor<B, 2> {
    gru_of(
        input,
        false,
        GruConfig::new(WIDTH, WIDTH, true).with_reset_after(false),
    )
}

fn lstm_of<B: Backend>(
    input: Tensor<B, 3>,
    state: Option<LstmState<B, 2>>,
    clip: Option<f64>,
) -> Tensor<B, 2> {
    let config = LstmConfig::new(WIDTH, WIDTH, true).with_clip(clip);
    let mut lstm = config.init::<B>(&Default::default());
    nearly_open(&mut lstm.forget_gate);
    lstm.forward(input, state).1.cell
}

fn lstm<B: Backend>(input: Tensor<B, 3>) -> Tensor<B, 2> {
    lstm_of(input, None, None)
}

fn clipped_lstm<B: Backend>(input: Tensor<B, 3>) -> Tensor<B, 2> {
    lstm_of(input, None, Some(50.0))
}

/// Written by hand, with the state in another place and between steps of a mask.
fn by_hand<B: Backend>(input: Tensor<B, 3>) -> Tensor<B, 2> {
    let device = input.device();
    let weight = |seed| Param::from_tensor(values::<B, 2>([WIDTH, WIDTH], seed)).val();
    let (gates, candidates) = (weight(2), weight(3));
    let bias = Param::from_tensor(Tensor::<B, 2>::full([1, WIDTH], 5.0, &device)).val();
    let mut state: Tensor<B, 3> = Tensor::zeros([1, BATCH, WIDTH], &device);
    for step in input.iter_dim(1) {
        let step: Tensor<B, 2> = step.squeeze_dim(1);
        let gate = sigmoid(step.clone().matmul(gates.clone()) + bias.clone()).unsqueeze_dim(0);
        let candidate = step.matmul(candidates.clone()).tanh().unsqueeze_dim(0);
        let next = state.clone() * gate.clone() + (-gate + 1.0) * candidate;
        let done = next.clone().lower_elem(-2.0);
        state = next.mask_where(done, state);
    }
    state.squeeze_dim(0)
}

macro_rules! recurrences {
    ($backend:ty) => {
        [
            ("a GRU", gru as Recurrence<$backend>),
            ("a GRU with half candidates", gru_with_half_candidates),
            ("an LSTM", lstm),
            ("a clipped LSTM", clipped_lstm),
            ("by hand", by_hand),
        ]
    };
}

/// The error of half in roundoffs, where it is more than this.
fn wrong(name: &str, most: f64, run: impl Fn() -> Vec<f32>) -> Vec<String> {
    let exact = with_precision(Precision::F32, &run);
    let errors = HALVES.map(|precision| {
        let found = with_precision(precision, &run);
        let error = relative_error(&found, &exact) / roundoff(precision);
        (error > most || error.is_nan())
            .then(|| format!("{name} in {precision}: {error:.2} roundoffs"))
    });
    errors.into_iter().flatten().collect()
}

/// The seed is that of all threads, and a layer is initialized where it is used.
fn seeded<B: Backend>() -> MutexGuard<'static, ()> {
    static SEED: Mutex<()> = Mutex::new(());
    let alone = SEED.lock().unwrap();
    B::seed(&Default::default(), 1);
    alone
}

fn last<B: Backend>(recurrence: Recurrence<B>) -> Vec<f32> {
    let _alone = seeded::<B>();
    data(recurrence(values([BATCH, STEPS, WIDTH], 1)))
}

/// The gradient of the first steps, which every later one multiplies.
fn gradient<B: AutodiffBackend>(recurrence: Recurrence<B>) -> Vec<f32> {
    let _alone = seeded::<B>();
    let weights = values::<B, 2>([BATCH, WIDTH], 4) / 1e4;
    let input = values::<B, 3>([BATCH, STEPS, WIDTH], 1).require_grad();
    let last = recurrence(input.clone());
    let grads = (last * weights).sum().backward();
    let grad = input.grad(&grads).expect("no step is skipped");
    data(grad.slice([0..BATCH, 0..8, 0..WIDTH]))
}

#[test]
fn roundings_of_states_do_not_add_up() {
    let trained = recurrences!(AmpAutodiff<Flex>);
    let trained =
        trained.map(|(name, of)| wrong(&format!("{name} in training"), STATE, || last(of)));
    let inferred = recurrences!(Amp<Flex>).map(|(name, of)| wrong(name, STATE, || last(of)));
    let wrong: Vec<_> = trained.into_iter().chain(inferred).flatten().collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn roundings_of_gradients_do_not_add_up() {
    let wrong: Vec<_> = recurrences!(AmpAutodiff<Flex>)
        .into_iter()
        .flat_map(|(name, of)| wrong(name, GRADIENT, || gradient(of)))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A mean that forgets, of 1 and then of 1.25. It begins with the first value, as it is or in FP32.
fn mean_from<B: Backend>(begin: fn(Tensor<B, 2>) -> Tensor<B, 2>) -> f64 {
    let x = |value: f32| activation(Tensor::<B, 2>::from_data([[value]], &Default::default()));
    let mean = (1..500).fold(begin(x(1.0)), |mean, _| mean * 0.99 + x(1.25) * 0.01);
    f64::from(data(mean)[0])
}

/// A state that begins in half stays half: a program that needs it begins with `cast(DType::F32)`.
#[test]
fn a_mean_that_begins_in_fp32_is_right_after_many_steps() {
    let _alone = seeded::<Amp<Flex>>();
    let exact = 1.25 - 0.25 * 0.99f64.powi(499);
    for precision in HALVES {
        with_precision(precision, || {
            let wide = mean_from::<AmpAutodiff<Flex>>(|x| x.cast(DType::F32));
            assert!(
                (wide / exact - 1.0).abs() < roundoff(precision),
                "{precision}: {wide}"
            );
        });
    }
}

/// The last row of a table whose rows are computed one from another, as those of a path's costs. The table begins with zeros,
/// or with minus infinity.
fn table_of<B: Backend>(begin: f64) -> Vec<f32> {
    const ROWS: usize = 300;
    let device = Default::default();
    let steps = Tensor::<B, 2>::from_data([[0.5, -200.0]], &device);
    let steps = activation(steps.repeat_dim(0, ROWS));
    let row = |table: &Tensor<B, 2>, i: usize| table.clone().slice([i..i + 1, 0..2]);
    let table = Tensor::<B, 2>::full([ROWS, 2], begin, &device);
    let mut table = table.slice_assign([0..1, 0..2], row(&steps, 0));
    for i in 1..ROWS {
        let next = row(&table, i - 1) + row(&steps, i);
        table = table.slice_assign([i..i + 1, 0..2], next);
    }
    data(row(&table, ROWS - 1))
}

#[test]
fn a_table_that_begins_with_zeros_is_right_in_its_last_row() {
    let _alone = seeded::<Amp<Flex>>();
    for precision in HALVES {
        for table in [table_of::<Amp<Flex>>, table_of::<AmpAutodiff<Flex>>] {
            for begin in [0.0, f64::NEG_INFINITY] {
                let found = with_precision(precision, || table(begin));
                assert_eq!(found, [150.0, -60_000.0], "{precision}, {begin}");
            }
        }
    }
}

/// The last cell of an LSTM whose state is data.
fn from_data<B: Backend>() -> Vec<f32> {
    const STEPS: usize = 256;
    let _alone = seeded::<B>();
    let zeros = TensorData::zeros::<f32, _>([BATCH, WIDTH]);
    let zeros = Tensor::<B, 2>::from_data(zeros, &Default::default());
    let state = LstmState::new(zeros.clone(), zeros);
    let input = values([BATCH, STEPS, WIDTH], 1);
    data(lstm_of(input, Some(state), None))
}

#[test]
fn a_state_from_data_is_right_after_many_steps() {
    for run in [from_data::<AmpAutodiff<Flex>>, from_data::<Amp<Flex>>] {
        let wrong = wrong("a state from data", 1.0, run);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

/// The gradient of the forget gate's operand.
fn gate_gradient<B: AutodiffBackend>(
    precision: Precision,
    loss: fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 1>,
) -> Vec<f32> {
    with_precision(precision, || {
        let ones = Param::from_tensor(Tensor::<B, 2>::ones([1, WIDTH], &Default::default())).val();
        let half = |factor: f32| {
            let x = values::<B, 2>([BATCH, 1], 1) * factor;
            x.matmul(ones.clone())
        };
        let gate = half(1.0).detach().require_grad();
        let grads = loss(sigmoid(gate.clone()), half(1.0)).backward();
        data(gate.grad(&grads).expect("no step is skipped"))
    })
}

/// A state of 1e5, which f16 does not hold.
fn large<B: Backend>(gate: Tensor<B, 2>, x: Tensor<B, 2>) -> Tensor<B, 1> {
    let mut state = Tensor::zeros(x.dims(), &x.device());
    for _ in 0..4 {
        state = state * gate.clone() + x.clone().abs() * 1e5;
    }
    state.mean() / 1e5
}

/// The normalized state of an exponential gate, whose normalizer may be small.
fn normalized<B: Backend>(gate: Tensor<B, 2>, x: Tensor<B, 2>) -> Tensor<B, 1> {
    let zeros = || Tensor::zeros(x.dims(), &x.device());
    let (mut state, mut normalizer) = (zeros(), zeros());
    for step in 0..8 {
        let input = (x.clone() - 20.0).exp();
        state = state * gate.clone() + input.clone() * (x.clone() + step as f32);
        normalizer = normalizer * gate.clone() + input;
    }
    (state / normalizer).mean()
}

#[test]
fn a_state_of_any_size_has_its_gradient() {
    let exact = |loss| gate_gradient::<AmpAutodiff<Flex>>(Precision::F32, loss);
    for (name, loss, precision) in [
        ("large", large as fn(_, _) -> _, Precision::Bf16),
        ("large", large, Precision::F16),
        ("normalized", normalized, Precision::Bf16),
        ("normalized", normalized, Precision::F16),
    ] {
        let found = gate_gradient(precision, loss);
        let error = relative_error(&found, &exact(loss)) / roundoff(precision);
        assert!(
            error < GRADIENT,
            "{name} in {precision}: {error:.2} roundoffs"
        );
    }
}
