//! What a step holds: live bytes above parameters and batch, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::backend::{AutodiffBackend, Backend};
use serde::Serialize;

use super::models::Bench;

/// Counts the bytes that are live, and the most that ever were.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// Safety: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// What a training step holds, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Held {
    /// When the loss is there and the backward pass has not begun.
    pub kept_bytes: usize,
    /// At the peak of the forward and backward pass.
    pub peak_bytes: usize,
}

/// Measures the second of two steps: what a first one sets up for good is not counted.
pub fn held<B: AutodiffBackend, M: Bench<B>>() -> Held {
    let device = B::Device::default();
    <B as Backend>::seed(&device, 1);
    let model = M::new(&device);
    let batch = M::batch(&device);
    drop(model.loss(batch.clone()).backward());

    // Parameters as an optimizer would leave them: of no forward pass yet.
    let model = model.fork(&device);
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let loss = model.loss(batch);
    let kept = LIVE.load(Ordering::Relaxed);
    let grads = loss.backward();
    let peak = PEAK.load(Ordering::Relaxed);
    drop(grads);
    Held {
        kept_bytes: kept.saturating_sub(before),
        peak_bytes: peak - before,
    }
}
