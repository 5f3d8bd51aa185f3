//! The precision of a session, where it is not its device's: the sessions of one process may
//! compute on one device in several precisions.

use std::cell::Cell;
use std::fmt::Debug;

use burn_amp_core::Precision;

thread_local! {
    static PRECISION: Cell<Option<Precision>> = const { Cell::new(None) };
}

/// Which precision the operations of an [`Amp`](crate::Amp) are in. Of this crate alone.
pub trait Session: Copy + Default + Debug + Send + Sync + 'static {
    /// The precision of the operations; `None` where it is not the session's own.
    const PRECISION: Option<Precision>;
}

/// Operations are in the precision of the operation around them or, without one, of their device.
#[derive(Debug, Clone, Copy, Default)]
pub struct OfDevice;

impl Session for OfDevice {
    const PRECISION: Option<Precision> = None;
}

/// Operations are in this precision.
macro_rules! sessions {
    ($($name:ident)*) => {$(
        #[derive(Debug, Clone, Copy, Default)]
        pub(crate) struct $name;

        impl Session for $name {
            const PRECISION: Option<Precision> = Some(Precision::$name);
        }
    )*};
}

sessions! { F16 Bf16 }

/// The precision of an operation is in force on this thread until this is dropped.
pub(crate) struct Entered {
    before: Option<Precision>,
}

/// Puts the precision of `P` in force on this thread, if it has one.
pub(crate) fn enter<P: Session>() -> Option<Entered> {
    P::PRECISION.map(|precision| Entered {
        before: PRECISION.replace(Some(precision)),
    })
}

impl Drop for Entered {
    fn drop(&mut self) {
        PRECISION.set(self.before);
    }
}

pub(super) fn precision() -> Option<Precision> {
    PRECISION.get()
}
