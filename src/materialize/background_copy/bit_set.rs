//! A set of numbers that many threads read and change.

use std::sync::atomic::{AtomicU64, Ordering};

/// A set of numbers from 0 to the last one, which many threads read and change.
#[derive(Debug)]
pub(super) struct BitSet(Vec<AtomicU64>);

impl BitSet {
    pub(super) fn new(last: u32) -> Self {
        let words = last as usize / 64 + 1;
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        let word = self.word(number);
        word.is_some_and(|word| word.load(Ordering::Acquire) & bit(number) != 0)
    }

    /// Returns whether `number` is new.
    pub(super) fn insert(&self, number: u32) -> bool {
        let word = self.word(number);
        word.is_some_and(|word| word.fetch_or(bit(number), Ordering::AcqRel) & bit(number) == 0)
    }

    /// Returns whether the set contained `number`.
    pub(super) fn remove(&self, number: u32) -> bool {
        let word = self.word(number);
        word.is_some_and(|word| word.fetch_and(!bit(number), Ordering::AcqRel) & bit(number) != 0)
    }

    fn word(&self, number: u32) -> Option<&AtomicU64> {
        self.0.get(number as usize / 64)
    }
}

fn bit(number: u32) -> u64 {
    1 << (number % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bit_set_inserts_and_removes_only_numbers_in_range() {
        let bits = BitSet::new(64);
        assert!(bits.insert(64) && !bits.insert(64) && bits.insert(0));
        assert!(bits.contains(64) && bits.contains(0) && !bits.contains(63));
        assert!(bits.remove(64) && !bits.remove(64) && !bits.contains(64));
        assert!(!bits.insert(128) && !bits.contains(128) && !bits.remove(128));
    }
}
