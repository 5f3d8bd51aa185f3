//! The state of a device.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;
use burn_backend::{Backend, DType};

use super::capabilities::{self, Capabilities};
use super::{CastStatistics, DeviceKey, InForce, OpSet, key, trial};
use crate::GradScaler;
use crate::precision::want_half;

/// The state of a device, for all threads and for the life of the process. Backends that share the
/// device share its state.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    capabilities: OnceLock<Capabilities>,
    /// Replaced as a whole. Absent until the device is configured or first computes.
    in_force: ArcSwapOption<InForce>,
    scaler: GradScaler,
    statistics: CastStatistics,
    /// Results of the trials in f16 and bf16: inexact operations. Unset until the trial has run.
    inexact: [OnceLock<OpSet>; 2],
}

/// The states of all devices, by device id. Process-wide, because a device outlives every tensor on
/// it and any thread may name it.
static STATES: LazyLock<Mutex<HashMap<DeviceKey, &'static DeviceState>>> =
    LazyLock::new(Mutex::default);

thread_local! {
    /// The entries of [`STATES`] that this thread has used: an operation finds its device's state
    /// without a lock, an allocation or a hash.
    static SEEN: RefCell<Vec<(DeviceKey, &'static DeviceState)>> = const { RefCell::new(Vec::new()) };
}

impl DeviceState {
    /// The state of a device. The lookup walks the short list of devices that this thread has used.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        let key = key::<B>(device);
        let seen = |seen: &Vec<(DeviceKey, &'static Self)>| {
            seen.iter()
                .find(|(k, _)| *k == key)
                .map(|(_, state)| *state)
        };
        SEEN.with_borrow(seen).unwrap_or_else(|| {
            let mut states = STATES.lock().unwrap_or_else(PoisonError::into_inner);
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
        let capabilities = self.capabilities::<B>(device);
        let auto = Arc::new(InForce::auto(capabilities.auto));
        let none: Option<Arc<InForce>> = None;
        let before = self.in_force.compare_and_swap(&none, Some(auto.clone()));
        match &*before {
            // Another thread was first.
            Some(in_force) => **in_force,
            None => {
                announce(&auto);
                capabilities::log_auto::<B>(capabilities, device);
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

    /// The operations in which the device is not exact. Runs the trial if it has not run;
    /// concurrent threads wait for one trial. `B` must be a backend that computes.
    pub(super) fn inexact<B: Backend>(
        &self,
        in_force: &InForce,
        device: &B::Device,
        half: DType,
    ) -> OpSet {
        let run = || trial::of::<B>(device, half);
        self.if_tried(in_force, half, |trial| Some(trial.get_or_init(run)))
    }

    /// The result of the trial so far; empty until the trial has run.
    pub(crate) fn found_inexact<B: Backend>(&self, device: &B::Device, half: DType) -> OpSet {
        self.if_tried(&self.in_force::<B>(device), half, OnceLock::get)
    }

    /// The result of a trial; empty if the configuration does not try the device.
    fn if_tried<'a>(
        &'a self,
        in_force: &InForce,
        half: DType,
        result: impl FnOnce(&'a OnceLock<OpSet>) -> Option<&'a OpSet>,
    ) -> OpSet {
        let found = in_force.tried.then(|| result(self.trial(half)));
        found.flatten().copied().unwrap_or(OpSet::NONE)
    }

    /// Whether the device's trial in `half` has not run yet.
    pub(super) fn is_untried(&self, half: DType) -> bool {
        self.trial(half).get().is_none()
    }

    fn trial(&self, half: DType) -> &OnceLock<OpSet> {
        &self.inexact[usize::from(half == DType::BF16)]
    }
}

/// Tells the process if half precision is now in use.
fn announce(in_force: &InForce) {
    if in_force.precision.compute_dtype().is_some() {
        want_half();
    }
}
