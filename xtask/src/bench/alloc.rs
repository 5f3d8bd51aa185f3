//! An allocator that counts: the bytes that are live, the most that ever were, and how many blocks
//! of each size.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counted.
pub struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Smaller blocks are counted only in bytes.
const BLOCK: usize = 4096;
/// The most sizes that are counted separately; further sizes share the last count.
const SIZES: usize = 4096;

/// The live blocks of one size, by open addressing: nothing here may allocate.
struct Size {
    bytes: AtomicUsize,
    live: AtomicIsize,
}

static BLOCKS: [Size; SIZES] = [const {
    Size {
        bytes: AtomicUsize::new(0),
        live: AtomicIsize::new(0),
    }
}; SIZES];

fn size(bytes: usize) -> &'static Size {
    let start = (bytes / 16).wrapping_mul(0x9e37_79b9) % SIZES;
    let (before, after) = BLOCKS.split_at(start);
    let mut slots = after.iter().chain(before);
    let taken = slots.find(|slot| {
        let owner = slot.bytes.compare_exchange(0, bytes, Relaxed, Relaxed);
        owner.is_ok() || owner == Err(bytes)
    });
    taken.unwrap_or(&BLOCKS[SIZES - 1])
}

fn count(layout: Layout, blocks: isize) {
    if layout.size() >= BLOCK {
        size(layout.size()).live.fetch_add(blocks, Relaxed);
    }
}

// Safety: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        count(layout, 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        count(layout, -1);
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The live memory at one moment.
pub struct Mark {
    bytes: usize,
    blocks: Vec<isize>,
}

impl Mark {
    /// Marks this moment; the peak counts from here as well.
    pub fn set() -> Self {
        let blocks = BLOCKS.iter().map(|size| size.live.load(Relaxed)).collect();
        let bytes = LIVE.load(Relaxed);
        PEAK.store(bytes, Relaxed);
        Self { bytes, blocks }
    }

    /// The live bytes above those at the mark.
    pub fn live(&self) -> usize {
        LIVE.load(Relaxed).saturating_sub(self.bytes)
    }

    /// The peak of live bytes since the mark, above those at the mark.
    pub fn peak(&self) -> usize {
        PEAK.load(Relaxed).saturating_sub(self.bytes)
    }

    /// By size, the live blocks above those at the mark.
    pub fn blocks(&self) -> BTreeMap<usize, usize> {
        let grown = BLOCKS.iter().zip(&self.blocks).filter_map(|(size, then)| {
            let grown = size.live.load(Relaxed) - then;
            Some((size.bytes.load(Relaxed), usize::try_from(grown).ok()?))
        });
        grown.filter(|(_, grown)| *grown > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_blocks_are_counted_by_size() {
        // Sizes that no other test allocates.
        let mark = Mark::set();
        let blocks = [123_456, 123_456, 54_321].map(Vec::<u8>::with_capacity);
        let small = Vec::<u8>::with_capacity(4093);
        let grown = mark.blocks();
        assert_eq!(
            (grown.get(&123_456), grown.get(&54_321)),
            (Some(&2), Some(&1))
        );
        assert!(!grown.contains_key(&4093));
        drop((blocks, small));
        assert!(!mark.blocks().contains_key(&123_456));
    }
}
