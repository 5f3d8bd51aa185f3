//! What automatic mixed precision adds to a device's work, counted: casts and read-backs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use burn_backend::{Backend, DType};
use serde::{Deserialize, Serialize};

use crate::device::{self, DeviceKey};
use crate::tensor::is_half;

/// Casts of float tensors from one dtype to another. Its text has the bytes in powers of 1,024:
/// `8 (1.5 KiB)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Casts {
    /// How many.
    pub count: u64,
    /// Bytes read and written by them: of each element those of the one dtype and of the other.
    pub bytes: u64,
}

/// The counts of a device, kept as long as the process.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    to_half: Counter,
    from_half: Counter,
    read_backs: AtomicU64,
}

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    bytes: AtomicU64,
}

static OF_DEVICES: LazyLock<Mutex<HashMap<DeviceKey, &'static Traffic>>> =
    LazyLock::new(Mutex::default);

impl Traffic {
    /// That of a device: one for the backends that share its type.
    pub(crate) fn of<B: Backend>(device: &B::Device) -> &'static Self {
        OF_DEVICES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(device::key::<B>(device))
            .or_insert_with(|| Box::leak(Box::default()))
    }

    /// Counts a cast of that many elements.
    pub(crate) fn cast(&self, elements: usize, from: DType, to: DType) {
        let counter = match is_half(to) {
            true => &self.to_half,
            false => &self.from_half,
        };
        counter.count.fetch_add(1, Ordering::Relaxed);
        let bytes = elements * (from.size() + to.size());
        counter.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts one time that the host waited for the device.
    pub(crate) fn read_back(&self) {
        self.read_backs.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts from zero.
    pub(crate) fn reset(&self) {
        for counter in [&self.to_half, &self.from_half] {
            counter.count.store(0, Ordering::Relaxed);
            counter.bytes.store(0, Ordering::Relaxed);
        }
        self.read_backs.store(0, Ordering::Relaxed);
    }

    pub(crate) fn casts_to_half(&self) -> Casts {
        self.to_half.casts()
    }

    pub(crate) fn casts_from_half(&self) -> Casts {
        self.from_half.casts()
    }

    pub(crate) fn read_backs(&self) -> u64 {
        self.read_backs.load(Ordering::Relaxed)
    }
}

impl Counter {
    fn casts(&self) -> Casts {
        Casts {
            count: self.count.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}
