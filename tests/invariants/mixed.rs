//! Operands of different float dtypes, for every operation that takes more than one: right values,
//! right gradients, each in its operand's dtype.

use burn::backend::Autodiff;
use burn::tensor::activation::prelu;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{
    attention, conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d, conv3d,
    deform_conv2d, linear,
};
use burn::tensor::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, GridSampleOptions,
};
use burn::tensor::signal::irfft;
use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData, TensorPrimitive};
use burn_amp::{Amp, Precision};
use burn_backend::Backend;

use crate::common::{HALVES, relative_error, roundoff};
use crate::device_in;
use crate::steps::{Keeping, Recomputing, input, values};
use shared::checked::{Checked, CheckedDevice};

pub type Pair<B> = fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>;

/// The dtype of a result.
#[derive(Clone, Copy, PartialEq)]
pub enum Gives {
    /// The widest of the operands' dtypes.
    Widest,
    /// The compute dtype.
    Half,
    /// FP32.
    Full,
    /// The first operand's dtype.
    First,
    /// No float: there is no gradient either.
    Bool,
}
use Gives::{Bool, First, Full, Half, Widest};

impl Gives {
    fn dtype(self, a: DType, b: DType, compute: DType) -> DType {
        let wide = |dtype| [a, b].contains(&dtype);
        match self {
            Bool => DType::F32,
            _ if wide(DType::F64) => DType::F64,
            Half => compute,
            Full => DType::F32,
            First => a,
            Widest if wide(DType::F32) || a != b => DType::F32,
            Widest => a,
        }
    }
}

/// Operations on two `[4, 4]` tensors of values between 0.25 and 1.25.
pub fn operations<B: Backend>() -> Vec<(&'static str, Gives, Pair<B>)> {
    vec![
        ("add", Widest, |a, b| a + b),
        ("sub", Widest, |a, b| a - b),
        ("mul", Widest, |a, b| a * b),
        ("div", Widest, |a, b| a / b),
        ("broadcast", Widest, |a, b| a * b.slice([0..1, 0..4])),
        ("remainder", Widest, |a, b| a.remainder(b)),
        ("atan2", Widest, |a, b| a.atan2(b)),
        ("max_pair", Widest, |a, b| a.max_pair(b)),
        ("min_pair", Widest, |a, b| a.min_pair(b)),
        ("powf", Full, |a, b| a.powf(b)),
        ("cross", Full, |a, b| {
            a.slice([0..4, 0..3]).cross(b.slice([0..4, 0..3]), 1)
        }),
        ("equal", Bool, |a, b| a.equal(b).float()),
        ("not_equal", Bool, |a, b| a.not_equal(b).float()),
        ("greater", Bool, |a, b| a.greater(b).float()),
        ("greater_equal", Bool, |a, b| a.greater_equal(b).float()),
        ("lower", Bool, |a, b| a.lower(b).float()),
        ("lower_equal", Bool, |a, b| a.lower_equal(b).float()),
        ("cat", Widest, |a, b| Tensor::cat(vec![a, b], 1)),
        ("stack", Widest, |a, b| {
            Tensor::stack::<3>(vec![a, b], 0).reshape([8, 4])
        }),
        ("mask_where", Widest, |a, b| {
            let mask = input::<B, 2>([4, 4], 3, &a.device()).greater_elem(0.0);
            a.mask_where(mask, b)
        }),
        ("slice_assign", Widest, |a, b| {
            a.slice_assign([1..3, 0..4], b.slice([0..2, 0..4]))
        }),
        ("scatter", Full, |a, b| {
            let indices = indices(&a);
            a.scatter(1, indices, b.slice([0..4, 0..2]), IndexingUpdateOp::Add)
        }),
        ("select_assign", Full, |a, b| {
            let rows = Tensor::from_data([3, 0], &a.device());
            a.select_assign(0, rows, b.slice([0..2, 0..4]), IndexingUpdateOp::Add)
        }),
        ("scatter_nd of sums", Full, |a, b| {
            let rows = Tensor::<B, 2, Int>::from_data([[3], [0]], &a.device());
            a.scatter_nd(rows, b.slice([0..2, 0..4]), IndexingUpdateOp::Add)
        }),
        ("scatter_nd of values", Widest, |a, b| {
            let rows = Tensor::<B, 2, Int>::from_data([[3], [0]], &a.device());
            a.scatter_nd(rows, b.slice([0..2, 0..4]), IndexingUpdateOp::Assign)
        }),
        ("matmul", Half, |a, b| a.matmul(b)),
        ("linear", Half, |a, b| linear(a, b, None)),
        ("linear of a batch", Half, |a, b| {
            linear(a.reshape([2, 2, 4]), b, None).reshape([4, 4])
        }),
        ("linear with bias", Half, |a, b| {
            linear(a.clone(), b, Some(a.slice([0..1, 0..4]).reshape([4])))
        }),
        ("conv1d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 2, 8]), b.reshape([4, 2, 2]));
            conv1d(x, w, None, ConvOptions::new([1], [0], [1], 1)).reshape([4, 7])
        }),
        ("conv2d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 1, 4, 4]), b.reshape([4, 1, 2, 2]));
            conv2d(x, w, None, ConvOptions::new([1; 2], [0; 2], [1; 2], 1)).reshape([4, 9])
        }),
        ("conv2d with bias", Half, |a, b| {
            let bias = Some(a.clone().slice([0..1, 0..4]).reshape([4]));
            let (x, w) = (a.reshape([1, 1, 4, 4]), b.reshape([4, 1, 2, 2]));
            conv2d(x, w, bias, ConvOptions::new([1; 2], [0; 2], [1; 2], 1)).reshape([4, 9])
        }),
        ("conv3d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 1, 4, 2, 2]), b.reshape([2, 1, 2, 2, 2]));
            conv3d(x, w, None, ConvOptions::new([1; 3], [0; 3], [1; 3], 1)).reshape([2, 3])
        }),
        ("conv_transpose1d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 2, 8]), b.reshape([2, 4, 2]));
            let options = ConvTransposeOptions::new([1], [0], [0], [1], 1);
            conv_transpose1d(x, w, None, options).reshape([4, 9])
        }),
        ("conv_transpose2d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 1, 4, 4]), b.reshape([1, 4, 2, 2]));
            let options = ConvTransposeOptions::new([1; 2], [0; 2], [0; 2], [1; 2], 1);
            conv_transpose2d(x, w, None, options).reshape([4, 25])
        }),
        ("conv_transpose3d", Half, |a, b| {
            let (x, w) = (a.reshape([1, 1, 4, 2, 2]), b.reshape([1, 2, 2, 2, 2]));
            let options = ConvTransposeOptions::new([1; 3], [0; 3], [0; 3], [1; 3], 1);
            conv_transpose3d(x, w, None, options).reshape([2, 45])
        }),
        ("attention", Half, |a, b| {
            let (q, k) = (a.clone().reshape([1, 2, 2, 4]), b.reshape([1, 2, 2, 4]));
            let v = a.reshape([1, 2, 2, 4]);
            attention(q, k, v, None, None, AttentionModuleOptions::default()).reshape([4, 4])
        }),
        ("attention with bias", Half, |a, b| {
            let q = a.reshape([1, 2, 2, 4]);
            let bias = b.slice([0..2, 0..4]).reshape([1, 2, 2, 2]);
            let options = AttentionModuleOptions::default();
            attention(q.clone(), q.clone(), q, None, Some(bias), options).reshape([4, 4])
        }),
        ("prelu", Half, |a, b| {
            prelu(a - 0.75, b.slice([0..1, 0..4]).reshape([4]))
        }),
        ("layer_norm", First, |a, b| {
            let gamma: Tensor<B, 1> = b.slice([0..1, 0..4]).reshape([4]);
            let [a, gamma] = [a.into_primitive(), gamma.into_primitive()].map(|t| t.tensor());
            let normed = B::layer_norm(a, gamma, None, 1e-5);
            Tensor::from_primitive(TensorPrimitive::Float(normed))
        }),
        ("grid_sample_2d", First, |a, b| {
            let (x, grid) = (a.reshape([1, 1, 4, 4]), b.reshape([1, 4, 2, 2]) * 0.5);
            x.grid_sample_2d(grid, GridSampleOptions::default())
                .reshape([4, 2])
        }),
        ("deform_conv2d", First, |a, b| {
            let offset = Tensor::cat(vec![b.clone().reshape([1, 1, 4, 4]); 8], 1) * 0.25;
            let (x, w) = (a.reshape([1, 1, 4, 4]), b.reshape([4, 1, 2, 2]));
            let options = DeformConvOptions::new([1; 2], [0; 2], [1; 2], 1, 1);
            let offset = offset.slice([0..1, 0..8, 0..3, 0..3]);
            deform_conv2d(x, offset, w, None, None, options).reshape([4, 9])
        }),
        ("irfft", Full, |a, b| {
            irfft(a.slice([0..4, 0..3]), b.slice([0..4, 0..3]), 1, None)
        }),
    ]
}

fn indices<B: Backend>(of: &Tensor<B, 2>) -> Tensor<B, 2, Int> {
    Tensor::from_data([[0, 3], [2, 2], [1, 0], [3, 1]], &of.device())
}

/// Operand dtypes that a backend must never see together.
const MIXTURES: [(DType, DType); 11] = [
    (DType::F16, DType::F32),
    (DType::F32, DType::F16),
    (DType::BF16, DType::F32),
    (DType::F32, DType::BF16),
    (DType::F16, DType::BF16),
    (DType::BF16, DType::F16),
    (DType::F64, DType::F16),
    (DType::F16, DType::F64),
    (DType::F64, DType::BF16),
    (DType::BF16, DType::F64),
    (DType::F32, DType::F64),
];

/// Values that each dtype rounds, between 0.25 and 1.25, none of them equal but the first.
fn operand(seed: u64, dtype: DType) -> TensorData {
    let mut values = values(16, seed);
    values[0] = 0.0;
    let values = values.into_iter().map(|v| 0.75 + 0.5 * v).collect();
    TensorData::new(values, [4, 4]).convert_dtype(dtype)
}

fn operands<B: Backend>(
    device: &B::Device,
    dtypes: (DType, DType),
    exact: bool,
) -> [Tensor<B, 2>; 2] {
    [(1, dtypes.0), (2, dtypes.1)].map(|(seed, dtype)| {
        let data = operand(seed, dtype);
        match exact {
            true => Tensor::from_data(data.convert_dtype(DType::F64), (device, DType::F64)),
            false => Tensor::from_data(data, (device, dtype)),
        }
    })
}

pub fn flat<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[track_caller]
fn assert_near(what: &str, unit: f64, actual: &[f32], expected: &[f32]) {
    let error = relative_error(actual, expected);
    assert!(
        error <= 16.0 * unit,
        "{what}: relative error {error:.1e}\nactual   {actual:?}\nexpected {expected:?}"
    );
}

/// The coarsest rounding that takes part.
fn unit(precision: Precision, (a, b): (DType, DType), gives: Gives) -> f64 {
    let computed = [a, b].contains(&DType::F64) || gives == Bool;
    let of = |dtype| match dtype {
        DType::F16 => roundoff(Precision::F16),
        DType::BF16 => roundoff(Precision::Bf16),
        _ => roundoff(Precision::F32),
    };
    match computed {
        true => roundoff(Precision::F32),
        false => of(a).max(of(b)).max(roundoff(precision)),
    }
}

/// On `device`, which computes in `precision`, with results in the dtype that `dtype` gives for the
/// operands'.
pub fn assert_values(
    device: &CheckedDevice,
    precision: Precision,
    mixtures: &[(DType, DType)],
    dtype: impl Fn(Gives, DType, DType) -> DType,
) {
    let exact = operations::<Checked>();
    let operations = operations::<Amp<Checked>>();
    for ((name, gives, op), (_, _, reference)) in operations.into_iter().zip(exact) {
        for &dtypes in mixtures {
            let what = format!("{name} of {dtypes:?} in {precision}");
            let [a, b] = operands::<Amp<Checked>>(device, dtypes, false);
            let out = op(a, b);
            assert_eq!(out.dtype(), dtype(gives, dtypes.0, dtypes.1), "{what}");
            let [a, b] = operands::<Checked>(device, dtypes, true);
            let expected = flat(reference(a, b));
            assert_near(&what, unit(precision, dtypes, gives), &flat(out), &expected);
        }
    }
}

#[test]
fn values_are_right() {
    for precision in HALVES {
        let half = precision.compute_dtype().expect("a half precision");
        assert_values(
            &device_in(precision),
            precision,
            &MIXTURES,
            |gives, a, b| gives.dtype(a, b, half),
        );
    }
}

/// The gradients of both operands, each in its operand's dtype.
fn gradients<B>(
    device: &CheckedDevice,
    what: &str,
    op: Pair<B>,
    dtypes: (DType, DType),
    exact: bool,
) -> [Vec<f32>; 2]
where
    B: AutodiffBackend<Device = CheckedDevice>,
{
    let leaves = operands::<B>(device, dtypes, exact).map(Tensor::require_grad);
    let [a, b] = leaves.clone();
    let out = op(a, b);
    let weights = input::<B, 2>(out.dims(), 4, device).cast(out.dtype());
    let grads = (out * weights).sum().backward();
    leaves.map(|leaf| {
        let grad = leaf.grad(&grads);
        let grad = grad.unwrap_or_else(|| panic!("{what}: no gradient"));
        assert_eq!(grad.dtype(), leaf.dtype(), "{what}: of the gradient");
        flat(grad)
    })
}

/// On `device`, which computes in `precision`.
pub fn assert_gradients<B: AutodiffBackend<Device = CheckedDevice>>(
    device: &CheckedDevice,
    precision: Precision,
    mixtures: &[(DType, DType)],
) {
    let exact = operations::<Autodiff<Checked>>();
    for ((name, gives, op), (_, _, reference)) in operations::<B>().into_iter().zip(exact) {
        // Burn has no gradient of irfft.
        if gives == Bool || name == "irfft" {
            continue;
        }
        for &dtypes in mixtures {
            let what = format!("{name} of {dtypes:?} in {precision}");
            let actual = gradients::<B>(device, &what, op, dtypes, false);
            let expected = gradients::<Autodiff<Checked>>(device, &what, reference, dtypes, true);
            // The gradients themselves are in their operands' dtypes.
            let unit = unit(precision, dtypes, gives).max(match dtypes {
                (DType::BF16, _) | (_, DType::BF16) => roundoff(Precision::Bf16),
                (DType::F16, _) | (_, DType::F16) => roundoff(Precision::F16),
                _ => 0.0,
            });
            for (actual, expected) in actual.iter().zip(&expected) {
                assert_near(&format!("{what}: gradient"), unit, actual, expected);
            }
        }
    }
}

fn gradients_are_right<B: AutodiffBackend<Device = CheckedDevice>>() {
    for precision in HALVES {
        assert_gradients::<B>(&device_in(precision), precision, &MIXTURES);
    }
}

#[test]
fn gradients_are_right_when_intermediates_are_kept() {
    gradients_are_right::<Keeping>();
}

#[test]
fn gradients_are_right_when_intermediates_are_recomputed() {
    gradients_are_right::<Recomputing>();
}
