//! How an extent is cut into chunks; pure.

use std::iter::FusedIterator;

use crate::base::extent::{Extent, Packed};

/// Length of the first chunk: small, so that decoding starts early.
const FIRST_CHUNK_LEN: u64 = 1 << 20;

/// The chunks of an extent, in order, without gaps: the first of 1 MiB, each further one twice as
/// long up to a limit, the last one cut at the end.
#[derive(Clone, Debug)]
pub struct Plan {
    next: Packed,
    end: Packed,
    chunk_len: u64,
    max_chunk_len: u64,
}

impl Plan {
    /// The chunks from `start` up to `end`, none longer than `max_chunk_len` bytes (at least one
    /// byte); empty when `end` does not lie behind `start`.
    pub fn new(start: Packed, end: Packed, max_chunk_len: u64) -> Self {
        let max_chunk_len = max_chunk_len.max(1);
        Self {
            next: start,
            end,
            chunk_len: FIRST_CHUNK_LEN.min(max_chunk_len),
            max_chunk_len,
        }
    }
}

impl Iterator for Plan {
    type Item = Extent<Packed>;

    fn next(&mut self) -> Option<Extent<Packed>> {
        let left = self
            .end
            .0
            .checked_sub(self.next.0)
            .filter(|&left| left > 0)?;
        let chunk = Extent::with_len(self.next, left.min(self.chunk_len));
        self.next = chunk.end();
        self.chunk_len = self.chunk_len.saturating_mul(2).min(self.max_chunk_len);
        Some(chunk)
    }
}

impl FusedIterator for Plan {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn lens(start: u64, end: u64, max_chunk_len: u64) -> Vec<u64> {
        Plan::new(Packed(start), Packed(end), max_chunk_len)
            .map(|chunk| chunk.len())
            .collect()
    }

    #[test]
    fn chunks_double_up_to_the_limit_and_end_at_the_end() {
        assert_eq!(
            lens(0, 20 * MIB + 5, 8 * MIB),
            [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 5 * MIB + 5]
        );
    }

    #[test]
    fn a_small_limit_holds_from_the_first_chunk_on() {
        assert_eq!(lens(7, 17, 4), [4, 4, 2]);
        assert_eq!(lens(0, 2, 0), [1, 1]);
    }

    #[test]
    fn nothing_is_cut_into_nothing() {
        assert_eq!(lens(5, 5, MIB), [0; 0]);
        assert_eq!(lens(6, 5, MIB), [0; 0]);
    }

    #[test]
    fn an_end_that_nobody_knows_is_never_reached() {
        let mut plan = Plan::new(Packed(0), Packed(u64::MAX), u64::MAX);
        assert_eq!(
            plan.by_ref().last().map(|chunk| chunk.end()),
            Some(Packed(u64::MAX))
        );
        assert_eq!(plan.next(), None);
    }

    proptest! {
        #[test]
        fn chunks_cover_the_extent_once(start in 0..MIB, len in 0..64 * MIB, max in MIB / 4..16 * MIB) {
            let mut next = start;
            for chunk in Plan::new(Packed(start), Packed(start + len), max) {
                prop_assert_eq!(chunk.start(), Packed(next));
                prop_assert!(!chunk.is_empty() && chunk.len() <= max);
                next = chunk.end().0;
            }
            prop_assert_eq!(next, start + len);
        }
    }
}
