//! Digests of blocks of the packed stream, which bind later reads to the scanned bytes.
//!
//! A block is a fixed, aligned range of packed bytes. Its digest is the chaining value of that subtree of the
//! stream's BLAKE3 tree, so a block can be verified by itself. All digests together give the BLAKE3 digest of
//! the whole, the content id.

use blake3::Hasher;
use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use super::storage::Rows;
use crate::base::extent::{Extent, Packed};

/// The digest of a block, or of the front of one.
pub(crate) type BlockDigest = [u8; 32];

/// Marks a block of which the scan skipped some bytes.
pub(super) const UNKNOWN_DIGEST: BlockDigest = [0; 32];

pub(super) const MIN_BLOCK_LEN: u64 = 16 << 10;

/// In bytes. A read of one byte fetches and hashes as much.
pub(super) const MAX_BLOCK_LEN: u64 = 1 << 20;

/// Maximum number of blocks (32 MiB of digests), as long as blocks may grow instead.
const MAX_BLOCKS: u64 = 1 << 20;

/// Block length for a source of `source_bytes` bytes: a power of two.
pub fn block_len(source_bytes: Option<u64>) -> u64 {
    let needed = source_bytes.unwrap_or_default().div_ceil(MAX_BLOCKS);
    needed
        .next_power_of_two()
        .clamp(MIN_BLOCK_LEN, MAX_BLOCK_LEN)
}

pub(super) fn block_count(blocks: u64) -> usize {
    usize::try_from(blocks).unwrap_or(usize::MAX)
}

/// New digests, adjacent to the previous ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewDigests {
    /// In bytes.
    pub block_len: u64,
    /// Number of the first block. An earlier report may contain it with fewer bytes.
    pub first: u64,
    /// The digests. The last one covers only the front of its block, unless the block ends at `end`.
    pub digests: Vec<BlockDigest>,
    /// End of the digested bytes.
    pub end: Packed,
}

/// Computes the digests of the blocks of a packed stream.
#[derive(Debug)]
pub struct BlockHasher {
    block_len: u64,
    hasher: Hasher,
    next: u64,
    /// Whether the hasher got the front of the current block.
    is_whole: bool,
    digest: BlockDigest,
    tree: SubtreeStack,
}

impl BlockHasher {
    /// A hasher for the stream from `start` on; `block_len` is a result of [`block_len`].
    pub fn new(block_len: u64, start: Packed) -> Self {
        Self {
            block_len,
            hasher: hasher_at(start.0),
            next: start.0,
            is_whole: start.0.is_multiple_of(block_len),
            digest: UNKNOWN_DIGEST,
            tree: SubtreeStack::default(),
        }
    }

    /// Hashes the next `bytes`, and returns the digests of their blocks so far.
    pub fn update(&mut self, mut bytes: &[u8]) -> NewDigests {
        let first = self.next / self.block_len;
        let mut digests = Vec::new();
        while !bytes.is_empty() {
            if self.next.is_multiple_of(self.block_len) {
                self.begin_block();
            }
            let left = self.block_len - self.next % self.block_len;
            let len = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (piece, rest) = bytes.split_at(len);
            if self.is_whole {
                self.digest = self.hasher.update(piece).finalize_non_root();
            }
            self.next += piece.len() as u64;
            bytes = rest;
            digests.push(self.digest);
        }
        NewDigests {
            block_len: self.block_len,
            first,
            digests,
            end: Packed(self.next),
        }
    }

    /// BLAKE3 digest of all bytes; valid only if the first one began the stream.
    pub fn content_id(self) -> [u8; 32] {
        if self.tree.count == 0 && self.next <= self.block_len {
            return *self.hasher.finalize().as_bytes();
        }
        self.tree.root(self.digest)
    }

    fn begin_block(&mut self) {
        if self.hasher.count() > 0 {
            self.tree.push(self.digest);
        }
        self.hasher = hasher_at(self.next);
        self.is_whole = true;
    }
}

fn hasher_at(offset: u64) -> Hasher {
    let mut hasher = Hasher::new();
    if offset.is_multiple_of(MIN_BLOCK_LEN) {
        hasher.set_input_offset(offset);
    }
    hasher
}

/// Roots of complete BLAKE3 subtrees. Equal ones merge only if blocks follow, because the root is different.
#[derive(Debug, Default)]
struct SubtreeStack {
    /// Each smaller than the one before.
    stack: Vec<BlockDigest>,
    count: u64,
}

impl SubtreeStack {
    /// Adds a complete block. Another block must follow it.
    fn push(&mut self, digest: BlockDigest) {
        self.merge();
        self.stack.push(digest);
        self.count += 1;
    }

    /// Merges until the subtree sizes are the powers of two that add up to the block count.
    fn merge(&mut self) {
        while self.stack.len() > self.count.count_ones() as usize {
            let (Some(right), Some(left)) = (self.stack.pop(), self.stack.pop()) else {
                return;
            };
            self.stack
                .push(merge_subtrees_non_root(&left, &right, Mode::Hash));
        }
    }

    /// Digest of the whole stream, whose last block has digest `last`.
    fn root(mut self, last: BlockDigest) -> [u8; 32] {
        self.merge();
        let mut right = last;
        while let Some(left) = self.stack.pop() {
            if self.stack.is_empty() {
                return *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes();
            }
            right = merge_subtrees_non_root(&left, &right, Mode::Hash);
        }
        right
    }
}

/// Digests of adjacent blocks, to verify fetched bytes.
#[derive(Clone, Debug)]
pub struct Blocks {
    block_len: u64,
    /// Whole blocks. If the last one is cut, its digest covers the part before the cut.
    extent: Extent<Packed>,
    digests: Vec<BlockDigest>,
    /// Whether the last block, if it is cut, ends at the end of the stream.
    is_final: bool,
}

impl Blocks {
    /// The blocks of `extent` up to `digested`; `None` for none of it. If `is_final`, the stream ends there.
    pub(super) fn new(
        digests: &Rows<BlockDigest>,
        block_len: u64,
        digested: Packed,
        extent: Extent<Packed>,
        is_final: bool,
    ) -> Option<Self> {
        let end = extent.end().0.min(digested.0);
        let first = extent.start().0 / block_len;
        let blocks_end = end.checked_next_multiple_of(block_len)?.min(digested.0);
        let extent = Extent::new(Packed(first * block_len), Packed(blocks_end))?;
        let rows = usize::try_from(first).ok()?..usize::try_from(end.div_ceil(block_len)).ok()?;
        let digests = digests.range(rows)?;
        (!digests.is_empty()).then(|| Self {
            block_len,
            extent,
            digests: digests.to_vec(),
            is_final,
        })
    }

    /// The packed bytes of the blocks, which the caller must fetch.
    pub fn extent(&self) -> Extent<Packed> {
        self.extent
    }

    /// Whether `bytes`, all of block `number`, match its digest, or the scan skipped them.
    pub(crate) fn matches(&self, number: usize, bytes: &[u8]) -> bool {
        let Some(&expected) = self.digests.get(number) else {
            return false;
        };
        expected == UNKNOWN_DIGEST
            || (!bytes.is_empty()
                && hasher_at(self.block(number).start().0)
                    .update(bytes)
                    .finalize_non_root()
                    == expected)
    }

    /// Blocks without a digest in `bytes`, all of [`extent`](Self::extent), by number in the stream. Leaves
    /// out a block that is cut although the stream continues.
    pub fn undigested_blocks<'a>(
        &self,
        bytes: &'a [u8],
    ) -> impl Iterator<Item = (usize, &'a [u8])> {
        let block_len = usize::try_from(self.block_len).unwrap_or(usize::MAX);
        let first = block_count(self.extent.start().0 / self.block_len);
        let blocks = self.digests.iter().zip(bytes.chunks(block_len));
        let numbered = (first..).zip(blocks);
        let is_final = self.is_final;
        numbered.filter_map(move |(number, (digest, block))| {
            let is_whole = block.len() == block_len || is_final;
            (*digest == UNKNOWN_DIGEST && is_whole).then_some((number, block))
        })
    }

    /// Start of the first block that does not match. `bytes` are all of [`extent`](Self::extent).
    pub(crate) fn mismatch(&self, bytes: &[u8]) -> Option<Packed> {
        let block_len = usize::try_from(self.block_len).unwrap_or(usize::MAX);
        let mut blocks = bytes.chunks(block_len).enumerate();
        let count = blocks.len();
        let number = blocks.position(|(number, block)| !self.matches(number, block));
        let number = number.or((count < self.digests.len()).then_some(count));
        number.map(|number| self.block(number).start())
    }

    /// Whether the blocks in `bytes`, of which the first is `number`, match.
    pub(crate) fn all_match(&self, number: usize, bytes: &[u8]) -> bool {
        let block_len = usize::try_from(self.block_len).unwrap_or(usize::MAX);
        let mut blocks = (number..).zip(bytes.chunks(block_len));
        blocks.all(|(number, block)| self.matches(number, block))
    }

    /// Whether each block has a digest, so that bytes from any source can be verified.
    pub(crate) fn are_all_digested(&self) -> bool {
        self.digests.iter().all(|digest| *digest != UNKNOWN_DIGEST)
    }

    /// Offset of block `number` of the stream, if it is one of these.
    pub(crate) fn stream_block(&self, number: usize) -> Option<Packed> {
        let start = (number as u64).checked_mul(self.block_len)?;
        (self.extent.start().0..self.extent.end().0)
            .contains(&start)
            .then_some(Packed(start))
    }

    /// Block `number` of these; empty past the last.
    pub(crate) fn block(&self, number: usize) -> Extent<Packed> {
        let offset = (number as u64).saturating_mul(self.block_len);
        let left = self.extent.len().saturating_sub(offset);
        let start = Packed(self.extent.start().0.saturating_add(offset));
        Extent::with_len(start, left.min(self.block_len))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Builder, Index, Options, Origin};
    use super::*;
    use crate::base::extent::Plain;

    fn stream(len: usize) -> Vec<u8> {
        let numbers = (0..len as u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        numbers.map(|n| n.to_le_bytes()[7]).collect()
    }

    fn index_of(pieces: &[&[u8]]) -> (Index, [u8; 32]) {
        let mut builder = Builder::new(Options::default());
        let mut hasher = BlockHasher::new(MIN_BLOCK_LEN, Packed(0));
        for piece in pieces {
            builder.add_digests(&hasher.update(piece));
        }
        (builder.finish(Origin::default()), hasher.content_id())
    }

    #[test]
    fn blocks_grow_with_the_source_within_bounds() {
        let lens = [None, Some(0), Some(MIN_BLOCK_LEN << 20)].map(block_len);
        assert_eq!(lens, [MIN_BLOCK_LEN; 3]);
        assert_eq!(
            block_len(Some((MIN_BLOCK_LEN << 20) + 1)),
            2 * MIN_BLOCK_LEN
        );
        assert_eq!(block_len(Some(u64::MAX)), MAX_BLOCK_LEN);
    }

    #[test]
    fn block_without_its_first_bytes_has_no_digest() {
        let mut hasher = BlockHasher::new(MIN_BLOCK_LEN, Packed(MIN_BLOCK_LEN - 1));
        let new = hasher.update(&[1, 2]);
        assert_eq!((new.first, new.end), (0, Packed(MIN_BLOCK_LEN + 1)));
        assert_eq!(new.digests.first(), Some(&UNKNOWN_DIGEST));
        let mut expected = Hasher::new();
        expected.set_input_offset(MIN_BLOCK_LEN).update(&[2]);
        assert_eq!(new.digests.get(1), Some(&expected.finalize_non_root()));
    }

    // Promises: check-digests
    #[test]
    fn skipped_blocks_have_no_digest_and_neighbours_do() {
        let mut builder = Builder::new(Options::default());
        let len = usize::try_from(MIN_BLOCK_LEN).unwrap();
        let bytes = stream(len + 7);
        let block = &bytes[..len];
        // One block, the front of the next, a gap up to the middle of the fourth, and one more block.
        builder.add_digests(&BlockHasher::new(MIN_BLOCK_LEN, Packed(0)).update(&bytes));
        let skipped = Extent::with_len(Plain(MIN_BLOCK_LEN + 7), 2 * MIN_BLOCK_LEN);
        builder.add_span(skipped, None, None);
        let blocks = |builder: &Builder, number: u64| {
            let extent = Extent::with_len(Packed(number * MIN_BLOCK_LEN), 1);
            builder.index().blocks(extent).expect("rows")
        };
        assert!(blocks(&builder, 3).is_some_and(|blocks| blocks.extent().len() == 7));
        assert!(blocks(&builder, 4).is_none(), "not read yet");
        let behind = Packed(skipped.end().0);
        let left = vec![1; len - 7];
        builder
            .add_digests(&BlockHasher::new(MIN_BLOCK_LEN, behind).update(&[&left, block].concat()));

        let other = vec![7; len];
        for (number, is_known) in [(0, true), (1, false), (2, false), (3, false), (4, true)] {
            let found = blocks(&builder, number).expect("scanned or skipped");
            let start = Packed(number * MIN_BLOCK_LEN);
            assert_eq!(
                found.mismatch(&other),
                is_known.then_some(start),
                "{number}"
            );
            assert!(!is_known || found.mismatch(block).is_none(), "{number}");
        }
        assert!(!builder.index().is_hashed().expect("rows"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        // Promises: check-digests
        #[test]
        fn digests_are_those_of_blake3_however_the_stream_is_cut(
            len in 1_usize..600_000,
            cuts in prop::collection::vec(0_usize..600_000, 0..8),
            start in 0_usize..600_000,
            wanted in 1_usize..200_000,
            flipped in 0_usize..600_000,
        ) {
            let bytes = stream(len);
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut % len).collect();
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for cut in cuts.into_iter().chain([len]) {
                pieces.push(&bytes[from..cut]);
                from = cut;
            }
            let (index, content_id) = index_of(&pieces);
            prop_assert_eq!(content_id, *blake3::hash(&bytes).as_bytes());

            let start = start % len;
            let extent = Extent::with_len(Packed(start as u64), wanted.min(len - start) as u64);
            let blocks = index.blocks(extent).expect("rows").expect("digested");
            let found = blocks.extent();
            prop_assert!(found.start() <= extent.start() && extent.end() <= found.end());
            prop_assert!(found.start().0.is_multiple_of(MIN_BLOCK_LEN));
            let place = |at: Packed| usize::try_from(at.0).unwrap();
            let from = place(found.start());
            let mut fetched = bytes[from..place(found.end())].to_vec();
            prop_assert_eq!(blocks.mismatch(&fetched), None);
            let flipped = flipped % fetched.len();
            fetched[flipped] ^= 1;
            let block = (from + flipped) as u64 / MIN_BLOCK_LEN * MIN_BLOCK_LEN;
            prop_assert_eq!(blocks.mismatch(&fetched), Some(Packed(block)));
            fetched[flipped] ^= 1;
            prop_assert!(blocks.mismatch(&fetched[..fetched.len() - 1]).is_some());
        }
    }
}
