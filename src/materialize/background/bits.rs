//! A set of numbers that many threads read and change.

use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each number from 0 to the last.
#[derive(Debug)]
pub(super) struct Bits(Vec<AtomicU64>);

impl Bits {
    /// The empty set of numbers up to `last`.
    pub(super) fn new(last: u32) -> Self {
        let words = last as usize / 64 + 1;
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// Whether it holds `number`.
    pub(super) fn get(&self, number: u32) -> bool {
        let word = self.word(number);
        word.is_some_and(|word| word.load(Ordering::Acquire) & bit(number) != 0)
    }

    /// Adds `number`; whether it was not there.
    pub(super) fn set(&self, number: u32) -> bool {
        let word = self.word(number);
        word.is_some_and(|word| word.fetch_or(bit(number), Ordering::AcqRel) & bit(number) == 0)
    }

    /// Removes `number`; whether it was there.
    pub(super) fn clear(&self, number: u32) -> bool {
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
    fn numbers_come_and_go_and_none_is_past_the_last() {
        let bits = Bits::new(64);
        assert!(bits.set(64) && !bits.set(64) && bits.set(0));
        assert!(bits.get(64) && bits.get(0) && !bits.get(63));
        assert!(bits.clear(64) && !bits.clear(64) && !bits.get(64));
        assert!(!bits.set(128) && !bits.get(128) && !bits.clear(128));
    }
}
