//! The state of a device.

use std::any::type_name;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use burn_amp_core::{Capabilities, Chosen, OverflowFallback, Registry};
use burn_backend::{Backend, DType, DTypeUsage, Device, DeviceOps};
use parking_lot::Mutex;

use super::auto::select;
use super::waiting::Waiting;
use super::{AmpConfig, CastStatistics, DeviceKey, Settings, key, name};
use crate::policy::{Exceptions, OpPrecisions, Support};
use crate::precision::{in_kernel, is_in_region, want_half};
use crate::{AmpError, GradScaler, Precision};

/// The state of a device, for all threads and for the life of the process. Backends that share the
/// device share its state.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    capabilities: OnceLock<Capabilities>,
    /// The precision that `Auto` selects. Unset until it is first needed.
    auto: OnceLock<Chosen>,
    /// Replaced as a whole. Absent until the device is configured or first computes.
    in_force: ArcSwapOption<Settings>,
    /// What an operation in FP32 asks of the settings, as a [`Brief`].
    brief: AtomicU8,
    /// Held while settings come into force: what follows from them is always that of the same settings.
    changing: Mutex<()>,
    scaler: GradScaler,
    statistics: CastStatistics,
    /// With the exceptions of the device.
    overflow_fallback: Arc<OverflowFallback>,
    /// The calls to be compared with a reference at the end of the pass.
    waiting: Waiting,
    /// The backward passes of losses on this device.
    passes: AtomicU64,
    /// Whether the log has that a program read a loss that was not finite.
    lost: AtomicBool,
}

/// The settings of a device, as far as an operation in FP32 asks for them.
enum Brief {
    /// None yet, or each operation is watched.
    Other = 0,
    Half,
    Fp32,
}

/// The states of all devices. Process-wide, because a device outlives every tensor on it, and any
/// thread may name it.
static STATES: Registry<DeviceKey, DeviceState> = Registry::new();

impl DeviceState {
    /// The state of a device. Takes no lock, since each operation looks its device up.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        STATES.get_or_add(key::<B>(device), Self::default)
    }

    /// The other devices of this type that are in use, with their states.
    pub(crate) fn others<B: Backend>(
        device: &B::Device,
    ) -> impl Iterator<Item = (B::Device, &'static Self)> {
        let (kind, id) = key::<B>(device);
        let others = STATES
            .iter()
            .filter(move |((of, other), _)| *of == kind && *other != id);
        others.map(|((_, id), state)| (Device::from_id(*id), state))
    }

    fn capabilities<B: Backend>(&self, device: &B::Device) -> Capabilities {
        let reported = || burn_amp_core::capabilities!(B, device.inner());
        *self.capabilities.get_or_init(reported)
    }

    pub(super) fn support<B: Backend>(&self, device: &B::Device) -> Support {
        self.capabilities::<B>(device).support()
    }

    /// The precision, if the device supports it.
    pub(super) fn check<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Result<Precision, AmpError> {
        let hint = || {
            if type_name::<B>().contains("NdArray") {
                ", or the Flex backend, which computes in half on a CPU"
            } else {
                ""
            }
        };
        let capabilities = self.capabilities::<B>(device);
        capabilities.check(precision, || name::<B>(device), hint)
    }

    /// The precision that `Auto` selects on the device. May time products of matrices.
    pub(crate) fn auto<B: Backend>(&self, device: &B::Device) -> Chosen {
        // Timing the upper layer calls this for the lower layer.
        let select = || in_kernel(|| select::<B>(device, self.capabilities::<B>(device)));
        Chosen::auto(&self.auto, select, || name::<B>(device))
    }

    /// The configuration in force; that of `Auto` if the device was not configured.
    #[inline]
    pub(crate) fn in_force<B: Backend>(&self, device: &B::Device) -> Settings {
        match &*self.in_force.load() {
            Some(in_force) => **in_force,
            None => self.in_auto::<B>(device),
        }
    }

    /// Whether the device computes in FP32 in such a region, and watches nothing. Takes no lock and copies nothing.
    #[inline]
    pub(crate) fn computes_fp32(&self, region: Option<Precision>) -> bool {
        let brief = self.brief.load(Ordering::Relaxed);
        match region {
            None => brief == Brief::Fp32 as u8,
            Some(Precision::F32) => brief != Brief::Other as u8,
            Some(_) => false,
        }
    }

    /// The precision of the configuration in force, and that of `Auto` in a region. While a device's `Auto` is being
    /// selected, it has neither.
    pub(super) fn known_precisions(&self) -> Vec<Precision> {
        let in_force = self.in_force.load();
        let in_force = in_force.as_ref().map(|in_force| in_force.precision);
        let auto = self.auto.get().filter(|_| is_in_region(Precision::Auto));
        let auto = auto.map(|auto| auto.precision);
        in_force.into_iter().chain(auto).collect()
    }

    #[cold]
    fn in_auto<B: Backend>(&self, device: &B::Device) -> Settings {
        let auto = self.auto::<B>(device).precision;
        let auto = Arc::new(AmpConfig::new().settings::<B>(device, auto));
        let none: Option<Arc<Settings>> = None;
        let _changing = self.changing.lock();
        let before = self.in_force.compare_and_swap(&none, Some(auto.clone()));
        match &*before {
            // Another thread was first.
            Some(in_force) => **in_force,
            None => {
                self.announce(&auto);
                *auto
            }
        }
    }

    pub(super) fn put_in_force(&self, settings: Settings, operations: OpPrecisions) {
        let news = {
            let _changing = self.changing.lock();
            self.announce(&settings);
            let news = self.exceptions().configure(&operations);
            self.in_force.store(Some(settings.into()));
            news
        };
        self.exceptions().publish(news);
    }

    pub(crate) fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    pub(crate) fn statistics(&self) -> &CastStatistics {
        &self.statistics
    }

    /// The operations that the device computes in another precision than the table says.
    pub(crate) fn exceptions(&self) -> &Exceptions {
        self.overflow_fallback.exceptions()
    }

    /// What makes exceptions of operations that overflow f16.
    pub(crate) fn overflow_fallback(&self) -> &Arc<OverflowFallback> {
        &self.overflow_fallback
    }

    /// The calls to be compared with a reference at the end of the pass.
    pub(crate) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Begins a backward pass, which consumes the nodes of its tape.
    pub(crate) fn begin_pass(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// The backward passes so far, of all threads: a tensor may be used before and after one. Of this device alone, so
    /// that the results of a replica do not depend on when the others' passes begin.
    pub(crate) fn passes(&self) -> u64 {
        self.passes.load(Ordering::Relaxed)
    }

    /// Logs, once, that a program read a loss that is not finite. Where each step is checked, the check
    /// reports such a loss.
    pub(crate) fn report_lost<B: Backend>(&self, device: &B::Device, loss: f64) {
        if !self.in_force::<B>(device).checked && !self.lost.swap(true, Ordering::Relaxed) {
            log::warn!(
                "burn-amp: the program read {loss} on {}, a number with a gradient, such as a loss. In bf16 and FP32 \
                 such a step changes the parameters, unless AmpConfig::with_finite_check(true) skips it, as f16 does. \
                 AmpConfig::with_anomaly_detection(true) names the first operation whose result is not finite; the \
                 guide's page on troubleshooting has more",
                name::<B>(device)
            );
        }
    }

    /// Marks half precision as in use in this process, if the settings use it, and the scaler as idle, if
    /// they need no loss scale.
    fn announce(&self, settings: &Settings) {
        let brief = match settings.precision.is_half() {
            _ if settings.watched => Brief::Other,
            true => Brief::Half,
            false => Brief::Fp32,
        };
        self.brief.store(brief as u8, Ordering::Relaxed);
        // The check and anomaly detection follow tensors, as half does.
        if settings.precision.is_half() || settings.checked || settings.watched {
            want_half();
        }
        self.overflow_fallback
            .set(settings.falls_back, !settings.compiles);
        self.scaler
            .shared
            .set_unscaled(!settings.precision.scales_loss());
    }
}
