//! Disk cache of decoded spans that cost more to decode again than to read back.
//! Each archive has one sparse file: plain byte *n* is at file offset *n*, and uncached bytes are holes. Runs of
//! zeros that the index proves are neither written nor read. The
//! index has the checksums of each span's blocks, which holes, torn writes and foreign files all fail. So any
//! number of processes may write one file or punch holes into it, and may be killed at any moment.

mod cache_dir;
mod cache_file;
mod direct_io;
mod lru;
mod read_rate;
mod sparse_extent;
mod write_queue;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{FreeList, RecycledBuffer};
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use cache_file::CacheFile;
use lru::Lru;
use write_queue::{PendingWrite, WriteQueue};

pub use cache_dir::{CacheFileInfo, DiskCacheDir};
pub use read_rate::ReadRate;
pub(crate) use read_rate::bytes_per_second;
pub use sparse_extent::SparseExtent;
pub use write_queue::QueueTimeout;

/// Disk cache of one archive, with a writer thread. A queued span is readable at once.
#[derive(Debug)]
pub struct DiskCache {
    shared: Arc<Shared>,
    /// Ends when the queue is closed; `None` only while dropping.
    writer: Option<Thread<()>>,
}

/// Options of a disk cache.
#[derive(Clone, Debug)]
pub struct DiskCacheOptions {
    /// Memory for queued spans, which several disk caches may share.
    pub write_pool: BufferPool,
    /// Whether the bytes cannot be fetched again. Then no part is evicted while the cache is in use.
    pub is_only_copy: bool,
    /// Supplies the memory for reads.
    pub free_list: FreeList,
    /// Speed of reads, which this disk cache measures.
    pub read_rate: Arc<ReadRate>,
    /// Counters.
    pub stats: Arc<Stats>,
}

/// The disk cache cannot be opened or created.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the disk cache {path}")]
pub struct DiskCacheError {
    path: String,
    #[source]
    source: io::Error,
}

/// Disk usage, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct DiskCacheUsage {
    /// Of this disk cache.
    pub held_bytes: u64,
    /// Of all files in the directory.
    pub all_bytes: u64,
    /// Limit for all files in the directory.
    pub limit_bytes: u64,
}

const MAX_SKIPPED_SPANS: usize = 1 << 16;

/// Interval between updates of the file's mtime, which shows the last use to other processes.
const TOUCH_INTERVAL: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Shared {
    cache_dir: DiskCacheDir,
    options: DiskCacheOptions,
    /// Maximum bytes of this archive, if the directory has no limit of its own.
    max_bytes: u64,
    queue: WriteQueue,
    current: Mutex<CurrentFile>,
    lru: Mutex<Lru>,
    problems: Mutex<CacheProblems>,
    skipped: Mutex<VecDeque<Extent<Plain>>>,
}

#[derive(Debug)]
struct CurrentFile {
    file: Arc<CacheFile>,
    /// Whether the file has the name by which later mounts find it.
    is_published: bool,
    last_touch: Option<Instant>,
}

#[derive(Clone, Debug, Default)]
struct CacheProblems {
    /// The error after which nothing more is written.
    failure: Option<String>,
    is_full: bool,
}

impl DiskCache {
    /// Creates a disk cache, removed when dropped unless published. Removes those that dead processes left.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(
        cache_dir: DiskCacheDir,
        options: DiskCacheOptions,
    ) -> Result<Self, DiskCacheError> {
        cache_dir.remove_stale();
        let file = cache_dir
            .create_directory()
            .and_then(|directory| CacheFile::create(&directory));
        Self::start(cache_dir, options, file, None)
    }

    /// Opens the disk cache of `content` that other mounts published, or creates an empty one.
    ///
    /// # Errors
    /// If there is none and it cannot be created.
    pub fn open(
        cache_dir: DiskCacheDir,
        content: &str,
        options: DiskCacheOptions,
    ) -> Result<Self, DiskCacheError> {
        cache_dir.remove_stale();
        let name = file_name(content, &options);
        let directory = cache_dir.create_directory();
        let file = directory.and_then(|directory| CacheFile::open(&directory, &name, true));
        Self::start(cache_dir, options, file, Some(&name))
    }

    fn start(
        cache_dir: DiskCacheDir,
        options: DiskCacheOptions,
        file: io::Result<CacheFile>,
        published: Option<&str>,
    ) -> Result<Self, DiskCacheError> {
        let path = cache_dir.path().join(published.unwrap_or_default());
        let failed = |source| DiskCacheError {
            path: path.display().to_string(),
            source,
        };
        let file = file.map_err(failed)?;
        let max_bytes = if options.is_only_copy {
            u64::MAX
        } else {
            cache_dir.max_bytes_of_archive(file.held_bytes())
        };
        let shared = Arc::new(Shared {
            max_bytes,
            cache_dir,
            queue: WriteQueue::new(options.write_pool.clone()),
            options,
            current: Mutex::new(CurrentFile {
                file: Arc::new(file),
                is_published: published.is_some(),
                last_touch: None,
            }),
            lru: Mutex::default(),
            problems: Mutex::default(),
            skipped: Mutex::default(),
        });
        let writer = Thread::spawn("tarfs-cache", {
            let shared = Arc::clone(&shared);
            move || shared.run_writer()
        });
        Ok(Self {
            shared,
            writer: Some(writer.map_err(failed)?),
        })
    }

    /// Queues a scanned span; skips it if the disk is full, or the queue stays full until the timeout.
    pub fn insert(&self, extent: impl Into<SparseExtent>, bytes: Bytes, timeout: QueueTimeout) {
        self.push(PendingWrite::new(extent.into(), bytes), timeout);
    }

    /// As [`DiskCache::insert`] for a span that was skipped before. It is not recorded as skipped again.
    pub fn insert_skipped(
        &self,
        extent: impl Into<SparseExtent>,
        bytes: Bytes,
        timeout: QueueTimeout,
    ) {
        let item = PendingWrite {
            is_retry: true,
            ..PendingWrite::new(extent.into(), bytes)
        };
        self.push(item, timeout);
    }

    /// As [`DiskCache::insert`] for a span that a reader wanted. May evict the least recently used spans.
    pub fn insert_evicting(
        &self,
        extent: impl Into<SparseExtent>,
        bytes: Bytes,
        timeout: QueueTimeout,
    ) {
        let item = PendingWrite {
            may_evict: !self.shared.options.is_only_copy,
            ..PendingWrite::new(extent.into(), bytes)
        };
        self.push(item, timeout);
    }

    fn push(&self, item: PendingWrite, timeout: QueueTimeout) {
        if self.shared.problems.lock().failure.is_some() || item.sparse.stored_bytes() == 0 {
            return;
        }
        let skipped = (item.sparse.extent(), item.is_retry);
        if !self.shared.queue.push(item, timeout) {
            self.shared.record_skipped([skipped]);
        }
    }

    /// Removes and returns up to `max` spans skipped by a slow disk; none while the disk is full.
    pub fn take_skipped(&self, max: usize) -> Vec<Extent<Plain>> {
        let is_full = {
            let problems = self.shared.problems.lock();
            problems.failure.is_some() || problems.is_full
        };
        let mut skipped = self.shared.skipped.lock();
        if is_full {
            skipped.clear();
        }
        let taken = skipped.len().min(max);
        skipped.drain(..taken).collect()
    }

    /// Measured speed of reads, in bytes a second; `None` before the first one.
    pub fn read_rate(&self) -> Option<u64> {
        self.shared.options.read_rate.bytes_per_second()
    }

    /// Whether queued spans fill more than half of their memory.
    pub fn is_busy(&self) -> bool {
        self.shared.queue.is_half_full()
    }

    /// The bytes at `extent`, if complete. The caller verifies them, and then calls [`Self::mark_used`].
    pub fn read(&self, extent: impl Into<SparseExtent>) -> Option<Bytes> {
        let extent = extent.into();
        if let Some(bytes) = self.shared.queue.find(extent.extent()) {
            return Some(bytes);
        }
        let file = Arc::clone(&self.shared.current.lock().file);
        Some(self.shared.read_measured(&file, &extent)?.freeze())
    }

    /// The unverified bytes of `part` of a span, with arbitrary content where they are not cached. `None` if
    /// they cannot be read, or need the disk with [`Wait::Never`].
    pub fn read_part(&self, part: &SparseExtent, wait: Wait) -> Option<Bytes> {
        if let Some(bytes) = self.shared.queue.find_part(part.extent()) {
            return Some(bytes);
        }
        let file = Arc::clone(&self.shared.current.lock().file);
        let memory = file.read_part(part, &self.shared.options.free_list, wait)?;
        Some(memory.freeze())
    }

    /// Whether all stored bytes of `extent` are written or queued. They may be damaged.
    pub fn covers(&self, extent: &SparseExtent) -> bool {
        if self.shared.queue.find_part(extent.extent()).is_some() {
            return true;
        }
        let file = Arc::clone(&self.shared.current.lock().file);
        file.covers(extent)
    }

    /// Marks the verified span at `extent` as used now. It is then evicted later than others.
    pub fn mark_used(&self, extent: Extent<Plain>) {
        self.shared.lru.lock().mark_used(extent);
        let mut current = self.shared.current.lock();
        let is_recent = |touch: Instant| touch.elapsed() < TOUCH_INTERVAL;
        if !current.last_touch.is_some_and(is_recent) {
            current.last_touch = Some(Instant::now());
            let file = Arc::clone(&current.file);
            drop(current);
            file.set_last_used(SystemTime::now());
        }
    }

    /// Waits until all queued spans are written or dropped.
    pub fn flush(&self) {
        self.shared.queue.wait_until_empty();
    }

    /// Renames the file for later mounts of `content`, or switches to one of that name that holds more.
    ///
    /// # Errors
    /// If the file cannot be renamed.
    pub fn publish(&self, content: &str) -> io::Result<()> {
        let name = file_name(content, &self.shared.options);
        let ours = Arc::clone(&self.shared.current.lock().file);
        let found = self.shared.cache_dir.open_directory();
        let other = found.and_then(|directory| CacheFile::open(&directory, &name, false));
        let fuller = other.ok().filter(|other| {
            !self.shared.options.is_only_copy && other.held_bytes() > ours.held_bytes()
        });
        let file = if let Some(fuller) = fuller {
            ours.remove();
            self.shared.lru.lock().clear();
            fuller
        } else {
            ours.rename_to(&name)?
        };
        let mut current = self.shared.current.lock();
        current.file = Arc::new(file);
        current.is_published = true;
        Ok(())
    }

    /// Explains to the user why spans are missing from the disk cache.
    pub fn problem_text(&self) -> Option<String> {
        let problems = self.shared.problems.lock().clone();
        if problems.failure.is_some() || !problems.is_full {
            return problems.failure;
        }
        let (_, limit) = self.shared.cache_dir.usage_and_limit();
        let own_limit = self.shared.max_bytes;
        Some(if own_limit < limit {
            format!("the disk cache is full: its limit for this archive is {own_limit} bytes")
        } else {
            format!("the disk cache is full: its limit for all archives is {limit} bytes")
        })
    }

    /// Whether the disk holds `bytes`, all of the archive but runs of zeros, but for at most a full queue.
    pub fn has_at_least(&self, bytes: u64) -> bool {
        let held_bytes = self.shared.current.lock().file.held_bytes();
        held_bytes.saturating_add(self.shared.options.write_pool.budget()) >= bytes
    }

    /// Returns the disk usage.
    pub fn disk_usage(&self) -> DiskCacheUsage {
        let (all_bytes, limit_bytes) = self.shared.cache_dir.usage_and_limit();
        DiskCacheUsage {
            held_bytes: self.shared.current.lock().file.held_bytes(),
            all_bytes,
            limit_bytes,
        }
    }
}

impl Drop for DiskCache {
    /// Writes the queued spans, because they are few and were costly to decode.
    fn drop(&mut self) {
        self.shared.queue.close();
        drop(self.writer.take());
        let current = self.shared.current.lock();
        let is_empty = current.file.held_bytes() == 0;
        // Keep a file that another process has open or opens now, and a file that took its name.
        let is_useless = is_empty && current.file.try_lock_exclusive() && current.file.has_name();
        if !current.is_published || is_useless {
            current.file.remove();
        }
    }
}

fn file_name(content: &str, options: &DiskCacheOptions) -> String {
    let ending = if options.is_only_copy {
        cache_dir::ONLY_COPY_SUFFIX
    } else {
        cache_dir::EVICTABLE_SUFFIX
    };
    format!("{content}{ending}")
}

impl Shared {
    fn run_writer(&self) {
        // The limit may be lower than before.
        if let Some(_lock) = self.cache_dir.lock_for_write() {
            self.free_space(0, !self.options.is_only_copy);
        }
        while let Some(item) = self.queue.next() {
            if self.problems.lock().failure.is_some() {
                continue;
            }
            if let Err(error) = self.write(&item) {
                let text = format!("cannot write the disk cache: {error}");
                tracing::warn!("{text}; the disk cache stores nothing more");
                self.problems.lock().failure = Some(text);
            }
        }
    }

    fn write(&self, item: &PendingWrite) -> io::Result<()> {
        self.reopen_if_removed();
        let len = item.sparse.stored_bytes();
        let Some(_lock) = self.cache_dir.lock_for_write() else {
            if self.options.is_only_copy {
                return Err(ErrorKind::TimedOut.into());
            }
            // Other queued spans would fail to get the lock too, and their writers would wait for minutes.
            let cancelled = self.queue.cancel_waiting();
            let items = std::iter::once(item).chain(&cancelled);
            self.record_skipped(items.map(|item| (item.sparse.extent(), item.is_retry)));
            return Ok(());
        };
        if !self.free_space(len, item.may_evict) {
            self.report_full();
            return Ok(());
        }
        let file = Arc::clone(&self.current.lock().file);
        // A slow disk blocks no writer while the page cache accepts the bytes.
        let has_backlog = self.queue.has_backlog();
        if let Err(error) = file.write(&item.sparse, &item.bytes, has_backlog) {
            // Frees the blocks of a partly written span for other spans.
            file.punch_hole(item.sparse.extent());
            return Err(error);
        }
        self.options.stats.disk_cache_written_bytes.add(len);
        self.lru.lock().mark_used(item.sparse.extent());
        // A span in the page cache would be read too fast.
        if !has_backlog && self.options.read_rate.needs_sample() {
            drop(self.read_measured(&file, &item.sparse));
        }
        Ok(())
    }

    fn read_measured(&self, file: &CacheFile, extent: &SparseExtent) -> Option<RecycledBuffer> {
        let start = Instant::now();
        let memory = file.read(extent, &self.options.free_list)?;
        let (bytes, time) = (extent.stored_bytes(), start.elapsed());
        if bytes > 0 {
            self.options.read_rate.add(bytes, time);
        }
        Some(memory)
    }

    /// Reopens the file by its name if it was removed: no reader finds its bytes, and no limit counts them.
    fn reopen_if_removed(&self) {
        let current = self.current.lock();
        if !current.is_published || self.options.is_only_copy || current.file.has_name() {
            return;
        }
        let name = current.file.name.clone();
        drop(current);
        let directory = self.cache_dir.create_directory();
        // Concurrent reads continue in the old file.
        if let Ok(file) = directory.and_then(|directory| CacheFile::open(&directory, &name, true)) {
            self.current.lock().file = Arc::new(file);
            self.lru.lock().clear();
        }
    }

    /// Frees space for `needed` more bytes. An archive at its own limit evicts its own. Otherwise it evicts unused archives first. With `may_evict` it then evicts
    /// from the largest archive in use, while this one is below its fair share, and last from this one.
    fn free_space(&self, needed: u64, may_evict: bool) -> bool {
        let file = Arc::clone(&self.current.lock().file);
        let excess = (file.held_bytes().saturating_add(needed)).saturating_sub(self.max_bytes);
        if excess > 0 && (!may_evict || self.evict_own(&file, excess) < excess) {
            return false;
        }
        let files = self.cache_dir.files();
        let mut missing = self.cache_dir.bytes_to_free(&files, needed);
        if missing == 0 {
            return true;
        }
        let (ours, others): (Vec<_>, Vec<_>) =
            files.iter().partition(|info| info.is_same_file(&file));
        let (used, unused): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|info| info.is_in_use());
        let displaced = used.iter().chain(&ours).filter(|_| may_evict);
        let all = unused.iter().chain(displaced);
        if all.map(|info| info.held_bytes).sum::<u64>() < missing {
            return false;
        }
        let mut freed = 0;
        for info in &unused {
            if freed < missing {
                freed += self.evict(info, missing - freed);
            }
        }
        missing = missing.saturating_sub(freed);
        if missing > 0 && may_evict {
            let share = self.cache_dir.fair_share(&files, used.len() + 1);
            let parts = used.iter().filter(|info| info.can_evict_parts());
            let largest = parts.max_by_key(|info| info.held_bytes);
            let own = file.held_bytes();
            freed = match largest {
                Some(largest) if own + needed <= share && largest.held_bytes > own => {
                    self.evict(largest, missing)
                }
                _ => 0,
            };
            missing = missing.saturating_sub(freed);
            if missing > 0 {
                self.report_full();
                missing = missing.saturating_sub(self.evict_own(&file, missing));
            }
        }
        missing == 0
    }

    /// Evicts `wanted` bytes of another archive.
    fn evict(&self, other: &CacheFileInfo, wanted: u64) -> u64 {
        let freed = other.evict(wanted);
        self.options.stats.disk_cache_evicted_bytes.add(freed);
        freed
    }

    /// Evicts `wanted` bytes of this archive: those not used since the file was opened, then the oldest.
    fn evict_own(&self, file: &CacheFile, wanted: u64) -> u64 {
        let mut freed = 0;
        let mut at = Plain(0);
        while freed < wanted
            && let Some(data) = file.next_data(at)
        {
            let unknown = self.lru.lock().first_untracked(data);
            // Blocks on the edges, which known spans share, stay.
            let blocks = unknown.and_then(|unknown| file.whole_blocks(unknown));
            if let Some(blocks) = blocks {
                let len = blocks
                    .len()
                    .min(wanted - freed)
                    .next_multiple_of(cache_dir::EVICTION_STEP_BYTES);
                let part = Extent::with_len(blocks.start(), len.min(blocks.len()));
                freed += file.punch_hole(part);
                at = part.end();
            } else {
                at = unknown.map_or(data.end(), |unknown| unknown.end());
            }
        }
        while freed < wanted {
            let Some(oldest) = self.lru.lock().pop_oldest() else {
                break;
            };
            freed += file.punch_hole(oldest);
        }
        self.options.stats.disk_cache_evicted_bytes.add(freed);
        freed
    }

    fn record_skipped(&self, spans: impl IntoIterator<Item = (Extent<Plain>, bool)>) {
        let mut skipped = self.skipped.lock();
        for (extent, is_retry) in spans {
            self.options.stats.disk_cache_skipped_spans.increment();
            if !is_retry && skipped.len() < MAX_SKIPPED_SPANS {
                skipped.push_back(extent);
            }
        }
    }

    fn report_full(&self) {
        let mut problems = self.problems.lock();
        if !problems.is_full {
            problems.is_full = true;
            drop(problems);
            tracing::warn!("the disk cache is too small for the archive");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SPAN: u64 = 256 << 10;

    /// A directory on tmpfs. A disk may add metadata blocks, more so when it is fragmented.
    pub(super) fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a directory")
    }

    fn cache_dir(directory: &Path, spans: u64) -> DiskCacheDir {
        DiskCacheDir::new(
            directory.to_owned(),
            Some(spans * SPAN + cache_dir::SPACE_MARGIN_BYTES),
        )
    }

    fn options() -> DiskCacheOptions {
        DiskCacheOptions {
            write_pool: BufferPool::new(4 << 20),
            is_only_copy: false,
            free_list: FreeList::new(0),
            read_rate: Arc::default(),
            stats: Arc::default(),
        }
    }

    fn only_copy() -> DiskCacheOptions {
        DiskCacheOptions {
            is_only_copy: true,
            ..options()
        }
    }

    fn open(cache_dir: &DiskCacheDir, content: &str) -> DiskCache {
        DiskCache::open(cache_dir.clone(), content, options()).expect("a disk cache")
    }

    fn extent(number: u64) -> Extent<Plain> {
        Extent::with_len(Plain(number * SPAN), SPAN)
    }

    fn bytes(number: u64) -> Bytes {
        let byte = u8::try_from(number % 255 + 1).expect("small");
        vec![byte; usize::try_from(SPAN).expect("small")].into()
    }

    /// Inserts these spans as reads do, and waits until they are written.
    fn want(cache: &DiskCache, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            cache.insert_evicting(extent(number), bytes(number), QueueTimeout::Never);
        }
        cache.flush();
    }

    fn evicted_bytes(cache: &DiskCache) -> u64 {
        cache.shared.options.stats.disk_cache_evicted_bytes.get()
    }

    fn kept(cache: &DiskCache) -> Vec<u64> {
        let is_kept = |number: &u64| cache.read(extent(*number)) == Some(bytes(*number));
        (0..20).filter(is_kept).collect()
    }

    // Promises: status-counters, disk-once
    #[test]
    fn inserted_span_is_readable_at_once_and_after_reopen() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let cache = open(&cache_dir, "a");
        for number in 0..10 {
            cache.insert(extent(number), bytes(number), QueueTimeout::NoWait);
            assert_eq!(cache.read(extent(number)), Some(bytes(number)));
        }
        drop(cache);
        let cache = open(&cache_dir, "a");
        assert_eq!(kept(&cache), (0..10).collect::<Vec<_>>());
        assert_eq!(cache.problem_text(), None);
        let expected = DiskCacheUsage {
            held_bytes: 10 * SPAN,
            all_bytes: 10 * SPAN,
            limit_bytes: 100 * SPAN + cache_dir::SPACE_MARGIN_BYTES,
        };
        assert_eq!(cache.disk_usage(), expected);
    }

    // Promises: disk-zeros
    #[test]
    fn zero_runs_take_no_disk_and_are_read_as_zeros() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let cache = open(&cache_dir, "a");
        let run = |from: u64, to: u64| {
            Extent::new(Plain(from * SPAN + 100), Plain(to * SPAN - 100)).expect("in order")
        };
        let part = |from, to, zeros: Option<Extent<Plain>>| {
            let whole = Extent::new(Plain(from * SPAN), Plain(to * SPAN)).expect("in order");
            SparseExtent::new(whole, zeros)
        };
        let content = |part: &SparseExtent| {
            let mut bytes = vec![7; usize::try_from(part.extent().len()).expect("small")];
            part.fill_zeros(&mut bytes);
            Bytes::from(bytes)
        };
        let zeros = SparseExtent::new(extent(0), [extent(0)]);
        let mixed = part(1, 5, Some(run(2, 4)));
        // Nothing that another process wrote in place of zeros is read.
        cache.insert(extent(3), bytes(3), QueueTimeout::Never);
        cache.flush();
        let before = cache.disk_usage().held_bytes;
        for part in [&zeros, &mixed] {
            cache.insert(part.clone(), content(part), QueueTimeout::Never);
        }
        cache.flush();
        let more = cache.disk_usage().held_bytes - before;
        assert!((2 * SPAN..=2 * SPAN + 8192).contains(&more), "{more}");
        // The zeros at the end are past the end of the file.
        let end = part(100, 104, Some(run(101, 105)));
        cache.insert(end.clone(), content(&end), QueueTimeout::Never);
        drop(cache);
        let cache = open(&cache_dir, "a");
        for part in [&zeros, &mixed, &end] {
            assert!(cache.covers(part));
            assert_eq!(cache.read(part.clone()), Some(content(part)));
            let read = cache.read_part(part, Wait::ForDisk);
            assert_eq!(read, Some(content(part)));
            assert!(!cache.covers(&SparseExtent::new(part.extent(), [])) || part == &mixed);
        }
        let hole = SparseExtent::from(extent(50));
        assert!(!cache.covers(&hole));
        assert_eq!(cache.read(hole), None);
    }

    // Promises: disk-zeros
    #[test]
    fn first_writes_measure_the_speed_of_reads() {
        let directory = directory();
        let cache = open(&cache_dir(directory.path(), 100), "a");
        assert_eq!(cache.read_rate(), None);
        want(&cache, [0]);
        assert!(cache.read_rate() > Some(0));
    }

    // Promises: disk-eviction
    #[test]
    fn least_recently_read_span_is_evicted_for_a_new_read() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 4);
        let cache = open(&cache_dir, "a");
        want(&cache, 0..4);
        cache.mark_used(extent(0));
        want(&cache, 4..6);
        assert_eq!(kept(&cache), [0, 3, 4, 5]);
        assert_eq!(cache.disk_usage().held_bytes, 4 * SPAN);
        assert!(cache.problem_text().is_some());
        assert_eq!(evicted_bytes(&cache), 2 * SPAN);
        drop(cache);
        // Spans of an earlier mount count as older than any use since.
        let cache = open(&cache_dir, "a");
        cache.mark_used(extent(0));
        want(&cache, [8]);
        assert_eq!(kept(&cache), [0, 4, 5, 8]);
        want(&cache, [9, 10, 11]);
        assert_eq!(kept(&cache), [8, 9, 10, 11]);
    }

    // Promises: disk-eviction
    #[test]
    fn scanned_span_evicts_nothing_when_cache_is_full() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 4);
        let cache = open(&cache_dir, "a");
        for number in 0..6 {
            cache.insert(extent(number), bytes(number), QueueTimeout::Never);
        }
        cache.flush();
        assert_eq!(kept(&cache), [0, 1, 2, 3]);
        let problems = cache.problem_text().expect("no room");
        assert!(problems.contains("1114112 bytes"), "{problems}");
    }

    // Promises: disk-eviction
    #[test]
    fn unused_archives_are_evicted_first_in_lru_order() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 6);
        for (content, minutes) in [("old", 2), ("older", 3), ("new", 1)] {
            let cache = open(&cache_dir, content);
            want(&cache, 0..2);
            let file = Arc::clone(&cache.shared.current.lock().file);
            drop(cache);
            file.set_last_used(SystemTime::now() - Duration::from_mins(minutes));
        }
        let cache = open(&cache_dir, "a");
        want(&cache, 0..3);
        assert_eq!(kept(&cache), [0, 1, 2]);
        assert_eq!(cache.problem_text(), None);
        assert!(!directory.path().join("disk-cache/older.data").exists());
        assert_eq!(kept(&open(&cache_dir, "old")), [1]);
        assert_eq!(kept(&open(&cache_dir, "new")), [0, 1]);
        assert_eq!(evicted_bytes(&cache), 3 * SPAN);
    }

    // Promises: disk-eviction
    #[test]
    fn archives_in_use_share_the_disk_limit() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 8);
        let first = open(&cache_dir, "first");
        want(&first, 0..8);
        let second = open(&cache_dir, "second");
        want(&second, 0..10);
        assert_eq!(kept(&second), [6, 7, 8, 9]);
        assert_eq!(kept(&first), [4, 5, 6, 7]);
        want(&first, 10..16);
        assert_eq!(kept(&second), [6, 7, 8, 9]);
        assert_eq!(kept(&first), [12, 13, 14, 15]);
        assert_eq!(first.disk_usage().all_bytes, 8 * SPAN);
        assert_eq!([&first, &second].map(evicted_bytes), [6 * SPAN, 10 * SPAN]);
    }

    // Promises: disk-damaged
    #[test]
    fn two_openers_of_one_archive_share_its_cache_file() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 8);
        let caches = [open(&cache_dir, "a"), open(&cache_dir, "a")];
        want(&caches[0], 0..4);
        want(&caches[1], 2..6);
        for cache in &caches {
            assert_eq!(kept(cache), (0..6).collect::<Vec<_>>());
        }
        want(&caches[0], 10..16);
        for cache in &caches {
            assert_eq!(kept(cache).len(), 8);
            assert_eq!(cache.disk_usage().held_bytes, 8 * SPAN);
        }
    }

    // Promises: disk-no-ranges
    #[test]
    fn only_copy_stays_whole_while_in_use() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 4);
        let copy = DiskCache::create(cache_dir.clone(), only_copy()).expect("a disk cache");
        for number in 0..3 {
            copy.insert(extent(number), bytes(number), QueueTimeout::Never);
        }
        copy.flush();
        let other = open(&cache_dir, "other");
        want(&other, 0..3);
        assert_eq!(kept(&other), [2]);
        copy.publish("a").expect("renamed");
        want(&other, 3..6);
        assert_eq!(kept(&other), [5]);
        assert_eq!(kept(&copy), [0, 1, 2]);
        copy.insert(extent(9), bytes(9), QueueTimeout::Never);
        copy.flush();
        assert!(copy.problem_text().is_some(), "not at its own expense");
        assert_eq!(kept(&copy), [0, 1, 2]);
        drop(copy);
        want(&other, 6..8);
        assert_eq!(kept(&other), [5, 6, 7], "all of it goes at once");
    }

    // Promises: disk-limit
    #[test]
    fn lowered_limit_is_enforced_on_open() {
        let directory = directory();
        want(&open(&cache_dir(directory.path(), 10), "a"), 0..10);
        let cache = open(&cache_dir(directory.path(), 3), "a");
        want(&cache, []);
        drop(cache);
        let cache = open(&cache_dir(directory.path(), 3), "a");
        assert_eq!(kept(&cache), [7, 8, 9]);
    }

    #[test]
    fn only_published_nonempty_cache_file_survives_drop() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 10);
        let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
        want(&cache, [0]);
        drop(cache);
        drop(open(&cache_dir, "empty"));
        assert!(cache_dir.files().is_empty());

        let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
        want(&cache, [0]);
        cache.publish("known").expect("renamed");
        want(&cache, [1]);
        drop(cache);
        assert_eq!(kept(&open(&cache_dir, "known")), [0, 1]);
    }

    #[test]
    fn publish_keeps_the_fuller_of_two_cache_files() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let made = |spans| {
            let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
            want(&cache, 0..spans);
            cache
        };
        let (less, more, least) = (made(2), made(5), made(1));
        for cache in [&less, &more, &least] {
            cache.publish("a").expect("renamed");
        }
        assert_eq!(kept(&least), [0, 1, 2, 3, 4], "the other one is better");
        // A cache whose file was replaced switches to the new file at its next write.
        want(&less, [7]);
        for cache in [&less, &more, &least] {
            assert_eq!(kept(cache), [0, 1, 2, 3, 4, 7]);
        }
        assert_eq!(cache_dir.files().len(), 1);
    }

    // Promises: disk-damaged
    #[test]
    fn deleted_disk_cache_file_is_recreated_on_write() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let cache = open(&cache_dir, "a");
        want(&cache, 0..2);
        std::fs::remove_file(directory.path().join("disk-cache/a.data")).expect("there");
        assert_eq!(kept(&cache), [0, 1], "still open");
        want(&cache, 2..4);
        drop(cache);
        assert_eq!(kept(&open(&cache_dir, "a")), [2, 3]);
    }

    // Promises: archives-memory
    #[test]
    fn disk_caches_share_the_memory_of_queued_spans() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let options = DiskCacheOptions {
            write_pool: BufferPool::new(4 * SPAN),
            ..options()
        };
        let open = |content| DiskCache::open(cache_dir.clone(), content, options.clone());
        let caches = ["a", "b"].map(|content| open(content).expect("a disk cache"));
        let lock = cache_dir.lock_for_write().expect("no one writes");
        for number in 0..3 {
            for cache in &caches {
                cache.insert(extent(number), bytes(number), QueueTimeout::NoWait);
            }
        }
        assert_eq!(options.write_pool.used_bytes(), 4 * SPAN);
        assert_eq!(options.stats.disk_cache_skipped_spans.get(), 2);
        drop(lock);
        for cache in &caches {
            cache.flush();
            cache.insert(extent(2), bytes(2), QueueTimeout::Never);
            cache.flush();
            assert_eq!(kept(cache), [0, 1, 2]);
        }
        drop(caches);
        assert_eq!(options.write_pool.used_bytes(), 0);
    }

    // Promises: disk-slow
    #[test]
    fn write_lock_timeout_skips_all_pending_spans() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let cache = open(&cache_dir, "a");
        want(&cache, [0]);
        let lock = cache_dir.lock_for_write().expect("no one writes");
        for number in 1..9 {
            cache.insert_evicting(extent(number), bytes(number), QueueTimeout::NoWait);
        }
        let skipped = &cache.shared.options.stats.disk_cache_skipped_spans;
        while skipped.get() == 0 {
            std::thread::yield_now();
        }
        drop(lock);
        cache.flush();
        assert_eq!(skipped.get(), 8);
        want(&cache, [9]);
        assert_eq!(kept(&cache), [0, 9]);
    }

    // Promises: disk-damaged
    #[test]
    fn unfinished_files_of_dead_processes_are_removed() {
        let directory = directory();
        let cache_dir = cache_dir(directory.path(), 100);
        let living = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
        want(&living, [0]);
        std::fs::write(directory.path().join("disk-cache/.1-0.data"), b"left").expect("written");
        drop(open(&cache_dir, "a"));
        assert!(!directory.path().join("disk-cache/.1-0.data").exists());
        living.publish("b").expect("still there");
        assert_eq!(kept(&living), [0]);
    }
}
