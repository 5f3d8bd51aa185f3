//! Regions of a precision, in the forward and in the backward pass.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, activation};
use burn_amp_device::{
    GradScaler, LossScaleConfig, Precision, flex, full_precision, with_precision,
};

use client::{HALVES, assert_computed_in, read, tensor};

/// The product of two matrices, computed by `f`.
fn product(device: &Device, f: impl FnOnce(Tensor<2>, Tensor<2>) -> Tensor<2>) -> Vec<f32> {
    read(f(tensor([8, 64], 1, device), tensor([64, 8], 2, device)))
}

/// Asserts that the product was computed in `precision`. In FP32 a region changes no bit.
fn is_in(precision: Precision, computed: &[f32]) {
    match precision {
        Precision::F32 => assert_eq!(computed, client::product(&Device::flex())),
        half => assert_computed_in(half, computed),
    }
}

#[test]
fn a_region_computes_in_its_precision_and_what_comes_after_it_in_the_devices() {
    for device_precision in HALVES {
        let device = flex(device_precision).unwrap();
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let computed = product(&device, |x, w| {
                with_precision(precision, x, |x| x.matmul(w))
            });
            is_in(precision, &computed);
        }
        // The operand that enters may be either one, or both.
        let computed = product(&device, |x, w| full_precision(w, |w| x.matmul(w)));
        is_in(Precision::F32, &computed);
        let computed = product(&device, |x, w| full_precision((x, w), |(x, w)| x.matmul(w)));
        is_in(Precision::F32, &computed);

        let after = product(&device, |x, w| full_precision(x, |x| x * 1.0).matmul(w));
        is_in(device_precision, &after);
        let outside = product(&device, |x, w| {
            full_precision(x.clone(), |x| x * 1.0);
            x.matmul(w)
        });
        is_in(device_precision, &outside);
    }
}

/// Otherwise a language model's region would have no effect.
#[test]
#[should_panic(expected = "a region without a float tensor")]
fn a_region_of_integers_is_refused() {
    let tokens = Tensor::<2, Int>::zeros([1, 4], &flex(Precision::F16).unwrap());
    full_precision((tokens, None::<Tensor<2>>), |(tokens, _)| tokens);
}

#[test]
fn the_inner_region_decides_and_the_outer_one_goes_on_after_it() {
    let device = flex(Precision::F16).unwrap();
    let inner = product(&device, |x, w| {
        full_precision(x, |x| with_precision(Precision::Bf16, x, |x| x.matmul(w)))
    });
    is_in(Precision::Bf16, &inner);
    let after = product(&device, |x, w| {
        full_precision(x, |x| {
            with_precision(Precision::Bf16, x, |x| x * 1.0).matmul(w)
        })
    });
    is_in(Precision::F32, &after);
    let own = product(&device, |x, w| {
        full_precision(x, |x| with_precision(Precision::Auto, x, |x| x.matmul(w)))
    });
    is_in(Precision::F16, &own);
}

#[test]
fn a_region_goes_through_every_kind_of_operation_and_keeps_integers() {
    let device = flex(Precision::Bf16).unwrap();
    let computed = product(&device, |x, w| {
        let rows = Tensor::<1, Int>::arange(0..8, &device);
        let (out, rows) = full_precision((Some(x), rows), |(x, rows)| {
            let x = x
                .unwrap()
                .reshape([1, 8, 64])
                .swap_dims(1, 2)
                .swap_dims(1, 2);
            let x = Tensor::cat(vec![x.clone(), x], 0)
                .narrow(0, 0, 1)
                .squeeze_dim::<2>(0);
            let [x] = full_precision([x], |[x]| [x.select(0, rows.clone())]);
            (x.matmul(w), rows)
        });
        assert_eq!(rows.dims(), [8]);
        out
    });
    is_in(Precision::F32, &computed);
}

#[test]
fn a_number_made_of_a_whole_tensor_has_left_the_region() {
    let device = flex(Precision::Bf16).unwrap();
    let computed = product(&device, |x, w| {
        let norm = full_precision(x.clone(), |x| {
            let one = x.powi_scalar(2).sum();
            one.clone() / one
        });
        (x * norm.reshape([1, 1])).matmul(w)
    });
    is_in(Precision::Bf16, &computed);
}

/// A layer between two others, in a region or not.
#[derive(Module, Debug)]
struct Model {
    first: Linear,
    middle: Linear,
    last: Linear,
}

type Gradients = [Vec<f32>; 3];

impl Model {
    fn new(device: &Device) -> Self {
        let layer = |seed| {
            let layer = LinearConfig::new(64, 64).with_bias(false).init(device);
            let weight = tensor([64, 64], seed, device) / 8.0;
            Linear {
                weight: Param::from_tensor(weight),
                ..layer
            }
        };
        Self {
            first: layer(1),
            middle: layer(2),
            last: layer(3),
        }
    }

    fn loss(&self, region: Option<Precision>, device: &Device) -> Tensor<1> {
        let x = self.first.forward(tensor([32, 64], 4, device));
        let x = match region {
            Some(precision) => with_precision(precision, x, |x| self.middle.forward(x)),
            None => self.middle.forward(x),
        };
        let y = self.last.forward(activation::tanh(x));
        (y - tensor([32, 64], 5, device)).powi_scalar(2).mean()
    }

    fn gradients(&self, region: Option<Precision>, device: &Device) -> Gradients {
        let grads = self.loss(region, device).backward();
        [&self.first, &self.middle, &self.last]
            .map(|layer| read(layer.weight.val().grad(&grads).unwrap()))
    }
}

/// The relative distance of the gradients of each layer.
fn distances(gradients: &Gradients, exact: &Gradients) -> [f32; 3] {
    std::array::from_fn(|layer| {
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
        let pairs = gradients[layer].iter().zip(&exact[layer]);
        norm(&mut pairs.map(|(g, e)| g - e)) / norm(&mut exact[layer].iter().copied())
    })
}

#[test]
fn the_backward_pass_of_a_region_is_in_its_precision() {
    let plain = Device::flex().autodiff();
    let exact = Model::new(&plain).gradients(None, &plain);
    for checkpointing in [false, true] {
        let device = flex(Precision::Bf16).unwrap().autodiff();
        let device = if checkpointing {
            device.gradient_checkpointing()
        } else {
            device
        };
        let model = Model::new(&device);
        let without = distances(&model.gradients(None, &device), &exact);
        let with = distances(&model.gradients(Some(Precision::F32), &device), &exact);
        // The gradient of the middle layer's weight is a product of two FP32 tensors: the remaining error is
        // that of its operands. Without the region, the product is rounded twice more.
        assert!(with[1] < without[1], "{with:?} {without:?}");

        // The whole model in one region: FP32 to the last bit.
        let all = full_precision(tensor([32, 64], 4, &device), |x| {
            let x = model.middle.forward(model.first.forward(x));
            let y = model.last.forward(activation::tanh(x));
            (y - tensor([32, 64], 5, &device)).powi_scalar(2)
        });
        let grads = all.mean().backward();
        let gradients = [&model.first, &model.middle, &model.last]
            .map(|layer| read(layer.weight.val().grad(&grads).unwrap()));
        assert_eq!(distances(&gradients, &exact), [0.0; 3]);
    }
}

/// The gradient of a region's input is outside the region: layers before the region in the model, which come
/// after it in the backward pass, run in the device's precision.
#[test]
fn a_gradient_leaves_the_region_where_its_tensor_entered_it() {
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let gradient = |region: bool| {
        let x = tensor::<2>([8, 64], 1, &device).require_grad();
        let w = tensor::<2>([64, 8], 2, &device);
        // The gradient of the region's input is exact in every precision.
        let y = x.clone().matmul(w);
        let y = match region {
            true => full_precision(y, |y| y * 1.0),
            false => y * 1.0,
        };
        let weights = tensor::<2>([8, 8], 3, &device);
        let grads = (y * weights).sum().backward();
        read(x.grad(&grads).unwrap())
    };
    let plain = {
        let (w, g) = (
            tensor([64, 8], 2, &Device::flex()),
            tensor([8, 8], 3, &Device::flex()),
        );
        read(Tensor::<2>::matmul(g, w.transpose()))
    };
    assert_eq!(gradient(true), gradient(false));
    assert_ne!(gradient(true), plain);
}

#[test]
fn a_scaler_takes_the_marks_off_the_gradients() {
    let device = flex(Precision::F16).unwrap().autodiff();
    let mut model = Model::new(&device);
    let scaler = GradScaler::new(LossScaleConfig::Fixed(1024.0)).unwrap();
    let mut optimizer = SgdConfig::new().init();
    let loss = model.loss(Some(Precision::F32), &device);
    let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    let stepped;
    (model, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
    assert!(stepped.unwrap());
    scaler.update().unwrap();
    // Elsewhere the parameter is in f16 again.
    let weight = model.middle.weight.val().inner();
    let x = tensor::<2>([32, 64], 6, &weight.device());
    let exact = {
        let data = weight.to_data();
        let weight = Tensor::<2>::from_data(data, &Device::flex());
        read(tensor::<2>([32, 64], 6, &Device::flex()).matmul(weight))
    };
    assert_ne!(read(x.matmul(weight)), exact);
}

#[test]
fn on_a_plain_device_and_in_fp32_a_region_changes_nothing() {
    let expected = product(&Device::flex(), |x, w| x.matmul(w));
    for device in [Device::flex(), flex(Precision::F32).unwrap()] {
        for precision in [
            Precision::F32,
            Precision::F16,
            Precision::Bf16,
            Precision::Auto,
        ] {
            let computed = product(&device, |x, w| {
                with_precision(precision, x, |x| x.matmul(w))
            });
            assert_eq!(computed, expected);
        }
    }
}

/// As in the examples of the guides: a region may contain non-finite values and large values.
#[test]
fn values_that_f16_does_not_hold_pass_through_a_region() {
    let device = flex(Precision::F16).unwrap();
    let values = [
        1e30,
        -1e30,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-30,
    ];
    let x = Tensor::<1>::from_data(values, &device);
    let through = read(full_precision(x, |x| x));
    for (before, after) in values.iter().zip(&through) {
        assert_eq!(before.to_bits(), after.to_bits());
    }
}

/// An FP32 tensor that left a region does not count as fitting in half, whatever entered the region.
#[test]
fn a_large_value_that_left_a_region_stays_large() {
    for precision in HALVES {
        let device = flex(precision).unwrap();
        let x = tensor::<2>([8, 64], 1, &device);
        let half = activation::relu(x.matmul(tensor([64, 8], 2, &device)));
        let large = full_precision(half, |x| x * 1e5 + 1.0 / 3.0);
        let expected = read(large.clone());
        assert!(expected.iter().any(|value| *value > 65504.0));
        assert_eq!(read(activation::relu(large)), expected);
    }
}

#[test]
fn what_an_inner_region_returns_unchanged_is_still_in_the_outer_one() {
    let device = flex(Precision::F16).unwrap();
    let computed = product(&device, |x, w| {
        full_precision(x, |x| {
            let y = x.clone();
            let (_, y) = with_precision(Precision::Bf16, x, |x| (x * 1.0, y));
            y.matmul(w)
        })
    });
    is_in(Precision::F32, &computed);
}

#[test]
fn a_region_of_one_value_is_a_region() {
    let device = flex(Precision::Bf16).unwrap();
    let one = |values: Vec<f32>| read(Tensor::<1>::from_data(&values[..], &Device::flex()))[0];
    let value = 1.0 / 3.0;
    let x = Tensor::<2>::full([1, 64], value, &device);
    let w = Tensor::<2>::full([64, 1], value, &device);
    let computed = full_precision(x, |x| {
        let y = x.matmul(w.clone()).narrow(1, 0, 1);
        // Twice the value: a product of one term is in FP32 with or without a region.
        y.expand([1, 2])
            .matmul(Tensor::<2>::full([2, 1], value / 2.0, &device))
    });
    assert!((one(read(computed)) - 64.0 / 27.0).abs() < 1e-5);
}

#[test]
fn in_bf16_a_scaler_takes_the_marks_off_too() {
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let mut model = Model::new(&device);
    let scaler = GradScaler::of(&device);
    let mut optimizer = SgdConfig::new().init();
    let loss = model.loss(Some(Precision::F32), &device);
    let grads = scaler.backward(loss, &model);
    let stepped;
    (model, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
    assert!(stepped.unwrap());
    let weight = model.middle.weight.val().inner();
    let x = tensor::<2>([32, 64], 6, &weight.device());
    let exact = {
        let weight = Tensor::<2>::from_data(weight.to_data(), &Device::flex());
        read(tensor::<2>([32, 64], 6, &Device::flex()).matmul(weight))
    };
    assert_ne!(read(x.matmul(weight)), exact);
}

#[test]
fn in_f64_a_region_changes_nothing() {
    use burn::tensor::{DType, TensorData};

    let device = flex(Precision::F16).unwrap();
    let values = [f64::INFINITY, f64::NEG_INFINITY, f64::MAX];
    let x = Tensor::<1>::from_data(TensorData::from(values), (&device, DType::F64));
    let through = full_precision(x, |x| x).into_data();
    assert_eq!(through.iter::<f64>().collect::<Vec<_>>(), values);
}

/// A product that sums nothing rounds nothing: positions times a row of frequencies.
#[test]
fn an_outer_product_of_fp32_stays_fp32() {
    let outer = |device: &Device| {
        let positions = Tensor::<1>::from_data([3001.0, 70_001.0], device).reshape([2, 1]);
        let frequencies = Tensor::<1>::from_data([1.0, 0.1, 0.01], device).reshape([1, 3]);
        positions.matmul(frequencies).into_data()
    };
    let expected = outer(&Device::flex());
    for precision in [Precision::F16, Precision::Bf16] {
        assert_eq!(outer(&flex(precision).unwrap()), expected, "{precision}");
    }
}
