//! Checksums of blocks of spans that are on disk, to read parts of them by.
//!
//! A span has one hash, and to compare that takes all of it. So who has read and verified a span once
//! remembers what its blocks are, and reads only some of them the next time. That is known in this process
//! alone: what other processes write to the same file, or take out, is noticed by these very checksums.

use std::fmt;
use std::mem::size_of_val;
use std::ops::Range;
use std::sync::Arc;

use moka::policy::EvictionPolicy;
use xxhash_rust::xxh3::xxh3_64;

use super::Key;

/// Bytes of a block, but for the last one of a span.
const BLOCK: usize = 16 << 10;

/// What is remembered of a span besides its checksums, in bytes.
const OVERHEAD_BYTES: usize = 128;

/// Checksums of spans, of which those go first that were used longest ago. Clones share them.
#[derive(Clone)]
pub struct Sums {
    spans: moka::sync::Cache<Key, SpanSums>,
}

/// Checksums of the blocks of one span, in order.
#[derive(Clone)]
pub struct SpanSums(Arc<[u64]>);

impl Sums {
    /// None yet, and at most `limit_bytes`: those of a span take a two thousandth part of it.
    pub fn new(limit_bytes: u64) -> Self {
        let weight = |_: &Key, sums: &SpanSums| {
            u32::try_from(size_of_val(&*sums.0) + OVERHEAD_BYTES).unwrap_or(u32::MAX)
        };
        let spans = moka::sync::Cache::builder()
            .max_capacity(limit_bytes)
            .eviction_policy(EvictionPolicy::lru())
            .weigher(weight)
            .build();
        Self { spans }
    }

    /// Remembers the blocks of a span, of which these are all bytes.
    pub fn remember(&self, key: Key, span: &[u8]) {
        if !self.spans.contains_key(&key) {
            let sums = span.chunks(BLOCK).map(xxh3_64).collect();
            self.spans.insert(key, SpanSums(sums));
        }
    }

    /// Those of a span, if they are remembered.
    pub fn get(&self, key: Key) -> Option<SpanSums> {
        self.spans.get(&key)
    }

    /// Forgets those of a span.
    pub fn forget(&self, key: Key) {
        self.spans.invalidate(&key);
    }
}

impl SpanSums {
    /// The blocks that `range` of the span lies in, by their bytes there; the last one may end before.
    pub fn blocks(&self, range: &Range<usize>) -> Range<usize> {
        let start = range.start / BLOCK * BLOCK;
        start..range.end.next_multiple_of(BLOCK)
    }

    /// Whether `bytes` are what blocks from byte `start` of the span on are, where a block begins.
    pub fn are(&self, start: usize, bytes: &[u8]) -> bool {
        let sums = self.0.get(start / BLOCK..).unwrap_or_default();
        let mut blocks = bytes.chunks(BLOCK).zip(sums);
        let count = bytes.len().div_ceil(BLOCK);
        count <= sums.len() && blocks.all(|(block, sum)| xxh3_64(block) == *sum)
    }
}

impl fmt::Debug for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sums").finish_non_exhaustive()
    }
}

impl fmt::Debug for SpanSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpanSums({} blocks)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { layer: 1, span: 7 };

    fn span() -> Vec<u8> {
        let bytes = (0..100_000_u32).map(|number| (number % 251) as u8);
        bytes.collect()
    }

    #[test]
    fn any_part_of_a_span_is_told_from_another() {
        let (sums, span) = (Sums::new(1 << 20), span());
        assert!(sums.get(KEY).is_none());
        sums.remember(KEY, &span);
        let known = sums.get(KEY).expect("remembered");
        for (start, end) in [
            (0, 1),
            (16_383, 16_385),
            (50_000, 90_000),
            (99_999, 100_000),
        ] {
            let blocks = known.blocks(&(start..end));
            let blocks = blocks.start..blocks.end.min(span.len());
            assert!(blocks.start <= start && end <= blocks.end);
            let bytes = &span[blocks.clone()];
            assert!(known.are(blocks.start, bytes), "{blocks:?}");
            for at in [0, bytes.len() / 2, bytes.len() - 1] {
                let mut other = bytes.to_vec();
                other[at] ^= 1;
                assert!(!known.are(blocks.start, &other), "{at} of {blocks:?}");
            }
            assert!(!known.are(blocks.start, &bytes[1..]));
        }
        assert!(!known.are(0, &[span.clone(), span].concat()), "too long");
        sums.forget(KEY);
        assert!(sums.get(KEY).is_none());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (sums, span) = (Sums::new(10_000), span());
        for number in 0..1000 {
            sums.remember(
                Key {
                    layer: 0,
                    span: number,
                },
                &span,
            );
        }
        sums.spans.run_pending_tasks();
        assert!((5000..=10_000).contains(&sums.spans.weighted_size()));
    }
}
