//! Sparse maps in header records, of GNU tar (before pax) and star.

use std::ops::Range;

use super::header::{Dialect, NumberError, Record, size};
use super::sparse::{MapError, MapFault, push};
use super::{Limits, Segment};

/// Bytes of one piece in a map: offset and length, twelve digits each.
const PIECE_LEN: usize = 24;
/// In both dialects.
const PIECES_IN_HEADER: usize = 4;
const PIECES_IN_CONTINUATION: usize = 21;
/// The byte of such a record that says whether another follows.
const CONTINUATION_FLAG_OFFSET: usize = PIECES_IN_CONTINUATION * PIECE_LEN;

/// A map under construction, from a header of type `S` and the records after it.
#[derive(Clone, Debug)]
pub(super) struct HeaderMap {
    pub(super) size: u64,
    pub(super) pieces: Vec<Segment>,
    pub(super) has_more: bool,
}

impl HeaderMap {
    /// Reads the pieces in the header; `None` when its dialect has no maps.
    pub(super) fn new(
        record: &Record,
        dialect: Dialect,
        limits: &Limits,
    ) -> Option<Result<Self, MapFault>> {
        match dialect {
            Dialect::Gnu => Some(Self::read(record, [386, 482, 483], limits)),
            Dialect::Star if has_inline_map(record) => {
                Some(Self::read(record, [356, 355, 452], limits))
            }
            // star's later form, with the whole map after the header.
            Dialect::Star => Some(real_size(record, 452).map(|size| Self {
                size,
                pieces: Vec::new(),
                has_more: true,
            })),
            Dialect::V7 | Dialect::Ustar => None,
        }
    }

    /// Reads a header with map, continuation flag and real size at these offsets.
    fn read(
        record: &Record,
        [map, flag, size]: [usize; 3],
        limits: &Limits,
    ) -> Result<Self, MapFault> {
        let mut header_map = Self {
            size: real_size(record, size)?,
            pieces: Vec::new(),
            has_more: false,
        };
        let pieces = map..map + PIECES_IN_HEADER * PIECE_LEN;
        header_map.add_pieces(record, pieces, flag, limits)?;
        Ok(header_map)
    }

    pub(super) fn extend(&mut self, record: &Record, limits: &Limits) -> Result<(), MapFault> {
        let flag = CONTINUATION_FLAG_OFFSET;
        self.add_pieces(record, 0..flag, flag, limits)
    }

    /// Adds the pieces in a range of the record. The first without a length ends the map.
    fn add_pieces(
        &mut self,
        record: &Record,
        map: Range<usize>,
        flag: usize,
        limits: &Limits,
    ) -> Result<(), MapFault> {
        self.has_more = record.get(flag).is_some_and(|&flag| flag != 0);
        let map = record.get(map);
        for piece in map.unwrap_or_default().chunks_exact(PIECE_LEN) {
            let (offset, len) = piece.split_at(PIECE_LEN / 2);
            if len.first() == Some(&0) {
                self.has_more = false;
                break;
            }
            let malformed = |_: NumberError| MapError::Malformed;
            let offset = size(offset).map_err(malformed)?;
            let len = size(len).map_err(malformed)?;
            push(&mut self.pieces, Segment { offset, len }, limits)?;
        }
        Ok(())
    }
}

fn real_size(record: &Record, offset: usize) -> Result<u64, MapFault> {
    let field = record.get(offset..offset + 12).unwrap_or_default();
    size(field).map_err(|_| MapError::Malformed.into())
}

/// Whether a star header contains pieces: no prefix, and an offset of eleven digits.
fn has_inline_map(record: &Record) -> bool {
    record.get(345) == Some(&0) && record.get(356 + 10).is_some_and(|&digit| digit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_piece(record: &mut Record, at: usize, offset: u64, len: u64) {
        let text = format!("{offset:011o}\0{len:011o}\0");
        record[at..at + PIECE_LEN].copy_from_slice(text.as_bytes());
    }

    #[test]
    fn a_gnu_map_ends_at_the_first_piece_without_a_length() {
        let mut record = [0; 512];
        put_piece(&mut record, 386, 1024, 512);
        put_piece(&mut record, 410, 4096, 0);
        record[482] = 1;
        record[483..495].copy_from_slice(b"00000010000\0");
        let map = HeaderMap::new(&record, Dialect::Gnu, &Limits::default())
            .expect("a map")
            .expect("sound");
        assert_eq!(map.size, 4096);
        let only = Segment {
            offset: 1024,
            len: 512,
        };
        assert_eq!(map.pieces, [only]);
        assert!(!map.has_more);
    }

    #[test]
    fn full_gnu_map_continues_in_next_record() {
        let mut record = [0; 512];
        for piece in 0..4 {
            put_piece(&mut record, 386 + piece * 24, piece as u64 * 1024, 512);
        }
        record[482] = 1;
        let mut map = HeaderMap::new(&record, Dialect::Gnu, &Limits::default())
            .expect("a map")
            .expect("sound");
        assert!(map.has_more);
        let mut behind = [0; 512];
        put_piece(&mut behind, 0, 8192, 512);
        map.extend(&behind, &Limits::default()).expect("sound");
        assert_eq!(map.pieces.len(), 5);
        assert!(!map.has_more);
    }

    #[test]
    fn ustar_has_no_map_in_its_header() {
        assert!(HeaderMap::new(&[0; 512], Dialect::Ustar, &Limits::default()).is_none());
    }

    #[test]
    fn star_map_is_in_the_header_or_in_next_records() {
        let mut record = [0; 512];
        record[452..464].copy_from_slice(b"00000010000 ");
        let map = HeaderMap::new(&record, Dialect::Star, &Limits::default())
            .expect("a map")
            .expect("sound");
        assert!(map.has_more && map.pieces.is_empty());
        put_piece(&mut record, 356, 512, 1);
        let map = HeaderMap::new(&record, Dialect::Star, &Limits::default())
            .expect("a map")
            .expect("sound");
        assert_eq!(
            map.pieces,
            [Segment {
                offset: 512,
                len: 1
            }]
        );
    }

    #[test]
    fn a_map_of_letters_is_malformed() {
        let mut record = [0; 512];
        record[386..410].fill(b'z');
        let map = HeaderMap::new(&record, Dialect::Gnu, &Limits::default()).expect("a map");
        assert_eq!(map.err(), Some(MapFault::Map(MapError::Malformed)));
    }
}
