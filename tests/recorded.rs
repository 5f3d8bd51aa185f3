//! Gradients in half precision against finite differences of plain Burn in FP64, and the dtypes
//! that tensors take on the way.

mod common;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::module::{Param, ParamId, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::norm::{
    BatchNorm, BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNorm, LayerNormConfig,
    RmsNormConfig,
};
use burn::nn::{DropoutConfig, GruConfig, Linear, LinearConfig, LstmConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{attention, max_pool2d};
use burn::tensor::ops::{AttentionModuleOptions, FloatTensor, FloatTensorOps};
use burn::tensor::{DType, Distribution, TensorMetadata, TensorPrimitive, activation};
use burn_amp::{Amp, AmpAutodiff, Precision, full_precision, with_precision};

use common::mlp::{in_scope, numbers, scaler};
use common::{HALVES, activation, roundoff};

/// Runs on the backend that keeps intermediates and on the one that recomputes them.
macro_rules! on_both {
    ($run:ident $(::<$($f:ident),+>)? ($($arg:expr),*)) => {
        [
            ("kept", $run::<$($($f,)+)? AmpAutodiff<Flex, NoCheckpointing>>($($arg),*)),
            ("recomputed", $run::<$($($f,)+)? AmpAutodiff<Flex, BalancedCheckpointing>>($($arg),*)),
        ]
    };
}

/// The input of a function.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Feed {
    /// The FP32 leaf itself.
    Leaf,
    /// The leaf times the identity: half, and exactly the leaf's values.
    Half,
}

/// Makes the inputs of a function, equal on every backend and exact in both halves, and records whose
/// gradients are wanted.
struct Lab<B: Backend> {
    device: B::Device,
    dtype: DType,
    feed: Feed,
    /// An element, counted over all leaves, and what is added to it.
    moved: Option<(usize, f64)>,
    elements: usize,
    draws: u64,
    leaves: Vec<FloatTensor<B>>,
    /// Whether inference is the same function.
    infers: bool,
}

impl<B: Backend> Lab<B> {
    fn new(dtype: DType, feed: Feed) -> Self {
        Self {
            device: Default::default(),
            dtype,
            feed,
            moved: None,
            elements: 0,
            draws: 0,
            leaves: Vec::new(),
            infers: true,
        }
    }

    /// A differentiable tensor of odd multiples of 1/32 between -4 and 4, on this run's feed.
    fn input<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        self.input_of(shape, |x| x)
    }

    /// Like `input`, with these values.
    fn input_of<const D: usize>(
        &mut self,
        shape: [usize; D],
        value: impl Fn(f64) -> f64,
    ) -> Tensor<B, D> {
        let leaf = self.leaf_of(shape, value);
        self.fed(leaf)
    }

    /// A differentiable tensor, FP32 on either feed, as a parameter is.
    fn leaf<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        self.leaf_of(shape, |x| x)
    }

    /// Like `leaf`, with these values.
    fn leaf_of<const D: usize>(
        &mut self,
        shape: [usize; D],
        value: impl Fn(f64) -> f64,
    ) -> Tensor<B, D> {
        let mut values = self.draw(shape.iter().product(), value);
        if let Some((element, by)) = self.moved
            && let Some(value) = element
                .checked_sub(self.elements)
                .and_then(|i| values.get_mut(i))
        {
            *value += by;
        }
        self.elements += values.len();
        let leaf = self.tensor(values, shape).require_grad();
        self.leaves.push(leaf.clone().into_primitive().tensor());
        leaf
    }

    /// A tensor whose gradient is not wanted.
    fn constant<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        let values = self.draw(shape.iter().product(), |x| x);
        self.tensor(values, shape)
    }

    /// A linear layer whose parameters are leaves, small enough to keep activations near one.
    fn linear(&mut self, from: usize, to: usize) -> Linear<B> {
        let mut linear = LinearConfig::new(from, to).init(&self.device);
        linear.weight = param(self.leaf_of([from, to], |x| x / 8.0));
        linear.bias = Some(param(self.leaf_of([to], |x| x / 4.0)));
        linear
    }

    /// A convolution without bias, which a norm behind it would cancel.
    fn conv(&mut self, from: usize, to: usize) -> Conv2d<B> {
        let config = Conv2dConfig::new([from, to], [3, 3]).with_bias(false);
        let mut conv = config.init(&self.device);
        conv.weight = param(self.leaf_of([to, from, 3, 3], |x| x / 8.0));
        conv
    }

    fn layer_norm(&mut self, features: usize) -> LayerNorm<B> {
        let mut norm = LayerNormConfig::new(features).init(&self.device);
        norm.gamma = param(self.leaf([features]));
        norm.beta = Some(param(self.leaf([features])));
        norm
    }

    /// A batch norm in training, which is another function than in inference.
    fn batch_norm(&mut self, channels: usize) -> BatchNorm<B> {
        let [gamma, beta] = [(); 2].map(|_| self.leaf([channels]));
        self.batch_norm_of(gamma, beta)
    }

    fn batch_norm_of(&mut self, gamma: Tensor<B, 1>, beta: Tensor<B, 1>) -> BatchNorm<B> {
        self.infers = false;
        let [channels] = gamma.dims();
        let mut norm = BatchNormConfig::new(channels).init(&self.device);
        (norm.gamma, norm.beta) = (param(gamma), param(beta));
        norm.running_mean = RunningState::new(self.constant([channels]));
        norm.running_var = RunningState::new(self.constant([channels]));
        norm
    }

    /// Draws from here on numbers that keep this function clear of its kinks, as where a ReLU's
    /// operand is zero: no rounding moves a value to the other side.
    fn clear_of_kinks(&mut self, draws: u64) {
        self.draws = draws;
    }

    fn fed<const D: usize>(&self, leaf: Tensor<B, D>) -> Tensor<B, D> {
        if self.feed == Feed::Leaf {
            return leaf;
        }
        let identity = Tensor::<B, 2>::eye(leaf.dims()[D - 1], &self.device);
        let half = leaf.matmul(identity.set_require_grad(false).unsqueeze());
        assert_ne!(half.dtype(), DType::F32);
        half
    }

    fn draw(&mut self, count: usize, value: impl Fn(f64) -> f64) -> Vec<f64> {
        self.draws += 1;
        let values: Vec<f64> = drawn(count, self.draws).map(value).collect();
        let exact = |x: &f64| (*x as f32).to_bits() & 0xffff == 0;
        assert!(values.iter().all(exact), "not exact in bf16: {values:?}");
        values
    }

    fn tensor<const D: usize>(&self, values: Vec<f64>, shape: [usize; D]) -> Tensor<B, D> {
        Tensor::from_data(TensorData::new(values, shape), (&self.device, self.dtype))
    }
}

impl<B: AutodiffBackend> Lab<B> {
    /// The gradient of each leaf.
    fn gradients(&self, grads: &B::Gradients) -> Vec<Vec<f64>> {
        let gradient = |leaf| {
            let grad = B::grad(leaf, grads).expect("a gradient");
            assert_eq!((grad.dtype(), grad.shape()), (DType::F32, leaf.shape()));
            let flat = Shape::new([grad.shape().num_elements()]);
            let grad = B::InnerBackend::float_reshape(grad, flat);
            let grad = TensorPrimitive::Float(grad);
            values(Tensor::<B::InnerBackend, 1>::from_primitive(grad))
        };
        self.leaves.iter().map(gradient).collect()
    }
}

/// Odd multiples of 1/32 between -4 and 4.
fn drawn(count: usize, seed: u64) -> impl Iterator<Item = f64> {
    let odd = |x: f32| f64::from((x * 64.0).floor() * 2.0 + 1.0);
    numbers(count, seed).into_iter().map(move |x| odd(x) / 32.0)
}

fn param<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Param<Tensor<B, D>> {
    Param::initialized(ParamId::new(), tensor)
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// The weights of an output's elements in the loss.
fn weights(count: usize) -> Vec<f64> {
    drawn(count, 1000).map(|x| x / 2.0).collect()
}

/// A function of the lab's tensors.
trait Function {
    fn call<B: Backend>(lab: &mut Lab<B>) -> Tensor<B, 1>;
}

/// Its values and the gradient of each leaf.
fn trained<F: Function, B: AutodiffBackend>(feed: Feed) -> Vec<Vec<f64>> {
    let mut lab = Lab::<B>::new(DType::F32, feed);
    let out = F::call(&mut lab);
    let weights = lab.tensor(weights(out.dims()[0]), out.dims());
    let grads = (out.clone() * weights).sum().backward();
    let values = [values(out)].into_iter();
    values.chain(lab.gradients(&grads)).collect()
}

/// The same of plain Burn in FP64, by finite differences.
fn expected<F: Function>() -> Vec<Vec<f64>> {
    const STEP: f64 = 1e-5;
    type Plain = Autodiff<Flex>;
    let run = |moved| {
        let mut lab = Lab::<Plain>::new(DType::F64, Feed::Leaf);
        lab.moved = moved;
        let out = F::call(&mut lab);
        assert_eq!(out.dtype(), DType::F64);
        (values(out), lab.leaves)
    };
    let (out, leaves) = run(None);
    let weights = weights(out.len());
    let loss = |moved| -> f64 {
        let (out, _) = run(Some(moved));
        out.iter().zip(&weights).map(|(y, w)| y * w).sum()
    };
    let mut elements = 0..;
    let slopes = leaves.iter().map(|leaf| {
        let count = leaf.shape().num_elements();
        let slope = |i| (loss((i, STEP)) - loss((i, -STEP))) / (2.0 * STEP);
        elements.by_ref().take(count).map(slope).collect()
    });
    let slopes: Vec<_> = slopes.collect();
    std::iter::once(out).chain(slopes).collect()
}

/// Its values in inference, where that is the same function.
fn inferred<F: Function>(feed: Feed) -> Option<Vec<f64>> {
    let mut lab = Lab::<Amp<Flex>>::new(DType::F32, feed);
    let out = F::call(&mut lab);
    lab.infers.then(|| values(out))
}

/// In half, with a loss scale that nothing here overflows at.
fn in_training<T>(precision: Precision, run: impl FnOnce() -> T) -> T {
    in_scope(precision, &scaler(256.0), run)
}

/// Values and gradients are within so many roundings of the largest of each, on FP32 inputs and on
/// half ones, and values are those of inference.
fn check<F: Function>(roundings: [f64; 2]) {
    let expected = expected::<F>();
    for precision in HALVES {
        for (feed, most) in [Feed::Leaf, Feed::Half].into_iter().zip(roundings) {
            let inferred = with_precision(precision, || inferred::<F>(feed));
            for (how, actual) in in_training(precision, || on_both!(trained::<F>(feed))) {
                assert_eq!(actual.len(), expected.len());
                let what = |i: usize| format!("{i}, {feed:?}, {how} in {precision}");
                for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                    assert_within(&what(i), precision, actual, expected, most);
                }
                if let Some(inferred) = &inferred {
                    assert_within(&what(0), precision, inferred, &actual[0], most);
                }
            }
        }
    }
}

#[track_caller]
fn assert_within(
    what: &str,
    precision: Precision,
    actual: &[f64],
    expected: &[f64],
    roundings: f64,
) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0, |most: f64, e| most.max(e.abs()));
    let errors = actual.iter().zip(expected).map(|(a, e)| (a - e).abs());
    let error = errors.fold(
        0.0,
        |most: f64, e| if e > most || e.is_nan() { e } else { most },
    );
    let within = error / largest / roundoff(precision);
    assert!(
        within <= roundings,
        "{what}: {within:.2} roundings instead of {roundings}\n\
         actual   {actual:?}\nexpected {expected:?}"
    );
}

/// Functions by name, each with its tolerances in roundings on FP32 inputs and on half ones: about 1.5
/// times Flex's errors. One rounding is 1 at the most.
macro_rules! functions {
    ($($name:ident($leaf:expr, $half:expr) |$lab:ident| $body:expr;)*) => {$(
        #[test]
        fn $name() {
            struct This;
            impl Function for This {
                fn call<B: Backend>($lab: &mut Lab<B>) -> Tensor<B, 1> {
                    $body.reshape([-1])
                }
            }
            check::<This>([$leaf, $half]);
        }
    )*};
}

/// FP32 and nothing else: some dozens of its roundings are a hundredth of one in f16.
const FP32: f64 = 0.01;

functions! {
    sum(FP32, 1.5) |lab| lab.input([3, 4, 5]).sum();
    sum_over_dim_1(FP32, 1.5) |lab| lab.input([3, 4, 5]).sum_dim(1);
    mean(FP32, 1.5) |lab| lab.input([3, 4, 5]).mean();
    mean_over_dim_0(FP32, 1.5) |lab| lab.input([3, 4, 5]).mean_dim(0);
    mean_over_dim_2(FP32, 1.5) |lab| lab.input([3, 4, 5]).mean_dim(2);
    mean_beside_what_it_is_of(FP32, 1.5) |lab| {
        let x = lab.input([3, 4, 5]);
        x.clone() * x.mean_dim(1)
    };
    softmax_over_dim_0(FP32, 2.0) |lab| activation::softmax(lab.input([3, 4, 5]), 0);
    softmax_over_dim_1(FP32, 2.0) |lab| activation::softmax(lab.input([3, 4, 5]), 1);
    softmax_over_dim_2(FP32, 2.0) |lab| activation::softmax(lab.input([3, 4, 5]), 2);
    log_softmax_over_dim_0(FP32, 1.5) |lab| activation::log_softmax(lab.input([3, 4, 5]), 0);
    log_softmax_over_dim_1(FP32, 1.5) |lab| activation::log_softmax(lab.input([3, 4, 5]), 1);
    log_softmax_over_dim_2(FP32, 1.5) |lab| activation::log_softmax(lab.input([3, 4, 5]), 2);
    softmin(FP32, 1.5) |lab| activation::softmin(lab.input([3, 4, 5]), 1);
    attention_plain(4.0, 4.0) |lab| attend(lab, None, false, Default::default());
    attention_with_mask(4.0, 4.0) |lab| {
        let mask = [[false, true, false], [false, false, true], [true, false, false]];
        attend(lab, Some(mask), false, Default::default())
    };
    attention_with_a_row_masked_throughout(4.0, 4.0) |lab| {
        let mask = [[false, true, false], [true; 3], [false; 3]];
        attend(lab, Some(mask), false, Default::default())
    };
    attention_causal(4.0, 4.0) |lab| {
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        attend(lab, None, false, options)
    };
    attention_with_bias(4.0, 4.0) |lab| attend(lab, None, true, Default::default());
    attention_with_softcap(4.0, 4.0) |lab| {
        let options = AttentionModuleOptions { softcap: Some(2.0), ..Default::default() };
        attend(lab, None, false, options)
    };
    layer_norm(FP32, 1.5) |lab| {
        let norm = lab.layer_norm(8);
        norm.forward(lab.input([2, 3, 8]))
    };
    layer_norm_without_beta(FP32, 1.5) |lab| {
        let mut norm = LayerNormConfig::new(8).with_bias(false).init(&lab.device);
        norm.gamma = param(lab.leaf([8]));
        norm.forward(lab.input([4, 8]))
    };
    layer_norm_with_frozen_parameters(FP32, 1.5) |lab| {
        let mut norm = LayerNormConfig::new(8).init(&lab.device);
        norm.gamma = param(lab.constant([8]));
        norm.beta = Some(param(lab.constant([8])));
        norm.forward(lab.input([4, 8]))
    };
    layer_norm_of_an_untracked_input(FP32, 1.5) |lab| {
        let norm = lab.layer_norm(8);
        let x = lab.constant([4, 8]);
        norm.forward(lab.fed(x))
    };
    batch_norm_1d(FP32, 1.5) |lab| {
        let norm = lab.batch_norm(3);
        norm.forward(lab.input([4, 3, 5]))
    };
    batch_norm_2d(FP32, 1.5) |lab| {
        let norm = lab.batch_norm(3);
        norm.forward(lab.input([3, 3, 2, 4]))
    };
    batch_norm_with_frozen_gamma(FP32, 1.5) |lab| {
        let (gamma, beta) = (lab.constant([3]), lab.leaf([3]));
        let norm = lab.batch_norm_of(gamma, beta);
        norm.forward(lab.input([3, 3, 2, 4]))
    };
    group_norm(FP32, 1.5) |lab| {
        let mut norm = GroupNormConfig::new(2, 4).init(&lab.device);
        norm.gamma = Some(param(lab.leaf([4])));
        norm.beta = Some(param(lab.leaf([4])));
        norm.forward(lab.input([2, 4, 8]))
    };
    instance_norm(FP32, 2.0) |lab| {
        let mut norm = InstanceNormConfig::new(3).init(&lab.device);
        norm.gamma = Some(param(lab.leaf([3])));
        norm.beta = Some(param(lab.leaf([3])));
        norm.forward(lab.input([2, 3, 16]))
    };
    rms_norm(FP32, 2.0) |lab| {
        let mut norm = RmsNormConfig::new(8).init(&lab.device);
        norm.gamma = param(lab.leaf([8]));
        let x = lab.input([2, 3, 8]);
        match x.dtype() {
            // Burn's computes the mean in FP32.
            DType::F64 => {
                let mean = x.clone().square().mean_dim(2) + norm.epsilon;
                x / mean.sqrt() * norm.gamma.val().unsqueeze()
            }
            _ => norm.forward(x),
        }
    };
    relu(FP32, FP32) |lab| activation::relu(lab.input([6, 8]));
    square(FP32, 1.0) |lab| lab.input([6, 8]).square();
    third_power(FP32, 1.0) |lab| lab.input([6, 8]).powf_scalar(3.0);
    broken_power(FP32, 1.0) |lab| lab.input([6, 8]).abs().powf_scalar(2.5);
    times_small(FP32, 1.0) |lab| lab.input([16, 4]) * lab.leaf([1, 4]);
    small_times(FP32, 1.0) |lab| lab.leaf([1, 4]) * lab.input([16, 4]);
    divided_by_small(FP32, 1.0) |lab| lab.input([16, 4]) / lab.leaf_of([1, 4], divisor);
    small_divided(FP32, 1.0) |lab| lab.leaf([1, 4]) / lab.input_of([16, 4], divisor);
    times_a_small_constant(FP32, 1.0) |lab| lab.input([16, 4]) * lab.constant([1, 4]);
    a_constant_times_small(FP32, FP32) |lab| {
        let x = lab.constant([16, 4]);
        lab.fed(x) * lab.leaf([1, 4])
    };
    a_constant_divided_by_small(FP32, FP32) |lab| {
        let x = lab.constant([16, 4]);
        lab.fed(x) / lab.leaf_of([1, 4], divisor)
    };
    a_small_constant_divided(FP32, 1.0) |lab| {
        lab.constant([1, 4]) / lab.input_of([16, 4], divisor)
    };
    product_of_large(FP32, 1.5) |lab| centered(lab.input([2, 16])) * centered(lab.input([2, 16]));
    quotient_of_large(FP32, 2.0) |lab| {
        centered(lab.input([2, 16])) / (centered(lab.input([2, 16])) + 8.0)
    };
    product_of_leaves(FP32, FP32) |lab| lab.leaf([4, 8]) * lab.leaf([4, 8]);
    cube(FP32, 1.5) |lab| {
        let x = lab.input([6, 8]);
        x.clone() * x.clone() * x
    };
    cube_of_fp32(FP32, 2.0) |lab| {
        let x = centered(lab.input([3, 16]));
        x.clone() * x.clone() * x
    };
    sigmoid_of_fp32(FP32, 2.0) |lab| activation::sigmoid(centered(lab.input([3, 16])));
    a_gate_of_fp32(FP32, 2.0) |lab| {
        let gate = activation::sigmoid(centered(lab.input([3, 16])));
        gate.clone() * lab.input([3, 16]) + (gate.neg() + 1.0) * lab.input([3, 16])
    };
    logarithm_of_a_shift(FP32, 1.5) |lab| {
        let x = lab.input_of([6, 8], |x| x / 512.0);
        (x + 1.0).log()
    };
    logarithm_of_one_minus_a_sigmoid(FP32, 1.5) |lab| {
        let p = activation::sigmoid(lab.input([6, 8]));
        (p.reshape([48]).narrow(0, 8, 32).neg() + 1.0).log()
    };
    a_sigmoid_used_in_half_and_in_fp32(FP32, 3.0) |lab| {
        let p = activation::sigmoid(lab.input([6, 8]));
        p.clone() * lab.input([6, 8]) - p.log()
    };
    entropy_of_a_sigmoid(FP32, 3.0) |lab| {
        let p = activation::sigmoid(lab.input([6, 8]));
        let rest = p.clone().neg() + 1.0;
        p.clone() * p.log() + rest.clone() * rest.log()
    };
    gates_of_gates(FP32, 3.0) |lab| {
        let inner = activation::sigmoid(lab.input([6, 8])) * 3.0 - 1.0;
        (inner.tanh().neg() + 2.0).log()
    };
    root_of_what_a_sigmoid_leaves(FP32, 3.0) |lab| {
        (activation::sigmoid(lab.input([6, 8])).neg() + 1.0).sqrt()
    };
    a_leaf_over_what_a_sigmoid_leaves(FP32, 3.0) |lab| {
        lab.leaf([6, 8]) / (activation::sigmoid(lab.input([6, 8])).neg() + 1.0)
    };
    corners_of_boxes(FP32, 3.0) |lab| {
        let boxes = activation::sigmoid(lab.input([6, 8]));
        let [centre, width] = [0..4, 4..8].map(|columns| boxes.clone().slice([0..6, columns]));
        let lower = centre.clone() - width.clone() * 0.5;
        lower.square() * (centre + width / 2.0)
    };
    a_quotient_by_a_sigmoid(FP32, 3.0) |lab| {
        let p = activation::sigmoid(lab.input([6, 8]));
        lab.leaf([6, 8]) / p
    };
    slope_of_a_hyperbolic_tangent(FP32, 2.0) |lab| {
        lab.input([6, 8]).tanh().square().neg() + 1.0
    };
    a_shift_of_a_shift_used_twice(FP32, 3.0) |lab| {
        let x = lab.input([6, 8]) - 1.5 + 8.0;
        x.clone().log() * x.square()
    };
    convolution_norm_relu_pool_linear(4.0, 4.0) |lab| {
        lab.clear_of_kinks(700);
        let (conv, norm, head) = (lab.conv(2, 3), lab.batch_norm(3), lab.linear(12, 3));
        let x = conv.forward(lab.input([2, 2, 6, 6]));
        let x = activation::relu(norm.forward(x));
        let x = max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
        head.forward(x.flatten::<2>(1, 3))
    };
    linear_norm_gelu_linear(4.0, 4.0) |lab| {
        let (first, norm, second) = (lab.linear(4, 8), lab.layer_norm(8), lab.linear(8, 3));
        let x = norm.forward(first.forward(lab.input([4, 4])));
        second.forward(activation::gelu(x))
    };
    tanh_of_a_softmax(FP32, 2.0) |lab| activation::softmax(lab.input([4, 8]), 1).tanh();
    tanh_of_a_log_softmax(FP32, 2.0) |lab| {
        activation::log_softmax(lab.input([4, 8]), 1).tanh()
    };
    a_mask_before_a_learned_temperature(FP32, 2.0) |lab| {
        let mask = lab.tensor(vec![0.0, -1e9, 0.0, 0.0], [1, 2, 2]);
        let (x, temperature) = (lab.input([16, 2, 2]), lab.leaf_of([1, 1, 1], divisor));
        activation::softmax((x + mask) * temperature, 2)
    };
    a_learned_bias_with_a_mask_before_a_learned_temperature(FP32, 2.0) |lab| {
        let mask = lab.tensor(vec![0.0, f32::MIN.into(), 0.0, 0.0], [1, 2, 2]);
        let (x, bias) = (lab.input([16, 2, 2]), lab.leaf([1, 2, 2]));
        let temperature = lab.leaf_of([1, 1, 1], divisor);
        activation::softmax((x + (bias + mask)) * temperature, 2)
    };
    a_bias_with_a_mask_from_a_region_before_a_learned_temperature(FP32, 2.0) |lab| {
        let mask = lab.tensor(vec![0.0, f32::MIN.into(), 0.0, 0.0], [1, 2, 2]);
        let (x, bias) = (lab.input([16, 2, 2]), lab.leaf([1, 2, 2]));
        let temperature = lab.leaf_of([1, 1, 1], divisor);
        let masked = full_precision(|| bias + mask);
        activation::softmax((x + masked) * temperature, 2)
    };
    residual_block(2.0, 2.0) |lab| {
        lab.clear_of_kinks(3820);
        let (norm, first, second) = (lab.layer_norm(6), lab.linear(6, 8), lab.linear(8, 6));
        let x = lab.input([3, 6]);
        let y = second.forward(activation::relu(first.forward(norm.forward(x.clone()))));
        x + y
    };
    a_block_used_twice(4.0, 4.0) |lab| {
        lab.clear_of_kinks(980);
        let (layer, norm) = (lab.linear(6, 6), lab.layer_norm(6));
        let block = |x| activation::relu(norm.forward(layer.forward(x)));
        block(block(lab.input([3, 6])))
    };
}

/// Attention of two heads over three keys.
fn attend<B: Backend>(
    lab: &mut Lab<B>,
    mask: Option<[[bool; 3]; 3]>,
    bias: bool,
    options: AttentionModuleOptions,
) -> Tensor<B, 4> {
    let [query, key, value] = [(); 3].map(|_| lab.input_of([1, 2, 3, 4], |x| x / 2.0));
    let bias = bias.then(|| lab.leaf([1, 2, 3, 3]));
    let mask = mask.map(|mask| {
        let mask = Tensor::<B, 2, Bool>::from_data(mask, &lab.device);
        mask.unsqueeze::<4>().expand([1, 2, 3, 3])
    });
    attention(query, key, value, mask, bias, options)
}

/// From 1/2 to 3/2.
fn divisor(x: f64) -> f64 {
    0.5 + x.abs() / 4.0
}

/// FP32 of the size of a half tensor, as inside of a composed norm.
fn centered<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let mean = x.clone().mean_dim(1);
    x - mean
}

/// One target and four others, of which each row gives less than the row before: with p the
/// target's probability, 1 - p is about 1e-3 and 1e-5.
const CONFIDENT: [[f32; 5]; 2] = [
    [0.0, -8.25, -8.5, -7.75, -9.0],
    [0.0, -12.5, -13.25, -12.75, -13.0],
];

/// The gradient of the logarithm of the target's probability, or of the probability.
fn of_the_target<B: AutodiffBackend>(feed: Feed, log: bool) -> Vec<f64> {
    let lab = Lab::<B>::new(DType::F32, feed);
    let leaf = Tensor::<B, 2>::from_data(CONFIDENT, &lab.device).require_grad();
    let x = lab.fed(leaf.clone());
    let out = match log {
        true => activation::log_softmax(x, 1),
        false => activation::softmax(x, 1),
    };
    let grads = out.narrow(1, 0, 1).sum().backward();
    values(leaf.grad(&grads).expect("a gradient"))
}

/// Each element of the gradient is right by itself, be it as small as 1 - p. FP32 resolves 1 - p to a
/// few 2^-24, and f16 the four small probabilities to 2^-25.
#[test]
fn a_confident_prediction_keeps_its_small_gradient() {
    for (precision, feed, log) in grid() {
        let floor = match precision {
            Precision::F16 => 2f64.powi(-24) + 2f64.powi(-25),
            _ => 2f64.powi(-24),
        };
        let run = || on_both!(of_the_target(feed, log));
        for (how, actual) in in_training(precision, run) {
            for (row, actual) in CONFIDENT.iter().zip(actual.chunks(5)) {
                let exps = row.map(|x| f64::from(x).exp());
                let total: f64 = exps.iter().sum();
                let slope = if log { 1.0 } else { 1.0 / total };
                for (i, actual) in actual.iter().enumerate() {
                    let expected = slope / total * if i == 0 { total - 1.0 } else { -exps[i] };
                    let most = 3.0 * roundoff(precision) * expected.abs() + 4.0 * floor;
                    let error = (actual - expected).abs();
                    assert!(
                        error <= most,
                        "{i}, {feed:?}, log {log}, {how} in {precision}: {actual} is not {expected}"
                    );
                }
            }
        }
    }
}

/// The gradient of a sigmoid near 1 is as small as 1 - p, which a sigmoid in half rounds to 0.
#[test]
fn a_confident_sigmoid_of_fp32_keeps_its_small_gradient() {
    const LOGITS: [f64; 4] = [-12.0, -8.0, 8.0, 12.0];
    fn gradient<B: AutodiffBackend>() -> Vec<f64> {
        let device = Default::default();
        let shift = Tensor::<B, 2>::zeros([1, 1], &device).require_grad();
        let logits: Vec<f64> = LOGITS.into_iter().cycle().take(16).collect();
        let data = TensorData::new(logits, [16, 1]);
        let leaf = Tensor::<B, 2>::from_data(data, &device).require_grad();
        let p = activation::sigmoid(activation(leaf.clone()) - shift);
        assert_eq!(p.dtype(), DType::F32);
        values(leaf.grad(&p.sum().backward()).expect("a gradient"))
    }
    for precision in HALVES {
        for (how, actual) in in_training(precision, || on_both!(gradient())) {
            for (x, actual) in LOGITS.into_iter().cycle().zip(actual) {
                let p = 1.0 / (1.0 + (-x).exp());
                let expected = p * (1.0 - p);
                // A gradient that is half, of a logit that half holds, and FP32's own error of 1 - p.
                let most = 1.5 * roundoff(precision) * expected + 2f64.powi(-24);
                let error = (actual - expected).abs();
                assert!(
                    error <= most,
                    "{x}, {how} in {precision}: {actual} is not {expected}"
                );
            }
        }
    }
}

/// A sigmoid over the sum of sigmoids, and a row over its length.
#[test]
fn what_is_divided_by_its_own_sum_has_a_sum_of_one() {
    fn sums<B: AutodiffBackend>() -> Vec<f64> {
        let x = Tensor::<B, 2>::full([1, 32], 0.3, &Default::default()).require_grad();
        let gates = activation::sigmoid(activation(x.clone()));
        let row = activation(x).tanh();
        let length = row.clone().square().sum_dim(1).sqrt();
        let of_gates = (gates.clone() / gates.sum_dim(1)).sum();
        [values(of_gates), values((row / length).square().sum())].concat()
    }
    for precision in HALVES {
        for (how, sums) in in_training(precision, || on_both!(sums())) {
            assert!(
                sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5),
                "{how} in {precision}: {sums:?}"
            );
        }
    }
}

/// f16 holds neither the sigmoid nor its inverse.
#[test]
fn a_quotient_by_a_sigmoid_that_is_0_in_f16_has_its_gradient() {
    fn of<B: AutodiffBackend>() -> [f64; 2] {
        let device = Default::default();
        let x = Tensor::<B, 2>::from_data([[1e-5]], &device).require_grad();
        let p = activation::sigmoid(activation(Tensor::from_data([[-18.0]], &device)));
        let out = x.clone() / p;
        let grads = (out.clone() * 1e-4).sum().backward();
        [
            values(out)[0],
            values(x.grad(&grads).expect("a gradient"))[0],
        ]
    }
    let exact = 1.0 + 18f64.exp();
    for precision in HALVES {
        for (how, [value, slope]) in in_training(precision, || on_both!(of())) {
            for (found, exact) in [(value, 1e-5 * exact), (slope, 1e-4 * exact)] {
                let relative = found / exact - 1.0;
                assert!(
                    relative.abs() < 1e-5,
                    "{how} in {precision}: {found} for {exact}"
                );
            }
        }
    }
}

/// Each probability of the tail is below f16's smallest number, and all of them are not. Nor does FP32
/// hold one beside a 1: what Burn's own sum loses there (1/64 of the tail on a CPU without AVX-512)
/// is allowed as well.
#[test]
fn a_tail_of_many_classes_keeps_the_gradient_of_the_target() {
    const CLASSES: usize = 50_257;
    fn of_the_target<B: AutodiffBackend>(tail: f32) -> Vec<f64> {
        let device = Default::default();
        let mut logits = vec![tail; CLASSES];
        logits[0] = 0.0;
        let data = TensorData::new(logits, [1, CLASSES]);
        let logits = Tensor::<B, 2>::from_data(data, &device).require_grad();
        let half = activation(logits.clone());
        let loss = -activation::log_softmax(half, 1).slice([0..1, 0..1]).sum();
        let grad = logits.grad(&loss.backward()).unwrap();
        vec![grad.slice([0..1, 0..1]).into_scalar().elem()]
    }
    for precision in HALVES {
        for tail in [-17.75, -17.0, -16.0] {
            let rest = (CLASSES - 1) as f64 * f64::from(tail).exp();
            let expected = -rest / (1.0 + rest);
            let lost = (of_the_target::<Autodiff<Flex>>(tail)[0] - expected).abs();
            assert!(lost <= rest / 32.0, "Burn loses {lost} of {rest}");
            let run = || on_both!(of_the_target(tail));
            for (how, actual) in with_precision(precision, run) {
                let error = (actual[0] - expected).abs();
                // The probabilities are summed up in FP32.
                let sum = (CLASSES as f64).sqrt() * 2f64.powi(-24);
                assert!(
                    error <= 2.0 * roundoff(precision) * -expected + sum + lost,
                    "tail {tail}, {how} in {precision}: {} is not {expected}",
                    actual[0]
                );
            }
        }
    }
}

/// A layer norm of which any operands are frozen, as where only the shifts of a model are trained.
#[test]
fn a_layer_norm_gives_the_gradients_that_are_wanted() {
    fn gradients<B: AutodiffBackend>(wanted: [bool; 3]) -> [Option<Vec<f64>>; 3] {
        let device = Default::default();
        let wave = |shape: [usize; 2]| {
            let values = (0..shape[0] * shape[1]).map(|i| ((i * 5 % 17) as f32 - 7.0) / 8.0);
            Tensor::<B, 2>::from_data(TensorData::new(values.collect(), shape), &device)
        };
        let param = |tensor: Tensor<B, 2>, wanted| {
            let values = tensor.reshape([8]).detach().set_require_grad(wanted);
            Param::initialized(ParamId::new(), values)
        };
        let x = wave([3, 8]).set_require_grad(wanted[0]);
        let mut norm = LayerNormConfig::new(8).init::<B>(&device);
        norm.gamma = param(wave([1, 8]) + 2.0, wanted[1]);
        norm.beta = Some(param(wave([1, 8]), wanted[2]));
        let (gamma, beta) = (norm.gamma.val(), norm.beta.as_ref().unwrap().val());
        // Half is what follows the norm, so that its gradient is, too.
        let out = activation(norm.forward(x.clone()));
        // Small enough for the first loss scale.
        let grads = ((out * wave([3, 8])).sum() / 256.0).backward();
        let values =
            |grad: Option<Tensor<B::InnerBackend, 1>>| grad.map(|grad| values(grad * 256.0));
        [
            x.grad(&grads).map(|grad| grad.reshape([24])),
            gamma.grad(&grads),
            beta.grad(&grads),
        ]
        .map(values)
    }
    for wanted in (1..8).map(|bits| [0, 1, 2].map(|operand| bits >> operand & 1 == 1)) {
        let expected = gradients::<Autodiff<Flex>>(wanted);
        assert_eq!(expected.each_ref().map(Option::is_some), wanted);
        for precision in HALVES {
            let run = || on_both!(gradients(wanted));
            for (how, actual) in with_precision(precision, run) {
                for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                    let most = 16.0 * roundoff(precision);
                    let pairs = actual.iter().flatten().zip(expected.iter().flatten());
                    for (actual, expected) in pairs {
                        let error = (actual - expected).abs();
                        assert!(
                            error <= most,
                            "{i} of {wanted:?}, {how}: {actual}, {expected}"
                        );
                    }
                    assert_eq!(
                        actual.is_some(),
                        expected.is_some(),
                        "{i} of {wanted:?}, {how}"
                    );
                }
            }
        }
    }
}

/// Precisions, feeds and a flag.
fn grid() -> impl Iterator<Item = (Precision, Feed, bool)> {
    HALVES.into_iter().flat_map(|precision| {
        let feeds = [Feed::Leaf, Feed::Half].into_iter();
        feeds.flat_map(move |feed| [false, true].map(|flag| (precision, feed, flag)))
    })
}

/// After a dropout: the tensor, its gradient and that of a factor behind it, and the expected values.
/// Factors are powers of two, so that nothing is rounded.
fn dropped<B: AutodiffBackend>(feed: Feed, fp32_noise: bool) -> [[Vec<f64>; 3]; 2] {
    let mut lab = Lab::<B>::new(DType::F32, feed);
    let x = lab.input([6, 16]);
    let factor = lab.leaf_of([6, 16], |x| x.signum() * 2.0);
    let half_of_them = Distribution::Bernoulli(0.5);
    let noise = match fp32_noise {
        true => Tensor::<B, 2>::random([6, 16], half_of_them, &lab.device),
        false => x.random_like(half_of_them),
    };
    let all = [x.clone(), factor.clone(), noise.clone()].map(values);
    let out = match fp32_noise {
        true => noise * x,
        false => x * noise,
    };
    let out = out * factor;
    let loss = (out.clone() * lab.tensor(weights(96), [6, 16])).sum();
    let [of_x, of_factor] = lab.gradients(&loss.backward()).try_into().expect("two");
    let expected = |term: fn([f64; 4]) -> f64| {
        let [x, factor, noise] = &all;
        let of = |(i, weight)| term([x[i], factor[i], noise[i], weight]);
        weights(96).into_iter().enumerate().map(of).collect()
    };
    let expected = [
        expected(|[x, factor, noise, _]| x * noise * factor),
        expected(|[_, factor, noise, weight]| noise * factor * weight),
        expected(|[x, _, noise, weight]| x * noise * weight),
    ];
    [[values(out), of_x, of_factor], expected]
}

#[test]
fn dropout_drops_gradients_with_values() {
    for (precision, feed, fp32_noise) in grid() {
        let run = || on_both!(dropped(feed, fp32_noise));
        for (how, [actual, expected]) in in_training(precision, run) {
            let what = format!("{feed:?}, noise in FP32 {fp32_noise}, {how} in {precision}");
            assert_eq!(actual, expected, "{what}");
        }
    }
}

/// Burn's module: where it gives zeros, and where its gradient is zero.
fn zeros_of_dropout<B: AutodiffBackend>(feed: Feed) -> [Vec<bool>; 2] {
    let mut lab = Lab::<B>::new(DType::F32, feed);
    let x = lab.input([6, 16]);
    let out = DropoutConfig::new(0.3).init().forward(x);
    let weights = lab.tensor(weights(96), [6, 16]);
    let grads = (out.clone() * weights).sum().backward();
    [values(out), lab.gradients(&grads).remove(0)]
        .map(|all| all.iter().map(|v| *v == 0.0).collect())
}

#[test]
fn the_dropout_module_drops_gradients_with_values() {
    for (precision, feed, _) in grid() {
        let run = || on_both!(zeros_of_dropout(feed));
        for (how, [value, slope]) in in_training(precision, run) {
            assert_eq!(value, slope, "{feed:?}, {how} in {precision}");
        }
    }
}

/// The values of a dropout, and their gradients: 1.75 times its factor.
fn factors_of_dropout<B: AutodiffBackend>() -> Vec<f64> {
    let mut lab = Lab::<B>::new(DType::F32, Feed::Half);
    let x = lab.input_of([16, 16], |_| 1.75);
    let out = DropoutConfig::new(0.1).init().forward(x);
    let grads = (out.clone() * 1.75).sum().backward();
    [values(out), lab.gradients(&grads).remove(0)].concat()
}

/// The factor of a dropout is rounded to half, in both passes. If FP32 computed with it, it would cost four casts.
#[test]
fn the_factor_of_a_dropout_is_rounded() {
    // 1.75 / 0.9 would be 1.9443359375 and 1.9453125.
    for (precision, rounded) in [(Precision::F16, 1.9453125), (Precision::Bf16, 1.9375)] {
        let run = || on_both!(factors_of_dropout());
        for (how, mut found) in in_scope(precision, &scaler(1.0), run) {
            found.retain(|x| *x != 0.0);
            assert!(found.len() > 256);
            let is_rounded = found.iter().all(|x| *x == rounded);
            assert!(is_rounded, "{how} in {precision}: {found:?}");
        }
    }
}

/// What noise leaves of 1.75, times another factor.
fn dropped_and_multiplied<B: AutodiffBackend>(factor: f64) -> Vec<f64> {
    let mut lab = Lab::<B>::new(DType::F32, Feed::Half);
    let x = lab.input_of([16, 16], |_| 1.75);
    let noise = x.random_like(Distribution::Bernoulli(0.5));
    values(x * noise * factor)
}

/// A decay stays exact, and so does a factor that f16 does not hold.
#[test]
fn other_factors_behind_noise_are_not_rounded() {
    // With a factor in half, 1.2256 and 1.5703.
    for (precision, factor, exact) in [
        (Precision::F16, 0.7, 1.224609375),
        (Precision::Bf16, 0.9, 1.578125),
        (Precision::F16, 1e5, 175_000.0),
        (Precision::F16, 1e-8, f64::from(1.75 * 1e-8f32)),
    ] {
        let run = || on_both!(dropped_and_multiplied(factor));
        for (how, mut found) in in_scope(precision, &scaler(1.0), run) {
            found.retain(|x| *x != 0.0);
            let is_exact = found.iter().all(|x| *x == exact);
            assert!(
                !found.is_empty() && is_exact,
                "{factor}, {how} in {precision}: {found:?}"
            );
        }
    }
}

/// The gradients of two losses over the same parameters: of one backward pass each, and of one of
/// both losses' sum.
fn two_losses<B: AutodiffBackend>() -> [Vec<Vec<f64>>; 3] {
    let mut lab = Lab::<B>::new(DType::F32, Feed::Leaf);
    let (layer, norm) = (lab.linear(4, 8), lab.layer_norm(8));
    let x = lab.constant([5, 4]);
    let forward = || norm.forward(layer.forward(x.clone()));
    let losses = || {
        let first = activation::softmax(activation::relu(forward()), 1);
        [first.square().sum(), forward().square().mean()]
    };
    let [first, second] = losses();
    let [first, second] = [first.backward(), second.backward()];
    let [one, other] = losses();
    let both = (one + other).backward();
    [first, second, both].map(|grads| lab.gradients(&grads))
}

#[test]
fn two_losses_have_their_own_backward_passes() {
    for precision in HALVES {
        let runs = in_training(precision, || on_both!(two_losses()));
        for (how, [first, second, both]) in runs {
            for (i, ((first, second), both)) in first.iter().zip(&second).zip(&both).enumerate() {
                let sum: Vec<f64> = first.iter().zip(second).map(|(a, b)| a + b).collect();
                let what = format!("{i}, {how} in {precision}");
                assert_within(&what, precision, &sum, both, 2.0);
            }
        }
    }
}

/// The gradients of a layer that is used at each of many steps, as in an RNN, and whose weight is
/// used in FP32, too.
fn many_uses<B: AutodiffBackend>() -> Vec<Vec<f64>> {
    let mut lab = Lab::<B>::new(DType::F32, Feed::Leaf);
    let layer = lab.linear(4, 4);
    let mut x = lab.constant([5, 4]);
    for _ in 0..8 {
        x = layer.forward(x).tanh();
    }
    let decay = (layer.weight.val().powi_scalar(2) * 0.1).sum();
    let grads = (x.sum() + decay).backward();
    lab.gradients(&grads)
}

#[test]
fn every_use_of_a_parameter_adds_to_its_gradient() {
    let expected = many_uses::<Autodiff<Flex>>();
    for precision in HALVES {
        for (how, actual) in in_training(precision, || on_both!(many_uses())) {
            for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                let what = format!("{i}, {how} in {precision}");
                // Each of the 8 steps rounds what it passes on.
                assert_within(&what, precision, actual, expected, 8.0);
            }
        }
    }
}

/// Runs a check of dtypes in training under both strategies and in inference, in both halves.
macro_rules! everywhere {
    ($($name:ident<$b:ident>($half:ident) $body:block)*) => {$(
        #[test]
        fn $name() {
            fn check<$b: Backend>($half: DType) $body
            for precision in HALVES {
                let half = precision.compute_dtype().expect("a half");
                with_precision(precision, || {
                    check::<AmpAutodiff<Flex>>(half);
                    check::<AmpAutodiff<Flex, BalancedCheckpointing>>(half);
                    check::<Amp<Flex>>(half);
                });
            }
        }
    )*};
}

/// A half tensor of this value and its negative in turns.
fn half<B: Backend>(value: f32) -> Tensor<B, 2> {
    let device = Default::default();
    let signs = Tensor::<B, 2>::from_data([[1.0, -1.0], [-1.0, 1.0]], &device).repeat(&[8, 8]);
    (signs * value).matmul(Tensor::eye(16, &device).require_grad())
}

/// FP32 that is a half tensor without its mean, which is zero.
fn widened<B: Backend>(value: f32) -> Tensor<B, 2> {
    let x = half::<B>(value);
    let mean = x.clone().mean_dim(1);
    x - mean
}

/// The dtype in which an activation behind a composed norm computes. Statistics are recognized because
/// they are tracked: in inference they are FP32 like any other.
fn behind_a_norm<B: Backend>(half_dtype: DType) -> DType {
    match B::ad_enabled(&Default::default()) {
        true => half_dtype,
        false => DType::F32,
    }
}

fn all_are<B: Backend>(tensor: Tensor<B, 2>, value: f64) -> bool {
    values(tensor).iter().all(|v| *v == value)
}

everywhere! {
    a_relu_behind_a_batch_norm_is_half<B>(half_dtype) {
        let half_dtype = behind_a_norm::<B>(half_dtype);
        let device = Default::default();
        let norm = BatchNormConfig::new(16).init::<B>(&device);
        let out = norm.forward(half::<B>(1.0));
        assert_eq!(out.dtype(), DType::F32);
        assert_eq!(activation::relu(out).dtype(), half_dtype);
    }

    a_group_norm_is_fp32_and_what_is_behind_it_half<B>(half_dtype) {
        let half_dtype = behind_a_norm::<B>(half_dtype);
        let device = Default::default();
        let norm = GroupNormConfig::new(2, 16).init::<B>(&device);
        let x = half::<B>(1.0).reshape([1, 16, 16]);
        let out = norm.forward(x);
        assert_eq!(out.dtype(), DType::F32);
        assert_eq!(activation::gelu(out.clone()).dtype(), half_dtype);
        // A difference of sigmoids needs FP32's digits, and a gate does not.
        let gate = activation::sigmoid(out.clone());
        assert_eq!(gate.dtype(), DType::F32);
        for gate in [gate.clone(), gate.neg() + 1.0] {
            assert_eq!((gate.clone() * half::<B>(1.0).reshape([1, 16, 16])).dtype(), half_dtype);
            assert_eq!((gate.clone() - gate).dtype(), DType::F32);
        }
        assert_eq!(out.clone().tanh().dtype(), half_dtype);
        // A program may compare the largest values with all of them, as a detector does that looks for peaks.
        let pooled = max_pool2d(out.unsqueeze::<4>(), [2, 2], [2, 2], [0, 0], [1, 1], false);
        assert_eq!(pooled.dtype(), DType::F32);
    }

    an_lstm_is_half_from_its_first_step_but_its_cell<B>(half_dtype) {
        let device = Default::default();
        let lstm = LstmConfig::new(3, 4, true).init::<B>(&device);
        let (out, state) = lstm.forward(Tensor::ones([2, 1, 3], &device), None);
        let dtypes = [out.dtype(), state.cell.dtype(), state.hidden.dtype()];
        assert_eq!(dtypes, [half_dtype, DType::F32, half_dtype]);
    }

    the_state_of_a_gru_is_fp32<B>(half_dtype) {
        let device = Default::default();
        for bias in [true, false] {
            for reset_after in [true, false] {
                let gru = GruConfig::new(3, 4, bias).with_reset_after(reset_after).init::<B>(&device);
                let out = gru.forward(Tensor::ones([16, 1, 3], &device), None);
                assert_eq!(out.dtype(), DType::F32);
                // What stays within bounds is half again, if no FP32 was added.
                if !bias {
                    assert_eq!(out.tanh().dtype(), half_dtype);
                }
            }
        }
    }

    a_state_stays_one_until_fp32_of_any_size_is_added<B>(half_dtype) {
        let (x, device) = (half::<B>(3.0), Default::default());
        let bounded = |state: Tensor<B, 2>| {
            assert_eq!(state.dtype(), DType::F32);
            state.tanh().dtype()
        };
        for zeros in [Tensor::zeros(x.dims(), &device), Tensor::full(x.dims(), 0.0, &device)] {
            let state = zeros * activation::sigmoid(x.clone()) + x.clone();
            let done = x.clone().greater_elem(0.0);
            for state in [
                state.clone().mask_fill(done.clone(), 0.0),
                state.clone() * done.float(),
                state.clone().neg(),
                state.clone() * 1.1,
                state.clone().clamp(-2.0, 2.0),
                state.clone().reshape([1, -1]),
                state.clone() - x.clone(),
            ] {
                assert_eq!(bounded(state), half_dtype);
            }
            let data = Tensor::from_floats([[1e6; 16]; 16], &device);
            for other in [
                state.clone() + x.clone().exp(),
                state.clone() + data.clone(),
                state.clone() * data,
                state.clone() / x.clone(),
                state.clone() * 4.0,
                Tensor::zeros(x.dims(), &device) * x.clone().greater_elem(0.0).float(),
                state.clone() * state,
            ] {
                assert_eq!(bounded(other), DType::F32);
            }
        }
    }

    constants_follow_half_tensors<B>(half_dtype) {
        let (x, device) = (half::<B>(3.0), Default::default());
        let shape = x.dims();
        let positive = x.clone().greater_elem(0.0).float();
        for constant in [
            Tensor::full(shape, 0.5, &device),
            Tensor::empty(shape, &device),
            positive,
        ] {
            assert_eq!(constant.dtype(), DType::F32);
            assert_eq!((constant.clone() * x.clone()).dtype(), half_dtype);
            assert_eq!((x.clone() * constant.clone()).dtype(), half_dtype);
            assert_eq!(Tensor::cat(vec![x.clone(), constant.clone()], 0).dtype(), half_dtype);
            // An accumulator stays FP32.
            assert_eq!((constant + x.clone()).dtype(), DType::F32);
        }
        // And so do a running product and a state, and a table.
        let full = |value: f32| Tensor::full(shape, value, &device);
        let ones = Tensor::ones(shape, &device);
        let zeros = Tensor::zeros(shape, &device);
        for first in [ones.clone(), zeros, full(1.0), full(0.0), full(f32::NEG_INFINITY)] {
            assert_eq!(Tensor::cat(vec![x.clone(), first.clone()], 0).dtype(), half_dtype);
            assert_eq!((x.clone() * first.clone()).dtype(), DType::F32);
        }
        for first in [full(0.0), full(f32::NEG_INFINITY)] {
            let row = x.clone().slice([0..1, 0..shape[1]]);
            let table = first.clone().slice_assign([0..1, 0..shape[1]], row);
            assert_eq!(table.dtype(), DType::F32);
            // Padding is no table.
            let place = [0..shape[0], 0..shape[1]];
            assert_eq!(first.slice_assign(place, x.clone()).dtype(), half_dtype);
        }
        assert_eq!((ones * x).dtype(), DType::F32);
    }

    a_gated_state_is_fp32<B>(_half_dtype) {
        let (one, device) = (half::<B>(1.0).abs(), Default::default());
        let grown = |state| (0..4096).fold(state, |s, _| s * one.clone() + one.clone());
        let data = Tensor::from_floats([[0.0; 16]; 16], &device);
        for first in [Tensor::zeros([16, 16], &device), data] {
            let state = grown(first);
            assert_eq!(state.dtype(), DType::F32);
            assert_eq!(values(state.max()), [4096.0]);
        }
    }

    what_half_does_not_hold_is_no_constant<B>(_half_dtype) {
        let (x, device) = (half::<B>(3.0), Default::default());
        for value in [-1e9, 1e-8] {
            let sum = Tensor::full(x.dims(), value, &device) + x.clone();
            assert_eq!(sum.dtype(), DType::F32, "{value}");
        }
    }

    data_and_parameters_are_no_constants<B>(_half_dtype) {
        let (x, device) = (half::<B>(3.0), Default::default());
        let data = Tensor::<B, 2>::from_floats([[0.0; 16]; 16], &device);
        assert_eq!((data + x.clone()).dtype(), DType::F32);
        for tracked in [true, false] {
            let parameter = Tensor::<B, 2>::zeros(x.dims(), &device).set_require_grad(tracked);
            assert_eq!((parameter + x.clone()).dtype(), DType::F32, "tracked {tracked}");
        }
    }

    constants_among_themselves_and_fp32_stay_fp32<B>(_half_dtype) {
        let device = Default::default();
        let (zeros, ones) = (Tensor::<B, 1>::zeros([3], &device), Tensor::ones([3], &device));
        assert_eq!((zeros.clone() + ones).dtype(), DType::F32);
        let data = Tensor::<B, 1>::from_floats([1e9, 1.0, 2.0], &device);
        assert_eq!(values(zeros + data), [1e9, 1.0, 2.0]);
    }

    a_product_of_large_tensors_survives_the_relu<B>(half_dtype) {
        let half_dtype = behind_a_norm::<B>(half_dtype);
        let x = widened::<B>(300.0);
        assert_eq!(x.dtype(), DType::F32);
        assert_eq!(activation::relu(x.clone()).dtype(), half_dtype);
        let out = activation::relu(x.clone() * x);
        assert_eq!(out.dtype(), DType::F32);
        assert!(all_are(out, 9e4));
    }

    a_square_leaves_the_range_of_f16<B>(_half_dtype) {
        let out = half::<B>(300.0).square();
        assert_eq!(out.dtype(), DType::F32);
        assert!(all_are(activation::relu(out), 9e4));
    }

    what_the_user_casts_to_fp32_stays_fp32<B>(_half_dtype) {
        let x = half::<B>(300.0).cast(DType::F32);
        assert_eq!(activation::relu(x.clone()).dtype(), DType::F32);
        let out = activation::relu(x.clone() * x);
        assert_eq!(out.dtype(), DType::F32);
        assert!(all_are(out, 9e4));
    }

    a_large_factor_does_not_overflow_in_the_relu_behind_it<B>(_half_dtype) {
        let x = half::<B>(300.0);
        let factor = Tensor::<B, 2>::from_floats([[1000.0]], &x.device());
        assert_eq!(values(activation::relu(x * factor).max()), [3e5]);
    }

    a_large_constant_factor_does_not_overflow<B>(_half_dtype) {
        let x = half::<B>(300.0);
        let factor = Tensor::<B, 2>::full(x.dims(), 1000.0, &x.device());
        assert_eq!(values((x * factor).max()), [3e5]);
    }

    one_over_a_small_number_does_not_overflow<B>(_half_dtype) {
        let x = half::<B>(1.0 / 131_072.0);
        let quotient = Tensor::<B, 2>::ones(x.dims(), &x.device()) / x;
        assert_eq!(values(quotient.max()), [131_072.0]);
    }

    what_a_region_computes_in_fp32_does_not_overflow_behind_it<B>(_half_dtype) {
        let x = widened::<B>(40_960.0);
        let sum = full_precision(|| x.clone() + x.clone());
        assert_eq!(values(activation::relu(sum).max()), [81_920.0]);
        let scaled = full_precision(|| x * 100.0);
        assert_eq!(values(activation::relu(scaled).max()), [4_096_000.0]);
    }

    a_large_scale_does_not_overflow_in_the_relu_behind_it<B>(_half_dtype) {
        let x = widened::<B>(300.0) * 1000.0;
        let largest = values(activation::relu(x).max())[0];
        assert!((largest / 3e5 - 1.0).abs() <= roundoff(Precision::Bf16), "{largest}");
    }

    a_small_factor_does_not_vanish_in_the_relu_behind_it<B>(_half_dtype) {
        let x = half::<B>(1.0);
        let factor = Tensor::<B, 2>::from_floats([[1e-8]], &x.device());
        let out = values(activation::relu(x * factor).max())[0];
        assert!((out / 1e-8 - 1.0).abs() <= roundoff(Precision::Bf16), "{out}");
    }

    a_mask_does_not_overflow_in_the_gelu_behind_it<B>(_half_dtype) {
        let x = half::<B>(1.0);
        let mask = Tensor::<B, 2>::from_floats([[-1e9]], &x.device());
        assert!(all_are(activation::gelu(x + mask), 0.0));
    }
}
