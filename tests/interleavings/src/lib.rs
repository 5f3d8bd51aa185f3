//! Has tests alone.
