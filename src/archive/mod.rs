//! The library's front door: one archive, opened, scanned and read.

mod access_log;
mod available_memory;
mod background_scan;
mod batch;
pub mod cache_inventory;
mod decode_pipeline;
mod digest;
mod disk_cache_policy;
mod error;
mod index_sink;
mod lag_limit;
mod live_index;
mod lookup_runs;
mod member_source;
mod open;
mod packed;
mod prefetch;
mod priority;
mod rate_limit;
mod read;
mod replay;
mod resources;
mod resume_point;
mod saved_index;
pub mod scan;
mod scan_push;
mod sequential;
mod single_flight;
mod skip_policy;
mod span_splitter;
mod verify_sink;
mod windows;
mod zeros;

use std::io;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::base::stats::Stats;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Index, Ino};
use crate::source::Source;

pub use crate::cache::DiskCacheUsage;
pub use access_log::AccessedRange;
pub use digest::sha256;
pub use error::{Error, HINT_RAISE_INDEX_MEMORY, HINT_RAISE_MAX_ENTRIES};
pub use live_index::{Callback, IndexGuard, IsWanted, WaitFor, Watcher};
pub use open::{DiskCacheFailure, DiskCacheMode, OpenError, OpenOptions};
pub use prefetch::{
    PageCache, PrefetchMode, PrefetchOptions, PrefetchProgress, PrefetchState, Profile,
};
pub use read::ReadError;
pub use resources::SharedResources;
pub use resume_point::ResumePoint;
pub use saved_index::SavedIndex;
pub use verify_sink::VerifySink;

/// An archive: its tree, as far as it is known, and any byte of any file, from memory, from a
/// disk cache, or from the source.
#[derive(Debug)]
pub struct Archive {
    // In this order: the pass runs what waits for it, which goes to the workers, who use the reader,
    // as do the threads that are ahead of readers.
    background_scan: Option<background_scan::BackgroundScan>,
    prefetch: OnceLock<prefetch::Prefetcher>,
    workers: Arc<ThreadPool>,
    reader: Arc<read::Reader>,
    /// Whether others may still want something of the workers.
    has_shared_workers: bool,
}

/// What an archive uses memory for, as it accounts for it. What the process takes besides, such
/// as the allocator's own, is not in it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryUse {
    /// What all but the index may take together.
    pub budget_bytes: u64,
    /// Decoded spans that are kept, bookkeeping included.
    pub spans_bytes: u64,
    /// What reads that decode at this moment have reserved.
    pub reads_bytes: u64,
    /// State that their decoders have borrowed besides.
    pub decoders_bytes: u64,
    /// The index, on top of the budget.
    pub index_bytes: u64,
}

impl Drop for Archive {
    /// Who asked for what is still queued is gone, and the source may take long to say that it
    /// cannot be reached.
    fn drop(&mut self) {
        if !self.has_shared_workers || Arc::strong_count(&self.workers) == 1 {
            self.close();
        } else if let Some(background_scan) = &self.background_scan {
            background_scan.cancel();
        }
    }
}

impl Archive {
    /// Ends all work soon: the scan, reads, also those that wait for memory, and what is ahead of them.
    /// Reads fail from now on, of all archives that [share](SharedResources) their memory.
    pub fn close(&self) {
        if let Some(background_scan) = &self.background_scan {
            background_scan.cancel();
        }
        self.reader.close();
        self.workers.discard_queue();
    }

    /// The tree, as far as it is known.
    pub fn index(&self) -> IndexGuard<'_> {
        self.reader.live_index.read()
    }

    /// The tree for who goes on with it, once all of it is known.
    pub fn complete_index(&self) -> Option<Arc<Index>> {
        self.reader.live_index.completed().cloned()
    }

    /// Whether the scan is over, if there was one: what is not in the index now never will be.
    pub fn is_scanned(&self) -> bool {
        self.reader.live_index.is_scan_over()
    }

    /// Does `callback` when what is `awaited` is there or the scan is over: at once, or later on the
    /// scan's thread, which must not be made to wait; perhaps never, once it is not wanted any more.
    /// Whoever calls holds no [`IndexGuard`].
    pub fn on_available(&self, awaited: WaitFor, callback: Callback) {
        self.reader.live_index.on_available(awaited, callback);
    }

    /// Has `watcher` told whose attributes later members have changed, on the scan's thread,
    /// which must not be made to wait. The first word counts.
    pub fn watch(&self, watcher: Watcher) {
        self.reader.live_index.watch(watcher);
    }

    /// Why the scan ended before the archive, if it did.
    pub fn failure(&self) -> Option<Arc<OpenError>> {
        self.background_scan.as_ref()?.failure()
    }

    /// # Errors
    /// Why the scan, which is over, ended before the archive.
    fn check_scan_result(&self) -> Result<(), OpenError> {
        let failure = self
            .background_scan
            .as_ref()
            .and_then(background_scan::BackgroundScan::take_failure);
        failure.map_or(Ok(()), Err)
    }

    /// Where the packed bytes come from.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.reader.source
    }

    /// What was done so far.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.reader.stats
    }

    /// What the user should know, one line each.
    pub fn notes(&self) -> Vec<String> {
        self.background_scan
            .as_ref()
            .map(background_scan::BackgroundScan::notes)
            .unwrap_or_default()
    }

    /// Whether some bytes can only be decoded from far before them, or read from a disk cache.
    pub fn has_unseekable_spans(&self) -> bool {
        let index = self.index();
        (0..index.span_count()).any(|number| index.seek_offset(number).is_none())
    }

    /// Why something is not kept on disk that might be, for the user.
    pub fn disk_cache_problem(&self) -> Option<String> {
        let trouble = self.reader.disk_cache.as_ref()?.problem_text()?;
        Some(format!(
            "the disk cache is incomplete ({trouble}); missing data is decoded again when read"
        ))
    }

    /// How much disk decoded spans take at this moment; `None` when none are kept there.
    pub fn disk_cache_use(&self) -> Option<DiskCacheUsage> {
        Some(self.reader.disk_cache.as_ref()?.disk_usage())
    }

    /// Bytes of decoded spans kept in memory at this moment.
    pub fn cached_bytes(&self) -> u64 {
        self.reader.span_cache.cached_bytes()
    }

    /// What memory is used for at this moment.
    pub fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            budget_bytes: self.reader.memory_bytes,
            spans_bytes: self.cached_bytes(),
            reads_bytes: self.reader.budget.used_bytes(),
            decoders_bytes: self.reader.broker.granted_bytes(),
            index_bytes: self.index().memory_bytes() as u64,
        }
    }

    /// Starts to prepare what will be read next, as `options` say; a second call changes nothing.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub fn start_prefetch(&self, options: PrefetchOptions) -> io::Result<()> {
        let prefetcher = prefetch::Prefetcher::start(Arc::clone(&self.reader), options)?;
        drop(self.prefetch.set(prefetcher));
        Ok(())
    }

    /// Takes note of a read of `len` bytes at `offset` of file `ino`, for what comes after it.
    /// Never waits.
    pub fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.note_read(ino, offset, len);
        }
    }

    /// Takes note that `ino` was asked for by name, for the names that follow it. Never waits.
    pub fn note_lookup(&self, ino: Ino) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.note_lookup(ino);
        }
    }

    /// Whether what was seen of reads has led to all that it leads to, but for what is pushed.
    pub fn is_prefetch_idle(&self) -> bool {
        self.prefetch
            .get()
            .is_none_or(prefetch::Prefetcher::is_idle)
    }

    /// How far what is fetched in the background is; `None` when nothing was started.
    pub fn prefetch_progress(&self) -> Option<PrefetchProgress> {
        Some(self.prefetch.get()?.progress())
    }

    /// What was read, if that is recorded and there were more than `reads` reads; and how many
    /// there are now.
    pub fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        self.prefetch.get()?.accesses_since(reads)
    }

    /// Where files may be pushed to before they are read. The first word counts.
    pub fn set_page_cache(&self, pages: Arc<dyn PageCache>) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.set_page_cache(pages);
        }
    }

    /// At most `len` bytes at `offset` of file `ino`, if no one has to be waited for: fewer only
    /// at the end of the file. `None` when some byte is neither a hole nor in memory.
    pub fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        self.reader.try_read(ino, offset, len)
    }

    /// As [`Archive::try_read`], but never gives up: `done` gets the bytes on one of the
    /// archive's own threads; or is dropped, once it is not `wanted` any more.
    pub fn read(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        wanted: IsWanted,
        done: impl FnOnce(Result<Bytes, ReadError>) + Send + 'static,
    ) {
        let (workers, reader) = (Arc::clone(&self.workers), Arc::clone(&self.reader));
        let is_wanted = Arc::clone(&wanted);
        let work = move || {
            // The queue may have been long.
            if is_wanted() {
                done(reader.read(ino, offset, len));
            }
        };
        if self.reader.live_index.completed().is_some() {
            return workers.submit(work);
        }
        let scan_end = self.reader.required_scan_end(ino, offset, len);
        // A worker never waits for the scan, as the next one in the queue may not need to.
        let callback = Callback::while_wanted(wanted, move || workers.submit(work));
        self.on_available(WaitFor::Plain(scan_end), callback);
    }

    /// As [`Archive::read`], on the calling thread, which must not be one of the runtime's.
    ///
    /// # Errors
    /// When the bytes cannot be had, or are not those that were indexed.
    pub fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.reader.read(ino, offset, len)
    }
}
