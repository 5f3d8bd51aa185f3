//! Operations whose precision a configuration changes: values and gradients against plain Burn in FP32,
//! and the cases in which no change applies.

mod common;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{attention, avg_pool2d, linear, max_pool2d};
use burn::tensor::{DType, TensorPrimitive, activation};
use burn_amp::policy::OpPrecision::{self, F32, Half};
use burn_amp::{Amp, AmpAutodiff, AmpError, Precision, full_precision, with_precision};
use burn_backend::{DTypeUsage, DTypeUsageSet};

use common::mlp::{Fill, parameters, values};
use common::{HALVES, assert_close};
use shared::checked::{self, Checked, CheckedDevice};

type Plain = Autodiff<Flex>;
type Kept = AmpAutodiff<Checked, NoCheckpointing>;
type Recomputed = AmpAutodiff<Checked, BalancedCheckpointing>;

/// Functions of a leaf, each with the operation that it calls. `half(x)` is the leaf itself, in half
/// where half is in force.
macro_rules! functions {
    ($($name:literal = $x:ident => $y:expr;)*) => {
        const NAMES: &[&str] = &[$($name),*];

        fn call<B: Backend>(name: &str, x: Tensor<B, 2>) -> Tensor<B, 2> {
            match name {
                $($name => { let $x = x; $y })*
                _ => panic!("no function {name}"),
            }
        }
    };
}

functions! {
    "matmul" = x => x.clone().matmul(x.transpose());
    "linear" = x => linear(x, weights([8, 4]), Some(weights([4])));
    "attention" = x => {
        let x = x.reshape([1, 1, 4, 8]);
        attention(x.clone(), x.clone(), x, None, None, Default::default()).reshape([4, 8])
    };
    "exp" = x => half(x).exp();
    "log" = x => half(x).log();
    "powi_scalar" = x => half(x).powi_scalar(2);
    "sum_dim" = x => half(x).sum_dim(1);
    "mean_dim" = x => half(x).mean_dim(0);
    "sum" = x => half(x).sum().reshape([1, 1]);
    "mean" = x => half(x).mean().reshape([1, 1]);
    "prod_dim" = x => half(x).narrow(1, 0, 3).prod_dim(1);
    "softmax" = x => activation::softmax(half(x), 1);
    "log_softmax" = x => activation::log_softmax(half(x), 1);
    "softmin" = x => activation::softmin(half(x), 1);
    "layer_norm" = x => layer_norm(x);
    "layer_norm of half" = x => layer_norm(half(x));
    "sqrt" = x => x.sqrt();
    "sqrt of half" = x => half(x).sqrt();
    "avg_pool2d" = x => {
        let x = x.reshape([1, 1, 4, 8]);
        avg_pool2d(x, [2, 2], [2, 2], [0, 0], true, false).reshape([2, 4])
    };
    "avg_pool2d of half" = x => {
        let x = half(x).reshape([1, 1, 4, 8]);
        avg_pool2d(x, [2, 2], [2, 2], [0, 0], true, false).reshape([2, 4])
    };
    "add" = x => half(x.clone()) + x;
    "sub" = x => half(x.clone()) - x.flip([0]);
    "mul" = x => half(x.clone()) * x;
    "div" = x => half(x.clone()) / x.flip([0]);
    "cat" = x => Tensor::cat(vec![half(x.clone()), x], 0);
    "relu" = x => activation::relu(x);
    "relu of half" = x => activation::relu(half(x));
    "sigmoid" = x => activation::sigmoid(x);
    "tanh" = x => x.tanh();
    "tanh of half" = x => half(x).tanh();
    "gelu" = x => activation::gelu(x);
    "max_pool2d" = x => {
        let x = x.reshape([1, 1, 4, 8]);
        max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], false).reshape([2, 4])
    };
    "neg" = x => half(x).neg();
    "abs" = x => half(x).abs();
    "mul_scalar" = x => half(x) * 3.0;
    "clamp" = x => half(x).clamp(0.5, 2.0);
    "max_dim" = x => half(x).max_dim(1);
}

/// Numbers that both half dtypes hold: odd multiples of 1/32, below 4.
fn held(count: usize, start: usize) -> Vec<f32> {
    let value = |i| ((i * 37 % 61) * 2 + 1) as f32 / 32.0;
    (start..start + count).map(value).collect()
}

fn weights<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    let values = held(shape.iter().product(), 7);
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn layer_norm<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let weights = || weights::<B, 1>([8]).into_primitive().tensor();
    let x = x.into_primitive().tensor();
    let out = B::layer_norm(x, weights(), Some(weights()), 1e-5);
    Tensor::from_primitive(TensorPrimitive::Float(out))
}

/// The same values, in half where half is in force.
fn half<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let columns = x.dims()[1];
    let eye = Tensor::<B, 2, Int>::eye(columns, &x.device()).float();
    x.matmul(eye.set_require_grad(false))
}

/// A result's dtype and values, and the gradient of its weighted sum.
#[derive(Debug, PartialEq)]
struct Run {
    dtype: DType,
    values: Vec<f32>,
    grad: Vec<f32>,
}

fn leaf<B: Backend>() -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(held(32, 0), [4, 8]), &Default::default())
}

fn run<B: AutodiffBackend>(name: &str) -> Run {
    let x = leaf::<B>().require_grad();
    let out = call(name, x.clone());
    let dims = out.dims();
    let dtype = out.dtype();
    let values = out.to_data().to_vec().unwrap();
    let grads = (out * weights(dims)).sum().backward();
    let grad = x.grad(&grads).expect("a gradient");
    assert_eq!(grad.dtype(), DType::F32, "{name}");
    Run {
        dtype,
        values,
        grad: grad.into_data().to_vec().unwrap(),
    }
}

/// Runs `f` with the default device configured, one test at a time: they share that device.
fn configured<T>(
    precision: Precision,
    changes: &[(&str, OpPrecision)],
    f: impl FnOnce() -> T,
) -> T {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|broken| broken.into_inner());
    let mut config = checked::config().with_precision(precision);
    if precision == Precision::F16 {
        config = config.with_loss_scale(burn_amp::LossScaleConfig::Fixed(128.0));
    }
    for (op, precision) in changes {
        config = config.with_op(op, *precision).unwrap();
    }
    let device = CheckedDevice::default();
    config.apply::<Kept>(&device).unwrap();
    device.reset();
    f()
}

fn dtype_of(precision: Precision) -> DType {
    precision.compute_dtype().unwrap()
}

/// The operation of a function.
fn op_of(name: &str) -> &str {
    name.split(' ').next().unwrap()
}

/// Whether the table gives half.
fn is_half_by_table(name: &str) -> bool {
    name.ends_with(" of half")
        || ["matmul", "linear", "attention"].contains(&name)
        || ["neg", "abs", "mul_scalar", "clamp", "max_dim"].contains(&name)
}

fn data<B: Backend>(tensor: Tensor<B, 2>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

#[test]
fn an_operation_changed_to_half_is_one_rounding_from_fp32_in_both_layers() {
    let accumulate = [
        "sum",
        "sum_dim",
        "mean",
        "mean_dim",
        "exp",
        "softmax",
        "log_softmax",
        "layer_norm",
    ];
    let mut changed = 0;
    for name in NAMES {
        let change = [(op_of(name), Half)];
        match checked::config().with_op(op_of(name), Half) {
            Ok(config) if config != checked::config() => changed += 1,
            _ => continue,
        }
        // Flex computes these in steps, each of which rounds.
        let is_in_steps = ["sigmoid", "tanh", "gelu"].contains(&op_of(name));
        let roundings = if is_in_steps { 4.0 } else { 1.0 };
        let plain = run::<Plain>(name);
        for precision in HALVES {
            let half = dtype_of(precision);
            let by_table = configured(precision, &[], || run::<Kept>(name));
            assert_eq!(by_table.dtype == half, is_half_by_table(name), "{name}");
            let (kept, counts) = configured(precision, &change, || {
                let kept = run::<Kept>(name);
                (kept, CheckedDevice::default().counts())
            });
            let (recomputed, inferred) = configured(precision, &change, || {
                let inferred = call(name, leaf::<Amp<Checked>>());
                assert_eq!(inferred.dtype(), half, "{name}");
                (run::<Recomputed>(name), data(inferred))
            });
            assert_close(name, precision, &inferred, &plain.values, roundings);
            for run in [kept, recomputed] {
                assert_eq!(run.dtype, half, "{name}");
                assert_close(name, precision, &run.values, &plain.values, roundings);
                assert_close(name, precision, &run.grad, &plain.grad, 6.0);
            }
            for (op, dtype, _) in counts.ops() {
                let sums = accumulate.contains(&op.trim_start_matches("float_"));
                assert!(!sums || dtype != half, "{name}: {op} in {dtype:?}");
            }
        }
    }
    assert!(changed > 20, "{changed}");
}

#[test]
fn an_operation_changed_to_fp32_is_plain_burns_in_both_passes() {
    for name in NAMES {
        let change = [(op_of(name), F32), ("matmul", F32)];
        let plain = run::<Plain>(name);
        for precision in HALVES {
            let by_table = configured(precision, &[], || run::<Kept>(name));
            let half = dtype_of(precision);
            assert_eq!(by_table.dtype == half, is_half_by_table(name), "{name}");
            // Its operand was rounded before, to the same values.
            let fed = configured(precision, &change[..1], || run::<Kept>(name));
            assert_eq!(fed.dtype, DType::F32, "{name}");
            assert_close(name, Precision::F32, &fed.values, &plain.values, 4.0);
            assert_close(name, precision, &fed.grad, &plain.grad, 3.0);
            // None of its inputs is half.
            let (runs, inferred, in_half) = configured(precision, &change, || {
                let runs = [run::<Kept>(name), run::<Recomputed>(name)];
                let inferred = data(call(name, leaf::<Amp<Checked>>()));
                let in_half = CheckedDevice::default().counts().in_half();
                (runs, inferred, in_half)
            });
            assert_eq!(in_half, [], "{name}");
            assert_close(name, Precision::F32, &inferred, &plain.values, 4.0);
            for run in runs {
                assert_close(name, Precision::F32, &run.values, &plain.values, 4.0);
                assert_close(name, Precision::F32, &run.grad, &plain.grad, 8.0);
            }
        }
    }
}

#[test]
fn a_long_sum_in_half_is_whole() {
    for precision in HALVES {
        let change = [("sum", Half), ("mean", Half)];
        let total = configured(precision, &change, || {
            let ones = Tensor::<Kept, 1>::ones([4096], &Default::default()).require_grad();
            let sum = ones.clone().sum();
            assert_eq!(sum.dtype(), dtype_of(precision));
            let grad = ones.grad(&sum.clone().backward()).unwrap();
            assert_eq!(grad.into_data().to_vec::<f32>().unwrap(), [1.0; 4096]);
            sum.into_scalar()
        });
        assert_eq!(total, 4096.0);
    }
}

/// Burn composes an inverse square of a product, which f16 does not hold.
#[test]
fn an_inverse_square_in_half_computes_in_fp32_inside() {
    for op in ["powi_scalar", "powf_scalar"] {
        let values = configured(Precision::F16, &[(op, Half)], || {
            let x = Tensor::<Kept, 1>::full([4], 300.0, &Default::default()).require_grad();
            let x = x.cast(DType::F16);
            let inverse = match op {
                "powi_scalar" => x.powi_scalar(-2),
                _ => x.powf_scalar(-2.0),
            };
            assert_eq!(inverse.dtype(), DType::F16);
            inverse.into_data().iter::<f32>().collect::<Vec<_>>()
        });
        // Half of the distance between the smallest f16.
        let largest_error = f32::powi(2.0, -25);
        for value in values {
            assert!(
                (value - 1.0 / 90_000.0).abs() <= largest_error,
                "{op}: {value}"
            );
        }
    }
}

#[test]
fn a_region_in_fp32_a_scalar_and_a_device_go_before_a_change() {
    let change = [("softmax", Half), ("leaky_relu", Half)];
    let softmax = || activation::softmax(leaf::<Kept>(), 1);
    configured(Precision::F16, &change, || {
        assert_eq!(softmax().dtype(), DType::F16);
        assert_eq!(full_precision(softmax).dtype(), DType::F32);
        let leaky = |slope| activation::leaky_relu(leaf::<Kept>(), slope).dtype();
        assert_eq!((leaky(0.01), leaky(1e-8)), (DType::F16, DType::F32));
        let double = leaf::<Kept>().cast(DType::F64);
        assert_eq!(activation::softmax(double, 1).dtype(), DType::F64);
    });
    // A device in FP32 computes as plain Burn, except in its regions.
    configured(Precision::F32, &change, || {
        let plain = activation::softmax(leaf::<Plain>(), 1).into_data();
        assert_eq!(softmax().into_data(), plain);
        let region = with_precision(Precision::Bf16, softmax);
        assert_eq!(region.dtype(), DType::BF16);
    });
    // A device that stores bf16 and contracts in it, and does nothing else.
    let contracts = DTypeUsage::Storage | DTypeUsage::Accelerated;
    let device = CheckedDevice::with_support(DTypeUsageSet::empty(), contracts);
    let config = checked::config().with_precision(Precision::Bf16);
    let config = config.with_op("softmax", Half).unwrap();
    config.apply::<Kept>(&device).unwrap();
    let x = Tensor::<Kept, 2>::ones([2, 2], &device);
    assert_eq!(activation::softmax(x, 1).dtype(), DType::F32);
}

#[test]
fn the_next_configuration_takes_a_change_back() {
    let softmax = || activation::softmax(leaf::<Kept>(), 1).dtype();
    assert_eq!(
        configured(Precision::F16, &[("softmax", Half)], softmax),
        DType::F16
    );
    assert_eq!(configured(Precision::F16, &[], softmax), DType::F32);
}

/// An optimizer's arithmetic is on FP32 parameters, and on gradients.
#[test]
fn an_optimizer_steps_as_without_changes() {
    let changes = ["add", "sub", "mul", "div", "powi_scalar", "sqrt"].map(|op| (op, Half));
    let trained = |changes| {
        configured(Precision::Bf16, changes, || {
            let device = Default::default();
            let model = LinearConfig::new(8, 4).init::<Kept>(&device);
            let mut model = burn::module::Module::map(model, &mut Fill(0));
            let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
            for step in 0..3 {
                let loss = model.forward(values::<Kept, 2>([16, 8], step)).mean();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(0.01, model, grads);
            }
            parameters(&model)
        })
    };
    assert_eq!(trained(&changes), trained(&[]));
}

#[test]
fn a_change_is_checked_where_it_is_written() {
    let config = checked::config();
    assert!(matches!(
        config.with_op("sofmax", Half),
        Err(AmpError::UnknownOperation { .. })
    ));
    for (op, precision) in [
        ("reshape", F32),
        ("neg", Half),
        ("conv2d_weight_backward", F32),
    ] {
        assert!(matches!(
            config.with_op(op, precision),
            Err(AmpError::OperationPrecision { .. })
        ));
    }
    // The table's own precision is no change.
    assert_eq!(config.with_op("softmax", F32), Ok(config));
    assert_eq!(config.with_op("float_matmul", Half), Ok(config));
}

#[test]
fn a_saved_configuration_has_its_changes() {
    let config = checked::config().with_precision(Precision::Bf16);
    let changed = config.with_op("softmax", Half).unwrap();
    let changed = changed.with_op("float_matmul", F32).unwrap();
    let json = serde_json::to_string(&changed).unwrap();
    assert!(
        json.contains(r#""operations":{"matmul":"f32","softmax":"half"}"#),
        "{json}"
    );
    assert_eq!(
        serde_json::from_str::<burn_amp::AmpConfig>(&json).unwrap(),
        changed
    );
    assert!(
        serde_json::to_string(&config)
            .unwrap()
            .contains(r#""operations":{}"#)
    );
    for (json, error) in [
        (
            r#"{"operations":{"sofmax":"half"}}"#,
            config.with_op("sofmax", Half).unwrap_err().to_string(),
        ),
        (
            r#"{"operations":{"softmax":"fp8"}}"#,
            "the precision of the operation softmax: got \"fp8\", expected half or f32".into(),
        ),
    ] {
        let read = serde_json::from_str::<burn_amp::AmpConfig>(json).unwrap_err();
        assert!(read.to_string().starts_with(&error), "{read}");
    }
}

/// The figure of the guide's page on precision: a mark on parameters would reach only these.
#[test]
fn few_operations_of_a_transformer_read_a_parameter() {
    use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};

    let counts = configured(Precision::F32, &[], || {
        let device = CheckedDevice::default();
        let encoder = TransformerEncoderConfig::new(16, 32, 2, 1)
            .with_dropout(0.0)
            .init::<Amp<Checked>>(&device);
        let x = values::<Amp<Checked>, 3>([2, 4, 16], 1);
        encoder.forward(TransformerEncoderInput::new(x.clone()));
        device.reset();
        encoder.forward(TransformerEncoderInput::new(x));
        device.counts()
    });
    let moves: Vec<_> = burn_amp::policy::rows()
        .filter(|row| row.class == burn_amp::policy::Class::Move)
        .map(|row| row.op)
        .collect();
    let computing = counts.ops().filter(|(op, ..)| !moves.contains(op));
    let computing: usize = computing.map(|(.., count)| count).sum();
    let reading = counts.ran("linear") + counts.ran("layer_norm");
    assert_eq!((reading, computing), (8, 15));
}
