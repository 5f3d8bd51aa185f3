//! The precision of a session, where it is not its device's: the sessions of one process may
//! compute on one device in several precisions.

use std::cell::Cell;

use burn_amp_core::Precision;

thread_local! {
    static PRECISION: Cell<Option<Precision>> = const { Cell::new(None) };
}

/// Sets the precision of the session that this thread runs, to its end. A server runs each session
/// on a thread of its own.
pub(crate) fn set_precision(precision: Precision) {
    PRECISION.set(Some(precision));
}

pub(super) fn precision() -> Option<Precision> {
    PRECISION.get()
}
