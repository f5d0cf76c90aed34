//! Memory and threads of an open archive, or of several: the layers of one tree, or those of a directory.
//! All share one budget, because fixed shares would leave most memory to archives without reads.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::archive::prefetch::FillThreads;
use crate::archive::read::priority::ReadPriority;
use crate::base::buffer_pool::{BufferPool, Closed, Reservation};
use crate::base::free_list::FreeList;
use crate::base::memory_budget::{Budget, DecoderMemory, DecoderUse, MemoryShare};
use crate::base::memory_reclaim::{MemoryBroker, Reclaim};
use crate::base::thread_pool::ThreadPool;
use crate::cache::SpanCache;

/// Threads for reads that miss memory. They mostly wait for the network, and more compete for processors.
const READ_THREADS: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct MemoryBudgets {
    pub(crate) span_cache: SpanCache,
    pub(crate) budget: BufferPool,
    pub(crate) broker: MemoryBroker,
    pub(crate) read_priority: Arc<ReadPriority>,
    pub(crate) memory_bytes: u64,
}

impl MemoryBudgets {
    /// The budgets of `parts`, which are a `share` of the user's memory. Decoders can use that of `reserves`, too.
    pub(crate) fn new(parts: Budget, share: MemoryShare, reserves: &[Arc<dyn Reclaim>]) -> Self {
        let span_cache = SpanCache::new(parts.span_bytes());
        let budget = BufferPool::new(parts.half());
        let origin = DecoderMemory {
            share,
            used_by: DecoderUse::Reads,
        };
        let mut reclaimers: Vec<Arc<dyn Reclaim>> = vec![Arc::new(budget.clone())];
        reclaimers.extend(reserves.iter().cloned());
        // The span cache is last, because evicted spans must be decoded again.
        reclaimers.push(Arc::new(span_cache.clone()));
        Self {
            broker: MemoryBroker::for_archive(origin, u64::MAX, reclaimers),
            span_cache,
            budget,
            read_priority: Arc::default(),
            memory_bytes: parts.bytes(),
        }
    }
}

/// Memory and threads that several archives share. Clones are the same resources.
#[derive(Clone, Debug)]
pub struct SharedResources {
    pub(super) budgets: MemoryBudgets,
    pub(crate) free_list: FreeList,
    /// Memory of the disk writes that the archives queue.
    pub(super) write_pool: BufferPool,
    pub(crate) read_threads: Arc<ThreadPool>,
    /// Threads of prefetch, from the first archive on that has prefetch.
    pub(crate) fill_threads: Arc<OnceLock<FillThreads>>,
    /// Memory of the scans that wait for their turn.
    scan_pool: BufferPool,
    /// Number of archives that were opened with them.
    opened: Arc<AtomicU32>,
}

impl SharedResources {
    /// Creates the resources of `parts`, as [`MemoryBudgets::new`] does. Fails if the system cannot start a thread.
    pub(crate) fn new(
        parts: Budget,
        share: MemoryShare,
        reserves: &[Arc<dyn Reclaim>],
    ) -> io::Result<Self> {
        Ok(Self {
            budgets: MemoryBudgets::new(parts, share, reserves),
            free_list: FreeList::new(parts.free_list_bytes()),
            write_pool: BufferPool::new(parts.queue_bytes()),
            read_threads: start_read_threads()?,
            fill_threads: Arc::default(),
            scan_pool: BufferPool::new(parts.half()),
            opened: Arc::default(),
        })
    }

    /// Waits until the scans of other archives leave `bytes`, and returns them for a scan.
    pub(super) fn wait_for_scan_memory(&self, bytes: u64) -> Result<Reservation, Closed> {
        self.scan_pool.reserve(bytes)
    }

    /// Returns a number that no other opened archive has, so that its spans have keys of their own.
    pub(super) fn next_number(&self) -> u32 {
        self.opened.fetch_add(1, Ordering::Relaxed)
    }
}

pub(super) fn start_read_threads() -> io::Result<Arc<ThreadPool>> {
    Ok(Arc::new(ThreadPool::start("tarfs-read", READ_THREADS)?))
}
