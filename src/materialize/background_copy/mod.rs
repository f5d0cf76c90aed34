//! Background copy: a mount writes the archive's tree to a local directory while it serves.
//!
//! The copy is made from an index and by reads, and equals the tree that a scan would write. A later mount
//! continues where the last one stopped.
//!
//! Directories are made first, then all other entries in archive order. A file that a reader opens is moved
//! to the front. Owners, modes and times of directories are last. A file is complete when it has all its
//! names and attributes and a row in the [`Ledger`](ledger::Ledger), which each open compares with it. The
//! archive's reader has verified the bytes.

mod bit_set;
mod copy;
mod directory;
mod ledger;
mod status;
mod task;

pub use self::copy::{BackgroundCopy, RunningCopy};
pub use self::status::{BackgroundCopyProgress, CopyState};

#[cfg(test)]
mod tests;
