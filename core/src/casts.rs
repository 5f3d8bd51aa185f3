//! The number of casts and their bytes.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::words::{bytes, grouped};

/// Casts of float tensors from one dtype to another. `Display` gives the bytes in powers of 1,024:
/// `8 (1.5 KiB)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Casts {
    /// The number of casts.
    pub count: u64,
    /// Bytes that the casts read and wrote: each element counts in both dtypes.
    pub bytes: u64,
}

impl fmt::Display for Casts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", grouped(self.count), bytes(self.bytes))
    }
}

impl AddAssign for Casts {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.bytes += other.bytes;
    }
}
