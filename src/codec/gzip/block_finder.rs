//! Finds probable starts of deflate blocks in the middle of a stream (RFC 1951, section 3.2). A dynamic block
//! shows by the first 74 bits of its header, whose precode must be complete (one random position in a
//! thousand), a stored block by its length and complement. Fixed blocks cannot be found, last ones need not.

/// A place where a block may begin, in bits from the start of what is searched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) bit: u64,
    /// The same block could begin so many bits before: zeros before a stored length are header or padding.
    pub(super) ambiguous_bits: u64,
}

/// The candidates in some bytes, about in order.
pub(super) struct Candidates<'a> {
    bytes: &'a [u8],
    /// Blocks that begin at or after this byte are not searched.
    end: usize,
    next: usize,
    /// The bits of the byte before `next` at which a dynamic block may begin.
    offsets: u8,
}

impl<'a> Candidates<'a> {
    /// The candidates before byte `end`; the rest of `bytes` is only looked ahead at.
    pub(super) fn new(bytes: &'a [u8], end: usize) -> Self {
        Self {
            bytes,
            end: end.min(bytes.len()),
            next: 0,
            offsets: 0,
        }
    }

    /// The stored block whose length is at byte `at`.
    fn stored_block_at(&self, at: usize) -> Option<Candidate> {
        let [len_low, len_high, not_low, not_high] = *self.bytes.get(at..)?.first_chunk()?;
        if len_low != !not_low || len_high != !not_high {
            return None;
        }
        let before = at.checked_sub(2).and_then(|at| self.bytes.get(at));
        let before = [
            *before.unwrap_or(&0xff),
            *self.bytes.get(at.checked_sub(1)?)?,
        ];
        let zeros = u16::from_le_bytes(before).leading_zeros();
        // Three are the header of a block that is not the last, up to seven are padding.
        Some(Candidate {
            bit: (at as u64) * 8 - 3,
            ambiguous_bits: u64::from(zeros.min(10).checked_sub(3)?),
        })
    }
}

impl Iterator for Candidates<'_> {
    type Item = Candidate;

    fn next(&mut self) -> Option<Candidate> {
        loop {
            while self.offsets != 0 {
                let offset = u64::from(self.offsets.trailing_zeros());
                self.offsets &= self.offsets - 1;
                let bit = (self.next as u64 - 1) * 8 + offset;
                if has_complete_precode(self.bytes, bit) {
                    return Some(Candidate {
                        bit,
                        ambiguous_bits: 0,
                    });
                }
            }
            if self.next >= self.end {
                return None;
            }
            let at = self.next;
            self.next += 1;
            self.offsets = table_entry(&DYNAMIC_BLOCK_OFFSETS, load_u64(self.bytes, at));
            if let Some(candidate) = self.stored_block_at(at) {
                return Some(candidate);
            }
        }
    }
}

/// The entry of `table` that the lowest bits of `bits` choose; its length is a power of two.
fn table_entry<T: Copy + Default, const N: usize>(table: &[T; N], bits: u64) -> T {
    let number = usize::try_from(bits & (N as u64 - 1)).unwrap_or_default();
    table.get(number).copied().unwrap_or_default()
}

fn load_u64(bytes: &[u8], at: usize) -> u64 {
    let rest = bytes.get(at..).unwrap_or_default();
    match rest.first_chunk() {
        Some(chunk) => u64::from_le_bytes(*chunk),
        None => rest
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// Whether a dynamic block's header, whose first three bits are known to be at `bit`, has a complete precode.
fn has_complete_precode(bytes: &[u8], bit: u64) -> bool {
    let at = |bit: u64| {
        let byte = usize::try_from(bit / 8).unwrap_or(usize::MAX);
        load_u64(bytes, byte) >> (bit % 8)
    };
    let header = at(bit + 3);
    let (literals, distances, lens) = (header & 31, header >> 5 & 31, (header >> 10 & 15) + 4);
    if literals > 29 || distances > 29 {
        return false;
    }
    let lens = at(bit + 17) & ((1 << (3 * lens)) - 1);
    let mut code_space = 0;
    for four in 0..5 {
        code_space += table_entry(&CODE_SPACE, lens >> (12 * four));
    }
    code_space == COMPLETE_CODE
}

/// The code space that all codes of a complete code with lengths up to 7 bits fill.
const COMPLETE_CODE: u16 = 1 << 7;

/// For four lengths of three bits: what part of [`COMPLETE_CODE`] their codes take.
const CODE_SPACE: [u16; 1 << 12] = {
    let mut table = [0; 1 << 12];
    let mut lens = 0;
    while lens < table.len() {
        let mut rest = lens;
        let mut code_space = 0;
        while rest > 0 {
            if rest & 7 > 0 {
                code_space += COMPLETE_CODE >> (rest & 7);
            }
            rest >>= 3;
        }
        #[expect(clippy::indexing_slicing, reason = "when compiled")]
        {
            table[lens] = code_space;
        }
        lens += 1;
    }
    table
};

/// For ten bits: at which of the first eight a dynamic block, not the last, may begin: before 0, 0 and 1.
const DYNAMIC_BLOCK_OFFSETS: [u8; 1 << 10] = {
    let mut table = [0; 1 << 10];
    let mut bits = 0;
    while bits < table.len() {
        let mut offset = 0;
        while offset < 8 {
            if bits >> offset & 7 == 0b100 {
                #[expect(clippy::indexing_slicing, reason = "when compiled")]
                {
                    table[bits] |= 1 << offset;
                }
            }
            offset += 1;
        }
        bits += 1;
    }
    table
};

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use super::super::tests::text;
    use super::*;
    use crate::codec::gzip::sys::{Inflate, StopAt, StopReason};
    use crate::codec::test_support::noise;

    pub(in super::super) fn deflate(plain: &[u8], level: u32) -> Vec<u8> {
        let level = flate2::Compression::new(level);
        let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), level);
        writer.write_all(plain).expect("a vector takes all");
        writer.finish().expect("a vector takes all")
    }

    /// Starts of the blocks after the first, in bits and in plain bytes, found by zlib.
    pub(in super::super) fn blocks(packed: &[u8]) -> Vec<(u64, usize)> {
        let mut inflate = Inflate::new();
        let mut output = vec![0; 4 << 20];
        let (mut at, mut plain, mut found) = (0, 0, Vec::new());
        loop {
            let progress = inflate.decode(&packed[at..], &mut output, StopAt::BlockEnd);
            at += progress.consumed;
            plain += progress.produced;
            match progress.reason {
                StopReason::BlockEnd { unused_bits } => {
                    found.push((at as u64 * 8 - u64::from(unused_bits), plain));
                }
                reason => {
                    assert_eq!(reason, StopReason::StreamEnd);
                    return found;
                }
            }
        }
    }

    fn finds_all(packed: &[u8]) -> usize {
        let candidates: Vec<_> = Candidates::new(packed, packed.len()).collect();
        let mut blocks = blocks(packed);
        // The last is marked as the last.
        blocks.pop();
        for (block, _) in &blocks {
            assert!(
                candidates
                    .iter()
                    .any(
                        |candidate| (candidate.bit - candidate.ambiguous_bits..=candidate.bit)
                            .contains(block)
                    ),
                "{block}"
            );
        }
        assert!(candidates.len() < blocks.len() + packed.len() * 8 / 500);
        blocks.len()
    }

    #[test]
    fn dynamic_blocks_are_found_with_few_false_candidates() {
        for level in [2, 6, 9] {
            assert!(finds_all(&deflate(&text(2 << 20, 1), level)) > 10);
        }
    }

    #[test]
    fn stored_blocks_are_found_with_few_false_candidates() {
        assert!(finds_all(&deflate(&noise(1 << 20), 6)) > 10);
        assert!(finds_all(&deflate(&text(1 << 20, 1), 0)) > 10);
    }

    #[test]
    fn zeros_before_a_stored_block_are_ambiguous_bits() {
        let found = |first, second| {
            let bytes = [first, second, 5, 0, 0xfa, 0xff];
            Candidates::new(&bytes, 6).collect::<Vec<_>>()
        };
        for (first, second, ambiguous_bits) in [
            (0xff, 0b0001_1111, 0),
            (0xff, 0b0000_1111, 1),
            (0xff, 0, 5),
            (0x7f, 0, 6),
            (0x0f, 0, 7),
        ] {
            assert_eq!(
                found(first, second),
                [Candidate {
                    bit: 13,
                    ambiguous_bits
                }]
            );
        }
        assert_eq!(found(0, 0b0011_1111), []);
    }

    #[test]
    fn blocks_that_begin_after_the_end_are_not_searched() {
        let packed = deflate(&text(200_000, 1), 6);
        let (first, _) = blocks(&packed)[0];
        let byte = usize::try_from(first / 8).expect("small");
        let found = |end| Candidates::new(&packed, end).any(|candidate| candidate.bit == first);
        assert!(!found(byte) && found(byte + 1));
    }

    #[test]
    fn search_of_any_bytes_reaches_the_end() {
        for len in 0..40 {
            for byte in [0, 4, 0xff, 0x92] {
                assert!(Candidates::new(&vec![byte; len], len + 1).count() <= 8 * len);
            }
        }
    }
}
