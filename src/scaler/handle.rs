//! The handle on a loss scaler: a device's own, or one in force for a region.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_backend::{Backend, DeviceId, DeviceOps};

use super::{LossScaleConfig, LossScaler, Outcome, Transition};
use crate::AmpError;

/// A handle on a loss scaler, cheap to clone; the clones share one state.
///
/// Each device has a scaler of its own, which every `backward()` there uses. Several models that
/// train side by side get one each with [`scope`](GradScaler::scope).
#[derive(Debug, Clone, Default)]
pub struct GradScaler {
    state: Arc<Mutex<LossScaler>>,
}

type DeviceKey = (TypeId, DeviceId);

static OF_DEVICES: LazyLock<Mutex<HashMap<DeviceKey, GradScaler>>> = LazyLock::new(Mutex::default);

thread_local! {
    static IN_SCOPE: RefCell<Vec<GradScaler>> = const { RefCell::new(Vec::new()) };
}

impl GradScaler {
    /// A scaler of its own, for [`scope`](GradScaler::scope).
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range.
    pub fn new(config: LossScaleConfig) -> Result<Self, AmpError> {
        let state = Arc::new(Mutex::new(LossScaler::new(config)?));
        Ok(Self { state })
    }

    /// The scaler of a device, with the default configuration until it is configured. Backends
    /// that share a device type (`Cuda`, `Amp<Cuda>`, `AmpAutodiff<Cuda>`) share the scaler.
    pub fn of<B: Backend>(device: &B::Device) -> Self {
        let key = (TypeId::of::<B::Device>(), device.id());
        lock(&OF_DEVICES).entry(key).or_default().clone()
    }

    /// Runs `f` with this scaler in force for every `backward()` on this thread.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                IN_SCOPE.with_borrow_mut(|scalers| scalers.pop());
            }
        }
        IN_SCOPE.with_borrow_mut(|scalers| scalers.push(self.clone()));
        let _leave = Leave;
        f()
    }

    /// A copy of the state as it is now.
    pub fn state(&self) -> LossScaler {
        *lock(&self.state)
    }

    /// What the next loss is multiplied with.
    pub fn loss_scale(&self) -> f32 {
        self.state().scale()
    }

    /// Steps that were skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.state().skipped_steps()
    }

    /// Starts again from a configuration, with every count at zero.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range; the scaler is then as it
    /// was.
    pub fn configure(&self, config: LossScaleConfig) -> Result<(), AmpError> {
        let fresh = LossScaler::new(config)?;
        *lock(&self.state) = fresh;
        Ok(())
    }

    /// Takes the outcome of one step.
    pub(crate) fn update(&self, outcome: Outcome) -> Transition {
        lock(&self.state).update(outcome)
    }
}

/// The scaler in force on this thread: the innermost scope's, else the device's.
pub(crate) fn current<B: Backend>(device: &B::Device) -> GradScaler {
    IN_SCOPE
        .with_borrow(|scalers| scalers.last().cloned())
        .unwrap_or_else(|| GradScaler::of::<B>(device))
}

/// A poisoned lock is taken as it is: every state behind these locks is replaced whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
