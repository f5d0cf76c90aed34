//! Where the names of a tree are while they are sorted in place.

use zerocopy::little_endian::U32;

/// Where dirents are while they move to their sorted places.
#[derive(Debug)]
pub(in crate::index) struct Places {
    /// By the number that a dirent had before the sort: its place.
    pub(super) sorted: Vec<U32>,
    /// By place: whether its dirent is there.
    pub(super) placed: Bits,
    /// By inode: whether its row has a sorted number.
    pub(super) renumbered: Bits,
    /// The number of the only dirent that is at neither place, and where it is instead.
    pub(super) displaced: (u32, u32),
}

impl Places {
    /// Where dirent `number` is now.
    pub(super) fn find(&self, number: u32) -> u32 {
        if number == self.displaced.0 {
            return self.displaced.1;
        }
        match self.sorted.get(number as usize).copied().map(U32::get) {
            Some(place) if self.placed.contains(place as usize) => place,
            _ => number,
        }
    }

    /// Where the first dirent of `ino` is now, whose row has `number`.
    pub(super) fn find_first(&self, ino: u32, number: u32) -> u32 {
        if self.renumbered.contains(ino as usize) {
            return number;
        }
        self.find(number)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let sorted = self.sorted.capacity() * size_of::<U32>();
        sorted + self.placed.memory_bytes() + self.renumbered.memory_bytes()
    }
}

/// A set of small numbers.
#[derive(Debug)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub(super) fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    pub(super) fn contains(&self, number: usize) -> bool {
        let word = self.0.get(number / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 != 0)
    }

    pub(super) fn insert(&mut self, number: usize) {
        if let Some(word) = self.0.get_mut(number / 64) {
            *word |= 1 << (number % 64);
        }
    }

    fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<u64>()
    }
}
