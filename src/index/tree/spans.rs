//! Spans of the plain stream, and digests of the packed one.

use bytes::Bytes;

use super::Index;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::span_hash;
use crate::codec::SeekPoint;
use crate::index::blocks;
use crate::index::blocks::Blocks;
use crate::index::span_checksums::SpanChecksums;
use crate::index::storage::row_types::SpanRow;
use crate::index::storage::{MissingRow, find_missing};

/// Plain bytes between neighbouring seek points: the unit of decoding, caching and verifying.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Its number, counted from the front.
    pub number: u32,
    /// Its plain bytes.
    pub plain: Extent<Plain>,
    /// [Hash](crate::base::span_hash) of blocks of [`Index::block_len`]; `None` when the scan skipped it.
    pub hash: Option<u64>,
    /// Where its decoding can start; `None` when only an earlier span has a seek point.
    pub seek_point: Option<SeekPoint>,
}

/// Limit of [`Index::decode_cost`], which each read asks for. An index can claim any number of spans without seek points.
pub(crate) const MAX_DECODE_COST: u32 = 64;

impl Index {
    /// Number of spans of the plain stream.
    pub fn span_count(&self) -> u32 {
        u32::try_from(self.arrays.spans.len()).unwrap_or(u32::MAX)
    }

    /// Number of the span that contains plain byte `offset`; `None` past the end.
    pub fn span_at(&self, offset: Plain) -> Option<u32> {
        if offset.0 >= self.origin.plain_bytes {
            return None;
        }
        let spans = &self.arrays.spans;
        let after = spans.partition_point(|span| span.plain.get() <= offset.0);
        u32::try_from(after).ok()?.checked_sub(1)
    }

    /// The plain bytes of span `number`; `None` past the last, or in a damaged index.
    pub fn span_extent(&self, number: u32) -> Option<Extent<Plain>> {
        let spans = &self.arrays.spans;
        let row = spans.get(number as usize)?;
        let next = spans.get(number as usize + 1);
        let end = next.map_or(self.origin.plain_bytes, |next| next.plain.get());
        Extent::new(Plain(row.plain.get()), Plain(end))
    }

    /// Packed offset where decoding can start for span `number`; `None` without a seek point.
    pub fn seek_offset(&self, number: u32) -> Option<Packed> {
        let row = self.arrays.spans.get(number as usize)?;
        (row.bit.get() != SpanRow::NO_SEEK_POINT).then(|| Packed(row.packed.get()))
    }

    /// The last span at or before span `number` at which decoding can start; `None` only in a damaged index.
    pub fn seekable_before(&self, number: u32) -> Option<u32> {
        (0..=number)
            .rev()
            .find(|&number| self.seek_offset(number).is_some())
    }

    /// Number of spans to decode for span `number`: from the last seek point on, and at most 64.
    pub fn decode_cost(&self, number: u32) -> u32 {
        let mut nearby = (1..MAX_DECODE_COST).zip((0..=number).rev());
        let found = nearby.find(|&(_, number)| self.seek_offset(number).is_some());
        found.map_or(MAX_DECODE_COST, |(cost, _)| cost)
    }

    /// Whether a reader can detect all bytes of another version, by digests of blocks and hashes of spans.
    ///
    /// # Errors
    /// When rows cannot be loaded.
    pub fn is_hashed(&self) -> Result<bool, MissingRow> {
        let is_hashed = || {
            let (mut spans, mut blocks) = (self.arrays.spans.iter(), self.arrays.blocks.iter());
            self.digested.0 >= self.origin.packed_bytes
                && blocks.all(|digest| *digest != blocks::UNKNOWN_DIGEST)
                && spans.all(|row| row.flags.get() & SpanRow::UNHASHED == 0)
        };
        find_missing(true, is_hashed)
    }

    /// Marks the packed bytes up to `end` as skipped. Those without a digest never get one.
    pub(in crate::index) fn skip_blocks(&mut self, end: Packed) {
        let rows = self.arrays.blocks.vec_mut();
        // The digest of a block's front is not the block's digest.
        rows.truncate(blocks::block_count(self.digested.0 / self.block_len));
        let count = blocks::block_count(end.0.div_ceil(self.block_len));
        rows.resize(count, blocks::UNKNOWN_DIGEST);
        self.digested = end;
    }

    /// Length of the blocks that have digests, in bytes.
    pub fn block_len(&self) -> u64 {
        self.block_len
    }

    /// The blocks that contain `extent`, as far as their digests are known (all, unless a scan is running).
    ///
    /// # Errors
    /// When rows cannot be loaded.
    #[doc(hidden)]
    pub fn blocks(&self, extent: Extent<Packed>) -> Result<Option<Blocks>, MissingRow> {
        let is_final = self.is_complete();
        let digests = &self.arrays.blocks;
        find_missing(true, || {
            Blocks::new(digests, self.block_len, self.digested, extent, is_final)
        })
    }

    /// Whether decoding at some seek point refers to plain bytes before it.
    pub fn has_windows(&self) -> bool {
        !self.arrays.windows.0.is_empty()
    }

    /// Span `number`, with its window still packed; `None` past the last, or in a damaged index.
    ///
    /// # Errors
    /// When rows cannot be loaded.
    pub fn span(&self, number: u32) -> Result<Option<Span>, MissingRow> {
        find_missing(true, || self.find_span(number))
    }

    fn find_span(&self, number: u32) -> Option<Span> {
        let row = self.arrays.spans.get(number as usize)?;
        let hash = match row.flags.get() & SpanRow::UNHASHED {
            0 => Some(span_hash::of_checksums(
                self.find_checksums(number)?.checksums(),
            )),
            _ => None,
        };
        Some(Span {
            number,
            plain: self.span_extent(number)?,
            hash,
            seek_point: match row.bit.get() {
                SpanRow::NO_SEEK_POINT => None,
                bit => {
                    let (offset, len) = (row.window_offset.get(), row.window_len.get());
                    let window = self.arrays.windows.bytes_at(offset, len.into())?;
                    Some(SeekPoint {
                        packed: Packed(row.packed.get()),
                        bit: u8::try_from(bit).ok()?,
                        plain: Plain(row.plain.get()),
                        state: row.state.get(),
                        window: Bytes::copy_from_slice(window),
                    })
                }
            },
        })
    }

    /// Checksums of the blocks of span `number`; `None` without checksums, or in a damaged index.
    pub(crate) fn span_checksums(
        &self,
        number: u32,
    ) -> Result<Option<SpanChecksums<'_>>, MissingRow> {
        find_missing(true, || self.find_checksums(number))
    }

    fn find_checksums(&self, number: u32) -> Option<SpanChecksums<'_>> {
        let row = self.arrays.spans.get(number as usize)?;
        if row.flags.get() & SpanRow::UNHASHED != 0 {
            return None;
        }
        let (checksums, first) = (&self.arrays.checksums, row.checksum.get());
        SpanChecksums::new(checksums, first, self.span_extent(number)?, self.block_len)
    }
}
