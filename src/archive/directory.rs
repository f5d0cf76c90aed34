//! Many archives as one directory: what a mount needs to open them.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use super::Archive;

pub use crate::source::{ListedArchive, Listing};

/// Why an archive of a directory cannot be opened.
pub type DirectoryError = Box<dyn Error + Send + Sync>;

/// Scans an archive with its share of the memory, or as a spare scan. Returns when the first member is found.
pub type ScanFn = Box<dyn FnOnce(ScanTurn) -> Result<Arc<Archive>, DirectoryError> + Send>;

/// Which memory a scan has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScanTurn {
    /// An equal share of the memory for scans.
    Regular,
    /// The least memory of a scan, which the span cache lends.
    Spare,
}

/// The archives of a place.
pub trait ArchiveDirectory: Send + Sync + fmt::Debug {
    /// The archives.
    fn listing(&self) -> &Listing;

    /// Opens the archive at `path` if it has an index. Otherwise returns how to scan it. Blocks.
    ///
    /// # Errors
    /// When the archive cannot be opened.
    fn open(&self, path: &str) -> Result<Result<Arc<Archive>, ScanFn>, DirectoryError>;

    /// Whether archives may be opened by indexes that others made.
    fn may_be_foreign(&self) -> bool;

    /// Number of archives that may be scanned at once in turns of this kind.
    fn max_scans(&self, turn: ScanTurn) -> usize;

    /// Whether the indexes of the open archives take more than half of their memory.
    fn is_index_memory_low(&self) -> bool;
}
