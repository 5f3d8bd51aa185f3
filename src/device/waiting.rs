//! The calls of a device whose results are compared with a reference at the end of the pass.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// So many calls are compared in a pass.
const CALLS: usize = 16;

/// A call with its bytes, and the thread that made it.
type Held = (usize, ThreadId, Box<dyn Any + Send>);

/// The calls that wait for the end of the pass, of all threads: a tensor may outlive its thread.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    held: Mutex<Vec<Held>>,
    /// How many there are, for whoever only asks.
    count: AtomicUsize,
    is_off: AtomicBool,
}

impl Waiting {
    /// So many bytes of operands and results are held to the end of a pass.
    pub(crate) const BYTES: usize = 256 << 20;

    /// Adds a call that holds so many bytes, or drops it if there are enough.
    pub(crate) fn add<T: Send + 'static>(&self, bytes: usize, call: T) {
        let mut held = self.held();
        let before: usize = held.iter().map(|(bytes, ..)| bytes).sum();
        if held.len() < CALLS && before + bytes <= Self::BYTES {
            held.push((bytes, thread::current().id(), Box::new(call)));
            self.count.store(held.len(), Ordering::Relaxed);
        }
    }

    /// Takes the calls of this type: those of one thread, or of all.
    #[inline]
    pub(crate) fn take<T: Send + 'static>(&self, of: Option<ThreadId>) -> Vec<T> {
        match self.count.load(Ordering::Relaxed) {
            0 => Vec::new(),
            _ => self.take_some(of),
        }
    }

    #[cold]
    fn take_some<T: Send + 'static>(&self, of: Option<ThreadId>) -> Vec<T> {
        let mut held = self.held();
        let (mut taken, mut others) = (Vec::new(), Vec::new());
        for (bytes, thread, call) in held.drain(..) {
            let is_taken = of.is_none_or(|of| of == thread) && call.is::<T>();
            match call.downcast() {
                Ok(call) if is_taken => taken.push(*call),
                Ok(call) => others.push((bytes, thread, call as Box<dyn Any + Send>)),
                Err(call) => others.push((bytes, thread, call)),
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
