//! Counts the casts of mixed precision on a device.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
}

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct CastStatistics {
    by_op: Mutex<BTreeMap<&'static str, OpCasts>>,
}

impl CastStatistics {
    /// Counts a cast of `elements` elements for the operation `op`.
    pub(crate) fn cast(&self, op: &'static str, elements: usize, from: DType, to: DType) {
        let bytes = (elements * (from.size() + to.size())) as u64;
        let cast = Casts { count: 1, bytes };
        let mut by_op = self.locked();
        let casts = by_op.entry(op).or_default();
        match is_half(to) {
            true => casts.to_half += cast,
            false => casts.from_half += cast,
        }
    }

    /// The casts by operation.
    pub(crate) fn by_op(&self) -> BTreeMap<&'static str, OpCasts> {
        self.locked().clone()
    }

    pub(crate) fn reset(&self) {
        self.locked().clear();
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<&'static str, OpCasts>> {
        // A panic of another thread leaves the counts valid.
        self.by_op.lock().unwrap_or_else(PoisonError::into_inner)
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
        let by_op = statistics.by_op();
        let casts = |count, bytes| Casts { count, bytes };
        assert_eq!(by_op["linear"].to_half, casts(2, 120));
        assert_eq!(by_op["float_exp"].from_half, casts(1, 24));
        assert_eq!(by_op["float_exp"].to_half, Casts::default());
        statistics.reset();
        assert!(statistics.by_op().is_empty());
    }
}
