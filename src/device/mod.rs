//! A device: its capabilities, configuration, trial results, scaler and statistics, in one
//! [`DeviceState`]. Independent of the policy's operations and of autodiff.

mod auto;
mod capabilities;
mod config;
mod kind;
mod state;
mod statistics;
mod trial;

use std::any::TypeId;

use burn_amp_core::Chosen;
use burn_amp_core::policy::trials::TriedOp;
use burn_backend::{Backend, DType, DeviceId, DeviceOps};

pub use config::AmpConfig;
pub(crate) use config::Settings;
#[cfg(test)]
pub(crate) use kind::as_fused;
pub(crate) use kind::{BackendKind, is_fused};
pub(crate) use state::DeviceState;
pub(crate) use statistics::CastStatistics;

use crate::policy::{Mode, Op, OpPrecision, Support};
use crate::precision::{in_kernel, is_in_region, region};
use crate::{AmpError, GradScaler, Precision};

/// The precision in force on a device for this thread, never `Auto`: the innermost region's, else
/// the device's own.
///
/// # Errors
///
/// [`AmpError::UnsupportedPrecision`] if a region requests a precision that the device lacks.
pub fn precision_of<B: Backend>(device: &B::Device) -> Result<Precision, AmpError> {
    Ok(explained::<B>(device)?.precision)
}

/// The precision in force on a device for this thread, and why.
pub(crate) fn explained<B: Backend>(device: &B::Device) -> Result<Chosen, AmpError> {
    let state = DeviceState::of::<B>(device);
    let Settings {
        precision,
        is_chosen,
        ..
    } = state.in_force::<B>(device);
    let (precision, why) = match region() {
        None if is_chosen => (precision, "asked for with AmpConfig"),
        None | Some(Precision::Auto) => return Ok(state.auto::<B>(device)),
        Some(precision) => {
            let precision = state.check::<B>(device, precision)?;
            (precision, "asked for in a region")
        }
    };
    Ok(Chosen { precision, why })
}

/// Whether a device is exact in an operation in its precision, as the operation's first use there finds out.
/// `None` in FP32, without trials, and for an operation of a later version of Burn.
pub fn is_exact<B: Backend>(device: &B::Device, op: TriedOp) -> Option<bool> {
    let context = DeviceContext::of::<B>(device);
    match context.mode {
        Mode::On(half) if trial::exists::<B>(op) => context.is_exact::<B>(device, half, op),
        _ => None,
    }
}

/// Whether a half dtype is the policy's on a device: that of the device's configuration, of the innermost region
/// of this thread, or of a region around it. Where a program asks for this dtype, it asks for the dtype of a tensor
/// that the policy made half, as in `x.zeros_like()`.
pub(crate) fn is_of_policy<B: Backend>(device: &B::Device, half: DType) -> bool {
    let is_half = |precision: &Precision| precision.compute_dtype() == Some(half);
    let mut regions = [Precision::F16, Precision::Bf16].into_iter();
    let known = DeviceState::of::<B>(device).known_precisions();
    regions.any(|region| is_half(&region) && is_in_region(region)) || known.iter().any(is_half)
}

/// A device's state as one operation sees it.
#[derive(Clone, Copy)]
pub(crate) struct DeviceContext {
    state: &'static DeviceState,
    pub in_force: Settings,
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

    /// Counts a contraction of data, which stays FP32.
    #[cold]
    pub(crate) fn count_data(&self) {
        self.state.statistics().contraction_of_data();
    }

    /// The precision that the configuration gives an operation in the place of the table's.
    #[inline]
    pub(crate) fn changed(&self, op: &Op) -> Option<OpPrecision> {
        if self.in_force.changes_operations {
            self.state.changed_to(op)
        } else {
            None
        }
    }

    /// Whether the device is exact in an operation in `half`; `None` if trials are off. The first call
    /// runs the trial. `B` must be a backend that computes.
    pub(crate) fn is_exact<B: Backend>(
        &self,
        device: &B::Device,
        half: DType,
        op: TriedOp,
    ) -> Option<bool> {
        let trials = self.in_force.tried.then(|| self.state.trials(half))?;
        let support = self.in_force.support.of(half);
        let tried = || in_kernel(|| trial::tried::<B>(device, half, support, op));
        Some(trials.of(op, tried))
    }
}

/// Puts a device in use when a tensor is created on it, and returns its half support. Operations look
/// up the device only once half precision is wanted. So a device whose default is half announces half
/// precision here.
pub(crate) fn put_in_use<B: Backend>(device: &B::Device) -> Support {
    DeviceState::of::<B>(device).in_force::<B>(device).support
}

impl GradScaler {
    /// The scaler of a device: one per process, with the default configuration until the device is
    /// configured. Backends that share a device type (`Cuda`, `Amp<Cuda>`, `AmpAutodiff<Cuda>`)
    /// share the scaler. Until the device is in use or configured, its precision is open, and
    /// [`loss_scale`](GradScaler::loss_scale) is that of f16.
    pub fn of<B: Backend>(device: &B::Device) -> Self {
        DeviceState::of::<B>(device).scaler().clone()
    }
}

/// The backend's name, without the layers that share its devices, and the device.
pub(crate) fn name<B: Backend>(device: &B::Device) -> String {
    let device = device.inner();
    format!("{} on {device:?}", bare(&B::name(device)))
}

/// A backend's name without the layers that share its devices.
fn bare(mut name: &str) -> &str {
    while let Some(inner) = ["amp<", "autodiff<"]
        .iter()
        .find_map(|layer| name.strip_prefix(layer)?.strip_suffix('>'))
    {
        name = inner;
    }
    name
}

/// The key of a device. Backends that share a device type share the key, and a device that enables
/// autodiff by itself has the key of the plain device.
pub(crate) type DeviceKey = (TypeId, DeviceId);

pub(crate) fn key<B: Backend>(device: &B::Device) -> DeviceKey {
    (TypeId::of::<B::Device>(), device.inner().id())
}
