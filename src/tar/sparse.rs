//! Sparse files: pax's three forms of maps, and the validation of maps.

use super::header::Record;
use super::{Cause, Limit, Limits, Segment};

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum MapError {
    #[error("its pieces are not in ascending order")]
    Order,
    #[error("a piece lies beyond the end of the file")]
    Outside,
    #[error("its pieces are longer than what is stored")]
    Payload,
    #[error("its map is malformed")]
    Malformed,
}

/// Validates pieces (ascending, apart, in the file and `payload`), joins adjacent ones, and adds their bytes.
pub(super) fn validate_map(
    pieces: &[Segment],
    size: u64,
    payload: u64,
) -> Result<(Vec<Segment>, u64), MapError> {
    let mut map: Vec<Segment> = Vec::with_capacity(pieces.len());
    let (mut stored, mut end) = (0_u64, 0_u64);
    for &piece in pieces {
        if piece.offset < end {
            return Err(MapError::Order);
        }
        let piece_end = piece.offset.checked_add(piece.len);
        let piece_end = piece_end
            .filter(|&end| end <= size)
            .ok_or(MapError::Outside)?;
        match map.last_mut() {
            Some(last) if end == piece.offset => last.len += piece.len,
            _ => map.push(piece),
        }
        end = piece_end;
        // Pieces are apart and inside the file, so their sum is at most its size.
        stored += piece.len;
    }
    if stored > payload {
        return Err(MapError::Payload);
    }
    map.shrink_to_fit();
    Ok((map, stored))
}

/// pax keywords of a sparse file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct SparseKeywords {
    /// `GNU.sparse.major`: from 1 on, the map precedes the payload.
    pub(super) major: Option<u64>,
    /// `GNU.sparse.size`, `GNU.sparse.realsize` or `SCHILY.realsize`: with holes.
    pub(super) size: Option<u64>,
    /// `GNU.sparse.size` or `GNU.sparse.realsize`.
    pub(super) gnu_size: Option<u64>,
    /// `GNU.sparse.name`: the file's name. The name in the header is artificial.
    pub(super) name: Option<Vec<u8>>,
    /// The map of 0.0 and 0.1, without empty pieces.
    pub(super) map: Vec<Segment>,
    /// Even of empty pieces.
    pub(super) is_sparse: bool,
    pub(super) is_malformed: bool,
    /// `GNU.sparse.offset` of 0.0 whose length is still missing.
    pub(super) offset: Option<u64>,
}

impl SparseKeywords {
    /// For `GNU.sparse.numbytes` of 0.0.
    pub(super) fn add_len(&mut self, len: Option<u64>, limits: &Limits) -> Result<(), Cause> {
        if let (Some(offset), Some(len)) = (self.offset.take(), len) {
            self.is_sparse = true;
            return push(&mut self.map, Segment { offset, len }, limits);
        }
        self.is_malformed = true;
        Ok(())
    }

    /// Payload length of a file with a known size but no map, after which GNU tar looks for the next header.
    pub(super) fn payload_len(&self) -> Option<u64> {
        let is_whole = !self.is_sparse && !self.is_malformed && !self.is_map_in_payload();
        self.gnu_size.filter(|_| is_whole)
    }

    pub(super) fn is_map_in_payload(&self) -> bool {
        self.major.is_some_and(|major| major > 0)
    }

    /// For `GNU.sparse.map` of 0.1: offsets and lengths in turn, separated by commas.
    pub(super) fn set_map(&mut self, text: &[u8], limits: &Limits) -> Result<(), Cause> {
        self.map.clear();
        let mut numbers = text.split(|&byte| byte == b',').map(decimal);
        while let Some(offset) = numbers.next() {
            let (Some(offset), Some(Some(len))) = (offset, numbers.next()) else {
                self.is_malformed = !text.is_empty();
                return Ok(());
            };
            self.is_sparse = true;
            push(&mut self.map, Segment { offset, len }, limits)?;
        }
        Ok(())
    }
}

/// Adds a piece, unless it is empty, as at the file's end; some writers write millions of empty ones.
pub(super) fn push(map: &mut Vec<Segment>, piece: Segment, limits: &Limits) -> Result<(), Cause> {
    if piece.len > 0 {
        Limit::SparseSegments.check(limits, map.len() as u64 + 1)?;
        map.push(piece);
    }
    Ok(())
}

/// Parses decimal digits and nothing else, from 0 up to 2⁶³ − 1.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let value = text
        .iter()
        .try_fold(0, |value, &byte| append_digit(value, byte))?;
    (!text.is_empty()).then_some(value)
}

fn append_digit(value: u64, byte: u8) -> Option<u64> {
    let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
    let value = value.checked_mul(10)?.checked_add(digit)?;
    i64::try_from(value).is_ok().then_some(value)
}

/// Reads the map before a 1.0 payload by records. Its lines are the piece count, then offsets and lengths.
#[derive(Clone, Debug, Default)]
pub(super) struct MapReader {
    /// `None` before the first line.
    left: Option<u64>,
    offset: Option<u64>,
    line: Option<u64>,
    pieces: Vec<Segment>,
}

impl MapReader {
    /// Reads a record. Returns the pieces once they are complete; the record's rest is padding.
    pub(super) fn read(
        &mut self,
        record: &Record,
        limits: &Limits,
    ) -> Result<Option<Vec<Segment>>, MapFault> {
        for &byte in record {
            if byte == b'\n' {
                self.number(limits)?;
            } else {
                let value = append_digit(self.line.unwrap_or(0), byte);
                self.line = Some(value.ok_or(MapError::Malformed)?);
            }
            if self.left == Some(0) {
                return Ok(Some(std::mem::take(&mut self.pieces)));
            }
        }
        Ok(None)
    }

    fn number(&mut self, limits: &Limits) -> Result<(), MapFault> {
        let number = self.line.take().ok_or(MapError::Malformed)?;
        if let Some(offset) = self.offset.take() {
            let len = number;
            push(&mut self.pieces, Segment { offset, len }, limits)?;
            self.left = self.left.map(|left| left.saturating_sub(1));
        } else if self.left.is_some() {
            self.offset = Some(number);
        } else {
            self.left = Some(number);
        }
        Ok(())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum MapFault {
    /// The map is invalid, and the member is lost.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The map exceeds a limit, and the archive is rejected.
    #[error(transparent)]
    Exceeded(#[from] Cause),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(numbers: &[(u64, u64)]) -> Vec<Segment> {
        let piece = |&(offset, len)| Segment { offset, len };
        numbers.iter().map(piece).collect()
    }

    #[test]
    fn a_map_keeps_pieces_that_are_apart_and_joins_those_that_touch() {
        let map = pieces(&[(0, 10), (10, 5), (30, 5)]);
        let joined = pieces(&[(0, 15), (30, 5)]);
        assert_eq!(validate_map(&map, 100, 20), Ok((joined, 20)));
    }

    #[test]
    fn invalid_sparse_maps_are_rejected() {
        let overlapping = pieces(&[(0, 10), (9, 5)]);
        assert_eq!(validate_map(&overlapping, 100, 15), Err(MapError::Order));
        let outside = pieces(&[(96, 5)]);
        assert_eq!(validate_map(&outside, 100, 5), Err(MapError::Outside));
        let endless = pieces(&[(u64::MAX, 2)]);
        assert_eq!(validate_map(&endless, u64::MAX, 2), Err(MapError::Outside));
        let longer = pieces(&[(0, 10)]);
        assert_eq!(validate_map(&longer, 100, 9), Err(MapError::Payload));
    }

    #[test]
    fn a_map_of_0_1_needs_pairs_of_numbers() {
        let limits = Limits::default();
        let read = |text: &[u8]| {
            let mut keywords = SparseKeywords::default();
            assert_eq!(keywords.set_map(text, &limits), Ok(()));
            (!keywords.is_malformed).then_some(keywords.map)
        };
        assert_eq!(read(b"0,10,20,5"), Some(pieces(&[(0, 10), (20, 5)])));
        assert_eq!(read(b""), Some(Vec::new()));
        for odd in [&b"0,10,20"[..], b"0,", b"0,-1", b"0,1,", b"x,1"] {
            assert_eq!(read(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn a_map_of_0_0_needs_an_offset_before_each_length() {
        let limits = Limits::default();
        let mut keywords = SparseKeywords {
            offset: Some(3),
            ..SparseKeywords::default()
        };
        assert_eq!(keywords.add_len(Some(5), &limits), Ok(()));
        assert_eq!(keywords.map, pieces(&[(3, 5)]));
        assert!(keywords.is_sparse && !keywords.is_malformed);
        assert_eq!(keywords.add_len(Some(5), &limits), Ok(()));
        assert!(keywords.is_malformed);
    }

    #[test]
    fn a_map_of_1_0_may_break_anywhere_between_records() {
        let mut text = b"60\n".to_vec();
        for piece in 0..60 {
            text.extend_from_slice(format!("{}\n{}\n", piece * 100_000, 7).as_bytes());
        }
        text.resize(text.len().next_multiple_of(512), 0);
        let limits = Limits::default();
        let mut reader = MapReader::default();
        let mut found = None;
        for record in text.as_chunks::<512>().0 {
            assert_eq!(found, None);
            found = reader.read(record, &limits).expect("sound");
        }
        let found = found.expect("complete");
        assert_eq!(found.len(), 60);
        assert_eq!(
            found.last(),
            Some(&Segment {
                offset: 5_900_000,
                len: 7
            })
        );
    }

    // Promises: limit-sparse
    #[test]
    fn a_sparse_map_has_a_limit_and_empty_pieces_are_none() {
        let limits = Limits {
            sparse_segments: 1,
            ..Limits::default()
        };
        let mut record = [b'\n'; 512];
        record[..14].copy_from_slice(b"3\n1\n0\n2\n5\n9\n0\n");
        let map = MapReader::default().read(&record, &limits);
        assert_eq!(map, Ok(Some(pieces(&[(2, 5)]))));
        record[..14].copy_from_slice(b"3\n1\n0\n2\n5\n9\n9\n");
        let map = MapReader::default().read(&record, &limits);
        assert!(matches!(map, Err(MapFault::Exceeded(_))));
    }

    #[test]
    fn sparse_map_of_non_numbers_is_rejected() {
        let fault = MapReader::default().read(&[0; 512], &Limits::default());
        assert_eq!(fault, Err(MapFault::Map(MapError::Malformed)));
        let fault = MapReader::default().read(&[b'9'; 512], &Limits::default());
        assert_eq!(fault, Err(MapFault::Map(MapError::Malformed)));
    }
}
