//! The state of a device.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use burn_amp_core::policy::trials::{TrialResults, TriedOp};
use burn_amp_core::policy::{Mode, Support};
use burn_amp_core::{AmpError, Precision};
use burn_backend::{Backend, DType, DeviceId, DeviceOps};

use super::{CastStatistics, auto, capabilities, name, session, trial};

/// A backend and one of its devices.
type DeviceKey = (TypeId, DeviceId);

/// The states of all devices. Process-wide, because a device outlives every tensor on it and any
/// thread may name it.
static STATES: Mutex<BTreeMap<DeviceKey, &'static DeviceState>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The entries of [`STATES`] that this thread has used: a session's thread runs every operation
    /// on the same device, and needs no lock to find its state.
    static SEEN: RefCell<Vec<(DeviceKey, &'static DeviceState)>> = const { RefCell::new(Vec::new()) };
}

/// The precision that a device computes in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InForce {
    /// Never `Auto`.
    pub precision: Precision,
    /// Why this precision.
    pub why: &'static str,
}

/// The state of a device, for all threads and for the life of the process.
#[derive(Debug)]
pub(crate) struct DeviceState {
    support: OnceLock<Support>,
    /// Absent until the device is configured or first computes.
    in_force: RwLock<Option<InForce>>,
    /// In f16 and bf16.
    trials: [TrialResults; 2],
    shares_copies: AtomicBool,
    statistics: CastStatistics,
}

impl DeviceState {
    fn new() -> Self {
        Self {
            support: OnceLock::new(),
            in_force: RwLock::new(None),
            trials: Default::default(),
            shares_copies: AtomicBool::new(false),
            statistics: CastStatistics::default(),
        }
    }

    /// The state of a device of `B`.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        let key = (TypeId::of::<B>(), device.id());
        let seen = SEEN.with_borrow(|seen| seen.iter().find(|(k, _)| *k == key).map(|(_, s)| *s));
        seen.unwrap_or_else(|| {
            let mut states = STATES.lock().unwrap_or_else(PoisonError::into_inner);
            let state = *states
                .entry(key)
                .or_insert_with(|| Box::leak(Box::new(Self::new())));
            SEEN.with_borrow_mut(|seen| seen.push((key, state)));
            state
        })
    }

    pub(crate) fn support<B: Backend>(&self, device: &B::Device) -> Support {
        *self
            .support
            .get_or_init(|| capabilities::support::<B>(device))
    }

    /// Gives a device other capabilities than its backend reports, before it is used.
    #[cfg(test)]
    pub(crate) fn pretend(&self, support: Support) {
        assert_eq!(*self.support.get_or_init(|| support), support);
    }

    /// The precision in force; what `Auto` selects if the device was not configured.
    pub(crate) fn in_force<B: Backend>(&self, device: &B::Device) -> InForce {
        let in_force = *self.in_force.read().unwrap_or_else(PoisonError::into_inner);
        in_force.unwrap_or_else(|| {
            // Another thread that is first selects the same.
            let selected = selected::<B>(device);
            let mut in_force = self
                .in_force
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            *in_force.get_or_insert(selected)
        })
    }

    /// What `precision` is on this device. Puts nothing in force.
    pub(crate) fn chosen<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Result<InForce, AmpError> {
        Ok(match precision {
            Precision::Auto => selected::<B>(device),
            precision => InForce {
                precision: capabilities::check::<B>(self.support::<B>(device), precision, device)?,
                why: "asked for",
            },
        })
    }

    pub(crate) fn configure<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Result<InForce, AmpError> {
        let chosen = self.chosen::<B>(device, precision)?;
        self.statistics.reset();
        *self
            .in_force
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(chosen);
        Ok(chosen)
    }

    /// How the policy applies on this thread.
    pub(crate) fn mode<B: Backend>(&self, device: &B::Device) -> Mode<DType> {
        let precision = session::precision();
        let precision = precision.unwrap_or_else(|| self.in_force::<B>(device).precision);
        match precision.compute_dtype() {
            Some(half) => Mode::On(half),
            None => Mode::Off,
        }
    }

    /// Whether the device computes an operation exactly in `half`. Tries it the first time.
    pub(crate) fn is_exact<B: Backend>(
        &self,
        device: &B::Device,
        half: DType,
        op: TriedOp,
    ) -> bool {
        self.trials(half).is_exact(op, || {
            trial::is_exact::<B>(device, half, self.support::<B>(device), op)
        })
    }

    /// What the trials in `half` have shown so far.
    pub(crate) fn trials(&self, half: DType) -> &TrialResults {
        &self.trials[usize::from(half == DType::BF16)]
    }

    pub(super) fn share_copies(&self, share: bool) {
        self.shares_copies.store(share, Ordering::Relaxed);
    }

    /// Whether clones share half copies.
    pub(crate) fn shares_copies(&self) -> bool {
        self.shares_copies.load(Ordering::Relaxed)
    }

    pub(crate) fn statistics(&self) -> &CastStatistics {
        &self.statistics
    }
}

/// What `Auto` selects on the device.
fn selected<B: Backend>(device: &B::Device) -> InForce {
    let (precision, why) = auto::select::<B>(device);
    log::info!(
        "burn-amp: auto on {} is {precision}: {why}",
        name::<B>(device)
    );
    InForce { precision, why }
}

#[cfg(test)]
mod tests {
    use burn_amp_core::policy::HalfSupport;
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::{Amp, configure, precision_of};

    #[test]
    fn a_precision_that_the_device_lacks_leaves_it_unchanged() {
        /// Its state is not that of Flex.
        type Alone = Amp<Amp<Flex>>;

        DeviceState::of::<Alone>(&FlexDevice).pretend(Support {
            f16: HalfSupport::None,
            bf16: HalfSupport::None,
        });
        let configured = |precision| configure::<Alone>(&FlexDevice, precision);
        assert_eq!(configured(Precision::F32), Ok(Precision::F32));
        for half in [Precision::F16, Precision::Bf16] {
            match configured(half) {
                Err(AmpError::UnsupportedPrecision {
                    precision,
                    possible,
                    ..
                }) => assert_eq!((precision, possible.as_str()), (half, "f32")),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(precision_of::<Alone>(&FlexDevice), Precision::F32);
    }
}
