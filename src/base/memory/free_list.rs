//! Free list of large buffers of similar lengths, which reuses dropped memory. A fresh page costs the kernel
//! as much as decoding into it. So decoded spans, and pools that live for one read, get the memory of evicted
//! spans. The list bounds only idle memory. A buffer's owner accounts for it.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;

use crate::base::sync::Mutex;

/// Minimum length of kept memory. The allocator handles shorter ones.
const MIN_KEPT_LEN: usize = 128 << 10;

/// Granularity of capacities, so that slightly different lengths share memory.
const CAPACITY_STEP: usize = 256 << 10;

/// Alignment in bytes of pages and of direct I/O.
pub const ALIGNMENT: usize = 4096;

const ZEROS: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// Divisor of a length: at most this part may be wasted by memory that is too long.
const MAX_WASTE_DIVISOR: usize = 8;

/// Idle memory. Clones share it.
#[derive(Clone)]
pub struct FreeList {
    limit_bytes: u64,
    /// Oldest first. Every byte is initialised, and the length is the capacity.
    idle: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl FreeList {
    /// Creates a list of at most `limit_bytes` of idle memory.
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            idle: Arc::default(),
        }
    }

    /// Allocates exactly `len` unspecified bytes at an address `phase` more than a multiple of [`ALIGNMENT`].
    pub fn allocate(&self, len: usize, phase: u64) -> RecycledBuffer {
        let bytes = self
            .pop_fitting(len)
            .unwrap_or_else(|| allocate_zeroed(len));
        let address = bytes.as_ptr().addr();
        // It is less than the alignment, so it fits in `usize`.
        let phase = usize::try_from(phase % ALIGNMENT as u64).unwrap_or_default();
        RecycledBuffer {
            start: phase.wrapping_sub(address) % ALIGNMENT,
            bytes,
            len,
            owner: self.clone(),
        }
    }

    /// As [`FreeList::allocate`], but empty, with capacity for `len` bytes.
    pub fn allocate_empty(&self, len: usize, phase: u64) -> RecycledBuffer {
        let mut memory = self.allocate(len, phase);
        memory.len = 0;
        memory
    }

    /// Wraps the bytes of `memory` from `start` on, which returns to this list.
    pub(super) fn wrap(&self, memory: Vec<u8>, start: usize) -> RecycledBuffer {
        RecycledBuffer {
            start,
            len: memory.len().saturating_sub(start),
            bytes: memory,
            owner: self.clone(),
        }
    }

    pub(super) fn pop_fitting(&self, len: usize) -> Option<Vec<u8>> {
        let mut idle = self.idle.lock();
        let fits =
            |bytes: &Vec<u8>| (capacity_for(len)..=max_capacity_for(len)).contains(&bytes.len());
        // The last returned one, because it may still be in the CPU cache.
        let found = idle.iter().rposition(fits)?;
        idle.remove(found)
    }

    pub(super) fn recycle(&self, mut bytes: Vec<u8>) {
        let len = bytes.capacity() as u64;
        if bytes.capacity() < MIN_KEPT_LEN || len > self.limit_bytes {
            return;
        }
        // Zeroes truncated bytes; the rest is already initialised.
        bytes.resize(bytes.capacity(), 0);
        let mut dropped = Vec::new();
        let mut idle = self.idle.lock();
        let mut sum = len + idle.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        while sum > self.limit_bytes
            && let Some(oldest) = idle.pop_front()
        {
            sum -= oldest.len() as u64;
            dropped.push(oldest);
        }
        idle.push_back(bytes);
        drop(idle);
        // Unmap outside the lock, because it takes long.
        drop(dropped);
    }
}

impl fmt::Debug for FreeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeList")
            .field("limit_bytes", &self.limit_bytes)
            .finish_non_exhaustive()
    }
}

/// Allocates memory that the kernel zeroes page by page on first touch.
pub(super) fn allocate_zeroed(len: usize) -> Vec<u8> {
    if len < MIN_KEPT_LEN {
        return vec![0; capacity_for(len)];
    }
    vec![0; capacity_for(len).next_multiple_of(CAPACITY_STEP)]
}

/// Capacity for `len` bytes at any phase.
fn capacity_for(len: usize) -> usize {
    len.saturating_add(ALIGNMENT)
}

pub(super) fn is_fitting(memory: &Vec<u8>, len: usize) -> bool {
    memory.capacity() <= max_capacity_for(len)
}

fn max_capacity_for(len: usize) -> usize {
    if len < MIN_KEPT_LEN {
        return capacity_for(len);
    }
    capacity_for(len + len / MAX_WASTE_DIVISOR).next_multiple_of(CAPACITY_STEP)
}

/// A writable buffer, which returns to its list when dropped.
pub struct RecycledBuffer {
    /// All bytes are initialised.
    bytes: Vec<u8>,
    /// Start of the content in `bytes`.
    start: usize,
    len: usize,
    owner: FreeList,
}

impl RecycledBuffer {
    /// Appends `more`.
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

    /// Appends zeros up to a length of `len` bytes.
    pub fn append_zeros(&mut self, len: usize) {
        while self.len < len {
            let more = (len - self.len).min(ZEROS.len());
            self.append(ZEROS.get(..more).unwrap_or_default());
        }
    }

    fn grow(&mut self, needed: usize) {
        let phase = self.bytes.as_ptr().addr().wrapping_add(self.start);
        let len = needed.max(self.len.saturating_mul(2));
        let mut longer = self.owner.allocate_empty(len, phase as u64);
        longer.append(self);
        *self = longer;
    }

    /// Freezes the content into shareable bytes. The memory returns to the list with the last slice.
    pub fn freeze(mut self) -> Bytes {
        let longest = max_capacity_for(self.len);
        if self.bytes.len() > longest {
            // The owner accounts only for its length.
            self.bytes.truncate(longest);
            self.bytes.shrink_to_fit();
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for RecycledBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for RecycledBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let end = self.start + self.len;
        self.bytes.get(self.start..end).unwrap_or_default()
    }
}

impl DerefMut for RecycledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let end = self.start + self.len;
        self.bytes.get_mut(self.start..end).unwrap_or_default()
    }
}

impl fmt::Debug for RecycledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecycledBuffer({} bytes)", self.len)
    }
}

impl Drop for RecycledBuffer {
    fn drop(&mut self) {
        self.owner.recycle(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer_pool::BufferPool;

    const MIB: usize = 1 << 20;

    impl FreeList {
        fn idle_bytes(&self) -> u64 {
            let idle = self.idle.lock();
            idle.iter().map(|bytes| bytes.len() as u64).sum()
        }
    }

    #[test]
    fn dropped_memory_is_reused_for_similar_lengths() {
        let list = FreeList::new(16 << 20);
        let mut memory = list.allocate(4 * MIB, 0);
        memory.fill(7);
        let place = memory.as_ptr();
        let bytes = memory.freeze();
        let slice = bytes.slice(5..10);
        drop(bytes);
        assert_eq!(list.idle_bytes(), 0, "a slice is left");
        assert_eq!(slice, [7; 5][..]);
        drop(slice);
        assert_eq!(list.idle_bytes(), (4 << 20) + CAPACITY_STEP as u64);
        assert_ne!(
            list.allocate(3 * MIB, 0).as_ptr(),
            place,
            "too long for that"
        );
        let longer = list.allocate(4 * MIB + CAPACITY_STEP, 0);
        assert_ne!(longer.as_ptr(), place, "too short");
        let again = list.allocate(4 * MIB - 1000, 0);
        assert_eq!((again.as_ptr(), again.len()), (place, 4 * MIB - 1000));
    }

    #[test]
    fn memory_of_a_dropped_pool_is_reused_by_the_next() {
        let list = FreeList::new(64 << 20);
        let mut places = Vec::new();
        for _ in 0..3 {
            let pool = BufferPool::with_free_list(4 << 20, list.clone());
            let bytes = pool.acquire(4 * MIB).expect("open").freeze();
            places.push(bytes.as_ptr());
            drop(pool);
            assert_eq!(list.idle_bytes(), 0, "the bytes are still read");
        }
        places.dedup();
        assert_eq!(places.len(), 1);
        assert!(list.idle_bytes() >= 4 << 20, "and it rests now");
        let two = BufferPool::with_free_list(10 << 20, list.clone());
        drop((two.acquire(4 * MIB), two.acquire(4 * MIB)));
        drop(two);
        assert!(list.idle_bytes() >= 8 << 20);
    }

    #[test]
    fn longest_span_is_kept_by_default() {
        let default = crate::base::memory_budget::Budget::new(128 << 20);
        let list = FreeList::new(default.free_list_bytes());
        drop(list.allocate(8 * MIB, 17));
        assert!(list.idle_bytes() >= 8 << 20);
    }

    #[test]
    fn idle_memory_is_bounded_and_the_oldest_is_evicted() {
        let room = (5 << 20) + 2 * CAPACITY_STEP as u64;
        let list = FreeList::new(room);
        let taken = [1, 2, 3].map(|mib| list.allocate(mib * MIB, 0));
        let places = taken.each_ref().map(|memory| memory.as_ptr());
        drop(taken);
        assert_eq!(list.idle_bytes(), room);
        assert_eq!(list.allocate(2 * MIB, 0).as_ptr(), places[1]);
        drop(list.allocate(6 * MIB, 0));
        assert_eq!(list.idle_bytes(), room, "longer than the limit");
        drop(list.allocate(1000, 0));
        assert_eq!(list.idle_bytes(), room, "not worth it");
    }

    #[test]
    fn append_grows_memory_and_freeze_shrinks_it() {
        let list = FreeList::new(64 << 20);
        let mut memory = list.allocate_empty(10, 0);
        let mut expected = Vec::new();
        for number in 0..100_u8 {
            let part = vec![number; 10_000 + usize::from(number)];
            memory.append(&part);
            expected.extend(part);
        }
        let bytes = memory.freeze();
        assert_eq!(bytes, expected);
        drop(bytes);
        let mut longer = list.allocate_empty(8 * MIB, 0);
        longer.append(&expected);
        let bytes = longer.freeze();
        assert_eq!(bytes, expected);
        let before = list.idle_bytes();
        drop(bytes);
        let rested = list.idle_bytes() - before;
        assert!(
            rested <= max_capacity_for(expected.len()) as u64,
            "{rested}"
        );
    }

    #[test]
    fn memory_begins_at_the_requested_phase() {
        let list = FreeList::new(64 << 20);
        for (len, phase) in [(10, 0), (10, 4095), (MIB, 17), (MIB, 1 << 40 | 5)] {
            let mut memory = list.allocate_empty(len / 3, phase);
            for _ in 0..3 {
                memory.append(&vec![1; len / 3]);
            }
            let address = memory.as_ptr().addr() as u64;
            assert_eq!(address % 4096, phase % 4096, "{len} bytes");
            assert_eq!(memory.freeze(), vec![1; len / 3 * 3]);
        }
    }
}
