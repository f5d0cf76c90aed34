//! The library's entry point: opens, scans and reads one archive.

pub mod cache_inventory;
pub mod directory;
mod error;
mod index_source;
mod live_index;
mod member_source;
mod open;
mod options;
mod peers;
mod prefetch;
mod read;
pub mod scan;
mod sink;
mod version;
mod volume;

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::base::stats::Stats;
use crate::base::thread_pool::ThreadPool;
use crate::codec::Compression;
use crate::index::{Index, LazyIndex};
use crate::source::{Access, Source};

use open::background_scan::BackgroundScan;
use prefetch::{FillThreads, Prefetcher};
use read::Reader;

pub use crate::cache::DiskCacheUsage;
pub use error::{
    Error, HINT_RAISE_INDEX_MEMORY, HINT_RAISE_MAX_ENTRIES, HINT_RAISE_MAX_UNPACKED_SIZE,
    OpenError, ReadError, TRUNCATED_NOTE,
};
pub use index_source::published_index::{
    FindDigest, FindIndex, IndexPlace, PublishedIndex, PublishedIndexError,
};
pub use index_source::saved_index::SavedIndex;
pub use index_source::tree_origin::TreeOrigin;
pub use live_index::{BuiltIndex, Callback, IndexGuard, IsWanted, WaitFor, Watcher};
pub(crate) use open::opener::detect_compression;
pub use open::resources::SharedResources;
pub use options::{DiskCacheMode, OpenOptions};
pub use peers::{PeerSpan, Peers};
pub(crate) use prefetch::access_log::AccessLog;
pub use prefetch::access_log::{AccessedRange, MAX_ACCESSED_RANGES};
pub use prefetch::options::{
    PageCache, PrefetchMode, PrefetchOptions, PrefetchProgress, PrefetchState, Profile,
};
pub use read::PlainStream;
pub(crate) use read::checked_headers::NumberSet;
pub use scan::resume_point::ResumePoint;
pub use scan::verify_sink::VerifySink;
pub use version::{ParseVersionError, Version};
pub use volume::{Compared, ReadReply, RowsLoaded, TouchRows, TreePart, Volume};

/// An opened archive: its tree, as far as the scan has found it, and any byte of any file.
#[derive(Debug)]
pub struct Archive {
    // Drop order: the scan's callbacks submit work to the read threads. These and prefetch use the reader.
    background_scan: Option<BackgroundScan>,
    prefetch: OnceLock<Prefetcher>,
    read_threads: Arc<ThreadPool>,
    reader: Arc<Reader>,
    /// Threads of prefetch, if other archives use the same threads.
    fill_threads: Option<Arc<OnceLock<FillThreads>>>,
}

/// Memory of an archive, by purpose, without what it does not account for, such as the allocator's own.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Limit for everything but the index.
    pub budget_bytes: u64,
    /// Cached spans, bookkeeping included.
    pub spans_bytes: u64,
    /// Bytes reserved by the reads that are decoding now.
    pub reads_bytes: u64,
    /// State borrowed by the decoders of these reads.
    pub decoders_bytes: u64,
    /// The index, which does not count against the budget.
    pub index_bytes: u64,
}

impl Drop for Archive {
    /// Discards queued work, because its callers are gone and an unreachable source may take long to fail.
    fn drop(&mut self) {
        if self.fill_threads.is_none() || Arc::strong_count(&self.read_threads) == 1 {
            self.close();
            return;
        }
        self.reader.cancel();
    }
}

impl Archive {
    /// Returns the tree as far as the scan has found it.
    pub fn index(&self) -> IndexGuard<'_> {
        self.reader.live_index.lock()
    }

    /// Why the scan failed, if it did.
    pub fn failure(&self) -> Option<Arc<OpenError>> {
        self.background_scan.as_ref()?.failure()
    }

    fn fill_threads(&self) -> io::Result<FillThreads> {
        let Some(shared) = &self.fill_threads else {
            return FillThreads::start();
        };
        if let Some(threads) = shared.get() {
            return Ok(threads.clone());
        }
        let threads = FillThreads::start()?;
        Ok(shared.get_or_init(|| threads).clone())
    }

    fn check_scan_result(&self) -> Result<(), OpenError> {
        let background_scan = self.background_scan.as_ref();
        let failure = background_scan.and_then(BackgroundScan::take_failure);
        failure.map_or(Ok(()), Err)
    }

    /// Returns the source of the packed bytes.
    pub fn source(&self) -> &Arc<dyn Source> {
        self.reader.packed.source()
    }

    /// Returns the counters of work done so far.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.reader.stats
    }

    /// Returns notes for the user, one line each.
    pub fn notes(&self) -> Vec<String> {
        let scan = self.background_scan.as_ref();
        let mut notes = scan.map(BackgroundScan::notes).unwrap_or_default();
        // The scan that saved the index is over.
        if scan.is_none() && self.index().origin().is_truncated {
            notes.push(TRUNCATED_NOTE.to_owned());
        }
        notes.extend(self.reader.tree.note());
        notes
    }

    /// Whether the archive surely ends with its last member: it has the expected digest, or its end marker.
    pub fn is_whole(&self) -> bool {
        let index = self.index();
        let origin = index.origin();
        !origin.is_truncated && (origin.has_end_marker || self.reader.has_expected_digest)
    }

    /// Returns who vouches for the tree.
    pub fn tree_origin(&self) -> TreeOrigin {
        self.reader.tree.origin
    }

    /// As [`Reader::report_mismatch`].
    pub(crate) fn report_mismatch(&self, path: &ArchivePath) -> ReadError {
        self.reader.report_mismatch(path)
    }

    /// Runs `work` on a thread for reads, unless the archive is closed.
    pub(crate) fn run(&self, work: impl FnOnce() + Send + 'static) {
        self.read_threads.submit(work);
    }

    /// A note that the archive does not vouch for the tree, nor the user or the image's manifest.
    pub fn foreign_tree_note(&self) -> Option<String> {
        let is_foreign = self.tree_origin() == TreeOrigin::Publisher;
        self.reader.tree.note().filter(|_| is_foreign)
    }

    /// Whether some spans have no seek point, so that reads decode from far before them or need a disk cache.
    pub fn has_unseekable_spans(&self) -> bool {
        let has_unseekable = |index: &Index| {
            (0..index.span_count()).any(|number| index.seek_offset(number).is_none())
        };
        self.index().read(has_unseekable).unwrap_or(true)
    }

    /// Its name for peers: that of its saved index.
    pub fn peer_name(&self) -> &str {
        &self.reader.name
    }

    /// The index for a peer, for which the archive itself vouches.
    ///
    /// # Errors
    /// If there is no complete one: whether the peer should wait, because a scan decodes the archive at this moment.
    pub fn index_for_peer(&self) -> Result<LazyIndex, bool> {
        if self.tree_origin() != TreeOrigin::default() {
            return Err(false);
        }
        // A listing of an archive that is not packed is faster by itself.
        let is_packed = || self.index().origin().compression != Compression::None;
        let completed = self.reader.live_index.completed();
        completed.ok_or_else(|| self.failure().is_none() && is_packed())
    }

    /// The decoded block `number`, if it is in memory, or is decoded within `timeout` by another caller.
    pub fn span_for_peer(&self, number: u32, timeout: Duration) -> Option<Bytes> {
        self.reader.shared_span(number, timeout)
    }

    /// Why the disk cache is incomplete, in words for the user.
    pub fn disk_cache_problem(&self) -> Option<String> {
        let problem = self.reader.spans.disk()?.problem_text()?;
        Some(format!(
            "the disk cache is incomplete ({problem}); missing data is decoded again when read"
        ))
    }

    /// Current disk usage of cached spans; `None` without a disk cache.
    pub fn disk_cache_use(&self) -> Option<DiskCacheUsage> {
        Some(self.reader.spans.disk()?.disk_usage())
    }

    /// Bytes of spans that are cached in memory now.
    pub fn cached_bytes(&self) -> u64 {
        self.reader.spans.memory().cached_bytes()
    }

    /// Whether prefetch has handled all reads reported to it. Pushes to the page cache may still be pending.
    pub fn is_prefetch_idle(&self) -> bool {
        self.prefetch.get().is_none_or(Prefetcher::is_idle)
    }

    /// Progress of prefetch; `None` if it was not started.
    pub fn prefetch_progress(&self) -> Option<PrefetchProgress> {
        Some(self.prefetch.get()?.progress())
    }

    /// Starts to decode `extent` of the plain stream, which is not empty, from the seek point before it. `None` if
    /// files must be read one by one, because each is compared with its header, or the source has no ranges.
    ///
    /// # Errors
    /// When the source is unavailable, or the index is damaged.
    pub fn stream(&self, extent: Extent<Plain>) -> Result<Option<PlainStream<'_>>, ReadError> {
        if self.reader.header_checks.is_some() || self.source().access() == Access::Stream {
            return Ok(None);
        }
        self.reader.stream(extent).map(Some)
    }
}
