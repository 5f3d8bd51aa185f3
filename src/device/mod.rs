//! A device: its capabilities, configuration, trial results, scaler and statistics, in one
//! [`DeviceState`]. Independent of the policy's operations and of autodiff.

mod auto;
mod config;
mod kind;
mod state;
mod statistics;
mod trial;
mod waiting;

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
pub(crate) use waiting::Waiting;

use crate::policy::{Exceptions, Known, Mode, Op, Support};
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
        Mode::On(half) if trial::exists::<B>(op) => {
            let known = context.known(&Op::named(op.name()), || 1);
            let known = known.is_exact(op.kind(), half);
            known.or_else(|| context.tried::<B>(device, half, op))
        }
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
    pub state: &'static DeviceState,
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

    /// Counts a contraction of data, which stays FP32. Warns of a program that contracts nothing else: its weights may be
    /// plain tensors.
    #[cold]
    pub(crate) fn count_data<B: Backend>(&self, device: &B::Device) {
        const MANY: u64 = 1000;
        let statistics = self.state.statistics();
        let casts = statistics.to_half.casts().count;
        if statistics.contraction_of_data() == MANY && casts == 0 {
            log::warn!(
                "burn-amp: {MANY} products and convolutions on {} stayed FP32, and none was half: nothing learned took \
                 part. If the program holds its weights in plain tensors, and in no Param, \
                 AmpConfig::with_data_in_half(true) runs them in half",
                name::<B>(device)
            );
        }
    }

    /// What the exceptions of the device say of a call of this length.
    #[inline]
    pub(crate) fn known(&self, op: &Op, length: impl FnOnce() -> usize) -> Known {
        let known = self.state.exceptions().of(op, length);
        match self.in_force.tried {
            true => known,
            false => known.without_trials(),
        }
    }

    /// Whether a pass on the device is watched: on request, or because f16 overflows at any loss scale.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        let in_f16 = self.mode == Mode::On(DType::F16);
        self.in_force.watched || in_f16 && self.state.overflow_fallback().is_watching()
    }

    /// Whether a watched pass is only looked at: of each operation, the first calls are enough.
    #[inline]
    pub(crate) fn is_looked_at(&self) -> bool {
        !self.in_force.watched && self.state.overflow_fallback().is_looking()
    }

    /// Tries an operation in `half`. Returns whether the device is exact in it; `None` if trials are off. `B` must be a
    /// backend that computes.
    pub(crate) fn tried<B: Backend>(
        &self,
        device: &B::Device,
        half: DType,
        op: TriedOp,
    ) -> Option<bool> {
        if !self.in_force.tried {
            return None;
        }
        let support = self.in_force.support.of(half);
        let tried = || in_kernel(|| trial::tried::<B>(device, half, support, op));
        let exceptions = self.state.exceptions();
        exceptions
            .named(|| name::<B>(device))
            .tried(op, half, tried)
    }
}

/// The exceptions of a device: the operations that it computes in another precision than the policy's table says, for
/// all threads. List them, keep them in a file, clear or freeze them. Backends that share a device type share them.
///
/// ```
/// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
/// # use burn_amp::{Amp, AmpConfig, Precision, exceptions};
/// # let device = Default::default();
/// AmpConfig::new()
///     .with_precision(Precision::F16)
///     .apply::<Amp<Flex>>(&device)?;
/// # let layer = LinearConfig::new(4, 4).init::<Amp<Flex>>(&device);
/// # layer.forward(Tensor::<Amp<Flex>, 2>::ones([2, 4], &device));
/// for exception in exceptions::<Amp<Flex>>(&device).list() {
///     println!("{exception} in {}: {:?}", exception.precision, exception.reason);
/// }
/// // linear in f32: Tried
/// # let list = exceptions::<Amp<Flex>>(&device).list();
/// # assert!(list.iter().any(|e| e.op == "linear"), "{list:?}");
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub fn exceptions<B: Backend>(device: &B::Device) -> &'static Exceptions {
    let state = DeviceState::of::<B>(device);
    state.exceptions().named(|| name::<B>(device))
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
