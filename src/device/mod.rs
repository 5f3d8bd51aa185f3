//! A device: its capabilities, configuration, trial results, scaler and statistics, in one
//! [`DeviceState`]. Independent of the policy's operations and of autodiff.

mod auto;
mod capabilities;
mod config;
mod state;
mod statistics;
mod trial;

use std::any::TypeId;

use burn_amp_core::policy::trials::TriedOp;
use burn_backend::{Backend, DType, DeviceId, DeviceOps};

pub(crate) use config::InForce;
pub use config::{AmpConfig, WhenStuck};
pub(crate) use state::DeviceState;
pub(crate) use statistics::CastStatistics;
pub(crate) use trial::register as register_timing;

use crate::policy::{Mode, Support};
use crate::precision::{in_kernel, region};
use crate::{AmpError, GradScaler, Precision};

/// The precision in force on a device for this thread, never `Auto`: the innermost region's, else
/// the device's own.
///
/// # Errors
///
/// [`AmpError::UnsupportedPrecision`] if a region requests a precision that the device lacks.
pub fn precision_of<B: Backend>(device: &B::Device) -> Result<Precision, AmpError> {
    Ok(explained::<B>(device)?.0)
}

/// The precision in force on a device for this thread, and the reason for it.
pub(crate) fn explained<B: Backend>(
    device: &B::Device,
) -> Result<(Precision, &'static str), AmpError> {
    let state = DeviceState::of::<B>(device);
    let in_force = state.in_force::<B>(device);
    let auto = || state.auto::<B>(device);
    Ok(match (region(), in_force.is_chosen) {
        (None, true) => (in_force.precision, "asked for with AmpConfig"),
        (None, false) => (in_force.precision, &auto().why),
        (Some(Precision::Auto), _) => (auto().precision, &auto().why),
        (Some(precision), _) => {
            let capabilities = state.capabilities::<B>(device);
            let precision = capabilities.check::<B>(precision, device)?;
            (precision, "asked for in a region")
        }
    })
}

/// A device's state as one operation sees it.
#[derive(Clone, Copy)]
pub(crate) struct DeviceContext {
    state: &'static DeviceState,
    pub in_force: InForce,
    /// How the policy applies before the operands are considered.
    pub mode: Mode,
}

impl DeviceContext {
    /// Looks a device up.
    ///
    /// # Panics
    ///
    /// If a region requests a precision that the device does not support, with the text of
    /// [`AmpError::UnsupportedPrecision`].
    #[inline]
    pub(crate) fn of<B: Backend>(device: &B::Device) -> Self {
        let state = DeviceState::of::<B>(device);
        let in_force = state.in_force::<B>(device);
        let precision = match region() {
            None => in_force.precision,
            Some(_) => precision_of::<B>(device).unwrap_or_else(|error| panic!("{error}")),
        };
        let mode = match precision.compute_dtype() {
            Some(half) => Mode::On(half),
            None => Mode::Off,
        };
        Self {
            state,
            in_force,
            mode,
        }
    }

    pub(crate) fn support<B: Backend>(&self, device: &B::Device) -> Support {
        self.state.capabilities::<B>(device).support
    }

    /// Whether the device computes an operation exactly in `half`, if the configuration has devices
    /// tried. Tries the device the first time. `B` must be a backend that computes.
    pub(crate) fn is_exact<B: Backend>(
        &self,
        device: &B::Device,
        half: DType,
        op: TriedOp,
    ) -> Option<bool> {
        let trials = self.in_force.tried.then(|| self.state.trials(half))?;
        let tried = || in_kernel(|| trial::is_exact::<B>(device, half, op));
        Some(trials.is_exact(op, tried))
    }
}

/// The half support of a device on which a tensor is created. Operations look at the device only
/// once half precision is wanted, so a device whose default is half announces half precision here.
pub(crate) fn registered<B: Backend>(device: &B::Device) -> Support {
    let state = DeviceState::of::<B>(device);
    state.in_force::<B>(device);
    state.capabilities::<B>(device).support
}

impl GradScaler {
    /// The scaler of a device: one per process, with the default configuration until the device is
    /// configured. Backends that share a device type (`Cuda`, `Amp<Cuda>`, `AmpAutodiff<Cuda>`)
    /// share the scaler.
    pub fn of<B: Backend>(device: &B::Device) -> Self {
        DeviceState::of::<B>(device).scaler().clone()
    }
}

/// The backend's name, without the layers that share its devices, and the device.
pub(crate) fn name<B: Backend>(device: &B::Device) -> String {
    format!("{} on {:?}", bare_name::<B>(device), device.inner())
}

fn bare_name<B: Backend>(device: &B::Device) -> String {
    let name = B::name(device.inner());
    let mut bare = name.as_str();
    while let Some(inner) = ["amp<", "autodiff<"]
        .iter()
        .find_map(|layer| bare.strip_prefix(layer)?.strip_suffix('>'))
    {
        bare = inner;
    }
    bare.into()
}

/// The key of a device. Backends that share a device type share the key, and a device that enables
/// autodiff by itself has the key of the plain device.
pub(crate) type DeviceKey = (TypeId, DeviceId);

pub(crate) fn key<B: Backend>(device: &B::Device) -> DeviceKey {
    (TypeId::of::<B::Device>(), device.inner().id())
}
