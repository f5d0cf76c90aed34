//! Checksums (xxh3-64) of the blocks of spans, to verify a part of a span in a private copy of plain bytes.
//! Blocks are as long as those of the packed stream, counted from the front of the span.

use std::ops::Range;

use zerocopy::little_endian::U64;

use super::storage::Rows;
use crate::base::extent::{Extent, Plain};
use crate::base::span_hash;
use crate::codec::seek_point::MAX_SPAN_LEN;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanChecksums<'a> {
    extent: Extent<Plain>,
    block_len: usize,
    checksums: &'a [U64],
}

impl<'a> SpanChecksums<'a> {
    /// The checksums of a span from row `first` of `checksums` on; `None` in a damaged index.
    pub(super) fn new(
        checksums: &'a Rows<U64>,
        first: u64,
        extent: Extent<Plain>,
        block_len: u64,
    ) -> Option<Self> {
        // A file may claim any length, but no scan makes longer spans.
        if extent.len() > MAX_SPAN_LEN {
            return None;
        }
        let first = usize::try_from(first).ok()?;
        let count = usize::try_from(extent.len().div_ceil(block_len)).ok()?;
        Some(Self {
            extent,
            block_len: usize::try_from(block_len).ok()?,
            checksums: checksums.range(first..first.checked_add(count)?)?,
        })
    }

    pub(crate) fn checksums(&self) -> impl Iterator<Item = u64> {
        self.checksums.iter().map(|checksum| checksum.get())
    }

    /// The whole blocks around bytes `range` of the span: their range in the span, and their extent.
    pub(crate) fn blocks(&self, range: &Range<usize>) -> Option<(Range<usize>, Extent<Plain>)> {
        let len = usize::try_from(self.extent.len()).ok()?;
        let end = range.end.checked_next_multiple_of(self.block_len)?.min(len);
        let start = range.start / self.block_len * self.block_len;
        let blocks = Some(start..end).filter(|blocks| blocks.start <= range.start)?;
        let plain = self.extent.start().0;
        let extent = Extent::new(
            Plain(plain.checked_add(blocks.start as u64)?),
            Plain(plain.checked_add(blocks.end as u64)?),
        )?;
        (range.end <= blocks.end).then_some((blocks, extent))
    }

    /// Whether `bytes` match their checksums. They are whole blocks from byte `start` of the span on.
    pub(crate) fn match_bytes(&self, start: usize, bytes: &[u8]) -> bool {
        let expected = self
            .checksums
            .get(start / self.block_len..)
            .unwrap_or_default();
        let blocks = bytes.chunks(self.block_len);
        blocks.len() <= expected.len()
            && blocks
                .zip(expected)
                .all(|(block, checksum)| span_hash::of_block(block) == checksum.get())
    }

    /// The runs of zeros in the span, in order: whole blocks of at least [`MIN_ZERO_RUN_BYTES`], or all of it.
    pub(crate) fn zero_runs(&self) -> Vec<Extent<Plain>> {
        zero_runs(self.extent, self.block_len as u64, self.checksums())
    }
}

/// Minimum length of a run of zeros that the disk cache does not store. Shorter ones would cut files in pieces.
const MIN_ZERO_RUN_BYTES: u64 = 64 << 10;

/// As [`SpanChecksums::zero_runs`], of the span at `extent` with these checksums of blocks.
pub(crate) fn zero_runs(
    extent: Extent<Plain>,
    block_len: u64,
    checksums: impl Iterator<Item = u64>,
) -> Vec<Extent<Plain>> {
    let mut runs: Vec<Extent<Plain>> = Vec::new();
    let mut start = extent.start();
    for checksum in checksums {
        let len = block_len.min(extent.end().0.saturating_sub(start.0));
        let block = Extent::with_len(start, len);
        start = block.end();
        if usize::try_from(len).is_ok_and(|len| checksum == span_hash::of_zeros(len)) {
            match runs.last_mut() {
                Some(last) if last.end() == block.start() => {
                    *last = Extent::with_len(last.start(), last.len() + len);
                }
                _ => runs.push(block),
            }
        }
    }
    runs.retain(|run| run.len() >= MIN_ZERO_RUN_BYTES.min(extent.len()));
    runs
}

#[cfg(test)]
mod tests {
    use super::super::{Builder, Index, Options};
    use super::*;
    use crate::base::span_hash::SpanHasher;

    const FIRST_LEN: usize = 1000;
    const LEN: usize = 100_000;

    fn index() -> (Index, Vec<u8>) {
        let bytes: Vec<u8> = (0..LEN as u64).map(|n| (n * n % 251) as u8).collect();
        let mut builder = Builder::new(Options::default());
        let mut hasher = SpanHasher::new(super::super::block_len(None));
        let (first, second) = bytes.split_at(FIRST_LEN);
        for (start, span) in [(0, first), (FIRST_LEN, second)] {
            hasher.update(span);
            let plain = Extent::with_len(Plain(start as u64), span.len() as u64);
            builder.add_span(plain, Some(&hasher.finish().1), None);
        }
        let origin = super::super::test_support::index(&[]).origin().clone();
        let origin = super::super::Origin {
            plain_bytes: LEN as u64,
            ..origin
        };
        (builder.finish(origin), bytes)
    }

    #[test]
    fn every_changed_byte_of_a_span_part_is_detected() {
        let (index, bytes) = index();
        let span = &bytes[FIRST_LEN..];
        let checksums = index.span_checksums(1).expect("rows").expect("hashed");
        for (start, end) in [(0, 1), (16_383, 16_385), (50_000, 90_000), (98_999, 99_000)] {
            let (blocks, extent) = checksums.blocks(&(start..end)).expect("inside");
            assert_eq!(extent.start().0, (FIRST_LEN + blocks.start) as u64);
            assert_eq!(extent.len(), blocks.len() as u64);
            assert!(blocks.start <= start && end <= blocks.end);
            let part = &span[blocks.clone()];
            assert!(checksums.match_bytes(blocks.start, part), "{blocks:?}");
            for at in [0, part.len() / 2, part.len() - 1] {
                let mut other = part.to_vec();
                other[at] ^= 1;
                assert!(!checksums.match_bytes(blocks.start, &other), "{at}");
            }
            assert!(!checksums.match_bytes(blocks.start, &part[1..]));
        }
        let twice = [span, span].concat();
        assert!(!checksums.match_bytes(0, &twice), "too long");
        assert!(checksums.blocks(&(0..LEN)).is_none(), "past the end");
    }

    #[test]
    fn zero_runs_are_whole_blocks_of_at_least_64_kib() {
        let runs = |bytes: &[u8]| {
            let mut hasher = SpanHasher::new(16 << 10);
            hasher.update(bytes);
            let extent = Extent::with_len(Plain(7), bytes.len() as u64);
            let runs = zero_runs(extent, 16 << 10, hasher.finish().1.into_iter());
            let runs = runs.iter().map(|run| (run.start().0, run.end().0));
            runs.collect::<Vec<_>>()
        };
        let zeros = |len| vec![0; len];
        assert_eq!(runs(&zeros(100)), [(7, 107)], "all of a short span");
        assert_eq!(runs(&[zeros(100), vec![1]].concat()), []);
        let mixed = [
            vec![1],
            zeros(300_000),
            vec![1; 20_000],
            zeros(64 << 10),
            vec![1],
        ]
        .concat();
        assert_eq!(runs(&mixed), [(7 + (16 << 10), 7 + 18 * (16 << 10))]);
        let end = [vec![1; 16 << 10], zeros(70_000)].concat();
        assert_eq!(runs(&end), [(7 + (16 << 10), 7 + (16 << 10) + 70_000)]);
    }

    #[test]
    fn a_span_without_checksums_has_none() {
        let (mut index, _) = index();
        assert!(index.span_checksums(2).expect("rows").is_none());
        index.arrays.checksums.vec_mut().pop();
        assert!(index.span_checksums(0).expect("rows").is_some());
        assert!(index.span_checksums(1).expect("rows").is_none(), "cut");
        assert!(index.span(1).expect("rows").is_none(), "damaged");
    }
}
