//! A device: its half support, its precision in force, the results of its trials, and its counts, in one
//! [`DeviceState`]. Independent of the operations.

mod anomaly;
mod session;
mod state;
mod statistics;
mod trial;
mod unscaled;

use burn_amp_core::{AmpError, Precision};
use burn_backend::Backend;

pub(crate) use anomaly::Anomalies;
pub(crate) use burn_amp_core::is_watched_by_environment as is_watched;
pub(crate) use session::{Bf16, F16, OfDevice, Session, enter};
pub(crate) use state::DeviceState;
pub(crate) use statistics::CastStatistics;
pub use statistics::OpCasts;
pub(crate) use unscaled::UNSCALED;

/// Sets the precision of a device of `B`, the backend inside [`Amp<B>`](crate::Amp), for all
/// threads, and returns the precision that is in force from now on: never
/// [`Auto`](Precision::Auto). Resets the device's counts.
///
/// A device that was never configured is in `Auto`. Tensors that exist keep their dtypes, and the next
/// operation on them follows the new precision. An operation is tried when it first computes in a half dtype
/// on a device: if the device fails the trial, the operation computes in FP32 and returns half.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/burn.rs"));
/// # fn main() -> Result<(), burn_amp_device::AmpError> {
/// use burn_amp_device::{Precision, configure};
/// use burn_dispatch::{backends::Flex, devices::FlexDevice};
///
/// let precision = configure::<Flex>(&FlexDevice, Precision::Bf16)?;
/// assert_eq!(precision, Precision::Bf16);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`AmpError::UnsupportedPrecision`] if the device has no such half precision. The device is left
/// unchanged.
pub fn configure<B: Backend>(
    device: &B::Device,
    precision: Precision,
) -> Result<Precision, AmpError> {
    let in_force = DeviceState::of::<B>(device).configure::<B>(device, precision)?;
    Ok(in_force.precision)
}

/// The backend's name and the device.
pub(crate) fn name<B: Backend>(device: &B::Device) -> String {
    format!("{} on {device:?}", B::name(device))
}
