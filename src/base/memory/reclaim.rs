//! Memory that buffers and caches lend to decoders. A decoder learns the size of its state (an xz dictionary,
//! a zstd window) only from the stream, and needs it at once. So no memory is reserved for it. Pools and
//! caches lend memory while the decoder lives.

use std::fmt::Debug;
use std::sync::Arc;

use super::budget::DecoderMemory;
use crate::base::sync::{Condvar, Mutex};

/// A user of memory that can release some for a while.
pub trait Reclaim: Send + Sync + Debug {
    /// Maximum bytes that it can lend; never changes.
    fn reclaimable_bytes(&self) -> u64;

    /// Lowers its own limit by up to `bytes` without waiting. Returns the number of lent bytes.
    fn reclaim(&self, bytes: u64) -> u64;

    /// Returns `bytes` that it lent.
    fn restore(&self, bytes: u64);
}

/// Memory that only decoders use.
#[derive(Debug)]
pub(crate) struct Reserve {
    bytes: u64,
    lent: Mutex<u64>,
}

impl Reserve {
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            bytes,
            lent: Mutex::default(),
        }
    }
}

impl Reclaim for Reserve {
    fn reclaimable_bytes(&self) -> u64 {
        self.bytes
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        let mut lent = self.lent.lock();
        let granted = bytes.min(self.bytes - *lent);
        *lent += granted;
        granted
    }

    fn restore(&self, bytes: u64) {
        *self.lent.lock() -= bytes;
    }
}

/// Grants memory to decoders. Clones share one limit.
#[derive(Clone, Debug)]
pub struct MemoryBroker {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    limit_bytes: u64,
    /// How the limit follows from the user's memory.
    origin: Option<DecoderMemory>,
    reclaimers: Vec<Arc<dyn Reclaim>>,
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    granted: u64,
    largest_need: u64,
    is_closed: bool,
}

/// The pool or broker was closed, because no caller needs the memory any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cancelled while waiting for memory")]
pub struct Closed;

/// Error of [`MemoryBroker::grant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantError {
    /// More than [`MemoryBroker::limit_bytes`].
    #[error("more than the memory limit")]
    OverLimit,
    /// See [`MemoryBroker::close`].
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl MemoryBroker {
    /// Creates a broker that reclaims memory from the `reclaimers`, in order.
    pub fn new(reclaimers: Vec<Arc<dyn Reclaim>>) -> Self {
        Self::start(u64::MAX, None, reclaimers)
    }

    /// As [`MemoryBroker::new`], with a limit that follows from the user's memory, and is at most `max_bytes`.
    pub(crate) fn for_archive(
        origin: DecoderMemory,
        max_bytes: u64,
        reclaimers: Vec<Arc<dyn Reclaim>>,
    ) -> Self {
        Self::start(max_bytes, Some(origin), reclaimers)
    }

    /// Creates a broker of `limit_bytes` that reclaims from no one.
    pub fn with_limit(limit_bytes: u64) -> Self {
        let shared = Shared {
            limit_bytes,
            ..Shared::default()
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn start(
        max_bytes: u64,
        origin: Option<DecoderMemory>,
        reclaimers: Vec<Arc<dyn Reclaim>>,
    ) -> Self {
        let all = reclaimers.iter();
        let all = all.map(|reclaimer| reclaimer.reclaimable_bytes()).sum();
        let shared = Arc::new(Shared {
            limit_bytes: max_bytes.min(all),
            origin,
            reclaimers,
            state: Mutex::default(),
            released: Condvar::default(),
        });
        Self { shared }
    }

    /// Maximum bytes granted at once.
    pub fn limit_bytes(&self) -> u64 {
        self.shared.limit_bytes
    }

    /// The user's memory with which `bytes` can be granted, if it is known.
    pub fn sufficient_memory(&self, bytes: u64) -> Option<u64> {
        self.shared.origin?.sufficient_for(bytes)
    }

    /// Bytes granted now.
    pub fn granted_bytes(&self) -> u64 {
        self.shared.state.lock().granted
    }

    /// Notes that a decoder has a state of `bytes`, which another broker may have to grant.
    pub fn record_need(&self, bytes: u64) {
        let mut state = self.shared.state.lock();
        state.largest_need = state.largest_need.max(bytes);
    }

    /// The largest state that was noted.
    pub fn largest_need(&self) -> u64 {
        self.shared.state.lock().largest_need
    }

    /// Grants `bytes` within the limit, or waits. A grant's owner must not wait for a thread that wants one.
    ///
    /// # Errors
    /// [`GrantError::OverLimit`] if `bytes` alone exceed the limit. [`GrantError::Closed`] if the broker is
    /// [closed](MemoryBroker::close), even during the wait.
    pub fn grant(&self, bytes: u64) -> Result<MemoryGrant, GrantError> {
        let room = self.shared.limit_bytes.checked_sub(bytes);
        let room = room.ok_or(GrantError::OverLimit)?;
        let mut state = self.shared.state.lock();
        while state.granted > room && !state.is_closed {
            state = self.shared.released.wait(state);
        }
        if state.is_closed {
            return Err(Closed.into());
        }
        state.granted += bytes;
        let mut parts = Vec::new();
        let mut missing = bytes;
        for reclaimer in &self.shared.reclaimers {
            let part = reclaimer.reclaim(missing).min(missing);
            if part > 0 {
                parts.push((Arc::clone(reclaimer), part));
                missing -= part;
            }
        }
        drop(state);
        Ok(MemoryGrant {
            bytes,
            parts,
            shared: Arc::clone(&self.shared),
        })
    }

    /// Fails every current and later wait in [`MemoryBroker::grant`].
    pub fn close(&self) {
        self.shared.state.lock().is_closed = true;
        self.shared.released.notify_all();
    }
}

/// Granted memory; returned to its reclaimers when dropped.
#[derive(Debug)]
pub struct MemoryGrant {
    bytes: u64,
    parts: Vec<(Arc<dyn Reclaim>, u64)>,
    shared: Arc<Shared>,
}

impl Drop for MemoryGrant {
    fn drop(&mut self) {
        for (reclaimer, part) in &self.parts {
            reclaimer.restore(*part);
        }
        self.shared.state.lock().granted -= self.bytes;
        self.shared.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Memory to reclaim: what is left, and the initial amount.
    #[derive(Debug)]
    struct TestMemory(AtomicU64, u64);

    impl Reclaim for TestMemory {
        fn reclaimable_bytes(&self) -> u64 {
            self.1
        }

        fn reclaim(&self, bytes: u64) -> u64 {
            let part = self.0.load(Ordering::Relaxed).min(bytes);
            self.0.fetch_sub(part, Ordering::Relaxed);
            part
        }

        fn restore(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn memories(contents: [u64; 2]) -> (Vec<Arc<TestMemory>>, MemoryBroker) {
        let memories = contents.map(|bytes| Arc::new(TestMemory(AtomicU64::new(bytes), bytes)));
        let reclaimers = memories
            .iter()
            .map(|memory| Arc::clone(memory) as Arc<dyn Reclaim>);
        let broker = MemoryBroker::new(reclaimers.collect());
        (memories.to_vec(), broker)
    }

    fn left(memories: &[Arc<TestMemory>]) -> Vec<u64> {
        let left = memories
            .iter()
            .map(|memory| memory.0.load(Ordering::Relaxed));
        left.collect()
    }

    // Promises: status-counters
    #[test]
    fn memory_is_reclaimed_in_order_and_restored() {
        let (memories, broker) = memories([10, 20]);
        let small = broker.grant(4);
        assert_eq!(left(&memories), [6, 20]);
        let large = broker.grant(16);
        assert_eq!(left(&memories), [0, 10]);
        assert_eq!(broker.granted_bytes(), 20);
        drop(small);
        assert_eq!(left(&memories), [4, 10]);
        assert_eq!(broker.granted_bytes(), 16);
        drop(large);
        assert_eq!(left(&memories), [10, 20]);
    }

    #[test]
    fn grants_never_exceed_the_limit() {
        let (memories, broker) = memories([10, 20]);
        assert!(broker.grant(31).is_err());
        assert!(broker.grant(u64::MAX).is_err());
        let held = broker.grant(25);
        assert!(held.is_ok());
        assert!(broker.grant(5).is_ok());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| broker.grant(6).is_ok());
            drop(held);
            assert_eq!(waiter.join().ok(), Some(true));
        });
        assert!(broker.grant(30).is_ok());
        assert_eq!(left(&memories), [10, 20]);
    }

    // Promises: unmount-quick
    #[test]
    fn close_ends_a_wait_for_a_grant() {
        let broker = MemoryBroker::with_limit(10);
        let _held = broker.grant(10);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| broker.grant(1).map(drop));
            broker.close();
            let waited = waiter.join().expect("no panic");
            assert_eq!(waited, Err(GrantError::Closed(Closed)));
        });
        assert_eq!(broker.grant(11).map(drop), Err(GrantError::OverLimit));
    }
}
