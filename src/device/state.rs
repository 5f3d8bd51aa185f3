//! The state of a device.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use burn_amp_core::policy::trials::TrialResults;
use burn_backend::{Backend, DType};
use parking_lot::Mutex;

use super::auto::Auto;
use super::capabilities::Capabilities;
use super::{AmpConfig, CastStatistics, DeviceKey, InForce, key};
use crate::GradScaler;
use crate::precision::{in_kernel, want_half};

/// The state of a device, for all threads and for the life of the process. Backends that share the
/// device share its state.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    capabilities: OnceLock<Capabilities>,
    /// Unset until the device is first asked for its precision, unless that is configured.
    auto: OnceLock<Auto>,
    /// Replaced as a whole. Absent until the device is configured or first computes.
    in_force: ArcSwapOption<InForce>,
    scaler: GradScaler,
    statistics: CastStatistics,
    /// In f16 and bf16.
    trials: [TrialResults; 2],
}

/// The states of all devices, by device id. Process-wide, because a device outlives every tensor on
/// it and any thread may name it.
static STATES: Mutex<BTreeMap<DeviceKey, &'static DeviceState>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The entries of [`STATES`] that this thread has used: an operation finds its device's state
    /// without a lock, an allocation or a hash.
    static SEEN: RefCell<Vec<(DeviceKey, &'static DeviceState)>> = const { RefCell::new(Vec::new()) };
}

impl DeviceState {
    /// The state of a device. The lookup walks the short list of devices that this thread has used.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        let key = key::<B>(device);
        let seen = SEEN.with_borrow(|seen| seen.iter().find(|(k, _)| *k == key).map(|(_, s)| *s));
        seen.unwrap_or_else(|| {
            let mut states = STATES.lock();
            let state = *states
                .entry(key)
                .or_insert_with(|| Box::leak(Box::default()));
            SEEN.with_borrow_mut(|seen| seen.push((key, state)));
            state
        })
    }

    pub(crate) fn capabilities<B: Backend>(&self, device: &B::Device) -> &Capabilities {
        self.capabilities
            .get_or_init(|| Capabilities::of::<B>(device))
    }

    /// What `Auto` selects on the device. May run a trial.
    pub(crate) fn auto<B: Backend>(&self, device: &B::Device) -> &Auto {
        // No lock is held while a trial runs: a thread that waits for a kernel may come here again.
        if self.auto.get().is_none() {
            let auto = in_kernel(|| Auto::of::<B>(device));
            self.auto.set(auto).ok();
        }
        self.auto.get().expect("set here, or by another thread")
    }

    /// The configuration in force; that of `Auto` if the device was not configured.
    #[inline]
    pub(crate) fn in_force<B: Backend>(&self, device: &B::Device) -> InForce {
        match &*self.in_force.load() {
            Some(in_force) => **in_force,
            None => self.in_auto::<B>(device),
        }
    }

    #[cold]
    fn in_auto<B: Backend>(&self, device: &B::Device) -> InForce {
        let selected = self.auto::<B>(device);
        let auto = Arc::new(AmpConfig::new().in_force(selected.precision));
        let none: Option<Arc<InForce>> = None;
        let before = self.in_force.compare_and_swap(&none, Some(auto.clone()));
        match &*before {
            // Another thread was first.
            Some(in_force) => **in_force,
            None => {
                announce(&auto);
                selected.log::<B>(device);
                *auto
            }
        }
    }

    pub(super) fn put_in_force(&self, in_force: InForce) {
        announce(&in_force);
        self.in_force.store(Some(in_force.into()));
    }

    pub(crate) fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    pub(crate) fn statistics(&self) -> &CastStatistics {
        &self.statistics
    }

    /// What the trials in `half` have shown so far.
    pub(crate) fn trials(&self, half: DType) -> &TrialResults {
        &self.trials[usize::from(half == DType::BF16)]
    }
}

/// Tells the process if half precision is now in use.
fn announce(in_force: &InForce) {
    if in_force.precision.is_half() {
        want_half();
    }
}
