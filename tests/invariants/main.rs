//! The requirements of the backend below burn-amp, on one that checks them: no operation gets operands
//! of different float dtypes, none gets a dtype that its device does not support, and nothing is cast
//! or read back without need.

#[path = "../common/mod.rs"]
mod common;

mod checking;
mod counts;
mod devices;
mod fused;
mod mixed;
mod regions;
mod steps;
mod training;

use burn_amp::{LossScaleConfig, Precision};

use shared::checked::{self, Checked, CheckedDevice};

/// A device of one's own that computes in `precision`.
fn device_in(precision: Precision) -> CheckedDevice {
    configured(CheckedDevice::new(), precision)
}

/// Configures a device, in f16 with a loss scale that none of these models overflows at.
fn configured(device: CheckedDevice, precision: Precision) -> CheckedDevice {
    let config = checked::config().with_precision(precision);
    let config = match precision {
        Precision::F16 => config.with_loss_scale(LossScaleConfig::Fixed(256.0)),
        _ => config,
    };
    let applied = config.apply::<Checked>(&device);
    assert_eq!(applied.expect("a device that can do it"), precision);
    device
}
