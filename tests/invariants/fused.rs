//! With fusion: the same numbers, from steps in another order. A device reports fusion by its name.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{attention, conv2d, linear};
use burn::tensor::ops::{AttentionModuleOptions, ConvOptions};
use burn::tensor::{DType, Distribution, Tensor, TensorData, Tolerance};
use burn_amp::{Amp, AmpAutodiff, GradScaler, LossScaleConfig, Precision, full_precision};
use burn_backend::Backend;

use crate::common::{HALVES, assert_close};
use crate::configured;
use crate::steps::{KINDS, input};
use crate::training::assert_like;
use shared::checked::{self, Checked, CheckedDevice};

type Trained = AmpAutodiff<Checked>;

fn fused_in(precision: Precision) -> CheckedDevice {
    let device = CheckedDevice::new();
    device.set_name("fusion<checked>");
    configured(device, precision)
}

#[test]
fn every_kind_of_step_has_the_gradients_of_plain_burn() {
    for kind in KINDS {
        let plain = (kind.plain)(&CheckedDevice::new());
        for precision in HALVES {
            for (how, run) in [("keeping", kind.keeping), ("recomputing", kind.recomputing)] {
                let step = run(&fused_in(precision));
                assert_like(&format!("{}, {how}", kind.name), precision, &step, &plain);
            }
        }
    }
}

/// Only the order of some sums differs, and what is rounded after them.
#[test]
fn every_kind_of_step_has_the_gradients_of_one_that_is_not_fused() {
    for kind in KINDS {
        for precision in HALVES {
            let fused = (kind.keeping)(&fused_in(precision)).grads;
            let plain = (kind.keeping)(&configured(CheckedDevice::new(), precision)).grads;
            assert_close(kind.name, precision, &fused, &plain, 1.0);
        }
    }
}

/// A linear layer over several leading dimensions, with a bias and without.
#[test]
fn a_linear_layer_of_any_rank_has_the_gradients_of_one_that_is_not_fused() {
    fn gradients<const D: usize>(device: &CheckedDevice, rows: [usize; D], bias: bool) -> Vec<f32> {
        let of = |features| {
            let mut shape = rows;
            shape[D - 1] = features;
            shape
        };
        <Trained as Backend>::seed(device, 1);
        let layer: Linear<Trained> = LinearConfig::new(8, 4).with_bias(bias).init(device);
        let x = input::<Trained, D>(of(8), 1, device).require_grad();
        let out = layer.forward(x.clone());
        let grads = (out * input(of(4), 2, device)).sum().backward();
        let weight = layer.weight.val().grad(&grads).unwrap().into_data();
        let x = x.grad(&grads).unwrap().into_data();
        let bias = layer
            .bias
            .map(|b| b.val().grad(&grads).unwrap().into_data());
        let all = [Some(weight), Some(x), bias].into_iter().flatten();
        all.flat_map(|data| data.into_vec::<f32>().unwrap())
            .collect()
    }
    fn compare<const D: usize>(rows: [usize; D]) {
        for precision in HALVES {
            for bias in [false, true] {
                let fused = gradients(&fused_in(precision), rows, bias);
                let plain = gradients(&configured(CheckedDevice::new(), precision), rows, bias);
                let what = format!("{rows:?}, bias {bias}");
                assert_close(&what, precision, &fused, &plain, 1.0);
            }
        }
    }
    compare([30, 0]);
    compare([1, 0]);
    compare([1, 30, 0]);
    compare([2, 3, 5, 0]);
}

/// Adam reads a gradient twice.
#[test]
fn adam_casts_a_small_gradient_once() {
    for (features, casts) in [(256, 1), (257, 2)] {
        let device = fused_in(Precision::F16);
        let layer: Linear<Trained> = LinearConfig::new(features, features)
            .with_bias(false)
            .init(&device);
        let x = input::<Trained, 2>([4, features], 1, &device);
        let grads = layer.forward(x).mean().backward();
        let grads = GradientsParams::from_grads(grads, &layer);
        assert_eq!(grads.len(), 1);
        device.reset();
        AdamConfig::new().init().step(1e-3, layer, grads);
        let widened = device.counts().casts_between(DType::F16, DType::F32);
        assert_eq!(widened.count, casts);
    }
}

/// The operation that sets a convolution apart from what is before it: a move that changes nothing.
#[test]
fn the_weight_of_a_half_convolution_is_moved_first() {
    let moves = |device: &CheckedDevice| {
        let [x, weight] =
            [[2, 3, 8, 8], [4, 3, 3, 3]].map(|shape| input::<Trained, 4>(shape, 1, device));
        device.reset();
        let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
        let out = conv2d(x, weight, None, options).into_data();
        (device.counts().ran("float_swap_dims"), out)
    };
    for precision in HALVES {
        let (before, plain) = moves(&configured(CheckedDevice::new(), precision));
        let (fused, out) = moves(&fused_in(precision));
        assert_eq!((before, fused), (0, 1));
        assert_eq!(out, plain);
    }
    assert_eq!(moves(&fused_in(Precision::F32)).0, 0);
}

/// The operation that sets a product apart from what is behind it, where Burn's fused kernels are wrong.
#[test]
fn a_half_product_of_one_row_or_one_column_is_copied() {
    let copies = |device: &CheckedDevice, rows: usize, columns: usize| {
        let x = input::<Amp<Checked>, 2>([rows, 8], 1, device);
        let weight = input::<Amp<Checked>, 2>([8, columns], 2, device);
        let bias = input::<Amp<Checked>, 1>([columns], 3, device);
        device.reset();
        let product = x.clone().matmul(weight.clone());
        let by_product = device.counts().ran("float_cat");
        let layer = linear(x, weight, Some(bias));
        let copies = [by_product, device.counts().ran("float_cat") - by_product];
        (copies, product.into_data(), layer.into_data())
    };
    for precision in HALVES {
        for (rows, columns, copied) in [(1, 4, 1), (4, 1, 1), (1, 1, 1), (4, 4, 0)] {
            let fused = copies(&fused_in(precision), rows, columns);
            let plain = copies(&configured(CheckedDevice::new(), precision), rows, columns);
            assert_eq!((plain.0, fused.0), ([0; 2], [copied; 2]));
            assert_eq!((fused.1, fused.2), (plain.1, plain.2));
        }
    }
    assert_eq!(copies(&fused_in(Precision::F32), 1, 4).0, [0; 2]);
}

/// Neither half dtype holds 4,097: the sum is FP32, in a matrix as in a batch of one.
#[test]
fn the_gradient_of_a_bias_is_a_sum_in_fp32() {
    fn bias_gradient<const D: usize>(device: &CheckedDevice, shape: [usize; D]) -> Vec<f32> {
        let layer: Linear<Trained> = LinearConfig::new(8, 4).init(device);
        let x = input::<Trained, D>(shape, 1, device);
        let grads = layer.forward(x).sum().backward();
        let gradient = layer.bias.unwrap().val().grad(&grads).unwrap();
        gradient.into_data().into_vec().expect("FP32")
    }
    for precision in HALVES {
        let device = fused_in(precision);
        assert_eq!(bias_gradient(&device, [4097, 8]), [4097.0; 4]);
        assert_eq!(bias_gradient(&device, [1, 4097, 8]), [4097.0; 4]);
    }
}

/// The gradient of a GELU is rounded for the products, and the bias before it is not. All rows are the
/// same, so the sum of rounded rows would be a half number.
#[test]
fn the_bias_before_a_gelu_gets_gradients_that_were_not_rounded() {
    const ROWS: usize = 64;
    fn bias_gradient<const D: usize>(device: &CheckedDevice, rows: [usize; D]) -> Vec<f32> {
        let of = |mut shape: [usize; D], features| {
            shape[D - 1] = features;
            shape
        };
        <Trained as Backend>::seed(device, 1);
        let layer: Linear<Trained> = LinearConfig::new(3, 4).init(device);
        let x = input::<Trained, D>(of([1; D], 3), 1, device).expand(of(rows, 3));
        let out = gelu(layer.forward(x)) * input(of([1; D], 4), 2, device);
        let bias = layer.bias.unwrap().val();
        let gradient = bias.grad(&out.sum().backward()).unwrap();
        gradient.into_data().into_vec().unwrap()
    }
    fn compare<const D: usize>(rows: [usize; D]) {
        for precision in HALVES {
            let fused = bias_gradient(&fused_in(precision), rows);
            let plain = bias_gradient(&configured(CheckedDevice::new(), precision), rows);
            assert_close("bias", Precision::F32, &fused, &plain, ROWS as f64);
            let half = precision.compute_dtype().unwrap();
            let data = TensorData::from(fused.as_slice());
            let rounded = data.clone().convert_dtype(half).convert_dtype(DType::F32);
            assert_ne!(data, rounded, "{precision}");
        }
    }
    compare([ROWS, 0]);
    compare([2, ROWS / 2, 0]);
}

/// An FP32 tensor that is cast twice: its gradients are half, and their sum is not. In bf16 both uses share
/// a cast.
#[test]
fn f16_gradients_of_an_fp32_tensor_add_up_in_fp32() {
    let device = fused_in(Precision::F16);
    let x = Tensor::<Trained, 2>::ones([1, 3], &device).require_grad();
    let between = x.clone() * 2.0;
    let [one, other] = [(); 2].map(|()| between.clone().cast(DType::F16));
    let small = 2f32.powi(-12);
    let loss = one.sum() + other.sum() * small;
    let gradient = x.grad(&loss.backward()).unwrap();
    let expected = TensorData::from([[2.0 + 2.0 * small; 3]]);
    assert_eq!(gradient.into_data(), expected);
}

/// Each part of the gradient is cast, and not the whole for each part.
#[test]
fn the_gradient_of_a_concatenation_is_cast_once() {
    for precision in HALVES {
        let half = precision.compute_dtype().unwrap();
        let device = fused_in(precision);
        let parts: Vec<Tensor<Trained, 2>> = (0..8)
            .map(|seed| input([3, 4], seed + 1, &device).require_grad())
            .collect();
        // In FP32: not the gradients of parameters.
        let joined = Tensor::cat(parts.iter().map(|part| part.clone() * 2.0).collect(), 0);
        let factors = input::<Trained, 2>([24, 4], 9, &device);
        let loss = (joined.matmul(Tensor::eye(4, &device)) * factors.clone()).sum();
        device.reset();
        let grads = loss.backward();
        let rounded: Tensor<Trained, 2> = factors.cast(half);
        let whole: Tensor<Trained, 2> = rounded.cast(DType::F32) * 2.0;
        for (part, expected) in parts.iter().zip(whole.chunk(8, 0)) {
            let gradient = part.grad(&grads).unwrap();
            let [gradient, expected] = [gradient.into_data(), expected.into_data()];
            gradient.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-6, 0.0));
        }
        let casts = device.counts().casts_between(half, DType::F32);
        assert!(casts.elements <= 3 * 96, "{precision}: {casts:?}");
    }
}

#[test]
fn the_softmax_of_half_scores_is_that_of_one_that_is_not_fused() {
    let softmax_of = |device: &CheckedDevice, dtype: DType, dim| {
        let scores = TensorData::from([
            [[0.1, 7.0, -3.0], [-65504.0, 60000.0, 59968.0]],
            [[1.0, 1.0, 1.0], [f32::NEG_INFINITY, 0.0, -9.0]],
        ]);
        let leaf = Tensor::<Trained, 3>::from_data(scores, (device, DType::F32)).require_grad();
        let scores = leaf.clone().cast(dtype);
        let out = softmax(scores, dim);
        assert_eq!(out.dtype(), DType::F32);
        let grads = (out.clone() * input([2, 2, 3], 1, device)).sum().backward();
        let gradient = leaf.grad(&grads).unwrap().into_data();
        [out.into_data(), gradient].map(|data| data.into_vec::<f32>().unwrap())
    };
    for precision in HALVES {
        let half = precision.compute_dtype().unwrap();
        for dim in 0..3 {
            let [fused, gradient] = softmax_of(&fused_in(precision), half, dim);
            let device = configured(CheckedDevice::new(), precision);
            let [plain, plain_gradient] = softmax_of(&device, half, dim);
            assert_close("softmax", Precision::F32, &fused, &plain, 4.0);
            assert_close("gradient", precision, &gradient, &plain_gradient, 1.0);
        }
    }
}

/// Each position of a sequence has a row of its own, and all batches share it.
#[test]
fn a_sum_with_a_half_position_has_the_gradients_of_one_that_is_not_fused() {
    let gradients = |device: &CheckedDevice| {
        <Trained as Backend>::seed(device, 1);
        let layer: Linear<Trained> = LinearConfig::new(8, 4).init(device);
        let x = input::<Trained, 3>([2, 3, 8], 1, device).require_grad();
        let position = input::<Trained, 3>([1, 3, 8], 2, device).require_grad();
        let sum = layer.forward(x.clone()) + layer.forward(position.clone());
        let grads = (sum * input([2, 3, 4], 3, device)).sum().backward();
        let weight = layer.weight.val().grad(&grads).unwrap().into_data();
        let [x, position] = [x, position].map(|t| t.grad(&grads).unwrap().into_data());
        [weight, x, position]
            .map(|data| data.into_vec::<f32>().unwrap())
            .concat()
    };
    for precision in HALVES {
        let fused = gradients(&fused_in(precision));
        let plain = gradients(&configured(CheckedDevice::new(), precision));
        assert_close("position", precision, &fused, &plain, 1.0);
    }
}

/// CubeCL's kernels multiply f16, and Burn's own steps compute the softmax in half.
#[test]
fn attention_in_half_runs_in_steps_on_a_device_that_may_be_cubecls() {
    for (precision, name, steps) in [
        (Precision::F16, "cubecl<checked>", true),
        (Precision::Bf16, "cubecl<checked>", true),
        (Precision::F16, "router<remote-checked>", true),
        (Precision::Bf16, "router<remote-checked>", true),
        (Precision::F16, "checked", false),
        (Precision::Bf16, "checked", false),
    ] {
        let device = CheckedDevice::new();
        device.set_name(name);
        let device = configured(device, precision);
        let x = input::<Amp<Checked>, 4>([1, 2, 4, 8], 1, &device);
        device.reset();
        let options = AttentionModuleOptions::default();
        let out = attention(x.clone(), x.clone(), x, None, None, options);
        let half = precision.compute_dtype().unwrap();
        assert_eq!(out.dtype(), half);
        let counts = device.counts();
        assert_eq!(
            counts.ran_in("attention", half),
            usize::from(!steps),
            "{name}"
        );
        assert_eq!(
            counts.ran_in("float_matmul", half),
            if steps { 2 } else { 0 },
            "{name}"
        );
    }
}

#[test]
fn a_frozen_layer_passes_the_gradient_on() {
    let gradient = |device: &CheckedDevice| {
        <Trained as Backend>::seed(device, 1);
        let layer: Linear<Trained> = LinearConfig::new(8, 4).init(device);
        let x = input::<Trained, 3>([3, 5, 8], 1, device).require_grad();
        let out = layer.no_grad().forward(x.clone());
        let grads = (out * input([3, 5, 4], 2, device)).sum().backward();
        x.grad(&grads).unwrap().into_data().into_vec::<f32>()
    };
    for precision in HALVES {
        let fused = gradient(&fused_in(precision)).unwrap();
        let plain = gradient(&configured(CheckedDevice::new(), precision)).unwrap();
        assert_close("of the operand", precision, &fused, &plain, 1.0);
    }
}

#[test]
fn a_dropout_by_noise_in_fp32_gives_fp32() {
    let dtype = |device: &CheckedDevice| {
        let x = input::<Trained, 2>([4, 4], 1, device).require_grad();
        let half = x.clone().matmul(x);
        let noise: Tensor<Trained, 2> =
            Tensor::random([4, 4], Distribution::Bernoulli(0.5), device);
        let noise = noise.cast(DType::F32);
        (half * noise).dtype()
    };
    for precision in HALVES {
        let plain = dtype(&configured(CheckedDevice::new(), precision));
        assert_eq!(dtype(&fused_in(precision)), plain, "{precision}");
    }
}

/// One layer is used; the gradient of the other is zero.
#[derive(Module, Debug)]
struct Half<B: Backend> {
    used: Linear<B>,
    unused: Linear<B>,
}

fn stepped<B: AutodiffBackend>(model: Half<B>, x: &Tensor<B, 2>) -> Half<B> {
    let spared = model.unused.weight.val() * 0.0;
    let loss = model.used.forward(x.clone()).sum() + spared.sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    SgdConfig::new().init().step(1e-3, model, grads)
}

/// The explicit protocol.
fn stepped_by_a_scaler<B: AutodiffBackend>(model: Half<B>, x: &Tensor<B, 2>) -> Half<B> {
    let scaler = GradScaler::of::<B>(&x.device());
    let spared = model.unused.weight.val() * 0.0;
    let loss = model.used.forward(x.clone()).sum() + spared.sum();
    let grads = scaler.backward(loss, &model);
    let (model, taken) = scaler.step(&mut SgdConfig::new().init(), 1e-3, model, grads);
    assert_eq!(taken, Ok(true));
    scaler.update().unwrap();
    model
}

type Stepped = fn(Half<Trained>, &Tensor<Trained, 2>) -> Half<Trained>;

#[test]
fn the_optimizer_casts_a_parameter_that_a_product_used_and_no_other() {
    for precision in HALVES {
        let half = precision.compute_dtype().unwrap();
        let casts = |device: &CheckedDevice, stepped: Stepped| {
            let layer = || LinearConfig::new(4, 4).init::<Trained>(device);
            let model = Half {
                used: layer(),
                unused: layer(),
            };
            let x = Tensor::random([2, 4], Distribution::Default, device);
            let model = stepped(model, &x);
            device.reset();
            drop(x.matmul(model.used.weight.val()));
            let forward = device.counts().casts_between(DType::F32, half).count;
            device.reset();
            stepped(model, &Tensor::ones([2, 4], device));
            let step = device.counts().casts_between(DType::F32, half).count;
            [forward, step]
        };
        let [explicit, _] = casts(&fused_in(precision), stepped_by_a_scaler);
        assert_eq!(explicit, 0, "{precision}, in the explicit loop");
        let [forward, step] = casts(&fused_in(precision), stepped);
        let plain = configured(CheckedDevice::new(), precision);
        let [plain_forward, plain_step] = casts(&plain, stepped);
        // The operand was cast before.
        assert_eq!((forward, plain_forward), (0, 1), "{precision}");
        // Both cast the operand and the first gradient. The fused weight has been cast before: its bias
        // is left, or both for the next step.
        assert_eq!((step, plain_step), (4, 3), "{precision}");
    }
}

#[test]
fn a_parameter_that_is_used_in_half_no_more_is_cast_no_more() {
    let device = fused_in(Precision::F16);
    let x = Tensor::<Trained, 2>::ones([2, 4], &device);
    let mut layer = Some(LinearConfig::new(4, 4).init(&device));
    let mut step = |in_half: bool| {
        let model: Linear<Trained> = layer.take().unwrap();
        let forward = || model.forward(x.clone()).sum();
        let loss = if in_half {
            forward()
        } else {
            full_precision(forward)
        };
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        device.reset();
        layer = Some(SgdConfig::new().init().step(1e-3, model, grads));
        device.counts().casts_between(DType::F32, DType::F16).count
    };
    let casts = [true, false, false, true].map(&mut step);
    assert_eq!(casts, [2, 0, 0, 2]);
}

/// Scaled by less than one, a gradient beyond FP32 is finite until it is unscaled.
#[test]
fn a_gradient_that_overflows_when_it_is_unscaled_skips_the_step() {
    for name in ["checked", "fusion<checked>"] {
        let device = CheckedDevice::new();
        device.set_name(name);
        let config = checked::config()
            .with_precision(Precision::F16)
            .with_loss_scale(LossScaleConfig::Fixed(0.5));
        config.apply::<Checked>(&device).unwrap();
        let gradient = |factor: f32| {
            let x = Tensor::<Trained, 1>::zeros([1], &device).require_grad();
            let loss = x.clone() * factor * 1e19;
            x.grad(&loss.backward()).map(|g| g.into_scalar())
        };
        let most = gradient(1e19).expect("a gradient that FP32 holds");
        assert!((most / 1e38 - 1.0).abs() < 1e-5, "{name}: {most}");
        assert_eq!(gradient(4e19), None, "{name}");
    }
}
