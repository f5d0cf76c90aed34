//! Disk cache of decoded spans that cost more to decode again than to read back.
//! Each archive has one sparse file: plain byte *n* is at file offset *n*, and uncached bytes are holes. Runs of
//! zeros that the index proves are neither written nor read. The
//! index has the checksums of each span's blocks, which holes, torn writes and foreign files all fail. So any
//! number of processes may write one file or punch holes into it, and may be killed at any moment.

mod cache_dir;
mod cache_file;
mod direct_io;
mod read_rate;
mod sparse_extent;
mod valued_extents;
mod write_queue;
mod writer;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{FreeList, RecycledBuffer};
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use cache_file::CacheFile;
use valued_extents::ValuedExtents;
use write_queue::{PendingWrite, WriteQueue};

pub use cache_dir::DiskCacheDir;
pub(crate) use cache_dir::{content_key, is_unfinished};
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
    /// The extents on disk, as far as this process knows them. The least valuable is evicted first.
    held: Mutex<ValuedExtents>,
    problems: Mutex<CacheProblems>,
    /// The cost to make a byte of the archive again, relative to others.
    recovery_cost: AtomicU64,
    /// The extents for which the disk was busy. They are made again in this order, because a span without a seek point is
    /// decoded with the one before it.
    skipped: Mutex<ValuedExtents>,
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
            .directory
            .create()
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
        let directory = cache_dir.directory.create();
        let file =
            directory.and_then(|directory| CacheFile::open(&directory, &name, OFlags::CREATE));
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
            held: Mutex::default(),
            problems: Mutex::default(),
            recovery_cost: AtomicU64::new(1),
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

    /// As [`DiskCache::insert`] for a span of so many reads. May evict the least valuable spans.
    pub fn insert_evicting(
        &self,
        extent: impl Into<SparseExtent>,
        bytes: Bytes,
        reads: u32,
        timeout: QueueTimeout,
    ) {
        let item = PendingWrite {
            may_evict: !self.shared.options.is_only_copy,
            reads,
            ..PendingWrite::new(extent.into(), bytes)
        };
        self.push(item, timeout);
    }

    fn push(&self, item: PendingWrite, timeout: QueueTimeout) {
        if self.shared.problems.lock().failure.is_some() || item.sparse.stored_bytes() == 0 {
            return;
        }
        // Its bytes are shared.
        let skipped = item.clone();
        if !self.shared.queue.push(item, timeout) {
            self.shared.record_skipped(&skipped);
        }
    }

    /// Whether spans wait for the disk, or were skipped because it is slow, so that it should [learn](Self::note_read) of
    /// reads from memory.
    pub fn is_behind(&self) -> bool {
        self.shared.queue.has_backlog() || !self.shared.skipped.lock().is_empty()
    }

    /// Notes a read of the span at `extent`, which memory had. If it waits, it is written earlier; if it was skipped and there
    /// is room, it is queued.
    pub fn note_read(
        &self,
        extent: Extent<Plain>,
        bytes: &Bytes,
        sparse: impl FnOnce() -> SparseExtent,
    ) {
        if self.shared.queue.count_read(extent)
            || !self.has_room()
            || !self.shared.skipped.lock().tracks(extent)
        {
            return;
        }
        let sparse = sparse();
        let item = PendingWrite {
            reads: 1,
            ..PendingWrite::new(sparse, bytes.clone())
        };
        if self.shared.queue.push(item, QueueTimeout::NoWait) {
            self.shared.skipped.lock().remove(extent);
        }
    }

    /// Removes and returns up to `max` spans skipped by a slow disk, in this order; none while the disk is full.
    pub fn take_skipped(&self, max: usize) -> Vec<Extent<Plain>> {
        let has_room = self.has_room();
        let mut skipped = self.shared.skipped.lock();
        if !has_room {
            skipped.clear();
        }
        std::iter::from_fn(|| skipped.pop_least_valuable())
            .take(max)
            .collect()
    }

    /// Whether it was neither full nor failed so far.
    fn has_room(&self) -> bool {
        let problems = self.shared.problems.lock();
        problems.failure.is_none() && !problems.is_full
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
    /// they cannot be read, or need the disk with [`Wait::NoWait`].
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

    /// Marks a verified extent as used now. It is then written earlier, and evicted later than others.
    pub fn mark_used(&self, sparse: &SparseExtent) {
        self.shared.queue.count_read(sparse.extent());
        let mut held = self.shared.held.lock();
        held.add(sparse.extent(), sparse.cost(), 1);
        drop(held);
        let mut current = self.shared.current.lock();
        let is_recent = |touch: Instant| touch.elapsed() < TOUCH_INTERVAL;
        if !current.last_touch.is_some_and(is_recent) {
            current.last_touch = Some(Instant::now());
            let file = Arc::clone(&current.file);
            drop(current);
            file.set_last_used(SystemTime::now());
        }
    }

    /// Records what it costs to make a byte of the archive again, relative to others. The disk keeps what costs more.
    pub fn set_recovery_cost(&self, cost: u64) {
        self.shared.recovery_cost.store(cost, Ordering::Relaxed);
        let file = Arc::clone(&self.shared.current.lock().file);
        file.set_recovery_cost(cost);
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
        let found = self.shared.cache_dir.directory.open();
        let other = found.and_then(|directory| CacheFile::open(&directory, &name, OFlags::empty()));
        let fuller = other.ok().filter(|other| {
            !self.shared.options.is_only_copy && other.held_bytes() > ours.held_bytes()
        });
        let file = if let Some(fuller) = fuller {
            ours.remove();
            self.shared.held.lock().clear();
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
    fn read_measured(&self, file: &CacheFile, extent: &SparseExtent) -> Option<RecycledBuffer> {
        let start = Instant::now();
        let memory = file.read(extent, &self.options.free_list)?;
        let (bytes, time) = (extent.stored_bytes(), start.elapsed());
        if bytes > 0 {
            self.options.read_rate.add(bytes, time);
        }
        Some(memory)
    }

    fn record_skipped(&self, item: &PendingWrite) {
        self.options.stats.disk_cache_skipped_spans.increment();
        if !item.is_retry {
            let mut skipped = self.skipped.lock();
            skipped.add(item.sparse.extent(), 0, 0);
        }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
