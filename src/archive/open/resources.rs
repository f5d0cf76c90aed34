//! Memory and threads of an open archive, or of several layers that form one tree.
//! All layers share one budget, because fixed shares would leave most memory to layers without reads.

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

/// Threads for reads that miss memory. They mostly wait for the network, and more compete for processors.
const READ_THREADS: usize = 4;

/// Divisor of the memory that gives the size of the free list, by default three spans or their packed bytes.
pub(super) const FREE_LIST_DIVISOR: u64 = 8;

#[derive(Clone, Debug)]
pub(super) struct MemoryBudgets {
    pub(crate) span_cache: SpanCache,
    pub(crate) budget: BufferPool,
    pub(crate) broker: MemoryBroker,
    pub(crate) read_priority: Arc<ReadPriority>,
    pub(crate) memory_bytes: u64,
}

impl MemoryBudgets {
    pub(crate) fn new(options: &OpenOptions) -> Self {
        // Three eighths for spans, less the disk write queue; half for the scan, later for decoding reads;
        // one eighth for the free list. Excludes allocator overhead and a span's memory beyond its length.
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

#[derive(Clone, Debug)]
pub(crate) struct SharedResources {
    pub(super) budgets: MemoryBudgets,
    pub(crate) free_list: FreeList,
    pub(crate) read_threads: Arc<ThreadPool>,
}

impl SharedResources {
    /// Creates the resources for archives opened with `options`. Fails if the system cannot start a thread.
    pub(crate) fn new(options: &OpenOptions) -> io::Result<Self> {
        Ok(Self {
            budgets: MemoryBudgets::new(options),
            free_list: FreeList::new(options.scan.memory / FREE_LIST_DIVISOR),
            read_threads: start_read_threads()?,
        })
    }
}

pub(super) fn start_read_threads() -> io::Result<Arc<ThreadPool>> {
    Ok(Arc::new(ThreadPool::start("tarfs-read", READ_THREADS)?))
}
