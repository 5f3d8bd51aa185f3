//! The precision of a session, if it differs from the device's: the sessions of one process may compute on
//! one device in several precisions.

use std::cell::Cell;
use std::fmt::Debug;

use burn_amp_core::Precision;

thread_local! {
    static IN_FORCE: Cell<Option<Precision>> = const { Cell::new(None) };
}

/// The precision of the operations of an [`Amp`](crate::Amp). Only for this crate.
pub trait Session: Copy + Default + Debug + Send + Sync + 'static {
    /// The precision of the operations; `None` if the session has no precision of its own.
    const IN_FORCE: Option<Precision>;
}

/// Operations are in the precision of the operation around them or, without one, of their device.
#[derive(Debug, Clone, Copy, Default)]
pub struct OfDevice;

impl Session for OfDevice {
    const IN_FORCE: Option<Precision> = None;
}

/// Operations are in this precision.
macro_rules! sessions {
    ($($name:ident)*) => {$(
        #[derive(Debug, Clone, Copy, Default)]
        pub(crate) struct $name;

        impl Session for $name {
            const IN_FORCE: Option<Precision> = Some(Precision::$name);
        }
    )*};
}

sessions! { F16 Bf16 }

/// The precision that an operation puts in force on this thread, until this guard is dropped.
pub(crate) struct Entered {
    before: Option<Precision>,
}

/// Puts the precision of `P` in force, if there is one.
pub(crate) fn enter<P: Session>() -> Option<Entered> {
    P::IN_FORCE.map(|in_force| Entered {
        before: IN_FORCE.replace(Some(in_force)),
    })
}

impl Drop for Entered {
    fn drop(&mut self) {
        IN_FORCE.set(self.before);
    }
}

pub(super) fn in_force() -> Option<Precision> {
    IN_FORCE.get()
}
