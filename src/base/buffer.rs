//! Byte buffers under a budget, reused, and frozen into slices that share them.
//!
//! Everything that waits, waits on bytes: a [`Pool`] hands out no more than its budget, and a
//! buffer's share comes back when the last [`Bytes`] cut from it is dropped. Reuse spares the
//! kernel from zeroing fresh pages for every chunk.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use bytes::Bytes;

/// Buffers that may be alive at once, in bytes. Clones share one budget.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    budget: u64,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes of capacity handed out.
    taken: u64,
    /// The highest `taken` has been.
    peak: u64,
    /// Buffers at rest, oldest first; their capacity counts in `resting`.
    free: VecDeque<Vec<u8>>,
    resting: u64,
    /// Tasks that wait in [`Pool::take_async`].
    wakers: Vec<Waker>,
}

impl Pool {
    /// A pool whose buffers, taken and resting together, never exceed `budget` bytes, but for a
    /// single buffer that is larger than the whole budget: it is handed out alone.
    pub fn new(budget: u64) -> Self {
        Self {
            shared: Arc::new(Shared {
                budget,
                state: Mutex::default(),
                returned: Condvar::new(),
            }),
        }
    }

    /// A buffer of exactly `len` bytes with unspecified contents. Waits until the budget allows.
    ///
    /// Callers that hold buffers of the same pool while they wait must make sure that someone
    /// else gives some back, or they wait for ever.
    pub fn take(&self, len: usize) -> Buffer {
        let mut state = self.shared.lock();
        while state.taken > 0 && state.taken + len as u64 > self.shared.budget {
            state = self
                .shared
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.hand_out(state, len)
    }

    /// As [`Pool::take`], but waits as a task.
    ///
    /// # Cancel safety
    /// Nothing is taken until the future is ready.
    pub async fn take_async(&self, len: usize) -> Buffer {
        std::future::poll_fn(|context| {
            let mut state = self.shared.lock();
            if state.taken > 0 && state.taken + len as u64 > self.shared.budget {
                let waker = context.waker();
                if !state.wakers.iter().any(|known| known.will_wake(waker)) {
                    state.wakers.push(waker.clone());
                }
                return Poll::Pending;
            }
            Poll::Ready(self.hand_out(state, len))
        })
        .await
    }

    /// As [`Pool::take`], but `None` instead of waiting.
    pub fn try_take(&self, len: usize) -> Option<Buffer> {
        let state = self.shared.lock();
        if state.taken > 0 && state.taken + len as u64 > self.shared.budget {
            return None;
        }
        Some(self.hand_out(state, len))
    }

    fn hand_out(&self, mut state: MutexGuard<'_, State>, len: usize) -> Buffer {
        // The best fit that does not waste more than half of what it holds; among equals the one
        // that came back last, which the processor's cache may still hold.
        let fit = state
            .free
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, free)| free.capacity() >= len && free.capacity() / 2 <= len)
            .min_by_key(|(_, free)| free.capacity())
            .map(|(number, _)| number);
        let reused = fit.and_then(|number| state.free.remove(number));
        let capacity = reused.as_ref().map_or(0, Vec::capacity);
        state.resting -= capacity as u64;
        let charge = len.max(capacity) as u64;
        state.taken += charge;
        state.peak = state.peak.max(state.taken);
        while state.taken + state.resting > self.shared.budget {
            let Some(oldest) = state.free.pop_front() else {
                break;
            };
            state.resting -= oldest.capacity() as u64;
        }
        drop(state);
        let bytes = match reused {
            Some(mut bytes) => {
                bytes.resize(len, 0);
                bytes
            }
            // Zeroed by the kernel, page by page as it is touched.
            None => vec![0; len],
        };
        Buffer {
            bytes,
            charge,
            shared: Arc::clone(&self.shared),
        }
    }

    /// Bytes handed out at this moment.
    pub fn taken(&self) -> u64 {
        self.shared.lock().taken
    }

    /// The most that was ever handed out at once, in bytes.
    pub fn peak(&self) -> u64 {
        self.shared.lock().peak
    }

    /// The limit, in bytes.
    pub fn budget(&self) -> u64 {
        self.shared.budget
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("budget", &self.shared.budget)
            .field("taken", &self.taken())
            .finish()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A writable buffer of a pool; returns to it when dropped.
pub struct Buffer {
    bytes: Vec<u8>,
    /// What this buffer counts against the budget: its length or its capacity, the larger.
    charge: u64,
    shared: Arc<Shared>,
}

impl Buffer {
    /// Keeps the first `len` bytes; longer than the buffer changes nothing.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    /// Ends writing: the bytes become shareable, and go back to the pool with the last slice.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes.len())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let capacity = bytes.capacity() as u64;
        let mut state = self.shared.lock();
        state.taken -= self.charge;
        if capacity > 0 && state.taken + state.resting + capacity <= self.shared.budget {
            state.resting += capacity;
            state.free.push_back(bytes);
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.shared.returned.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_keep_their_share_until_the_last_is_dropped() {
        let pool = Pool::new(100);
        let bytes = pool.take(60).freeze();
        let slice = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(pool.taken(), 60);
        assert!(pool.try_take(60).is_none());
        drop(slice);
        assert_eq!(pool.taken(), 0);
        assert!(pool.try_take(60).is_some());
    }

    #[test]
    fn a_buffer_larger_than_the_budget_is_handed_out_alone() {
        let pool = Pool::new(10);
        let large = pool.take(100);
        assert!(pool.try_take(1).is_none());
        drop(large);
        assert!(pool.try_take(1).is_some());
    }

    #[test]
    fn buffers_are_reused() {
        let pool = Pool::new(1000);
        let first = pool.take(400);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.take(300).as_ptr(), address);
    }

    #[test]
    fn resting_buffers_make_room_for_taken_ones() {
        let pool = Pool::new(1000);
        drop(pool.take(900));
        let small = pool.take(200);
        assert_eq!(small.len(), 200);
        let taken = pool.taken();
        assert!(pool.shared.lock().resting + taken <= 1000);
    }

    #[test]
    fn a_waiter_wakes_when_bytes_come_back() {
        let pool = Pool::new(10);
        let held = pool.take(10);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.take(5).len());
            drop(held);
            assert_eq!(waiter.join().ok(), Some(5));
        });
    }
}
