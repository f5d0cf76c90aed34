//! Pool of reusable byte buffers with a budget, frozen into shared slices. A buffer's share of the budget
//! returns when the last [`Bytes`] cut from it is dropped. Reuse saves the kernel from zeroing fresh pages
//! for every chunk.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::base::memory::budget::lendable_bytes;
use crate::base::memory::free_list::{self, ALIGNMENT, FreeList, RecycledBuffer};
use crate::base::memory::reclaim::Reclaim;
use crate::base::sync::{Condvar, Mutex, MutexGuard};

pub use super::reclaim::Closed;

/// Pool of buffers with a budget in bytes. Clones share one budget.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Shared>,
    /// Bytes reserved in advance, which its buffers use first.
    preallocated: Option<Arc<Mutex<Reservation>>>,
}

struct Shared {
    budget: u64,
    source_list: Option<FreeList>,
    soft_limit: SoftLimit,
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Default)]
struct State {
    /// Capacity in use, in bytes.
    used: u64,
    buffers: usize,
    /// Bytes of the budget lent to a [`MemoryBroker`](super::reclaim::MemoryBroker).
    reclaimed: u64,
    peak: u64,
    /// Idle buffers, oldest first. Their capacity counts in `idle`.
    free: VecDeque<Vec<u8>>,
    idle: u64,
    wakers: Vec<Waker>,
    /// Waiting reservations, the next first.
    queue: VecDeque<u64>,
    /// Number of the next reservation that waits.
    next_ticket: u64,
    is_closed: bool,
}

/// Minimum length of page-aligned buffers. glibc places large ones 16 bytes into a page, where AMD Zen
/// processors copy the page cache six times slower (glibc bug 30994).
const MIN_ALIGNED_LEN: usize = 128 << 10;

fn usable_len(memory: &Vec<u8>) -> usize {
    let capacity = memory.capacity();
    if capacity < MIN_ALIGNED_LEN + ALIGNMENT {
        return capacity;
    }
    capacity - ALIGNMENT
}

fn aligned_start(memory: &Vec<u8>) -> usize {
    if usable_len(memory) == memory.capacity() {
        return 0;
    }
    memory.as_ptr().addr().wrapping_neg() % ALIGNMENT
}

/// Time after which a wait without a timeout looks at the pool again. It is notified before that.
const RECHECK_INTERVAL: Duration = Duration::from_mins(1);

/// Limit below the budget, in bytes and buffers. Waiters apply it only if both are exceeded.
#[derive(Clone, Copy, Debug)]
pub struct SoftLimit {
    /// Bytes in use.
    pub bytes: u64,
    /// Buffers in use, whatever their length.
    pub buffers: usize,
}

impl SoftLimit {
    const ALL: Self = Self {
        bytes: u64::MAX,
        buffers: usize::MAX,
    };
}

impl BufferPool {
    /// Creates a pool of at most `budget` bytes, idle ones included, or of a single larger buffer.
    pub fn new(budget: u64) -> Self {
        Self::with_soft_limit(budget, SoftLimit::ALL)
    }

    /// As [`BufferPool::new`], for a short life. Its memory comes from `source_list` and returns to it.
    pub fn with_free_list(budget: u64, source_list: FreeList) -> Self {
        Self::with_options(budget, SoftLimit::ALL, Some(source_list))
    }

    /// As [`BufferPool::new`], but callers also wait at `soft_limit`. Less memory then stays in the CPU
    /// caches, and less is touched for the first time.
    pub fn with_soft_limit(budget: u64, soft_limit: SoftLimit) -> Self {
        Self::with_options(budget, soft_limit, None)
    }

    fn with_options(budget: u64, soft_limit: SoftLimit, source_list: Option<FreeList>) -> Self {
        Self {
            shared: Arc::new(Shared {
                budget,
                source_list,
                soft_limit,
                state: Mutex::default(),
                released: Condvar::default(),
            }),
            preallocated: None,
        }
    }

    /// Reserves `bytes`, waiting for them, and returns a pool of them that allocates without waiting. Unused
    /// bytes return when the last clone is dropped. Bytes beyond them are counted, but do not wait.
    pub(crate) fn preallocate(&self, bytes: u64) -> Result<Self, Closed> {
        let reserved = self.reserve(bytes)?;
        Ok(Self {
            shared: Arc::clone(&self.shared),
            preallocated: Some(Arc::new(Mutex::new(reserved))),
        })
    }

    /// Acquires a buffer of exactly `len` bytes with unspecified contents; waits for the budget. A thread
    /// with a buffer must not wait, or may wait for itself. See `BufferPool::acquire_with`.
    ///
    /// # Errors
    /// If the pool is [closed](BufferPool::close), even during the wait.
    pub fn acquire(&self, len: usize) -> Result<Buffer, Closed> {
        let state = self.wait_for(len as u64)?;
        Ok(self.allocate(state, len))
    }

    /// As [`BufferPool::acquire`] and [`BufferPool::reserve`] together, with one wait for both.
    pub(crate) fn acquire_with(
        &self,
        len: usize,
        bytes: u64,
    ) -> Result<(Buffer, Reservation), Closed> {
        let mut state = self.wait_for((len as u64).saturating_add(bytes))?;
        let reserved = self.reserve_now(&mut state, bytes);
        Ok((self.allocate(state, len), reserved))
    }

    /// Reserves `bytes` for memory outside the pool; waits as [`BufferPool::acquire`] does. Reservations that wait are
    /// served in order, so that smaller ones cannot starve a large one.
    ///
    /// # Errors
    /// As [`BufferPool::acquire`].
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, Closed> {
        if self.preallocated.is_some() {
            return Ok(self.reserve_now(&mut self.shared.state.lock(), bytes));
        }
        let forever = || Some(RECHECK_INTERVAL);
        self.reserve_while(bytes, forever).ok_or(Closed)
    }

    /// As [`BufferPool::reserve`], but returns `None` if the wait takes longer than `timeout`.
    pub(crate) fn reserve_within(&self, bytes: u64, timeout: Duration) -> Option<Reservation> {
        let start = Instant::now();
        let left = || timeout.checked_sub(start.elapsed());
        self.reserve_while(bytes, left)
    }

    /// As [`BufferPool::reserve`], but calls `left` at least as often as it says. Returns `None` if that returns `None`,
    /// or if the pool is closed.
    pub(crate) fn reserve_while(
        &self,
        bytes: u64,
        left: impl Fn() -> Option<Duration>,
    ) -> Option<Reservation> {
        let mut state = self.shared.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.queue.push_back(ticket);
        let has_room = loop {
            let is_next = state.queue.front() == Some(&ticket);
            if state.is_closed || is_next && self.shared.can_acquire(&state, bytes) {
                break !state.is_closed;
            }
            let Some(left) = left() else {
                break false;
            };
            (state, _) = self.shared.released.wait_timeout(state, left);
        };
        state.queue.retain(|&waiting| waiting != ticket);
        let reserved = has_room.then(|| self.reserve_now(&mut state, bytes));
        if !state.queue.is_empty() {
            // The next one may find room, too.
            self.shared.released.notify_all();
        }
        reserved
    }

    /// Fails every current and later wait for memory. Acquired buffers stay valid.
    pub fn close(&self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        self.shared.wake_waiters(state);
    }

    /// Whether it was [closed](BufferPool::close).
    pub fn is_closed(&self) -> bool {
        self.shared.state.lock().is_closed
    }

    /// As [`BufferPool::acquire`], but waits as a task.
    ///
    /// # Cancel safety
    /// Nothing is acquired until the future is ready.
    pub async fn acquire_async(&self, len: usize) -> Buffer {
        std::future::poll_fn(|context| {
            let mut state = self.shared.state.lock();
            if self.preallocated.is_none() && !self.shared.can_acquire(&state, len as u64) {
                let waker = context.waker();
                if !state.wakers.iter().any(|known| known.will_wake(waker)) {
                    state.wakers.push(waker.clone());
                }
                return Poll::Pending;
            }
            Poll::Ready(self.allocate(state, len))
        })
        .await
    }

    /// As [`BufferPool::acquire`], but returns `None` instead of waiting.
    pub fn try_acquire(&self, len: usize) -> Option<Buffer> {
        let state = self.shared.state.lock();
        if self.preallocated.is_none() && !self.shared.can_acquire(&state, len as u64) {
            return None;
        }
        Some(self.allocate(state, len))
    }

    fn wait_for(&self, bytes: u64) -> Result<MutexGuard<'_, State>, Closed> {
        let mut state = self.shared.state.lock();
        while self.preallocated.is_none() {
            if state.is_closed {
                return Err(Closed);
            }
            if self.shared.can_acquire(&state, bytes) {
                break;
            }
            state = self.shared.released.wait(state);
        }
        Ok(state)
    }

    /// Counts `bytes`, and uses preallocated ones first.
    fn charge(&self, state: &mut State, bytes: u64) {
        let mut counted = bytes;
        if let Some(preallocated) = &self.preallocated {
            let mut left = preallocated.lock();
            let used = left.bytes.min(bytes);
            left.bytes -= used;
            counted -= used;
        }
        state.used += counted;
        state.peak = state.peak.max(state.used);
        state.evict_idle(self.shared.budget);
    }

    /// Reserves `bytes` for which there is room.
    fn reserve_now(&self, state: &mut State, bytes: u64) -> Reservation {
        self.charge(state, bytes);
        Reservation {
            bytes,
            shared: Arc::clone(&self.shared),
        }
    }

    fn allocate(&self, mut state: MutexGuard<'_, State>, len: usize) -> Buffer {
        // The best fit wastes at most half. The last returned one may still be in the CPU cache.
        let best_fit = state
            .free
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, free)| usable_len(free) >= len && usable_len(free) / 2 <= len)
            .min_by_key(|(_, free)| usable_len(free))
            .map(|(number, _)| number);
        let reused = best_fit.and_then(|number| state.free.remove(number));
        let capacity = reused.as_ref().map_or(0, usable_len);
        state.idle -= capacity as u64;
        let charge = len.max(capacity) as u64;
        self.charge(&mut state, charge);
        state.buffers += 1;
        drop(state);
        let mut bytes = reused.unwrap_or_else(|| self.shared.allocate_memory(len));
        let start = aligned_start(&bytes);
        bytes.resize(start + len, 0);
        Buffer {
            bytes,
            start,
            charge,
            shared: Arc::clone(&self.shared),
        }
    }

    /// Bytes in use now.
    pub fn used_bytes(&self) -> u64 {
        self.shared.state.lock().used
    }

    /// Maximum bytes in use so far.
    pub fn peak_bytes(&self) -> u64 {
        self.shared.state.lock().peak
    }

    /// The limit, in bytes.
    pub fn budget(&self) -> u64 {
        self.shared.budget
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("budget", &self.shared.budget)
            .field("taken", &self.used_bytes())
            .finish_non_exhaustive()
    }
}

impl Reclaim for BufferPool {
    fn reclaimable_bytes(&self) -> u64 {
        lendable_bytes(self.shared.budget)
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        let mut state = self.shared.state.lock();
        let part = bytes.min(self.reclaimable_bytes().saturating_sub(state.reclaimed));
        state.reclaimed += part;
        state.evict_idle(self.shared.budget);
        part
    }

    fn restore(&self, bytes: u64) {
        let mut state = self.shared.state.lock();
        state.reclaimed = state.reclaimed.saturating_sub(bytes);
        self.shared.wake_waiters(state);
    }
}

impl Shared {
    fn allocate_memory(&self, len: usize) -> Vec<u8> {
        let Some(source_list) = &self.source_list else {
            // The kernel zeroes it page by page on first touch.
            return vec![
                0;
                if len < MIN_ALIGNED_LEN {
                    len
                } else {
                    len + ALIGNMENT
                }
            ];
        };
        source_list
            .pop_fitting(len)
            .unwrap_or_else(|| free_list::allocate_zeroed(len))
    }

    fn can_acquire(&self, state: &State, bytes: u64) -> bool {
        let used = state.used.saturating_add(bytes);
        let is_over_soft_limit =
            used > self.soft_limit.bytes && state.buffers >= self.soft_limit.buffers;
        state.used == 0 || (used <= self.budget - state.reclaimed && !is_over_soft_limit)
    }

    fn wake_waiters(&self, mut state: MutexGuard<'_, State>) {
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.released.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if let Some(source_list) = &self.source_list {
            for bytes in state.free.drain(..) {
                source_list.recycle(bytes);
            }
        }
    }
}

impl State {
    fn evict_idle(&mut self, budget: u64) {
        while self.used + self.idle > budget - self.reclaimed {
            let Some(oldest) = self.free.pop_front() else {
                break;
            };
            self.idle -= usable_len(&oldest) as u64;
        }
    }
}

/// Bytes of a budget without a buffer of the pool; returned when dropped.
pub struct Reservation {
    bytes: u64,
    shared: Arc<Shared>,
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({} bytes)", self.bytes)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.used -= self.bytes;
        self.shared.wake_waiters(state);
    }
}

/// A writable buffer, which returns to its pool when dropped.
pub struct Buffer {
    bytes: Vec<u8>,
    /// Start of the content in `bytes`.
    start: usize,
    /// Bytes charged to the budget: its length or its capacity, whichever is larger.
    charge: u64,
    shared: Arc<Shared>,
}

impl Buffer {
    /// Truncates to `len` bytes; no effect on a shorter buffer.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.start.saturating_add(len));
    }

    /// Detaches the memory from the pool, so that the caller accounts for it. The memory must be from a
    /// [`FreeList`], and hardly longer than its bytes. Its address must be `phase` more than a multiple of
    /// [`ALIGNMENT`].
    ///
    /// # Errors
    /// The buffer, unchanged, if the memory must stay in the pool.
    pub fn detach(mut self, phase: u64) -> Result<RecycledBuffer, Self> {
        let Some(source_list) = self.shared.source_list.clone() else {
            return Err(self);
        };
        let is_in_phase =
            self.as_ptr().addr() as u64 % ALIGNMENT as u64 == phase % ALIGNMENT as u64;
        if !is_in_phase || !free_list::is_fitting(&self.bytes, self.len()) {
            return Err(self);
        }
        Ok(source_list.wrap(std::mem::take(&mut self.bytes), self.start))
    }

    /// Freezes it into shareable bytes. The memory returns to the pool with the last slice.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..).unwrap_or_default()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let capacity = usable_len(&bytes) as u64;
        let mut state = self.shared.state.lock();
        state.used -= self.charge;
        state.buffers -= 1;
        let room = (self.shared.budget - state.reclaimed).saturating_sub(state.used + state.idle);
        if (1..=room).contains(&capacity) {
            state.idle += capacity;
            state.free.push_back(bytes);
            return self.shared.wake_waiters(state);
        }
        self.shared.wake_waiters(state);
        if let Some(source_list) = &self.shared.source_list {
            source_list.recycle(bytes);
        }
    }
}

#[cfg(test)]
mod tests;
