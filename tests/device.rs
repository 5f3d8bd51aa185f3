//! What the tested backend reports of half precision is what it does.

mod common;

use burn::tensor::Tensor;
use burn_amp::{Amp, AmpError, precision_of, with_precision};
use burn_backend::{Backend, DTypeUsage};

use common::{HALVES, Inner};

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
                    ones([8, 4096]).matmul(ones([4096, 8]))
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

/// A device is asked for its name alone: it need not be there.
#[cfg(feature = "tch")]
#[test]
fn auto_on_libtorch_is_f16_on_gpus_and_fp32_elsewhere() {
    use burn_amp::{AmpAutodiff, Precision};
    use burn_tch::LibTorchDevice;

    for (device, expected) in [
        (LibTorchDevice::Cpu, Precision::F32),
        (LibTorchDevice::Cuda(0), Precision::F16),
        (LibTorchDevice::Mps, Precision::F16),
        (LibTorchDevice::Vulkan, Precision::F32),
    ] {
        let auto = || precision_of::<AmpAutodiff<Inner>>(&device).unwrap();
        assert_eq!(with_precision(Precision::Auto, auto), expected);
        assert_eq!(auto(), expected);
    }
}
