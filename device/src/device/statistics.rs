//! Counts the costs of mixed precision on a device: casts, and the half copies that clones share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use burn_amp_core::Casts;
use burn_amp_core::policy::is_half;
use burn_backend::DType;
use serde::{Deserialize, Serialize};

/// The casts that the policy made for one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OpCasts {
    /// Casts to f16 or bf16.
    pub to_half: Casts,
    /// Casts to FP32 or wider.
    pub from_half: Casts,
    /// Casts to half that a shared copy made unnecessary.
    pub spared: Casts,
}

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct CastStatistics {
    by_op: Mutex<BTreeMap<&'static str, OpCasts>>,
    pub(crate) copies: CopyBytes,
}

impl CastStatistics {
    /// Counts a cast of `elements` elements for the operation `op`.
    pub(crate) fn cast(&self, op: &'static str, elements: usize, from: DType, to: DType) {
        self.count(op, elements, from, to, |casts| {
            if is_half(to) {
                &mut casts.to_half
            } else {
                &mut casts.from_half
            }
        });
    }

    /// Counts a cast that a shared copy made unnecessary.
    pub(crate) fn spared(&self, op: &'static str, elements: usize, from: DType, to: DType) {
        self.count(op, elements, from, to, |casts| &mut casts.spared);
    }

    fn count(
        &self,
        op: &'static str,
        elements: usize,
        from: DType,
        to: DType,
        counter: impl FnOnce(&mut OpCasts) -> &mut Casts,
    ) {
        let bytes = (elements * (from.size() + to.size())) as u64;
        // A panic of another thread leaves the counts valid.
        let mut by_op = self.by_op.lock().unwrap_or_else(PoisonError::into_inner);
        *counter(by_op.entry(op).or_default()) += Casts { count: 1, bytes };
    }

    /// The casts by operation.
    pub(crate) fn by_op(&self) -> BTreeMap<&'static str, OpCasts> {
        let by_op = self.by_op.lock().unwrap_or_else(PoisonError::into_inner);
        by_op.clone()
    }

    /// Resets the casts. Copies that still exist stay counted.
    pub(crate) fn reset(&self) {
        let mut by_op = self.by_op.lock().unwrap_or_else(PoisonError::into_inner);
        by_op.clear();
        self.copies.most.store(self.copies.now(), Ordering::Relaxed);
    }
}

/// Bytes that the shared half copies of a device use.
#[derive(Debug, Default)]
pub(crate) struct CopyBytes {
    now: AtomicU64,
    most: AtomicU64,
}

impl CopyBytes {
    pub(crate) fn add(&self, bytes: u64) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, bytes: u64) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// The most bytes at a time.
    pub(crate) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_are_counted_by_operation_and_direction() {
        let statistics = CastStatistics::default();
        statistics.cast("linear", 10, DType::F32, DType::F16);
        statistics.cast("linear", 10, DType::F32, DType::F16);
        statistics.cast("float_exp", 4, DType::BF16, DType::F32);
        statistics.spared("linear", 1, DType::F32, DType::BF16);
        let by_op = statistics.by_op();
        let casts = |count, bytes| Casts { count, bytes };
        assert_eq!(by_op["linear"].to_half, casts(2, 120));
        assert_eq!(by_op["linear"].spared, casts(1, 6));
        assert_eq!(by_op["float_exp"].from_half, casts(1, 24));
        assert_eq!(by_op["float_exp"].to_half, Casts::default());
        statistics.reset();
        assert!(statistics.by_op().is_empty());
    }

    #[test]
    fn the_most_bytes_of_copies_are_remembered() {
        let copies = CopyBytes::default();
        copies.add(10);
        copies.add(5);
        copies.remove(10);
        copies.add(1);
        assert_eq!((copies.now(), copies.most()), (6, 15));
    }
}
