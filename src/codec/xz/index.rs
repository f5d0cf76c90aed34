//! The index of a stream, which must have the lengths of its blocks.

use flate2::Crc;
use xxhash_rust::xxh3::Xxh3Default;

use super::header::{Check, MAX_INTEGER_LEN, padding_len, take_integer};
use crate::codec::Cause;
use crate::codec::walker::input_queue::InputQueue;

/// Summary of the lengths of the blocks so far, to compare with the index.
pub(super) struct BlockLengths {
    pub(super) check: Check,
    pub(super) has_all_blocks: bool,
    pub(super) count: u64,
    pub(super) hash: Xxh3Default,
}

impl BlockLengths {
    pub(super) fn new(check: Check, has_all_blocks: bool) -> Self {
        Self {
            check,
            has_all_blocks,
            count: 0,
            hash: Xxh3Default::new(),
        }
    }

    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.check, self.has_all_blocks);
        std::mem::replace(self, empty)
    }

    pub(super) fn add(&mut self, unpadded_len: u64, plain_len: u64) {
        self.count += 1;
        self.hash.update(&unpadded_len.to_le_bytes());
        self.hash.update(&plain_len.to_le_bytes());
    }
}

/// Reads an index, block by block, and compares it with the stream's blocks.
pub(super) struct Index {
    pub(super) expected: BlockLengths,
    /// Number of remaining blocks; `None` before the first integer.
    left: Option<u64>,
    found: BlockLengths,
    /// Bytes so far, and their CRC-32.
    len: u64,
    crc: Crc,
}

impl Index {
    /// Behind the first byte, a zero.
    pub(super) fn new(expected: BlockLengths) -> Self {
        let mut crc = Crc::new();
        crc.update(&[0]);
        Self {
            found: BlockLengths::new(expected.check, true),
            expected,
            left: None,
            len: 1,
            crc,
        }
    }

    /// Reads an integer, a block's lengths, or the end, which yields the index's length; nothing if cut.
    pub(super) fn step(&mut self, input: &mut InputQueue) -> Result<Option<u64>, Cause> {
        match self.left {
            None => {
                let Some([count]) = self.read_integers(input)? else {
                    return Ok(None);
                };
                if self.expected.has_all_blocks && count != self.expected.count {
                    return Err(mismatch());
                }
                self.left = Some(count);
                Ok(None)
            }
            Some(0) => self.end(input),
            Some(left) => {
                let Some([unpadded_len, plain_len]) = self.read_integers(input)? else {
                    return Ok(None);
                };
                self.found.add(unpadded_len, plain_len);
                self.left = Some(left - 1);
                Ok(None)
            }
        }
    }

    /// The next `N` integers; `None`, and takes nothing, if they are incomplete.
    fn read_integers<const N: usize>(
        &mut self,
        input: &mut InputQueue,
    ) -> Result<Option<[u64; N]>, Cause> {
        let mut bytes = [0; 2 * MAX_INTEGER_LEN];
        let len = input.len().min(N * MAX_INTEGER_LEN);
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        input.peek_into(0, bytes);
        let mut rest = &*bytes;
        let mut integers = [0; N];
        for integer in &mut integers {
            match take_integer(&mut rest) {
                Some(value) => *integer = value,
                None if rest.len() < MAX_INTEGER_LEN
                    && rest.iter().all(|byte| byte & 0x80 != 0) =>
                {
                    return Ok(None);
                }
                None => return Err(Cause::malformed("an integer in the index")),
            }
        }
        let len = bytes.len() - rest.len();
        self.crc.update(bytes.get(..len).unwrap_or_default());
        self.len += len as u64;
        input.skip(len as u64);
        Ok(Some(integers))
    }

    pub(super) fn end(&mut self, input: &mut InputQueue) -> Result<Option<u64>, Cause> {
        let padding_len = usize::try_from(padding_len(self.len)).unwrap_or_default();
        let mut bytes = [0; 3 + 4];
        let bytes = bytes.get_mut(..padding_len + 4).unwrap_or_default();
        if !input.peek_into(0, bytes) {
            return Ok(None);
        }
        let (padding, stored) = bytes.split_at(padding_len);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(Cause::malformed("the padding of the index"));
        }
        self.crc.update(padding);
        let expected = stored.first_chunk().copied().map(u32::from_le_bytes);
        Cause::compare_checksums("index", expected.unwrap_or_default(), self.crc.sum())?;
        if self.expected.has_all_blocks && self.expected.hash.digest() != self.found.hash.digest() {
            return Err(mismatch());
        }
        self.len += bytes.len() as u64;
        input.skip(bytes.len() as u64);
        Ok(Some(self.len))
    }
}

pub(super) fn mismatch() -> Cause {
    Cause::malformed("the index does not fit the blocks")
}
