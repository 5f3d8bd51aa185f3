//! The casts and read-backs of a step: FP32 has none.

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::{DType, Tensor};
use burn_amp::{Amp, Precision};
use burn_backend::Backend;

use crate::common::HALVES;
use crate::device_in;
use crate::steps::{KINDS, Keeping, Ready, Step, input, param, step};
use shared::checked::{Casts, Checked, CheckedDevice, Reads};

/// Three projections of one tensor and a fourth whose weight is the first's.
fn projections<B: Backend<Device = CheckedDevice>>(device: &CheckedDevice) -> [Linear<B>; 4] {
    let [q, k, v] = [(); 3].map(|()| LinearConfig::new(8, 8).init(device));
    // A clone of a module that was never used draws its own values.
    Module::visit(&q, &mut Ready);
    let tied = q.clone();
    [q, k, v, tied]
}

fn projected<B: Backend>(layers: &[Linear<B>; 4], x: Tensor<B, 2>) -> Tensor<B, 2> {
    let [q, k, v, tied] = layers.each_ref().map(|layer| layer.forward(x.clone()));
    q * k + v * tied
}

#[test]
fn a_tensor_is_cast_once_however_many_operations_use_it() {
    for precision in HALVES {
        let half = precision.compute_dtype().expect("a half precision");
        let device = device_in(precision);
        let layers = projections::<Amp<Checked>>(&device);
        let x = input([4, 8], 1, &device);
        projected(&layers, x.clone());
        device.reset();
        projected(&layers, x);
        // The parameters' half copies are kept from the first time.
        assert_eq!(device.counts().casts(), 0, "in {precision}");

        let device = device_in(precision);
        let layers = projections::<Amp<Checked>>(&device);
        projected(&layers, input([4, 8], 1, &device));
        let counts = device.counts();
        assert_eq!(counts.ran_in("linear", half), 4);
        let expected = Casts {
            // x, three weights, three biases.
            count: 7,
            elements: 32 + 3 * 64 + 3 * 8,
        };
        assert_eq!(counts.casts_between(DType::F32, half), expected);
        assert_eq!(counts.casts(), 7);
    }
}

#[test]
fn a_training_step_casts_no_tensor_twice() {
    for precision in HALVES {
        let half = precision.compute_dtype().expect("a half precision");
        let device = device_in(precision);
        let model = (
            param([4, 8], 1, &device),
            projections::<Keeping>(&device).to_vec(),
        );
        let step = step::<Keeping, _>(&device, model, |(x, layers)| {
            let layers = layers.clone().try_into().expect("four layers");
            projected(&layers, x.val()).mean()
        });
        let twice = step.counts.cast_twice();
        assert!(twice.is_empty(), "in {precision}: {twice:?}");
        assert_eq!(step.counts.ran_in("linear", half), 4);
        assert_eq!(step.counts.ran_in("linear_weight_backward", half), 4);
        assert_eq!(step.counts.ran_in("linear_x_backward", half), 4);
    }
}

/// The casts of a bf16 step that uses one layer so many times, as an RNN does: to bf16, to FP32.
fn repeated(uses: usize) -> [Casts; 2] {
    let device = device_in(Precision::Bf16);
    let layer = LinearConfig::new(8, 8).init::<Keeping>(&device);
    let step = step::<Keeping, _>(&device, layer, |layer| {
        let x = input([4, 8], 1, &device);
        (0..uses).fold(x, |x, _| layer.forward(x)).mean()
    });
    let counts = step.counts;
    assert_eq!(counts.ran_in("linear_weight_backward", DType::BF16), uses);
    [(DType::F32, DType::BF16), (DType::BF16, DType::F32)]
        .map(|(from, to)| counts.casts_between(from, to))
}

/// The fewest casts of several runs. If another thread begins a backward pass during a run, later
/// uses get a node of their own, and its gradient a cast of its own.
fn fewest(run: impl Fn() -> [Casts; 2]) -> [Casts; 2] {
    let runs = (0..20).map(|_| run());
    let casts = |[to_half, to_fp32]: &[Casts; 2]| to_half.count + to_fp32.count;
    runs.min_by_key(casts).expect("a run")
}

#[test]
fn in_bf16_a_parameter_and_its_gradient_are_cast_once_however_often_it_is_used() {
    let [once, many] = [1, 6].map(|uses| fewest(|| repeated(uses)));
    assert_eq!(once[0], many[0], "to bf16");
    // The gradient of a bias is summed in FP32, at each use.
    let expected = Casts {
        count: once[1].count + 5,
        elements: once[1].elements + 5 * 32,
    };
    assert_eq!(many[1], expected, "to FP32");
}

/// As `repeated`, for one FP32 activation that so many layers use.
fn given_to(layers: usize) -> [Casts; 2] {
    let device = device_in(Precision::Bf16);
    let layer = LinearConfig::new(8, 8).init::<Keeping>(&device);
    let step = step::<Keeping, _>(&device, layer, |layer| {
        let x = layer.forward(input([4, 8], 1, &device)).exp();
        let outputs = (0..layers).map(|_| layer.forward(x.clone()));
        outputs.reduce(|a, b| a + b).expect("a layer").mean()
    });
    [(DType::F32, DType::BF16), (DType::BF16, DType::F32)]
        .map(|(from, to)| step.counts.casts_between(from, to))
}

/// The gradients of the activation add up before they are cast.
#[test]
fn in_bf16_an_activation_and_its_gradient_are_cast_once_however_often_it_is_used() {
    let [one, three] = [1, 3].map(|layers| fewest(|| given_to(layers)));
    assert_eq!(one, three);
}

#[test]
fn a_gradient_that_a_formula_gave_in_fp32_is_not_cast_back() {
    let device = device_in(Precision::Bf16);
    let layer = LinearConfig::new(8, 8).init::<Keeping>(&device);
    let step = step::<Keeping, _>(&device, layer, |layer| {
        layer.forward(input([4, 8], 1, &device)).tanh().mean()
    });
    assert_eq!(step.counts.ran_in("linear_bias_backward", DType::F32), 1);
    let expected = Casts {
        // Of tanh's operand, in both passes; of the weight's gradient.
        count: 3,
        elements: 2 * 32 + 64,
    };
    let widened = step.counts.casts_between(DType::BF16, DType::F32);
    assert_eq!(widened, expected);
}

#[test]
fn a_mean_has_a_gradient_of_its_own_size() {
    for precision in HALVES {
        let half = precision.compute_dtype().expect("a half precision");
        let device = device_in(precision);
        let layer = LinearConfig::new(8, 8).init::<Keeping>(&device);
        let step = step::<Keeping, _>(&device, layer, |layer| {
            let out = layer.forward(input([4, 8], 1, &device));
            out.mean_dim(0).sum_dim(1).mean()
        });
        // In bf16 the pass starts from ones, in f16 from the loss scale.
        let seeds = usize::from(precision == Precision::Bf16);
        assert_eq!(step.counts.ran_in("float_ones", DType::F32), seeds);
        let rounded = step.counts.casts_between(DType::F32, half);
        // x, the weight, the bias, and the gradient of a column.
        assert_eq!(rounded.elements, 32 + 64 + 8 + 8, "in {precision}");
    }
}

#[test]
fn no_kind_of_step_casts_a_tensor_twice() {
    for kind in KINDS {
        for precision in HALVES {
            for steps in [kind.keeping, kind.recomputing] {
                let step = steps(&device_in(precision));
                let twice = step.counts.cast_twice();
                assert!(twice.is_empty(), "{} in {precision}: {twice:?}", kind.name);
            }
        }
    }
}

#[test]
fn a_step_reads_back_once_in_f16_and_never_otherwise() {
    for precision in [Precision::F16, Precision::Bf16, Precision::F32] {
        let device = device_in(precision);
        let mut model = LinearConfig::new(8, 4).init::<Keeping>(&device);
        let mut optimizer = AdamConfig::new().init();
        for round in 0..3 {
            device.reset();
            let output = model.forward(input([6, 8], 1, &device));
            let target = input([6, 4], 2, &device);
            let loss = MseLoss::new().forward(output, target, Reduction::Mean);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, grads);
            let expected = Reads {
                float: usize::from(precision == Precision::F16),
                ..Reads::default()
            };
            assert_eq!(
                device.counts().reads,
                expected,
                "round {round} in {precision}"
            );
        }
    }
}

#[test]
fn fp32_is_plain_burn() {
    for kind in KINDS {
        let plain = (kind.plain)(&CheckedDevice::new());
        for steps in [kind.keeping, kind.recomputing] {
            let step = steps(&device_in(Precision::F32));
            assert_eq!(step.counts.casts(), 0, "{}", kind.name);
            assert_eq!(step.counts.reads.total(), 0, "{}", kind.name);
            assert!(step.counts.in_half().is_empty(), "{}", kind.name);
            assert_eq!(step.loss, plain.loss, "{}", kind.name);
            assert_eq!(step.grads, plain.grads, "{}", kind.name);
        }
        let sorted = |step: &Step| {
            let mut ops: Vec<_> = step.counts.ops().map(|(op, _, n)| (op, n)).collect();
            ops.sort_unstable();
            ops
        };
        let step = (kind.keeping)(&device_in(Precision::F32));
        assert_eq!(sorted(&step), sorted(&plain), "{}", kind.name);
    }
}
