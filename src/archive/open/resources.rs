//! Memory and threads of an open archive, or of several layers that form one tree.
//!
//! All layers of a tree share one budget. Their spans share one cache, and their reads reserve
//! memory from one pool. So a layer that is read more gets more of both. A fixed share for each
//! layer would leave most memory to layers without reads.

use std::io;
use std::sync::Arc;

use crate::archive::options::OpenOptions;
use crate::archive::read::priority::ReadPriority;
use crate::archive::scan::options::MIN_MEMORY;
use crate::base::buffer_pool::BufferPool;
use crate::base::free_list::FreeList;
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::thread_pool::ThreadPool;
use crate::cache::SpanCache;

/// Number of threads for reads that miss memory.
///
/// They mostly wait for the network. More threads would only compete for the processors.
const READ_THREADS: usize = 4;

/// Divisor of the memory that gives the size of the free list.
///
/// By default it holds three spans of the usual length, or their packed bytes.
pub(super) const FREE_LIST_DIVISOR: u64 = 8;

/// Memory budgets and their shares.
#[derive(Clone, Debug)]
pub(super) struct MemoryBudgets {
    /// Cached spans.
    pub(crate) span_cache: SpanCache,
    /// Memory that reads hold while they decode.
    pub(crate) budget: BufferPool,
    /// Additional memory of their decoders.
    pub(crate) broker: MemoryBroker,
    /// Reads that are filling spans.
    pub(crate) read_priority: Arc<ReadPriority>,
    /// Total memory, in bytes.
    pub(crate) memory_bytes: u64,
}

impl MemoryBudgets {
    /// Creates the budgets that `options` define.
    pub(crate) fn new(options: &OpenOptions) -> Self {
        // Spans get three eighths of the memory, less the disk write queue. Half the memory is for
        // the scan, and later for reads that decode. The last eighth is the free list. Overhead of
        // the allocator, and a span's memory beyond its length, are not included.
        let span_bytes = options.scan.memory / 8 * 3;
        let span_cache = SpanCache::new(match options.disk_cache_dir() {
            Some(_) => span_bytes - options.queue_bytes(),
            None => span_bytes,
        });
        let budget = BufferPool::new(options.half_memory());
        Self {
            // The span cache is last, because evicted spans must be decoded again.
            broker: MemoryBroker::new(vec![Arc::new(budget.clone()), Arc::new(span_cache.clone())]),
            span_cache,
            budget,
            read_priority: Arc::default(),
            memory_bytes: options.scan.memory.max(MIN_MEMORY),
        }
    }
}

/// Memory and threads that the archives of one tree share.
#[derive(Clone, Debug)]
pub struct SharedResources {
    pub(super) budgets: MemoryBudgets,
    pub(crate) free_list: FreeList,
    pub(crate) workers: Arc<ThreadPool>,
}

impl SharedResources {
    /// Creates the resources that `options` define, for archives that are opened with these
    /// options.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn new(options: &OpenOptions) -> io::Result<Self> {
        Ok(Self {
            budgets: MemoryBudgets::new(options),
            free_list: FreeList::new(options.scan.memory / FREE_LIST_DIVISOR),
            workers: start_read_workers()?,
        })
    }
}

/// Starts the threads for reads.
pub(super) fn start_read_workers() -> io::Result<Arc<ThreadPool>> {
    Ok(Arc::new(ThreadPool::start("tarfs-read", READ_THREADS)?))
}
