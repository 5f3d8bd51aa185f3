//! The state of a device.

use std::any::TypeId;
use std::sync::{OnceLock, PoisonError, RwLock};

use burn_amp_core::policy::trials::TriedOp;
use burn_amp_core::policy::{HalfSupport, Mode, Support};
use burn_amp_core::{AmpError, Capabilities, Chosen, Exceptions, Precision, Registry};
use burn_backend::{Backend, DType, DTypeUsage, DeviceId, DeviceOps};

use super::session;
use super::{Anomalies, CastStatistics, name, trial};

/// A backend and one of its devices.
type DeviceKey = (TypeId, DeviceId);

/// The states of all devices. Process-wide, because a device outlives every tensor on it, and any thread may
/// use it.
static STATES: Registry<DeviceKey, DeviceState> = Registry::new();

/// The state of a device, for all threads and for the life of the process.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    capabilities: OnceLock<Capabilities>,
    auto: OnceLock<Chosen>,
    /// Absent until the device is configured or first computes.
    in_force: RwLock<Option<Chosen>>,
    exceptions: Exceptions,
    statistics: CastStatistics,
    anomalies: Anomalies,
}

impl DeviceState {
    /// The state of a device of `B`. Takes no lock, since each operation looks its device up.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        STATES.get_or_add((TypeId::of::<B>(), device.id()), Self::default)
    }

    fn capabilities<B: Backend>(&self, device: &B::Device) -> Capabilities {
        let reported = || burn_amp_core::capabilities!(B, device);
        *self.capabilities.get_or_init(reported)
    }

    pub(crate) fn support<B: Backend>(&self, device: &B::Device) -> Support {
        self.capabilities::<B>(device).support()
    }

    /// Gives a device other capabilities than its backend reports. Call it before the device is used.
    #[cfg(test)]
    pub(crate) fn pretend(&self, support: Support) {
        use burn_amp_core::DTypeUses;

        let uses = |support| DTypeUses {
            storage: support != HalfSupport::None,
            arithmetic: support == HalfSupport::Arithmetic,
            accelerated: support == HalfSupport::Contractions,
        };
        let pretended = Capabilities {
            f16: uses(support.f16),
            bf16: uses(support.bf16),
        };
        assert_eq!(*self.capabilities.get_or_init(|| pretended), pretended);
    }

    /// The choice of `Auto` on the device.
    fn auto<B: Backend>(&self, device: &B::Device) -> Chosen {
        let select = || self.capabilities::<B>(device).auto_without_f16();
        Chosen::auto(&self.auto, select, || name::<B>(device))
    }

    /// The precision in force; the choice of `Auto` if the device was not configured.
    pub(crate) fn in_force<B: Backend>(&self, device: &B::Device) -> Chosen {
        let in_force = *self.in_force.read().unwrap_or_else(PoisonError::into_inner);
        in_force.unwrap_or_else(|| self.auto::<B>(device))
    }

    /// The choice for `precision` on this device. Does not change the precision in force.
    pub(crate) fn chosen<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Result<Chosen, AmpError> {
        if precision == Precision::Auto {
            return Ok(self.auto::<B>(device));
        }
        let capabilities = self.capabilities::<B>(device);
        Ok(Chosen {
            precision: capabilities.check(precision, || name::<B>(device), || "")?,
            why: "asked for",
        })
    }

    pub(crate) fn configure<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Result<Chosen, AmpError> {
        let chosen = self.chosen::<B>(device, precision)?;
        self.statistics.reset();
        *self
            .in_force
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(chosen);
        Ok(chosen)
    }

    /// How the policy applies on this thread, in a region of this precision or in none. In FP32 a region
    /// changes nothing: a device of this process in FP32 has no policy at all.
    pub(crate) fn mode<B: Backend>(
        &self,
        device: &B::Device,
        region: Option<Precision>,
    ) -> Mode<DType> {
        let own = session::in_force();
        let own = own.unwrap_or_else(|| self.in_force::<B>(device).precision);
        let precision = region.filter(|_| own != Precision::F32).unwrap_or(own);
        match precision.compute_dtype() {
            // A region's dtype was not checked before.
            Some(half)
                if region.is_some() && self.support::<B>(device).of(half) == HalfSupport::None =>
            {
                Mode::Off
            }
            Some(half) => Mode::On(half),
            None => Mode::Off,
        }
    }

    /// Tries an operation in `half`. Returns whether the device is exact in it.
    pub(crate) fn tried<B: Backend>(
        &self,
        device: &B::Device,
        half: DType,
        op: TriedOp,
    ) -> Option<bool> {
        self.exceptions.tried(op, half, || {
            let support = self.support::<B>(device).of(half);
            trial::tried::<B>(device, half, support, op)
        })
    }

    /// The operations that the device computes in another precision than the table says.
    pub(crate) fn exceptions(&self) -> &Exceptions {
        &self.exceptions
    }

    pub(crate) fn anomalies(&self) -> &Anomalies {
        &self.anomalies
    }

    pub(crate) fn statistics(&self) -> &CastStatistics {
        &self.statistics
    }
}

#[cfg(test)]
mod tests {
    use burn_dispatch::{backends::Flex, devices::FlexDevice};

    use super::*;
    use crate::{Amp, AmpReport, configure};

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
        assert_eq!(
            AmpReport::of::<Alone>(&FlexDevice).precision,
            Precision::F32
        );
    }
}
