//! `Dispatch`, Burn's choice of a backend at run time, below `AmpAutodiff`.

use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::{Dispatch, DispatchDevice};
use burn_amp::policy::OpPrecision;
use burn_amp::{Amp, AmpAutodiff, AmpConfig, AmpReport, Precision, precision_of};

use shared::close::HALVES;
use shared::mlp::{self, Mlp, parameters};

type B = AmpAutodiff<Dispatch>;

fn plain() -> DispatchDevice {
    DispatchDevice::default()
}

fn autodiff() -> DispatchDevice {
    DispatchDevice::autodiff(plain())
}

/// The losses of some steps on a device, and the parameters after them.
fn trained(device: &DispatchDevice) -> (Vec<f32>, Vec<f32>) {
    let mut model = Mlp::<B>::new().fork(device);
    let mut optimizer = SgdConfig::new().init();
    let losses = (0..20)
        .map(|_| {
            let x = mlp::values::<B, 2>([32, 8], 1).to_device(device);
            let y = mlp::values::<B, 2>([32, 4], 2).to_device(device);
            let loss = model.loss_on(x, y);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model.clone(), grads);
            loss.into_scalar()
        })
        .collect();
    (losses, parameters(&model))
}

/// A device that enables autodiff by itself, as the published `mnist` of Burn passes it, is used
/// without: `AmpAutodiff` has autodiff of its own, and one tape is enough.
#[test]
fn a_device_with_autodiff_is_used_without() {
    for precision in HALVES {
        let applied = AmpConfig::new()
            .with_precision(precision)
            .apply::<B>(&autodiff());
        assert_eq!(applied, Ok(precision));
        assert_eq!(precision_of::<B>(&autodiff()), Ok(precision));
        assert_eq!(precision_of::<B>(&plain()), Ok(precision));
        let expected = trained(&plain());
        let losses = &expected.0;
        assert!(losses[19] < 0.9 * losses[0], "{precision}: {losses:?}");
        assert_eq!(trained(&autodiff()), expected, "{precision}");

        // Trials have run on the device, and its casts are counted.
        let report = AmpReport::of::<B>(&autodiff()).unwrap();
        assert!(report.casts_to_half.count > 0, "{report}");
        let mut tried = report.exceptions.iter();
        let has_fp32 = tried.any(|exception| exception.precision == OpPrecision::F32);
        assert_eq!(has_fp32, precision == Precision::F16);
    }
}

#[test]
fn tensors_are_made_without_a_second_tape() {
    let device = autodiff();
    assert!(!Amp::<Dispatch>::ad_enabled(&device));
    assert!(B::ad_enabled(&device));
    let tensors = [
        Tensor::<B, 1>::ones([2], &device),
        Tensor::zeros([2], &device),
        Tensor::full([2], 3.0, &device),
        Tensor::empty([2], &device),
        Tensor::from_data([1.0, 2.0], &device),
        Tensor::random([2], Distribution::Default, &device),
        Tensor::<B, 1>::ones([2], &plain()).to_device(&device),
    ];
    let ints = [
        Tensor::<B, 1, Int>::ones([2], &device),
        Tensor::arange(0..2, &device),
        Tensor::from_data([1, 2], &device),
    ];
    let bools = [
        Tensor::<B, 1, Bool>::empty([2], &device),
        Tensor::from_data([true, false], &device),
    ];
    let is_plain = |device: DispatchDevice| !matches!(device, DispatchDevice::Autodiff(_));
    assert!(tensors.into_iter().all(|t| is_plain(t.device())));
    assert!(ints.into_iter().all(|t| is_plain(t.device())));
    assert!(bools.into_iter().all(|t| is_plain(t.device())));
}
