//! Hash of a span: a checksum of each block, and a hash over the checksums. The last block may be shorter. A
//! reader with the checksums can verify a part of the span.
//! A checksum is the xxh3-64 of the block. But a block with other bytes never has the checksum of zeros, so that
//! this one proves zeros.

use std::fmt;
use std::mem;
use std::sync::OnceLock;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Streaming hasher for one span after another.
#[derive(Default)]
pub struct SpanHasher {
    block_len: usize,
    /// State of the current block, if it is incomplete.
    hasher: Xxh3Default,
    filled: usize,
    /// Whether the current block has only zeros so far.
    is_zero: bool,
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
            is_zero: true,
            ..Self::default()
        }
    }

    /// Adds the next bytes of the span.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(self.block_len - self.filled));
            bytes = rest;
            if piece.len() == self.block_len {
                self.checksums.push(of_block(piece));
                continue;
            }
            self.hasher.update(piece);
            self.is_zero = self.is_zero && is_zero(piece);
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
        let checksum = distinct_from_zeros(self.hasher.digest(), self.filled, || self.is_zero);
        self.checksums.push(checksum);
        self.hasher.reset();
        self.filled = 0;
        self.is_zero = true;
    }
}

/// Checksum of a block.
pub fn of_block(block: &[u8]) -> u64 {
    distinct_from_zeros(xxh3_64(block), block.len(), || is_zero(block))
}

/// Checksum of a block of `len` zeros, which no other block has.
pub fn of_zeros(len: usize) -> u64 {
    /// Checksums of lengths that are powers of two, as those of all blocks but the last of a span.
    static OF_WHOLE_BLOCKS: [OnceLock<u64>; usize::BITS as usize] =
        [const { OnceLock::new() }; usize::BITS as usize];
    let compute = || {
        let mut hasher = Xxh3Default::default();
        let mut missing = len;
        while missing > 0 {
            let piece = ZEROS.get(..missing).unwrap_or(&ZEROS);
            hasher.update(piece);
            missing -= piece.len();
        }
        hasher.digest()
    };
    let known = OF_WHOLE_BLOCKS.get(len.trailing_zeros() as usize);
    match known.filter(|_| len.is_power_of_two()) {
        Some(known) => *known.get_or_init(compute),
        None => compute(),
    }
}

static ZEROS: [u8; 16 << 10] = [0; 16 << 10];

/// Changes the `hash` of a block that has other bytes, if zeros have it. XXH3 resists no attacker.
fn distinct_from_zeros(hash: u64, len: usize, is_zero: impl FnOnce() -> bool) -> u64 {
    if hash == of_zeros(len) && !is_zero() {
        return hash ^ 1;
    }
    hash
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
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

    // Promises: disk-zeros
    #[test]
    fn only_zeros_have_the_checksum_of_zeros() {
        for len in [1, 16 << 10, 40_000] {
            let zeros = vec![0; len];
            assert_eq!(of_block(&zeros), of_zeros(len), "{len}");
            assert_eq!(of_zeros(len), xxh3_64(&zeros), "as older indexes have it");
            assert_ne!(
                distinct_from_zeros(of_zeros(len), len, || false),
                of_zeros(len)
            );
        }
        let mut hasher = SpanHasher::new(32);
        for piece in [&[0; 20][..], &[1; 20], &[0; 37]] {
            hasher.update(piece);
        }
        let are_zeros: Vec<bool> = hasher
            .finish()
            .1
            .into_iter()
            .zip([32, 32, 13])
            .map(|(checksum, len)| checksum == of_zeros(len))
            .collect();
        assert_eq!(are_zeros, [false, false, true]);
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
