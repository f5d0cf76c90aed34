//! Memory for long bytes of similar lengths, which is used again when they are dropped.
//!
//! A fresh page costs the kernel as much as decoding into it, so who makes one span after the other for
//! a cache that drops one for each should get the memory of that. Unlike a
//! [`Pool`](super::buffer::Pool) this bounds only what rests: who keeps the bytes counts them. Pools
//! that live for one read have their memory from here, too.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Shorter ones are left to the allocator.
const SHORTEST: usize = 128 << 10;

/// Capacities are multiples of this, so that lengths that differ a little share memory.
const STEP: usize = 256 << 10;

/// What disks without a cache in between ask for, and pages begin at.
pub const ALIGNMENT: usize = 4096;

/// What zeros are copied from.
const ZEROS: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// One part in so many of a length may be lost by memory that is too long for it.
const WASTED_SHARE: usize = 8;

/// Memory at rest. Clones share it.
#[derive(Clone)]
pub struct FreeList {
    limit_bytes: u64,
    /// Oldest first; every byte is initialised, and the length is the capacity.
    resting: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl FreeList {
    /// A list on which no more than `limit_bytes` rest.
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            resting: Arc::default(),
        }
    }

    /// Memory of exactly `len` bytes with unspecified contents, the first of which lies at an address
    /// that is `phase` more than a multiple of [`ALIGNMENT`].
    pub fn take(&self, len: usize, phase: u64) -> Memory {
        let bytes = self.take_out(len).unwrap_or_else(|| fresh(len));
        let address = bytes.as_ptr().addr();
        // Less than the alignment, so it fits whatever that is.
        let phase = usize::try_from(phase % ALIGNMENT as u64).unwrap_or_default();
        Memory {
            start: phase.wrapping_sub(address) % ALIGNMENT,
            bytes,
            len,
            home: self.clone(),
        }
    }

    /// As [`FreeList::take`], to be filled by [`Memory::append`]: there is room for `len` bytes
    /// already.
    pub fn empty(&self, len: usize, phase: u64) -> Memory {
        let mut memory = self.take(len, phase);
        memory.len = 0;
        memory
    }

    /// The bytes of `memory` from `start` on. The memory returns to this list when they are dropped.
    pub(super) fn memory(&self, memory: Vec<u8>, start: usize) -> Memory {
        Memory {
            start,
            len: memory.len().saturating_sub(start),
            bytes: memory,
            home: self.clone(),
        }
    }

    /// Bytes at rest at this moment.
    #[cfg(test)]
    fn resting_bytes(&self) -> u64 {
        self.resting().iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Memory at rest that holds `len` bytes, wherever in it they begin.
    pub(super) fn take_out(&self, len: usize) -> Option<Vec<u8>> {
        let mut resting = self.resting();
        let fits = |bytes: &Vec<u8>| (capacity(len)..=longest_for(len)).contains(&bytes.len());
        // The one that came last, which the processor's cache may still hold.
        let found = resting.iter().rposition(fits)?;
        resting.remove(found)
    }

    /// Lets memory rest, if it is worth it and there is room.
    pub(super) fn put_back(&self, mut bytes: Vec<u8>) {
        let len = bytes.capacity() as u64;
        if bytes.capacity() < SHORTEST || len > self.limit_bytes {
            return;
        }
        // Zeroes what somebody has truncated; the rest is initialised already.
        bytes.resize(bytes.capacity(), 0);
        let mut dropped = Vec::new();
        let mut resting = self.resting();
        let mut sum = len + resting.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        while sum > self.limit_bytes
            && let Some(oldest) = resting.pop_front()
        {
            sum -= oldest.len() as u64;
            dropped.push(oldest);
        }
        resting.push_back(bytes);
        drop(resting);
        // Unmapping takes long: not under the lock.
        drop(dropped);
    }

    fn resting(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for FreeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeList")
            .field("limit_bytes", &self.limit_bytes)
            .finish_non_exhaustive()
    }
}

/// Zeroed by the kernel, page by page as it is touched.
pub(super) fn fresh(len: usize) -> Vec<u8> {
    if len < SHORTEST {
        return vec![0; capacity(len)];
    }
    vec![0; capacity(len).next_multiple_of(STEP)]
}

/// What `len` bytes take wherever they begin.
fn capacity(len: usize) -> usize {
    len.saturating_add(ALIGNMENT)
}

/// Whether `memory` is not too long for `len` bytes.
pub(super) fn wastes_little(memory: &Vec<u8>, len: usize) -> bool {
    memory.capacity() <= longest_for(len)
}

/// The longest memory that is not too long for `len` bytes.
fn longest_for(len: usize) -> usize {
    if len < SHORTEST {
        return capacity(len);
    }
    capacity(len + len / WASTED_SHARE).next_multiple_of(STEP)
}

/// Writable memory, which goes back to its list when dropped.
pub struct Memory {
    /// All of it initialised.
    bytes: Vec<u8>,
    /// Where it begins in there.
    start: usize,
    /// How many bytes from there on count.
    len: usize,
    home: FreeList,
}

impl Memory {
    /// Puts `more` behind what is there.
    pub fn append(&mut self, more: &[u8]) {
        let end = self.len + more.len();
        if self.start + end > self.bytes.len() {
            self.grow(end);
        }
        let from = self.start + self.len;
        if let Some(rest) = self.bytes.get_mut(from..from + more.len()) {
            rest.copy_from_slice(more);
            self.len = end;
        }
    }

    /// Puts zeros behind what is there, until there are `len` bytes.
    pub fn append_zeros(&mut self, len: usize) {
        while self.len < len {
            let more = (len - self.len).min(ZEROS.len());
            self.append(ZEROS.get(..more).unwrap_or_default());
        }
    }

    fn grow(&mut self, needed: usize) {
        let phase = self.bytes.as_ptr().addr().wrapping_add(self.start);
        let len = needed.max(self.len.saturating_mul(2));
        let mut longer = self.home.empty(len, phase as u64);
        longer.append(self);
        *self = longer;
    }

    /// Ends writing: the bytes become shareable, and the memory goes back with the last slice.
    pub fn freeze(mut self) -> Bytes {
        let longest = longest_for(self.len);
        if self.bytes.len() > longest {
            // Whoever keeps it counts its length.
            self.bytes.truncate(longest);
            self.bytes.shrink_to_fit();
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let end = self.start + self.len;
        self.bytes.get(self.start..end).unwrap_or_default()
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        let end = self.start + self.len;
        self.bytes.get_mut(self.start..end).unwrap_or_default()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home.put_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer::Pool;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_that_was_dropped_is_used_again_for_bytes_that_are_as_long() {
        let list = FreeList::new(16 << 20);
        let mut memory = list.take(4 * MIB, 0);
        memory.fill(7);
        let place = memory.as_ptr();
        let bytes = memory.freeze();
        let slice = bytes.slice(5..10);
        drop(bytes);
        assert_eq!(list.resting_bytes(), 0, "a slice is left");
        assert_eq!(slice, [7; 5][..]);
        drop(slice);
        assert_eq!(list.resting_bytes(), (4 << 20) + STEP as u64);
        assert_ne!(list.take(3 * MIB, 0).as_ptr(), place, "too long for that");
        let longer = list.take(4 * MIB + STEP, 0);
        assert_ne!(longer.as_ptr(), place, "too short");
        let again = list.take(4 * MIB - 1000, 0);
        assert_eq!((again.as_ptr(), again.len()), (place, 4 * MIB - 1000));
    }

    #[test]
    fn what_a_pool_of_one_read_had_is_used_again_by_the_next() {
        let list = FreeList::new(64 << 20);
        let mut places = Vec::new();
        for _ in 0..3 {
            let pool = Pool::reusing(4 << 20, list.clone());
            let bytes = pool.take(4 * MIB).expect("open").freeze();
            places.push(bytes.as_ptr());
            drop(pool);
            assert_eq!(list.resting_bytes(), 0, "the bytes are still read");
        }
        places.dedup();
        assert_eq!(places.len(), 1);
        assert!(list.resting_bytes() >= 4 << 20, "and it rests now");
        let two = Pool::reusing(10 << 20, list.clone());
        drop((two.take(4 * MIB), two.take(4 * MIB)));
        drop(two);
        assert!(list.resting_bytes() >= 8 << 20);
    }

    #[test]
    fn what_rests_is_bounded_and_the_oldest_goes() {
        let room = (5 << 20) + 2 * STEP as u64;
        let list = FreeList::new(room);
        let taken = [1, 2, 3].map(|mib| list.take(mib * MIB, 0));
        let places = taken.each_ref().map(|memory| memory.as_ptr());
        drop(taken);
        assert_eq!(list.resting_bytes(), room);
        assert_eq!(list.take(2 * MIB, 0).as_ptr(), places[1]);
        drop(list.take(6 * MIB, 0));
        assert_eq!(list.resting_bytes(), room, "longer than the limit");
        drop(list.take(1000, 0));
        assert_eq!(list.resting_bytes(), room, "not worth it");
    }

    #[test]
    fn what_is_appended_grows_and_keeps_no_more_than_it_needs() {
        let list = FreeList::new(64 << 20);
        let mut memory = list.empty(10, 0);
        let mut expected = Vec::new();
        for number in 0..100_u8 {
            let part = vec![number; 10_000 + usize::from(number)];
            memory.append(&part);
            expected.extend(part);
        }
        let bytes = memory.freeze();
        assert_eq!(bytes, expected);
        drop(bytes);
        let mut longer = list.empty(8 * MIB, 0);
        longer.append(&expected);
        let bytes = longer.freeze();
        assert_eq!(bytes, expected);
        let before = list.resting_bytes();
        drop(bytes);
        let rested = list.resting_bytes() - before;
        assert!(rested <= longest_for(expected.len()) as u64, "{rested}");
    }

    #[test]
    fn memory_begins_where_it_is_asked_to() {
        let list = FreeList::new(64 << 20);
        for (len, phase) in [(10, 0), (10, 4095), (MIB, 17), (MIB, 1 << 40 | 5)] {
            let mut memory = list.empty(len / 3, phase);
            for _ in 0..3 {
                memory.append(&vec![1; len / 3]);
            }
            let address = memory.as_ptr().addr() as u64;
            assert_eq!(address % 4096, phase % 4096, "{len} bytes");
            assert_eq!(memory.freeze(), vec![1; len / 3 * 3]);
        }
    }
}
