//! Stream headers and footers, block headers, LZMA2 chunk headers, and the integers in them.

use flate2::Crc;

use crate::codec::Cause;

pub(super) const MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
const FOOTER_MAGIC: [u8; 2] = *b"YZ";
/// Bytes of a stream header, and of a stream footer.
pub(super) const STREAM_HEADER_LEN: usize = 12;
pub(super) const MAX_INTEGER_LEN: usize = 9;
/// The longest LZMA2 chunk header, but for properties, which count as payload.
pub(super) const CHUNK_HEADER_LEN: usize = 5;

const FILTER_COUNT: u8 = 0x03;
const FLAGS_RESERVED: u8 = 0x3c;
const HAS_PACKED_LEN: u8 = 0x40;
const HAS_PLAIN_LEN: u8 = 0x80;
const LZMA2: u64 = 0x21;

pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// The checksum a stream has behind each of its blocks, by its number in the format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Check(pub(super) u8);

impl Check {
    /// The check with this number; `None` when it is not one of none, CRC32, CRC64, SHA-256.
    pub(super) fn new(number: u8) -> Option<Self> {
        matches!(number, 0 | 1 | 4 | 10).then_some(Self(number))
    }

    pub(super) fn len(self) -> usize {
        match self.0 {
            0 => 0,
            1 => 4,
            4 => 8,
            _ => 32,
        }
    }

    pub(super) fn parse_stream_header(header: [u8; STREAM_HEADER_LEN]) -> Result<Self, Cause> {
        let [m0, m1, m2, m3, m4, m5, zero, number, crc @ ..] = header;
        if [m0, m1, m2, m3, m4, m5] != MAGIC {
            return Err(Cause::malformed("this is no xz stream"));
        }
        check_crc("stream header", &[zero, number], u32::from_le_bytes(crc))?;
        let known = Self::new(number).filter(|_| zero == 0);
        known.ok_or_else(|| Cause::Unsupported(format!("xz check number {number}")))
    }

    pub(super) fn stream_header(self) -> Vec<u8> {
        let flags = [0, self.0];
        [&MAGIC[..], &flags, &crc32(&flags).to_le_bytes()].concat()
    }

    pub(super) fn stream_footer(self, index_len: u64) -> Vec<u8> {
        let words = (index_len / 4).saturating_sub(1);
        let words = u32::try_from(words).unwrap_or(u32::MAX).to_le_bytes();
        let fields = [&words[..], &[0, self.0]].concat();
        [&crc32(&fields).to_le_bytes()[..], &fields, &FOOTER_MAGIC].concat()
    }
}

pub(super) fn check_crc(what: &'static str, bytes: &[u8], expected: u32) -> Result<(), Cause> {
    Cause::compare_checksums(what, expected, crc32(bytes))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) header_len: usize,
    /// Bytes between header and padding, if it says so.
    pub(super) packed_len: Option<u64>,
    pub(super) plain_len: Option<u64>,
    /// Memory of its dictionary.
    pub(super) needed_bytes: u64,
}

/// Bytes of the block header whose first byte, which is not zero, is `first`.
pub(super) fn block_header_len(first: u8) -> usize {
    (usize::from(first) + 1) * 4
}

impl Block {
    pub(super) fn parse(header: &[u8]) -> Result<Self, Cause> {
        let malformed = || Cause::malformed("a block header");
        let (body, crc) = header.split_last_chunk().ok_or_else(malformed)?;
        check_crc("block header", body, u32::from_le_bytes(*crc))?;
        let (_, [flags, fields @ ..]) = body.split_first().ok_or_else(malformed)? else {
            return Err(malformed());
        };
        if flags & FLAGS_RESERVED != 0 {
            return Err(Cause::unsupported(
                "reserved bits are set in a block header",
            ));
        }
        let mut fields = fields;
        let mut field = |present: u8| {
            if flags & present == 0 {
                return Ok(None);
            }
            take_integer(&mut fields).ok_or_else(malformed).map(Some)
        };
        let packed_len = field(HAS_PACKED_LEN)?;
        let plain_len = field(HAS_PLAIN_LEN)?;
        let mut dictionary = None;
        for _ in 0..=flags & FILTER_COUNT {
            let (id, properties) = take_filter(&mut fields).ok_or_else(malformed)?;
            dictionary = (id == LZMA2).then_some(properties);
        }
        let Some(dictionary) = dictionary else {
            return Err(Cause::unsupported(
                "a filter chain that does not end in LZMA2",
            ));
        };
        let &[code] = dictionary else {
            return Err(malformed());
        };
        Ok(Self {
            header_len: header.len(),
            packed_len,
            plain_len,
            needed_bytes: dictionary_len(code).ok_or_else(malformed)?,
        })
    }

    pub(super) fn len_after_header(&self, check: Check) -> Option<u64> {
        let packed_len = self.packed_len?;
        packed_len
            .checked_add(padding_len(packed_len))?
            .checked_add(check.len() as u64)
    }
}

/// Zero bytes behind `len` bytes, up to a multiple of four.
pub(super) fn padding_len(len: u64) -> u64 {
    len.wrapping_neg() % 4
}

fn take_filter<'a>(fields: &mut &'a [u8]) -> Option<(u64, &'a [u8])> {
    let id = take_integer(fields)?;
    let len = usize::try_from(take_integer(fields)?).ok()?;
    let (properties, rest) = fields.split_at_checked(len)?;
    *fields = rest;
    Some((id, properties))
}

fn dictionary_len(code: u8) -> Option<u64> {
    match code {
        0..40 => Some((2 | u64::from(code & 1)) << (code / 2 + 11)),
        40 => Some(u32::MAX.into()),
        _ => None,
    }
}

/// Reads an integer off the front of `bytes`; `None` when it is cut, too long, or not minimal.
pub(super) fn take_integer(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for (number, &byte) in bytes.iter().take(MAX_INTEGER_LEN).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * number);
        if byte & 0x80 == 0 {
            *bytes = bytes.get(number + 1..)?;
            return (byte != 0 || number == 0).then_some(value);
        }
    }
    None
}

/// Appends `value`, which has at most 63 bits.
pub(super) fn put_integer(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Chunk {
    End,
    Data {
        /// Bytes with its header.
        packed_len: u64,
        plain_len: u64,
    },
}

impl Chunk {
    /// Reads a chunk header; `None` for too few bytes.
    pub(super) fn parse(header: &[u8]) -> Option<Result<Self, Cause>> {
        let word = |at: usize| {
            let bytes = header.get(at..)?.first_chunk()?;
            Some(u64::from(u16::from_be_bytes(*bytes)))
        };
        let control = *header.first()?;
        Some(Ok(match control {
            0 => Self::End,
            1 | 2 => Self::Data {
                packed_len: 3 + word(1)? + 1,
                plain_len: word(1)? + 1,
            },
            0x80.. => Self::Data {
                packed_len: 5 + u64::from(control >= 0xc0) + word(3)? + 1,
                plain_len: (u64::from(control & 0x1f) << 16) + word(1)? + 1,
            },
            _ => return Some(Err(Cause::Malformed(format!("LZMA2 control {control:#x}")))),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn integers_round_trip(value in 0..u64::MAX >> 1, small in 0..300_u64) {
            for value in [value, small] {
                let mut bytes = Vec::new();
                put_integer(&mut bytes, value);
                prop_assert!(bytes.len() <= MAX_INTEGER_LEN);
                let mut rest = bytes.as_slice();
                prop_assert_eq!(take_integer(&mut rest), Some(value));
                prop_assert!(rest.is_empty());
                prop_assert_eq!(take_integer(&mut &bytes[..bytes.len() - 1]), None);
            }
        }

        #[test]
        fn any_block_header_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let crc = crc32(&bytes).to_le_bytes();
            let header = [&bytes[..], &crc].concat();
            let _outcome = Block::parse(&header);
        }
    }

    #[test]
    fn dictionaries_have_the_lengths_of_the_format() {
        assert_eq!(dictionary_len(0), Some(4 << 10));
        assert_eq!(dictionary_len(1), Some(6 << 10));
        assert_eq!(dictionary_len(22), Some(8 << 20));
        assert_eq!(dictionary_len(40), Some(u32::MAX.into()));
        assert_eq!(dictionary_len(41), None);
    }

    #[test]
    fn stream_header_round_trips() {
        for number in [0, 1, 4, 10] {
            let check = Check::new(number).unwrap();
            let header = check.stream_header();
            assert_eq!(
                Check::parse_stream_header(*header.first_chunk().unwrap()),
                Ok(check)
            );
        }
        assert_eq!(Check::new(2), None);
    }
}
