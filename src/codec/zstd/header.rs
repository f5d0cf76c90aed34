//! Frame and block headers, as far as they say where a frame ends and what it needs.

use crate::codec::Cause;

pub(super) const MAGIC: u32 = 0xfd2f_b528;
pub(super) const MAGIC_LEN: usize = 4;
pub(super) const BLOCK_HEADER_LEN: usize = 3;

pub(super) const MAX_BLOCK_LEN: usize = 128 << 10;

const SINGLE_SEGMENT: u8 = 1 << 5;
const RESERVED: u8 = 1 << 3;
const CHECKSUM: u8 = 1 << 2;
/// Descriptor, window, dictionary id, content size.
const MAX_HEADER_LEN: usize = 1 + 1 + 4 + 8;

/// Whether `magic` starts a frame as versions before 0.8 of the reference program wrote them.
pub(super) fn is_legacy(magic: u32) -> bool {
    magic == 0xfd2f_b51e || (0xfd2f_b522..MAGIC).contains(&magic)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// Bytes behind the magic.
    pub(super) len: usize,
    pub(super) window_len: u64,
    pub(super) content_len: Option<u64>,
    pub(super) has_checksum: bool,
}

impl Header {
    /// Reads the header with `peek`, which copies bytes after the magic; `None` if they are too few.
    pub(super) fn read(peek: impl Fn(&mut [u8]) -> bool) -> Option<Result<Self, Cause>> {
        let mut first = [0];
        if !peek(&mut first) {
            return None;
        }
        let [descriptor] = first;
        let window_len = usize::from(descriptor & SINGLE_SEGMENT == 0);
        let dictionary_len = [0, 1, 2, 4].get(usize::from(descriptor & 3)).copied()?;
        let content_len_len = match descriptor >> 6 {
            0 => usize::from(descriptor & SINGLE_SEGMENT != 0),
            code => 1 << code,
        };
        let len = 1 + window_len + dictionary_len + content_len_len;
        let mut bytes = [0; MAX_HEADER_LEN];
        let bytes = bytes.get_mut(..len)?;
        if !peek(bytes) {
            return None;
        }
        let (window, fields) = bytes.get(1..)?.split_at_checked(window_len)?;
        let (dictionary, content_len) = fields.split_at_checked(dictionary_len)?;
        let header = Self::parse(descriptor, window, little_endian(dictionary), content_len);
        Some(header.map(|header| Self { len, ..header }))
    }

    fn parse(
        descriptor: u8,
        window: &[u8],
        dictionary: u64,
        content_len: &[u8],
    ) -> Result<Self, Cause> {
        if descriptor & RESERVED != 0 {
            return Err(Cause::unsupported(
                "the reserved bit is set in a frame header",
            ));
        }
        if dictionary != 0 {
            return Err(Cause::Unsupported(format!(
                "the frame needs the dictionary with id {dictionary}"
            )));
        }
        let content_len = match content_len.len() {
            0 => None,
            2 => Some(little_endian(content_len) + 256),
            _ => Some(little_endian(content_len)),
        };
        let window_len = match window.first() {
            Some(byte) => {
                let base = 1_u64 << (10 + (byte >> 3));
                base + base / 8 * u64::from(byte & 7)
            }
            None => content_len.unwrap_or_default(),
        };
        Ok(Self {
            len: 0,
            window_len,
            content_len,
            has_checksum: descriptor & CHECKSUM != 0,
        })
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) is_last: bool,
    pub(super) packed_len: usize,
    pub(super) plain_upper_bound: u64,
}

impl Block {
    /// Parses a block header; `None` for an unknown type.
    pub(super) fn parse(header: [u8; BLOCK_HEADER_LEN]) -> Option<Self> {
        let [low, middle, high] = header;
        let word = u32::from_le_bytes([low, middle, high, 0]);
        let len = word >> 3;
        let (packed_len, plain_upper_bound) = match word >> 1 & 3 {
            0 => (len, len.into()),
            1 => (1, len.into()),
            2 => (len, MAX_BLOCK_LEN as u64),
            _ => return None,
        };
        Some(Self {
            is_last: word & 1 != 0,
            packed_len: packed_len as usize,
            plain_upper_bound,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Option<Result<Header, Cause>> {
        Header::read(|target| {
            bytes
                .get(..target.len())
                .map(|bytes| target.copy_from_slice(bytes))
                .is_some()
        })
    }

    #[test]
    fn header_is_read_when_complete() {
        // Two bytes of content size, a window of 2^10 * (1 + 3/8), a checksum.
        let bytes = [0x44, 0x03, 0x01, 0x02];
        for len in 0..bytes.len() {
            assert_eq!(read(&bytes[..len]), None);
        }
        let header = Header {
            len: 4,
            window_len: 1408,
            content_len: Some(0x201 + 256),
            has_checksum: true,
        };
        assert_eq!(read(&bytes), Some(Ok(header)));
    }

    #[test]
    fn single_segment_window_is_as_long_as_its_content() {
        let header = Header {
            len: 2,
            window_len: 77,
            content_len: Some(77),
            has_checksum: false,
        };
        assert_eq!(read(&[0x20, 77]), Some(Ok(header)));
    }

    #[test]
    fn dictionary_is_unsupported_unless_its_id_is_zero() {
        assert!(matches!(
            read(&[0x21, 9, 0]),
            Some(Err(Cause::Unsupported(_)))
        ));
        assert!(matches!(
            read(&[0x21, 0, 0]),
            Some(Ok(Header { len: 3, .. }))
        ));
    }

    #[test]
    fn block_headers_are_parsed() {
        let block = |word: u32| {
            let [low, middle, high, _] = word.to_le_bytes();
            Block::parse([low, middle, high])
        };
        let some = |last, packed_len, plain_upper_bound| {
            Some(Block {
                is_last: last,
                packed_len,
                plain_upper_bound,
            })
        };
        assert_eq!(block(100 << 3 | 1), some(true, 100, 100));
        assert_eq!(block(100 << 3 | 1 << 1), some(false, 1, 100));
        assert_eq!(block(100 << 3 | 2 << 1), some(false, 100, 128 << 10));
        assert_eq!(block(100 << 3 | 3 << 1), None);
    }
}
