//! Finds data and holes for lseek(2); pure.

use crate::index::Piece;

/// The kind of range that lseek(2) looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Whence {
    /// Stored bytes: `SEEK_DATA`.
    Data,
    /// A hole: `SEEK_HOLE`. Every file ends with one.
    Hole,
}

impl Whence {
    /// Converts lseek's third argument. `None` for all others, which the kernel handles itself.
    pub(super) fn from_raw(raw: i32) -> Option<Self> {
        match raw {
            3 => Some(Self::Data),
            4 => Some(Self::Hole),
            _ => None,
        }
    }
}

/// The first offset at or after `offset` where data or a hole begins, as `whence` says.
///
/// The file has `size` bytes. `pieces` are its stored pieces from `offset` on, in ascending order.
/// Returns `None` past the end, and for `SEEK_DATA` if only a hole follows.
pub(super) fn seek(
    mut pieces: impl Iterator<Item = Piece>,
    size: u64,
    offset: u64,
    whence: Whence,
) -> Option<u64> {
    if offset >= size {
        return None;
    }
    let end = |piece: &Piece| piece.offset.saturating_add(piece.plain.len());
    match whence {
        Whence::Data => pieces
            .find(|piece| end(piece) > offset && !piece.plain.is_empty())
            .map(|piece| piece.offset.max(offset))
            .filter(|&found| found < size),
        Whence::Hole => {
            let mut found = offset;
            for piece in pieces {
                if piece.offset > found {
                    break;
                }
                found = found.max(end(&piece));
            }
            Some(found.min(size))
        }
    }
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
        seek(pieces(), 100, offset, Whence::Data)
    }

    fn hole(offset: u64) -> Option<u64> {
        seek(pieces(), 100, offset, Whence::Hole)
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
        assert_eq!(seek(whole.into_iter(), 100, 0, Whence::Hole), Some(100));
    }

    #[test]
    fn oversized_piece_ends_at_eof() {
        let wild = [Piece {
            offset: 90,
            plain: Extent::with_len(Plain(0), u64::MAX),
        }];
        assert_eq!(seek(wild.into_iter(), 100, 95, Whence::Hole), Some(100));
        let outside = [Piece {
            offset: 200,
            plain: Extent::with_len(Plain(0), 5),
        }];
        assert_eq!(seek(outside.into_iter(), 100, 95, Whence::Data), None);
    }
}
