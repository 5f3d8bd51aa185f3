//! The warning that a device computes a backward pass in f16 and no loss was scaled. A device only receives
//! operations. It recognizes a backward pass by an operation that only a backward pass has, such as the
//! gradient of an activation, a convolution, a pool or an embedding. A model of only products has no such
//! operation.

use std::sync::atomic::{AtomicU8, Ordering};

/// Process-wide: the device has no access to losses, and the client that scales a loss has no access to the
/// device.
pub(crate) static UNSCALED: Unscaled = Unscaled::new();

/// Whether a backward pass in f16 should cause the warning. Warns at most once.
#[derive(Debug)]
pub(crate) struct Unscaled(AtomicU8);

/// No device of this process computes in f16, so a backward pass in f16 belongs to another process.
const ABSENT: u8 = 0;
/// A device of this process computes in f16, and no loss was scaled yet.
const WATCHED: u8 = 1;
/// A loss was scaled, or the warning was given.
const SETTLED: u8 = 2;

impl Unscaled {
    const fn new() -> Self {
        Self(AtomicU8::new(ABSENT))
    }

    /// A device of this process computes in f16.
    pub(crate) fn watch(&self) {
        let _ = self.from(ABSENT, WATCHED);
    }

    /// A loss was scaled.
    pub(crate) fn scaled(&self) {
        self.0.store(SETTLED, Ordering::Relaxed);
    }

    /// Whether a backward pass in f16 would cause the warning.
    pub(crate) fn is_watched(&self) -> bool {
        self.0.load(Ordering::Relaxed) == WATCHED
    }

    /// A backward pass computes in f16.
    pub(crate) fn backward_in_f16(&self) {
        if self.from(WATCHED, SETTLED) {
            log::warn!(
                "burn-amp-device: a device trains in f16 and no loss was scaled: small gradients \
                 become zero. Call GradScaler::of(&device), or train in bf16"
            );
        }
    }

    fn from(&self, expected: u8, next: u8) -> bool {
        let [success, failure] = [Ordering::Relaxed; 2];
        let exchanged = self.0.compare_exchange(expected, next, success, failure);
        exchanged.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_watches_from_the_first_device_in_f16_to_the_first_scaled_loss_or_warning() {
        let unscaled = Unscaled::new();
        unscaled.backward_in_f16();
        assert!(!unscaled.is_watched());
        unscaled.watch();
        assert!(unscaled.is_watched());
        unscaled.backward_in_f16();
        assert!(!unscaled.is_watched());
        unscaled.watch();
        assert!(!unscaled.is_watched());
    }

    #[test]
    fn a_program_that_scales_is_never_warned() {
        let unscaled = Unscaled::new();
        unscaled.scaled();
        unscaled.watch();
        assert!(!unscaled.is_watched());
    }
}
