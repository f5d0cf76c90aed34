//! Journal of a resumable run, in a file beside the tree. `--resume` continues from it.
//!
//! The run appends items for complete entries, and for directories and links to be finished at the end. A
//! checkpoint says that all members before a certain member are done, and where that member is in the source.
//! Each item has a checksum over itself and all items before it, so a reader stops at a torn item.
//! Items after the last checkpoint are dropped, because their members are made again.
//!
//! A journal is valid for the current boot, the same version of the source, the same directory, umask and
//! options. It is used only if every entry is still as recorded.

mod file;
mod item;
mod load;

#[cfg(test)]
mod tests;

pub(crate) use self::file::Journal;
pub(crate) use self::load::{CheckpointInfo, RecoveredState, TreeItem};
