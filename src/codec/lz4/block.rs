//! lz4 blocks: what they need, and decoding those that need no others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lz4_flex::block;
use xxhash_rust::xxh32::Xxh32;

use super::sys;
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::codec::walker::input_queue::SegmentedBytes;
use crate::codec::{Cause, Compression, Error};

/// Minimum ratio of a full block to its packed bytes for measuring it first, because it may be much shorter.
const MEASURE_RATIO: usize = 16;

pub(super) struct Block {
    /// Offset of its header.
    pub(super) packed: Packed,
    pub(super) segments: SegmentedBytes,
    /// Whether the segments are the plain bytes.
    pub(super) is_stored: bool,
    pub(super) checksum: Option<u32>,
}

impl Block {
    /// Maximum plain bytes; `max_len` is the format's limit.
    pub(super) fn max_plain_len(&self, max_len: usize) -> usize {
        let len = self.segments.len();
        if self.is_stored {
            len
        } else if len.saturating_mul(MEASURE_RATIO) < max_len {
            let measured = self.segments.with_contiguous(measure_plain_len);
            measured.map_or(max_len, |measured| measured.min(max_len))
        } else {
            max_len
        }
    }

    pub(super) fn verify(&self) -> Result<(), Error> {
        let Some(expected) = self.checksum else {
            return Ok(());
        };
        let mut hash = Xxh32::new(0);
        for slice in &self.segments.slices {
            hash.update(slice);
        }
        Cause::compare_checksums("block", expected, hash.digest())
            .map_err(|cause| cause.at(Compression::Lz4, self.packed))
    }

    /// Decodes into `buffer` from `start` on; returns the length. The block may refer to the bytes before.
    pub(super) fn decode(&self, buffer: &mut [u8], start: usize) -> Result<usize, Error> {
        if self.is_stored {
            return self.copy(buffer.get_mut(start..).unwrap_or_default());
        }
        self.segments
            .with_contiguous(|packed| match sys::decode(packed, buffer, start) {
                Some(len) => Ok(len),
                None => self.decode_fallback(packed, buffer, start),
            })
    }

    fn copy(&self, target: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        for slice in &self.segments.slices {
            let end = filled + slice.len();
            let Some(target) = target.get_mut(filled..end) else {
                return Err(self.malformed("a stored block is too long"));
            };
            target.copy_from_slice(slice);
            filled = end;
        }
        Ok(filled)
    }

    /// Decodes a block that liblz4 refused.
    ///
    /// Unlike liblz4, `lz4_flex` names the reason of an error. Its result is final.
    #[cold]
    fn decode_fallback(
        &self,
        packed: &[u8],
        buffer: &mut [u8],
        start: usize,
    ) -> Result<usize, Error> {
        let (seen, room) = buffer.split_at_mut(start.min(buffer.len()));
        let history = seen.get(seen.len().saturating_sub(sys::HISTORY_LEN)..);
        block::decompress_into_with_dict(packed, room, history.unwrap_or_default())
            .map_err(|error| self.malformed(&format!("a block: {error}")))
    }

    fn malformed(&self, text: &str) -> Error {
        Cause::malformed(text).at(Compression::Lz4, self.packed)
    }
}

/// Decodes independent blocks one after the other into one buffer, large enough for all.
pub(super) fn decode_group(
    blocks: &[Block],
    max_len: usize,
    mut buffer: Buffer,
) -> Result<Buffer, Error> {
    let mut filled = 0;
    for block in blocks {
        block.verify()?;
        let room = buffer.get_mut(filled..).unwrap_or_default();
        let len = room.len().min(max_len);
        filled += block.decode(room.get_mut(..len).unwrap_or_default(), 0)?;
    }
    buffer.truncate(filled);
    Ok(buffer)
}

/// Plain bytes of a packed block, without decoding them; `None` when it is malformed.
fn measure_plain_len(bytes: &[u8]) -> Option<usize> {
    let mut rest = bytes;
    let mut len = 0_usize;
    loop {
        let (&token, after) = rest.split_first()?;
        rest = after;
        let literals = read_length(token >> 4, &mut rest)?;
        rest = rest.get(literals..)?;
        len = len.checked_add(literals)?;
        if rest.is_empty() {
            return Some(len);
        }
        rest = rest.get(2..)?;
        let matched = read_length(token & 15, &mut rest)?;
        len = len.checked_add(matched)?.checked_add(4)?;
    }
}

/// A length whose first part is `nibble`.
fn read_length(nibble: u8, rest: &mut &[u8]) -> Option<usize> {
    let mut len = usize::from(nibble);
    if nibble == 15 {
        loop {
            let (&more, after) = rest.split_first()?;
            *rest = after;
            len = len.checked_add(more.into())?;
            if more != 255 {
                break;
            }
        }
    }
    Some(len)
}

/// Checks the content size of a frame decoded by jobs, when the last of the jobs and the walk ends.
pub(super) struct ContentLenCheck {
    expected: u64,
    plain: AtomicU64,
    /// The walk and the jobs that have not ended.
    open_parts: AtomicU64,
}

impl ContentLenCheck {
    /// For a frame of `expected` plain bytes, held open by the walk.
    pub(super) fn new(expected: u64) -> Arc<Self> {
        Arc::new(Self {
            expected,
            plain: AtomicU64::new(0),
            open_parts: AtomicU64::new(1),
        })
    }

    /// Opens a part, which must call [`Self::end_part`].
    pub(super) fn begin_part(&self) {
        self.open_parts.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds `plain` bytes. After the last part, compares the sum with the expected size.
    pub(super) fn end_part(&self, plain: u64) -> Result<(), Cause> {
        let mut sum = self.plain.fetch_add(plain, Ordering::AcqRel) + plain;
        let last = self.open_parts.fetch_sub(1, Ordering::AcqRel) == 1;
        if last {
            sum = self.plain.load(Ordering::Acquire);
        }
        check_content_len(self.expected, sum, last)
    }
}

/// Compares the plain bytes so far, or all when `ended`, with what the frame header promises.
pub(super) fn check_content_len(expected: u64, len: u64, ended: bool) -> Result<(), Cause> {
    if len > expected || (ended && len < expected) {
        let more = if ended { "" } else { " or more" };
        return Err(Cause::Malformed(format!(
            "the frame says it holds {expected} bytes and holds {len}{more}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::test_support::{noise, text};

    #[test]
    fn measured_length_equals_decoded_length() {
        for plain in [
            text(100_000),
            noise(1000),
            vec![0; 4 << 20],
            vec![7; 12],
            vec![],
        ] {
            let packed = block::compress(&plain);
            assert_eq!(measure_plain_len(&packed), Some(plain.len()));
            for len in 0..packed.len().min(100) {
                let cut = packed.get(..len).unwrap();
                assert!(measure_plain_len(cut).is_none_or(|measured| measured < plain.len()));
            }
        }
    }

    #[test]
    fn last_part_to_end_detects_a_wrong_content_size() {
        let len_check = ContentLenCheck::new(10);
        len_check.begin_part();
        len_check.begin_part();
        assert_eq!(len_check.end_part(4), Ok(()));
        assert_eq!(len_check.end_part(0), Ok(()));
        assert!(len_check.end_part(5).is_err());
        let len_check = ContentLenCheck::new(10);
        len_check.begin_part();
        assert!(len_check.end_part(11).is_err());
    }
}
