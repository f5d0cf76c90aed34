//! Plans the span parts that a read needs, and assembles a file's bytes from them; pure.

use std::ops::Range;

use bytes::Bytes;

use crate::archive::error::ReadError;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{self, FreeList};
use crate::codec::seek_point::MAX_SPAN_LEN;
use crate::index::{Entry, EntryKind, Index, Ino, Piece, Span};

pub(super) struct SpanPart {
    pub(super) span: u32,
    pub(super) piece: Piece,
    pub(super) plain: Extent<Plain>,
    pub(super) range: Range<usize>,
}

impl SpanPart {
    pub(super) fn slice_of(&self, span: &Bytes) -> Result<Bytes, ReadError> {
        if self.range.end > span.len() {
            return Err(ReadError::Index);
        }
        Ok(span.slice(self.range.clone()))
    }
}

/// Length of `span`; an error if it exceeds the limit of a scan, because an index file can claim any length.
pub(super) fn span_len(span: &Span) -> Result<usize, ReadError> {
    usize::try_from(span.plain.len())
        .ok()
        .filter(|&len| len as u64 <= MAX_SPAN_LEN)
        .ok_or(ReadError::Index)
}

/// Plans the parts and length of a read before any wait, because a waiting thread must not hold the index.
pub(super) fn plan_parts(
    index: &Index,
    ino: Ino,
    offset: u64,
    len: u32,
) -> Result<(u64, Vec<SpanPart>), ReadError> {
    // A growing index is incomplete, and a failed scan may have removed entries.
    let missing = |error| {
        if index.is_complete() {
            error
        } else {
            ReadError::Unscanned
        }
    };
    let entry = regular_file(index, ino).ok_or_else(|| missing(ReadError::NotAFile))?;
    let len = entry.size().saturating_sub(offset).min(len.into());
    let assembly = Assembly::new(offset, len);
    let mut parts = Vec::new();
    for piece in entry.pieces(offset, len) {
        if let Some(wanted) = assembly.wanted(&piece) {
            add_parts(index, piece, wanted, &mut parts).map_err(missing)?;
        }
    }
    Ok((len, parts))
}

/// Plans the parts of `wanted`, plain bytes that need not belong to a file.
pub(super) fn plan_plain_parts(
    index: &Index,
    wanted: Extent<Plain>,
) -> Result<Vec<SpanPart>, ReadError> {
    let piece = Piece {
        offset: 0,
        plain: wanted,
    };
    let mut parts = Vec::new();
    add_parts(index, piece, wanted, &mut parts)?;
    Ok(parts)
}

fn add_parts(
    index: &Index,
    piece: Piece,
    mut wanted: Extent<Plain>,
    parts: &mut Vec<SpanPart>,
) -> Result<(), ReadError> {
    while !wanted.is_empty() {
        if wanted.start().0 >= index.origin().plain_bytes {
            return Err(ReadError::Truncated);
        }
        let span = index.span_at(wanted.start()).ok_or(ReadError::Index)?;
        let extent = index.span_extent(span).ok_or(ReadError::Index)?;
        let plain = extent.intersection(&wanted).ok_or(ReadError::Index)?;
        let within = |at: Plain| usize::try_from(at.0 - extent.start().0).unwrap_or(usize::MAX);
        parts.push(SpanPart {
            span,
            piece,
            plain,
            range: within(plain.start())..within(plain.end()),
        });
        wanted = Extent::new(plain.end(), wanted.end()).ok_or(ReadError::Index)?;
    }
    Ok(())
}

/// Plain offset that the scan must reach for a read; 0 if the read needs no bytes.
pub(crate) fn required_scan_end(index: &Index, ino: Ino, offset: u64, len: u32) -> Plain {
    let Some(entry) = regular_file(index, ino) else {
        return Plain(0);
    };
    let len = entry.size().saturating_sub(offset).min(len.into());
    let assembly = Assembly::new(offset, len);
    let pieces = entry.pieces(offset, len);
    let wanted = pieces.filter_map(|piece| assembly.wanted(&piece));
    wanted.map(|wanted| wanted.end()).max().unwrap_or_default()
}

fn regular_file(index: &Index, ino: Ino) -> Option<Entry<'_>> {
    index
        .entry(ino)
        .filter(|entry| matches!(entry.kind(), EntryKind::File))
}

/// A range of a file that is assembled from span parts. Bytes without a piece are a hole.
pub(super) struct Assembly {
    offset: u64,
    len: u64,
    /// The single piece that covers everything, which needs no copy; or all pieces, copied.
    content: Content,
}

enum Content {
    Nothing,
    Whole(Bytes),
    Copied(free_list::RecycledBuffer),
}

impl Assembly {
    pub(super) fn new(offset: u64, len: u64) -> Self {
        Self {
            offset,
            len,
            content: Content::Nothing,
        }
    }

    fn wanted(&self, piece: &Piece) -> Option<Extent<Plain>> {
        let from = self.offset.saturating_sub(piece.offset);
        let until = (self.offset + self.len).checked_sub(piece.offset)?;
        let until = until.min(piece.plain.len());
        let start = Plain(piece.plain.start().0.checked_add(from)?);
        Extent::new(start, Plain(piece.plain.start().0.checked_add(until)?))
    }

    /// Adds `bytes`, the plain bytes of `part`, at their offset in `piece`. Parts arrive in file order.
    pub(super) fn add(
        &mut self,
        piece: &Piece,
        part: Extent<Plain>,
        bytes: Bytes,
        free_list: &FreeList,
    ) {
        if bytes.len() as u64 == self.len {
            self.content = Content::Whole(bytes);
            return;
        }
        let mut copied = match std::mem::replace(&mut self.content, Content::Nothing) {
            Content::Copied(copied) => copied,
            Content::Nothing | Content::Whole(_) => free_list.allocate_empty(to_usize(self.len), 0),
        };
        let in_file = piece.offset + (part.start().0 - piece.plain.start().0);
        copied.append_zeros(to_usize(in_file - self.offset));
        copied.append(&bytes);
        self.content = Content::Copied(copied);
    }

    pub(super) fn finish(self) -> Bytes {
        match self.content {
            Content::Whole(bytes) => bytes,
            Content::Copied(mut copied) => {
                copied.append_zeros(to_usize(self.len));
                copied.freeze()
            }
            Content::Nothing => vec![0; to_usize(self.len)].into(),
        }
    }
}

/// Converts a length, which is at most that of one read, a `u32`.
fn to_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Span length in these tests. A piece is cut at each span end.
    const SPAN: u64 = 4;

    /// Pieces of a sparse file: a piece, a hole, two adjacent pieces, a hole at the end.
    fn pieces() -> [Piece; 3] {
        let piece = |offset, plain, len| Piece {
            offset,
            plain: Extent::with_len(Plain(plain), len),
        };
        [piece(2, 101, 5), piece(10, 106, 3), piece(13, 300, 6)]
    }

    const FILE_LEN: u64 = 22;

    fn plain_byte(offset: u64) -> u8 {
        u8::try_from(offset % 251 + 1).expect("below 252")
    }

    fn expected() -> Vec<u8> {
        let mut file = vec![0; 22];
        for piece in pieces() {
            for number in 0..piece.plain.len() {
                let at = usize::try_from(piece.offset + number).expect("small");
                file[at] = plain_byte(piece.plain.start().0 + number);
            }
        }
        file
    }

    fn assemble(offset: u64, len: u64, pieces: &[Piece]) -> Bytes {
        let mut assembly = Assembly::new(offset, len);
        for piece in pieces {
            let Some(mut wanted) = assembly.wanted(piece) else {
                continue;
            };
            while !wanted.is_empty() {
                let end = Plain((wanted.start().0 / SPAN + 1) * SPAN).min(wanted.end());
                let part = Extent::new(wanted.start(), end).expect("in order");
                let bytes = (part.start().0..part.end().0).map(plain_byte);
                assembly.add(piece, part, bytes.collect(), &FreeList::new(0));
                wanted = Extent::new(end, wanted.end()).expect("in order");
            }
        }
        assembly.finish()
    }

    #[test]
    fn every_range_of_a_sparse_file_is_assembled() {
        let file = expected();
        for offset in 0..=FILE_LEN {
            for len in 0..=FILE_LEN - offset {
                let from = usize::try_from(offset).expect("small");
                let until = usize::try_from(offset + len).expect("small");
                let assembled = assemble(offset, len, &pieces());
                assert_eq!(assembled, file[from..until], "{len} at {offset}");
            }
        }
    }

    #[test]
    fn read_within_one_span_is_not_copied() {
        let piece = Piece {
            offset: 0,
            plain: Extent::with_len(Plain(0), 4),
        };
        let mut assembly = Assembly::new(1, 2);
        let wanted = assembly.wanted(&piece).expect("wanted");
        let span = Bytes::from_static(b"span");
        assembly.add(&piece, wanted, span.slice(1..3), &FreeList::new(0));
        assert_eq!(assembly.finish().as_ptr(), span.slice(1..).as_ptr());
    }

    #[test]
    fn file_without_pieces_reads_as_zeros() {
        assert_eq!(assemble(3, 5, &[]), [0; 5][..]);
        assert!(assemble(0, 0, &pieces()).is_empty());
    }
}
