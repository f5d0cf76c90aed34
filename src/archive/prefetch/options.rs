//! Options and progress of prefetch, and the page cache that it pushes files to.

use std::{fmt, io};

use serde::{Deserialize, Serialize};

use super::access_log::AccessedRange;
use crate::index::{Index, Ino};

/// Data that is prefetched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub enum PrefetchMode {
    /// Prefetches nothing.
    Off,
    /// Prefetches data that sequential readers of a file or a tree will need next.
    #[default]
    ReadAhead,
    /// Does that, and prefetches everything else from front to back, while there is space.
    All,
}

/// Options of prefetch.
#[derive(Default)]
pub struct PrefetchOptions {
    /// Data to prefetch.
    pub mode: PrefetchMode,
    /// Maximum number of bytes fetched per second; `None` is unlimited.
    pub bytes_per_second: Option<u64>,
    /// Accesses of an earlier run, prefetched in the same order once the index is complete.
    pub replay: Option<Profile>,
    /// Whether to record accesses. Disables pushes, because the kernel reports no reads from its page cache.
    pub record: bool,
    /// Number of other archives whose prefetch fills the same memory, in equal parts.
    pub other_archives: u64,
}

/// Looks up the accesses of a profile in an index, which is that of the whole tree.
pub type Profile = Box<dyn FnOnce(&Index) -> Vec<AccessedRange> + Send>;

impl fmt::Debug for PrefetchOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefetchOptions")
            .field("mode", &self.mode)
            .field("bytes_per_second", &self.bytes_per_second)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// Progress of prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefetchProgress {
    /// Data that is prefetched.
    pub mode: PrefetchMode,
    /// State of [`PrefetchMode::All`].
    pub state: PrefetchState,
    /// Spans that [`PrefetchMode::All`] has filled, or found in a cache.
    pub done_spans: u64,
    /// Spans of the archive.
    pub total_spans: u64,
    /// Spans of the replay that were filled, or found in a cache.
    pub replayed_spans: u64,
    /// Spans of the replay.
    pub replay_spans: u64,
}

/// State of [`PrefetchMode::All`]. The state of several archives is the least of their states.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PrefetchState {
    /// It fetches while no reader does.
    Running,
    /// Some spans could not be filled.
    Incomplete,
    /// The caches have no space left.
    Full,
    /// All spans are cached, and nothing is left to fetch.
    Complete,
    /// It is not requested.
    Off,
}

/// The kernel's page cache, which answers reads of pushed files without a request.
pub trait PageCache: Send + Sync + fmt::Debug {
    /// Whether its mount has not ended. After that it is not used any more.
    fn is_open(&self) -> bool;

    /// Whether the file can be stored, and its start was neither stored nor read yet.
    fn can_store(&self, ino: Ino) -> bool;

    /// Whether the mounted subtree contains the file.
    fn is_visible(&self, index: &Index, ino: Ino) -> bool;

    /// Makes these regular files storable if possible, and returns how many were not before. The caller must
    /// not hold an [`IndexGuard`](crate::archive::IndexGuard) of a growing index.
    fn prime_inodes(&self, files: &[Ino]) -> usize;

    /// Primes the dentries of `ino` and of the following names in its directory, so that opens need no
    /// lookups. Does nothing if too few names follow to be worth it.
    fn prime_dentries(&self, index: &Index, ino: Ino);

    /// Stores `bytes` from `offset` on, in whole pages except at the end of the file, and returns how many were stored:
    /// those of several mounts are added up. May wait for a reader of the same page.
    ///
    /// # Errors
    /// When they cannot be stored.
    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<u64>;
}
