//! The calls of a device whose results are compared with a reference at the end of the pass.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// So many calls are compared in a pass.
const CALLS: usize = 16;
/// So many bytes of operands and results are held to the end of a pass, unless one call has more.
const BYTES: usize = 256 << 20;

/// A call with its bytes.
type Held = (usize, Box<dyn Any + Send>);

/// The calls that wait for the end of the pass, of all threads: a tensor may outlive its thread.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    held: Mutex<Vec<Held>>,
    /// How many there are, for whoever only asks.
    count: AtomicUsize,
    is_off: AtomicBool,
}

impl Waiting {
    /// Adds a call that holds so many bytes. False: there are enough.
    pub(crate) fn add<T: Send + 'static>(&self, bytes: usize, call: T) -> bool {
        let mut held = self.held();
        let before: usize = held.iter().map(|(bytes, _)| bytes).sum();
        let is_taken = held.is_empty() || held.len() < CALLS && before + bytes <= BYTES;
        if is_taken {
            held.push((bytes, Box::new(call)));
            self.count.store(held.len(), Ordering::Relaxed);
        }
        is_taken
    }

    /// Takes the calls of this type.
    #[inline]
    pub(crate) fn take<T: Send + 'static>(&self) -> Vec<T> {
        match self.count.load(Ordering::Relaxed) {
            0 => Vec::new(),
            _ => self.take_some(),
        }
    }

    #[cold]
    fn take_some<T: Send + 'static>(&self) -> Vec<T> {
        let mut held = self.held();
        let (mut taken, mut others) = (Vec::new(), Vec::new());
        for (bytes, call) in held.drain(..) {
            match call.downcast() {
                Ok(call) => taken.push(*call),
                Err(call) => others.push((bytes, call)),
            }
        }
        *held = others;
        self.count.store(held.len(), Ordering::Relaxed);
        taken
    }

    /// Whether nothing can be compared on the device.
    pub(crate) fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Relaxed)
    }

    /// Nothing is compared from now on. Returns whether that is new.
    pub(crate) fn turn_off(&self) -> bool {
        !self.is_off.swap(true, Ordering::Relaxed)
    }

    fn held(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
