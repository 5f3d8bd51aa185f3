//! Values that break models in half precision: masks of -1e9, epsilons, products beyond 65504, and rows
//! that are masked throughout.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Tensor, TensorData, activation, module};
use burn_amp::{GradScaler, LossScaleConfig, Precision, with_precision};

use crate::common::{ON_LIBTORCH, halves, possible, roundoff};
use crate::harness::{
    Amp, Balanced, Case, Inference, Plain, Rng, activation as half, cases, check, fp32, full,
    half_of, points, rounded, values,
};

/// Scalars that half does not hold: the operation is FP32 in f16. The result is cast, so that bf16,
/// which holds most of them, is checked by the same line.
#[rustfmt::skip]
fn scalars() -> Vec<Case> {
    cases! {
        ":epsilon under a logarithm", points(), full(1.0).rounded(2.0) => |a| (a.x().abs() + 1e-8).log();
        ":epsilon in a divisor", points(), full(3.0).rounded(2.0) => |a| (a.x() / (a.x().abs().detach() + 1e-8)).cast(DType::F32);
        ":epsilon under a root", points(), full(3.0).rounded(1.0) => |a| (a.x().square() + 1e-12).sqrt().cast(DType::F32);
        ":times 1e6", points(), full(4.0).rounded(4.0) => |a| a.x().mul_scalar(1e6).mul_scalar(1e-6).cast(DType::F32);
        ":divided by 1e6", points().only(Precision::F16), full(2.0).rounded(3.0) => |a| a.x().div_scalar(1e6).mul_scalar(1e6).cast(DType::F32);
        ":minus 1e9", points(), full(1.0).rounded(1.0) => |a| a.x().sub_scalar(1e9).cast(DType::F32);
        ":clamped to the range of FP32", points(), full(1.0).rounded(0.0) => |a| a.x().clamp(f32::MIN, f32::MAX).cast(DType::F32);
        ":at least f32::MIN", points(), full(1.0).rounded(0.0) => |a| a.x().clamp_min(f32::MIN).cast(DType::F32);
        ":at most 1e9", points(), full(1.0).rounded(1.0) => |a| a.x().clamp_max(1e9).cast(DType::F32);
        ":leaky slope of 1e-6", points(), full(1.0).rounded(3.0) => |a| activation::leaky_relu(a.x(), 1e-6).cast(DType::F32);
    }
}

#[test]
fn scalars_that_half_does_not_hold() {
    check(&scalars());
}

/// At zero the gradients of these leave f16, the values must not.
#[test]
fn epsilons_keep_zeros_finite() {
    fn run<B: Backend>() -> Vec<f64> {
        let zero = half(fp32::<B, 1>(&[0.0], [1]));
        let norm = zero.clone().square().sum().sqrt();
        [
            (zero.clone() + 1e-8).log(),
            (zero.clone() + 1e-8).recip(),
            zero.clone() / (norm + 1e-8),
            zero.clone() / (zero + 1e-8),
        ]
        .into_iter()
        .flat_map(values)
        .collect()
    }
    let ln = f64::ln(1e-8);
    for precision in halves() {
        for run in with_precision(precision, || [run::<Inference>(), run::<Amp>()]) {
            let off = |i: usize, expected: f64| (run[i] / expected - 1.0).abs();
            assert!(off(0, ln) <= roundoff(precision), "{precision}: {run:?}");
            assert!(off(1, 1e8) <= roundoff(precision), "{precision}: {run:?}");
            assert_eq!(run[2..], [0.0, 0.0], "{precision}");
        }
    }
}

/// A root has an infinite gradient at zero. Behind a ReLU, nothing of it is passed on there, as in
/// PyTorch.
#[test]
fn a_relu_stops_infinite_gradients() {
    let scaler = GradScaler::new(LossScaleConfig::Disabled).expect("valid");
    for precision in halves() {
        let run = || {
            let x = fp32::<Amp, 1>(&[-1.0, 0.0, 4.0, 16.0], [4]).require_grad();
            let y = activation::relu(half(x.clone()));
            assert_eq!(y.dtype(), half_of(precision));
            values(x.grad(&y.sqrt().sum().backward()).unwrap())
        };
        let grad = with_precision(precision, || scaler.scope(run));
        assert_eq!(grad, [0.0, 0.0, 0.25, 0.125], "{precision}");
    }
}

/// How a mask is laid over scores.
type Masking<B> = fn(Tensor<B, 2>, Tensor<B, 2, Bool>, f32) -> Tensor<B, 2>;

fn masked<B: Backend>() -> Vec<(&'static str, Masking<B>)> {
    vec![
        ("mask_fill", |x, mask, value| x.mask_fill(mask, value)),
        ("mask_where", |x, mask, value| {
            let filled = Tensor::full(x.dims(), value, &x.device());
            x.mask_where(mask, filled)
        }),
        ("mask_where of its own dtype", |x, mask, value| {
            let filled = x.full_like(value);
            x.mask_where(mask, filled)
        }),
        ("a mask from data", |x, mask, value| {
            let mask: Vec<f64> = mask
                .into_data()
                .iter::<bool>()
                .map(|m| if m { value.into() } else { 0.0 })
                .collect();
            let shape = x.dims();
            x + fp32(&mask, shape)
        }),
        ("zeros, filled", |x, mask, value| {
            let zeros = Tensor::zeros(x.dims(), &x.device());
            x + zeros.mask_fill(mask, value)
        }),
        ("full, cleared", |x, mask, value| {
            let full = Tensor::full(x.dims(), value, &x.device());
            x + full.mask_fill(mask.bool_not(), 0.0)
        }),
        ("float, scaled", |x, mask, value| {
            // An infinity times zero is no mask in any precision.
            let value = value.max(f32::MIN);
            x + mask.float() * value
        }),
    ]
}

/// No key, some keys and all keys of a row masked.
const ROWS: [[bool; 4]; 3] = [[false; 4], [false, true, true, false], [true; 4]];

fn softmax_of_masked<B: AutodiffBackend>(
    scores: &[f64],
    half_scores: bool,
    masking: Masking<B>,
    value: f32,
) -> (Vec<f64>, Vec<f64>) {
    let leaf = fp32::<B, 2>(scores, [3, 4]).require_grad();
    let x = if half_scores {
        half(leaf.clone())
    } else {
        leaf.clone()
    };
    let mask = Tensor::from_data(ROWS, &Default::default());
    let out = activation::softmax(masking(x, mask, value), 1);
    let upstream = fp32(
        &[
            1.0, -0.5, 0.75, -2.0, 0.5, 1.5, -1.0, 1.0, -1.5, 0.25, 2.0, -0.75,
        ],
        [3, 4],
    );
    let grads = (out.clone() * upstream).sum().backward();
    (values(out), values(leaf.grad(&grads).expect("a gradient")))
}

#[test]
fn masks_survive_the_softmax() {
    let scores = Rng(9).values(12, -6.0, 6.0);
    // Gradients of a row that is NaN in FP32, too, are compared as they are.
    let scaler = GradScaler::new(LossScaleConfig::Disabled).expect("valid");
    for precision in halves() {
        let scores = rounded(&scores, half_of(precision));
        for value in [-1e9, f32::MIN, f32::NEG_INFINITY] {
            for i in 0..masked::<Plain>().len() {
                let (name, plain) = masked::<Plain>()[i];
                let expected = softmax_of_masked(&scores, false, plain, value);
                let runs = with_precision(precision, || {
                    scaler.scope(|| {
                        [
                            softmax_of_masked(&scores, true, masked::<Amp>()[i].1, value),
                            softmax_of_masked(&scores, true, masked::<Balanced>()[i].1, value),
                        ]
                    })
                });
                for run in runs {
                    let what = format!("{name}({value:e}) in {precision}");
                    assert_same(&what, precision, &run.0, &expected.0, 2.0);
                    assert_same(&what, precision, &run.1, &expected.1, 3.0);
                }
            }
        }
    }
}

/// Asserts FP32's values to so many roundings of the largest, and NaN only where FP32 gives it.
#[track_caller]
fn assert_same(what: &str, precision: Precision, actual: &[f64], expected: &[f64], roundings: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0f64, |max, x| max.max(x.abs()));
    let bound = roundings * roundoff(precision) * largest;
    let same = |(a, e): (&f64, &f64)| match e.is_finite() {
        true => (a - e).abs() <= bound,
        false => a.is_nan() == e.is_nan() && (a.is_nan() || a == e),
    };
    let all = actual.iter().zip(expected).all(same);
    assert!(all, "{what}\nactual   {actual:?}\nexpected {expected:?}");
}

#[test]
fn a_product_beyond_f16_is_infinite_and_the_step_is_skipped() {
    fn loss<B: AutodiffBackend>(x: Tensor<B, 2>) -> Tensor<B, 1> {
        x.clone().matmul(x).sum()
    }
    // No other test has products of 11 terms: these are an exception of the device once a pass is looked at.
    let leaf = || fp32::<Amp, 2>(&[300.0; 121], [11, 11]).require_grad();
    let scaler = GradScaler::new(LossScaleConfig::default()).expect("valid");
    with_precision(Precision::F16, || {
        scaler.scope(|| {
            let x = leaf();
            let loss = loss(x.clone());
            assert_eq!(values(loss.clone()), [f64::INFINITY]);
            assert!(x.grad(&loss.backward()).is_none());
        })
    });
    // The scale is not at fault, and does not change.
    assert_eq!(scaler.state().non_finite_losses(), 1);
    assert_eq!(f64::from(scaler.loss_scale()), 65536.0);

    for bf16 in possible([Precision::Bf16]) {
        with_precision(bf16, || {
            let x = leaf();
            let loss = loss(x.clone());
            let value = values(loss.clone())[0];
            assert!((value / (1331.0 * 9e4) - 1.0).abs() <= roundoff(bf16));
            let grad = values(x.grad(&loss.backward()).expect("a gradient"));
            assert!(
                grad.iter()
                    .all(|g| (g / 6600.0 - 1.0).abs() <= 2.0 * roundoff(bf16))
            );
        });
    }
}

/// A bias by query and key, and whether it is half.
type Bias = (fn(usize, usize) -> f64, bool);

/// A mask of attention, a bias, and its options.
#[derive(Clone, Copy)]
struct Attention {
    name: &'static str,
    /// Multiplied with query and key.
    size: f64,
    mask: Option<fn(query: usize, key: usize) -> bool>,
    bias: Option<Bias>,
    options: AttentionModuleOptions,
}

const DEFAULT: AttentionModuleOptions = AttentionModuleOptions {
    scale: None,
    softcap: None,
    is_causal: false,
};

const QUERIES: usize = 4;
const KEYS: usize = 6;
const HEAD: usize = 64;

/// Queries and keys of 200 make products up to 64 * 200 * 200: beyond f16 before they are scaled.
#[rustfmt::skip]
fn attentions() -> Vec<Attention> {
    let plain = Attention { name: "", size: 1.0, mask: None, bias: None, options: DEFAULT };
    let scaled = AttentionModuleOptions { scale: Some(1e-4), ..DEFAULT };
    let every_second_masked = |_, key| key % 2 == 1;
    let second_row_masked = |query, key| query == 1 || key == 2;
    vec![
        Attention { name: "plain", ..plain },
        Attention { name: "large", size: 200.0, options: scaled, ..plain },
        Attention { name: "large, causal", size: 200.0, options: AttentionModuleOptions { is_causal: true, ..scaled }, ..plain },
        Attention { name: "large, mask", size: 200.0, mask: Some(every_second_masked), options: scaled, ..plain },
        Attention { name: "large, softcap", size: 200.0, options: AttentionModuleOptions { softcap: Some(5.0), ..scaled }, ..plain },
        Attention { name: "large, bias", size: 200.0, bias: Some((|q, k| (q + k) as f64 / 4.0, false)), options: scaled, ..plain },
        Attention { name: "causal", options: AttentionModuleOptions { is_causal: true, ..DEFAULT }, ..plain },
        Attention { name: "masked row", mask: Some(second_row_masked), ..plain },
        Attention { name: "masked row, causal, softcap", mask: Some(second_row_masked), options: AttentionModuleOptions { is_causal: true, softcap: Some(5.0), ..DEFAULT }, ..plain },
        Attention { name: "FP32 bias of -1e9", bias: Some((|_, k| if k % 2 == 1 { -1e9 } else { 0.5 }, false)), ..plain },
        Attention { name: "FP32 bias of f32::MIN", bias: Some((|_, k| if k % 2 == 1 { f32::MIN.into() } else { 0.5 }, false)), ..plain },
        Attention { name: "FP32 bias of -inf", bias: Some((|_, k| if k % 2 == 1 { f64::NEG_INFINITY } else { 0.5 }, false)), ..plain },
        Attention { name: "FP32 bias of -1e9 for a whole row", bias: Some((|q, _| if q == 1 { -1e9 } else { 0.5 }, false)), ..plain },
        Attention { name: "FP32 bias of -inf for a whole row", bias: Some((|q, _| if q == 1 { f64::NEG_INFINITY } else { 0.5 }, false)), ..plain },
        Attention { name: "half bias", bias: Some((|q, k| (q + k) as f64 / 4.0, true)), ..plain },
        Attention { name: "half bias of -6e4", bias: Some((|_, k| if k % 2 == 1 { -6e4 } else { 0.5 }, true)), ..plain },
        Attention { name: "half bias of -inf for a whole row", bias: Some((|q, _| if q == 1 { f64::NEG_INFINITY } else { 0.5 }, true)), ..plain },
    ]
}

impl Attention {
    fn inputs(&self, precision: Precision) -> [Vec<f64>; 3] {
        let mut rng = Rng(13);
        [(QUERIES, self.size), (KEYS, self.size), (KEYS, 2.0)].map(|(rows, size)| {
            let values = rng.values(rows * HEAD, -size, size);
            rounded(&values, half_of(precision))
        })
    }

    fn run<B: Backend>(&self, [q, k, v]: [Tensor<B, 4>; 3], in_half: bool) -> Tensor<B, 4> {
        let positions = || (0..QUERIES).flat_map(|q| (0..KEYS).map(move |k| (q, k)));
        let shape = [1, 1, QUERIES, KEYS];
        let mask = self.mask.map(|mask| {
            let mask: Vec<bool> = positions().map(|(q, k)| mask(q, k)).collect();
            Tensor::from_data(TensorData::new(mask, shape), &Default::default())
        });
        let bias = self.bias.map(|(bias, is_half)| {
            let bias: Vec<f64> = positions().map(|(q, k)| bias(q, k)).collect();
            let bias = fp32::<B, 4>(&bias, shape);
            match is_half && in_half {
                true => bias.cast(q.dtype()),
                false => bias,
            }
        });
        module::attention(q, k, v, mask, bias, self.options)
    }

    /// The result, and the gradients of query, key and value.
    fn train<B: AutodiffBackend>(&self, inputs: &[Vec<f64>; 3], in_half: bool) -> Vec<Vec<f64>> {
        let leaves = [QUERIES, KEYS, KEYS];
        let leaves: [Tensor<B, 4>; 3] =
            std::array::from_fn(|i| fp32(&inputs[i], [1, 1, leaves[i], HEAD]).require_grad());
        let operands = leaves.clone().map(|x| if in_half { half(x) } else { x });
        let out = self.run(operands, in_half);
        let upstream = Rng(15).values(QUERIES * HEAD, -1.0, 1.0);
        let upstream = fp32(&upstream, [1, 1, QUERIES, HEAD]);
        let grads = (out.clone() * upstream).sum().backward();
        let grads = leaves.map(|leaf| values(leaf.grad(&grads).expect("a gradient")));
        [vec![values(out)], grads.into()].concat()
    }

    /// In inference, Burn passes attention without a bias to LibTorch's own, whose mask marks the
    /// visible keys, which aligns the first query with the first key, and which has no softcap.
    fn is_otherwise_on_libtorch(&self) -> bool {
        let AttentionModuleOptions {
            is_causal, softcap, ..
        } = self.options;
        let differs = self.mask.is_some() || is_causal || softcap.is_some();
        ON_LIBTORCH && self.bias.is_none() && differs
    }

    fn infer<B: Backend>(&self, inputs: &[Vec<f64>; 3]) -> Vec<f64> {
        let rows = [QUERIES, KEYS, KEYS];
        let operands = std::array::from_fn(|i| half(fp32(&inputs[i], [1, 1, rows[i], HEAD])));
        values(self.run::<B>(operands, true))
    }
}

#[test]
fn attention_survives() {
    let scaler = GradScaler::new(LossScaleConfig::Disabled).expect("valid");
    for attention in attentions() {
        for precision in halves() {
            let inputs = attention.inputs(precision);
            let expected = attention.train::<Plain>(&inputs, false);
            let values = expected[0].iter().all(|x| x.is_finite());
            assert!(values, "{} in FP32", attention.name);
            let trained = with_precision(precision, || {
                scaler.scope(|| {
                    [
                        attention.train::<Amp>(&inputs, true),
                        attention.train::<Balanced>(&inputs, true),
                    ]
                })
            });
            for run in trained {
                for (i, (actual, expected)) in run.iter().zip(&expected).enumerate() {
                    let what = format!("{} in {precision}, {i}", attention.name);
                    // Burn's own gradient of a row that a bias of -inf masks is NaN in FP32: the
                    // reciprocal of the smallest number overflows before it meets a zero.
                    if expected.iter().any(|x| x.is_nan()) {
                        assert!(actual.iter().all(|x| x.is_finite()), "{what}: {actual:?}");
                        continue;
                    }
                    assert_same(&what, precision, actual, expected, 12.0);
                }
            }
            if attention.is_otherwise_on_libtorch() {
                continue;
            }
            let inferred = with_precision(precision, || attention.infer::<Inference>(&inputs));
            let what = format!("{} in {precision}, inference", attention.name);
            assert_same(&what, precision, &inferred, &expected[0], 12.0);
        }
    }
}
