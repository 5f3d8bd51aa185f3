//! Devices of this process: Burn's devices, computing in a precision.

/// Calls a function that is generic over a backend for the backend of a Burn device.
macro_rules! on_backend {
    ($on:expr, $function:ident($($argument:expr),*)) => {
        match $on.as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(below) => {
                Ok($function::<burn_dispatch::backends::Cube>(below, $($argument),*))
            }
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(below) => {
                Ok($function::<burn_dispatch::backends::Flex>(below, $($argument),*))
            }
            device => Err(Error::UnsupportedDevice {
                device: format!("{device:?}"),
            }),
        }
    };
}

#[cfg(feature = "burn-0-23")]
mod group;
#[cfg(feature = "burn-0-22")]
#[path = "../burn_0_22/loopback.rs"]
mod loopback;

use std::sync::PoisonError;

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn_amp_core::{Anomaly, Chosen};
use burn_backend::Backend;
use burn_dispatch::DispatchDevice;

#[cfg(feature = "burn-0-23")]
use group as this_burn;
#[cfg(feature = "burn-0-22")]
use loopback as this_burn;

use crate::device::{DeviceState, UNSCALED};
use crate::{AmpReport, Error, Precision};

pub use this_burn::mixed_precision;

/// The Burn device below a device of this process, and the precision in force.
pub(crate) fn below(device: &Device) -> Option<(Device, Chosen)> {
    // A panic leaves the list as it was.
    let list = this_burn::LOCAL
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let local = list.iter().find(|local| local.device == *device)?;
    Some((local.on.clone(), local.in_force))
}

/// Whether a device is behind a server.
pub(crate) fn is_remote(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => true,
        _ => false,
    }
}

/// A device in the words of the program that made it. Burn's own words name the server or the group.
pub(crate) fn described(device: &Device) -> String {
    let autodiff = if device.is_autodiff() {
        ", with autodiff"
    } else {
        ""
    };
    match below(&device.clone().without_autodiff()) {
        Some((on, in_force)) => format!("{on:?} in {}{autodiff}", in_force.precision),
        None => format!("{device:?}"),
    }
}

/// The anomalies that were found on a device of this process since the last call.
pub(crate) fn anomalies(device: &Device) -> Vec<Anomaly> {
    let below = below(&device.clone().without_autodiff());
    below
        .and_then(|(on, _)| on_backend!(on, anomalies_on()).ok())
        .unwrap_or_default()
}

fn anomalies_on<B: Backend>(device: &B::Device) -> Vec<Anomaly> {
    DeviceState::of::<B>(device).anomalies().take()
}

/// The choice for `precision` on a device of this process that is about to be created.
fn chosen<B: Backend>(below: &B::Device, precision: Precision) -> Result<Chosen, Error> {
    let chosen = DeviceState::of::<B>(below).chosen::<B>(below, precision)?;
    if chosen.precision == Precision::F16 {
        UNSCALED.watch();
    }
    Ok(chosen)
}

impl AmpReport {
    /// The report of a device that [`mixed_precision`], or a function of this crate with the name of a
    /// backend, returned; `None` for any other device. The counts include all devices of this process on the
    /// same Burn device.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_amp_device::{AmpReport, Precision, flex};
    ///
    /// let device = flex(Precision::Bf16)?.autodiff();
    /// let report = AmpReport::of_device(&device).expect("a device of this process");
    /// assert!(report.to_string().contains("precision   bf16: asked for"));
    /// # }
    /// # Ok::<(), burn_amp_device::Error>(())
    /// ```
    pub fn of_device(device: &Device) -> Option<Self> {
        let (on, in_force) = below(&device.clone().without_autodiff())?;
        on_backend!(on, report(in_force)).ok()
    }
}

fn report<B: Backend>(device: &B::Device, in_force: Chosen) -> AmpReport {
    AmpReport::in_force::<B>(device, in_force)
}

/// Burn's functions that return a device, with a precision.
macro_rules! devices {
    ($($feature:literal $name:ident($($arg:ident: $ty:ty)?);)*) => {$(
        #[doc = concat!(
            "Burn's [`Device::", stringify!($name), "`], computing in `precision`. See \
             [`mixed_precision`]."
        )]
        ///
        /// # Errors
        ///
        /// The errors of [`mixed_precision`].
        #[cfg(feature = $feature)]
        pub fn $name($($arg: $ty,)? precision: Precision) -> Result<Device, Error> {
            mixed_precision(Device::$name($($arg)?), precision)
        }
    )*};
}

devices! {
    "flex" flex();
    "cpu" cpu();
    "cuda" cuda(index: impl Into<burn::tensor::DeviceIndex>);
    "rocm" rocm(index: impl Into<burn::tensor::DeviceIndex>);
    "wgpu" wgpu(kind: DeviceKind);
    "vulkan" vulkan(kind: DeviceKind);
    "metal" metal(kind: DeviceKind);
    "webgpu" webgpu(kind: DeviceKind);
}
