//! Contractions in half are compared with sums on the host, at the shapes that a program uses.

mod common;

use std::cell::RefCell;

use burn::backend::Flex;
use burn::module::{AutodiffModule, Param};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module;
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{Distribution, Tensor};
use burn_amp::policy::{OpPrecision, Reason};
use burn_amp::{AmpAutodiff, AmpReport, LossScaleConfig, Precision, exceptions, with_precision};
use burn_backend::{Backend, DType};

use common::HALVES;
use shared::checked::{self, CONTRACTIONS, Checked, CheckedDevice, Fault, Wrong};

type B = AmpAutodiff<Checked>;

fn device(precision: Precision) -> CheckedDevice {
    let device = CheckedDevice::new();
    configure(&device, precision, true);
    device
}

/// A device of a backend of this name in bf16, verified as the backend's default is.
fn named(name: &'static str) -> CheckedDevice {
    let device = CheckedDevice::new();
    device.set_name(name);
    let config = checked::config().with_precision(Precision::Bf16);
    config.apply::<B>(&device).unwrap();
    device
}

fn configure(device: &CheckedDevice, precision: Precision, verifies: bool) {
    let config = checked::config()
        .with_precision(precision)
        .with_verification(verifies);
    let config = match precision.scales_loss() {
        true => config.with_loss_scale(LossScaleConfig::Fixed(1.0)),
        false => config,
    };
    config.apply::<B>(device).unwrap();
}

/// The exceptions, as text.
fn found(device: &CheckedDevice) -> Vec<String> {
    let list = exceptions::<B>(device).list();
    assert!(
        list.iter()
            .all(|e| e.reason == Reason::Verified && e.precision == OpPrecision::F32)
    );
    list.iter().map(ToString::to_string).collect()
}

fn unverified(device: &CheckedDevice) -> Vec<String> {
    AmpReport::of::<B>(device).unwrap().unverified
}

/// Numbers that sum to no number that half has.
fn random<const D: usize>(shape: [usize; D], device: &CheckedDevice) -> Tensor<B, D> {
    let count: usize = shape.iter().product();
    let value = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 1_000_003.0 - 0.4;
    let values = (0..count).map(|i| value(i + count)).collect();
    Tensor::from_data(TensorData::new::<f32, _>(values, shape), device)
}

/// Reads the gradient of what is learned.
type ReadGradient = Box<dyn FnOnce(&<B as AutodiffBackend>::Gradients) -> Vec<f32>>;

thread_local! {
    /// Of what was learned since the last pass.
    static READS: RefCell<Vec<ReadGradient>> = RefCell::default();
}

fn learned<const D: usize>(shape: [usize; D], device: &CheckedDevice) -> Tensor<B, D> {
    let learned = random(shape, device).require_grad();
    let of = learned.clone();
    let read = move |grads: &_| values(of.grad(grads).unwrap());
    READS.with_borrow_mut(|reads| reads.push(Box::new(read)));
    learned
}

/// Reads the result and the gradients of a pass.
type Read = Box<dyn FnOnce() -> Vec<Vec<f32>>>;

/// A forward and a backward pass.
fn pass<const D: usize>(out: Tensor<B, D>) -> Read {
    let weights = random(out.dims(), &out.device());
    let grads = (out.clone() * weights).sum().backward();
    let reads = READS.take();
    Box::new(move || {
        let grads = reads.into_iter().map(|read| read(&grads));
        [values(out)].into_iter().chain(grads).collect()
    })
}

type Contraction = (&'static str, fn(&CheckedDevice) -> Read);

/// Contractions of each form, each with its gradients.
const CALLS: &[Contraction] = &[
    ("a product", |d| {
        pass(learned([33, 70], d).matmul(learned([70, 18], d)))
    }),
    ("a row", |d| {
        pass(learned([1, 70], d).matmul(learned([70, 18], d)))
    }),
    ("a batch", |d| {
        pass(learned([3, 2, 12, 40], d).matmul(learned([3, 1, 40, 24], d)))
    }),
    ("linear", |d| {
        let layer = LinearConfig::new(48, 40).init::<B>(d);
        let layer = Linear {
            weight: Param::from_tensor(learned([48, 40], d)),
            bias: layer.bias.map(|_| Param::from_tensor(learned([40], d))),
        };
        pass(layer.forward(learned::<3>([4, 10, 48], d)))
    }),
    ("conv1d", |d| {
        let options = ConvOptions::new([2], [3], [2], 1);
        let bias = Some(learned([24], d));
        pass(module::conv1d(
            learned([3, 16, 50], d),
            learned([24, 16, 4], d),
            bias,
            options,
        ))
    }),
    ("conv2d", |d| {
        let options = ConvOptions::new([2, 1], [1, 2], [1, 2], 1);
        let (x, weight) = (learned([3, 16, 19, 17], d), learned([24, 16, 3, 3], d));
        pass(module::conv2d(x, weight, Some(learned([24], d)), options))
    }),
    ("conv2d in groups", |d| {
        let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 4);
        let (x, weight) = (learned([3, 16, 14, 17], d), learned([24, 4, 3, 3], d));
        pass(module::conv2d(x, weight, None, options))
    }),
    ("conv2d of each channel", |d| {
        let options = ConvOptions::new([2, 2], [1, 1], [1, 1], 24);
        let (x, weight) = (learned([3, 24, 14, 17], d), learned([24, 1, 3, 3], d));
        pass(module::conv2d(x, weight, None, options))
    }),
    ("conv2d in two groups", |d| {
        let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 2);
        let (x, weight) = (learned([3, 16, 10, 9], d), learned([8, 8, 3, 3], d));
        pass(module::conv2d(x, weight, None, options))
    }),
    // Three quarters of the gradient of the input sum nothing.
    ("conv2d of a shortcut", |d| {
        let options = ConvOptions::new([2, 2], [0, 0], [1, 1], 1);
        let (x, weight) = (learned([2, 16, 16, 16], d), learned([32, 16, 1, 1], d));
        pass(module::conv2d(x, weight, None, options))
    }),
    ("conv3d", |d| {
        let options = ConvOptions::new([1, 2, 1], [1, 0, 1], [1, 1, 2], 1);
        let (x, weight) = (learned([2, 8, 6, 7, 9], d), learned([12, 8, 2, 3, 2], d));
        pass(module::conv3d(x, weight, None, options))
    }),
    ("conv_transpose1d", |d| {
        let options = ConvTransposeOptions::new([2], [1], [1], [2], 1);
        let (x, weight) = (learned([3, 16, 20], d), learned([16, 12, 3], d));
        pass(module::conv_transpose1d(
            x,
            weight,
            Some(learned([12], d)),
            options,
        ))
    }),
    ("conv_transpose2d", |d| {
        let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], 1);
        let (x, weight) = (learned([3, 16, 9, 8], d), learned([16, 12, 3, 2], d));
        pass(module::conv_transpose2d(x, weight, None, options))
    }),
    ("conv_transpose2d in groups", |d| {
        let options = ConvTransposeOptions::new([2, 2], [1, 1], [0, 0], [1, 1], 4);
        let (x, weight) = (learned([3, 16, 9, 8], d), learned([16, 6, 3, 3], d));
        pass(module::conv_transpose2d(x, weight, None, options))
    }),
    ("conv_transpose3d", |d| {
        let options = ConvTransposeOptions::new([1, 2, 1], [0, 1, 0], [0, 1, 0], [1, 1, 1], 1);
        let (x, weight) = (learned([2, 8, 4, 5, 6], d), learned([8, 6, 2, 3, 2], d));
        pass(module::conv_transpose3d(x, weight, None, options))
    }),
];

fn all(device: &CheckedDevice) {
    for (_, contraction) in CALLS {
        drop(contraction(device));
    }
}

#[test]
fn a_device_that_is_right_has_no_exception() {
    for (name, contraction) in CALLS {
        let device = device(Precision::Bf16);
        drop(contraction(&device));
        assert_eq!(found(&device), [""; 0], "{name}");
        assert_eq!(unverified(&device), [""; 0], "{name}");
    }
}

/// A device that is wrong in half in one operation.
fn wrong_in(op: usize) -> Wrong {
    macro_rules! wrong {
        ($($n:literal)*) => {
            [$(|op, dtype, _| op == CONTRACTIONS[$n] && dtype == DType::BF16),*]
        };
    }
    const WRONG: [Wrong; 22] = wrong!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21);
    WRONG[op]
}

#[test]
fn what_is_wrong_is_found_in_each_operation_and_nothing_else() {
    for (i, op) in CONTRACTIONS.iter().enumerate() {
        for fault in [Fault::All, Fault::Block, Fault::LastColumn] {
            let device = device(Precision::Bf16);
            device.set_wrong(wrong_in(i));
            device.set_fault(fault);
            for _ in 0..3 {
                all(&device);
            }
            let found = found(&device);
            let short = op.trim_start_matches("float_");
            assert!(!found.is_empty(), "{op}, {fault:?}");
            for found in &found {
                assert_eq!(found.split(' ').next(), Some(short), "{fault:?}");
            }
            println!("{op} {fault:?} {}", found.len());
            assert_eq!(unverified(&device), [""; 0], "{op}");
            // It computes in FP32 from now on.
            device.reset();
            all(&device);
            let ran = |dtype| device.counts().ran_in(op, dtype);
            assert!(ran(DType::F32) >= found.len(), "{op}");
        }
    }
}

/// LibTorch has computed when a call returns, so the result is compared at once: one that is found wrong is not used.
#[test]
fn on_libtorch_what_is_wrong_is_computed_again_before_it_is_used() {
    let run = |name, wrong: Wrong| {
        let device = named(name);
        device.set_wrong(wrong);
        let read = |(_, contraction): &Contraction| contraction(&device)();
        let read: Vec<_> = CALLS.iter().flat_map(read).collect();
        assert_eq!(unverified(&device), [""; 0]);
        (read, found(&device))
    };
    let (right, none) = run("libtorch<cpu>", |_, _, _| false);
    assert_eq!(none, [""; 0]);
    // A second rounding of a result, where a bias is added in half.
    let is_right = |(one, right): (&Vec<f32>, &Vec<f32>)| {
        let largest = right.iter().fold(0.0, |a: f32, b| b.abs().max(a));
        assert_eq!(one.len(), right.len());
        let mut pairs = one.iter().zip(right);
        pairs.all(|(one, right)| (one - right).abs() <= largest * 2f32.powi(-7))
    };
    let all_right = |read: &[Vec<f32>]| {
        assert_eq!(read.len(), right.len());
        read.iter().zip(&right).all(is_right)
    };
    assert!(all_right(&run("cubecl<cuda>", |_, _, _| false).0));
    for (i, op) in CONTRACTIONS.iter().enumerate() {
        let (read, found) = run("libtorch<cpu>", wrong_in(i));
        let short = op.trim_start_matches("float_");
        assert!(!found.is_empty(), "{op}");
        let is_it = |found: &String| found.split(' ').next() == Some(short);
        assert!(found.iter().all(is_it), "{found:?}");
        assert!(all_right(&read), "{op}");
        // Where kernels are compiled, the pass goes on with the wrong result.
        let (read, _) = run("cubecl<cuda>", wrong_in(i));
        assert!(!all_right(&read), "{op}");
    }
}

/// A wrong call runs once more; a wrong one in FP32, or one that cannot be read back, does not.
#[test]
fn on_libtorch_one_run_more_mends_a_call() {
    let half: Wrong = |op, dtype, _| op == "float_matmul" && dtype == DType::BF16;
    let both: Wrong = |op, _, _| op == "float_matmul";
    for (wrong, unreadable, runs) in [
        (half, false, [(1, 1), (0, 1), (0, 1)]),
        (both, false, [(1, 1), (0, 1), (0, 1)]),
        (half, true, [(1, 0), (1, 0), (1, 0)]),
    ] {
        let device = named("libtorch<cpu>");
        device.set_wrong(wrong);
        let weight = random([40, 24], &device).set_require_grad(false);
        for (i, runs) in runs.into_iter().enumerate() {
            device.reset();
            device.set_unreadable(unreadable);
            drop(random([8, 40], &device).matmul(weight.clone()));
            device.set_unreadable(false);
            let counts = device.counts();
            let ran = [DType::BF16, DType::F32].map(|dtype| counts.ran_in("float_matmul", dtype));
            assert_eq!((ran[0], ran[1]), runs, "{unreadable} {i}");
            // In half, and once more in FP32.
            let is_compared = counts.ran("float_select") > 0;
            assert_eq!(
                is_compared,
                i < if unreadable { 1 } else { 2 },
                "{unreadable} {i}"
            );
        }
    }
}

fn conv(channels: usize, device: &CheckedDevice) -> Tensor<B, 4> {
    let x = random([2, channels, 8, 8], device);
    let weight = random([16, channels, 1, 1], device).set_require_grad(false);
    module::conv2d(x, weight, None, ConvOptions::new([1; 2], [0; 2], [1; 2], 1))
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

/// As cubek#519: a convolution of 96 channels is wrong, and those of 80 and 112 are right. Reading a result is the end of a
/// pass, too.
#[test]
fn channels_at_which_a_kernel_is_wrong_are_found_and_no_others() {
    for precision in HALVES {
        let device = device(precision);
        device.set_wrong(|op, dtype, shapes| {
            op == "conv2d" && dtype != DType::F32 && shapes[1][1] == 96
        });
        let first: Vec<_> = [80, 96, 112]
            .map(|channels| values(conv(channels, &device)))
            .into();
        assert_eq!(
            found(&device),
            ["conv2d of [2, 96, 8, 8] and [16, 96, 1, 1]"]
        );
        // Another batch is of the same calls; the first one was wrong, and the next is right.
        let other = with_precision(Precision::F32, || {
            [80, 96, 112].map(|channels| values(conv(channels, &CheckedDevice::new())))
        });
        let second: Vec<_> = [80, 96, 112]
            .map(|channels| values(conv(channels, &device)))
            .into();
        let half = if precision == Precision::F16 { -10 } else { -7 };
        for (i, right) in other.iter().enumerate() {
            let off = |of: &[f32]| {
                let off = of.iter().zip(right).map(|(one, right)| (one - right).abs());
                off.fold(0.0, f32::max) / right.iter().fold(0.0, |a, b| b.abs().max(a))
            };
            assert_eq!(off(&first[i]) < 2f32.powi(half), i != 1, "{precision} {i}");
            assert!(off(&second[i]) < 2f32.powi(half), "{precision} {i}");
        }
        assert_eq!(unverified(&device), [""; 0]);
    }
}

/// Flex adds a product of one row up in f16.
#[test]
fn a_sum_in_half_is_found_where_a_backend_has_one() {
    let device = device(Precision::F16);
    // 33 rows are one product, and a row is another one.
    for rows in [1, 33] {
        let x = random([rows, 200], &device);
        let weight = random([200, 24], &device).set_require_grad(false);
        x.matmul(weight).into_data();
    }
    assert_eq!(found(&device), ["matmul of [1, 200] and [200, 24]"]);
    let report = AmpReport::of::<B>(&device).unwrap().to_string();
    let line =
        "\nwrong here  matmul of [1, 200] and [200, 24]: computed in FP32, then rounded to f16\n";
    assert!(report.contains(line), "{report}");
}

#[test]
fn operands_that_show_nothing_are_compared_at_a_later_use() {
    let device = device(Precision::Bf16);
    device.set_wrong(|op, dtype, _| op == "float_matmul" && dtype == DType::BF16);
    let product = |x: Tensor<B, 2>| {
        let weight = random([40, 24], &device).set_require_grad(false);
        x.matmul(weight).into_data();
    };
    // A weight that begins at zero, as an adapter's.
    for _ in 0..3 {
        product(Tensor::zeros([8, 40], &device));
    }
    assert_eq!(found(&device), [""; 0]);
    assert_eq!(unverified(&device), ["matmul of [8, 40] and [40, 24]"]);
    let report = AmpReport::of::<B>(&device).unwrap().to_string();
    let line = "unverified  matmul of [8, 40] and [40, 24]: not compared with a reference yet\n";
    assert!(report.contains(line), "{report}");
    configure(&device, Precision::Bf16, false);
    assert_eq!(unverified(&device), [""; 0]);
    configure(&device, Precision::Bf16, true);
    assert_eq!(unverified(&device).len(), 1);
    product(random([8, 40], &device));
    assert_eq!(found(&device), ["matmul of [8, 40] and [40, 24]"]);
    assert_eq!(unverified(&device), [""; 0]);
}

#[test]
fn a_pass_compares_sixteen_new_calls_and_the_next_pass_the_rest() {
    let device = device(Precision::Bf16);
    let pass = || {
        let products = (0..20).map(|n| {
            let (rows, inner) = (2 << (n % 5), 2 << (n / 5));
            let weight = random([inner, 8], &device).set_require_grad(false);
            random([rows, inner], &device).matmul(weight).sum()
        });
        let sum = products.reduce(|one, other| one + other);
        sum.unwrap().into_data();
    };
    pass();
    assert_eq!(unverified(&device).len(), 20 - 16);
    pass();
    assert_eq!(unverified(&device), [""; 0]);
    // Nothing is read then.
    device.reset();
    pass();
    assert_eq!(device.counts().ran("float_select"), 0);
    assert_eq!(device.counts().reads.total(), 1);
}

#[test]
fn it_is_off_on_flex_and_where_it_is_switched_off() {
    for config in [
        checked::config().with_precision(Precision::Bf16),
        checked::config()
            .with_precision(Precision::Bf16)
            .with_verification(false),
        checked::config()
            .with_precision(Precision::F32)
            .with_verification(true),
    ] {
        let device = CheckedDevice::new();
        config.apply::<B>(&device).unwrap();
        all(&device);
        assert_eq!(device.counts().ran("float_select"), 0);
        assert_eq!(unverified(&device), [""; 0]);
    }
    // As on a backend that chooses its kernels by shape.
    let device = named("cubecl<cuda>");
    all(&device);
    assert!(device.counts().ran("float_select") > 0);
    assert_eq!(found(&device), [""; 0]);
}

#[test]
fn a_device_that_cannot_be_read_is_not_verified() {
    let device = device(Precision::Bf16);
    device.set_wrong(|_, dtype, _| dtype == DType::BF16);
    let product = || random([8, 40], &device).matmul(learned([40, 24], &device));
    device.set_unreadable(true);
    product().sum().backward();
    device.set_unreadable(false);
    product().sum().backward();
    assert_eq!(found(&device), [""; 0]);
    assert!(!unverified(&device).is_empty());
}

/// The same program gives the same exceptions, and its random numbers are its own.
#[test]
fn it_draws_no_random_numbers_and_repeats_itself() {
    let run = |verifies| {
        let device = CheckedDevice::new();
        configure(&device, Precision::Bf16, verifies);
        device.set_wrong(|op, dtype, shapes| {
            dtype == DType::BF16 && op.starts_with("conv2d") && shapes[0][1] == 16
        });
        B::seed(&device, 7);
        for _ in 0..2 {
            let noise = Tensor::<B, 2>::random([9, 70], Distribution::Default, &device);
            drop(pass(noise.matmul(learned([70, 18], &device))));
            all(&device);
        }
        (found(&device), device.draws())
    };
    let (first, draws) = run(true);
    assert!(!first.is_empty());
    assert_eq!(run(true), (first, draws));
    assert_eq!(run(false), (vec![], draws));
}

#[test]
fn a_file_spares_the_comparisons_and_frozen_exceptions_begin_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("exceptions.json");
    let [first, second] = [(); 2].map(|()| device(Precision::Bf16));
    let is_wrong: Wrong = |op, dtype, _| op == "conv1d" && dtype == DType::BF16;
    for device in [&first, &second] {
        device.set_wrong(is_wrong);
    }
    exceptions::<B>(&first).keep_in(&path).unwrap();
    for _ in 0..3 {
        all(&first);
    }
    assert_eq!(found(&first).len(), 1);
    let name = |device: &CheckedDevice| format!("{} on {device:?}", Checked::<Flex>::name(device));
    let kept = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, kept.replacen(&name(&first), &name(&second), 1)).unwrap();
    exceptions::<B>(&second).keep_in(&path).unwrap();
    assert_eq!(found(&second), found(&first));
    second.reset();
    all(&second);
    assert_eq!(second.counts().ran_in("conv1d", DType::BF16), 0);
    // What a file calls wrong is compared once more, in FP32.
    assert!(second.counts().ran("float_select") <= 8);

    exceptions::<B>(&second).clear();
    exceptions::<B>(&second).freeze(true);
    second.reset();
    all(&second);
    assert_eq!(second.counts().ran("float_select"), 0);
    assert_eq!(found(&second), [""; 0]);
    exceptions::<B>(&second).freeze(false);
    for _ in 0..3 {
        all(&second);
    }
    assert_eq!(found(&second), found(&first));
}

/// Wrong in FP32 as well: the call is compared twice, and stays an exception.
#[test]
fn what_is_wrong_in_fp32_too_is_an_exception_and_compared_no_more() {
    let device = device(Precision::Bf16);
    device.set_wrong(|op, _, _| op == "float_matmul");
    let product = || {
        random([8, 40], &device)
            .matmul(learned([40, 24], &device))
            .into_data()
    };
    product();
    product();
    device.reset();
    product();
    assert_eq!(found(&device), ["matmul of [8, 40] and [40, 24]"]);
    assert_eq!(device.counts().ran("float_select"), 0);
    assert_eq!(device.counts().ran_in("float_matmul", DType::F32), 1);
}

/// In inference the bias is FP32 until the kernel, and may be larger than the sums.
#[test]
fn a_bias_in_fp32_is_rounded_as_the_kernel_rounds_it() {
    for precision in HALVES {
        let device = device(precision);
        let layer = Linear {
            weight: Param::from_tensor(random([64, 48], &device) * 0.01),
            bias: Some(Param::from_tensor(random([48], &device) * 3.7 - 4.595)),
        };
        let x = random::<2>([33, 64], &device).inner();
        layer.valid().forward(x).into_data();
        assert_eq!(found(&device), [""; 0], "{precision}");
        assert_eq!(unverified(&device), [""; 0], "{precision}");
    }
}

/// Tokens or classes are all that some programs read.
#[test]
fn a_read_of_integers_or_booleans_ends_a_pass_and_so_does_waiting() {
    let reads: [fn(Tensor<B, 2>); 3] = [
        |out| drop(out.argmax(1).into_data()),
        |out| drop(out.greater_elem(0.0).into_data()),
        |out| B::sync(&out.device()).unwrap(),
    ];
    for read in reads {
        let device = device(Precision::Bf16);
        let weight = random([40, 24], &device).set_require_grad(false);
        let out = random([8, 40], &device).matmul(weight);
        assert_eq!(unverified(&device).len(), 1);
        read(out);
        assert_eq!(unverified(&device), [""; 0]);
    }
}

/// What a model computes on another device than the loss's is compared as well.
#[test]
fn a_pass_ends_on_every_device_of_a_thread() {
    let devices = [device(Precision::Bf16), device(Precision::Bf16)];
    devices[0].set_wrong(|op, dtype, _| op == "float_matmul" && dtype == DType::BF16);
    let weights = devices.each_ref().map(|device| learned([24, 24], device));
    let [first, second] = weights;
    let x = random([8, 24], &devices[0]).matmul(first);
    let out = x.to_device(&devices[1]).matmul(second);
    out.sum().backward();
    assert!(!found(&devices[0]).is_empty());
    assert_eq!(found(&devices[1]), [""; 0]);
    for device in &devices {
        assert_eq!(unverified(device), [""; 0]);
    }
}

/// A half tensor of the program's own in FP32: no precision of burn-amp's applies to it.
#[test]
fn half_of_the_programs_own_is_not_compared() {
    let device = device(Precision::Bf16);
    device.set_wrong(|op, dtype, _| op == "float_matmul" && dtype == DType::F16);
    with_precision(Precision::F32, || {
        let half = |shape| random::<2>(shape, &device).cast(DType::F16);
        for _ in 0..3 {
            half([8, 40]).matmul(half([40, 24])).into_data();
        }
    });
    assert_eq!(exceptions::<B>(&device).list(), []);
    assert_eq!(device.counts().ran("float_select"), 0);
}

#[test]
fn exceptions_that_are_frozen_or_cleared_in_a_pass_stay_so() {
    let is_wrong: Wrong = |op, dtype, _| op == "float_matmul" && dtype == DType::BF16;
    let device = device(Precision::Bf16);
    device.set_wrong(is_wrong);
    let weight = random([40, 24], &device).set_require_grad(false);
    let product = || random([8, 40], &device).matmul(weight.clone());
    let out = product();
    exceptions::<B>(&device).freeze(true);
    out.into_data();
    assert_eq!(found(&device), [""; 0]);
    exceptions::<B>(&device).freeze(false);
    // Twice in half: the second says nothing of FP32.
    let first = product();
    exceptions::<B>(&device).clear();
    let second = product();
    first.into_data();
    second.into_data();
    assert_eq!(found(&device), ["matmul of [8, 40] and [40, 24]"]);
    device.reset();
    product().into_data();
    assert!(
        device.counts().ran("float_select") > 0,
        "it is compared in FP32"
    );
}
