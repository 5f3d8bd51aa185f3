//! Counts the work that automatic mixed precision adds to a device, casts and read-backs, and the contractions that stay
//! FP32 although half is in force.

use std::sync::atomic::{AtomicU64, Ordering};

use burn_amp_core::Casts;
use burn_backend::DType;

use crate::policy::is_half;

/// The counters of a device, kept for the life of the process.
#[derive(Debug, Default)]
pub(crate) struct CastStatistics {
    /// Casts to f16 or bf16.
    pub to_half: Counter,
    /// Casts to FP32 or wider.
    pub from_half: Counter,
    read_backs: AtomicU64,
    contractions_of_data: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Counter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl CastStatistics {
    /// Counts a cast of `elements` elements.
    pub(crate) fn cast(&self, elements: usize, from: DType, to: DType) {
        let counter = if is_half(to) {
            &self.to_half
        } else {
            &self.from_half
        };
        counter.count.fetch_add(1, Ordering::Relaxed);
        let bytes = elements * (from.size() + to.size());
        counter.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts one read-back: the host waited for the device.
    pub(crate) fn read_back(&self) {
        self.read_backs.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a contraction of data, which stays FP32. Returns how many there are now.
    pub(crate) fn contraction_of_data(&self) -> u64 {
        1 + self.contractions_of_data.fetch_add(1, Ordering::Relaxed)
    }

    /// Resets all counters to zero.
    pub(crate) fn reset(&self) {
        for counter in [&self.to_half, &self.from_half] {
            counter.count.store(0, Ordering::Relaxed);
            counter.bytes.store(0, Ordering::Relaxed);
        }
        self.read_backs.store(0, Ordering::Relaxed);
        self.contractions_of_data.store(0, Ordering::Relaxed);
    }

    pub(crate) fn read_backs(&self) -> u64 {
        self.read_backs.load(Ordering::Relaxed)
    }

    pub(crate) fn contractions_of_data(&self) -> u64 {
        self.contractions_of_data.load(Ordering::Relaxed)
    }
}

impl Counter {
    pub(crate) fn casts(&self) -> Casts {
        Casts {
            count: self.count.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}
