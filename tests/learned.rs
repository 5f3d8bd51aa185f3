//! What is learned is half: a parameter, frozen or not, a leaf, and what is computed from one. Data is not.

mod common;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Param, ParamId};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, HalfPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::conv1d;
use burn::tensor::ops::ConvOptions;
use burn_amp::{Amp, AmpAutodiff, AmpConfig, AmpReport, Precision, half_weights, with_precision};

use common::HALVES;
use common::mlp::{data, values};
use shared::checked::{self, Checked, CheckedDevice};

type B = AmpAutodiff<Flex>;
type I = Amp<Flex>;

fn layer<B: Backend>() -> Linear<B> {
    LinearConfig::new(4, 4).init(&Default::default())
}

/// The dtype of data times this weight.
fn times<B: Backend>(weight: Tensor<B, 2>) -> DType {
    let device = weight.device();
    Tensor::ones([3, 4], &device).matmul(weight).dtype()
}

fn of<B: Backend>(layer: &Linear<B>) -> DType {
    let device = layer.weight.device();
    layer.forward(Tensor::<B, 2>::ones([3, 4], &device)).dtype()
}

/// In each half precision, with the half dtype.
fn in_half(f: impl Fn(Precision, DType)) {
    for precision in HALVES {
        let half = precision.compute_dtype().unwrap();
        with_precision(precision, || f(precision, half));
    }
}

fn saved<B: Backend>(layer: Linear<B>) -> Vec<u8> {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    recorder.record(layer.into_record(), ()).unwrap()
}

fn loaded<B: Backend>(bytes: &[u8]) -> Linear<B> {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    let record = recorder.load(bytes.to_vec(), &Default::default()).unwrap();
    layer().load_record(record)
}

fn everywhere<B: Backend>(half: DType) {
    let device = Default::default();
    let frozen = layer::<B>().no_grad();
    for (what, layer) in [
        ("trained", layer()),
        ("frozen before its first use", frozen.clone()),
        ("frozen, in use", {
            let layer = layer::<B>();
            of(&layer);
            layer.no_grad()
        }),
        ("cloned", frozen.clone()),
        ("moved", frozen.clone().to_device(&device)),
        ("forked", frozen.clone().fork(&device)),
        ("loaded", loaded(&saved(layer::<B>()))),
        (
            "loaded and frozen",
            loaded::<B>(&saved(layer::<B>())).no_grad(),
        ),
        ("a record as it is", {
            let recorder = NamedMpkBytesRecorder::<HalfPrecisionSettings>::new();
            let bytes = recorder.record(layer::<B>().into_record(), ()).unwrap();
            let record = recorder.load(bytes, &device).unwrap();
            layer::<B>().load_record(record)
        }),
    ] {
        assert_eq!(of(&layer), half, "{what}");
    }
    let weight = || frozen.weight.val();
    let bits = Tensor::<B, 2>::ones([4, 4], &device).greater_elem(0.5);
    for (what, weight) in [
        ("detached", weight().detach()),
        ("transposed", weight().transpose()),
        ("halved", weight() * 0.5),
        ("beside data", weight() + Tensor::ones([4, 4], &device)),
        (
            "masked",
            weight().mask_where(bits, Tensor::zeros([4, 4], &device)),
        ),
        (
            "joined",
            Tensor::cat(vec![weight().slice(0..1), Tensor::ones([3, 4], &device)], 0),
        ),
        (
            "chosen",
            weight().select(0, Tensor::from_ints([3, 2, 1, 0], &device)),
        ),
        ("cast", weight().cast(DType::F64).cast(DType::F32)),
        ("of a parameter made of data", {
            Param::from_tensor(Tensor::<B, 2>::ones([4, 4], &device)).val()
        }),
        (
            "mapped",
            frozen.weight.clone().map(|weight| weight * 2).val(),
        ),
        (
            "the data of a parameter",
            Param::from_data(weight().into_data(), &device).val(),
        ),
        (
            "marked",
            Tensor::ones([4, 4], &device).set_require_grad(false),
        ),
    ] {
        assert_eq!(times(weight), half, "{what}");
    }
}

#[test]
fn a_parameter_is_learned_wherever_it_comes_from() {
    in_half(|_, half| {
        everywhere::<B>(half);
        everywhere::<I>(half);
    });
}

#[test]
fn data_stays_fp32_bit_for_bit() {
    fn products<B: Backend>() -> [Vec<f32>; 4] {
        let [x, y] = [1, 2].map(|seed| values::<B, 2>([16, 16], seed) * 300);
        let ones = x.ones_like();
        let window = conv1d(
            x.clone().unsqueeze::<3>(),
            y.clone().unsqueeze_dim::<3>(2),
            None,
            ConvOptions::new([1], [0], [1], 1),
        );
        // The data of a parameter is data.
        let read = Tensor::from_data(
            layer::<B>().weight.val().ones_like().into_data(),
            &x.device(),
        );
        [
            data(x.clone().matmul(y)),
            data(x.clone().matmul(ones)),
            data(window),
            data(x.slice([0..16, 0..4]).matmul(read)),
        ]
    }
    let expected = products::<Flex>();
    let trained = products::<Autodiff<Flex>>();
    in_half(|precision, _| {
        assert_eq!(products::<I>(), expected, "{precision}");
        assert_eq!(products::<B>(), trained, "{precision}");
    });
}

#[test]
fn between_training_and_inference_the_mark_stays() {
    in_half(|_, half| {
        let model = layer::<B>().no_grad();
        assert_eq!(of(&model.valid()), half);
        assert_eq!(of(&layer::<B>().valid()), half);
        let back = Tensor::<B, 2>::from_inner(model.weight.val().inner());
        assert_eq!(times(back), half);
        let data = Tensor::<B, 2>::ones([4, 4], &Default::default());
        assert_eq!(times(data.clone().inner()), DType::F32);
        assert_eq!(times(Tensor::<B, 2>::from_inner(data.inner())), DType::F32);
    });
}

/// A program's own autodiff on `Amp`, as generic training code builds it.
#[test]
fn under_the_autodiff_of_a_program_parameters_are_marked_where_burn_creates_them() {
    type Own = Autodiff<I>;
    in_half(|_, half| {
        for layer in [
            layer::<Own>(),
            layer::<Own>().no_grad(),
            loaded(&saved(layer::<Own>())),
        ] {
            assert_eq!(of(&layer), half);
        }
        let x = Tensor::<Own, 2>::ones([4, 4], &Default::default());
        assert_eq!(x.clone().matmul(x).dtype(), DType::F32);
    });
}

#[test]
fn half_weights_stay_half() {
    in_half(|precision, half| {
        let model = half_weights(layer::<I>(), precision).unwrap();
        assert_eq!(of(&model), half);
        assert_eq!(times(model.weight.val().cast(DType::F32)), half);
    });
}

/// A target network follows the trained one.
#[test]
fn a_target_network_is_learned() {
    in_half(|_, half| {
        let (online, mut target) = (layer::<B>(), layer::<B>().valid());
        for _ in 0..3 {
            let weight = online.valid().weight.val();
            target.weight = target.weight.map(|old| old * 0.99 + weight * 0.01);
            assert_eq!(of(&target), half);
        }
        // As a raw tensor beside the model.
        assert_eq!(
            times(target.weight.val() * 0.5 + online.weight.val().inner() * 0.5),
            half
        );
    });
}

#[test]
fn an_adapter_and_its_frozen_base_are_learned() {
    in_half(|_, half| {
        let base = layer::<B>().no_grad();
        let device = Default::default();
        let [a, b] = [[4, 2], [2, 4]].map(|shape| {
            Initializer::Normal {
                mean: 0.0,
                std: 1.0,
            }
            .init::<B, 2, _>(shape, &device)
        });
        let x = Tensor::<B, 2>::ones([3, 4], &device);
        assert_eq!(base.forward(x.clone()).dtype(), half);
        assert_eq!(x.matmul(a.val()).matmul(b.val()).dtype(), half);
        // Merged.
        let merged = base.weight.val() + a.val().matmul(b.val()) * 0.5;
        assert_eq!(times(merged), half);
    });
}

/// The device gets its precision when the model is there.
#[test]
fn a_model_that_is_moved_and_then_configured() {
    type B = AmpAutodiff<Checked>;
    let [first, second] = [(); 2].map(|()| CheckedDevice::new());
    let config = checked::config().with_data_in_half(false);
    config.apply::<B>(&first).unwrap();
    config.apply::<B>(&second).unwrap();
    let layer = LinearConfig::new(4, 4).init::<B>(&first).no_grad();
    of(&layer);
    let moved = layer.clone().to_device(&second);
    let forked = layer.fork(&second);
    let config = config.with_precision(Precision::Bf16);
    config.apply::<B>(&second).unwrap();
    assert_eq!([of(&moved), of(&forked)], [DType::BF16; 2]);
    assert_eq!(AmpReport::of::<B>(&second).unwrap().contractions_of_data, 0);
    drop(Tensor::<B, 2>::ones([4, 4], &second).matmul(Tensor::ones([4, 4], &second)));
    let report = AmpReport::of::<B>(&second).unwrap();
    assert_eq!(report.contractions_of_data, 1);
    assert!(
        report
            .to_string()
            .contains("data        1 contraction in FP32: nothing learned"),
        "{report}"
    );
}

#[test]
fn a_switch_runs_data_in_half() {
    type B = AmpAutodiff<Checked>;
    let device = CheckedDevice::new();
    let config = checked::config().with_precision(Precision::F16);
    for data_in_half in [true, false] {
        config
            .with_data_in_half(data_in_half)
            .apply::<B>(&device)
            .unwrap();
        device.reset();
        let x = Tensor::<B, 2>::ones([4, 4], &device);
        drop(x.clone().matmul(x));
        let ran = device.counts().ran_in("float_matmul", DType::F16);
        assert_eq!(ran, usize::from(data_in_half));
    }
    let written = serde_json::to_value(AmpConfig::new()).unwrap();
    assert_eq!(written["data_in_half"], false);
}

/// Burn creates a parameter in FP32: an orthogonal matrix by products.
#[test]
fn an_initializer_computes_in_fp32() {
    in_half(|precision, half| {
        let device = Default::default();
        let initializer = Initializer::Orthogonal { gain: 1.0 };
        let weight = initializer.init::<B, 2, _>([16, 16], &device).val();
        assert_eq!(
            weight
                .clone()
                .matmul(Tensor::ones([16, 1], &device).repeat_dim(1, 2))
                .dtype(),
            half
        );
        let exact = Tensor::<Flex, 2>::from_data(weight.into_data(), &device);
        let off = exact.clone().matmul(exact.transpose()) - Tensor::eye(16, &device);
        let off: f32 = off.abs().max().into_scalar();
        assert!(off < 1e-5, "{precision}: {off}");
    });
}

/// A buffer that is no parameter, such as a table of angles, stays data.
#[test]
fn a_parameter_that_was_never_told_of_gradients_is_data() {
    in_half(|_, _| {
        let table = Tensor::<B, 2>::ones([4, 4], &Default::default());
        let table = Param::initialized(ParamId::new(), table);
        assert_eq!(times(table.val()), DType::F32);
    });
}

fn trained<B: AutodiffBackend>() -> Option<Tensor<B::InnerBackend, 2>> {
    let leaf = Tensor::<B, 2>::ones([4, 4], &Default::default()).require_grad();
    let out = Tensor::<B, 2>::ones([4, 4], &Default::default()).matmul(leaf.clone());
    leaf.grad(&out.mean().backward())
}

#[test]
fn a_leaf_of_data_has_its_gradient_in_fp32() {
    in_half(|precision, _| {
        let grad = trained::<B>().unwrap();
        assert_eq!(grad.dtype(), DType::F32, "{precision}");
        assert_eq!(data(grad), data(trained::<Autodiff<Flex>>().unwrap()));
    });
}
