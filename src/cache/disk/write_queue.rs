//! Queue of spans to be written to a disk cache. All queues of a mount share one limit in bytes.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::sparse_extent::SparseExtent;
use super::valued_extents::value;
use crate::base::buffer_pool::{BufferPool, Reservation};
use crate::base::extent::{Extent, Plain};
use crate::base::sync::{Condvar, Mutex};

#[derive(Debug)]
pub(super) struct WriteQueue {
    /// Memory of the queued items of all queues that have this pool.
    pool: BufferPool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Debug)]
pub(super) struct PendingWrite {
    pub(super) sparse: SparseExtent,
    pub(super) bytes: Bytes,
    pub(super) may_evict: bool,
    /// Number of reads of it so far.
    pub(super) reads: u32,
    /// Whether it was skipped before.
    pub(super) is_retry: bool,
    /// Memory of a queued item.
    pub(super) reserved: Option<Arc<Reservation>>,
}

impl PendingWrite {
    pub(super) fn new(sparse: SparseExtent, bytes: Bytes) -> Self {
        Self {
            sparse,
            bytes,
            may_evict: false,
            reads: 0,
            is_retry: false,
            reserved: None,
        }
    }
}

/// Timeout of a push to a full queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueTimeout {
    /// Does not wait.
    NoWait,
    /// Waits up to this long.
    UpTo(Duration),
    /// Waits a second, unless the last push timed out because of a slow writer.
    Short,
    /// Waits as long as the writer takes.
    Unlimited,
}

const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) waiting: VecDeque<PendingWrite>,
    writing: Option<PendingWrite>,
    /// Whether a push timed out, and none succeeded since.
    is_slow: bool,
    is_closed: bool,
}

impl State {
    /// Counts a read of the bytes at `extent`. False if they do not wait.
    pub(super) fn count_read(&mut self, extent: Extent<Plain>) -> bool {
        let mut waiting = self.waiting.iter_mut();
        let item = waiting.find(|item| item.sparse.extent() == extent);
        item.map(|item| item.reads = item.reads.saturating_add(1))
            .is_some()
    }

    /// Removes the most valuable item, the first of several.
    pub(super) fn take_most_valuable(&mut self) -> Option<PendingWrite> {
        let value = |item: &PendingWrite| value(item.sparse.cost(), item.reads);
        let items = self.waiting.iter().enumerate().rev();
        let (place, _) = items.max_by_key(|(_, item)| value(item))?;
        self.waiting.remove(place)
    }
}

impl WriteQueue {
    /// Creates a queue of items that fit in `pool`, or of a single longer one.
    pub(super) fn new(pool: BufferPool) -> Self {
        Self {
            pool,
            state: Mutex::default(),
            changed: Condvar::default(),
        }
    }

    /// Queues `item`; false if there is no room within the timeout.
    pub(super) fn push(&self, mut item: PendingWrite, timeout: QueueTimeout) -> bool {
        let timeout = match timeout {
            QueueTimeout::NoWait => Duration::ZERO,
            QueueTimeout::UpTo(limit) => limit,
            QueueTimeout::Short if self.state.lock().is_slow => Duration::ZERO,
            QueueTimeout::Short => SHORT_TIMEOUT,
            QueueTimeout::Unlimited => Duration::MAX,
        };
        // Without the lock, because the writer needs it to free room.
        let len = item.bytes.len() as u64;
        let reserved = self.pool.reserve_within(len, timeout).map(Arc::new);
        let mut state = self.state.lock();
        if reserved.is_none() || state.is_closed {
            state.is_slow |= !timeout.is_zero();
            return false;
        }
        item.reserved = reserved;
        state.is_slow = false;
        state.waiting.push_back(item);
        drop(state);
        self.changed.notify_all();
        true
    }

    pub(super) fn is_half_full(&self) -> bool {
        self.pool.used_bytes() > self.pool.budget() / 2
    }

    pub(super) fn has_backlog(&self) -> bool {
        !self.state.lock().waiting.is_empty()
    }

    /// Counts a read of the bytes at `extent`, which are then written earlier. False if they do not wait.
    pub(super) fn count_read(&self, extent: Extent<Plain>) -> bool {
        self.state.lock().count_read(extent)
    }

    /// Waits for the next item, on the writer thread. `None` when the queue is closed and empty.
    pub(super) fn next(&self) -> Option<PendingWrite> {
        let mut state = self.state.lock();
        loop {
            if state.writing.take().is_some() {
                self.changed.notify_all();
            }
            if let Some(item) = state.take_most_valuable() {
                state.writing = Some(item.clone());
                return Some(item);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state);
        }
    }

    pub(super) fn find(&self, extent: Extent<Plain>) -> Option<Bytes> {
        let state = self.state.lock();
        let mut items = state.waiting.iter().chain(&state.writing);
        let found = items.find(|item| item.sparse.extent() == extent)?;
        Some(found.bytes.clone())
    }

    pub(super) fn find_part(&self, part: Extent<Plain>) -> Option<Bytes> {
        let state = self.state.lock();
        let mut items = state.waiting.iter().chain(&state.writing);
        let has_part =
            |item: &&PendingWrite| item.sparse.extent().intersection(&part) == Some(part);
        let item = items.find(has_part)?;
        let start = usize::try_from(part.start().0 - item.sparse.extent().start().0).ok()?;
        let end = start.checked_add(usize::try_from(part.len()).ok()?)?;
        (end <= item.bytes.len()).then(|| item.bytes.slice(start..end))
    }

    pub(super) fn cancel_waiting(&self) -> VecDeque<PendingWrite> {
        let mut state = self.state.lock();
        let cancelled = mem::take(&mut state.waiting);
        self.changed.notify_all();
        cancelled
    }

    pub(super) fn wait_until_empty(&self) {
        let mut state = self.state.lock();
        while !state.waiting.is_empty() || state.writing.is_some() {
            state = self.changed.wait(state);
        }
    }

    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn item(start: u64, len: usize) -> PendingWrite {
        let extent = Extent::with_len(Plain(start), len as u64);
        PendingWrite::new(extent.into(), vec![0; len].into())
    }

    // Promises: archives-memory, disk-slow
    #[test]
    fn write_queue_accepts_its_limit_or_one_longer_item() {
        let queue = WriteQueue::new(BufferPool::new(10));
        assert!(queue.push(item(0, 6), QueueTimeout::NoWait));
        assert!(!queue.push(item(6, 5), QueueTimeout::NoWait));
        assert!(queue.push(item(6, 4), QueueTimeout::NoWait));
        assert!(queue.find(item(6, 4).sparse.extent()).is_some());
        for _ in 0..2 {
            assert!(queue.next().is_some());
        }
        assert!(
            !queue.push(item(20, 100), QueueTimeout::NoWait),
            "one is written"
        );
        assert!(queue.find(item(6, 4).sparse.extent()).is_some());
        queue.close();
        assert!(queue.next().is_none());
        assert!(queue.find(item(6, 4).sparse.extent()).is_none());
        assert!(!queue.push(item(20, 1), QueueTimeout::Unlimited), "closed");

        let queue = WriteQueue::new(BufferPool::new(10));
        assert!(queue.push(item(20, 100), QueueTimeout::NoWait));
    }

    // Promises: disk-slow
    #[test]
    fn most_valuable_item_is_written_next() {
        let queue = WriteQueue::new(BufferPool::new(100));
        for (start, cost, reads) in [(0, 1, 0), (10, 5, 0), (20, 1, 1), (30, 5, 0), (40, 1, 0)] {
            let item = item(start, 10);
            let sparse = item.sparse.clone().with_cost(cost);
            let item = PendingWrite {
                sparse,
                reads,
                ..item
            };
            assert!(queue.push(item, QueueTimeout::NoWait));
        }
        let extent = |start| Extent::with_len(Plain(start), 10);
        for start in [40, 40, 45] {
            assert_eq!(queue.count_read(extent(start)), start == 40);
        }
        queue.close();
        let order = std::iter::from_fn(|| queue.next());
        let starts: Vec<_> = order.map(|item| item.sparse.extent().start().0).collect();
        assert_eq!(starts, [40, 20, 10, 30, 0]);
    }

    // Promises: disk-slow
    #[test]
    fn push_waits_for_capacity_until_its_timeout() {
        let queue = WriteQueue::new(BufferPool::new(10));
        assert!(queue.push(item(0, 10), QueueTimeout::NoWait));
        let (limit, start) = (Duration::from_millis(20), Instant::now());
        assert!(!queue.push(item(10, 10), QueueTimeout::UpTo(limit)));
        assert!(limit <= start.elapsed(), "it waits");
        std::thread::scope(|scope| {
            // `UpTo` ignores `is_slow`, because a disk that was slow once may still be fast enough.
            assert!(queue.state.lock().is_slow);
            let pushed =
                scope.spawn(|| queue.push(item(10, 10), QueueTimeout::UpTo(SHORT_TIMEOUT * 60)));
            // Give the push time to find the queue full, because it would fail then without a wait.
            std::thread::sleep(Duration::from_millis(50));
            assert!(!pushed.is_finished(), "it waits");
            assert!(queue.next().is_some(), "the first");
            assert!(queue.next().is_some(), "the second");
            assert_eq!(pushed.join().ok(), Some(true));
        });
    }

    #[test]
    fn cancelled_items_free_capacity_except_the_one_being_written() {
        let queue = WriteQueue::new(BufferPool::new(10));
        for start in [0, 5] {
            assert!(queue.push(item(start, 5), QueueTimeout::NoWait));
        }
        assert!(queue.next().is_some());
        assert_eq!(queue.cancel_waiting().len(), 1);
        assert_eq!(queue.pool.used_bytes(), 5);
        assert!(queue.find(item(0, 5).sparse.extent()).is_some());
        assert!(queue.find(item(5, 5).sparse.extent()).is_none());
        assert!(!queue.push(item(20, 6), QueueTimeout::NoWait));
        assert!(queue.push(item(20, 5), QueueTimeout::NoWait));
    }

    // Promises: disk-slow
    #[test]
    fn timed_out_push_does_not_wait_again_until_there_is_capacity() {
        let queue = WriteQueue::new(BufferPool::new(10));
        assert!(queue.push(item(0, 10), QueueTimeout::Short));
        assert!(!queue.push(item(10, 10), QueueTimeout::Short));
        assert!(queue.state.lock().is_slow);
        assert!(!queue.push(item(10, 10), QueueTimeout::Short));
        assert!(queue.next().is_some());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| queue.next().is_some() && queue.next().is_none());
            assert!(queue.push(item(10, 10), QueueTimeout::Unlimited));
            assert!(!queue.state.lock().is_slow);
            queue.wait_until_empty();
            assert_eq!(queue.pool.used_bytes(), 0);
            queue.close();
            assert_eq!(writer.join().ok(), Some(true));
        });
    }
}
