//! Memory and threads of an archive that is open, or of several that are one tree together.
//!
//! Archives of one tree have one budget: spans of all lie in one cache, whoever reads reserves from
//! one pool, and who is read more has more of either. A part for each would leave most of the memory
//! with layers that nobody reads.

use std::io;
use std::sync::Arc;

use super::open::{DiskCacheMode, OpenOptions};
use super::priority::ReadPriority;
use super::scan;
use crate::base::buffer_pool::BufferPool;
use crate::base::free_list::FreeList;
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::thread_pool::ThreadPool;
use crate::cache::{DiskCacheDir, SpanCache};

/// Threads that answer reads whose bytes are not in memory: they mostly wait for the network, and
/// more would only decode against each other.
const READ_THREADS: usize = 4;

/// One part in so many of the memory may rest between one span and the next: at the default three
/// spans of the usual length, or their packed bytes.
pub(super) const FREE_LIST_DIVISOR: u64 = 8;

/// Memory, and who has how much of it.
#[derive(Clone, Debug)]
pub(super) struct MemoryBudgets {
    /// Decoded spans.
    pub(super) span_cache: SpanCache,
    /// What reads hold while they decode.
    pub(super) budget: BufferPool,
    /// What their decoders need besides.
    pub(super) broker: MemoryBroker,
    /// Reads that make spans.
    pub(super) read_priority: Arc<ReadPriority>,
    /// All of that together.
    pub(super) memory_bytes: u64,
}

impl MemoryBudgets {
    /// The memory that `options` say.
    pub(super) fn new(options: &OpenOptions) -> Self {
        let span_cache = new_span_cache(options);
        let budget = BufferPool::new(half_memory(options));
        Self {
            // Kept spans last: they would have to be decoded again.
            broker: MemoryBroker::new(vec![Arc::new(budget.clone()), Arc::new(span_cache.clone())]),
            span_cache,
            budget,
            read_priority: Arc::default(),
            memory_bytes: options.scan.memory.max(scan::MIN_MEMORY),
        }
    }
}

/// What archives of one tree have together.
#[derive(Clone, Debug)]
pub struct SharedResources {
    pub(super) budgets: MemoryBudgets,
    pub(super) free_list: FreeList,
    pub(super) workers: Arc<ThreadPool>,
}

impl SharedResources {
    /// The memory that `options` say, for archives opened with these.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub fn new(options: &OpenOptions) -> io::Result<Self> {
        Ok(Self {
            budgets: MemoryBudgets::new(options),
            free_list: FreeList::new(options.scan.memory / FREE_LIST_DIVISOR),
            workers: start_read_workers()?,
        })
    }
}

/// Threads for reads.
pub(super) fn start_read_workers() -> io::Result<Arc<ThreadPool>> {
    Ok(Arc::new(ThreadPool::start("tarfs-read", READ_THREADS)?))
}

/// Room for decoded spans: three eighths of the memory, less what waits to be written to disk.
/// Half is a scan's, and later what reads hold while they decode; the last eighth is memory at
/// rest. What the allocator has besides, and a span's memory beyond its length, comes on top.
fn new_span_cache(options: &OpenOptions) -> SpanCache {
    let spans = options.scan.memory / 8 * 3;
    SpanCache::new(match disk_cache_dir(options) {
        Some(_) => spans - queue_bytes(options),
        None => spans,
    })
}

/// What may wait to be written to disk.
pub(super) fn queue_bytes(options: &OpenOptions) -> u64 {
    options.scan.memory / 16
}

/// Half the memory, which buffers and decoders have while the archive is read.
pub(super) fn half_memory(options: &OpenOptions) -> u64 {
    options.scan.memory.max(scan::MIN_MEMORY) / 2
}

/// Where disk caches lie; `None` when none are wanted, or there is nowhere to put them.
pub(super) fn disk_cache_dir(options: &OpenOptions) -> Option<DiskCacheDir> {
    let DiskCacheMode::Enabled { limit_bytes } = options.disk_cache else {
        return None;
    };
    let cache_dir = options.cache_dir.clone()?;
    Some(DiskCacheDir::new(cache_dir, limit_bytes))
}
