//! Byte buffers under a budget, reused, and frozen into slices that share them.
//!
//! Everything that waits, waits on bytes: a [`Pool`] hands out no more than its budget, and a
//! buffer's share comes back when the last [`Bytes`] cut from it is dropped. Reuse spares the
//! kernel from zeroing fresh pages for every chunk. A pool is also a [`Lender`].

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;

use super::free_list::{self, ALIGNMENT, FreeList, Memory};
use super::loan::Lender;
use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Buffers that may be alive at once, in bytes. Clones share one budget.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
    /// What its buffers are counted in before they count in the pool.
    ration: Option<Arc<Ration>>,
}

struct Shared {
    budget: u64,
    /// Where its memory comes from and goes to.
    home: Option<FreeList>,
    enough: Enough,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes of capacity handed out.
    taken: u64,
    /// Buffers handed out.
    buffers: usize,
    /// Bytes of the budget that others have for now.
    lent: u64,
    /// The highest `taken` has been.
    peak: u64,
    /// Buffers at rest, oldest first; their capacity counts in `resting`.
    free: VecDeque<Vec<u8>>,
    resting: u64,
    /// Tasks that wait in [`Pool::take_async`].
    wakers: Vec<Waker>,
    /// Whether the pool hands out nothing any more.
    closed: bool,
}

/// Buffers of at least so many bytes begin at a page. glibc puts long ones 16 bytes behind the beginning
/// of a page, and copying a page of the page cache there takes six times as long on AMD Zen processors
/// (glibc bug 30994).
const ALIGNED_BYTES: usize = 128 << 10;

/// How long a buffer in `memory` may be.
fn room(memory: &Vec<u8>) -> usize {
    let capacity = memory.capacity();
    if capacity < ALIGNED_BYTES + ALIGNMENT {
        return capacity;
    }
    capacity - ALIGNMENT
}

/// Where a buffer in `memory` begins.
fn start(memory: &Vec<u8>) -> usize {
    if room(memory) == memory.capacity() {
        return 0;
    }
    memory.as_ptr().addr().wrapping_neg() % ALIGNMENT
}

/// Error of a pool or of loans that were closed: no caller needs the memory any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cancelled while waiting for memory")]
pub struct Closed;

/// One part in so many of a budget is never lent: work goes on with it.
const KEPT_SHARE: u64 = 4;

/// How much of a budget is used, if whoever waits can do with it.
#[derive(Clone, Copy, Debug)]
pub struct Enough {
    /// Bytes that may be taken.
    pub bytes: u64,
    /// Buffers that may be taken, whatever their length.
    pub buffers: usize,
}

impl Enough {
    const ALL: Self = Self {
        bytes: u64::MAX,
        buffers: usize::MAX,
    };
}

impl Pool {
    /// A pool whose buffers, taken and resting together, never exceed `budget` bytes, but for a
    /// single buffer that is larger than the whole budget: it is handed out alone.
    pub fn new(budget: u64) -> Self {
        Self::frugal(budget, Enough::ALL)
    }

    /// As [`Pool::new`], for a short life: its memory comes from `home`, as far as there is some, and
    /// goes there in the end.
    pub fn reusing(budget: u64, home: FreeList) -> Self {
        Self::with_home(budget, Enough::ALL, Some(home))
    }

    /// A pool that lets everyone wait who would have more than is `enough` by both its measures,
    /// though the budget allowed it: memory that lies idle has left the processor's caches when
    /// it is used, and more of it had to be touched for the first time.
    pub fn frugal(budget: u64, enough: Enough) -> Self {
        Self::with_home(budget, enough, None)
    }

    fn with_home(budget: u64, enough: Enough, home: Option<FreeList>) -> Self {
        Self {
            shared: Arc::new(Shared {
                budget,
                home,
                enough,
                state: Mutex::default(),
                returned: Condvar::new(),
            }),
            ration: None,
        }
    }

    /// A pool whose buffers come from this one without waiting, as `bytes` of it are taken now,
    /// as by [`Pool::take`]. What is not used of them returns when the last clone is dropped;
    /// whatever is used beyond them is counted, but not waited for.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn ration(&self, bytes: u64) -> Result<Self, Closed> {
        let reserved = self.reserve(bytes)?;
        Ok(Self {
            shared: Arc::clone(&self.shared),
            ration: Some(Arc::new(Ration {
                left: Mutex::new(reserved),
            })),
        })
    }

    /// A buffer of exactly `len` bytes with unspecified contents. Waits until the budget allows.
    ///
    /// A thread that waits holds no buffer of the same pool: it could wait for itself. To take a
    /// buffer together with other memory, use [`Pool::take_with`].
    ///
    /// # Errors
    /// When the pool is [closed](Pool::close), also while this waits.
    pub fn take(&self, len: usize) -> Result<Buffer, Closed> {
        let state = self.wait_for(len as u64)?;
        Ok(self.hand_out(state, len))
    }

    /// A buffer as from [`Pool::take`], and `bytes` as from [`Pool::reserve`], after one wait for both.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_with(&self, len: usize, bytes: u64) -> Result<(Buffer, Reserved), Closed> {
        let mut state = self.wait_for((len as u64).saturating_add(bytes))?;
        let reserved = self.count(&mut state, bytes);
        Ok((self.hand_out(state, len), reserved))
    }

    /// Counts `bytes` as taken, for memory that is not the pool's; waits as [`Pool::take`] does.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn reserve(&self, bytes: u64) -> Result<Reserved, Closed> {
        let mut state = self.wait_for(bytes)?;
        Ok(self.count(&mut state, bytes))
    }

    /// Ends every wait in [`Pool::take`] and its like with an error, now and later. Buffers that are
    /// out stay valid.
    pub fn close(&self) {
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.wake(state);
    }

    /// As [`Pool::take`], but waits as a task.
    ///
    /// # Cancel safety
    /// Nothing is taken until the future is ready. To end the wait, drop the future.
    pub async fn take_async(&self, len: usize) -> Buffer {
        std::future::poll_fn(|context| {
            let mut state = self.shared.lock();
            if self.ration.is_none() && !self.shared.has_room(&state, len as u64) {
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
        if self.ration.is_none() && !self.shared.has_room(&state, len as u64) {
            return None;
        }
        Some(self.hand_out(state, len))
    }

    /// Waits until `bytes` may be taken; a ration never waits.
    fn wait_for(&self, bytes: u64) -> Result<MutexGuard<'_, State>, Closed> {
        match self.ration {
            None => self.shared.wait_for(bytes),
            Some(_) => Ok(self.shared.lock()),
        }
    }

    /// Counts `bytes` for which there is room.
    fn count(&self, state: &mut State, bytes: u64) -> Reserved {
        state.take(bytes, self.shared.budget);
        if let Some(ration) = &self.ration {
            state.taken -= ration.use_up(bytes);
        }
        Reserved {
            bytes,
            shared: Arc::clone(&self.shared),
        }
    }

    fn hand_out(&self, mut state: MutexGuard<'_, State>, len: usize) -> Buffer {
        // The best fit that does not waste more than half of what it holds; among equals the one
        // that came back last, which the processor's cache may still hold.
        let fit = state
            .free
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, free)| room(free) >= len && room(free) / 2 <= len)
            .min_by_key(|(_, free)| room(free))
            .map(|(number, _)| number);
        let reused = fit.and_then(|number| state.free.remove(number));
        let capacity = reused.as_ref().map_or(0, room);
        state.resting -= capacity as u64;
        let charge = len.max(capacity) as u64;
        state.take(charge, self.shared.budget);
        state.buffers += 1;
        if let Some(ration) = &self.ration {
            state.taken -= ration.use_up(charge);
        }
        drop(state);
        let mut bytes = reused.unwrap_or_else(|| self.shared.fetch(len));
        let start = start(&bytes);
        bytes.resize(start + len, 0);
        Buffer {
            bytes,
            start,
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
            .finish_non_exhaustive()
    }
}

impl Lender for Pool {
    fn lendable(&self) -> u64 {
        self.shared.budget - self.shared.budget / KEPT_SHARE
    }

    fn lend(&self, bytes: u64) -> u64 {
        let mut state = self.shared.lock();
        let part = bytes.min(self.lendable().saturating_sub(state.lent));
        state.lent += part;
        state.drop_resting(self.shared.budget);
        part
    }

    fn take_back(&self, bytes: u64) {
        let mut state = self.shared.lock();
        state.lent = state.lent.saturating_sub(bytes);
        self.shared.wake(state);
    }
}

impl Shared {
    /// Memory with room for `len` bytes that is new to this pool.
    fn fetch(&self, len: usize) -> Vec<u8> {
        let Some(home) = &self.home else {
            // Zeroed by the kernel, page by page as it is touched.
            return vec![
                0;
                if len < ALIGNED_BYTES {
                    len
                } else {
                    len + ALIGNMENT
                }
            ];
        };
        home.take_out(len).unwrap_or_else(|| free_list::fresh(len))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_room(&self, state: &State, bytes: u64) -> bool {
        let taken = state.taken.saturating_add(bytes);
        let is_enough = taken > self.enough.bytes && state.buffers >= self.enough.buffers;
        state.taken == 0 || (taken <= self.budget - state.lent && !is_enough)
    }

    /// Waits until `bytes` may be taken.
    fn wait_for(&self, bytes: u64) -> Result<MutexGuard<'_, State>, Closed> {
        let mut state = self.lock();
        while !state.closed {
            if self.has_room(&state, bytes) {
                return Ok(state);
            }
            state = self
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Err(Closed)
    }

    /// Tells everyone who waits that there may be room now.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.returned.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = &self.home {
            for bytes in state.free.drain(..) {
                home.put_back(bytes);
            }
        }
    }
}

impl State {
    fn take(&mut self, bytes: u64, budget: u64) {
        self.taken += bytes;
        self.peak = self.peak.max(self.taken);
        self.drop_resting(budget);
    }

    /// Lets go of buffers at rest for which there is no room any more.
    fn drop_resting(&mut self, budget: u64) {
        while self.taken + self.resting > budget - self.lent {
            let Some(oldest) = self.free.pop_front() else {
                break;
            };
            self.resting -= room(&oldest) as u64;
        }
    }
}

/// What is left of bytes that were taken in advance.
struct Ration {
    left: Mutex<Reserved>,
}

impl Ration {
    /// Takes `bytes`, or what is left, out of the ration.
    fn use_up(&self, bytes: u64) -> u64 {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let used = left.bytes.min(bytes);
        left.bytes -= used;
        used
    }
}

/// Bytes of a budget that are taken without a buffer of the pool; they return when dropped.
pub struct Reserved {
    bytes: u64,
    shared: Arc<Shared>,
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reserved({} bytes)", self.bytes)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.taken -= self.bytes;
        self.shared.wake(state);
    }
}

/// A writable buffer of a pool; returns to it when dropped.
pub struct Buffer {
    bytes: Vec<u8>,
    /// Where it begins in there.
    start: usize,
    /// What this buffer counts against the budget: its length or its capacity, the larger.
    charge: u64,
    shared: Arc<Shared>,
}

impl Buffer {
    /// Keeps the first `len` bytes; longer than the buffer changes nothing.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.start.saturating_add(len));
    }

    /// Detaches the memory from the pool, because the caller counts it from now on. It must come from a
    /// [`FreeList`], be hardly longer than its bytes, and begin at an address that is `phase` more than a
    /// multiple of [`ALIGNMENT`].
    ///
    /// # Errors
    /// The buffer, unchanged, if the memory must stay in the pool.
    pub fn detach(mut self, phase: u64) -> Result<Memory, Self> {
        let Some(home) = self.shared.home.clone() else {
            return Err(self);
        };
        let is_in_phase =
            self.as_ptr().addr() as u64 % ALIGNMENT as u64 == phase % ALIGNMENT as u64;
        if !is_in_phase || !free_list::wastes_little(&self.bytes, self.len()) {
            return Err(self);
        }
        Ok(home.memory(std::mem::take(&mut self.bytes), self.start))
    }

    /// Ends writing: the bytes become shareable, and go back to the pool with the last slice.
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
        let capacity = room(&bytes) as u64;
        let mut state = self.shared.lock();
        state.taken -= self.charge;
        state.buffers -= 1;
        let room = (self.shared.budget - state.lent).saturating_sub(state.taken + state.resting);
        if (1..=room).contains(&capacity) {
            state.resting += capacity;
            state.free.push_back(bytes);
            return self.shared.wake(state);
        }
        self.shared.wake(state);
        if let Some(home) = &self.shared.home {
            home.put_back(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_buffers_begin_at_a_page() {
        let pools = [
            Pool::new(1 << 30),
            Pool::reusing(1 << 30, FreeList::new(1 << 30)),
        ];
        for pool in pools {
            for len in [ALIGNED_BYTES, 300_000, 200_000, 1 << 20] {
                let mut buffer = pool.take(len).expect("open");
                assert_eq!((buffer.len(), buffer.as_ptr().addr() % ALIGNMENT), (len, 0));
                buffer.truncate(len - 1);
                assert_eq!(buffer.len(), len - 1);
            }
        }
    }

    #[test]
    fn detached_memory_is_not_counted_and_returns_to_its_list() {
        let home = FreeList::new(1 << 30);
        let pool = Pool::reusing(1 << 20, home.clone());
        let mut buffer = pool.take(1 << 20).expect("open");
        buffer.fill(7);
        buffer.truncate((1 << 20) - 5);
        let buffer = buffer.detach(1).expect_err("another phase");
        let bytes = buffer.detach(8192).expect("at a page").freeze();
        assert_eq!(pool.taken(), 0);
        assert_eq!(bytes.len(), (1 << 20) - 5);
        assert!(bytes.iter().all(|&byte| byte == 7));
        assert!(home.take_out(1 << 20).is_none());
        drop(bytes);
        assert!(home.take_out(1 << 20).is_some());
    }

    #[test]
    fn memory_that_is_too_long_or_of_no_list_is_not_detached() {
        let mut buffer = Pool::reusing(1 << 20, FreeList::new(1 << 30))
            .take(1 << 20)
            .expect("open");
        buffer.truncate(1 << 19);
        assert!(buffer.detach(0).is_err());
        assert!(
            Pool::new(1 << 20)
                .take(1 << 20)
                .expect("open")
                .detach(0)
                .is_err()
        );
    }

    #[test]
    fn slices_keep_their_share_until_the_last_is_dropped() {
        let pool = Pool::new(100);
        let bytes = pool.take(60).expect("open").freeze();
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
        let large = pool.take(100).expect("open");
        assert!(pool.try_take(1).is_none());
        drop(large);
        assert!(pool.try_take(1).is_some());
    }

    #[test]
    fn buffers_are_reused() {
        let pool = Pool::new(1000);
        let first = pool.take(400).expect("open");
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.take(300).expect("open").as_ptr(), address);
    }

    #[test]
    fn resting_buffers_make_room_for_taken_ones() {
        let pool = Pool::new(1000);
        drop(pool.take(900).expect("open"));
        let small = pool.take(200).expect("open");
        assert_eq!(small.len(), 200);
        let taken = pool.taken();
        assert!(pool.shared.lock().resting + taken <= 1000);
    }

    #[test]
    fn a_frugal_pool_gives_enough_bytes_and_enough_buffers_and_never_more_than_its_budget() {
        let enough = Enough {
            bytes: 30,
            buffers: 2,
        };
        let pool = Pool::frugal(100, enough);
        let large = [pool.take(40).expect("open"), pool.take(40).expect("open")];
        assert!(pool.try_take(1).is_none(), "enough of both");
        drop(large);
        let small = [10, 10, 10].map(|len| pool.take(len).expect("open"));
        assert!(pool.try_take(1).is_none(), "enough of both");
        drop(small);
        let _first = pool.take(70).expect("open");
        assert!(pool.try_take(31).is_none(), "more than the budget");
        assert!(pool.try_take(30).is_some());
    }

    #[test]
    fn a_reservation_is_taken_like_a_buffer() {
        let pool = Pool::new(100);
        let reserved = pool.reserve(60).expect("open");
        assert!(pool.try_take(41).is_none());
        drop(pool.try_take(40).expect("room"));
        drop(reserved);
        assert_eq!(pool.taken(), 0);
        assert!(pool.try_take(41).is_some());
    }

    #[test]
    fn a_ration_is_taken_at_once_and_its_buffers_do_not_wait() {
        let pool = Pool::new(100);
        drop(pool.take(40).expect("open"));
        let ration = pool.ration(70).expect("open");
        assert_eq!(pool.taken(), 70);
        let first = ration.take(40).expect("open");
        let second = ration.clone().take(20).expect("open");
        assert_eq!(pool.taken(), 70);
        let third = ration.take(50).expect("open");
        assert_eq!(pool.taken(), 110, "which is beyond the ration");
        drop((first, third));
        assert_eq!(pool.taken(), 20);
        drop(second);
        drop(ration);
        assert_eq!(pool.taken(), 0);
        let ration = pool.ration(70).expect("open");
        drop(ration.take(30).expect("open"));
        drop(ration);
        assert_eq!(pool.taken(), 0, "what was not used returns too");
    }

    #[test]
    fn what_is_lent_cannot_be_taken_and_a_quarter_is_never_lent() {
        let pool = Pool::new(100);
        drop(pool.take(50).expect("open"));
        assert_eq!(pool.lend(60), 60);
        assert_eq!(pool.shared.lock().resting, 0);
        let held = pool.take(30).expect("open");
        assert!(pool.try_take(11).is_none());
        assert_eq!(pool.lend(60), 15);
        assert_eq!(pool.lend(60), 0);
        drop(held);
        assert_eq!(pool.take(90).expect("open").len(), 90, "alone");
        pool.take_back(75);
        assert!(pool.try_take(100).is_some());
    }

    #[test]
    fn a_waiter_wakes_when_a_loan_comes_back() {
        let pool = Pool::new(100);
        let _held = pool.take(20).expect("open");
        assert_eq!(pool.lend(70), 70);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.take(50).expect("open").len());
            pool.take_back(70);
            assert_eq!(waiter.join().ok(), Some(50));
        });
    }

    #[test]
    fn a_waiter_wakes_when_bytes_come_back() {
        let pool = Pool::new(10);
        let held = pool.take(10).expect("open");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.take(5).expect("open").len());
            drop(held);
            assert_eq!(waiter.join().ok(), Some(5));
        });
    }

    #[test]
    fn closing_ends_every_wait_and_leaves_buffers_valid() {
        let pool = Pool::new(10);
        let held = pool.take(10).expect("open");
        std::thread::scope(|scope| {
            let waiters = [
                scope.spawn(|| pool.take(5).map(drop)),
                scope.spawn(|| pool.reserve(5).map(drop)),
                scope.spawn(|| pool.ration(5).map(drop)),
                scope.spawn(|| pool.take_with(1, 1).map(drop)),
            ];
            pool.close();
            for waiter in waiters {
                assert_eq!(waiter.join().expect("no panic"), Err(Closed));
            }
        });
        assert_eq!(held.len(), 10);
        drop(held);
        assert_eq!(pool.take(1).map(drop), Err(Closed), "also later");
    }

    #[test]
    fn buffer_and_reservation_are_taken_together_or_not_at_all() {
        let pool = Pool::new(100);
        let held = pool.take(50).expect("open");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.take_with(40, 30).map(|(buffer, _)| buffer.len()));
            // It holds nothing while it waits, so the other half can still be taken.
            drop(pool.take(50));
            drop(held);
            assert_eq!(waiter.join().expect("no panic"), Ok(40));
        });
        let (alone, reserved) = pool.take_with(90, 90).expect("more than all, alone");
        assert_eq!((alone.len(), pool.taken()), (90, 180));
        drop(alone);
        assert_eq!(pool.taken(), 90);
        drop(reserved);
        assert_eq!(pool.taken(), 0);
    }

    #[test]
    fn a_reservation_comes_out_of_a_ration() {
        let pool = Pool::new(100);
        let ration = pool.ration(70).expect("open");
        let reserved = ration.reserve(60).expect("never waits");
        assert_eq!(pool.taken(), 70);
        drop(ration);
        assert_eq!(pool.taken(), 60);
        drop(reserved);
        assert_eq!(pool.taken(), 0);
    }
}
