//! The events of an epoch, which differ between the versions of Burn.

use burn::data::dataloader::Progress;
use burn::train::{ItemLazy, LearnerEvent};

/// Several data loaders' progress.
#[cfg(feature = "burn-0-22")]
pub fn together(loaders: impl Iterator<Item = Progress>) -> Progress {
    loaders
        .reduce(|all, one| {
            let processed = all.items_processed + one.items_processed;
            Progress::new(processed, all.items_total + one.items_total, all.unit)
        })
        .expect("a device has a data loader")
}

/// Several data loaders' progress.
#[cfg(feature = "burn-0-23")]
pub fn together(loaders: impl Iterator<Item = Progress>) -> Progress {
    Progress::aggregate(loaders)
}

/// An epoch begins.
pub fn start_split<T: ItemLazy>(epoch_number: usize, progress: Progress) -> LearnerEvent<T> {
    LearnerEvent::StartSplit {
        epoch_number,
        #[cfg(feature = "burn-0-22")]
        total_items: progress.items_total,
        #[cfg(feature = "burn-0-23")]
        progress,
    }
}

/// An epoch has ended: complete if `whole`, otherwise stopped.
pub fn end_split<T: ItemLazy>(
    epoch: usize,
    #[allow(unused_mut)] mut progress: Progress,
    whole: bool,
) -> LearnerEvent<T> {
    #[cfg(feature = "burn-0-22")]
    {
        let _ = (progress, whole);
        LearnerEvent::EndSplit(epoch)
    }
    #[cfg(feature = "burn-0-23")]
    {
        if whole {
            progress.resolve_total();
        }
        LearnerEvent::EndSplit { epoch, progress }
    }
}
