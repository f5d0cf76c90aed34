//! Hash of a span: a checksum of each block, and a hash over the checksums. The last block may be shorter. A
//! reader with the checksums can verify a part of the span.

use std::fmt;
use std::mem;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Streaming hasher for one span after another.
#[derive(Default)]
pub struct SpanHasher {
    block_len: usize,
    /// State of the current block, if it is incomplete.
    hasher: Xxh3Default,
    filled: usize,
    checksums: Vec<u64>,
}

impl fmt::Debug for SpanHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanHasher")
            .field("block_len", &self.block_len)
            .field("blocks", &self.checksums.len())
            .finish_non_exhaustive()
    }
}

impl SpanHasher {
    /// Creates a hasher for blocks of `block_len` bytes, at least one.
    pub fn new(block_len: u64) -> Self {
        Self {
            block_len: usize::try_from(block_len).unwrap_or(usize::MAX).max(1),
            ..Self::default()
        }
    }

    /// Adds the next bytes of the span.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(self.block_len - self.filled));
            bytes = rest;
            if piece.len() == self.block_len {
                self.checksums.push(xxh3_64(piece));
                continue;
            }
            self.hasher.update(piece);
            self.filled += piece.len();
            if self.filled == self.block_len {
                self.end_block();
            }
        }
    }

    /// Ends the span, and returns its hash and block checksums. The next bytes start another span.
    pub fn finish(&mut self) -> (u64, Vec<u64>) {
        if self.filled > 0 {
            self.end_block();
        }
        let checksums = mem::take(&mut self.checksums);
        (of_checksums(checksums.iter().copied()), checksums)
    }

    fn end_block(&mut self) {
        self.checksums.push(self.hasher.digest());
        self.hasher.reset();
        self.filled = 0;
    }
}

/// Hash of a span from its block checksums: xxh3-64 of all checksums in little-endian order.
pub fn of_checksums(checksums: impl Iterator<Item = u64>) -> u64 {
    let bytes: Vec<u8> = checksums.flat_map(u64::to_le_bytes).collect();
    xxh3_64(&bytes)
}

/// Hash of a span's `bytes`, in blocks of `block_len` bytes.
pub fn of_bytes(bytes: &[u8], block_len: u64) -> u64 {
    let mut hasher = SpanHasher::new(block_len);
    hasher.update(bytes);
    hasher.finish().0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_block_has_the_checksum_of_its_bytes() {
        let bytes: Vec<u8> = (0..100_u8).collect();
        let mut hasher = SpanHasher::new(32);
        hasher.update(&bytes);
        let (hash, checksums) = hasher.finish();
        let expected: Vec<u64> = bytes.chunks(32).map(xxh3_64).collect();
        assert_eq!(checksums, expected);
        assert_eq!(hash, of_checksums(expected.into_iter()));
        assert_eq!(
            hasher.finish().1,
            Vec::<u64>::new(),
            "the next span is empty"
        );
    }

    proptest! {
        #[test]
        fn pieces_of_any_length_make_the_same_hash(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..10),
            block_len in 1..50_u64,
        ) {
            let mut hasher = SpanHasher::new(block_len);
            for piece in &pieces {
                hasher.update(piece);
            }
            let whole = pieces.concat();
            prop_assert_eq!(hasher.finish().0, of_bytes(&whole, block_len));
            let mut other = whole.clone();
            if let Some(last) = other.last_mut() {
                *last ^= 1;
                prop_assert_ne!(of_bytes(&other, block_len), of_bytes(&whole, block_len));
            }
        }
    }
}
