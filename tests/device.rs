//! The tested backend does what it reports of half precision.

mod common;

use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_amp::{Amp, AmpError, precision_of, with_precision};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, DType, DTypeUsage, FloatDType, Shape};

use common::{HALVES, Inner, halves};

/// `--nocapture` shows what the device reports.
#[test]
fn a_half_precision_computes_or_is_refused() {
    let device = Default::default();
    let auto = precision_of::<Inner>(&device).unwrap();
    println!("{} on {device:?}: auto is {auto}", Inner::name(&device));
    for precision in HALVES {
        let dtype = precision.compute_dtype().unwrap();
        let usage = Inner::dtype_usage(&device, dtype);
        println!("{dtype:?}: {usage:?}");
        match with_precision(precision, || precision_of::<Inner>(&device)) {
            Ok(possible) => {
                assert_eq!(possible, precision);
                let product = with_precision(precision, || {
                    let ones = |shape| Tensor::<Amp<Inner>, 2>::ones(shape, &device);
                    ones([8, 4096]).matmul(ones([4096, 8]).set_require_grad(false))
                });
                assert_eq!(product.dtype(), dtype);
                assert_eq!(product.into_data().to_vec::<f32>().unwrap(), [4096.0; 64]);
            }
            Err(AmpError::UnsupportedPrecision { .. }) => {
                let accelerated = DTypeUsage::Storage | DTypeUsage::Accelerated;
                assert!(!usage.is_superset(DTypeUsage::general()), "{usage:?}");
                assert!(!usage.is_superset(accelerated), "{usage:?}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// The noise of a dropout is drawn in the requested dtype: a seed gives the same noise in each dtype.
#[test]
fn zeros_and_ones_are_drawn_alike_in_every_dtype() {
    let device = Default::default();
    let draw = |dtype| {
        Inner::seed(&device, 5);
        let noise = Distribution::Bernoulli(0.3);
        let drawn = Inner::float_random(Shape::new([1000]), noise, &device, dtype);
        let data = Tensor::<Inner, 1>::from_primitive(TensorPrimitive::Float(drawn)).into_data();
        data.iter::<f32>().collect::<Vec<_>>()
    };
    let expected = draw(FloatDType::F32);
    assert!((200.0..400.0).contains(&expected.iter().sum::<f32>()));
    for precision in halves() {
        let dtype = precision.compute_dtype::<DType>().unwrap();
        assert_eq!(draw(dtype.into()), expected, "{dtype:?}");
    }
}

/// LibTorch does not report what it accelerates.
#[cfg(feature = "tch")]
#[test]
fn auto_on_libtorch_is_measured() {
    use burn_amp::{AmpAutodiff, AmpConfig, AmpReport, Precision};
    use burn_tch::LibTorchDevice;

    type B = AmpAutodiff<Inner>;
    let auto = |device| with_precision(Precision::Auto, || AmpReport::of::<B>(device).unwrap());
    let measured = auto(&LibTorchDevice::Cpu);
    assert!(measured.reason.contains("matrices takes"), "{measured}");
    // Timed only once: the choice stays.
    assert_eq!(auto(&LibTorchDevice::Cpu).reason, measured.reason);
    let applied = AmpConfig::new().apply::<B>(&LibTorchDevice::Cpu);
    assert_eq!(applied, Ok(measured.precision));

    // No such device on a machine that runs these tests.
    let absent = auto(&LibTorchDevice::Vulkan);
    assert_eq!(absent.precision, Precision::F32);
    assert!(absent.reason.contains("timing the device"), "{absent}");
}
