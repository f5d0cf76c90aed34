//! Division of an extent into chunks; pure.

use crate::base::extent::{Extent, Packed};

/// The chunks of an extent in order. The caller chooses each length, and the extent's end cuts the last.
#[derive(Clone, Debug)]
pub(super) struct Chunks {
    next: Packed,
    end: Packed,
}

impl Chunks {
    /// Creates the chunks from `start` to `end`; none if `end` is not after `start`.
    pub(super) fn new(start: Packed, end: Packed) -> Self {
        Self { next: start, end }
    }

    /// Returns the next chunk of `len` bytes, at least one byte.
    pub(super) fn peek(&self, len: u64) -> Option<Extent<Packed>> {
        let left = self.end.0.checked_sub(self.next.0)?;
        let chunk = Extent::with_len(self.next, left.min(len.max(1)));
        (!chunk.is_empty()).then_some(chunk)
    }

    pub(super) fn is_done(&self) -> bool {
        self.next >= self.end
    }

    pub(super) fn advance_past(&mut self, chunk: Extent<Packed>) {
        self.next = chunk.end();
    }

    pub(super) fn end(&mut self) {
        self.end = self.next;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn lens(start: u64, end: u64, wanted: &[u64]) -> Vec<u64> {
        let mut chunks = Chunks::new(Packed(start), Packed(end));
        let mut lens = Vec::new();
        for &len in wanted {
            let Some(chunk) = chunks.peek(len) else {
                break;
            };
            chunks.advance_past(chunk);
            lens.push(chunk.len());
        }
        lens
    }

    #[test]
    fn chunks_have_the_requested_length_up_to_the_end() {
        assert_eq!(lens(7, 27, &[1, 4, 9, 9]), [1, 4, 9, 6]);
        assert_eq!(lens(0, 2, &[0, 0, 0]), [1, 1]);
    }

    #[test]
    fn empty_extent_has_no_chunks() {
        assert_eq!(lens(5, 5, &[MIB]), [0; 0]);
        assert_eq!(lens(6, 5, &[MIB]), [0; 0]);
    }

    #[test]
    fn unknown_end_is_not_reached_until_it_is_set() {
        let mut chunks = Chunks::new(Packed(0), Packed(u64::MAX));
        let chunk = chunks.peek(u64::MAX - 1).expect("a chunk");
        chunks.advance_past(chunk);
        assert_eq!(chunks.peek(MIB).map(|chunk| chunk.len()), Some(1));
        assert!(!chunks.is_done());
        chunks.end();
        assert!(chunks.is_done() && chunks.peek(MIB).is_none());
    }

    proptest! {
        #[test]
        fn chunks_cover_the_extent_once(
            start in 0..MIB,
            len in 0..64 * MIB,
            wanted in prop::collection::vec(MIB / 4..16 * MIB, 1..8),
        ) {
            let mut chunks = Chunks::new(Packed(start), Packed(start + len));
            let mut next = start;
            for wanted in wanted.into_iter().cycle() {
                let Some(chunk) = chunks.peek(wanted) else {
                    break;
                };
                prop_assert_eq!(chunk.start(), Packed(next));
                prop_assert!(!chunk.is_empty() && chunk.len() <= wanted);
                chunks.advance_past(chunk);
                next = chunk.end().0;
            }
            prop_assert!(chunks.is_done());
            prop_assert_eq!(next, start + len);
        }
    }
}
