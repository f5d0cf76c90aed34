//! Finds data and holes for lseek(2); pure.

use crate::index::Piece;

/// The first stored byte from `offset` on (`SEEK_DATA`). `pieces` are the ascending stored pieces from there.
pub(super) fn next_data(
    mut pieces: impl Iterator<Item = Piece>,
    size: u64,
    offset: u64,
) -> Option<u64> {
    let piece = pieces.find(|piece| end(piece) > offset && !piece.plain.is_empty())?;
    Some(piece.offset.max(offset)).filter(|&found| found < size)
}

/// The first hole at or after `offset` (`SEEK_HOLE`); `None` past the end. Every file ends with a hole.
pub(super) fn next_hole(
    pieces: impl Iterator<Item = Piece>,
    size: u64,
    offset: u64,
) -> Option<u64> {
    let mut found = offset;
    for piece in pieces {
        if piece.offset > found {
            break;
        }
        found = found.max(end(&piece));
    }
    (offset < size).then_some(found.min(size))
}

fn end(piece: &Piece) -> u64 {
    piece.offset.saturating_add(piece.plain.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::extent::{Extent, Plain};

    /// Pieces of a file of 100 bytes: 10..20, 20..30, an empty one at 30, 50..60.
    fn pieces() -> impl Iterator<Item = Piece> {
        [(10, 10), (20, 10), (30, 0), (50, 10)]
            .into_iter()
            .map(|(offset, len)| Piece {
                offset,
                plain: Extent::with_len(Plain(1000 + offset), len),
            })
    }

    fn data(offset: u64) -> Option<u64> {
        next_data(pieces(), 100, offset)
    }

    fn hole(offset: u64) -> Option<u64> {
        next_hole(pieces(), 100, offset)
    }

    #[test]
    fn seek_data_finds_start_or_current_offset() {
        assert_eq!(data(0), Some(10));
        assert_eq!(data(15), Some(15));
        assert_eq!(data(30), Some(50));
        assert_eq!(data(60), None);
        assert_eq!(data(100), None);
    }

    #[test]
    fn seek_hole_skips_adjacent_pieces_and_ends_at_eof() {
        assert_eq!(hole(0), Some(0));
        assert_eq!(hole(10), Some(30));
        assert_eq!(hole(35), Some(35));
        assert_eq!(hole(55), Some(60));
        assert_eq!(hole(100), None);
        let whole = [Piece {
            offset: 0,
            plain: Extent::with_len(Plain(0), 100),
        }];
        assert_eq!(next_hole(whole.into_iter(), 100, 0), Some(100));
    }

    #[test]
    fn oversized_piece_ends_at_eof() {
        let wild = [Piece {
            offset: 90,
            plain: Extent::with_len(Plain(0), u64::MAX),
        }];
        assert_eq!(next_hole(wild.into_iter(), 100, 95), Some(100));
        let outside = [Piece {
            offset: 200,
            plain: Extent::with_len(Plain(0), 5),
        }];
        assert_eq!(next_data(outside.into_iter(), 100, 95), None);
    }
}
